"""Checks of whole runs: groups of ranks, shards, lost ranks, stop and resume; presets, ``--compile``, prediction."""

import os
import shutil
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from seqpar.cluster.acceptance.check import (
    COMPILED,
    LEFT_OUT,
    WRONG,
    Ended,
    Error,
    Outcome,
    Site,
    judged,
    kill_a_rank,
    losses_of,
    run_module,
    seconds_of_steps,
    wait_for_steps,
)
from seqpar.data.phantom.phantom_files import write_phantom
from seqpar.data.volumes import read_volume

TINY = """
    --preset debug --tile 16 --patch 8 --embed-dim 24 --heads 2 --depth 2 --decoder unetr --decoder-width 4 --batch 2
    --no-batch-dice --augment none --epochs 1 --val-every 0 --val-cases 1 --val-overlap 0 --spacing 4,4,4
    --precision fp64
"""
SMALL = "--tile 32 --embed-dim 48 --heads 2 --depth 2 --workers 0 --decoder-width 4 --val-overlap 0 --spacing 4,4,4"
STEPS = 8
LIMIT_S = 400.0


@dataclass(frozen=True)
class Trained:
    """How a run ended, and the losses of its steps."""

    ended: Ended
    losses: list[float]

    def apart(self, other: "Trained") -> float:
        """Returns the largest relative difference of two runs' losses; infinity if one lacks steps."""
        if self.ended.code or other.ended.code or len(self.losses) != len(other.losses) or not self.losses:
            return float("inf")
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses))

    def averaged(self, count: int) -> "Trained":
        """Returns the run with each ``count`` losses replaced by their mean."""
        return Trained(
            self.ended, [statistics.fmean(self.losses[at : at + count]) for at in range(0, len(self.losses), count)]
        )


def train(
    site: Site, name: str, flags: Sequence[str], then: Callable[[int], None] | None = None, limit_s: float = LIMIT_S
) -> Trained:
    """Trains into the folder ``name``; with ``--resume`` in ``flags`` it resumes the run that is there."""
    out = site.folder / name
    ended = run_module("cli.train", [*flags, "--out", str(out)], site, limit_s, then)
    return Trained(ended, losses_of(out))


def tiny(steps: int, more: str = "") -> list[str]:
    """Returns the flags of a small run in float64; ``more``: further flags."""
    return [*TINY.split(), "--iterations", str(steps), *more.split()]


def check_groups(site: Site) -> Outcome:
    """Compares the losses of two ranks with those of one: sharing tiles, with and without shards, and as two stages."""
    alone = train(site, "alone", tiny(STEPS, "--workers 0"))
    bound = 1e-7 if site.on_gpu else 1e-9
    runs = {
        "two ranks, halo": "--seqpar 2 --mode halo --workers 1",
        "two ranks, swap, shards": "--seqpar 2 --mode swap --workers 1 --shard-weights",
        "two stages": "--pipe 2 --workers 1 --batch 1 --accumulate 2",
    }
    errors = {"one rank": Error(0.0 if alone.ended.code == 0 else float("inf"), 1.0)}
    remarks = {"one rank": str(alone.ended)} if alone.ended.code else {}
    for name, more in runs.items():
        run = train(site, name.replace(", ", "-").replace(" ", "-"), tiny(STEPS, more))
        errors[name] = Error(run.apart(alone), bound)
        if run.ended.code:
            remarks[name] = str(run.ended)
    return _with_remarks(judged(errors), remarks)


def check_stops(site: Site) -> Outcome:
    """Checks that a run resumes after a stop and after losing a rank, with the losses of an undisturbed run."""
    steps = 120 if site.full_size else 40  # enough to be disturbed before the last
    more = "--seqpar 2 --mode halo --workers 1 --checkpoint-minutes 0.01" + " --deterministic" * site.on_gpu
    whole = train(site, "whole", tiny(steps, more))
    errors, remarks = dict[str, Error](), dict[str, str]()
    for name, disturb, codes in (("stopped", _stop, (75,)), ("rank lost", kill_a_rank, (1, 137))):
        out = name.replace(" ", "-")

        def disturb_it(pid: int, out: str = out, disturb: Callable[[int], None] = disturb) -> None:
            if wait_for_steps(pid, site.folder / out, 5):
                disturb(pid)

        cut = train(site, out, tiny(steps, more), disturb_it)
        again = train(site, out, ["--resume", *more.split()[-1:] * site.on_gpu])
        errors[f"{name}, resumed"] = Error(again.apart(whole), 1e-7 if site.on_gpu else 0.0 + 1e-300)
        if cut.ended.code not in codes or not 5 <= len(cut.losses) < steps:
            errors[f"{name}, its end"] = Error(float("inf"), 1.0)
            remarks[name] = f"{cut.ended} after {len(cut.losses)} steps"
        elif again.ended.code:
            remarks[name] = str(again.ended)
    return _with_remarks(judged(errors), remarks)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def _with_remarks(outcome: Outcome, remarks: dict[str, str]) -> Outcome:
    if not remarks:
        return outcome
    words = "; ".join(f"{name}: {text}" for name, text in remarks.items())
    return Outcome(outcome.verdict, f"{outcome.text}; {words}", {**outcome.figures, "remarks": remarks})


