"""Which scored cases a run has seen: by their files, their names, and copies under other names."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from seqpar.cli import evaluate
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.cache_index import sources_of
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.report.cautions import records_behind
from seqpar.report.record import RunRecord, runs_behind
from seqpar.tasks import case_evaluation
from seqpar.tasks.case_evaluation import seen_by_runs, unknown_runs
from seqpar.tasks.classify.evaluation import trained_on
from seqpar.tasks.seen_cases import NONE_SEEN, Seen, find_seen
from seqpar.weights.facts import ANCESTORS, sets_learned
from seqpar.weights.weight_files import digest
from tests.scores.test_class_scores import table_at
from tests.support.folders import image_array, label_array, nnunet, save, write_json


def test_scores_are_of_new_cases_else_of_those_that_chose_the_weights_and_not_of_namesakes() -> None:
    def said(*known: list[str], chose: str = "") -> str:
        return Seen(*known, 4, chose).apart("abcd")[1]

    of_one = "The scores are of the 1 case new to the run."
    of_three = "The scores are of the 3 cases new to the run. The other one "
    assert said("a", "") == f"{of_three}was seen in training." and said("", "") == ""
    assert said("", "a") == f"{of_three}has the name of one of the run's cases or patients and may have been seen."
    assert said("", "abcd") == "No case is known to be new: all 4 have the names of the run's cases or patients."
    assert said("ab", "c") == (
        "The scores are of the 1 case new to the run. Of the other 3, 2 were seen in training, and 1 has the name of "
        "one of the run's cases or patients and may have been seen."
    )
    assert said("a", "", chose="cd") == (
        "The scores are of the 1 case new to the run. Of the other 3, 2 were used to choose the weights, and 1 was "
        "seen in training."
    )
    too_good = "used to choose the weights, which tend to be too good"
    assert said("a", "", chose="bcd") == (
        f"No new case: the scores are of the 3 cases {too_good}. The other one was seen in training."
    )
    assert said("", "", chose="abcd") == f"No new case: all 4 were {too_good}."
    several = Seen.by_any([Seen("a", "b", 4, "cd"), Seen("b", "a", 4, "a")])
    assert several[:4] == (["a", "b"], [], 4, ["c", "d"]), "what one of several runs has seen is not new"
    assert Seen.by_any([Seen("a", "", 4, "b", "cd"), Seen("", "", 4, "c")]).held == ["d"]
    single = Seen("a", "", 4, "", "bc").apart("abcd")[1]
    assert single == f"{of_one} Of the other 3, 2 were held out by the run, and 1 was seen in training."
    single = Seen("a", "", 4, "b", "cd").apart("abcd")[1]
    assert single == (
        "No new case: the scores are of the 2 cases held out by the run. Of the other 2, 1 was used to choose the "
        "weights, and 1 was seen in training."
    )
    assert Seen("", "", 4, "", "abcd").apart("abcd")[1] == "No new case: all 4 were held out by the run."
    assert Seen("", "", 4, "", "a").mark("a") == "Held out by the run. "
    groups, _ = Seen("a", "b", 4, "c").apart("abcd")
    both = "seen in training or with the name of one of the run's cases or patients"
    assert groups == {"new to the run": ["d"], "used to choose the weights": ["c"], both: ["a", "b"]}
    assert [Seen("a", "b", 4, "c").mark(name) for name in "abcd"] == [
        "Seen in training. ", "Has the name of one of the run's cases or patients. ", "Used to choose the weights. ", ""
    ]  # fmt: skip


def test_cases_that_chose_the_weights_are_said_apart_from_those_that_were_trained_on(tmp_path: Path) -> None:
    """Of other data sets too, whose cases may have the names of these."""
    files = {name: tmp_path / f"{name}.nii.gz" for name in "abcd"}
    for name, path in files.items():
        path.write_text(name)
    others = {**files, "c": files["a"]}

    def seen(validations: int, scored: dict[str, Path]) -> list[str]:
        dataset = {"train": ["a", "b"], "held_out": ["c", "d"]}
        record = SimpleNamespace(dataset=dataset, has_chosen=validations > 1, subjects={})
        return find_seen(record, scored, lambda: files).sentences

    trained = "2 of 4 scored cases were in the run's training data (a, b): their scores say little about new cases."
    chose = "{} scored cases helped to choose the run's weights ({}): {} scores tend to be too good."
    held = "2 of 4 scored cases were held out by the run (c, d): their scores are those of a validation, not of a test."
    assert seen(1, files) == [trained, held], "a single validation chooses nothing"
    assert seen(2, files) == [trained, chose.format("2 of 4", "c, d", "their")]
    assert seen(2, others) == [trained, chose.format("1 of 4", "d", "its")]
    unknown = {**files, "d": tmp_path / "gone"}
    named = "1 of 4 scored cases has the name of one of the run's cases or patients (d): if it is the same, its scores"
    assert seen(1, unknown)[1].startswith(named) and seen(2, unknown)[1].startswith(named)


def test_only_cases_that_validations_scored_have_chosen_the_weights(tmp_path: Path) -> None:
    """With --val-cases some held-out cases have not; after another split, some that are kept for tests now have."""
    files = {name: tmp_path / f"{name}.nii.gz" for name in "abcd"}
    for name, path in files.items():
        path.write_text(name)

    def chose(**dataset: list[str]) -> Sequence[str]:
        record = SimpleNamespace(dataset={"train": ["a"], **dataset}, has_chosen=True, subjects={})
        return find_seen(record, files, lambda: files).chose

    assert chose(held_out=["b", "c"]) == ["b", "c"]
    assert chose(held_out=["b", "c"], validated=["b"]) == ["b"]
    assert chose(held_out=["b"], test=["c"], validated=["b", "c"]) == ["b", "c"]
    assert chose(held_out=["b"], learned_before=["b"], validated=["b", "c"]) == ["c"]


def test_nothing_is_said_of_cases_that_another_run_predicted_which_is_gone(tmp_path: Path) -> None:
    record = SimpleNamespace(path=tmp_path / "run")
    write_json(tmp_path / "found" / "prediction.json", {"run": "/gone/other", "weights": {}})
    assert seen_by_runs(record, tmp_path / "found", lambda run: pytest.fail("it has not predicted")) is NONE_SEEN
    (told,) = unknown_runs(record, tmp_path / "found")
    assert told.startswith("/gone/other, which predicted these cases, is no longer there: whether they were")
    assert unknown_runs(record, tmp_path) == [] == unknown_runs(record, None)
    unreadable = f"/{'long' * 80}/run"  # as another user's folder is, for all but root
    write_json(tmp_path / "found" / "prediction.json", {"run": unreadable, "weights": {}})
    (told,) = unknown_runs(record, tmp_path / "found")
    assert told.startswith(f"{unreadable}, which predicted these cases, ") and told.endswith("data is not known.")


def test_a_damaged_record_of_predictions_is_named(tmp_path: Path) -> None:
    record, told = (
        tmp_path / "found" / "prediction.json",
        "{} is damaged and does not say which run predicted these cases",
    )
    record.parent.mkdir()
    for content in ("", "{", "[]", "{}", '{"runs": [{}]}', '{"run": 3}'):
        record.write_text(content)
        (said,) = unknown_runs(SimpleNamespace(path=tmp_path / "run"), record.parent)
        assert said.startswith(told.format(record)) and "is not known. Copy it again, or predict again." in said, (
            content
        )
        assert runs_behind(record.parent) == [(record, said)] and records_behind(record.parent) == [], content


def test_no_case_is_called_new_if_some_of_the_runs_that_predicted_it_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page may be of a run that did not predict: what that has seen says nothing."""
    monkeypatch.setattr(case_evaluation, "read_record", lambda run: SimpleNamespace(path=run, network_settings=None))
    first, gone, page, weights = (tmp_path / name for name in ("first", "gone", "page", "model.safetensors"))
    for run in (first, page):
        write_json(run / "config.json", {})
    made = [{"run": str(run), "weights": {}} for run in (first, gone)]
    write_json(tmp_path / "found" / "prediction.json", {"runs": made})

    def find(run: SimpleNamespace) -> Seen:
        return {first: Seen("a", "", 4, "b"), page: Seen("ab", "", 4)}[run.path]

    seen = seen_by_runs(SimpleNamespace(path=page), tmp_path / "found", find)
    assert (seen.same, seen.chose, seen.gone) == (["a"], ["b"], [str(gone)])
    unknown = f"No case is known to be new, since nothing tells what {gone} learned from"
    groups, told = seen.apart("abcd")
    assert list(groups) == ["not seen by the other runs", "used to choose the weights", "seen in training"]
    assert told == (
        f"{unknown}: the scores are of the 2 cases not seen by the other runs. Of the other 2, 1 was used to choose "
        "the weights, and 1 was seen in training."
    )
    (said,) = unknown_runs(SimpleNamespace(path=page), tmp_path / "found")
    assert said.startswith(f"{gone}, which predicted these cases, is no longer there")
    new = Seen("", "", 2)._replace(gone=[str(gone)])
    assert new.apart("cd")[1] == f"{unknown}."
    moved = write_json(page / weights.name, {})
    made[1]["weights"] = {str(gone / weights.name): digest(moved)}
    write_json(tmp_path / "found" / "prediction.json", {"runs": made})
    seen = seen_by_runs(SimpleNamespace(path=page), tmp_path / "found", find)
    assert seen.same == ["a", "b"] and not seen.gone, "it is that run, which has moved"
    assert unknown_runs(SimpleNamespace(path=page), tmp_path / "found") == []
    write_json(tmp_path / "found" / "prediction.json", {"runs": [{**one, "run": str(gone)} for one in made[:1]] * 2})
    assert seen_by_runs(SimpleNamespace(path=page), tmp_path / "found", find) is NONE_SEEN
    own = {"run": str(page), "weights": {str(write_json(first / weights.name, {})): digest(moved)}}
    write_json(tmp_path / "found" / "prediction.json", {"runs": [own, made[0]]})
    seen = seen_by_runs(SimpleNamespace(path=page), tmp_path / "found", find)
    assert seen.same == ["a"] and seen.gone == [str(page)], "it took another run's weights"


