"""Boards: where else the numbers and pictures of a run go, TensorBoard or an experiment tracker."""

import importlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from seqpar.parallel.consensus import raise_on_all_ranks
from seqpar.parallel.mesh import Group
from seqpar.runs.metrics_tail import BY_WINDOW
from seqpar.settings.config import Config


class Board(Protocol):
    """What a journal tells, on the first rank."""

    name: str

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds the numbers of a journal's row; ``kind``: train, val or slow."""

    def picture(self, name: str, step: int, path: Path) -> None:
        """Adds a picture, a PNG file."""

    def close(self) -> None:
        """Sends what is left."""


class TensorBoard:
    """Scalars and images below ``folder``.

    What an earlier start of this run wrote from ``first_step`` on is dropped.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)  # type: ignore[no-untyped-call]

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in numbers(kind, values):
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, step: int, path: Path) -> None:
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[..., :3], step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """A run of wandb or trackio, whose interfaces are alike.

    - ``name``: of the package
    - ``out``: the run folder; ``begun``: when its run began. Both tell a run from others: a resumed one continues
    """

    def __init__(self, name: str, out: Path, settings: Mapping[str, Any], begun: str) -> None:
        self.name, self._package = name, importlib.import_module(name)
        run = f"{out.name}-{zlib.crc32(f'{out.absolute()} {begun}'.encode()):08x}"
        own = {"id": run, "dir": str(out)} if name == "wandb" else {}
        self._package.init(project="seqpar", name=run, config=dict(settings), resume="allow", **own)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._package.log(dict(numbers(kind, values)), step=step)

    def picture(self, name: str, step: int, path: Path) -> None:
        self._package.log({name: self._package.Image(str(path))}, step=step)

    def close(self) -> None:
        self._package.finish()


def numbers(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a row as ``kind/name``, those of nested dicts as ``kind/name/name``."""
    for name, value in values.items():
        if isinstance(value, dict) and name != BY_WINDOW:  # the better of it is there
            yield from numbers(f"{kind}/{name}", value)
        elif isinstance(value, (int, float)) and name != "epoch":
            yield f"{kind}/{name}", value


def open_on_first(config: Config, out: Path, first_step: int, begun: str, world: Group) -> list[Board]:
    """Returns the first rank's boards, none on others; raises on all ranks what it fails of.

    - ``first_step``: where the run resumes
    - ``begun``: when it began
    """
    boards, error = list[Board](), None
    if world.index == 0:
        try:
            boards = open_boards(config, out, first_step, begun)
        except ValueError as problem:
            error = problem
    raise_on_all_ranks(error, world, name_rank=False)
    return boards


def open_boards(config: Config, out: Path, first_step: int, begun: str) -> list[Board]:
    """Returns the boards that the settings name; raises ``ValueError`` where one does not begin.

    - ``first_step``: where the run resumes
    - ``begun``: when it began
    """
    boards, name = list[Board](), "--tensorboard"
    try:
        if config.tensorboard:
            boards.append(TensorBoard(out / "tensorboard", first_step))
        name = f"--tracker {config.tracker}"
        if config.tracker != "none":
            boards.append(Tracker(config.tracker, out, asdict(config), begun))
    except Exception as error:  # whatever other people's code raises, such as a login that is missing
        why = str(error) or type(error).__name__
        raise ValueError(f"{name} does not begin ({why}): mend that, or remove it") from error
    return boards
