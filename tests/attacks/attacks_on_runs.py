"""Attacks on what runs leave and begin with: weights, folders of runs that are broken or belong elsewhere."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.attack import TINY, Attack
from tests.support.folders import nnunet, save, write_json
from tests.support.folders import image_array
from tests.support.predictions import make_run


def _weights(put: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what makes a data set, and puts something where weights are looked for."""

    def make(here: Path) -> None:
        nnunet(here / "D", 5)
        put(here / "w")

    return make


def _cut(path: Path) -> None:
    make_run(path.with_name("run"))
    content = (path.with_name("run") / "model.safetensors").read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _prepared_nothing(here: Path, said: str) -> None:
    assert not (here / "cache").exists() and not (here / "runs").exists()


ATTACKS = [
    Attack(
        f"{program} from {what}",
        types=f"{program} {TINY} --data D --cache cache --weights w",
        code=code,
        says=("w", words),
        make=_weights(put),
        after=_prepared_nothing,
    )
    for program in ("train", "pretrain")
    for what, put, code, words in (
        ("a folder without weights", Path.mkdir, 2, "w: the folder holds neither model.safetensors nor a checkpoint"),
        ("weights that are cut off", _cut, 3, "w: it cannot be read as weights"),
        ("an empty file of weights", Path.touch, 3, "w: is empty (0 bytes); copy it again"),
    )
]


def _described(content: Any, archived: bool = False) -> Callable[[Path], None]:
    """Returns what makes a data set, and a run or an archive ``run`` whose config.json has this content."""

    def make(here: Path) -> None:
        nnunet(here / "D", 5)
        if archived:
            with zipfile.ZipFile(here / "run", "w") as archive:
                archive.writestr("config.json", json.dumps(content))
        else:
            write_json(here / "run" / "config.json", content)

    return make


_LABELS = {"test": ["c_000"], "regions": {}, "values": [0, 1], "ignore_label": None}

ATTACKS += [
    Attack(
        f"{line.split()[0]} by the test cases of {what}",
        types=line,
        code=code,
        says=words,
        make=_described(content, archived),
        keeps="D run",
    )
    for line in (
        "evaluate D/labelsTr D/labelsTr --test-of run --json x.json --csv x.csv",
        "predict run -i D -o out --test-part",
    )
    for what, content, archived, code, words in (
        ("a run of {}", {}, False, 3, "run/config.json: is damaged (it lacks 'dataset')"),
        ("a run with a number", {"dataset": {"test": 3}}, False, 3, "'test' of its data is no list of names"),
        ("a run with lists of lists", {"dataset": {"test": [[]]}}, False, 3, "'test' of its data is no list of names"),
        ("an archive of {}", {}, True, 2, "run is an exported run, which names no cases"),
        ("an archive with a number", {"dataset": 3}, True, 3, "run: its config.json is damaged"),
    )
]
ATTACKS += [
    Attack(
        f"evaluate by a run whose labels are {labels}",
        types="evaluate D/labelsTr D/labelsTr --test-of run --json x.json --csv x.csv",
        code=3,
        says="run/config.json: is damaged (labels of its data: ",
        make=_described({"dataset": {**_LABELS, "labels": labels}}),
        keeps="D run",
    )
    for labels in (3, {"background": 0, "a": 7})
]


def _wrote_npz(here: Path, said: str) -> None:
    content = json.loads((here / "out" / "npz" / "dataset.json").read_text())
    assert (content["name"], content["file_ending"]) == ("run", ".nii.gz")  # and not what lies in the current folder


ATTACKS += [
    Attack(
        "probabilities by a run whose data have neither name nor folder",
        types="predict run -i images -o out --npz",
        code=0,
        says="label maps of 1 case",
        make=lambda here: (
            make_run(here / "run"),
            save(here / "images" / "a_0000.nii.gz", image_array(0)),
            write_json(here / "dataset.json", {"file_ending": ".mha", "name": "another"}),
        ),
        after=_wrote_npz,
    )
]
