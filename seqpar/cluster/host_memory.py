"""The memory and cores of this host that this process may use, within the limits of its control groups."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SYSTEM, _KIB = Path("/"), 2**10
# where control groups are mounted, their files of limit and use, and what of the use can be dropped, by version
_VERSIONS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("sys/fs/cgroup", "memory.max", "memory.current", ""),
}


@dataclass(frozen=True)
class Memory:
    """The ``free`` bytes that new tensors may take, of ``whole`` bytes; ``limit`` says what bounds them."""

    free: int
    whole: int
    limit: str = "its memory"


def memory_here(system: Path = _SYSTEM) -> Memory:
    """Returns the memory of this host, or of the control group of this process that leaves it less.

    What the kernel can drop, cached files above all, counts as free; swap does not. ``system``: the root of the file
    system, by which tests show other machines.
    """
    host = _host(system)
    return min([host, *_control_groups(system, host.whole)], key=lambda memory: memory.free)


def whole_memory(system: Path = _SYSTEM) -> int:
    """Returns the bytes that this process could have on an idle host."""
    host = _host(system)
    return min(memory.whole for memory in [host, *_control_groups(system, host.whole)])


def cores_here(system: Path = _SYSTEM) -> int:
    """Returns how many cores this process may use: those of its affinity, at most its control groups' quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(system)]))


def _quotas(system: Path) -> Iterator[int]:
    """Yields how many cores each control group of this process may keep busy, if it sets a limit."""
    for version, group in _groups_of(system, "cpu"):
        folder = system / ("", "sys/fs/cgroup/cpu", "sys/fs/cgroup")[version] / group.relative_to("/")
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        try:
            quota, period = " ".join((folder / name).read_text().strip() for name in files).split()
            if quota not in ("max", "-1"):
                yield -(-int(quota) // int(period))
        except (OSError, ValueError):
            continue


def _groups_of(system: Path, kind: str) -> Iterator[tuple[int, Path]]:
    """Yields the control groups of this process that limit ``kind``, and those around them, each with its version.

    A container may see its own group as the root, though the kernel names it by its path outside.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, inner = line.split(":", 2)
        if not kinds or kind in kinds.split(","):
            for group in [Path(inner), *Path(inner).parents]:
                yield (1 if kinds else 2), group


def _host(system: Path) -> Memory:
    sizes = {}
    try:
        for line in (system / "proc/meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            sizes[name] = int(size.split()[0]) * _KIB
        return Memory(sizes["MemAvailable"], sizes["MemTotal"])
    except (OSError, ValueError, IndexError, KeyError):  # not Linux
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Memory(whole, whole)


def _control_groups(system: Path, whole: int) -> Iterator[Memory]:
    """Yields those of this process's control groups, and of the ones around them, that have less than ``whole``."""
    for version, group in _groups_of(system, "memory"):
        mount, limit, use, prefix = _VERSIONS[version]
        folder = system / mount / group.relative_to("/")
        if memory := _control_group(folder, group, limit, use, prefix, whole):
            yield memory


def _control_group(folder: Path, group: Path, limit: str, use: str, prefix: str, whole: int) -> Memory | None:
    """Returns the memory of one control group, None where it sets no limit below ``whole``."""
    try:
        text = (folder / limit).read_text().strip()
        if text == "max" or int(text) >= whole:
            return None
        used = int((folder / use).read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(size) for name, size in pairs if name in (f"{prefix}inactive_file", f"{prefix}active_file"))
    except (OSError, ValueError):
        return None
    return Memory(max(0, int(text) - used + cached), int(text), f"the limit of control group {group}")
