"""Whole runs: ranks, shards, a lost rank, a stop and what goes on from it; presets, compiled parts, prediction."""

import os
import shutil
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqpar.acceptance.check import LEFT_OUT, WRONG, Error, Outcome, Site, judged
from seqpar.acceptance.started import COMPILED, Ended, kill_a_rank, losses_of, run_module, wait_for_steps
from seqpar.data.phantom.phantom_files import write_phantom
from seqpar.data.volumes import read_volume

TINY = """
    --preset debug --tile 16 --patch 8 --embed-dim 24 --heads 2 --depth 2 --decoder unetr --decoder-width 4 --batch 2
    --no-batch-dice --augment none --epochs 1 --val-every 0 --val-cases 1 --val-overlap 0 --precision fp64
"""
STEPS, LONG = 8, 120
LIMIT_S = 400.0


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and the losses of its steps."""

    ended: Ended
    losses: list[float]

    def apart(self, other: "Trained") -> float:
        """Returns the largest relative difference of two runs' losses, infinite where one lacks steps."""
        if self.ended.code or other.ended.code or len(self.losses) != len(other.losses) or not self.losses:
            return float("inf")
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses))

    def averaged(self, count: int) -> "Trained":
        """Returns the run with the means of so many losses each in their place."""
        return Trained(
            self.ended, [statistics.fmean(self.losses[at : at + count]) for at in range(0, len(self.losses), count)]
        )


def train(
    site: Site, name: str, flags: Sequence[str], then: Callable[[int], None] | None = None, limit_s: float = LIMIT_S
) -> Trained:
    """Returns a run into the folder ``name``; a run that is there already goes on if ``flags`` say so."""
    out = site.folder / name
    ended = run_module("cli.train", [*flags, "--out", str(out)], site, limit_s, then)
    return Trained(ended, losses_of(out))


def tiny(steps: int, more: str = "") -> list[str]:
    """Returns the flags of a small run in float64."""
    return [*TINY.split(), "--iterations", str(steps), *more.split()]


def check_groups(site: Site) -> Outcome:
    """The losses of a run on two ranks, which share tiles, with shards or without, or have half of the network each.

    They are those of one rank.
    """
    alone = train(site, "alone", tiny(STEPS, "--workers 0"))
    bound = 1e-7 if site.on_gpu else 1e-9
    runs = {
        "two ranks, halo": "--seqpar 2 --mode halo --workers 1",
        "two ranks, swap, shards": "--seqpar 2 --mode swap --workers 1 --shard-weights",
        "two stages": "--pipe 2 --workers 1 --batch 1 --accumulate 2",
    }
    errors = {"one rank": Error(0.0 if alone.ended.code == 0 else float("inf"), 1.0)}
    said = {"one rank": str(alone.ended)} if alone.ended.code else {}
    for name, more in runs.items():
        run = train(site, name.replace(", ", "-").replace(" ", "-"), tiny(STEPS, more))
        errors[name] = Error(run.apart(alone), bound)
        if run.ended.code:
            said[name] = str(run.ended)
    return _with_words(judged(errors), said)


def check_stops(site: Site) -> Outcome:
    """A run that is stopped, and one that loses a rank, go on to the losses of one that was not disturbed."""
    more = "--seqpar 2 --mode halo --workers 1 --checkpoint-minutes 0.01" + " --deterministic" * site.on_gpu
    whole = train(site, "whole", tiny(LONG, more))
    errors, said = dict[str, Error](), dict[str, str]()
    for name, disturb, codes in (("stopped", _stop, (75,)), ("rank lost", kill_a_rank, (1, 137))):
        out = name.replace(" ", "-")

        def disturb_it(pid: int, out: str = out, disturb: Callable[[int], None] = disturb) -> None:
            wait_for_steps(site.folder / out, 5)
            disturb(pid)

        cut = train(site, out, tiny(LONG, more), disturb_it)
        again = train(site, out, ["--resume", *more.split()[-1:] * site.on_gpu])
        errors[f"{name}, resumed"] = Error(again.apart(whole), 1e-7 if site.on_gpu else 0.0 + 1e-300)
        if cut.ended.code not in codes or not 5 <= len(cut.losses) < LONG:
            errors[f"{name}, its end"] = Error(float("inf"), 1.0)
            said[name] = f"{cut.ended} after {len(cut.losses)} steps"
        elif again.ended.code:
            said[name] = str(again.ended)
    return _with_words(judged(errors), said)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def _with_words(outcome: Outcome, said: dict[str, str]) -> Outcome:
    if not said:
        return outcome
    words = "; ".join(f"{name}: {text}" for name, text in said.items())
    return Outcome(outcome.verdict, f"{outcome.text}; {words}", {**outcome.figures, "said": said})


def check_presets(site: Site) -> Outcome:
    """The presets debug and laptop learn: the last losses are below the first ones."""
    laptop = "--epochs 3" if site.on_gpu else "--epochs 1 --iterations 12 --warmup 0 --val-every 0 --val-cases 1"
    errors, said = dict[str, Error](), dict[str, str]()
    for preset, more in (("debug", ""), ("laptop", f"{laptop} --phantoms 6")):
        run = train(site, preset, ["--preset", preset, *more.split()])
        few = max(1, len(run.losses) // 5)
        fell = sum(run.losses[-few:]) / sum(run.losses[:few]) if run.losses and not run.ended.code else float("inf")
        errors[f"{preset}, last losses to first"] = Error(fell, 0.99)
        if run.ended.code:
            said[preset] = str(run.ended)
    return _with_words(judged(errors), said)


def check_compiled(site: Site) -> Outcome:
    """Thirty steps of modern, with compiled MLPs and without: the same losses to rounding.

    On a GPU that is bf16's, by which single losses wander: means of ten are compared.
    """
    compilers = (os.environ.get("CC", "gcc"), "cc", "clang") if site.on_gpu else (os.environ.get("CXX", "g++"),)
    if not any(map(shutil.which, compilers)):
        return Outcome(LEFT_OUT, f"torch compiles nothing without a compiler: {', '.join(compilers)} are not there")
    small = "--tile 32 --embed-dim 48 --heads 4 --depth 2 --workers 0 --augment none --decoder-width 4"
    small += " --iterations 10 --precision fp32"  # many a CPU takes seconds for a step in bf16
    more = "--iterations 30" if site.on_gpu else small
    flags = f"--preset modern --batch 1 --epochs 1 --val-every 0 --val-cases 1 --phantoms 6 --warmup 0 {more}".split()
    plain, compiled = train(site, "plain", flags), train(site, "compiled", [*flags, "--compile"])
    said = {name: str(run.ended) for name, run in (("plain", plain), ("compiled", compiled)) if run.ended.code}
    if not any((site.folder / COMPILED).rglob("*.py")):
        said["compiled"] = f"nothing was compiled; {compiled.ended}"
        return Outcome(WRONG, said["compiled"], {"said": said})
    figures = {"plain_s": plain.ended.seconds, "compiled_s": compiled.ended.seconds}
    count, bound = (10, 0.1) if site.on_gpu else (1, 1e-2)
    error = Error(compiled.averaged(count).apart(plain.averaged(count)), bound)
    return _with_words(judged({"losses, compiled": error}, figures), said)


def check_prediction(site: Site) -> Outcome:
    """Labels that one rank and two predict with the run of check_presets."""
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
