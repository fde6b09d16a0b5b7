"""The folder of a prediction: going on where it stopped, errors, and files that are never touched."""

import json
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from seqpar.cli import evaluate, predict
from seqpar.cluster import exit_codes
from seqpar.data.errors import DataError
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.report.record import predicted_otherwise
from seqpar.runs import trained_run
from seqpar.runs.trained_run import load_nets
from seqpar.tasks.segment.label_map_folder import LabelMapFolder
from tests.support.folders import child, exit_code, image_array, label_array, nnunet, save, tree, write_json
from tests.support.predictions import RECIPE, SMALL, act, make_run, on_ranks


def test_one_bad_case_is_named_and_the_others_are_predicted(ranks, images, tmp_path, capfd) -> None:
    run, bad = make_run(tmp_path / "run"), images / "c_001_0000.nii.gz"
    assert act(tmp_path, run, out="good") == 0
    bad.write_bytes(bad.read_bytes()[:200])
    assert act(tmp_path, run) == exit_codes.DATA
    printed = capfd.readouterr()
    assert printed.err.count("error:") == 1 and "c_001_0000.nii.gz" in printed.err and ", 1 fault:" in printed.out
    for name in ("c_000.nii.gz", "c_002.nii.gz"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "good" / name).read_bytes()
    assert not (tmp_path / "out" / "c_001.nii.gz").exists()
    codes = ranks(2, on_ranks, str(run), "-i", str(images), "-o", str(tmp_path / "two"), seqpar=1)
    assert codes == [exit_codes.DATA] * 2 and capfd.readouterr().err.count("error:") == 1
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"c_000.nii.gz", "c_002.nii.gz", "prediction.json"}


def test_an_answer_that_is_not_finite_is_a_fault_of_its_case(images, tmp_path, capfd, monkeypatch) -> None:
    def nets(*arguments: Any) -> list[SegmentationNet]:
        (net,) = load_nets(*arguments)
        with torch.no_grad():
            net.encoder.norm.weight.fill_(float("nan"))
        return [net]

    monkeypatch.setattr(trained_run, "load_nets", nets)
    assert act(tmp_path, make_run(tmp_path / "run")) == exit_codes.DATA
    assert capfd.readouterr().err.count("NaN") == 3


def test_continue_does_what_is_left_and_the_files_are_the_same(images, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    (images / "phantom.json").write_text("{}")
    assert act(tmp_path, run, "--probabilities", out="whole") == 0
    assert json.loads((tmp_path / "whole" / "prediction.json").read_text())["generated"] is True
    for wait in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5):  # killed early and late; what is complete stays
        pid = child(lambda: act(tmp_path, run, "--probabilities", "--continue"))
        try:
            signal.sigtimedwait([signal.SIGUSR2], wait)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    leftover = tmp_path / "out" / ".c_001.rows.tmp"
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"half")
    assert act(tmp_path, run, "--probabilities", "--continue") == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    (tmp_path / "out" / "c_001.nii.gz").unlink()
    before = (tmp_path / "out" / "c_000.nii.gz").stat().st_mtime_ns
    capsys.readouterr()
    assert act(tmp_path, run, "--probabilities", "--continue") == 0
    assert "2 are done" in capsys.readouterr().out
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert (tmp_path / "out" / "c_000.nii.gz").stat().st_mtime_ns == before
    record = json.loads((tmp_path / "out" / "prediction.json").read_text())
    del record["voxels"]["c_001"], record["label_maps"]["c_001"]  # killed after the map, before it was recorded
    (tmp_path / "out" / "prediction.json").write_text(json.dumps(record))
    assert act(tmp_path, run, "--probabilities", "--continue") == 0
    assert "2 are done" in capsys.readouterr().out and tree(tmp_path / "out") == tree(tmp_path / "whole")
    record = json.loads((tmp_path / "out" / "prediction.json").read_text())
    del record["voxels"], record["label_maps"]
    (tmp_path / "out" / "prediction.json").write_text(json.dumps(record))
    for _ in range(2):  # as an earlier version wrote it
        assert act(tmp_path, run, "--probabilities", "--continue") == 0
        assert "3 are done" in capsys.readouterr().out
    shutil.copy(tmp_path / "whole" / "prediction.json", tmp_path / "out" / "prediction.json")
    emptied, cut = (tmp_path / "out" / f"c_00{number}.nii.gz" for number in (1, 2))
    emptied.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:-20])
    assert act(tmp_path, run, "--probabilities", "--continue") == 0
    assert "1 are done" in capsys.readouterr().out
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_continue_predicts_again_what_lacks_a_whole_file(images, tmp_path, capsys) -> None:
    run, flags = make_run(tmp_path / "run"), ("--probabilities", "--npz", "--uncertainty", "--statistics")
    assert act(tmp_path, run, *flags) == 0
    said, whole = capsys.readouterr().out, tree(tmp_path / "out")
    for line in ("probabilities: {}/probabilities", "probabilities as nnU-Net saves them: {}/npz",
                 "maps of uncertainty: {}/uncertainty", "statistics: {}/statistics.csv"):  # fmt: skip
        assert f"\n{line.format(tmp_path / 'out')}\n" in said
    for emptied, cut in [
        ("npz/c_000.pkl", "npz/c_001.npz"),
        ("npz/c_000.npz", "uncertainty/c_001_entropy.nii.gz"),
        ("probabilities/c_000_label-1.nii.gz", "statistics.csv"),
    ]:
        (tmp_path / "out" / emptied).write_bytes(b"")
        (tmp_path / "out" / cut).write_bytes(whole[cut][:-3])
        capsys.readouterr()
        assert act(tmp_path, run, *flags, "--continue") == 0
        assert "1 are done" in capsys.readouterr().out, (emptied, cut)
        again = tree(tmp_path / "out")
        assert sorted(again.pop("statistics.csv").splitlines()) == sorted(whole["statistics.csv"].splitlines())
        assert all(whole[name] == content for name, content in again.items()), (emptied, cut)


