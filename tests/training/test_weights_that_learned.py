"""Scores of held-out cases that a run's first weights had learned are not called new, wherever they are shown."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqpar.cli import evaluate, export, predict, prepare, report
from seqpar.data.volumes import read_volume, write_volume
from seqpar.report.cautions import cautions_together
from seqpar.runs.run_folder import describe_results
from seqpar.tasks.segment.validation import SegmentationValidation
from seqpar.training import gradients
from seqpar.weights.facts import read_dataset
from tests.support.folders import nnunet
from tests.support.training_runs import at, die, tiny_data, trained


def test_cases_that_the_first_weights_had_learned_are_said_by_train_and_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, data = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "Dataset001_Tiny"
    first, second = tmp_path / "first", tmp_path / "second"
    said = trained(1, [*flags, "--fold", "0"], first).said()
    assert "validation on 1 held-out case: loss" in said and "scores of this run say nothing" not in said
    (first / "validation.png").touch()
    assert f"  {first / 'validation.png'}: held-out cases" in describe_results(first)
    said = trained(1, [*flags, "--fold", "1", "--weights", str(first)], second).said()
    (case,) = json.loads((second / "config.json").read_text())["dataset"]["held_out"]
    caution = f"caution: they have learned from 1 held-out case, such as {case}, whose scores therefore say nothing"
    assert caution in " ".join(said.split())
    trained(1, ["--resume", "--epochs", "2", "--device", "cpu"], second)
    assert json.loads((second / "config.json").read_text())["dataset"]["learned_before"] == [case]
    assert evaluate.act([str(data), str(second), "--find-best"]) == 0
    said = capsys.readouterr().out
    assert "The weights have learned from all of these cases" in said
    assert f"Caution: {second}: see above what these weights had learned" in said
    out = tmp_path / "predictions"
    assert predict.act([str(second), "-i", str(data / "imagesTr"), "-o", str(out), "--device", "cpu"]) == 0
    assert evaluate.act([str(data), str(out)]) == 0
    assert "5 of 5 scored cases were in the run's training data" in capsys.readouterr().out
    content = json.loads((second / "config.json").read_text())
    content["config"]["heads"] = "many"
    (second / "config.json").write_text(json.dumps(content))
    assert evaluate.act([str(data), str(out)]) == 0
    assert "whether these cases were in its training data is not known" in capsys.readouterr().out, "of a damaged run"


def test_a_scan_with_two_names_is_not_new_where_one_of_them_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, data, out = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "Dataset001_Tiny", tmp_path / "run"
    trained(1, flags, tmp_path / "before")
    split = json.loads((tmp_path / "before" / "config.json").read_text())["dataset"]
    (held_out,), learned = split["held_out"], split["train"][0]
    shutil.copy(data / "imagesTr" / f"{learned}_0000.nii.gz", data / "imagesTr" / f"{held_out}_0000.nii.gz")
    pair = ", ".join(sorted((held_out, learned)))
    for more in ([], ["--check"]):
        assert prepare.act([str(data), "--out", str(tmp_path / "prepared"), *more]) == 0
        said = capsys.readouterr().err
        assert f"warning: {pair} are one scan under 2 names: if one is trained on and another held" in said
    said = " ".join(trained(1, flags, out).said().split())
    told = f"1 of 1 held-out case is the same scan as a training case, such as {held_out}, there {learned}: "
    assert f"warning: {told}" in said and told not in (tmp_path / "before" / "train.log").read_text()
    assert report.act([str(out), "--cases", "0"]) == 0 and told in (out / "report.html").read_text()
    assert "The weights have learned from all of these cases" in capsys.readouterr().out
    assert evaluate.act([str(data), str(out)]) == 0
    assert "The weights have learned from all of these cases" in capsys.readouterr().out
    found = tmp_path / "predictions"
    assert predict.act([str(out), "-i", str(data / "imagesTr"), "-o", str(found), "--device", "cpu"]) == 0
    assert evaluate.act([str(data), str(found)]) == 0
    assert "5 of 5 scored cases were in the run's training data" in capsys.readouterr().out


def test_weights_that_do_not_say_what_they_learned_are_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run names the cases behind weights; an archive and a copied file tell none, for cases are not exported."""
    flags, first = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "first"
    trained(1, [*flags, "--fold", "0"], first)
    archive, copied = tmp_path / "first.zip", tmp_path / "copied.safetensors"
    assert export.act([str(first), str(archive)]) == 0
    shutil.copy(first / "model.safetensors", copied)
    unknown = "caution: they do not say from which cases they have learned"
    for number, (weights, said) in enumerate(((archive, unknown), (copied, unknown), (first, "learned from 4 cases"))):
        begin = [*flags, "--fold", "1", "--weights", str(weights)]
        dry = trained(1, [*begin, "--dry-run"], tmp_path / "dry").said()
        assert said in " ".join(dry.split())
        if said == unknown:
            assert unknown in " ".join(trained(1, begin, tmp_path / f"run{number}").said().split())
    again = [*flags, "--fold", "2", "--weights", str(tmp_path / "run0")]
    assert unknown in " ".join(trained(1, again, tmp_path / "again").said().split()), (
        "nor do those that began with them"
    )
    data, out = tmp_path / "Dataset001_Tiny", tmp_path / "predictions"
    begun = "Training began with weights that do not say from which cases they have learned"
    assert evaluate.act([str(data), str(tmp_path / "again")]) == 0 and begun in capsys.readouterr().out
    assert predict.act([str(archive), "-i", str(data / "imagesTr"), "-o", str(out), "--device", "cpu"]) == 0
    assert evaluate.act([str(data), str(out)]) == 0
    assert "first.zip, which predicted these cases, does not say from which cases" in capsys.readouterr().out


