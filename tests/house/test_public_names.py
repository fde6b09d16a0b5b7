"""Every name that the package offers is there, says what it is, and what its arguments are."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import seqpar
import seqpar.spatial

# The vocabulary of timm and the glossary: these mean the same everywhere.
PLAIN = {
    *("in_channels", "tile", "patch", "embed_dim", "depth", "num_heads", "mlp_ratio", "norm_eps", "state_dict"),
    *("path", "split", "name", "net"),
}
OFFERED: dict[str, Any] = {name: getattr(seqpar, name) for name in dir(seqpar) if name != "__version__"}
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
    assert set(names.split()) <= set(dir(seqpar))
    assert {"Conv3d", "ConvTranspose3d", "InstanceNorm3d", "MaxPool3d", "Upsample", "GlobalMean"} <= set(
        seqpar.spatial.__all__
    )
    assert {name for name in dir(seqpar.spatial) if name[0].isupper()} == set(seqpar.spatial.__all__)
