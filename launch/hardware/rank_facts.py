"""What each rank tells about itself and its node, and what of that stands in a job's way."""

import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import seqpar
from seqpar.launch.hardware.cluster_traps import Facts, find_traps
from seqpar.mesh import Mesh

SKEW_S = 1.0  # clocks that differ by more make time limits and file times wrong
ROOM_BYTES = 10 * 2**30
SLOW_SHARE = 0.7  # of the median speed
WRITTEN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells about itself."""

    host: str
    local_rank: int
    device: str
    cores: int
    flops_per_s: dict[str, float]  # by type of number
    versions: dict[str, str]
    traps: list[tuple[bool, str]]
    seen: bool  # whether the first one's file in the output folder is there


def about_self(mesh: Mesh, flops: dict[str, float], room: dict[str, Any], on_cpu: bool = False) -> RankFacts:
    """Returns what this rank has to tell; ``on_cpu`` where GPUs are not wanted."""
    on_gpu = mesh.device.type == "cuda"
    name = torch.cuda.get_device_name(mesh.device) if on_gpu else platform.machine()
    seen = not room["file"] or os.path.exists(room["file"])
    traps = [(trap.error, trap.text) for trap in find_traps(os.environ, _facts(mesh, on_cpu))]
    host = mesh.hosts[mesh.world.index]
    return RankFacts(host, mesh.launcher.local_rank, f"{mesh.device} {name}", _cores(), flops, versions(), traps, seen)


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all ranks."""
    found = {"seqpar": seqpar.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        found["ROCm" if torch.version.hip else "CUDA"] = str(torch.version.hip or torch.version.cuda)
        found["RCCL" if torch.version.hip else "NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _facts(mesh: Mesh, on_cpu: bool) -> Facts:
    release = platform.release().split(".")
    return Facts(
        on_gpu=mesh.device.type == "cuda",
        on_cpu=on_cpu,
        rocm=torch.version.hip is not None,
        num_gpus=torch.cuda.device_count(),
        num_nodes=mesh.launcher.num_nodes,
        local_world=mesh.launcher.local_world,
        cores=_cores(),
        host_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        slingshot=os.path.isdir("/sys/class/cxi"),
        kernel=(int(release[0]), int(release[1])) if release[0].isdigit() and release[1].isdigit() else (6, 0),
        alone=mesh.launcher.warning,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_speed(out: Path) -> dict[str, Any]:
    """Returns the folder's free bytes and how fast a file was written through to it; the file is left, emptied."""
    out.mkdir(parents=True, exist_ok=True)
    path, block = out / f"doctor.{os.getpid()}.tmp", os.urandom(2**20)
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


def memory_of(mesh: Mesh) -> int:
    """Returns the bytes that this rank may fill: its GPU's, or its share of the node's."""
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.launcher.local_world