def test_weights_do_not_forget_what_they_learned_on_other_data(tmp_path: Path) -> None:
    """A copy of a data set has the same scans, and a training on it begins with them."""
    flags, first, second = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "first", tmp_path / "second"
    data, copied = tmp_path / "Dataset001_Tiny", tmp_path / "Dataset002_Copy"
    trained(1, [*flags, "--fold", "0"], first)
    shutil.copytree(data, copied)
    elsewhere = {str(data): str(copied), str(tmp_path / "cache"): str(tmp_path / "cache2")}
    begin = [elsewhere.get(flag, flag) for flag in flags]
    said = trained(1, [*begin, "--fold", "1", "--weights", str(first)], second).said()
    assert "caution: they have learned from 1 held-out case" in " ".join(said.split())
    described = json.loads((second / "config.json").read_text())["dataset"]
    assert described["learned_before"] == described["held_out"]
    (learned,) = described["weights_learned_from"]
    assert len(learned["train"]) == len(learned["digests"]) == 4
    trained(1, ["--resume", "--epochs", "2", "--device", "cpu"], second)
    assert json.loads((second / "config.json").read_text())["dataset"]["weights_learned_from"] == [learned]


def test_cases_that_come_back_under_other_names_are_not_new(tmp_path: Path) -> None:
    flags, data, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "Dataset001_Tiny", tmp_path / "run"
    trained(1, [*flags, "--fold", "0"], run)
    learned = json.loads((run / "config.json").read_text())["dataset"]["train"]
    renamed = tmp_path / "Dataset003_Renamed"
    shutil.copytree(data, renamed)
    for path in [*renamed.glob("*/c_*")]:
        path.rename(path.with_name(path.name.replace("c_", "k_")))
    (renamed / "splits_final.json").unlink(missing_ok=True)
    more = ["--resume", "--epochs", "2", "--fold", "1", "--device", "cpu", "--data", str(renamed)]
    said = trained(1, [*more, "--cache", str(tmp_path / "cache3")], run).said()
    described = json.loads((run / "config.json").read_text())["dataset"]
    again = [case for case in described["held_out"] if case.replace("k_", "c_") in learned]
    assert again and {*again} <= {*described["learned_before"]}
    assert f"this run trained on {len(again)} case" in " ".join(said.split())


