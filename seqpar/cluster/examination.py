"""What the doctor does on the ranks of a job: measures, judges, prints, records."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.convolution_speed import Timed, advise, time_convolutions
from seqpar.cluster.doctor_report import folder_line, print_groups, print_ranks, record
from seqpar.cluster.findings import judge
from seqpar.cluster.link_speed import clock_offsets, matmul_speeds, measure_groups
from seqpar.cluster.rank_facts import RankFacts, facts_of_this_rank, write_speed
from seqpar.data.files import write_json
from seqpar.parallel.consensus import broadcast_text, gather_texts
from seqpar.parallel.mesh import Mesh
from seqpar.quantity import quantity


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
    findings = judge(mesh.seq.size, ranks, offsets, folder)
    if mesh.is_first:
        print_groups(groups)
        _print_convolutions(timed, flops)
        print(folder_line(folder) + f"clocks: {max(map(abs, offsets)) * 1e3:.1f} ms apart at most")
        for trap in findings:
            print(trap)
        wrong = sum(trap.error for trap in findings)
        print(f"{quantity(wrong, 'error')}, {quantity(len(findings) - wrong, 'warning')}", flush=True)
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
            folder["fault"] = f"--out {out} cannot be written ({error.strerror}): name another, or make room"
    return json.loads(broadcast_text(json.dumps(folder), 0, mesh.world))  # type: ignore[no-any-return]


def _print_convolutions(timed: list[Timed], flops: dict[str, float]) -> None:
    print("\n".join(map(str, timed)))
    rate = flops.get("bfloat16", flops["float32"])
    for line in advise(timed, torch.version.hip is not None, rate, os.environ):
        print(line)
