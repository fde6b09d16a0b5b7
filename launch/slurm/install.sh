#!/bin/sh
# Called by the definitions of images (*.def), in the image: installs the checkout in /opt/seqpar next to the image's torch.
set -eu
cd "${1:-/opt/seqpar}"

# what the base images put on PATH for containers, which a build may not see
for folder in /opt/conda/bin /opt/venv/bin; do
    [ ! -x "$folder/python" ] || PATH=$folder:$PATH
done
export PATH PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
python=$(command -v python || command -v python3)
case $("$python" -c 'import sys; print(*sys.version_info[:2])') in
    3\ ?) echo "error: $python is older than Python 3.10" >&2; exit 1 ;;
esac
version() { "$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.version.hip)'; }

before=$(version)
grep -v '^torch==' constraints.txt > /tmp/constraints.txt  # the image's own stays
"$python" -m pip install -c /tmp/constraints.txt '.[itk,dicom,tune]'
if [ "$(version)" != "$before" ]; then
    echo "error: pip replaced torch $before by $(version): name another base image, or loosen pyproject.toml" >&2
    exit 1
fi
command -v python > /dev/null || ln -s "$python" /usr/local/bin/python
rm /tmp/constraints.txt
