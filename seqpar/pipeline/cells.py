"""Networks as lists of cells: the smallest pieces between which a pipeline may cut.

A cell takes outputs of earlier cells or the image, and returns one value: a volume and its box grid. Legend: b batch, c
channels, k classes, W D H voxels.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from seqpar.parallel.recomputation import checkpointed, update_buffers_once
from seqpar.spatial.box_grid import BoxGrid
from seqpar.vit.dropout import DropoutKey

Value = tuple[Tensor, BoxGrid | None]
IMAGE = -1  # stands for the network's input among the numbers of cells


class Cell(NamedTuple):
    """A cell: its name, its module, and the numbers of the cells whose outputs it takes.

    The module is called with the first of them as ``x, grid``, and with each further one as a value ``(x, grid)``.
    """

    name: str
    module: nn.Module
    takes: tuple[int, ...]


class CellList:
    """The cells of a network under construction, in the order in which they run."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    @property
    def last(self) -> int:
        """The number of the last cell, or ``IMAGE`` if there is none yet."""
        return len(self.cells) - 1

    def add(self, name: str, module: nn.Module, *takes: int) -> int:
        """Adds a cell that takes those outputs, by default the last cell's; returns its number."""
        self.cells.append(Cell(name, module, takes or (self.last,)))
        return self.last


class CellNet(nn.Module):
    """A network that runs its cells one after the other.

    - ``cells``: each takes outputs of earlier ones
    - ``outputs``: numbers of the cells whose outputs the network returns
    """

    def __init__(self, cells: Iterable[Cell], outputs: Sequence[int]) -> None:
        super().__init__()
        self.recomputed: frozenset[int] = frozenset()  # cells that backward recomputes from their inputs
        names, modules, takes = zip(*cells)
        self.names: tuple[str, ...] = names
        self.takes: tuple[tuple[int, ...], ...] = takes
        self.outputs = tuple(outputs)
        assert len(set(names)) == len(names), "two cells have one name"
        assert all(IMAGE <= source < number for number, sources in enumerate(takes) for source in sources), takes
        self.cells = nn.ModuleDict(dict(zip(names, modules)))
        self.drops = any(getattr(module, "takes_key", False) for module in self.cells.modules())

    def recompute(self) -> None:
        """Lets backward recompute the cells that would keep more than their inputs, which are kept anyway.

        Modules declare this by ``holds_more``; a cell that joins several inputs keeps more too.
        """
        modules = list(self.cells.values())
        self.recomputed = frozenset(
            number
            for number, sources in enumerate(self.takes)
            if len(sources) > 1 or getattr(modules[number], "holds_more", False)
        )
        for number in self.recomputed:
            for module in modules[number].modules():
                if hasattr(module, "keep_window"):  # kept only while the cell is recomputed, and saves a third exchange
                    module.keep_window = True  # type: ignore[assignment]

    def run_cell(self, number: int, inputs: Sequence[Value], key: DropoutKey | None = None) -> Value:
        """Returns a cell's output, given its ``inputs`` in the order of ``takes[number]``.

        - ``key``: what its dropout draws by; None: nothing is dropped
        """
        module = self.cells[self.names[number]]
        grids = [grid for _, grid in inputs]

        keyed = [part for part in module.modules() if getattr(part, "takes_key", False)] if self.drops else []

        def run(x: Tensor, *others: Tensor) -> Value:
            for part in keyed:  # here, so that what is computed again in backward draws the same
                part.key = None if key is None else key.at(number)  # type: ignore[assignment]
            return module(x, grids[0], *zip(others, grids[1:]))  # type: ignore[no-any-return]

        tensors = [x for x, _ in inputs]
        if number not in self.recomputed:
            return run(*tensors)
        return checkpointed(update_buffers_once(run, module), *tensors)

    def run(
        self,
        image: Tensor,
        grid: BoxGrid | None = None,
        outputs: Sequence[int] | None = None,
        key: DropoutKey | None = None,
    ) -> list[Value]:
        """Returns the network's outputs, or those of the cells ``outputs``, for an image's box.

        Cells that no output depends on do not run; a value is freed after the last cell that takes it.
        """
        wanted = self.outputs if outputs is None else tuple(outputs)
        needed = self.needed(wanted)
        last_use = {source: number for number in needed for source in self.takes[number]}
        values: dict[int, Value] = {IMAGE: (image, grid)}
        for number in needed:
            sources = self.takes[number]
            values[number] = self.run_cell(number, [values[source] for source in sources], key)
            for source in set(sources):
                if last_use[source] == number and source not in wanted:
                    del values[source]
        return [values[number] for number in wanted]

    def needed(self, outputs: Iterable[int]) -> list[int]:
        """Returns the numbers of the cells on which these outputs depend, in order."""
        return cells_needed(self.takes, outputs)


def cells_needed(takes: Sequence[Sequence[int]], outputs: Iterable[int]) -> list[int]:
    """Returns the numbers of the cells on which these outputs depend, in order; ``takes`` lists each cell's inputs."""
    needed, waiting = set[int](), list(outputs)
    while waiting:
        number = waiting.pop()
        if number != IMAGE and number not in needed:
            needed.add(number)
            waiting += takes[number]
    return sorted(needed)
