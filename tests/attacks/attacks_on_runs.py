"""Attacks on what runs leave and begin with: weights, folders of runs that are broken or belong elsewhere."""

import fcntl
import json
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqpar.runs.run_lock import RunLock
from tests.attacks.attack import TINY, Attack
from tests.support.folders import image_array, label_array, nnunet, save, write_json
from tests.support.predictions import RECIPE, make_run


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
        (
            "a run that learned 3",
            {"dataset": {"learned_before": 3}},
            False,
            3,
            "'learned_before' of its data is no list",
        ),
        ("a run that began with 3", {"dataset": {"weights_learned_from": [3]}}, False, 3, "is no list of data sets"),
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
    assert (content["name"], content["file_ending"]) == ("run", ".nii.gz")  # not those of the current folder


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


def ended_run(here: Path) -> None:
    """Makes a finished run whose labels a report can show."""
    make_run(here / "run", ignore_label=None, **dict.fromkeys(("name", "layout"), ""), modalities=["T1"])
    path = here / "run" / "config.json"
    content = json.loads(path.read_text())
    content["dataset"] |= {"values": [0, 1], "train": [], "held_out": []}
    write_json(path, {**content, "layout": {"ranks": 1, "data": 1, "seqpar": 1}})


def _finished(here: Path) -> None:
    """Makes a run that has taken all its steps."""
    ended_run(here)
    content = json.loads((here / "run" / "config.json").read_text())
    content["config"] |= {"batch": 2, "epochs": 3, "iterations": 2, "warmup": 0}
    write_json(here / "run" / "config.json", content)
    write_json(here / "run" / "status.json", {"state": "finished", "step": 6, "steps": 6, "why": "", "code": 0})


ATTACKS += [
    Attack(
        "train --resume of a finished run",
        types="train --resume --out run",
        code=0,
        says=(
            "run has finished at step 6 of 6: nothing is left to do; to train on, raise --epochs\n",
            "\nnext: python ",
        ),
        make=_finished,
        after=lambda here, _: _nothing_else(here),
        keeps="run",
    )
]


def _nothing_else(here: Path) -> None:
    assert [path.name for path in here.iterdir()] == ["run"]


def _pipe(name: str) -> Callable[[Path], None]:
    """Returns what makes a run in which a named pipe is in place of a file: to open it may never end."""

    def make(here: Path) -> None:
        ended_run(here)
        nnunet(here / "D", 1)
        (here / "run" / name).parent.mkdir(exist_ok=True)
        (here / "run" / name).unlink(missing_ok=True)
        os.mkfifo(here / "run" / name)

    return make


ATTACKS += [
    Attack(
        f"{line.split()[0]} a run whose {name} is a named pipe",
        types=line,
        code=code,
        says=words,
        make=_pipe(name),
        within_s=30,
    )
    for line, name, code, words in (
        ("report run", "config.json", 3, "run/config.json: is no file (but a pipe, socket or device)"),
        ("report run", "metrics.jsonl", 0, "run/report.html"),
        ("report run", "status.json", 0, "run/report.html"),
        ("report run", "validation/summary.json", 0, "run/report.html"),
        ("predict run -i D/imagesTr -o out", "config.json", 3, "run/config.json: is no file"),
        ("predict run -i D/imagesTr -o out", "window.json", 3, "run/window.json: is no file"),
        ("train --resume --out run", "config.json", 3, "run/config.json: is no file"),
        ("predict run -i D/imagesTr -o out --checkpoint run/w", "w", 3, "run/w: no such file"),
    )
]


def _config(part: str, **values: Any) -> Callable[[Path], None]:
    """Returns what makes a data set, and a run with these values in one part of its config.json."""

    def make(here: Path) -> None:
        ended_run(here)
        nnunet(here / "D", 5)
        path = here / "run" / "config.json"
        content = json.loads(path.read_text())
        write_json(path, {**content, part: {**content[part], **values}})

    return make


