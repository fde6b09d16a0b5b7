"""How torch computes in this process.

Precision, reproducible results, memory that is kept, MIOpen's kernels kept in the run folder, and torch without its
compiler, whose import takes as long as the rest.
"""

import ctypes
import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from seqpar.cluster.known_traps import Facts, half_convolutions
from seqpar.settings.config import Config

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


def check_precision(precision: str, facts: Facts) -> None:
    """Refuses a run whose libraries are known to compute wrongly in its precision."""
    trap = half_convolutions({}, facts) if precision == "bf16" else None
    if trap is not None and trap.error:
        raise ValueError(f"--precision bf16: {trap.text}; or use --precision fp32")


def missing_compiler(on_gpu: bool, env: Mapping[str, str] = os.environ) -> ValueError | None:
    """Returns the error for ``--compile`` where the compiler that torch calls is not there; None if it is.

    Inductor builds its kernels for a CPU with ``CXX`` or g++, and Triton its launchers with ``CC``, gcc or clang.
    """
    name, usual = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    tried = shlex.split(env[name])[:1] if env.get(name) else usual  # "ccache g++" begins with a program, too
    if any(map(shutil.which, tried)):
        return None
    place = f"{name}={env[name]} names none" if env.get(name) else f"there is no {' or '.join(tried)} in PATH"
    return ValueError(f"--compile needs a compiler, and {place}: install one, or remove --compile")


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt's parameters, in malloc.h of glibc
_NEVER = -1
_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # whoever sets these has chosen


def keep_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Lets this process keep the memory that it frees, and take the next tensor's from it; returns whether it does.

    A tensor of more than 32 MiB is otherwise new memory each time, whose pages the kernel fills with zeros one by one
    when they are first written: up to a third of a training step. Nothing is done without glibc, or where the
    environment chooses an allocator's settings or another allocator.
    """
    if any(name.startswith(_OWN) for name in env):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


_FOLDER, _KERNEL_FILES = "MIOPEN_USER_DB_PATH", "miopen"


def restore_kernel_cache(run: Path, env: Mapping[str, str] = os.environ) -> None:
    """Copies what an earlier job found into this rank's database, unless it holds something; every rank calls it."""
    source, target = run / _KERNEL_FILES, Path(env.get(_FOLDER, ""))
    if not env.get(_FOLDER) or not source.is_dir() or (target.is_dir() and any(target.iterdir())):
        return
    with suppress(OSError):  # the kernels are then searched for again
        shutil.copytree(source, target, dirs_exist_ok=True)


def save_kernel_cache(run: Path, env: Mapping[str, str] = os.environ) -> None:
    """Copies this rank's database into the run folder, file by file; one rank calls it: all search for the same."""
    source, target = Path(env.get(_FOLDER, "")), run / _KERNEL_FILES
    if not env.get(_FOLDER) or not source.is_dir():
        return
    with suppress(OSError):
        for path in (path for path in source.rglob("*") if path.is_file()):
            kept = target / path.relative_to(source)
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.part")
            shutil.copy2(path, part)
            part.replace(kept)  # a job that is killed meanwhile leaves the file of the one before


_COMPILER = "torch._dynamo"
_KEPT = "__dynamo_disable"  # where torch keeps what ``disable`` returned for a function


def recomputes(config: Config) -> bool:
    """Returns whether blocks are computed again in backward: torch's checkpoint asks for the compiler's settings."""
    return config.grad_checkpoint != Config().grad_checkpoint or config.mlp_chunks > 1


@contextmanager
def without_torch_compile() -> Iterator[None]:
    """Puts a stand-in in the compiler's place, unless it is imported already; afterwards nothing is left of it.

    Where more is asked than the stand-in has, the compiler comes.
    """
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = _StandIn(_COMPILER)
    sys.modules[_COMPILER] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


class _StandIn(ModuleType):
    """Has what is called of the compiler: functions are to be left out of what it compiles, which is nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._functions = list[Any]()
        self.utils = _Utils(self)

    def graph_break(self, *of: Any) -> None: ...

    def disable(self, function: Any = None, *of: Any, **how: Any) -> Any:
        if function is None:  # a decorator with options
            return self.disable
        self._functions.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # which the import of a submodule asks for
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)

    def leave(self) -> None:
        """Makes way for the compiler: torch asks it the next time, for these functions too."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        while self._functions:
            with suppress(AttributeError):
                delattr(self._functions.pop(), _KEPT)


class _Utils:
    """Has what DDP asks of the compiler's ``utils``; where more is asked, the compiler comes."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in

    def get_optimize_ddp_mode(self) -> str:
        """Returns torch's default."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._stand_in.leave()
        return getattr(importlib.import_module(f"{_COMPILER}.utils"), name)