def test_a_run_that_goes_on_with_other_data_keeps_what_it_learned_before(tmp_path: Path) -> None:
    """Cases of other data may have the same names, so that names alone do not tell."""
    flags, run, later = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "run", tmp_path / "later"
    other = nnunet(tmp_path / "Dataset004_Other", cases=5)
    for path in other.glob("imagesTr/*"):
        volume = read_volume(path)
        write_volume(path, volume.array[::-1] + 1, volume.geometry)
    trained(1, [*flags, "--fold", "0"], run)
    more = ["--resume", "--epochs", "2", "--device", "cpu", "--data", str(other), "--cache", str(tmp_path / "cache4")]
    trained(1, more, run)
    (learned,) = json.loads((run / "config.json").read_text())["dataset"]["weights_learned_from"]
    assert learned["name"] == "Dataset001_Tiny" and len(learned["digests"]) == 4
    said = trained(1, [*flags, "--fold", "1", "--weights", str(run)], later).said()
    assert "caution: they have learned from 1 held-out case" in " ".join(said.split())
    stray = Path(shutil.copy(run / "model.safetensors", later / "first.safetensors"))
    assert read_dataset(stray) == {} and read_dataset(later / "model.safetensors")


def test_scans_are_known_by_their_voxels_when_data_with_the_same_names_take_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, run, first = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "run", tmp_path / "Dataset001_Tiny"
    sets = {"first": first}
    for which in ("second", "third"):
        sets[which] = nnunet(tmp_path / which / "Dataset001_Tiny", cases=5)
        for path in sets[which].glob("imagesTr/*"):
            volume = read_volume(path)
            write_volume(path, volume.array[::-1] + len(which), volume.geometry)
    trained(1, [*flags, "--fold", "0"], run)
    elsewhere = ["--data", str(sets["second"]), "--cache", str(tmp_path / "cache2")]
    for epochs, more in (("2", elsewhere), ("3", [])):
        said = trained(1, ["--resume", "--epochs", epochs, "--fold", "1", "--device", "cpu", *more], run).said()
        described = json.loads((run / "config.json").read_text())["dataset"]
        assert "that it holds out now" not in said and "learned_before" not in described
        assert described["validated"] == described["held_out"] if "validated" in described else True
    (earlier,) = described["weights_learned_from"]
    assert earlier["train"] != described["train"], "another fold"

    def known(which: str) -> str:
        out = tmp_path / "predicted" / which
        assert predict.act([str(run), "-i", str(sets[which] / "imagesTr"), "-o", str(out), "--device", "cpu"]) == 0
        capsys.readouterr()
        assert evaluate.act([str(sets[which] / "labelsTr"), str(out)]) == 0
        return " ".join(capsys.readouterr().out.split())

    for which, there in (("first", earlier), ("second", described)):
        (case,) = {f"c_{n:03d}" for n in range(5)} - {*there["train"]}
        said = known(which)
        assert "4 of 5 scored cases were in the run's training data" in said
        chose = f"({case})" if which == "second" else f"({case}, there {case} of Dataset001_Tiny)"
        assert f"1 of 5 scored cases helped to choose the run's weights {chose}" in said
    assert "training data" not in (said := known("third")) and "names of the run" not in said


def test_first_weights_are_known_to_have_learned_files_that_are_prepared_or_written_otherwise_now(
    tmp_path: Path,
) -> None:
    flags, first = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "first"
    trained(1, [*flags, "--fold", "0"], first)
    other = tmp_path / "Dataset005_Written"
    shutil.copytree(tmp_path / "Dataset001_Tiny", other)
    for path in other.glob("imagesTr/*"):
        volume = read_volume(path)
        path.unlink()
        write_volume(path.with_name(path.name.removeprefix("c_")), volume.array.astype(np.float32), volume.geometry)
    for path in other.glob("labelsTr/*"):
        path.rename(path.with_name(path.name.removeprefix("c_")))
    paths = {str(tmp_path / "Dataset001_Tiny"): str(other), str(tmp_path / "cache"): str(tmp_path / "cache5")}
    begin = [paths.get(flag, flag) for flag in flags]
    more = ["--fold", "1", "--spacing", "1.5,1.5,1.5", "--weights", str(first)]
    said = trained(1, [*begin, *more], tmp_path / "second").said()
    assert "caution: they have learned from 1 held-out case" in " ".join(said.split())


