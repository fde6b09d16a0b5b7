"""What each rank tells about itself and its node, and what of that stands in a job's way."""

import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import seqpar
from seqpar.launch.hardware.cluster_traps import Facts, Trap, find_traps
from seqpar.mesh import Mesh
from seqpar.watchdog import these

SKEW_S = 1.0  # clocks that differ by more make time limits and file times wrong
ROOM_BYTES = 10 * 2**30
SLOW_SHARE = 0.7  # of the median speed
WRITTEN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Self:
    """What a rank tells about itself."""

    host: str
    local_rank: int
    device: str
    cores: int
    flops_per_s: dict[str, float]  # by type of number
    versions: dict[str, str]
    traps: list[tuple[bool, str]]
    seen: bool  # whether the first one's file in the output folder is there


def about_self(mesh: Mesh, flops: dict[str, float], room: dict[str, Any], on_cpu: bool = False) -> Self:
    """Returns what this rank has to tell; ``on_cpu`` where GPUs are not wanted."""
    on_gpu = mesh.device.type == "cuda"
    name = torch.cuda.get_device_name(mesh.device) if on_gpu else platform.machine()
    seen = not room["file"] or os.path.exists(room["file"])
    traps = [(trap.error, trap.text) for trap in find_traps(os.environ, _facts(mesh, on_cpu))]
    host = mesh.hosts[mesh.world.index]
    return Self(host, mesh.begin.local_rank, f"{mesh.device} {name}", _cores(), flops, versions(), traps, seen)


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
        num_nodes=mesh.begin.num_nodes,
        local_world=mesh.begin.local_world,
        cores=_cores(),
        host_cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        slingshot=os.path.isdir("/sys/class/cxi"),
        kernel=(int(release[0]), int(release[1])) if release[0].isdigit() and release[1].isdigit() else (6, 0),
        alone=mesh.begin.warning,
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


def judge(num_seq: int, ranks: Sequence[Self], offsets: Sequence[float], room: dict[str, Any]) -> list[Trap]:
    """Returns everything that is wrong or doubtful, errors first."""
    found = [*_folder(ranks, room), *_unequal(ranks)]
    skewed = [rank for rank, offset in enumerate(offsets) if abs(offset) > SKEW_S]
    if skewed:
        text = f"clocks of {these(skewed)} are up to {max(map(abs, offsets)):.1f} s off the first one's: tell the admin"
        found.append(Trap(text))
    by_text: dict[tuple[bool, str], list[int]] = {}
    for rank, one in enumerate(ranks):
        for error, text in one.traps:
            by_text.setdefault((error, text), []).append(rank)
    for (error, text), those in by_text.items():
        found.append(Trap(text if len(those) == len(ranks) else f"{these(those)}: {text}", error))
    across = crossing(num_seq, ranks)
    if across:
        told = "; ".join(f"{these(range(at, at + num_seq))} over {', '.join(hosts)}" for at, hosts in across[:3])
        more = f" and {len(across) - 3} more" if len(across) > 3 else ""
        found.append(
            Trap(
                f"sequence groups cross nodes ({told}{more}): every attention layer uses the network. Let --seqpar "
                "divide the ranks of a node, and place ranks in blocks (srun -m block)"
            )
        )
    return sorted(found, key=lambda trap: not trap.error)


def _folder(ranks: Sequence[Self], room: dict[str, Any]) -> list[Trap]:
    if room["fault"]:
        return [Trap(room["fault"], error=True)]
    found = []
    if room["out"] and room["free"] < ROOM_BYTES:
        found.append(Trap(f"--out {room['out']} has {room['free'] / 2**30:.1f} GiB left: checkpoints may need more"))
    blind = [rank for rank, one in enumerate(ranks) if not one.seen]
    if blind:
        hosts = ", ".join(dict.fromkeys(ranks[rank].host for rank in blind))
        text = f"--out {room['out']} is another folder for {these(blind)} on {hosts}: name one on a shared file system"
        found.append(Trap(text, error=True))
    return found


def _unequal(ranks: Sequence[Self]) -> list[Trap]:
    """Returns what tells ranks apart that should be alike: versions and speed."""
    found = []
    for name in ranks[0].versions:
        by_version: dict[str, list[int]] = {}
        for rank, one in enumerate(ranks):
            by_version.setdefault(one.versions.get(name, "none"), []).append(rank)
        if len(by_version) > 1:
            told = "; ".join(f"{version} on {these(those)}" for version, those in by_version.items())
            found.append(Trap(f"ranks differ in their {name} ({told}): start all from one environment", error=True))
    for dtype in ranks[0].flops_per_s:
        usual = sorted(one.flops_per_s[dtype] for one in ranks)[len(ranks) // 2]
        for rank, one in enumerate(ranks):
            share = one.flops_per_s[dtype] / usual
            if share < SLOW_SHARE:
                text = f"rank {rank} on {one.host} computes at {share:.2f} of the usual speed in {dtype}"
                found.append(Trap(f"{text}: all wait for it"))
    return found


def crossing(num_seq: int, ranks: Sequence[Self]) -> list[tuple[int, list[str]]]:
    """Returns the first rank and the nodes of each sequence group that lies on several."""
    groups = [
        (at, list(dict.fromkeys(one.host for one in ranks[at : at + num_seq]))) for at in range(0, len(ranks), num_seq)
    ]
    return [(at, hosts) for at, hosts in groups if len(hosts) > 1]


def memory_of(mesh: Mesh) -> int:
    """Returns the bytes that this rank may fill: its GPU's, or its share of the node's."""
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.begin.local_world
