"""Label maps that somebody replaced in a folder of predictions."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import DATA
from seqpar.data.errors import DataError
from seqpar.prediction.prediction_folder import replaced_line
from seqpar.prediction.predictor import Predictor
from seqpar.report.run_page import not_yet_predicted
from tests.support.folders import label_array, save, tree, write_json
from tests.support.predictions import act, make_run


def test_label_maps_that_were_replaced_are_not_taken_for_the_network_s(images, tmp_path, capsys) -> None:
    run, out, truth = make_run(tmp_path / "run"), tmp_path / "out", tmp_path / "truth"
    assert act(tmp_path, run) == 0
    shutil.copytree(out, truth, ignore=shutil.ignore_patterns("*.json"))
    assert replaced_line(out) == "" == replaced_line(truth)
    shutil.copytree(out, tmp_path / "copy")
    assert replaced_line(tmp_path / "copy") == "", "a copy has other times"
    save(out / "c_001.nii.gz", label_array((1,), (9, 17, 8)))
    said = f"1 of 3 label maps in {out}, such as c_001.nii.gz, has changed since it was written."
    assert replaced_line(out) == said
    (out / "c_001.nii.gz").rename(tmp_path / "changed.nii.gz")
    shutil.copy(truth / "c_001.nii.gz", out)
    (out / "c_001.nii.gz").write_bytes(gzip.compress(gzip.decompress((out / "c_001.nii.gz").read_bytes()), 1))
    assert replaced_line(out) == "", "packed anew"
    (out / "c_001.nii").write_bytes(gzip.decompress((out / "c_001.nii.gz").read_bytes()))
    (out / "c_001.nii.gz").unlink()
    assert replaced_line(out) == "" and not not_yet_predicted(out), "unpacked"
    (out / "c_001.nii").write_bytes(gzip.decompress((tmp_path / "changed.nii.gz").read_bytes()))
    assert replaced_line(out) == said.replace("1.nii.gz", "1.nii"), "saved under another ending"
    shutil.copy(truth / "c_001.nii.gz", out)
    assert replaced_line(out) == "", "the one that was written is there as well"
    (out / "c_001.nii.gz").unlink()
    content = json.loads((out / "prediction.json").read_text())
    for stamp in ([], [1], 5, None, {"a": 1}):
        write_json(tmp_path / "odd" / "prediction.json", content | {"label_maps": {"c_001": stamp}})
        shutil.copy(truth / "c_001.nii.gz", tmp_path / "odd")
        assert replaced_line(tmp_path / "odd") == "", stamp
        assert act(tmp_path, run, "--continue", out="odd") == 0
    (out / "c_001.nii").unlink()
    assert replaced_line(out) == "" and "1 of 3 label maps of this prediction are" in not_yet_predicted(out)[0]
    (tmp_path / "changed.nii.gz").rename(out / "c_001.nii.gz")
    capsys.readouterr()
    evaluate.act([str(truth), str(out), "--regions", "tumour=1"])
    assert said in capsys.readouterr().out
    before = tree(out)
    assert act(tmp_path, run, "--continue") == 0 and replaced_line(out) == said, "it is kept, and not the network's"
    assert f"{out} holds of c_001 has changed since it was predicted: --continue keeps it" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"c_001\.nii\.gz: holds a prediction of c_001 that has changed since predict"):
        act(tmp_path, run)
    assert tree(out) == before, "somebody's work"
    (out / "c_001.nii.gz").rename(tmp_path / "c_001.nii.gz")
    assert act(tmp_path, run) == 0 and replaced_line(out) == "", "predicted again"
    (out / "c_001.nii.gz").write_bytes((out / "c_001.nii.gz").read_bytes()[:-20])
    assert act(tmp_path, run) == 0 and replaced_line(out) == "", "nobody's work, but a file that was cut off"


def test_what_somebody_changes_while_it_is_predicted_again_is_kept(images, tmp_path, capsys, monkeypatch) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    assert act(tmp_path, run) == 0
    edited, class_ids = out / "c_002.nii.gz", Predictor.class_ids

    def edit_and_predict(*arguments, **more):
        if len(list(out.glob("c_00?.nii.gz"))) == 3 and edited.stat().st_mtime_ns != 0:
            save(edited, label_array((1,), (21, 7, 13)))
            os.utime(edited, ns=(0, 0))
        return class_ids(*arguments, **more)

    monkeypatch.setattr(Predictor, "class_ids", edit_and_predict)
    assert act(tmp_path, run) == DATA
    assert f"{edited}: holds a prediction of c_002 that has changed since predict wrote it" in capsys.readouterr().err
    assert edited.stat().st_mtime_ns == 0, "it stays"


def test_a_prediction_that_was_left_early_is_said(tmp_path: Path) -> None:
    record = {"files": ["a.nii.gz", "b.nii.gz", "npz/b.npz", "statistics.csv"]}
    (tmp_path / "a.nii.gz").touch()
    for known, way in (
        (["a"], "with --continue to try"),
        ([], "with another --output to try"),
    ):  # [] mixed settings
        (tmp_path / "prediction.json").write_text(json.dumps(record | {"inputs": dict.fromkeys(known)}))
        (said,) = not_yet_predicted(tmp_path)
        assert said.startswith("1 of 2 label maps of this prediction are not there, such as b.nii.gz") and way in said
    (tmp_path / "b.nii.gz").touch()
    assert not_yet_predicted(tmp_path) == [] == not_yet_predicted(tmp_path / "nowhere")