def test_a_copy_of_a_runs_case_under_another_name_is_not_new(tmp_path: Path) -> None:
    label, files = np.zeros((8, 8, 8), np.uint8), dict[str, Path]()
    for number, name in enumerate("abcde"):
        label[number, 2:4, 2:4] = name != "e"  # of "e" nothing
        files[name] = save(tmp_path / f"{name}.nii", label * (name != "e"))
    copies = {new: Path(shutil.copy(files[old], tmp_path / f"{new}.nii")) for new, old in zip("vwxyz", "abcde")}
    dataset = {"train": ["a", "b", "e"], "held_out": ["c"]}
    record = SimpleNamespace(dataset=dataset, has_chosen=True, subjects={}, config={"data": "here"})
    seen = find_seen(record, {**copies, "b": files["a"]}, lambda: files)
    assert seen.same == ["v", "w", "b"], "this b is the run's a"
    assert seen.chose == ["x"] and not seen.namesakes, "y is of no case of the run, and a map without labels tells none"
    trained, chose, twice = seen.sentences
    assert twice.startswith("v, b are one case under 2 names")
    assert "3 of 6 scored cases were in the run's training data (" in trained and "v, there a; w, there b" in trained
    assert "b, there a" in trained and "(x, there c)" in chose
    template = {**files, "c": copies["v"]}
    assert "v" not in find_seen(record, copies, lambda: template).same, "two of the run's cases have this map"
    gone = SimpleNamespace(**{**vars(record), "config": {"data": ""}})
    assert not find_seen(gone, copies, lambda: pytest.fail("it would wait for phantoms")).same


