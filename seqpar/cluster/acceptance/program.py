"""``doctor --accept``: checks in three parts that all results on a device are correct, and measures its speed.

The exit code is 1 if a result is wrong or a program fails, never because something is slow. On a GPU each part has
nine minutes, as such machines are often lent for a limited time: checks that have not started by then are left out.
"""

import math
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.acceptance.check import LEFT_OUT, WRONG, Check, Outcome, Site
from seqpar.cluster.acceptance.kernels import check_convolutions, check_kernels
from seqpar.cluster.acceptance.networks import check_networks, count_a_step
from seqpar.cluster.acceptance.runs import check_compiled, check_groups, check_prediction, check_presets, check_stops
from seqpar.cluster.acceptance.speed import measure_attention, measure_convolutions, measure_steps
from seqpar.cluster.acceptance.two_ranks import check_library, check_modes
from seqpar.cluster.rank_facts import device_name, versions
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.data.files import write_json
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.rendezvous import pick_device

CHECKS = (
    Check("kernels", 1, check_kernels),
    Check("networks", 1, check_networks),
    Check("convolutions", 1, check_convolutions),
    Check("a step", 1, count_a_step),
    Check("library", 1, check_library),
    Check("modes", 1, check_modes),
    Check("groups", 2, check_groups),
    Check("stops", 2, check_stops),
    Check("presets", 2, check_presets),
    Check("prediction", 2, check_prediction),
    Check("compiled", 2, check_compiled),
    Check("steps", 3, measure_steps),
    Check("attention", 3, measure_attention),
    Check("convolution speed", 3, measure_convolutions),
)
PART_S = 530.0  # of each part on a GPU
SHORTEST_S = 20.0  # less than this left: no check starts


def accept(device: str, part: int, record: Path | None, checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks of a part and returns the exit code.

    - ``part``: 0 runs all parts
    - ``record``: a JSON file to write after every check
    """
    own = pick_device(Launcher("alone"), device)
    set_arithmetic("fp32")
    known = versions() | ({"cuDNN": str(torch.backends.cudnn.version())} if own.type == "cuda" else {})
    print(f"{device_name(own)}; {', '.join(f'{name} {version}' for name, version in known.items())}", flush=True)
    results = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="seqpar-accept-", ignore_cleanup_errors=True) as folder:
        sites = dict[int, Site]()
        for check in checks:
            if part in (0, check.part):
                began = time.monotonic()
                until = began + PART_S if own.type == "cuda" else math.inf
                outcome = _run(check, sites.setdefault(check.part, Site(own, Path(folder), until)))
                seconds = time.monotonic() - began
                print(f"{check.part}  {check.name:<18}{outcome.verdict:<9}{seconds:6.0f} s  {outcome.text}", flush=True)
                results[check.name] = {"part": check.part, "verdict": outcome.verdict, "seconds": seconds}
                results[check.name] |= {"text": outcome.text, "figures": dict(outcome.figures)}
                if record is not None:
                    write_json(record, {"device": device_name(own), "versions": known, "part": part, "parts": results})
    wrong = [name for name, result in results.items() if result["verdict"] == WRONG]
    left_out = [name for name, result in results.items() if result["verdict"] == LEFT_OUT]
    print(f"{len(results)} checks, wrong: {', '.join(wrong) or 'none'}; left out: {', '.join(left_out) or 'none'}")
    return exit_codes.FAULT if wrong else 0


def _run(check: Check, site: Site) -> Outcome:
    """Returns the outcome of a check. An exception means wrong, out of memory means left out; the next check runs."""
    if site.left_s < SHORTEST_S:
        return Outcome(LEFT_OUT, f"part {check.part} has used its {PART_S:.0f} s")
    try:
        return check.run(site)
    except Exception as error:  # the next check may say more
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        verdict = LEFT_OUT if isinstance(error, torch.OutOfMemoryError) else WRONG
        return Outcome(verdict, why, {"traceback": traceback.format_exc()})
    finally:
        if site.on_gpu:
            torch.cuda.empty_cache()  # the next check may start programs that need it
