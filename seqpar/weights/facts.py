"""What shapes of weights do not tell of their network, and files of weights do: heads, positions and the like."""

import json
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from seqpar.settings.config import Config
from seqpar.settings.rules import setting_applies
from seqpar.text import quantity

SETTINGS, WEIGHTS = "config.json", "model.safetensors"  # in a run folder, a checkpoint and an exported run
_ENTRY = "seqpar"  # of a file's metadata
_ENCODER = ("network", "heads", "mlp", "positions", "window")
_FACTS = (*_ENCODER, "decoder", "skips", "tile", "patch")


def as_metadata(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the metadata of a safetensors file whose network was built with these settings."""
    facts = {name: settings[name] for name in _FACTS if name in settings}
    return {_ENTRY: json.dumps(facts)} if facts else {"format": "pt"}  # one: several are written in any order


def read_facts(path: str | Path) -> dict[str, Any]:
    """Returns the settings that a file of weights records, else those of the run that it is in; {} for others."""
    path = Path(path)
    if not path.is_file():  # to open a pipe may never end
        return {}
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return _facts(json.loads(archive.read(SETTINGS))["config"])
        with safe_open(path, "pt") as file:
            recorded = (file.metadata() or {}).get(_ENTRY)
        if recorded or path.name != WEIGHTS:
            return _facts(json.loads(recorded or "{}"))
        return _facts(json.loads(path.with_name(SETTINGS).read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, zipfile.BadZipFile):
        return {}  # a file of somebody else's


def read_dataset(path: str | Path) -> dict[str, Any]:
    """Returns what a run recorded of its data, from any file of its weights; {} for others."""
    path = Path(path)
    with suppress(OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # a file of somebody else's
        if path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return dict(json.loads(archive.read(SETTINGS))["dataset"])
        for folder in path.absolute().parents[:3]:  # that of a run, or of a checkpoint in it
            if (folder / SETTINGS).is_file() and "dataset" in (content := json.loads((folder / SETTINGS).read_text())):
                return dict(content["dataset"])
    return {}


def reordered_names(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for channels, labels and classes that weights have in another order than the data.

    - ``before``, ``now``: what runs record of their data
    """
    lines = []
    for what in ("channels", "labels", "classes"):
        theirs, ours = (_names(described, what) for described in (before, now))
        if any(name in ours and ours.index(name) != n for n, name in enumerate(theirs)):
            lines.append(
                f"caution: their {what} are {', '.join(theirs)}, and here {', '.join(ours)}, so that some begin with "
                "the weights of others"
            )
    return lines


def cases_learned_before(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for held-out cases whose labels the weights have learned; none for those of pretrainings.

    - ``before``, ``now``: what runs record of their data
    """
    if not before.get("labels") and not before.get("volume_classes"):
        return []
    held_out, learned = list(now.get("held_out", ())), set(before.get("train", ()))
    theirs, ours = (described.get("digests", {}) for described in (before, now))
    if theirs and ours and before.get("recipe") == now.get("recipe"):  # prepared alike: the same scans have one digest
        contents = {theirs.get(case) for case in learned}
        seen = [case for case in held_out if ours.get(case) in contents]
    else:
        seen = [case for case in held_out if case in learned] if before.get("name") == now.get("name") else []
    return [_learned(f"{quantity(len(seen), 'held-out case')}, such as {seen[0]},")] if seen else []


def fold_learned_before(fold: str, now: str) -> list[str]:
    """Returns a sentence where nnU-Net trained weights on another fold of the same data; "" is that of other data."""
    return [_learned(f"cases that --fold {now} holds out,")] if fold and fold != now and now.isdecimal() else []


def _learned(what: str) -> str:
    return f"caution: they have learned from {what} whose scores therefore say nothing of new cases"


def _names(described: Mapping[str, Any], what: str) -> list[str]:
    if what == "channels":
        return list(described.get("modalities", ()))
    if what == "classes":
        return list((described.get("volume_classes") or {}).get("names", ()))
    labels: dict[str, int] = described.get("labels", {})
    return sorted(labels, key=lambda name: labels[name])


def _facts(settings: Any) -> dict[str, Any]:
    facts = {name: settings[name] for name in _FACTS if name in settings}
    if isinstance(facts.get("patch"), int):  # of a cube, in the configs of earlier runs
        facts["patch"] = [facts["patch"]] * 3
    return facts


def differing_flags(facts: Mapping[str, Any], config: Config) -> tuple[str, str]:
    """Returns the flags in which a network of the same shapes computes otherwise, with theirs and the config's values.

    - ``facts``: of the file with their weights, as ``read_facts`` returns them
    """
    own = asdict(config)
    asked = [*_ENCODER, *(["skips"] if facts.get("decoder") == own["decoder"] else [])]
    names = [name for name in asked if name in facts and facts[name] != own[name] and _acts(config, name)]
    if "network" in names:
        names = ["network"]
    theirs, ours = (" ".join(f"--{name} {values[name]}" for name in names) for values in (facts, own))
    return theirs, ours


def _acts(config: Config, name: str) -> bool:
    """Returns whether a setting's value is that of the config's network: one that knows no windows has none."""
    return name == "window" or setting_applies(config, name)