def test_continue_predicts_again_what_has_another_image_or_other_settings(images, tmp_path, capsys) -> None:
    run, record = make_run(tmp_path / "run"), tmp_path / "out" / "prediction.json"
    assert act(tmp_path, run) == 0
    files = [tmp_path / "out" / f"c_{number:03d}.nii.gz" for number in range(3)]
    first = [file.stat().st_mtime_ns for file in files]
    save(tmp_path / "images" / "c_001_0000.nii.gz", image_array(7))
    capsys.readouterr()
    assert act(tmp_path, run, "--continue") == 0
    assert "1 case (2 are done)" in (said := capsys.readouterr().out)
    assert "predicted again, since their images have changed: c_001" in said
    assert [file.stat().st_mtime_ns == time for file, time in zip(files, first)] == [True, False, True]
    content = json.loads(record.read_text())
    assert content.pop("inputs").keys() == {"c_000", "c_001", "c_002"}
    record.write_text(json.dumps(content))  # as older versions wrote it
    assert act(tmp_path, run, "--continue") == 0
    assert "0 cases (3 are done)" in capsys.readouterr().out
    one = str(tmp_path / "images" / "c_000_0000.nii.gz")
    assert act(tmp_path, run, "--overlap", "0.25", images=one) == 0
    assert act(tmp_path, run, "--overlap", "0.25", "--continue") == 0
    assert "2 cases (1 are done)" in capsys.readouterr().out  # and not three by two settings


def test_continue_predicts_again_what_was_replaced_by_an_image_of_its_size_and_time(tmp_path, capsys) -> None:
    run, plain = make_run(tmp_path / "run"), tmp_path / "plain"
    files = [save(plain / f"c_00{n}_0000.nii", image_array(n)) for n in range(2)]
    assert act(tmp_path, run, images=str(plain)) == 0
    before = files[1].stat()
    save(files[1], image_array(7))
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files[1].stat().st_size == before.st_size
    capsys.readouterr()
    assert act(tmp_path, run, "--continue", images=str(plain)) == 0
    assert "1 case (1 are done)" in (said := capsys.readouterr().out)
    assert "predicted again, since their images have changed: c_001" in said
    record = tmp_path / "out" / "prediction.json"
    content = json.loads(record.read_text())
    content["inputs"] = {name: [file[:3] for file in files] for name, files in content["inputs"].items()}
    write_json(record, content)  # as older versions wrote it
    assert act(tmp_path, run, "--continue", images=str(plain)) == 0
    assert "0 cases (2 are done)" in capsys.readouterr().out


