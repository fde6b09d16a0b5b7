"""Recomputes in backward what forward does not keep."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqpar.parallel.meta_tensors import checkpoint_contexts

Result = TypeVar("Result")


def checkpointed(fn: Callable[..., Result], *inputs: object) -> Result:
    """Returns ``fn(*inputs)``, keeping only its input tensors; backward runs ``fn`` again."""
    if not torch.is_grad_enabled():
        return fn(*inputs)
    result: Result = checkpoint(
        fn, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=checkpoint_contexts
    )
    return result


def update_buffers_once(fn: Callable[..., Result], module: nn.Module) -> Callable[..., Result]:
    """Wraps ``fn`` so that only its first run updates the buffers of ``module``, such as running statistics."""
    runs = itertools.count()

    def run(*inputs: object) -> Result:
        if next(runs) == 0:
            return fn(*inputs)
        with copied_buffers(module):
            return fn(*inputs)

    return run


@contextmanager
def copied_buffers(module: nn.Module) -> Iterator[None]:
    """Lets a module write to copies of its buffers, which are discarded at the end."""
    own = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    for part, name, buffer in own:
        part._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for part, name, buffer in own:
            part._buffers[name] = buffer