def test_a_map_of_which_only_a_part_is_unlabelled_tells_no_patients_apart(tmp_path: Path) -> None:
    empty = np.zeros((8, 8, 8), np.uint8)
    empty[6:] = 9
    files = {"a": save(tmp_path / "a.nii", empty)}
    record = SimpleNamespace(
        dataset={"train": ["a"], "held_out": [], "values": [0, 1, 9], "ignore_label": 2},
        has_chosen=True, subjects={}, config={"data": "here"},
    )  # fmt: skip
    copy = {"b": Path(shutil.copy(files["a"], tmp_path / "b.nii"))}
    assert find_seen(record, copy, lambda: files).same == []
    record.dataset["ignore_label"] = None
    assert find_seen(record, copy, lambda: files).same == ["b"]


def test_a_training_image_with_another_label_file_is_not_new(tmp_path: Path) -> None:
    data, found = nnunet(tmp_path / "D", cases=3), tmp_path / "found"
    prepare(read_dataset(data), tmp_path / "cache", workers=0)
    names = {"c_000": "c_000", "x": "c_001", "y": "c_002", "z": ""}  # as they are called now
    images = {new: tmp_path / f"{new}_0000.nii.gz" for new in names}
    truths = {new: save(tmp_path / "truth" / f"{new}.nii.gz", label_array((n + 2,))) for n, new in enumerate(names)}
    for new, old in names.items():
        save(images[new], image_array(7))
        if old:
            shutil.copyfile(data / "imagesTr" / f"{old}_0000.nii.gz", images[new])
    inputs = {new: sources_of(Case(new, (path,))) for new, path in images.items()}
    write_json(found / "prediction.json", {"files": [], "inputs": inputs})
    dataset = {"train": ["c_000", "c_001"], "held_out": ["c_002"], "prepared": str(tmp_path / "cache")}
    record = SimpleNamespace(dataset=dataset, has_chosen=True, subjects={}, config={"data": str(data)})
    files = {f"c_{n:03d}": data / "labelsTr" / f"c_{n:03d}.nii.gz" for n in range(3)}

    def seen(scored: dict[str, Path] = truths) -> Seen:
        return find_seen(record, scored, lambda: files, found)

    assert (seen().same, seen().chose, seen().differing) == (
        ["c_000", "x"],
        ["y"],
        dict.fromkeys(("c_000", "x", "y"), "label file"),
    )
    by_image = "whose image was there with another label file"
    trained, _ = seen().sentences
    assert (
        f"2 of 4 scored cases were in the run's training data (c_000, {by_image}; x, {by_image}, there c_001): "
        in trained
    )
    assert seen().mark("x") == "Its image was seen in training, with another label file. " and not seen().mark("z")
    equal = {**truths, "c_000": files["c_000"]}
    assert seen(equal).differing.keys() == {"x", "y"} and seen(equal).mark("c_000") == "Seen in training. "
    assert not find_seen(record, truths, lambda: files).same, "of a folder that does not say what it was predicted from"
    inputs = {new: [own[:3] for own in every] for new, every in inputs.items()}
    write_json(found / "prediction.json", {"files": [], "inputs": inputs})
    assert not seen().same, "as older versions wrote it, without digests"


