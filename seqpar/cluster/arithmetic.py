"""The arithmetic of a process: how precise products and convolutions are, and whether their bits come again.

Set once, before the first work of a GPU. torch by itself takes TF32, of ten bits, for convolutions in float32 and true
float32 for matrix products; here both are one or the other.
"""

import os
from collections.abc import MutableMapping
from typing import Any

import torch

from seqpar.cluster.library_traps import half_convolutions
from seqpar.cluster.trap import Facts
from seqpar.parallel.launcher import allocator_settings

# Products in cuBLAS use this workspace in one order; without it they refuse to be deterministic.
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def set_arithmetic(precision: str, deterministic: bool = False, env: MutableMapping[str, str] = os.environ) -> None:
    """Sets what every product and convolution of this process does.

    - ``precision``: of a run; only tf32 lets float32 be rounded to TF32. bf16 is autocast, and what that leaves in
      float32 stays float32
    - ``deterministic``: the same bits each time, on the same GPU, where torch has an algorithm for it. It warns once
      of an operation that has none. Attention, which torch leaves out where it only warns, sees to itself
    """
    takes_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = takes_tf32
    torch.backends.cudnn.allow_tf32 = takes_tf32
    env.update(allocator_settings(env, torch.__version__, torch.version.hip is not None))
    if deterministic:
        env.setdefault(_CUBLAS, ":4096:8")
    if deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what was never written
    torch.backends.cudnn.deterministic = deterministic


def arithmetic_now(precision: str) -> dict[str, Any]:
    """Returns what is set, for a run's record; ``precision``: of the run."""
    words = {False: "float32", True: "tf32"}
    return {
        "autocast": "bfloat16" if precision == "bf16" else "none",
        "float32_products": words[torch.backends.cuda.matmul.allow_tf32],
        "float32_convolutions": words[torch.backends.cudnn.allow_tf32],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def refuse_wrong(precision: str, facts: Facts) -> None:
    """Refuses a run whose libraries are known to compute wrongly in its precision."""
    trap = half_convolutions({}, facts) if precision == "bf16" else None
    if trap is not None and trap.error:
        raise ValueError(f"--precision bf16: {trap.text}; or use --precision fp32")
