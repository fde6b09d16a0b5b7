"""Free memory of this host, within the limits of control groups of either version."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from seqpar.cluster.host_memory import Memory, memory_here, whole_memory

GIB = 2**30
HOST = "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 20971520 kB\nHugePages_Total: 0\n"
V1 = "4:cpu:/\n9:memory,hugetlb:/slurm/job_7/step_0\n0::/system\n"
V2 = "0::/slurm/job_7/step_0\n"


def system(root: Path, group: str, files: Mapping[str, Mapping[str, object]]) -> Path:
    """Writes the files by which the kernel speaks of memory; ``files`` by folder below sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(HOST)
    (root / "proc/self/cgroup").write_text(group)
    for folder, contents in files.items():
        place = root / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (place / name).write_text(f"{content}\n")
    return root


def v2(limit: object, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"anon {used - cached}\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def v1(limit: int, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"inactive_file 1\ntotal_inactive_file {cached}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("group", "files", "free", "whole", "limit"),
    [
        ("", {}, 20, 32, "its memory"),
        (V2, {"slurm/job_7/step_0": v2("max", GIB), "slurm/job_7": v2(64 * GIB, GIB)}, 20, 32, "its memory"),
        (V2, {"slurm/job_7/step_0": v2("max", GIB), "slurm/job_7": v2(16 * GIB, 6 * GIB, 2 * GIB)}, 12, 16,
         "the limit of control group /slurm/job_7"),
        (V2, {"slurm/job_7/step_0": v2(30 * GIB, 0), "": v2(12 * GIB, 4 * GIB)}, 8, 12,
         "the limit of control group /"),
        (V1, {"memory/slurm/job_7": v1(8 * GIB, 9 * GIB, GIB // 2), "memory": v1(2**63 - 4096, GIB)}, 0, 8,
         "the limit of control group /slurm/job_7"),
        (V1, {"memory": v1(10 * GIB, 4 * GIB, GIB)}, 7, 10, "the limit of control group /"),
        (V2, {"slurm/job_7": {"memory.max": "many"}}, 20, 32, "its memory"),
    ],
)  # fmt: skip
def test_what_is_free_is_the_least_of_the_host_and_the_groups_around_this_process(
    tmp_path, group, files, free, whole, limit
) -> None:
    root = system(tmp_path, group, files)
    assert memory_here(root) == Memory(free * GIB, whole * GIB, limit)
    known = [int(f["memory.max"]) for f in files.values() if str(f.get("memory.max", "")).isdigit()]
    known += [f["memory.limit_in_bytes"] for f in files.values() if "memory.limit_in_bytes" in f]
    assert whole_memory(root) == min([32 * GIB, *known])


def test_this_host_has_free_memory_and_less_than_all() -> None:
    assert 0 < memory_here().free < memory_here().whole == whole_memory()
