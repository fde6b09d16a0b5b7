"""Attacks on what a disk holds: folders that are not ours to write, full disks, runs that cannot be read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.attacks.attack import TINY, Attack
from tests.support.folders import image_array, label_array, nnunet, save, write_json
from tests.support.predictions import make_run


def _data_and_run(here: Path, *files: str) -> None:
    """Makes a data set, a run, another image, and files that only look as if predict had been there."""
    nnunet(here / "D", 5)
    make_run(here / "run")
    save(here / "images" / "new_0000.nii.gz", image_array(0))
    for name in files:
        write_json(here / name, {"run": "run", "weights": {}})


def _copied_truth(here: Path) -> None:
    _data_and_run(here)
    shutil.copytree(here / "D" / "labelsTr", here / "truth")


def _classes_and_truth(here: Path) -> None:
    _copied_truth(here)
    save(here / "C" / "a.nii.gz", image_array(0)).with_name("labels.csv").write_text("case,class\na,b\n")


def _latin1(here: Path) -> None:
    """Makes label maps and equal predictions of a case whose name is no UTF-8."""
    for folder in ("truth", "predicted"):
        path = save(here / folder / "c.nii.gz", label_array())
        os.rename(path, os.fsencode(path.parent) + b"/\xe4.nii.gz")


ATTACKS = [
    Attack(
        "evaluate a case whose name is no UTF-8",
        types="evaluate truth predicted --regions T=1",
        code=0,
        says="1 case, 1 class: mean Dice 1.0000",
        make=_latin1,
        after=lambda here, _: (here / "predicted" / "metrics.csv").read_text(encoding="utf-8"),
    ),
    Attack(
        "predict over true label maps",
        types="predict run -i D -o D/labelsTr",
        make=_data_and_run,
        code=3,
        says="D/labelsTr: belongs to a data set",
        keeps="D",
    ),
    Attack(
        "predict over true label maps next to a prediction.json",
        types="predict run -i D -o D/labelsTr",
        make=lambda here: _data_and_run(here, "D/labelsTr/prediction.json"),
        code=3,
        says="D/labelsTr: belongs to a data set",
        keeps="D",
    ),
    Attack(
        "predict over label maps of another folder next to a prediction.json",
        types="predict run -i D -o truth",
        make=lambda here: (
            _data_and_run(here),
            (here / "D" / "labelsTr").rename(here / "truth"),
            write_json(here / "truth" / "prediction.json", {"run": "run"}),
        ),
        code=3,
        says=("truth/c_000.nii.gz: would be overwritten", "choose another --output"),
        keeps="truth D",
    ),
    Attack(
        "predict another image into imagesTr",
        types="predict run -i images -o D/imagesTr",
        make=_data_and_run,
        code=3,
        says="D/imagesTr: belongs to a data set",
        keeps="D",
    ),
    Attack(
        "predict next to the images through a link",
        types="predict run -i images -o link",
        make=lambda here: (_data_and_run(here), (here / "link").symlink_to("images")),
        code=3,
        says="link: holds new_0000.nii.gz",
        keeps="images",
    ),
]

ATTACKS += [
    Attack(
        f"evaluate {line}",
        types=f"evaluate {line}",
        make=make,
        code=3,
        says=f"{folder}: belongs to a data set, which evaluate never writes into: name another place by --",
        keeps=folder.split("/")[0],
    )
    for line, folder, make in (
        ("D/labelsTr D/labelsTr", "D/labelsTr", _data_and_run),
        ("D D/labelsTr", "D/labelsTr", _data_and_run),
        ("D/labelsTr link", "link", lambda here: (_data_and_run(here), (here / "link").symlink_to("D/labelsTr"))),
        ("D/labelsTr D/labelsTr --json x.json", "D/labelsTr", _data_and_run),
        ("D/labelsTr truth --csv D/imagesTr/x.csv --json x.json", "D/imagesTr", _copied_truth),
        ("truth truth --regions T=1", "truth", _copied_truth),
        ("truth truth --regions T=1 --json D/x.json --csv x.csv", "D", _copied_truth),
        ("truth truth --regions T=1 --json D/labelsTr/sub/x.json --csv x.csv", "D/labelsTr/sub", _copied_truth),
        ("truth truth --regions T=1 --json C/x.json --csv x.csv", "C", _classes_and_truth),
    )
]
ATTACKS += [
    Attack(
        "evaluate by the labels of a data set's folder",
        types="evaluate truth truth --dataset D --json x.json --csv x.csv",
        make=_copied_truth,
        code=0,
        says="5 cases, 1 class: mean Dice 1.0000",
        keeps="D truth",
    ),
    Attack(
        "evaluate by a folder without dataset.json",
        types="evaluate truth truth --dataset images --json x.json --csv x.csv",
        make=_copied_truth,
        code=3,
        says="images/dataset.json: ",
    ),
]
_RUN_READERS = {
    "train": "train --data D --cache cache --device cpu --workers 0 --resume --out run",
    "train --fold all5": "train --data D --cache cache --resume --fold all5 --out run",
    "predict": "predict run -i D -o out",
    "report": "report run",
    "export": "export run run.zip",
    "pretrain": "pretrain --resume --out run",
    "predict --test-part": "predict run -i D -o out --test-part",
    "evaluate --test-of": "evaluate D/labelsTr images --test-of run --json x.json --csv x.csv",
}


_READERS = ("train", "predict", "report", "export")


def _damaged(name: str, content: bytes) -> Callable[[Path], None]:
    """Returns what makes a data set, and a run of which a file has this content."""

    def make(here: Path) -> None:
        _data_and_run(here)
        config = json.loads((here / "run" / "config.json").read_text())
        config["config"]["batch"] = 2
        if content.startswith(b"{...") and name == "config.json":
            changed = json.loads(b"{" + content.removeprefix(b"{...,"))
            config = {**config, "layout": {"data": 1, "seqpar": 1}, **changed}
            write_json(here / "run" / name, config)
            return
        write_json(here / "run" / "config.json", {**config, "layout": {"data": 1, "seqpar": 1}})
        (here / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "folds.json":
            (here / "run" / "config.json").unlink()
        (here / "run" / name).write_bytes(content)

    return make


ATTACKS += [
    Attack(
        f"{program} with a run whose {name} is {content.decode(errors='replace')[:40]!r}",
        types=_RUN_READERS[program],
        make=_damaged(name, content),
        code=3,
        says=f"run/{name.split('/')[0]}",
        keeps="D",
    )
    for name, content, programs in (
        ("config.json", b"", _READERS),
        ("config.json", b"\xff\xfe", _READERS),
        ("config.json", b"[]", _READERS),
        ("config.json", b'{"dataset": {"test": ["c_000"]}}', ("evaluate --test-of",)),
        ("config.json", b'{"config": 3}', ("pretrain", "predict --test-part", "evaluate --test-of")),
        ("config.json", b'{"config": 3, "dataset": {}, "layout": {}}', _READERS),
        ("config.json", b'{...,"dataset": 3}', _READERS),
        ("config.json", b'{...,"config": {"depth": "x"}}', ("train", "predict")),
        ("config.json", b'{...,"config": {"decoder": "foo"}}', ("train", "predict")),
        ("config.json", b'{...,"layout": {"data": "x"}}', ("train",)),
        ("config.json", b'{...,"layout": {"data": 1, "global_batches": [0]}}', ("train",)),
        ("config.json", b'{...,"history": 3}', ("train",)),
        ("window.json", b"{", ("predict",)),
        ("model.safetensors", b"{", ("predict", "export")),
        ("checkpoints/step-00000001/manifest.json", b"{", ("train",)),
        ("folds.json", b"{", ("train --fold all5",)),
    )
    for program in programs
]


def _read_only(here: Path) -> None:
    """Makes a data set, a run, and a folder in which nobody may write."""
    _data_and_run(here)
    for folder in (here, *(path for path in here.rglob("*") if path.is_dir())):
        folder.chmod(0o777)
    (here / "ro").mkdir()
    (here / "ro").chmod(0o555)


def _prepared_nothing(here: Path, said: str) -> None:
    assert not (here / "cache").exists() and not (here / "out").exists()


def _without_gpu(here: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    _data_and_run(here)


ATTACKS += [
    Attack(
        f"{line.split()[0]} {' '.join(line.split()[-4:])}, which is read-only",
        types=line,
        make=_read_only,
        as_nobody=True,
        code=3,
        says=(line.split()[-1], "cannot be written (Permission denied)"),
        keeps="ro run",
        after=_prepared_nothing,
    )
    for line in (
        f"train {TINY} --data D --cache cache --out ro",
        f"train {TINY} --data D --cache cache --out ro/x",
        f"train {TINY} --data D --cache cache --fold all5 --out ro/x",
        f"train {TINY} --data D --out out --cache ro/x",
        f"pretrain {TINY} --data D --cache cache --out ro/x",
        "predict run -i D -o ro",
        "predict run -i D -o ro/x",
        "evaluate D/labelsTr D/labelsTr --csv x.csv --json ro/x.json",
        "export run ro/x.zip",
        "prepare D --out ro/x",
        "figures 5 --out ro/x",
    )
]

ATTACKS += [
    Attack(
        f"{program} with --out {out}",
        types=f"{program} {line} --data D --cache cache --out {out}",
        make=lambda here: (_data_and_run(here), (here / "gone").symlink_to("nowhere"), (here / "l").symlink_to("l")),
        code=3,
        says=(f"--out {out}: cannot be written (", why),
        keeps="D",
        after=_prepared_nothing,
    )
    for program, line in (
        ("train", TINY.replace(" --batch 2", "")),
        ("pretrain", TINY),
        ("tune", f"--space lr=1e-3 {TINY}"),
    )
    for out, why in (
        ("D/dataset.json", "Not a directory"),
        ("D/dataset.json/x", "Not a directory"),
        ("gone", "gone is a link to nowhere, which leads nowhere"),
        ("l/x", "Too many levels of symbolic links"),
    )
]
ATTACKS += [
    Attack(
        f"{line.split()[0]} on a GPU that is not there",
        types=f"{line} {TINY.replace('cpu', 'cuda')} --data D --cache cache --out out",
        make=_without_gpu,
        code=2,
        says=f"--device cuda: {words}",
        after=_prepared_nothing,
    )
    for line, words in (
        ("train", "no GPU is visible"),
        ("pretrain", "no GPU is visible"),
        ("tune --space lr=1e-3", "this machine has no GPU"),
    )
]


def _odd(name: str, put: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what makes a run and images, and puts something among them that has an image's name."""

    def make(here: Path) -> None:
        make_run(here / "run")
        save(here / "images" / "a_0000.nii.gz", image_array(0))
        put(here / "images" / name)

    return make


