"""A run that goes on: its data mean what they meant when it began, and held-out cases have not been trained on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.quantity import quantity

# what config.json says of data, and what it is called; networks know channels and outputs by their order alone
_MEANINGS = {"modalities": "channels", "labels": "labels", "regions": "regions", "volume_classes": "classes"}


def refuse_other_outputs(began: Mapping[str, Any], now: Mapping[str, Any], data: str, out: Path) -> None:
    """Raises DataError where channels or outputs of the data are others than those that a run began with.

    - ``began``, ``now``: what config.json says of the data, then and now
    - ``data``: where they are; ``out``: the run folder
    """
    for key, word in _MEANINGS.items():
        had, has = _names(began.get(key)), _names(now.get(key))
        if key in began and had != has:
            raise DataError(
                data or now["prepared"],
                f"has the {word} {_listed(has)}, but the run in {out} learned {_listed(had)}: restore them, or start "
                f"another run from its weights (--weights {out} with another --out)",
            )


def moved_cases(began: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns a line on cases that the run trained on and that are held out now, "" where there are none."""
    moved = sorted((set(began.get("train", ())) - set(began.get("held_out", ()))) & set(now["held_out"]))
    if not moved:
        return ""
    return (
        f"warning: {quantity(len(moved), 'case')} that this run trained on before are held out now, such as "
        f"{moved[0]}: their scores say nothing of new cases"
    )


def _names(value: Any) -> list[str]:
    """Returns names in the order of their numbers."""
    if isinstance(value, Mapping) and "names" in value:
        value = value["names"]
    return list(map(str, value or ()))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
