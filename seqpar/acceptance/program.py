"""``doctor --accept``: everything that has to be right on a device, and how fast it is, in three parts.

It ends with 1 where a number is wrong or a program fails, never because something is slow. On a GPU a part has nine
minutes, as such machines are lent for a time: what has not begun by then is left out.
"""

import math
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seqpar.acceptance.check import LEFT_OUT, WRONG, Check, Outcome, Site
from seqpar.acceptance.groups import check_library, check_modes
from seqpar.acceptance.kernels import check_convolutions, check_kernels
from seqpar.acceptance.networks import check_networks, count_a_step
from seqpar.acceptance.runs import check_compiled, check_groups, check_prediction, check_presets, check_stops
from seqpar.acceptance.speed import measure_attention, measure_convolutions, measure_steps
from seqpar.cluster import exit_codes
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
SHORTEST_S = 20.0  # what is left for the last check to begin


def accept(device: str, part: int, record: Path | None, checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks of a part, all without one (0); returns the exit code.

    ``record``: the JSON file, written after every check.
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
    """Returns what a check came to; one that fails is wrong, one that is too large left out, and others go on."""
    if site.left_s < SHORTEST_S:
        return Outcome(LEFT_OUT, f"part {check.part} has had its {PART_S:.0f} s")
    try:
        return check.run(site)
    except Exception as error:  # the next check may tell more
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        verdict = LEFT_OUT if isinstance(error, torch.OutOfMemoryError) else WRONG
        return Outcome(verdict, why, {"traceback": traceback.format_exc()})
    finally:
        if site.on_gpu:
            torch.cuda.empty_cache()  # programs that the next check starts may need it
