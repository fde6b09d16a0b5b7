"""What the doctor does on the ranks of a job: measures, judges, prints, records."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.convolution_speed import Timed, advise, time_convolutions
from seqpar.cluster.devices import GIB
from seqpar.cluster.findings import find_problems, groups_across_nodes
from seqpar.cluster.link_speed import clock_offsets, matmul_speeds, measure_groups
from seqpar.cluster.rank_facts import RankFacts, device_memory, facts_of_this_rank, write_speed
from seqpar.cluster.start_ranks import describe_launcher
from seqpar.data.errors import remedy
from seqpar.data.files import write_json
from seqpar.parallel.consensus import broadcast_text, gather_texts
from seqpar.parallel.mesh import Mesh
from seqpar.spatial.memory_format import library_takes_channels_last
from seqpar.text import quantity


def print_ranks(mesh: Mesh, ranks: Sequence[RankFacts]) -> None:
    """Prints versions, the settings in force, and a row for each rank."""
    print(", ".join(f"{name} {value}" for name, value in (ranks[0].versions | ranks[0].in_force).items()))
    size, world, pipe = mesh.seq.size, mesh.world.size, mesh.pipe.size
    nodes = len(set(mesh.hosts))
    groups = f"data {mesh.data.size} x {f'pipe {pipe} x ' if pipe > 1 else ''}seq {size}"
    print(f"{quantity(world, 'rank')} on {quantity(nodes, 'node')} = {groups}, {describe_launcher(mesh.launcher)}")
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
    """Returns the output folder's free space and speed, "" if there is none or it cannot be written."""
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
        "seq_crosses_nodes": bool(groups_across_nodes(mesh.seq.size, ranks)),
        "matmul_flops_per_s": {name: min(facts.flops_per_s[name] for facts in ranks) for name in ranks[0].flops_per_s},
        "groups": groups,
        "convolutions": [asdict(each) for each in timed],  # of the first rank
        "versions": ranks[0].versions,
    }


def examine(mesh: Mesh, options: argparse.Namespace) -> int:
    """Measures and judges; the first rank prints everything. Returns the exit code."""
    flops = matmul_speeds(mesh)
    folder = _output_folder(mesh, options.out)
    own = json.dumps(asdict(facts_of_this_rank(mesh, flops, folder, options.device == "cpu")))
    ranks = [RankFacts(**json.loads(text)) for text in gather_texts(own, mesh.world)]
    if mesh.is_first:
        if folder["file"]:
            os.unlink(folder["file"])  # all have looked
        print_ranks(mesh, ranks)
    offsets = clock_offsets(mesh)
    groups = measure_groups(mesh, options.time_limit / 3)
    timed = time_convolutions(mesh.device)
    findings = find_problems(mesh.seq.size, ranks, offsets, folder)
    if mesh.is_first:
        print_groups(groups)
        _print_convolutions(timed, flops)
        print(folder_line(folder) + f"clocks: {max(map(abs, offsets)) * 1e3:.1f} ms apart at most")
        for trap in findings:
            print(trap)
        wrong = sum(trap.error for trap in findings)
        verdict = (
            f"correct {'the error' if wrong == 1 else 'the errors'} before the job starts"
            if wrong
            else "the job can start"
        )
        print(f"{quantity(wrong, 'error')}, {quantity(len(findings) - wrong, 'warning')}: {verdict}", flush=True)
        if options.json:
            write_json(Path(options.json), record(mesh, ranks, groups, timed))
    return exit_codes.FAULT if any(trap.error for trap in findings) else 0


def _output_folder(mesh: Mesh, out: str) -> dict[str, Any]:
    """Returns what the first rank found in the output folder, on all ranks; it leaves a file there for them to see."""
    folder: dict[str, Any] = {"out": out, "file": "", "free": 0, "bytes_per_s": 0.0, "fault": ""}
    if out and mesh.is_first:
        try:
            folder |= write_speed(Path(out))
        except OSError as error:
            folder["fault"] = f"--out {out} cannot be written ({error.strerror}): name another, or {remedy(error)}"
    return json.loads(broadcast_text(json.dumps(folder), 0, mesh.world))  # type: ignore[no-any-return]


def _print_convolutions(timed: list[Timed], flops: dict[str, float]) -> None:
    print("\n".join(map(str, timed)))
    rate = flops.get("bfloat16", flops["float32"])
    for line in advise(timed, torch.version.hip is not None, rate, os.environ, library_takes_channels_last()):
        print(line)
