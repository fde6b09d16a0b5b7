"""Counts the kernels that a training step would launch on a GPU."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpar.models.build import build_loss, build_on_meta
from seqpar.parallel.mesh import Group
from seqpar.parallel.meta_tensors import meta_as_device, repetitions
from seqpar.planner.memory_counter import as_autocast
from seqpar.settings.config import Config
from seqpar.vit.dropout import DropoutKey

# operators that make a tensor without filling it, or hand one on
NO_KERNELS = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "detach",
}


class _Numbers(TorchFunctionMode):
    """Counts tensors that are made on a device of Python's numbers."""

    def __init__(self, device_type: str, fetches: Counter[str]) -> None:
        self._device_type, self._fetches = device_type, fetches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device.type == self._device_type:
            self._fetches[func.__name__] += not isinstance(args[0], Tensor)
        return result


class LaunchCounter(TorchDispatchMode):
    """Counts operators below autograd whose results lie on ``device_type``, by name.

    An operator that makes or changes values there counts as one launch; torch may need several for it. Views and
    memory without values count nothing. Tensors without data ("meta") will do, where all that is computed is so.

    - ``launches``: operators that compute
    - ``fetches``: those that take values from the host: copies of its tensors, and tensors of Python's numbers
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.launches, self.fetches = Counter[str](), Counter[str]()
        self._device_type = device_type
        self._numbers = _Numbers(device_type, self.fetches)

    def __enter__(self) -> "LaunchCounter":
        self._numbers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch asks; else the first operator would import its compiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.device.type == self._device_type]
        if not made:
            return result
        inputs = [t for t in itertools.chain(tree_leaves(args), tree_leaves(kwargs)) if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__
        if any(t.ndim and t.device.type != self._device_type for t in inputs):
            self.fetches[name] += 1
        known = {t.untyped_storage()._cdata for t in inputs}
        is_new = any(t.untyped_storage()._cdata not in known for t in made)
        if name not in NO_KERNELS and (is_new or func._schema.is_mutable):
            self.launches[name] += repetitions()
        return result


@dataclass(frozen=True)
class Launches:
    """What forward, loss and backward of a step launch, and how often they fetch something from the host."""

    launches: int
    fetches: int
    by_name: dict[str, int]


def count_launches(
    config: Config,
    rank: int = 0,
    channels: int = 4,
    outputs: int = 4,
    regions: tuple[tuple[int, ...], ...] = (),
    ignore_label: int | None = None,
    steps: int = 2,
) -> list[Launches]:
    """Returns what each of the first steps launches on one rank of a sequence group; the first one makes tables.

    Not counted is what comes before the forward: the tiles, and the key of what is dropped. Nor is the update.
    """
    group = Group("seq", tuple(range(config.seqpar)), rank)
    net = build_on_meta(config, group, channels, outputs, Group("data"))
    loss_fn = net.training_loss(build_loss(config, regions, ignore_label))
    loss_groups = net.loss_groups(Group("data"), config.batch)
    counts = []
    with meta_as_device("cuda"):
        for step in range(steps):
            image, label = _part(config, net.layout.counts[rank], channels, net.layout.patch)
            key = net.drawn(DropoutKey(config.seed, step, tuple(range(config.batch))), image.device)
            net.zero_grad()
            with LaunchCounter() as counter:
                with as_autocast(torch.bfloat16 if config.precision == "bf16" else None, on_gpu=True):
                    logits = net(image, None, key)
                loss_fn(logits, net.arrange(label), loss_groups).backward()
            counts.append(Launches(counter.launches.total(), counter.fetches.total(), dict(counter.launches)))
    return counts


def _part(config: Config, tokens: int, channels: int, patch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns a rank's image ``b n c p p p`` and label ``b n p p p``."""
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    image = torch.empty(config.batch, tokens, channels, *patch, dtype=dtype, device="meta")
    return image, torch.empty(config.batch, tokens, *patch, dtype=torch.uint8, device="meta")
