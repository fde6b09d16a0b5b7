#!/usr/bin/env bash
# Sourced by the job scripts: . image.sh ACT. With SEQPAR_IMAGE, the file of an Apptainer image (or the folder of a sandbox),
# `inside` begins the lines that run in it, and `program` is the image's own ACT; without, `inside` is empty and `program`
# is that of the checkout, or of the environment.
#   SEQPAR_BIND          folders that ranks need besides the working directory: /scratch,/data
#   SEQPAR_IMAGE_FLAGS   for apptainer exec, in place of --nv or --rocm, which follow from what the first node has
# shellcheck disable=SC2034,SC2154  # variables of the job scripts
inside=()
program=("$home/launch/$1.py")
[ -e "${program[0]}" ] || program=(-m "seqpar.cli.$1")  # installed from a wheel, not a checkout
if [ -n "${SEQPAR_IMAGE:-}" ]; then
    refuse() {
        echo "error: SEQPAR_IMAGE $SEQPAR_IMAGE: $1; or unset it, to use the environment in SEQPAR_ENV" >&2
        exit 2
    }
    [ -e "$SEQPAR_IMAGE" ] || refuse "there is no such file: build it from launch/slurm/*.def, and give its whole path"
    command -v apptainer > /dev/null || refuse "there is no apptainer on $(hostname): name its module in SEQPAR_MODULES"
    [ -z "${SEQPAR_ENV_TAR:-}" ] || refuse "it has an environment of its own: unset SEQPAR_ENV_TAR"
    gpu=''
    if [ -e /dev/kfd ] || command -v rocm-smi > /dev/null; then gpu=--rocm; fi
    if [ -e /dev/nvidiactl ] || command -v nvidia-smi > /dev/null; then gpu=--nv; fi
    binds=$PWD${SEQPAR_BIND:+,$SEQPAR_BIND}
    for folder in "${nnUNet_raw:-}" "${nnUNet_preprocessed:-}" "${nnUNet_results:-}" "${SEQPAR_CACHE:-}" "${TMPDIR:-}"; do
        [ ! -d "$folder" ] || binds+=,$folder
    done
    # shellcheck disable=SC2206  # one flag or several
    inside=(apptainer exec ${SEQPAR_IMAGE_FLAGS-$gpu} --bind "$binds" --pwd "$PWD" "$SEQPAR_IMAGE")
    program=(-P -m "seqpar.cli.$1")  # -P: not that of a checkout in the working directory
fi