def test_continue_knows_the_same_run_by_another_path(images, tmp_path, capsys, monkeypatch) -> None:
    run = make_run(tmp_path / "run")
    make_run(tmp_path / "other", config=replace(SMALL, seed=1))
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    assert act(tmp_path, Path("run")) == 0
    for path in (run, tmp_path / "other" / ".." / "run", Path("link")):
        capsys.readouterr()
        assert act(tmp_path, path, "--continue") == 0
        assert "0 cases (3 are done)" in capsys.readouterr().out, path
    (tmp_path / "archived").mkdir()
    moved = run.rename(tmp_path / "archived" / "moved")
    assert act(tmp_path, moved, "--continue") == 0
    assert "0 cases (3 are done)" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "prediction.json").read_text())["run"] == str(moved)
    with pytest.raises(DataError, match=r"other settings \(weights\)"):
        act(tmp_path, Path("other"), "--continue")
    shutil.copy(tmp_path / "other/model.safetensors", moved)
    with pytest.raises(DataError, match=r"other settings \(weights\)"):
        act(tmp_path, moved, "--continue")


def test_evaluate_says_that_the_run_is_gone_or_another_one_has_its_place(images, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run) == 0
    shutil.copytree(tmp_path / "out", tmp_path / "truth", ignore=shutil.ignore_patterns("*.json"))
    write_json(tmp_path / "dataset.json", {"labels": {"background": 0, "tumour": 1}})

    def said() -> str:
        capsys.readouterr()
        assert evaluate.act([str(tmp_path / "truth"), str(tmp_path / "out"), "--workers", "1"]) == 0
        return capsys.readouterr().out

    unknown = ": whether they were in its training data is not known."
    assert f"report.py {run} --truth" in (own := said()) and unknown not in own
    run.rename(tmp_path / "moved")
    assert f"{run}, which predicted these cases, is no longer there{unknown}" in (moved := said())
    make_run(run, config=replace(SMALL, seed=1))
    assert f"{run} holds other weights than those that predicted these cases{unknown}" in (other := said())
    assert "next: " not in moved + other


def test_continue_refuses_other_settings(images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run) == 0
    with pytest.raises(DataError, match="other settings .settings."):
        act(tmp_path, run, "--continue", "--overlap", "0.25")
    assert act(tmp_path, run, "--overlap", "0.25") == 0  # all again


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("recipe", "schemes", ["zscroe"], "normalises .*zscroe.*: it is damaged"),
        ("recipe", "schemes", ["ct"], "normalises .*ct.*None.*: it is damaged"),
        ("recipe", "spacing", [0, 1, 1], "has the spacing .0, 1, 1.*: it is damaged"),
        ("config", "precision", "fp8", "config.json: precision fp8: choose one of"),
    ],
)
def test_a_damaged_run_predicts_nothing(part: str, name: str, value: Any, says: str, images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    content = json.loads((run / "config.json").read_text())
    (content["dataset"]["recipe"] if part == "recipe" else content["config"])[name] = value
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=says):
        act(tmp_path, run)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_clear_error(ranks, images, tmp_path, capfd) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        act(tmp_path, run, out="file/out")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # a real write that fails half way
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        arguments = [str(run), "-i", str(images), "-o", str(tmp_path / "out")]
        os._exit(exit_codes.run(predict.act, arguments))

    for number in range(3):
        save(images / f"d_{number:03d}_0000.nii", image_array(number))  # unpacked: too long
    capfd.readouterr()
    assert os.waitstatus_to_exitcode(os.waitpid(child(limited), 0)[1]) == exit_codes.DATA
    errors = capfd.readouterr().err
    assert errors.count("error:") == 1 and "cannot be written" in errors and "--continue" in errors
    assert len(list((tmp_path / "out").iterdir())) == 4  # what was finished, and nothing half done


@pytest.mark.parametrize("more", [(), ("--continue",)])
def test_files_that_predict_did_not_write_are_never_touched(more: tuple[str, ...], tmp_path) -> None:
    run = make_run(tmp_path / "run")
    nnunet(tmp_path / "data")
    foreign = save(tmp_path / "out" / "c_001.nii.gz", label_array())  # the second one's is there
    before = tree(tmp_path)
    for out, why in (("out", "holds c_001.nii.gz"), ("data/labelsTr", "belongs to a data set"), ("data", "belongs to")):
        with pytest.raises(DataError, match=why):
            act(tmp_path, run, *more, images="data/imagesTr", out=out)
    assert tree(tmp_path) == before
    foreign.unlink()
    assert act(tmp_path, run, *more, images="data/imagesTr") == 0
    assert act(tmp_path, run, images="data/imagesTr") == 0  # its own files are written again
    other = save(tmp_path / "out" / "d.nii.gz", label_array())  # next to them
    save(tmp_path / "images" / "d_0000.nii.gz", image_array(0))
    before = tree(tmp_path / "out")
    with pytest.raises(DataError, match="d.nii.gz: would be overwritten, and no prediction.json next to it lists it"):
        act(tmp_path, run)
    assert tree(tmp_path / "out") == before and other.is_file()


