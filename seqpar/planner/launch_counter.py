"""Counts the kernels that a training step would launch on a GPU."""

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
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
    "squeeze_",
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

    - ``launches``: operators that compute; those of many tensors count as often as torch launches them
    - ``fetches``: those that take values from the host: copies of its tensors, and tensors of Python's numbers
    - ``moved``: bytes that they read and write
    - ``by_place``: launches and bytes by the function of the package that calls the operator, or in backward the
      function whose adjoint it is
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self.launches, self.fetches, self.moved = Counter[str](), Counter[str](), Counter[str]()
        self.by_place: dict[tuple[str, str], tuple[int, int]] = {}  # place and operator -> launches and bytes
        self._places, self._device_type = dict[int, str](), device_type
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
        place = self._place()
        inputs = [t for t in itertools.chain(tree_leaves(args), tree_leaves(kwargs)) if isinstance(t, Tensor)]
        results = inputs[:1] if result is None else tree_leaves(result)  # operators on many tensors return nothing
        made = [t for t in results if isinstance(t, Tensor) and t.device.type == self._device_type]
        if not made:
            return result
        name = func._overloadpacket.__name__
        if any(t.ndim and t.device.type != self._device_type for t in inputs):
            self.fetches[name] += 1
        known = {t.untyped_storage()._cdata for t in inputs}
        is_new = any(t.untyped_storage()._cdata not in known for t in made)
        if name not in NO_KERNELS and (is_new or func._schema.is_mutable):
            written, skipped = _written(func, args, kwargs or {})
            size = sum(t.nbytes for t in itertools.chain(inputs, written or made)) - sum(t.nbytes for t in skipped)
            self.add(name, place, _num_launches(args) if name.startswith("_foreach") else 1, size)
        return result

    def add(self, name: str, place: str, launches: int, size: int) -> None:
        """Counts an operator at a place: its kernel launches, and the ``size`` bytes that they read and write."""
        times = repetitions()
        self.launches[name] += times * launches
        self.moved[name] += times * size
        before = self.by_place.get((place, name), (0, 0))
        self.by_place[place, name] = before[0] + times * launches, before[1] + times * size

    def _place(self) -> str:
        """Returns the innermost function of the package that runs, or in backward the one whose adjoint runs."""
        node, frame = torch._C._current_autograd_node(), sys._getframe()  # type: ignore[attr-defined]
        while frame is not None and not (_is_ours(frame.f_code.co_filename)):
            frame = frame.f_back  # type: ignore[assignment]
        here = "" if frame is None else f"{_name_of(frame.f_code.co_filename)}:{frame.f_code.co_name}"
        if node is None:
            self._places[torch.autograd._get_sequence_nr()] = here  # type: ignore[attr-defined]
            return here
        return here or self._places.get(node._sequence_nr() + 1, "")


UPDATE = "the update"
PACKAGE = Path(__file__).parents[1]


@cache
def _is_ours(filename: str) -> bool:
    """Returns whether a file is of the package, but for this folder's."""
    path = Path(filename)
    return PACKAGE in path.parents and path.parent != PACKAGE / "planner"


@cache
def _name_of(filename: str) -> str:
    return Path(filename).relative_to(PACKAGE).with_suffix("").as_posix()


def _written(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors that an operator writes to, and those of them that it does not read."""
    written, unread = list[Tensor](), list[Tensor]()
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
            written += tensors
            if argument.kwarg_only or "copy_" in func._schema.name:
                unread += tensors
    return written, unread


def _num_launches(args: Any) -> int:
    """Returns how many kernels torch launches for lists of tensors: as many as their pointers and pieces fit in."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    return num_launches_of_lists(lists[0], len(lists))


def num_launches_of_lists(tensors: Sequence[Tensor], depth: int) -> int:
    """Returns how many kernels torch launches for ``depth`` lists of tensors like ``tensors``."""
    pieces = sum(-(-t.numel() // 65536) for t in tensors)
    return max(-(-len(tensors) // (110, 64, 48, 36, 30)[depth - 1]), -(-pieces // 320))


@dataclass(frozen=True)
class Launches:
    """What forward, loss and backward of a step launch, how often they fetch something from the host, what follows."""

    launches: int
    fetches: int
    by_name: dict[str, int]
    update: int  # launches of clipping and of the update
    moved: int  # bytes that all of these read and write
    by_place: dict[tuple[str, str], tuple[int, int]]  # place and operator -> launches and bytes


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

    Not counted is what comes before the forward: the tiles, and the key of what is dropped. The update counts as one
    pass over weights, gradients and the optimizer's two states, as torch's fused ones are.
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
                by_name = dict(counter.launches)
                _update(net, config, counter)
            launches, every = sum(by_name.values()), counter.launches.total()
            sizes = counter.moved.total(), counter.by_place
            counts.append(Launches(launches, counter.fetches.total(), by_name, every - launches, *sizes))
    return counts


def _update(net: nn.Module, config: Config, counter: LaunchCounter) -> None:
    """Counts clipping, and an update of all parameters at once, which torch refuses for tensors without data."""
    parameters = [p for p in net.parameters() if p.grad is not None]
    size, at_once = sum(p.nbytes for p in parameters), partial(num_launches_of_lists, parameters)
    counter.add("_foreach_norm", UPDATE, at_once(1), size)
    counter.add("stack and norm", UPDATE, 2, 0)
    if config.clip:
        counter.add("clip", UPDATE, 4, 0)
        counter.add("_foreach_mul_", UPDATE, at_once(1), 2 * size)
    counter.add("_foreach_add_", UPDATE, -(-len(parameters) // 64), 0)  # numbers of steps
    counter.add(f"_fused_{config.optimizer}_", UPDATE, at_once(4), 7 * size)  # all is read, all but gradients written


def _part(config: Config, tokens: int, channels: int, patch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns a rank's image ``b n c p p p`` and label ``b n p p p``."""
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    image = torch.empty(config.batch, tokens, channels, *patch, dtype=dtype, device="meta")
    return image, torch.empty(config.batch, tokens, *patch, dtype=torch.uint8, device="meta")
