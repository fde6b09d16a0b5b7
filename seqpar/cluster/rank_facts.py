"""What each rank reports of itself and its node."""

import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import seqpar
from seqpar.cluster.devices import MIB, usable_cores
from seqpar.cluster.known_traps import Facts, find_traps
from seqpar.parallel.mesh import Mesh
from seqpar.spatial.memory_format import library_takes_channels_last

WRITTEN_BYTES = 64 * MIB


@dataclass(frozen=True)
class RankFacts:
    """What a rank reports: speeds by type of number, versions by library, traps as (is an error, text).

    ``seen``: the file that the first rank wrote into the output folder is there for this rank too.
    ``in_force``: how torch uses the GPU, read back from it.
    """

    host: str
    local_rank: int
    device: str
    cores: int
    flops_per_s: dict[str, float]
    versions: dict[str, str]
    traps: list[tuple[bool, str]]
    seen: bool
    in_force: dict[str, str] = field(default_factory=dict)


def facts_of_this_rank(
    mesh: Mesh, flops_per_s: dict[str, float], folder: dict[str, Any], on_cpu: bool = False
) -> RankFacts:
    """Returns this rank's facts; ``folder`` is what the first rank found, ``on_cpu`` that no GPU is wanted."""
    return RankFacts(
        host=mesh.hosts[mesh.world.index],
        local_rank=mesh.launcher.local_rank,
        device=f"{mesh.device} {device_name(mesh.device)}",
        cores=usable_cores(),
        flops_per_s=flops_per_s,
        versions=versions(),
        traps=[(trap.error, trap.text) for trap in find_traps(os.environ, facts_of(mesh, on_cpu, bool(folder["out"])))],
        seen=not folder["file"] or os.path.exists(folder["file"]),
        in_force=settings_in_force(mesh.device),
    )


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or of this machine's CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all ranks."""
    by_name = {"seqpar": seqpar.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        by_name["ROCm" if torch.version.hip else "CUDA"] = str(torch.version.hip or torch.version.cuda)
        by_name["RCCL" if torch.version.hip else "NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return by_name


def settings_in_force(device: torch.device) -> dict[str, str]:
    """Returns how torch uses a GPU, read back from it; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    words = {None: "unknown", False: "off", True: "on"}
    settings = {"expandable segments": words[_expandable_segments(device)]}
    if torch.version.hip is not None:
        settings["MIOpen with channels last"] = words[library_takes_channels_last()]
    return settings


def _expandable_segments(device: torch.device) -> bool | None:
    """Returns whether segments of the GPU's memory grow, None if torch does not say."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory._snapshot(device).get("allocator_settings", {}).get("expandable_segments")


def facts_of(mesh: Mesh, on_cpu: bool = False, has_run_folder: bool = False) -> Facts:
    """Returns what traps depend on; ``on_cpu``: no GPU is wanted, ``has_run_folder``: one was named."""
    release = platform.release().split(".")
    return Facts(
        on_gpu=mesh.device.type == "cuda",
        on_cpu=on_cpu,
        rocm=torch.version.hip is not None,
        num_gpus=torch.cuda.device_count(),
        num_nodes=mesh.launcher.num_nodes,
        local_world=mesh.launcher.local_world,
        cores=usable_cores(),
        host_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        slingshot=os.path.isdir("/sys/class/cxi"),
        kernel=(int(release[0]), int(release[1])) if release[0].isdigit() and release[1].isdigit() else (6, 0),
        launch_warning=mesh.launcher.warning,
        torch=_numbers(torch.__version__),
        has_run_folder=has_run_folder,
        expandable=_expandable_segments(mesh.device),
        cudnn=0 if torch.version.hip else torch.backends.cudnn.version() or 0,
    )


def _numbers(version: str) -> tuple[int, int, int]:
    """Returns the three numbers of "2.9.1+cu128" or "2.10.0a0+git"."""
    first, second, third = (re.match("[0-9]*", piece) for piece in f"{version}.0.0".split(".")[:3])
    major, minor, patch = (int(match.group() or 0) if match else 0 for match in (first, second, third))
    return major, minor, patch


def write_speed(out: Path) -> dict[str, Any]:
    """Writes a file through to the folder's disk; returns its path, the free bytes and bytes a second.

    The file stays, emptied, for other ranks to look for.
    """
    out.mkdir(parents=True, exist_ok=True)
    path, block = out / f"doctor.{os.getpid()}.tmp", os.urandom(MIB)
    began = time.perf_counter()
    try:
        with open(path, "wb") as file:
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        os.truncate(path, 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return {"file": str(path.absolute()), "free": shutil.disk_usage(out).free, "bytes_per_s": WRITTEN_BYTES / seconds}


def device_memory(mesh: Mesh) -> int:
    """Returns the bytes that this rank may fill: its GPU's, or its share of the node's."""
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.launcher.local_world
