"""Every name that the package offers is there, says what it is, and what its arguments are."""

import ast
import importlib
import inspect
import pydoc
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import seqpar
import seqpar.spatial
from tests.support.reference_pages import TOPICS

# The vocabulary of timm and the glossary: these mean the same everywhere.
PLAIN = {
    *("in_channels", "tile", "patch", "embed_dim", "depth", "num_heads", "mlp_ratio", "norm_eps", "state_dict"),
    *("path", "split", "name", "net"),
}
FOLDERS = ("attention", "decoders", "losses", "spatial", "vit")
OFFERED: dict[str, Any] = {name: getattr(seqpar, name) for name in seqpar.__all__ if name not in FOLDERS}
OFFERED |= {f"spatial.{name}": getattr(seqpar.spatial, name) for name in seqpar.spatial.__all__}


def undocumented(offered: Callable[..., Any]) -> list[str]:
    """Returns the arguments that no line of the docstrings names; torch explains its own."""
    makers = [offered.__init__] if inspect.isclass(offered) else []  # type: ignore[misc]
    if any(maker.__module__.startswith("torch.") for maker in makers):
        return []
    classes = [one for one in inspect.getmro(offered) if one.__module__.startswith("seqpar")] if makers else [offered]
    texts = [one.__doc__ or "" for one in (*classes, *makers)]
    named = set(re.findall(r"``(\w+)``", " ".join(texts)))
    own = [
        p.name
        for p in inspect.signature(offered).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return [name for name in own if name not in named | PLAIN]


@pytest.mark.parametrize("name", OFFERED)
def test_each_says_what_it_is_and_what_its_arguments_are(name: str) -> None:
    offered = OFFERED[name]
    first = (offered.__doc__ or "").strip().splitlines()[:1]
    assert first and len(first[0]) > 20 and first[0].endswith((".", ":")), (name, first)
    assert not first[0].startswith(f"{name}("), "a docstring that dataclass made"
    assert undocumented(offered) == [], name


def test_an_argument_without_a_line_is_seen() -> None:
    def act(width: int, height: int, *more: int) -> None:
        """Does something with ``width``."""

    assert undocumented(act) == ["height"]


def test_the_names_of_a_loop_of_ones_own_are_there() -> None:
    names = "SeqParViT start Layout DiceCE choose_mode SegmentationNet PlainDecoder UnetrDecoder PrimusDecoder BoxGrid"
    names += " ParallelAttention make_loss spatial losses attention vit decoders"
    assert set(names.split()) <= set(dir(seqpar))
    assert {"Conv3d", "ConvTranspose3d", "InstanceNorm3d", "MaxPool3d", "Upsample", "GlobalMean"} <= set(
        seqpar.spatial.__all__
    )
    assert {name for name in dir(seqpar.spatial) if name[0].isupper()} == set(seqpar.spatial.__all__)


def test_the_package_shows_its_public_names_and_nothing_else() -> None:
    shown = set(seqpar.__all__)
    assert {name for name in dir(seqpar) if not name.startswith("_")} == shown and set(FOLDERS) <= shown
    space: dict[str, Any] = {}
    exec("from seqpar import *", space)
    assert space.keys() - {"__builtins__"} == shown
    text = pydoc.plain(pydoc.render_doc(seqpar))
    assert [name for name in shown - {*FOLDERS} if f" {name}" not in text] == []
    assert "importlib" not in text and "TYPE_CHECKING" not in text
    with pytest.raises(AttributeError, match="module 'seqpar' has no attribute 'SeqParVit'; it has .*SeqParViT"):
        seqpar.SeqParVit  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_names_that_are_imported_when_first_used() -> None:
    tree = ast.parse(Path(seqpar.__file__).read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    seen = {
        alias.asname: importlib.import_module(f"seqpar.{alias.name}" if node.module == "seqpar" else str(node.module))
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen.keys() == set(seqpar.__all__)
    for name, module in seen.items():
        assert name is not None
        assert getattr(seqpar, name) is (module if name in FOLDERS else getattr(module, name))


@pytest.mark.parametrize("name", FOLDERS)
def test_dir_of_a_folder_shows_its_names_and_nothing_else(name: str) -> None:
    folder: ModuleType = getattr(seqpar, name)
    assert sorted(folder.__all__) == dir(folder)


def flags_in_errors(code: str) -> list[str]:
    """Returns the words of each ``raise`` that name a flag."""
    raised = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Raise)]
    texts = [
        n.value for one in raised for n in ast.walk(one) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    return [text for text in texts if re.search(r"--[a-z]", text)]


def test_errors_of_the_library_name_arguments_and_no_flags() -> None:
    """The command line replaces arguments by flags; a person who called a function has none."""
    folders = ("attention", "conversion", "losses", "parallel", "pipeline", "spatial", "vit", "decoders")
    root = Path(seqpar.__file__).parent
    files = {path for folder in folders for path in (root / folder).rglob("*.py")}
    files |= {Path(inspect.getfile(offered)) for offered in OFFERED.values() if callable(offered)}
    files |= {root / "models" / f"{name}.py" for name in ("cell_network", "network", "pipelined", "token_network")}
    files |= {root / "weights" / "weight_files.py"}
    ours = [path for path in files if "torch" not in path.parts]
    assert len(ours) > 90
    assert {path.name: found for path in ours if (found := flags_in_errors(path.read_text()))} == {}
    assert flags_in_errors('raise ValueError(f"tile={tile}: use a larger --tile")') == [": use a larger --tile"]


def test_the_package_lists_its_names_by_topic_as_the_page_does() -> None:
    listed = (seqpar.__doc__ or "").partition("explains each name:\n\n")[2].split("\n\n")
    named = {section.partition("\n")[0]: set(re.findall(r"``(\w+)``", section)) for section in listed[:-1]}
    assert list(named) == list(TOPICS)
    for topic, names in TOPICS.items():
        assert set(names.split()) <= named[topic], topic


@pytest.mark.parametrize("name", FOLDERS)
def test_each_folder_says_in_a_line_what_each_of_its_names_is(name: str) -> None:
    folder: ModuleType = getattr(seqpar, name)
    lines = [line for line in (folder.__doc__ or "").splitlines() if line.startswith("- ")]
    named = {word for line in lines for word in re.findall(r"``(\w+)``", line)}
    assert [one for one in folder.__all__ if one not in named] == []
    assert all(hasattr(folder, one) for one in folder.__all__)