def test_scores_of_trainings_on_two_states_of_the_data_say_so(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    trained(1, [*tiny_data(tmp_path), "--epochs", "1", "--fold", "0"], run)
    shutil.copytree(run, other)
    assert cautions_together([run, other]) == []
    content = json.loads((other / "config.json").read_text())
    case = content["dataset"]["train"][0]
    content["dataset"]["digests"][case] = "of another label map"
    (other / "config.json").write_text(json.dumps(content))
    (said,) = cautions_together([run, other])
    assert said.startswith(f"Caution: 1 case, such as {case}, changed between these trainings")
    content["dataset"] |= {"name": "Dataset009_Other", "voxels": {case: "another scan"}}
    (other / "config.json").write_text(json.dumps(content))
    (said,) = cautions_together([run, other])
    assert "these runs were trained on several data sets: Dataset001_Tiny, Dataset009_Other: cases of one name" in said


def test_a_label_map_that_is_replaced_under_a_training_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, data = [*tiny_data(tmp_path), "--epochs", "1", "--fold", "0"], tmp_path / "Dataset001_Tiny"
    assert "has been replaced" not in trained(1, flags, tmp_path / "before").said()
    (case,) = json.loads((tmp_path / "before" / "config.json").read_text())["dataset"]["held_out"]
    label, measure = data / "labelsTr" / f"{case}.nii.gz", SegmentationValidation.run

    def replace_label(*arguments: Any, **named: Any) -> Any:
        volume = read_volume(label)
        write_volume(label, (volume.array == 0).astype(np.uint8), volume.geometry)
        return measure(*arguments, **named)

    monkeypatch.setattr(SegmentationValidation, "run", replace_label)
    said = " ".join(trained(1, flags, tmp_path / "run").said().split())
    assert f"{label}: has been replaced since this run prepared it" in said
    assert "train --resume with more --epochs prepares it again" in said, "without, a finished run has nothing to do"


def test_label_maps_that_are_replaced_are_named_once_at_the_next_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, data = [*tiny_data(tmp_path), "--epochs", "4", "--fold", "0"], tmp_path / "Dataset001_Tiny"
    trained(1, [*flags, "--epochs", "1"], tmp_path / "before")
    train = json.loads((tmp_path / "before" / "config.json").read_text())["dataset"]["train"]
    labels, measure, calls = [data / "labelsTr" / f"{case}.nii.gz" for case in train], SegmentationValidation.run, [0]

    def replace_labels(*arguments: Any, **named: Any) -> Any:
        result = measure(*arguments, **named)
        calls[0] += 1
        for label in labels[:2] if calls[0] == 1 else ():
            volume = read_volume(label)
            write_volume(label, (volume.array == 0).astype(np.uint8), volume.geometry)
        for label in labels[2:]:
            label.touch()
        return result

    monkeypatch.setattr(SegmentationValidation, "run", replace_labels)
    said = " ".join(trained(1, flags, tmp_path / "run").said().split())
    told = (
        f"warning: 2 label maps, such as {labels[0]}, have been replaced since this run prepared them: training and its"
    )
    _, first, second, *_ = said.split("validation on 1 held-out case")
    assert told in second and said.count("been replaced") == 1 and told not in first


def test_what_earlier_starts_learned_stays_known_and_their_label_maps_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, data, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "Dataset001_Tiny", tmp_path / "run"
    trained(1, [*flags, "--fold", "0"], run)
    for epochs in ("2", "3"):
        said = trained(1, ["--resume", "--epochs", epochs, "--fold", "1", "--device", "cpu"], run).said()
        assert "this run trained on 1 case that it holds out now, or keeps for tests" in " ".join(said.split())
    described = json.loads((run / "config.json").read_text())["dataset"]
    assert described["learned_before"] == described["held_out"] and len(described["held_out"]) == 1
    maps = [path.name.removesuffix(".nii.gz") for path in (run / "validation").glob("*.nii.gz")]
    assert maps == described["held_out"]
    trained(1, ["--resume", "--epochs", "4", "--fold", "2", "--train-cases", "2", "--device", "cpu"], run)
    left = [path.name.removesuffix(".nii.gz") for path in (run / "validation").glob("*.nii.gz")]
    assert left != maps and left == json.loads((run / "config.json").read_text())["dataset"]["held_out"]
    trained(1, ["--resume", "--epochs", "5", "--fold", "1", "--device", "cpu"], run)
    described = json.loads((run / "config.json").read_text())["dataset"]
    assert evaluate.act([str(data), str(run)]) == 0
    assert "The weights have learned from all of these cases" in capsys.readouterr().out


def test_a_run_of_which_nothing_was_saved_has_learned_from_no_case(tmp_path: Path) -> None:
    """It begins anew, so that the split of its first start tells nothing of its weights."""
    flags, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "run"
    killed = at(gradients.Gradients, "_backward", 0, die, call=2)
    trained(1, [*flags, "--fold", "0"], run, expect=-signal.SIGKILL, hook=killed)
    began = json.loads((run / "config.json").read_text())["dataset"]
    said = " ".join(trained(1, ["--resume", "--fold", "1", "--device", "cpu"], run).said().split())
    described = json.loads((run / "config.json").read_text())["dataset"]
    assert "nothing was saved before" in said and {*described["held_out"]} <= {*began["train"]}
    assert "this run trained on" not in said and "learned_before" not in described


def test_a_case_that_chose_the_weights_and_is_kept_for_tests_now_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, data, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "Dataset001_Tiny", tmp_path / "run"

    def described() -> dict[str, Any]:
        return dict(json.loads((run / "config.json").read_text())["dataset"])

    trained(1, [*flags, "--fold", "20:60:20", "--val-cases", "2"], run)
    began = described()
    assert len(began["held_out"]) == 3 and began["validated"] == began["held_out"][:2]
    said = trained(1, ["--resume", "--epochs", "2", "--fold", "20:20:60", "--device", "cpu"], run).said()
    now, out = described(), tmp_path / "predictions"
    assert {*now["validated"]} == {*began["validated"], *now["held_out"]}
    chose = sorted({*now["test"]} & {*began["validated"]})
    assert chose, "each split shuffles alike"
    told = f"keeps for tests now helped to choose its weights, such as {chose[0]}: such scores tend to be too good"
    assert told in " ".join(said.split())
    line = ["-i", str(data / "imagesTr"), "-o", str(out), "--device", "cpu", "--test-part"]
    assert predict.act([str(run), *line]) == 0
    capsys.readouterr()
    assert evaluate.act([str(data), str(out), "--test-of", str(run)]) == 0
    assert f"scored cases helped to choose the run's weights ({', '.join(chose)}): " in capsys.readouterr().out


def test_a_run_of_all_cases_holds_none_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "run"
    said = trained(1, [*flags, "--fold", "all"], run).said()
    assert "5 cases: 5 to train on, also used to validate (fold all): scores say nothing about new cases" in said
    assert "validation on 5 cases that the run trains on: loss" in said and "held-out" not in said
    (run / "validation.png").touch()
    assert f"  {run / 'validation.png'}: cases that the run trains on" in describe_results(run)
    assert "  scores of this run say nothing about new cases: it is validated on cases that it trains on\n" in said
    assert report.act([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "on cases that the run trains on (up to 5 cases)" in page and "held out (n" not in page
    assert "on held-out cases" not in page and "validation (n = 5)" in page
    capsys.readouterr()
    assert evaluate.act([str(tmp_path / "Dataset001_Tiny"), str(run)]) == 0
    assert "The weights have learned from all of these cases (--fold all" in capsys.readouterr().out


def test_a_run_without_its_checkpoints_keeps_the_weights_that_it_has(tmp_path: Path) -> None:
    """A copy may lack them; training would begin anew and replace the weights."""
    flags, run, copied = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "run", tmp_path / "copied"
    trained(1, [*flags, "--fold", "0"], run)
    copied.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / name, copied)
    before = (copied / "model.safetensors").read_bytes()
    said = trained(1, ["--resume", "--epochs", "2", "--device", "cpu"], copied, expect=3).said()
    assert "has model.safetensors but no checkpoint to continue from" in " ".join(said.split())
    assert (copied / "model.safetensors").read_bytes() == before