def test_a_record_of_an_older_version_lists_no_label_maps(images, tmp_path) -> None:
    run, record = make_run(tmp_path / "run"), tmp_path / "out" / "prediction.json"
    assert act(tmp_path, run) == 0
    content = json.loads(record.read_text())
    assert content["files"] == ["c_000.nii.gz", "c_001.nii.gz", "c_002.nii.gz"]
    del content["files"]
    record.write_text(json.dumps(content))
    (tmp_path / "out" / "c_001.nii.gz").unlink()
    before = tree(tmp_path / "out")
    with pytest.raises(DataError, match=r"c_000\.nii\.gz: would be overwritten"):
        act(tmp_path, run)
    assert tree(tmp_path / "out") == before
    assert act(tmp_path, run, "--continue") == 0
    assert json.loads(record.read_text())["files"] == ["c_001.nii.gz"]
    record.write_text('{"files": 3}')
    with pytest.raises(DataError, match="is not a record that predict wrote"):
        act(tmp_path, run)


@pytest.mark.parametrize(
    "names, case", [(("a/b", "a b"), "x"), (("b", "a_b"), "x_a")], ids=["one case's", "two cases'"]
)
def test_outputs_that_would_share_a_file_are_refused_before_anything(names: Any, case: str, tmp_path) -> None:
    for name in ("x", case):
        save(tmp_path / "images" / f"{name}_0000.nii.gz", image_array(0))
    regions = {names[0]: [1], names[1]: [1, 2]}
    recipe = replace(RECIPE, values=(0, 1, 2))
    run = make_run(tmp_path / "run", recipe, regions=regions, regions_class_order=[1, 2])
    with pytest.raises(DataError, match="two of the outputs"):
        act(tmp_path, run, "--probabilities")
    assert not (tmp_path / "out").exists()
    assert act(tmp_path, run) == 0


def test_nothing_of_another_prediction_stays_next_to_a_label_map(images, tmp_path, capsys) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    own = {"c_001.nii.gz", "npz/c_001.npz", "npz/c_001.pkl", "uncertainty/c_001_entropy.nii.gz"}
    shutil.copy(images / "c_001_0000.nii.gz", images / "c_001_more_0000.nii.gz")  # its name begins as another's
    assert act(tmp_path, run, "--npz", "--uncertainty", "--statistics") == 0
    first = tree(out)
    assert own <= first.keys()
    one = str(images / "c_001_0000.nii.gz")
    capsys.readouterr()
    (out / "summary.json").write_text("{}")
    assert act(tmp_path, run, "--overlap", "0.25", images=one) == 0
    (out / "summary.json").unlink()
    second = tree(out)
    warning = "warning: {} also holds 3 cases predicted with other settings (c_000, c_001_more, c_002)"
    said = capsys.readouterr().out
    assert warning.format(out) in said and f"replacing what {out} holds of c_001\n" in said
    assert f"the scores in {out}/summary.json are of what was there before: evaluate again\n" in said
    assert first.keys() - second.keys() == own - {"c_001.nii.gz"}
    assert b"\nc_001," in first["statistics.csv"] and b"\nc_001," not in second["statistics.csv"]
    assert b"\nc_001_more," in second["statistics.csv"]
    assert act(tmp_path, run, "--overlap", "0.25", images=one) == 0  # the same again
    assert warning.format(out) in capsys.readouterr().out
    for path in out.glob("*.nii.gz"):
        labels = np.asarray(nibabel.load(path).dataobj).copy()
        labels[:2, :2, :2] = 1
        save(tmp_path / "truth" / path.name, labels, nibabel.load(path).affine)
    assert evaluate.act([str(tmp_path / "truth"), str(out), "--regions", "tumour=1", "--workers", "1"]) == 0
    assert warning.format(out) in capsys.readouterr().out
    assert act(tmp_path, run, "--overlap", "0.25") == 0  # all
    assert "warning" not in capsys.readouterr().out and not (out / "statistics.csv").exists()
    assert {name for name in tree(out) if "/" in name} <= {"npz/plans.json", "npz/dataset.json"}