ATTACKS += [
    Attack(
        f"{line.split()[0]} a run whose {part} has {key} {str(value)[:40]}",
        types=line,
        code=3,
        says=("run/config.json: ", words),
        make=_config(part, **{key: value}),
        keeps="D run",
    )
    for line, part, key, value, words in (
        ("report run", "layout", "parameters", True, "lacks what a report needs (AttributeError: "),
        ("report run", "config", "patch", ["x", 4, 4], "patch is ('x', 4, 4)"),
        *(
            (line, "dataset", "recipe", {**RECIPE.to_json(), "modalities": [3]}, "the recipe normalises (3,) by ")
            for line in ("predict run -i D -o out", "export run x.zip")
        ),
        ("train --resume --out run --device cpu", "config", "tile", [8, 8, []], "tile is (8, 8, [])"),
        ("train --resume --out run --device cpu", "dataset", "train", [["a"]], "'train' of its data is no list"),
        ("train --resume --out run --device cpu", "dataset", "digests", "x", "'digests' of its data is no JSON object"),
        ("train --resume --out run --device cpu", "dataset", "voxels", {"c": 1}, "'voxels' of its data is no JSON"),
        *(
            ("train --resume --out run --device cpu", "config", key, value, f"run/config.json: cannot be used ({words}")
            for key, value, words in (
                ("val_overlap", 2, "val_overlap 2: it must be in [0, 1)): restore it, or begin anew"),
                ("workers", -3, "workers -3: it must be in [0, 256]"),
                ("lr", math.nan, "lr nan: it must be above 0"),
                ("schedule", "best", "schedule best: choose one of "),
                ("curriculum", "x", "curriculum x: x is no lesson"),
                ("fold", "x", "fold x: give a fold's number"),
                ("epochs", True, "epochs is True, and a value such as "),
                ("crop_to", [1.5, 2, 2], "crop_to is (1.5, 2, 2), and a value such as "),
            )
        ),
        ("predict run -i D -o out", "config", "precision", "best", "run/config.json: precision best: choose one of "),
        ("predict run -i D -o out", "config", "seqpar", -3, "run/config.json: seqpar -3: it must be at least 1"),
        ("predict run -i D -o out", "dataset", "labels", {"a": 0, "b": 1, "c": 2}, "its recipe has the values (0, 1)"),
    )
]


def _links(here: Path) -> None:
    """Makes a data set, a run, a link to nothing, and one that leads to itself."""
    nnunet(here / "D", 1)
    make_run(here / "run")
    (here / "gone").symlink_to("nowhere")
    (here / "circle").symlink_to("circle")


ATTACKS += [
    Attack(
        f"{line.split()[0]} through the link {target}{more}",
        types=line.format(target + more),
        code=3,
        says=("cannot ", f"{target} is a link to ", "which leads nowhere"),
        make=_links,
        keeps="D run",
    )
    for line, more in (
        ("prepare D --out {}", ""),
        ("predict run -i D -o {}", ""),
        ("predict run -i D -o {}", "/x"),
        ("export run {}", "/x.zip"),
        ("phantom --cases 1 --out {}", ""),
    )
    for target in ("gone", "circle")
    if target == "gone" or not more  # the system says by itself what is wrong with the other
]


def _kept_names(here: Path, said: str) -> None:
    assert all((here / name).is_symlink() for name in ("o", "data", "c")), said
    assert len(list((here / "o").glob("c_*.nii.gz"))) == 1


ATTACKS += [
    Attack(
        "folders that are links to folders",
        types="predict r -i data -o o",
        code=0,
        says="label maps of 1 case",
        make=lambda here: (
            _links(here),
            *((here / name).mkdir() for name in ("real", "cache")),
            *((here / a).symlink_to(b) for a, b in (("o", "real"), ("data", "D"), ("c", "cache"), ("r", "run"))),
        ),
        after=_kept_names,
        keeps="D run",
    )
]


def _held(here: Path) -> None:
    """Makes a folder of predictions that another process is writing to: this one, until the row is over."""
    _links(here)
    (here / "out").mkdir()
    handle = os.open(here / "out", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_EX)


ATTACKS += [
    Attack(
        "predict into a folder that another prediction is writing to",
        types="predict run -i D -o out",
        code=6,
        says="--output out is in use by another prediction: wait for its end, or choose another --output",
        make=_held,
        keeps="D run out",
    )
]


