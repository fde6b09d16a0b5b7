"""The doctor's report: tables of ranks and links for people, a JSON record for the planner."""

import sys
from collections.abc import Sequence
from typing import Any

from seqpar.launch.hardware.devices import GIB
from seqpar.launch.hardware.findings import crossing
from seqpar.launch.hardware.rank_facts import RankFacts, device_memory
from seqpar.mesh import Mesh


def print_ranks(mesh: Mesh, ranks: Sequence[RankFacts]) -> None:
    """Prints versions and a row for each rank."""
    print(", ".join(f"{name} {version}" for name, version in ranks[0].versions.items()))
    size, world = mesh.seq.size, mesh.world.size
    nodes = len(set(mesh.hosts))
    print(f"{world} rank(s) on {nodes} node(s) = data {world // size} x seq {size}, by {mesh.launcher.by}")
    names = ("rank", "host", "local", "device", "cores", "seq group", "data group")
    rows = [(*names, *(f"{name} TFLOP/s" for name in ranks[0].flops_per_s))]
    for rank, facts in enumerate(ranks):
        numbers = (rank, facts.host, facts.local_rank, facts.device, facts.cores, rank // size, rank % size)
        speeds = (f"{rate / 1e12:.3g}" for rate in facts.flops_per_s.values())
        rows.append((*map(str, numbers), *speeds))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    sys.stdout.flush()


def print_groups(groups: dict[str, dict[str, Any]]) -> None:
    """Prints latency and bandwidth of each group's collectives."""
    for name, group in groups.items():
        for kind, figures in group.items():
            if isinstance(figures, dict):
                speed = f"{figures['latency_s'] * 1e6:,.0f} us, {figures['bytes_per_s'] / 1e9:.3g} GB/s"
                largest = f"up to {figures['seconds'][-1][0]:,} B"
                print(f"{name} groups of {group['size']}: {kind} {speed} sent per rank, {largest}")


def folder_line(folder: dict[str, Any]) -> str:
    """Returns the output folder's free space and speed, "" where there is none or it cannot be written."""
    if not folder["out"] or folder["fault"]:
        return ""
    free, speed = folder["free"] / GIB, folder["bytes_per_s"] / 1e6
    return f"{folder['out']}: {free:,.0f} GiB free, {speed:,.0f} MB/s written; "


def record(mesh: Mesh, ranks: Sequence[RankFacts], groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns what the planner reads; every speed is the slowest rank's."""
    return {
        "device": ranks[0].device.partition(" ")[2],
        "memory_bytes": device_memory(mesh),  # of one rank
        "world": mesh.world.size,
        "seqpar": mesh.seq.size,
        "nodes": len(set(mesh.hosts)),
        "seq_crosses_nodes": bool(crossing(mesh.seq.size, ranks)),
        "matmul_flops_per_s": {name: min(facts.flops_per_s[name] for facts in ranks) for name in ranks[0].flops_per_s},
        "groups": groups,
        "versions": ranks[0].versions,
    }