def test_a_scan_counts_as_seen_however_it_is_written_and_whichever_data_the_run_has_now(tmp_path: Path) -> None:
    """Its label map may be new, or have been written anew; cases of other data may have the names of these."""
    labels = {name: save(tmp_path / "own" / f"{name}.nii", label_array((n + 1,))) for n, name in enumerate("abc")}
    truths = {name: save(tmp_path / "truth" / f"{name}.nii.gz", label_array((n,))) for n, name in enumerate("abcdx", 2)}
    rewritten = save(tmp_path / "rewritten" / "b.nii.gz", label_array((2,)).astype(np.int16))
    first = {"name": "D", "recipe": None, "train": ["c", "d"], "digests": {}, "voxels": {"c": "30", "d": "4", "e": "6"}}
    first["validated"] = ["e"]
    dataset = {"train": ["a", "b"], "held_out": ["c"], "voxels": {"a": "1", "b": "2", "c": "3"}}
    run = SimpleNamespace(held_out=[{}] * 2, has_chosen=True, subjects={}, config={"data": "here"})
    run.dataset = {**dataset, "weights_learned_from": [first]}

    def seen(voxels: Mapping[str, str], **others: Path) -> Seen:
        write_json(tmp_path / "prediction.json", {"voxels": voxels})
        return find_seen(run, {name: {**truths, **others}[name] for name in voxels}, lambda: labels, tmp_path)

    known = seen({"a": "1", "b": "9", "c": "30", "d": "5", "x": "2"})
    assert (known.same, known.differing.keys(), known.namesakes) == (["a", "x", "c"], {"a", "x"}, [])
    assert known.copies == {"x": "b", "c": "c of D"} and not known.chose, "the run's own c is another scan"
    written = seen({"b": "2"}, b=rewritten)
    assert (written.same, written.differing) == (["b"], {}), "its label map is the same"
    assert seen({"b": ""}, b=rewritten)[:1] == (["b"],) and not seen({"b": ""}, b=rewritten).differing, (
        "as predictions of older versions have it"
    )
    assert not seen({"b": ""}).same and seen({"d": ""}).namesakes == ["d"]
    assert (seen({"x": "6"}).chose, seen({"x": "6"}).copies) == (["x"], {"x": "e of D"})
    assert seen({"c": "3"}).chose == ["c"] and seen({"d": "4"}).copies == {"d": "d of D"}