def _predicted_a(here: Path, said: str) -> None:
    assert [path.name for path in (here / "out").glob("*.nii.gz")] == ["a.nii.gz"]


ATTACKS += [
    Attack(
        f"predict where an image is {what}",
        types="predict run -i images -o out",
        make=_odd("x_0000.nii.gz", put),
        code=3,
        says=("images/x_0000.nii.gz: ", words),
        after=_predicted_a,
    )
    for what, put, words in (
        ("a folder", Path.mkdir, "is a folder without DICOM files"),
        (
            "a link to nothing",
            lambda path: path.symlink_to("nowhere"),
            "x_0000.nii.gz is a link to nowhere, which leads nowhere",
        ),
        ("a link to itself", lambda path: path.symlink_to(path.name), "cannot be read (Too many levels of symbolic"),
        ("a named pipe", os.mkfifo, "is no file (but a pipe, socket or device)"),
    )
]
ATTACKS += [
    Attack(
        "predict a case that is there with two suffixes",
        types="predict run -i images -o out",
        make=_odd(
            "x_0000.nii", lambda path: (save(path, image_array(1)), save(path.with_suffix(".nii.gz"), image_array(2)))
        ),
        code=3,
        says="images/x_0000.nii.gz: is there as x_0000.nii too: keep one of them",
        after=_predicted_a,
    ),
    Attack(
        "predict an image with a line break in its name",
        types="predict run -i images -o out",
        make=_odd("b\nc_0000.nii.gz", lambda path: save(path, image_array(1))),
        code=0,
        says="label maps of 2 cases",
        after=lambda here, said: (here / "out" / "b\nc.nii.gz").stat(),
    ),
    Attack(
        "evaluate where a prediction is a link to nothing",
        types="evaluate D/labelsTr truth",
        make=lambda here: (
            _copied_truth(here),
            (here / "truth" / "c_001.nii.gz").unlink(),
            (here / "truth" / "c_001.nii.gz").symlink_to("nowhere"),
        ),
        code=3,
        says=("truth/c_001.nii.gz: cannot be read (", "is a link to nowhere, which leads nowhere"),
        keeps="D",
    ),
    Attack(
        "train where dataset.json is a named pipe",
        types=f"train {TINY} --data D --cache cache",
        make=lambda here: (
            nnunet(here / "D", 5),
            (here / "D/dataset.json").unlink(),
            os.mkfifo(here / "D/dataset.json"),
        ),
        code=3,
        says="D/dataset.json: is no file (but a pipe, socket or device)",
    ),
    *(
        Attack(
            f"{program} into {folder} of its data",
            types=f"{program} {TINY} --data {data} --cache cache --out {folder}",
            make=lambda here: nnunet(here / "D", 5),
            code=3,
            says=f"--out {folder}: belongs to a data set, which no run writes into: name another folder",
            keeps="D",
            after=_prepared_nothing,
        )
        for program, data, folder in (
            ("train", "D", "D"),
            ("train", "D", "D/labelsTr"),
            ("pretrain", "D/imagesTr", "D/imagesTr"),
        )
    ),
]
ATTACKS += [
    Attack(
        f"predict {what}",
        types=f"predict run -i images/a_0000.nii.gz {again} -o out",
        code=3,
        says=words,
        make=lambda here: (
            make_run(here / "run"),
            *(save(here / folder / "a_0000.nii.gz", image_array(0)) for folder in ("images", "others")),
        ),
        keeps="images others",
    )
    for what, again, words in (
        ("an image that is named twice", "images/a_0000.nii.gz", "images/a_0000.nii.gz: is named twice: name it once"),
        ("two cases of one name", "others/a_0000.nii.gz", "others/a_0000.nii.gz: names the same case as "),
    )
]


