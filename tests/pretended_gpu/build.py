"""Builds the pretended GPU from the headers that torch's CUDA build brings, and starts Python with it.

``python -m tests.pretended_gpu.build FOLDER ARGUMENTS`` builds it in FOLDER and runs ``python ARGUMENTS``.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY, MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"


def _header_folder(name: str) -> Path:
    """Returns the folder in which ``name`` can be included, among the installed packages."""
    packages = Path(sysconfig.get_paths()["purelib"])
    for pattern in ("nvidia/cu*/include", "nvidia/cuda_runtime/include", "triton/backends/nvidia/include"):
        for folder in sorted(packages.glob(pattern)):
            if (folder / name).exists():
                return folder
    raise FileNotFoundError(f"{name} is in no package of {packages}: install a CUDA build of torch for Linux")


def build(target: Path) -> Path:
    """Builds the library in the folder ``target``, and returns its path."""
    target.mkdir(parents=True, exist_ok=True)
    # not the whole of Triton's folder: it has headers of the runtime too, of another version
    wanted, found = target / "include" / "crt", _header_folder("crt/host_defines.h") / "crt"
    wanted.parent.mkdir(exist_ok=True)
    if not wanted.exists():
        wanted.symlink_to(found)
    library = target / LIBRARY
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{LIBRARY}"]
    command += [f"-I{_header_folder('cuda_runtime_api.h')}", f"-I{wanted.parent}"]
    subprocess.run([*command, "-o", str(library), str(HERE / "runtime.cpp")], check=True)
    management = target / MANAGEMENT
    if not management.exists():
        management.symlink_to(library.name)
    return library


def environment(library: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns ``env`` changed so that a Python process has pretended GPUs; PRETENDED_GPUS says how many, 1 if unset."""
    path = [str(HERE / "startup"), str(HERE.parents[1]), *filter(None, [env.get("PYTHONPATH")])]
    more = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": os.pathsep.join(path)}
    return {**env, **more, "OMP_NUM_THREADS": "1"}


def is_pretended(env: Mapping[str, str]) -> bool:
    """Returns whether a process with ``env`` has pretended GPUs."""
    return env.get("LD_PRELOAD", "").endswith(LIBRARY)


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[2:]], environment(build(Path(sys.argv[1]).absolute())))