def test_a_further_scan_of_a_patient_is_not_new() -> None:
    scored = dict.fromkeys(("sub-01_ses-2", "sub-02_ses-2", "sub-03_ses-2", "d2"))

    def found(validations: int, subjects: Mapping[str, str], more: Mapping[str, str] = {}) -> Sequence[str]:
        dataset = {"train": ["sub-01_ses-1", "d1"], "held_out": ["sub-02_ses-1"]}
        record = SimpleNamespace(dataset=dataset, has_chosen=validations > 1, subjects=subjects)
        return find_seen(record, scored, dict, subjects=more).namesakes

    assert found(2, {}) == ["sub-01_ses-2", "sub-02_ses-2"]
    assert found(1, {}) == ["sub-01_ses-2"], "a single validation chooses nothing"
    assert found(1, {"d1": "d", "d2": "d"}) == ["sub-01_ses-2", "d2"], "as a table says"
    learned = {
        "name": "E",
        "recipe": {},
        "digests": {},
        "train": ["sub-03_ses-1"],
        "subjects": {"e1": "e"},
        "validated": ["e1"],
    }
    run = SimpleNamespace(dataset={"train": ["sub-01_ses-2"], ANCESTORS: [learned]}, has_chosen=True, subjects={})
    cases = dict.fromkeys((*scored, "sub-03_ses-1", "e2"))
    seen = find_seen(run, cases, dict, subjects={"e2": "e", "d2": "d"}).namesakes  # type: ignore[arg-type]
    assert sorted(seen) == ["e2", "sub-01_ses-2", "sub-03_ses-1", "sub-03_ses-2"], "by weights that the run began with"
    assert found(1, {"d1": "d"}, {"d2": "d", "d9": "d"}) == ["sub-01_ses-2", "d2"], "as that of the scored cases says"