def _caches_in(place: str) -> Callable[[], None]:
    """Returns what names the user's cache folder."""
    return lambda: os.environ.update(SEQPAR_CACHE=place)


def _made_nothing(here: Path, said: str) -> None:
    assert "making phantoms" not in said and not (here / "cache").exists()


ATTACKS += [
    Attack(name, line, 3, words, lambda here: nnunet(here / "D", 2), _caches_in(place), keeps="D")
    for name, line, place, words in (
        (
            "a cache in a home that is not there",
            "prepare D --workers 0",
            "~nobody-here/x",
            "or set SEQPAR_CACHE to one",
        ),
        ("data in a home that is not there", "prepare ~nobody-here/D", "cache", "there is no such home folder"),
        ("prepare into its images", "prepare D --out D/imagesTr/c --workers 0", "cache", "c: is in the data set "),
        ("a cache in the data set", "prepare D --workers 0", "D", "to which nothing may be added; give another folder"),
        ("phantoms where nobody can write", f"train {TINY}", "/dev/null", "built-in phantoms: SEQPAR_CACHE"),
    )
]
ATTACKS += [
    Attack(
        "pretrain on too few phantoms",
        types="pretrain --preset mae-debug --device cpu --workers 0 --phantoms 4",
        code=2,
        says="5 folds need at least 5 cases",
        before=_caches_in("cache"),
        after=_made_nothing,
    ),
]