def test_further_files_of_some_cases_are_no_other_settings(images, tmp_path, capsys) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    assert act(tmp_path, run, images=str(images / "c_000_0000.nii.gz")) == 0
    assert act(tmp_path, run, "--statistics", images=str(images / "c_001_0000.nii.gz")) == 0
    assert "other settings" not in capsys.readouterr().out and predicted_otherwise(out) == []
    assert act(tmp_path, run, "--statistics", "--continue") == 0
    assert "2 cases (1 are done)" in capsys.readouterr().out, "one of the others has no statistics yet"
    assert act(tmp_path, run, "--window-batch", "2", images=str(images / "c_002_0000.nii.gz")) == 0
    assert "other settings" not in capsys.readouterr().out and predicted_otherwise(out) == []
    assert act(tmp_path, run, "--overlap", "0.25", images=str(images / "c_002_0000.nii.gz")) == 0
    assert predicted_otherwise(out) == ["c_000", "c_001"]


def test_probabilities_of_a_case_whose_output_is_anothers_name_stay(images, tmp_path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    other = images / "c_001_label-1_0000.nii.gz"  # as c_001's probabilities are called
    shutil.copy(images / "c_001_0000.nii.gz", other)
    assert act(tmp_path, run, "--probabilities", "--statistics") == 0
    first = tree(out)
    own = {f"probabilities/c_001_label-1_label-{number}.nii.gz" for number in (0, 1)}
    assert own <= first.keys() and "probabilities/c_001_label-1.nii.gz" in first
    assert act(tmp_path, run, images=str(other)) == 0
    assert first.keys() - tree(out).keys() == own
    assert {*json.loads((out / "prediction.json").read_text())["files"]} == tree(out).keys() - {"prediction.json"}
    assert act(tmp_path, run) == 0
    assert {*json.loads((out / "prediction.json").read_text())["files"]} == tree(out).keys() - {"prediction.json"}
    assert not (out / "statistics.csv").exists()


def test_what_was_predicted_before_stays_until_it_is_predicted_anew(images, tmp_path, capsys, monkeypatch) -> None:
    """Killed with one of three cases done: the other two are there as before, and the record says whose they are."""
    old, out = make_run(tmp_path / "old"), tmp_path / "out"
    new = make_run(tmp_path / "new", config=replace(SMALL, seed=1))
    flags = ("--npz", "--statistics")
    assert act(tmp_path, old, *flags) == act(tmp_path, new, *flags, out="whole") == 0
    before, write = tree(out), LabelMapFolder.write

    def die_before_the_second(folder: LabelMapFolder, case: Any, *more: Any) -> None:
        if case.id == "c_001":
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, case, *more)

    monkeypatch.setattr(LabelMapFolder, "write", die_before_the_second)
    assert exit_code(child(lambda: act(tmp_path, new, *flags))) == -signal.SIGKILL
    monkeypatch.undo()
    now, record = tree(out), json.loads((out / "prediction.json").read_text())
    stays = [name for name in before if "c_001" in name or "c_002" in name]
    assert len(stays) == 2 * 3 and all(now[name] == before[name] for name in stays)
    assert Path(record["run"]).name == "new" and record["inputs"].keys() == {"c_000"}
    assert predicted_otherwise(out) == ["c_001", "c_002"]
    assert len(now["statistics.csv"].splitlines()) == len(before["statistics.csv"].splitlines())
    capsys.readouterr()
    assert act(tmp_path, new, *flags, "--continue") == 0
    said = capsys.readouterr().out
    assert "2 cases (1 are done)" in said and "warning" not in said
    after, name = tree(out), "npz/c_001.npz"
    assert after[name] == tree(tmp_path / "whole")[name] != before[name]
    assert after.keys() == before.keys() and predicted_otherwise(out) == []


def test_a_case_that_cannot_be_predicted_anew_keeps_its_map_and_is_named(images, tmp_path, capsys) -> None:
    run, kept = make_run(tmp_path / "run"), tmp_path / "out" / "c_001.nii.gz"
    assert act(tmp_path, run) == 0
    before = kept.read_bytes()
    bad = images / "c_001_0000.nii.gz"
    bad.write_bytes(bad.read_bytes()[:200])
    capsys.readouterr()
    assert act(tmp_path, run, "--overlap", "0.25") == exit_codes.DATA
    assert kept.read_bytes() == before
    assert f"{tmp_path}/out also holds 1 case predicted with other settings (c_001)" in capsys.readouterr().out


def test_a_record_that_lists_files_elsewhere_is_refused(images, tmp_path) -> None:
    run, record = make_run(tmp_path / "run"), tmp_path / "out" / "prediction.json"
    assert act(tmp_path, run, "--npz") == 0
    content = json.loads(record.read_text())
    for name in ("../run/config.json", str(tmp_path / "run" / "config.json"), "npz/../../run/config.json"):
        write_json(record, {**content, "files": [*content["files"], name]})
        with pytest.raises(DataError, match="is not a record that predict wrote"):
            act(tmp_path, run)