def test_a_case_that_is_scored_under_several_names_is_said_to_count_so_often(tmp_path: Path) -> None:
    """By its image, where predict recorded it, else by its label map; maps without a label are nobody's."""
    record = SimpleNamespace(dataset={}, subjects={}, held_out=[], has_chosen=False, config={})
    files: dict[str, Path | None] = {name: save(tmp_path / f"{name}.nii.gz", label_array()) for name in "abc"}
    files |= {"d": save(tmp_path / "d.nii.gz", label_array() * 0), "e": save(tmp_path / "e.nii.gz", label_array() * 0)}
    files["f"] = save(tmp_path / "f.nii.gz", np.roll(label_array(), 1, 0))
    (said,) = find_seen(record, files, dict).sentences  # type: ignore[arg-type]
    assert said == "a, b, c are one case under 3 names: means and intervals count it 3 times."
    write_json(tmp_path / "prediction.json", {"voxels": {"a": "1", "b": "2", "c": "3", "e": "4", "f": "4"}})
    (said,) = find_seen(record, files, dict, tmp_path).sentences  # type: ignore[arg-type]
    assert said == "e, f are one case under 2 names: means and intervals count it 2 times.", "as their images tell"
    assert Seen.by_any([find_seen(record, files, dict)] * 2).twins  # type: ignore[arg-type]


def test_another_label_file_is_named_only_where_both_are_there(tmp_path: Path) -> None:
    write_json(tmp_path / "prediction.json", {"voxels": {"x": "1", "y": "2"}})
    dataset = {"train": ["a", "b"], "held_out": [], "voxels": {"a": "1", "b": "2"}}
    record = SimpleNamespace(dataset=dataset, subjects={}, held_out=[], has_chosen=False, config={"data": "here"})
    maps = {name: save(tmp_path / f"{name}.nii.gz", label_array((n,))) for n, name in enumerate("xa", 1)}
    seen = find_seen(record, {"x": maps["x"], "y": None}, lambda: {"a": maps["a"]}, tmp_path)  # type: ignore[arg-type]
    assert (seen.same, seen.differing) == (["x", "y"], {"x": "label file"})
    write_json(tmp_path / "prediction.json", {"voxels": {"x": "3"}})
    seen = find_seen(record, {"x": maps["a"]}, lambda: {"a": maps["a"]}, tmp_path)  # type: ignore[arg-type]
    assert (seen.same, seen.differing) == (["x"], {"x": "image"})
    assert "(x, whose label file was there with another image, there a): " in seen.sentences[0]
    assert seen.mark("x") == "Its label file was seen in training, with another image. "
    exactly = Seen(["x"], [], 1)
    assert not Seen.by_any([seen, exactly]).differing and not Seen.by_any([exactly, seen]).differing
    two = Seen(["x"], [], 3, untold=["y"])
    assert two.of("yz") == Seen([], [], 2, [], [], untold=["y"], twins=[])
    groups, told = two.apart("xyz")
    assert list(groups) == ["new to the run", "predicted with unknown settings", "seen in training"]
    assert told.endswith("Of the other 2, 1 was predicted with unknown settings, and 1 was seen in "
                         "training.")  # fmt: skip


def test_what_weights_learned_from_has_the_patients_that_a_table_names() -> None:
    described = {"name": "D", "labels": {"a": 1}, "train": ["t"], "held_out": ["h"], "digests": {}}
    described |= {"volume_classes": {"subjects": {"t": "p", "h": "q", "other": "r"}}}
    (learned,) = sets_learned(described)
    assert (
        learned["subjects"] == {"t": "p", "h": "q"}
        and "subjects" not in sets_learned({**described, "volume_classes": None})[0]
    )


