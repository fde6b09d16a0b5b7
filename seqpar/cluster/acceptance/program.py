"""``doctor --accept``: checks in three parts that all results on a device are correct, and measures its speed.

The exit code is 1 if a result is wrong or a program fails, never because something is slow. On a GPU each part has
nine minutes, as such machines are often lent for a limited time: checks that have not ended by then are left out.
Each check runs in a process of its own: one that breaks the device's context, or is killed, spoils no other.
"""

import math
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.acceptance.check import LEFT_OUT, WRONG, Check, Outcome, Site
from seqpar.cluster.acceptance.kernels import check_convolutions, check_kernels, check_repeats
from seqpar.cluster.acceptance.long_run import check_long_run
from seqpar.cluster.acceptance.networks import check_networks, count_a_step
from seqpar.cluster.acceptance.runs import (
    check_compiled,
    check_graphs,
    check_groups,
    check_prediction,
    check_presets,
    check_stops,
)
from seqpar.cluster.acceptance.speed import measure_attention, measure_convolutions, measure_steps
from seqpar.cluster.acceptance.two_ranks import check_library, check_modes, check_overlap
from seqpar.cluster.rank_facts import device_name, versions
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.data.files import write_json, write_text
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.processes import call_in_fork
from seqpar.parallel.rendezvous import pick_device

CHECKS = (  # on an H200 the parts take 3, 6 and 3.5 minutes
    Check("kernels", 1, check_kernels),
    Check("networks", 1, check_networks),
    Check("convolutions", 1, check_convolutions),
    Check("same bits", 1, check_repeats),
    Check("a step", 1, count_a_step),
    Check("library", 1, check_library),
    Check("modes", 1, check_modes),
    Check("overlap", 1, check_overlap),
    Check("presets", 1, check_presets),
    Check("prediction", 1, check_prediction),
    Check("long run", 2, check_long_run),
    Check("groups", 2, check_groups),
    Check("stops", 2, check_stops),
    Check("steps", 3, measure_steps),
    Check("attention", 3, measure_attention),
    Check("convolution speed", 3, measure_convolutions),
    Check("graphs", 3, check_graphs),
    Check("compiled", 3, check_compiled),
)
PAGE = "# Acceptance on "  # the first words of the page; the doctor replaces no other file
PART_S = 530.0  # of each part on a GPU
SHORTEST_S = 20.0  # less than this left: no check starts


@dataclass(frozen=True)
class CheckedDevice:
    """The device that is checked, its name, and the versions of the libraries."""

    own: torch.device
    name: str
    versions: Mapping[str, str]


def accept(device: str, part: int, record: Path | None, checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks of a part and returns the exit code.

    - ``part``: 0 runs all parts
    - ``record``: a JSON file to write after every check; a page with the same name and suffix .md says it for people
    """
    known: CheckedDevice = call_in_fork(_find_device, device)
    print(f"{known.name}; {', '.join(f'{name} {version}' for name, version in known.versions.items())}", flush=True)
    results = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="seqpar-accept-", ignore_cleanup_errors=True) as folder:
        sites = dict[int, Site]()
        for check in checks:
            if part in (0, check.part):
                began = time.monotonic()
                until = began + PART_S if known.own.type == "cuda" else math.inf
                outcome = _run(check, sites.setdefault(check.part, Site(known.own, Path(folder), until)))
                seconds = time.monotonic() - began
                print(f"{check.part}  {check.name:<18}{outcome.verdict:<9}{seconds:6.0f} s  {outcome.text}", flush=True)
                results[check.name] = {"part": check.part, "verdict": outcome.verdict, "seconds": seconds}
                results[check.name] |= {"text": outcome.text, "figures": dict(outcome.figures)}
                if record is not None:
                    about = {"device": known.name, "versions": dict(known.versions), "part": part}
                    write_json(record, {**about, "parts": results})
                    write_text(record.with_suffix(".md"), _page(known, results, record))
    print(_summary(results))
    return exit_codes.FAULT if any(result["verdict"] == WRONG for result in results.values()) else 0


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    named = {
        verdict: ", ".join(name for name, result in results.items() if result["verdict"] == verdict) or "none"
        for verdict in (WRONG, LEFT_OUT)
    }
    return f"{len(results)} checks, wrong: {named[WRONG]}; left out: {named[LEFT_OUT]}"


def _page(known: CheckedDevice, results: Mapping[str, Mapping[str, Any]], record: Path) -> str:
    """Returns the page of all results so far, in Markdown: it can be pasted into an issue."""
    lines = [f"{PAGE}{known.name}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in known.versions.items()), "", _summary(results), ""]
    lines += ["| part | check | verdict | seconds | |", "|---|---|---|---:|---|"]
    for name, result in results.items():
        said = str(result["text"]).replace("|", "\\|")
        lines.append(f"| {result['part']} | {name} | {result['verdict']} | {result['seconds']:.0f} | {said} |")
    lines += [
        "",
        f"If a check is wrong, please open an issue with this page and `{record.name}`, which has all figures.",
    ]
    return "\n".join(lines) + "\n"


def _find_device(kind: str) -> CheckedDevice:
    own = pick_device(Launcher("alone"), kind)
    more = {"cuDNN": str(torch.backends.cudnn.version())} if own.type == "cuda" else {}
    return CheckedDevice(own, device_name(own), versions() | more)


def _run(check: Check, site: Site) -> Outcome:
    """Returns the outcome of a check, which is killed when its part's time is over; the next check runs in any case."""
    if site.left_s < SHORTEST_S:
        return Outcome(LEFT_OUT, f"part {check.part} has used its {PART_S:.0f} s")
    try:
        return call_in_fork(_judge, check, site, limit_s=site.left_s)
    except TimeoutError:
        return Outcome(LEFT_OUT, f"did not end within the {PART_S:.0f} s of part {check.part}")
    except ChildProcessError as error:
        return Outcome(WRONG, str(error))


def _judge(check: Check, site: Site) -> Outcome:
    """Returns the outcome of a check. An exception means wrong, out of memory means left out."""
    set_arithmetic("fp32")
    # In a fork torch remakes its pool of threads at first use: two threads of autograd at once would find none.
    torch.set_num_threads(torch.get_num_threads())
    try:
        return check.run(site)
    except Exception as error:  # the next check may say more
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        verdict = LEFT_OUT if isinstance(error, torch.OutOfMemoryError) else WRONG
        return Outcome(verdict, why, {"traceback": traceback.format_exc()})
