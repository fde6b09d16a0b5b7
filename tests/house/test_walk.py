"""The way from a flag to the network is short: a run shows that of ``--decoder unetr``, and the page names each file.

A file is on the way if it declares the flag, if it is on the call stack whenever the setting is read or a decoder is
made, or if it is one of ``models`` or ``decoders`` that runs while the run's own network is built.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from seqpar.cli import train
from seqpar.decoders.unetr import UnetrDecoder
from seqpar.models import build
from seqpar.settings.config import Config
from tests.support.pages import ROOT
from tests.support.training_runs import tiny_data

FLAG, MOST_FILES, MOST_ENTRIES = "decoder", 32, 2
BUILDING = ("seqpar/models/", "decoders/")


class Built(BaseException):
    """The run's network stands: the way ends."""


def file_of(frame: FrameType) -> str | None:
    """Returns the file of a frame relative to the repository; None for files of others and for tests."""
    path = Path(frame.f_code.co_filename)
    if not path.is_absolute() or not path.is_relative_to(ROOT):
        return None
    name = str(path.resolve().relative_to(ROOT))
    return name if name.startswith(("seqpar/", "decoders/", "launch/")) else None


def files_up(frame: FrameType | None) -> Iterator[str]:
    while frame:
        if name := file_of(frame):
            yield name
        frame = frame.f_back


class Watched:
    """Stands for the field of a config, and notes who reads it; copying a config (``replace``) is no reading."""

    def __init__(self, default: str, way: dict[str, None]) -> None:
        self.default, self.way = default, way

    def __get__(self, config: Config | None, kind: type) -> str:
        if config is None:
            return self.default
        caller = sys._getframe(1)
        if file_of(caller):
            self.way.update(dict.fromkeys([*files_up(caller)][::-1]))
        value: str = vars(config)[FLAG]
        return value

    def __set__(self, config: Config, value: str) -> None:
        vars(config)[FLAG] = value


def declaring_files() -> list[str]:
    """Returns the file of the class that declares the flag, and that of its names."""
    (owner,) = [kind for kind in Config.__mro__ if FLAG in vars(kind).get("__annotations__", ())][:1]
    files = [Path(inspect.getfile(owner)), Path(inspect.getfile(UnetrDecoder)).with_name("named_decoders.py")]
    return [str(path.resolve().relative_to(ROOT)) for path in files]


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the files on the way in the order in which a run first enters them, those that declare the flag last."""
    files = dict[str, None]()
    make, build_network = UnetrDecoder.__init__, build.build_network

    def made(self: UnetrDecoder, *args: Any, **kwargs: Any) -> None:
        files.update(dict.fromkeys([*files_up(sys._getframe(1))][::-1]))
        make(self, *args, **kwargs)

    def built(*args: Any, **kwargs: Any) -> Any:
        def note(frame: FrameType, event: str, arg: object) -> None:
            name = file_of(frame) if event == "call" else None
            if name and name.startswith(BUILDING):
                files.setdefault(name)

        files.update(dict.fromkeys([*files_up(sys._getframe(1))][::-1]))
        sys.setprofile(note)
        try:
            net = build_network(*args, **kwargs)
        finally:
            sys.setprofile(None)
        if any(not parameter.is_meta for parameter in net.parameters()):
            raise Built
        return net

    folder = tmp_path_factory.mktemp("way")
    flags = [*tiny_data(folder), f"--{FLAG}", "unetr", "--out", str(folder / "run")]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Built):
        patch.setattr(Config, FLAG, Watched(Config.decoder, files))
        patch.setattr(UnetrDecoder, "__init__", made)
        for module in [module for name, module in sys.modules.items() if name.startswith("seqpar.")]:
            if getattr(module, "build_network", None) is build_network:
                patch.setattr(module, "build_network", built)
        train.act(flags)
    return [*files, *(name for name in declaring_files() if name not in files)]


def entries(files: list[str]) -> dict[str, int]:
    """Returns how often each folder is entered when the files are read in this order."""
    folders = [name.rpartition("/")[0] for name in files]
    turns = [folder for before, folder in zip(["", *folders], folders) if folder != before]
    return {folder: turns.count(folder) for folder in turns}


def listed() -> list[str]:
    """Returns the files of the walk in the order of the page."""
    page = (ROOT / "seqpar" / "README.md").read_text()
    (section,) = re.findall(r"^## From a flag to the network\n(.*?)^## ", page, re.S | re.M)
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)


def test_the_page_names_each_file_on_the_way(way: list[str]) -> None:
    assert sorted(listed()) == sorted(way)


def test_the_way_is_short_and_enters_no_folder_three_times(way: list[str]) -> None:
    assert len(way) <= MOST_FILES
    assert max(entries(listed()).values()) <= MOST_ENTRIES


def test_a_detour_is_counted() -> None:
    assert entries(["a/x", "a/y", "b/x", "a/z", "b/y", "a/x"]) == {"a": 3, "b": 2}