def test_numbers_of_patients_are_compared_within_one_data_set_only(tmp_path: Path) -> None:
    """Another hospital numbers its patients from 0 as well."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "labels.csv").write_text("case,class,subject\nnew_1,ill,0\nnew_2,ill,p1\n")
    dataset = {"train": ["a", "b"], "volume_classes": {"subjects": {"a": "0", "b": "p1"}}}
    record = RunRecord(tmp_path, {"dataset": dataset, "config": {"data": str(tmp_path / "own")}}, None, {})
    for name, alike in (("own", ["new_1", "new_2"]), ("other", ["new_2"])):
        assert trained_on(record, tmp_path / name, ["new_1", "new_2"], tmp_path).namesakes == alike


def test_a_single_file_is_told_as_its_folder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth, found, labels = tmp_path / "truth", tmp_path / "found", label_array((1,))
    for name in "ab":
        for folder in (truth, found):
            save(folder / f"{name}.nii.gz", labels)
    made = {"run": "/gone/run", "weights": {}, "files": ["a.nii.gz", "b.nii.gz"], "inputs": {"a": [], "b": []}}
    write_json(found / "prediction.json", made)
    shutil.copy(truth / "a.nii.gz", tmp_path / "reader.nii.gz")

    def said(truth: Path, prediction: Path) -> str:
        assert evaluate.act([str(truth), str(prediction), "--regions", "core=1", "--workers", "1"]) == 0
        return capsys.readouterr().out

    gone = "/gone/run, which predicted these cases, is no longer there: whether they were in its training data is not"
    other = (
        f"Caution: {found}/a.nii.gz is of case a, and {truth}/b.nii.gz has the name of another case that was predicted."
    )
    alone = said(truth / "a.nii.gz", found / "a.nii.gz")
    assert gone in said(truth, found) and gone in alone and "Caution" not in alone
    assert other in said(truth / "b.nii.gz", found / "a.nii.gz")
    assert "\na: Dice core 1.0000" in "\n" + said(tmp_path / "reader.nii.gz", found / "a.nii.gz")
    write_json(found / "prediction.json", {**made, "files": ["b.nii.gz"], "inputs": {"b": []}})
    unlisted = "1 of 2 label maps in {}, such as a.nii.gz, is not in its prediction.json"
    assert unlisted.format(found) in said(truth / "a.nii.gz", found / "a.nii.gz")
    assert "is not in its prediction.json" not in said(truth / "b.nii.gz", found / "b.nii.gz")


def test_a_table_of_classes_is_told_as_its_folder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = np.array([0, 1] * 5)
    lines = table_at(tmp_path / "found/predictions.csv", truth, np.eye(2)[truth] * 0.8 + 0.1)
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    write_json(tmp_path / "found/prediction.json", {"run": "/gone/run", "weights": {}, "task": "classify"})
    for prediction in (tmp_path / "found", tmp_path / "found/predictions.csv"):
        assert evaluate.act([str(tmp_path / "labels.csv"), str(prediction)]) == 0
        assert "/gone/run, which predicted these cases, is no longer there" in capsys.readouterr().out


def test_of_a_single_file_the_prediction_s_case_counts_if_nothing_is_compared(tmp_path: Path, capsys) -> None:
    """Else one patient would count under two names."""
    labels = label_array((1,))
    for path in (tmp_path / "a-seg.nii.gz", tmp_path / "found/a.nii.gz", tmp_path / "other/a.nii.gz"):
        save(path, labels)
    made = {"run": "/gone/run", "weights": {}, "files": ["a.nii.gz", "b.nii.gz"], "inputs": {"b": []}}
    write_json(tmp_path / "found/prediction.json", made)
    files = [str(tmp_path / name) for name in ("a-seg.nii.gz", "found/a.nii.gz", "other/a.nii.gz")]
    more = ["--regions", "core=1", "--workers", "1"]
    assert evaluate.act([*files[:2], *more]) == 0
    said = capsys.readouterr().out
    assert "a: Dice core 1.0000" in said and "no longer there" in said
    assert (
        f"warning: {files[1]} was predicted with other settings than those of {tmp_path}/found/prediction.json" in said
    )
    assert evaluate.act([*files, *more]) == 0
    assert "a-seg: Dice" in (said := capsys.readouterr().out) and "have the same mean Dice" in said


def test_a_table_next_to_that_of_a_prediction_is_not_that_one(tmp_path: Path, capsys) -> None:
    truth = np.array([0, 1] * 5)
    lines = table_at(tmp_path / "found/mine.csv", truth, np.eye(2)[truth] * 0.8 + 0.1)
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    write_json(tmp_path / "found/prediction.json", {"run": "/gone/run", "weights": {}, "task": "classify"})
    assert evaluate.act([str(tmp_path / "labels.csv"), str(tmp_path / "found/mine.csv")]) == 0
    assert "/gone/run" not in capsys.readouterr().out