def _names_what_is_written(here: Path, said: str) -> None:
    assert "; circle/" not in said


ATTACKS += [
    Attack(
        f"{line.split()[0]} {line.split()[-1]}, a link to itself",
        types=line,
        code=3,
        says=words,
        make=_links,
        after=_names_what_is_written,
        keeps="D run",
    )
    for line, words in (
        ("evaluate D/labelsTr D/labelsTr --csv x.csv --json circle/x.json", "cannot be written"),
        ("evaluate D/labelsTr D/labelsTr --json x.json --csv circle/x.csv", "cannot be written"),
        ("report run --truth D --prediction circle", "run/config.json: lacks what a report needs"),
    )
]


def _live_sweep(here: Path) -> None:
    """Makes a data set, and a sweep that has just begun: this process holds its folder."""
    nnunet(here / "D", 5)
    (here / "sweep").mkdir()
    RunLock(here / "sweep").take()


ATTACKS += [
    Attack(
        f"{program} into the folder of a sweep",
        types=f"{program} {TINY} --data D --cache cache --out sweep",
        code=2,
        says="--out sweep holds a sweep, whose status would be lost: name another folder",
        make=lambda here: (nnunet(here / "D", 5), write_json(here / "sweep" / "sweep.json", {"version": 1})),
        keeps="D sweep",
        after=_prepared_nothing,
    )
    for program in ("train", "pretrain")
]
ATTACKS += [
    Attack(
        "tune on a live folder",
        types=f"tune --space lr=1e-3,1e-4 {TINY} --data D --cache cache --out sweep",
        code=6,
        says="--out sweep is in use by process",
        make=lambda here: (pytest.importorskip("ray"), _live_sweep(here)),
        keeps="D sweep",
    )
]


def _outputs(here: Path) -> None:
    """Makes a run that is validated, files of somebody's, and the labels of another data set."""
    ended_run(here)
    nnunet(here / "D", 1)
    save(here / "T" / "c_000.nii.gz", label_array())
    save(here / "run" / "validation" / "c_000.nii.gz", label_array())
    write_json(here / "run" / "validation" / "summary.json", {"classes": [], "step": 4})
    (here / "page.html").write_text("<!doctype html><p>mine</p>")


ATTACKS += [
    Attack(
        f"{line.split()[0]} over or into {line.split()[-1]}, which another program wrote",
        types=line,
        code=3,
        says=words,
        make=_outputs,
        keeps="D run page.html",
    )
    for line, words in (
        ("doctor --device cpu --json run/config.json", "run/config.json: is there, and doctor did not write it"),
        ("report run --out page.html", "page.html: is there, and report did not write it: name another file by --out"),
        ("report run --out D/page.html", "D: belongs to a data set, which report never writes into"),
        ("report run --out D/imagesTr/page.html", "D/imagesTr: belongs to a data set, which report never writes"),
        ("export run D/imagesTr/x.zip", "D/imagesTr: belongs to a data set, which export never writes into"),
        ("export run D/labelsTr", "D/labelsTr: belongs to a data set, which export never writes into"),
        ("doctor --device cpu --json D/labelsTr/x.json", "D/labelsTr: belongs to a data set, which doctor never"),
        (
            "evaluate T --regions tumour=1 run/validation",
            "run/validation/summary.json: is there, and evaluate did not write it: name another file by --json",
        ),
    )
]
ATTACKS += [
    Attack(
        "a run as the cache",
        types=f"train {TINY} --data D --cache run --out other",
        code=3,
        says="run: has config.json but no cache; give another folder (prepare: --out, train: --cache, ",
        make=lambda here: (nnunet(here / "D", 5), make_run(here / "run")),
        keeps="D run",
    ),
    Attack(
        "weights of another network",
        types=f"train {TINY} --embed-dim 48 --data D --cache cache --out other --weights run",
        code=2,
        says=("/run were trained with --heads 2", "use --heads 2"),
        make=lambda here: (nnunet(here / "D", 5), make_run(here / "run")),
        after=_prepared_nothing,
        keeps="D run",
    ),
]
