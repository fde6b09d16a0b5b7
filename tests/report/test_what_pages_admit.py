"""What pages say of files that changed, of what predict removed, and of networks behind a mean."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from seqpar.cli import evaluate, report
from seqpar.data.geometry import make_geometry
from seqpar.data.preparation.cache import open_cache
from seqpar.data.volumes import Volume
from seqpar.report.cases import _ml_beyond, _with_uncertainty
from seqpar.report.cautions import (
    measured_otherwise,
    planes_note,
    reached_and_found,
    reached_in_validation,
    steps_behind,
)
from seqpar.report.embedded_volumes import ShownCase, shown_best
from seqpar.report.images import as_utf8, changed_since, count_shown
from seqpar.report.planes import outside_planes
from seqpar.report.record import RunRecord, ScoredCase, read_record, read_scores
from seqpar.report.run_page import BECAME, _cleaned, _scored, _unlearned_by_others, how_predicted, what_is_unlearned
from seqpar.report.tables import what_is_missing
from seqpar.scores.label_scores import format_table
from seqpar.tasks.lookup import TASKS
from seqpar.tasks.seen_cases import Seen
from seqpar.weights.facts import ANCESTORS, IS_UNKNOWN
from tests.support.checkpoints import write_window
from tests.support.folders import save, write_json
from tests.support.report_page import Page, own_slices, written


def test_files_that_changed_since_they_were_scored_are_named(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path, dirs_exist_ok=True)
    record, scored = read_record(tmp_path / "run"), read_scores(tmp_path / "run")
    names = {case.name for case in scored.cases}
    assert changed_since(record, scored, names) == [], "earlier versions recorded no files"
    assert {*scored.digests} == names
    map_of_b = tmp_path / "run" / "validation" / "case-b.nii.gz"
    before = map_of_b.read_bytes()
    shutil.copy(map_of_b.with_name("case-a.nii.gz"), map_of_b)
    (told,) = changed_since(record, scored, names)
    assert "files of case-b were replaced" in told and changed_since(record, scored, {"case-a"}) == []
    map_of_b.write_bytes(before)
    files = {name: case.files for name, case in open_cache(tmp_path / "cache").cases.items()}

    def recorded(**others: str) -> RunRecord:
        path = tmp_path / "run" / "config.json"
        content = json.loads(path.read_text())
        content["dataset"] |= {"prepared": str(tmp_path / "cache"), "files": {**files, **others}}
        path.write_text(json.dumps(content))
        return read_record(tmp_path / "run")

    truths = {case.name: tmp_path / "data" / case.name / f"{case.name}-seg.nii.gz" for case in scored.cases}
    scored = replace(scored, cases=[replace(case, truth=truths[case.name]) for case in scored.cases])
    assert changed_since(recorded(), scored, names) == []
    first = truths["case-a"]
    image = nibabel.load(first)
    nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj)[::-1], image.affine, image.header), first)
    (told,) = changed_since(recorded(), scored, names)
    assert told.startswith("Since they were scored, files of case-a were replaced: the pictures show the new files, ")
    assert changed_since(recorded(), scored, {"case-b"}) == [], "it is not shown"
    replaced = replace(scored, faults=[f"{first}: has been replaced since this run prepared it: summary.json in …"])
    assert changed_since(recorded(), replaced, names) == [], "its scores are of the new file, which the fault says"
    others = recorded(**{"case-b": "another"})  # its image was prepared anew
    assert "files of case-b, case-a were replaced" in changed_since(others, scored, names)[0]


def test_a_missed_lesion_outside_of_all_planes_is_told_however_small() -> None:
    truth = np.zeros((20, 20, 20), np.uint8)
    truth[2, 2, 2] = 1
    (missed,) = outside_planes(truth, 0 * truth, {"lesion": [1]}, (1.0, 1.0, 1.0), (10, 10, 10))
    assert (missed.kind, missed.name, missed.parts[0].voxels) == ("missed", "lesion", 1)


def test_cases_without_an_image_are_counted() -> None:
    assert count_shown([True, True]) == "2 cases shown"
    assert count_shown([False]) == "1 case shown, without an image (the page says why)"
    assert count_shown([False, False]) == "2 cases shown, without images (the page says why)"
    assert count_shown([True, False, False]) == "3 cases shown, 2 without images (the page says why)"


def test_what_predict_removed_is_on_the_page(finished: Path, tmp_path: Path) -> None:
    record = read_record(finished)
    content = record.content
    record = replace(record, content={**content, "dataset": {**content["dataset"], "regions": {}}})

    def said(**settings: object) -> list[str]:
        (tmp_path / "prediction.json").write_text(json.dumps({"run": "r", "settings": settings}))
        return _cleaned(tmp_path, record)

    end = f": a class that it had found may be missing here. {BECAME}"
    assert said() == said(min_component="0") == said(min_component="0.00mm3") == said(min_component="1 voxels") == []
    assert said(min_component="50") == said(min_component="50mm3") == [f"Predict removed regions below 50 mm³{end}"]
    both = "Predict removed regions below 20 voxels and all but the largest region of some labels"
    assert said(min_component="20voxels", postprocessing=[[1]]) == [f"{both}{end}"]
    record = replace(record, content={**content, "dataset": {**content["dataset"], "regions": {"WT": [1, 2]}}})
    kept = "may be missing here. The labels of other regions in its place remain."
    assert said(min_component="50")[0].endswith(kept), "a core that is removed is still part of the whole"
    assert said(min_component="50", postprocessing=[[1]])[0].endswith(f"{kept} {BECAME}")
    assert "temperature" not in _scored(None, tmp_path, record)
    said(temperature=0.2512)
    assert "Probabilities were computed at a temperature of 0.251." in _scored(None, tmp_path, record)


def test_each_network_of_a_mean_that_never_found_a_class_is_named(finished: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(finished, tmp_path / "blind"))
    rows = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(rows.replace('"NCR": 0.5', '"NCR": 0.0'))
    made = [{"run": str(run), "weights": {}} for run in (finished, other)]
    (tmp_path / "prediction.json").write_text(json.dumps({"runs": made}))
    (told,) = [text for text in _unlearned_by_others(read_record(finished), tmp_path) if "NCR" in text]
    assert told.startswith("Of blind alone: at the best validation, the mean Dice of NCR is 0.000:")
    made[1]["weights"] = {str(other / "model.safetensors"): "of another run"}
    (tmp_path / "prediction.json").write_text(json.dumps({"runs": made}))
    assert _unlearned_by_others(read_record(finished), tmp_path) == [], "the folder holds another run by now"


def test_cases_that_others_predicted_into_a_folder_are_told_from_a_runs(finished: Path, tmp_path: Path, capsys) -> None:
    truth, found = tmp_path / "truth", tmp_path / "found"
    for folder in (truth, found):
        for name in ("p", "q"):
            save(folder / f"{name}.nii.gz", np.ones((4, 4, 4), np.uint8))
    record = found / "prediction.json"
    made = {"run": str(finished), "weights": {"w": "1"}, "files": ["p.nii.gz", "q.nii.gz"], "inputs": {"p": []}}
    every, unlisted = {**made, "inputs": {"p": [], "q": []}}, {**made, "files": ["p.nii.gz"]}
    older = {name: value for name, value in unlisted.items() if name != "files"}
    converted = {**every, "files": ["p.nii.gz", "q.mha"]}
    not_in = (
        f"1 of 2 label maps in {found}, such as q.nii.gz, is not in its prediction.json: another network or program "
    )
    not_in += "may have made it, and whether that has seen this case is not known."
    mixed = "also holds 1 case predicted with other settings (q): scores over all its cases"
    page = tmp_path / "page.html"

    def text_of(*more: str) -> str:
        line = [str(finished), *more, "--prediction", str(found), "--cases", "0", "--out", str(page)]
        assert report.act(line) == 0
        return Page(page.read_text()).text

    for content, said in ((made, mixed), (unlisted, not_in), (every, ""), (older, ""), (converted, ""), (None, "")):
        record.write_text(json.dumps(content)) if content else record.unlink()
        text = text_of("--truth", str(truth))
        assert (mixed in text, not_in in text) == (said == mixed, said == not_in), content
        assert ("Scores of folder found, by run and with other settings" in text) == (said == mixed)
        assert ("Scores of folder found, in part by run" in text) == (said == not_in)
        assert ("The other one was predicted with unknown settings." in text) == bool(said)
        assert ("Predicted with w, but for those named below." in text) == bool(said)
        alone = text_of()
        assert (not_in in alone) == ("Predictions in folder found, in part by run" in alone) == (said == not_in)
        capsys.readouterr()
        assert evaluate.act([str(truth), str(found), "--regions", "x=1"]) == 0
        told = capsys.readouterr().out
        assert (mixed in told, not_in in told) == (said == mixed, said == not_in)
    record.write_text(json.dumps(unlisted))
    (found / "p.nii.gz").unlink()
    assert "q, of unknown origin" in text_of()


def test_the_run_of_a_folder_says_nothing_of_what_joined_it() -> None:
    """Neither that a case is new, nor that it was seen; next to another prediction it is not new to all either."""
    seen = Seen.by_any([Seen(["a", "b"], ["c"], 6, ["d"], ["e"], {"b": "x"}, {"b": "image"})], (), (), "bcdef")
    assert (seen.same, seen.namesakes, seen.chose, seen.held) == (["a"], [], [], []) and seen.untold == [*"bcdef"]
    assert seen.mark("b") == "Predicted with unknown settings. "
    assert seen.sentences == ["1 of 6 scored cases was in the run's training data (a): its scores say little about new "
                              "cases."]  # fmt: skip
    groups, _ = Seen.by_any([seen, Seen((), (), 6)]).apart("abf")
    assert groups == {"predicted with unknown settings": ["b", "f"], "seen in training": ["a"]}


def test_scores_on_the_grid_of_a_run_are_told_from_those_of_its_files(finished: Path) -> None:
    def page() -> str:
        assert report.act([str(finished), "--cases", "0"]) == 0
        return (finished / "report.html").read_text()

    assert "own grid" not in page()
    path = finished / "config.json"
    content = json.loads(path.read_text())
    content["dataset"]["recipe"] = {**(content["dataset"].get("recipe") or {}), "spacing": [1.2, 1.2, 3]}
    path.write_text(json.dumps(content))
    assert "Validation predicts on the run&#39;s own grid (voxels of 1.2 × 1.2 × 3 mm): scores in curves" in page()
    assert ", measured on its own grid (voxels of 1.2 × 1.2 × 3 mm)." in reached_in_validation(read_record(finished))[0]


def test_curves_on_several_grids_are_not_to_be_compared(copied: Path, tmp_path: Path) -> None:
    def page(*spacings: list[float] | None, digests: tuple[str, str] = ("a", "b")) -> str:
        runs = [Path(shutil.copytree(copied, tmp_path / name, dirs_exist_ok=True)) for name in ("one", "other")]
        for folder, spacing, digest in zip(runs, spacings, digests):
            path = folder / "config.json"
            content = json.loads(path.read_text())
            recipe = {**(content["dataset"].get("recipe") or {}), "spacing": spacing}
            content["dataset"] |= {"recipe": recipe, "digests": {"a": digest} if digest else {}}
            path.write_text(json.dumps(content))
        assert report.act([*map(str, runs), "--out", str(tmp_path / "page.html")]) == 0
        return (tmp_path / "page.html").read_text()

    fine, coarse, title = [1.0, 1.0, 1.5], [2.5, 2.5, 2.5], "on held-out cases (n = 2), on different grids"
    told = "These runs were validated on different grids: the voxels of the files (one); voxels of 2.5 × 2.5 × 2.5 mm "
    told += "(other). Their curves in validation cannot be compared. The other scores are of label maps on the grid of"
    assert told in (text := page(None, coarse)) and title in text
    assert "on different grids: voxels of 1 × 1 × 1.5 mm (one); voxels of 2.5" in page(fine, coarse)
    shared = page(coarse, coarse)
    told = "validated on their own grid (voxels of 2.5 × 2.5 × 2.5 mm): their curves in validation are measured there."
    assert told in shared and title not in shared
    for usual in (page(None, None), page(None, fine, digests=("a", "a")), page(None, None, digests=("", ""))):
        assert "own grid" not in usual and "different grids" not in usual, "the same prepared cases"
    assert "different grids" in page(None, fine, digests=("", "")), "an earlier version does not tell"


def test_a_class_that_no_case_to_train_on_has_is_told_from_one_that_was_not_learned(copied: Path) -> None:
    rows = [{"kind": "val", "step": 5, "loss": 1.0, "dice": {"NCR": 0.0, "ED": 0.0}, "cases": 2}]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = copied / "config.json"
    content = json.loads(path.read_text())
    told = "Dice of ED is 0.000: no case that the run trains on has it, so the network could not learn to find it."
    for more, is_said in (
        ({}, False),
        ({"in_no_case": ["ED"]}, True),
        ({"in_no_case": ["ED"], "learned_before": ["a"]}, False),
        ({"in_no_case": ["ED"], ANCESTORS: [{"name": "D", "recipe": {}, "train": ["a"], "digests": {}}]}, False),
        ({"in_no_case": ["ED"], IS_UNKNOWN: True}, False),
    ):
        path.write_text(json.dumps(content | {"dataset": content["dataset"] | more}))
        assert (told in what_is_unlearned(read_record(copied))) == is_said
        assert (told in " ".join(TASKS["segment"].next_lines(copied))) == is_said


def test_what_a_run_reached_is_said_of_the_weights_that_predicted_and_of_how_they_did(
    finished: Path, tmp_path: Path
) -> None:
    """On a page of predictions without a truth, it is all that tells how good these are."""
    record = read_record(Path(shutil.copytree(finished, tmp_path / "run")))

    def validating(window: str) -> RunRecord:
        dataset = {**record.dataset, "recipe": {}}  # which another test changes
        own = {"config": {**record.config, "val_window": window}, "dataset": dataset}
        return replace(record, content={**record.content, **own})

    (row,), taken = record.held_out, record.weights.step
    earlier = {**row, "step": 1, "dice": {"NCR": 0.25, "ED": None}}
    record = replace(validating("sliding"), held_out=(earlier, row))

    def made(*steps: int, window: str = "sliding") -> dict[str, Any]:
        weights = {f"/r/checkpoints/step-{step:08d}/model.safetensors": "" for step in steps}
        return {"weights": weights, "settings": {"window": window}}

    assert steps_behind(made(30, 6)) == [6, 30] and steps_behind({"weights": {"/r/model.safetensors": ""}}) == []
    usual = reached_and_found(record, {})
    assert usual == reached_and_found(record, made(taken)) and len(usual) == 2
    assert "reached a mean Dice of NCR 0.500" in usual[0] and "best of 2 validations" in usual[0]
    (said,) = reached_and_found(record, made(1))
    assert "reached a mean Dice of NCR 0.250 after step 1, with the weights that predicted these cases." in said
    assert f"Unless told otherwise, predict takes those of step {taken}." in said and "best of" not in said
    assert reached_and_found(record, made(2)) == [
        "This run predicted these cases with its weights of step 2, which were not validated."
    ]
    path = record.path / "validation/summary.json"
    summary = json.loads(path.read_text())
    summary["metric_per_case"][0]["metrics"][next(iter(summary["metric_per_case"][0]["metrics"]))]["n_ref"] = 0
    before = path.read_text()
    path.write_text(json.dumps(summary))
    (_, absent), (_,) = reached_and_found(record, made(1)), reached_and_found(record, made(2))
    assert absent.startswith("Of 3 validated cases, 1 has no NCR. Where the truth lacks a class"), absent
    path.write_text(before)
    lost = replace(record, held_out=())
    assert reached_in_validation(lost, "run a", made(2))[0].endswith("step 2, whose validation is not on record.")
    assert reached_in_validation(record, "run a", made(1, taken)) == [
        f"Run a predicted these cases with its weights of steps 1 and {taken} together, which no validation has scored."
    ]
    said, found = reached_and_found(record, made(taken, window="whole"))
    assert found.startswith(("In that validation: In ", "Every validated case"))
    assert "not measured in the same way: these cases were predicted in one pass and not in windows." in said
    other = made(taken)
    other["settings"] |= {"mirror": [0, 1], "min_component": "50"}
    said, _ = reached_and_found(record, other)
    assert "these cases were predicted as a mean over mirrored copies and with regions removed." in said
    mirrored = replace(record, content={**record.content, "config": {**record.config, "val_mirror": "WD"}})
    assert "predicted with regions removed." in measured_otherwise(mirrored, other)
    other["settings"] = {"window": "sliding", "mirror": []}
    assert measured_otherwise(mirrored, other).endswith("these cases were predicted without mirroring.")
    both = validating("both")
    write_window(record.path, {"whole": 0.5, "sliding": 0.4}, taken)
    told = (
        "were predicted in windows (mean Dice in validation, over classes scored both ways: 0.400) and not in one pass."
    )
    assert measured_otherwise(both, made(taken)).endswith(told)
    windows = replace(record, content={**record.content, "config": {**record.config, "val_window": "sliding"}})
    way = {"settings": {"window": "sliding", "overlap": 0.0}}
    assert measured_otherwise(windows, way).endswith(
        "predicted in windows that overlap by 0 %, where validation had 25 %."
    )
    way["settings"]["overlap"] = 0.25
    assert measured_otherwise(windows, way) == ""
    assert measured_otherwise(both, made(taken, window="whole")) == measured_otherwise(both, {}) == ""


def test_it_is_said_if_cases_were_mirrored(finished: Path, tmp_path: Path) -> None:
    record = read_record(finished)
    config = {**record.config, "val_window": "whole", "val_mirror": "WD"}
    summary = finished / "validation/summary.json"
    write_json(summary, {key: own for key, own in json.loads(summary.read_text()).items() if key != "window"})
    told = how_predicted(None, replace(record, content={**record.content, "config": config}))
    assert told == "Each case was predicted in one pass, as a mean over mirrored copies (2 directions)."
    both = replace(record, content={**record.content, "config": {**record.config, "val_window": "both"}})
    assert how_predicted(None, both).startswith("Each case was predicted in windows")
    write_json(summary, json.loads(summary.read_text()) | {"window": "whole"})
    write_json(finished / "validation-sliding/summary.json", {"window": "sliding"})  # of the worse
    assert (
        how_predicted(None, both)
        == how_predicted(finished / "validation", both)
        == "Each case was predicted in one pass."
    )
    assert how_predicted(finished / "validation-sliding", both).startswith("Each case was predicted in windows")
    (tmp_path / "prediction.json").write_text(json.dumps({"run": "r", "settings": {"window": "whole"}}))
    told = how_predicted(tmp_path, record)
    assert told.startswith("Each case was predicted in one pass. That can ruin the result of cases much larger than"), (
        told
    )
    for mirror, said in (([0], ", as a mean over mirrored copies (1 direction);"), ([], " by 50 %;")):
        way = {"run": "r", "weights": {}, "settings": {"window": "sliding", "overlap": 0.5, "mirror": mirror}}
        (tmp_path / "prediction.json").write_text(json.dumps(way))
        assert said in how_predicted(tmp_path, record)
    one_pass = {"run": "q", "settings": {"window": "whole", "overlap": 0.5}}
    (tmp_path / "prediction.json").write_text(json.dumps({"runs": [way, one_pass]}))
    told = (
        "The averaged networks saw each case in different ways: in one pass; in windows that overlap by 50 %. That can"
    )
    assert how_predicted(tmp_path, record).startswith(told)


def test_captions_ask_the_file_and_every_reader_whether_the_truth_has_a_class() -> None:
    empty = np.zeros((4, 4, 4), np.uint8)
    shown = ShownCase("a", {}, empty, empty, (1.0, 1.0, 1.0), own_slices((4, 4, 4)))

    def note(shown: ShownCase = shown, **row: float) -> str:
        case = ScoredCase("a", Path("a"), Path("b"), {"lesion": row})
        return f"{what_is_missing('lesion', row)} · {planes_note(case, shown, ['lesion'])}"

    assert "· no lesion; predicted none" in note(n_ref=0, n_pred=0)
    assert "· nothing of the truth is left on this grid; predicted none" in note(n_ref=3, n_pred=0)
    drawn = ScoredCase("a", Path("a"), Path("b"), {"whole": {"n_ref": 0, "n_pred": 1, "VolumeMl": 0.002}})
    label = planes_note(drawn, replace(shown, prediction=np.ones_like(empty)), ["label 1", "core"])
    assert label.startswith("no label 1 or core; predicted in the volume shown: label 1 0.064 ml"), "no region"
    assert "· not annotated; predicted none" in note(n_ref=float("nan"), n_pred=0)
    disputed = empty.copy()
    disputed[1:3, 2, 2] = 1
    read = note(replace(shown, disputed=disputed), n_ref=0, n_pred=0, DisputedMl=2.04)
    assert read.startswith("no lesion in the readers' consensus, but 2.04 ml by some readers; none predicted · ")
    assert read.endswith("planes with most of what readers dispute")
    assert shown_best(replace(shown, disputed=disputed))[0].sum() == 2


def test_scores_of_other_cases_say_themselves_whether_a_classifier_learned(tmp_path: Path) -> None:
    names = ["a", "b"]
    classes = {"names": ["healthy", "ill"], "numbers": {"a": 0, "b": 1}}
    row = {"step": 1, "loss": 1.0, "scores": {"balanced accuracy": 0.5}}
    content = {"dataset": {"volume_classes": classes, "held_out": names}, "config": {"val_cases": 0}}
    record = RunRecord(tmp_path, content, None, {}, held_out=(row,))
    assert "guessing" in what_is_unlearned(record) and not what_is_unlearned(record, True)


def test_a_dice_over_other_cases_than_its_neighbours_has_their_number() -> None:
    def line(between: int) -> str:
        mean = {"a": {"Dice": 0.5, "ReaderDice": 0.4, "InterReaderDice": 0.5}}
        counts = {"a": {"Dice": 8, "ReaderDice": 8, "InterReaderDice": between}}
        summary = {"mean": mean, "median": mean, "global": mean, "num_values": counts, "num_cases": 8}
        return format_table(summary, {"a": (1,)}).splitlines()[1]

    assert "0.4000 (8)" in line(6) and "0.5000 (6)" in line(6) and "(8)" not in line(8)


def test_what_is_ignored_is_no_part_of_a_truth_that_is_not_shown() -> None:
    labels = np.zeros((1, 10, 10, 10), np.uint8)
    labels[0, 0], labels[0, 9] = 1, 9
    volume = Volume(labels, make_geometry((10, 10, 10), np.diag((10.0, 10.0, 10.0, 1.0))), "")
    assert _ml_beyond(volume, ((1, 9), (0, 10), (0, 10)), 9) == 100
    assert _ml_beyond(volume, ((1, 9), (0, 10), (0, 10))) == 200


@pytest.mark.parametrize(
    ("targets", "most", "when"),
    [
        ("regions", 3 * math.log(2), "each region has a probability of 0.5"),
        ("labels", math.log(4), "all labels are equally likely"),
        ("sigmoids", 3 * math.log(2), "each label has a probability of 0.5"),
    ],
)
def test_the_scale_of_uncertainty_is_that_of_what_was_learned(
    targets: str, most: float, when: str, finished: Path, tmp_path: Path
) -> None:
    record, folder = read_record(finished), tmp_path / "found"
    record = replace(record, content={**record.content, "config": {**record.config, "targets": targets}})
    properties = open_cache(finished.parent / "cache").cases["case-b"].properties
    source = nibabel.load(finished.parent / "data" / "case-b" / "case-b-seg.nii.gz")
    write_json(folder / "prediction.json", {"uncertainty": True, "runs": [{}, {}]})
    for kind in ("entropy", "disagreement"):
        save(folder / "uncertainty" / f"case-b_{kind}.nii.gz", np.ones(source.shape, np.float32), source.affine)
    volume = np.zeros(properties.shape, np.uint8)
    case = ShownCase("case-b", {}, volume, volume, (1.0, 1.0, 1.0), ())
    shown = _with_uncertainty(case, folder / "case-b.nii.gz", properties, record)
    assert (shown.most_nats, shown.most_when) == (pytest.approx(most), when)
    assert shown.heat is not None and int(shown.heat.max()) == round(255 / most)
    apart = math.log(2) if targets == "labels" else 3 * math.log(2)
    assert shown.most_apart.startswith(f"{apart:.2f} nats")


def test_the_sides_of_voxels_are_known_without_the_label_maps_of_a_validation(copied: Path) -> None:
    summary = copied / "validation" / "summary.json"
    content = json.loads(summary.read_text())
    write_json(summary, content | {"settings": content["settings"] | {"nsd_tolerance": 0.01}})
    said = "a tolerance of 0.01 mm, and voxels have sides of up to"
    assert said in written(copied).text
    for path in summary.parent.glob("*.nii.gz"):
        path.unlink()
    assert said in written(copied).text


@pytest.mark.parametrize("name", ["Bu\u0308st", "B\udcc3\udcbcst", "B\u00fcst"])
def test_names_are_the_same_under_every_locale(name: str) -> None:
    assert as_utf8(name) == "B\u00fcst" and as_utf8("\ud800") == "\ud800"