def check_presets(site: Site) -> Outcome:
    """Checks that the presets debug and laptop learn: their last losses are below their first ones."""
    short = "--epochs 1 --iterations 12 --warmup 0 --val-every 0 --val-cases 1 --val-overlap 0"
    laptop = "--epochs 3" if site.full_size else short
    errors, remarks = dict[str, Error](), dict[str, str]()
    for preset, more in (("debug", ""), ("laptop", f"{laptop} --phantoms 6")):
        run = train(site, preset, ["--preset", preset, *more.split()])
        few = max(1, len(run.losses) // 5)
        fell = sum(run.losses[-few:]) / sum(run.losses[:few]) if run.losses and not run.ended.code else float("inf")
        errors[f"{preset}, last losses to first"] = Error(fell, 0.99)
        if run.ended.code:
            remarks[preset] = str(run.ended)
    return _with_remarks(judged(errors), remarks)


def check_compiled(site: Site) -> Outcome:
    """Compares the losses of the preset modern with and without ``--compile``, up to rounding.

    On a GPU they are computed in bf16, where single losses drift apart: it compares means of ten.
    """
    compilers = (os.environ.get("CC", "gcc"), "cc", "clang") if site.on_gpu else (os.environ.get("CXX", "g++"),)
    if not any(map(shutil.which, compilers)):
        return Outcome(LEFT_OUT, f"torch needs a compiler, and none of {', '.join(compilers)} is installed")
    # in float32, as on many CPUs a step in bf16 takes seconds
    more = "--iterations 30" if site.full_size else f"{SMALL} --augment none --iterations 10 --precision fp32"
    flags = f"--preset modern --batch 1 --epochs 1 --val-every 0 --val-cases 1 --phantoms 6 --warmup 0 {more}".split()
    plain, compiled = train(site, "plain", flags), train(site, "compiled", [*flags, "--compile"])
    remarks = {name: str(run.ended) for name, run in (("plain", plain), ("compiled", compiled)) if run.ended.code}
    if not any((site.folder / COMPILED).rglob("*.py")):
        remarks["compiled"] = f"nothing was compiled; {compiled.ended}"
        return Outcome(WRONG, remarks["compiled"], {"remarks": remarks})
    figures = {"plain_s": plain.ended.seconds, "compiled_s": compiled.ended.seconds}
    count, bound = (10, 0.1) if site.full_size else (1, 1e-2)
    error = Error(compiled.averaged(count).apart(plain.averaged(count)), bound)
    return _with_remarks(judged({"losses, compiled": error}, figures), remarks)


def check_graphs(site: Site) -> Outcome:
    """Compares the losses of the preset modern with and without ``--cuda-graph``, and the seconds of a step."""
    if not site.on_gpu:
        return Outcome(LEFT_OUT, "graphs need a GPU")
    flags = "--preset modern --batch 1 --accumulate 2 --iterations 20 --epochs 1 --val-every 0 --val-cases 1"
    flags += f" --phantoms 6 --warmup 0 --augment none {'' if site.full_size else SMALL}"
    runs = {
        name: train(site, name, f"{flags} {more}".split())
        for name, more in (("one by one", ""), ("graphs", "--cuda-graph"))
    }
    remarks = {name: str(run.ended) for name, run in runs.items() if run.ended.code}
    figures = {
        f"{name}, seconds of a step": statistics.median(seconds_of_steps(site.folder / name))
        for name, run in runs.items()
        if len(run.losses) > 1
    }
    error = Error(runs["graphs"].apart(runs["one by one"]), 1e-2)
    outcome = _with_remarks(judged({"losses, graphs": error}, figures), remarks)
    said = "; ".join(f"{name} {value:.3g}" for name, value in figures.items())
    return replace(outcome, text=f"{outcome.text}; {said}")


def check_prediction(site: Site) -> Outcome:
    """Compares the label maps that one rank and two predict with the run of ``check_presets``."""
    images = write_phantom(site.folder / "phantoms", 1)
    ended, labels = list[Ended](), list[list[np.ndarray]]()
    for ranks in (1, 2):
        out = site.folder / f"predicted-{ranks}"
        flags = [str(site.folder / "debug"), "-i", str(images), "-o", str(out), "--seqpar", str(ranks)]
        ended.append(run_module("cli.predict", flags, site, LIMIT_S))
        labels.append([read_volume(path).array for path in sorted(out.glob("*.nii.gz"))])
    failed = [str(each) for each in ended if each.code]
    if failed or not labels[0] or len(labels[0]) != len(labels[1]):
        return Outcome(WRONG, "; ".join(failed) or "no label map was written")
    differing = max(float(np.mean(a != b)) for a, b in zip(*labels))
    return judged({"share of labels that differ on two ranks": Error(differing, 1e-3)})
