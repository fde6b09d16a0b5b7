"""The doctor's report: tables of ranks and links for people, a JSON record for the planner."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from seqpar.cluster.convolution_speed import Timed
from seqpar.cluster.devices import GIB
from seqpar.cluster.findings import crossing
from seqpar.cluster.rank_facts import RankFacts, device_memory
from seqpar.cluster.start_ranks import started
from seqpar.parallel.mesh import Mesh
from seqpar.quantity import quantity


def print_ranks(mesh: Mesh, ranks: Sequence[RankFacts]) -> None:
    """Prints versions and a row for each rank."""
    print(", ".join(f"{name} {version}" for name, version in ranks[0].versions.items()))
    size, world, pipe = mesh.seq.size, mesh.world.size, mesh.pipe.size
    nodes = len(set(mesh.hosts))
    groups = f"data {mesh.data.size} x {f'pipe {pipe} x ' if pipe > 1 else ''}seq {size}"
    print(f"{quantity(world, 'rank')} on {quantity(nodes, 'node')} = {groups}, {started(mesh.launcher)}")
    names = ("rank", "host", "local", "device", "cores", "seq group", "place" if pipe > 1 else "data group")
    rows = [(*names, *(f"{name} TFLOP/s" for name in ranks[0].flops_per_s))]
    for rank, facts in enumerate(ranks):
        last = mesh.places[rank] if pipe > 1 else rank % size
        numbers = (rank, facts.host, facts.local_rank, facts.device, facts.cores, rank // size, last)
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


def record(
    mesh: Mesh, ranks: Sequence[RankFacts], groups: dict[str, dict[str, Any]], timed: Sequence[Timed]
) -> dict[str, Any]:
    """Returns what the planner reads; every speed is the slowest rank's."""
    return {
        "device": ranks[0].device.partition(" ")[2],
        "memory_bytes": device_memory(mesh),  # of one rank
        "world": mesh.world.size,
        "seqpar": mesh.seq.size,
        "pipe": mesh.pipe.size,
        "nodes": len(set(mesh.hosts)),
        "seq_crosses_nodes": bool(crossing(mesh.seq.size, ranks)),
        "matmul_flops_per_s": {name: min(facts.flops_per_s[name] for facts in ranks) for name in ranks[0].flops_per_s},
        "groups": groups,
        "convolutions": [asdict(each) for each in timed],  # of the first rank
        "versions": ranks[0].versions,
    }
