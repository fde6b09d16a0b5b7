"""What a reader of pages and pictures should know first: what does not count, who predicted, and what is not shown."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np

from seqpar.cli import evaluate, report
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.data.formats.dataset import Case
from seqpar.data.preparation.cache_index import sources_of
from seqpar.report import cases, images
from seqpar.report.cases import CaseSection, elsewhere_note
from seqpar.report.cautions import (
    cautions_of_validation,
    changed_on_the_way,
    reached_in_validation,
    records_behind,
    trained_on_some,
)
from seqpar.report.embedded_volumes import ShownCase
from seqpar.report.pictures import PicturedCase, caution_about, figure_of_cases
from seqpar.report.planes import count_vanished_briefly
from seqpar.report.record import ScoredCase, read_record, weights_behind
from seqpar.report.run_page import main_settings
from seqpar.report.several_runs import cautions_about, cautions_about_each, settings_table
from seqpar.report.sweep_page import page_of_sweep
from seqpar.report.tables import DISPUTED_ML, sizes_table
from seqpar.runs.run_lock import RunLock
from seqpar.runs.run_status import append_start
from seqpar.runs.sweep_folder import read_sweep, refresh_points
from seqpar.scores.label_files import Doubt
from seqpar.tasks.segment.page import _refuse_other_classes
from tests.report.test_score_tables import scores_of
from tests.support.configs import config_of, trainer_of
from tests.support.folders import image_array, nnunet, save, write_json
from tests.support.report_page import NAMES, Page, own_slices, written
from tests.support.sweep_folder import make_sweep_folder


def changed(folder: Path, **dataset: Any) -> Path:
    """Returns a run folder after changing what its config.json says of its data."""
    content = json.loads((folder / "config.json").read_text())
    content["dataset"] |= dataset
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def predicted(folder: Path, data: Path, record: Any = None) -> Path:
    """Returns a new folder with a label map, and what predict would have recorded of it."""
    folder.mkdir()
    shutil.copy(data / "case-b" / "case-b-seg.nii.gz", folder / "case-b.nii.gz")
    if record is not None:
        (folder / "prediction.json").write_text(json.dumps(record))
    return folder


def test_it_is_said_that_parts_without_a_label_do_not_count(copied: Path) -> None:
    said = "Where the truth is not labelled (ignore label), nothing counts: neither scores nor the volumes"
    assert said not in written(copied).text
    values = json.loads((copied / "config.json").read_text())["dataset"]["values"]
    assert said in written(changed(copied, values=[*values, 9], ignore_label=len(values))).text


def test_what_a_run_reached_on_cases_that_it_had_learned_says_nothing_of_new_ones(copied: Path) -> None:
    """Pages of predictions without a truth quote it: --fold all holds out what it trains on."""
    held_out = json.loads((copied / "config.json").read_text())["dataset"]["held_out"]
    (said,) = reached_in_validation(read_record(copied))
    assert said.endswith("Other patients may score lower.")
    (said,) = reached_in_validation(read_record(changed(copied, train=held_out)))
    learned = "Other patients may score lower. The weights have learned from all of these cases"
    assert learned in said and said.endswith("so the scores say nothing about new cases.")
    assert main_settings(read_record(copied))["data"].endswith(
        f"cases to train on, {len(held_out)} of them validated as well"
    )
    record = read_record(changed(copied, train=[], learned_before=held_out[:1]))
    assert learned.replace("from all", "from some") in reached_in_validation(record)[0]
    (named,) = trained_on_some(record, held_out, "moved")
    assert f"has the name of a case that run moved was trained on, such as {held_out[0]}" in named


def test_a_run_that_validates_some_of_the_cases_it_holds_out_says_of_how_many(copied: Path) -> None:
    record = read_record(copied)

    def said(held_out: int, validates: int, **data: Any) -> tuple[str, str]:
        dataset = record.dataset | {"held_out": [f"c{n}" for n in range(held_out)], **data}
        config = record.config | {"val_cases": validates}
        own = replace(record, content={**record.content, "dataset": dataset, "config": config})
        return reached_in_validation(own)[0].partition(" (")[0], main_settings(own)["data"].partition(": ")[2]

    assert said(5, 2) == ("On 2 of its 5 held-out cases", "0 cases to train on, 5 held out (2 of them validated)")
    for usual in (said(5, 0), said(5, 7), said(5, 5), said(2, 2)):
        assert usual[0] == "On its 2 held-out cases" and usual[1].endswith(" held out")
    assert said(5, 3)[0] == "On its 2 held-out cases", "the validation was of an earlier start"
    held_out = [f"c{n}" for n in range(5)]
    on_trained = said(5, 2, train=held_out, validated=held_out[:2])
    assert on_trained == ("On its 2 validated cases", "5 cases to train on, 2 of them validated as well")


def test_label_maps_of_nobody_known_are_not_called_the_network_s(finished: Path, copied: Path, tmp_path: Path) -> None:
    data, target = finished.parent / "data", tmp_path / "page.html"
    by_hand, by_run = predicted(tmp_path / "hand", data), predicted(tmp_path / "p", data, {"run": str(copied)})

    def text_of(found: Path) -> str:
        assert run(report.act, [str(copied), "--prediction", str(found), "--out", str(target)]) == 0
        return Page(target.read_text()).text

    said = "which network made its predictions: whoever asked for this page says that it was run moved."
    assert f"The folder hand does not say {said}" in text_of(by_hand)
    assert said not in text_of(by_run), "its record names the run"


def test_a_page_says_which_label_maps_were_replaced(finished: Path, copied: Path, tmp_path: Path) -> None:
    record = {"run": str(copied), "files": ["case-b.nii.gz"], "label_maps": {"case-b": [0, "0"]}}
    found, target = predicted(tmp_path / "found", finished.parent / "data", record), tmp_path / "page.html"
    assert run(report.act, [str(copied), "--prediction", str(found), "--out", str(target)]) == 0
    said = f"1 of 1 label map in {found}, such as case-b.nii.gz, has changed since it was written."
    assert said in Page(target.read_text()).text


def test_cautions_count_the_cases_that_have_scores(copied: Path, tmp_path: Path, capsys) -> None:
    truth, names = nnunet(tmp_path / "data", 2, ("T1c", "T1", "FLAIR", "T2")) / "labelsTr", ("c_000", "c_001")
    found = Path(shutil.copytree(truth, tmp_path / "found"))
    record = {"run": str(copied), "files": [f"{name}.nii.gz" for name in names], "voxels": dict.fromkeys(names, "1")}
    record["inputs"] = {name: [["other.nii.gz", 1, 1, "0"]] * 4 for name in names}
    (found / "prediction.json").write_text(json.dumps(record))
    line, twice = [str(truth), str(found)], "c_000, c_001 are one case under 2 names"
    assert run(evaluate.act, line) == 0
    said = capsys.readouterr().out
    assert "Caution: 2 of 2 scored cases, such as c_000, were" in said and twice in said
    (found / "c_000.nii.gz").write_bytes((found / "c_000.nii.gz").read_bytes()[:100])
    assert run(evaluate.act, line) == DATA
    said = capsys.readouterr().out
    assert "Caution: 1 of 1 scored case, such as c_001, was" in said and twice not in said


def test_label_maps_of_a_validation_that_was_not_finished_are_of_weights_that_nobody_knows(copied: Path) -> None:
    """As after a kill in its midst: these may be weights that no checkpoint has."""
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**read_record(copied).held_out[-1], "step": 1}) + "\n")
    record, summary = read_record(copied), copied / "validation" / "summary.json"
    chosen = "The weights that predict uses were chosen on these cases"
    assert cautions_of_validation(record)[-1].startswith(chosen)
    summary.unlink()
    (told,) = cautions_of_validation(record)
    assert told == (
        f"{summary.parent} has no summary.json: this validation is not finished, or its scores could not be written. "
        "Which weights predicted these label maps is not known."
    )
    shutil.rmtree(summary.parent)
    assert cautions_of_validation(record)[-1].startswith(chosen), "as of a classifier, whose table has its own check"


def test_each_member_of_a_mean_says_what_it_reached_alone(finished: Path, copied: Path, tmp_path: Path) -> None:
    runs = [{"run": str(folder), "weights": {}} for folder in (finished, copied)]
    found, target = predicted(tmp_path / "found", finished.parent / "data", {"runs": runs}), tmp_path / "page.html"
    assert run(report.act, [str(copied), "--prediction", str(found), "--out", str(target)]) == 0
    text = Page(target.read_text()).text
    assert "The prediction is the mean of run and moved; no score of this mean exists." in text
    for name in ("run", "moved"):
        assert f"(too few to tell) run {name} reached a mean Dice of NCR 0.500" in text
    other = Path(shutil.copytree(copied, tmp_path / "other"))
    assert run(report.act, [str(other), "--prediction", str(found), "--out", str(target)]) == 0
    assert "The prediction is the mean of run and moved, without other; no score of" in Page(target.read_text()).text


def test_images_of_other_scans_are_not_shown_under_a_prediction(tmp_path: Path) -> None:
    """A copy under another time is the same scan, and another patient's has its name."""
    cases = [Case(name, (save(tmp_path / f"{name}.nii", image_array(n)),)) for n, name in enumerate("ab")]
    stamps, gaps = {case.id: sources_of(case) for case in cases}, list[str]()
    os.utime(tmp_path / "a.nii", (1, 1))

    def shown(stamps: images.Stamps | None, is_scored: bool = False) -> images.Images:
        return images.Images(Mock(), None, *images._of_prediction(cases, stamps, tmp_path, is_scored, gaps))

    assert shown(stamps).files.keys() == {"a", "b"} and not gaps
    save(tmp_path / "b.nii", image_array(7))
    assert (found := shown(stamps)).files.keys() == {"a"}
    assert found.missing("b").startswith(f"{tmp_path} holds another scan under the name b; only the labels")
    assert found.missing("c").startswith(f"{tmp_path} holds no image of c; only the labels")
    assert gaps == ["Caution: the image of b is of another scan than the one that was predicted; it is not shown."]
    save(tmp_path / "a.nii", image_array(8))
    gaps.clear()
    assert not shown(stamps, is_scored=True).files and gaps[0].endswith(
        "other patients as well, and are scored all the same."
    )
    assert gaps[0].startswith("Caution: the images of a, b are of other scans than those that were predicted; they are")
    earlier = {
        name: [[*stamp[:3], "f" * 6] for stamp in own] for name, own in stamps.items()
    }  # a digest of another kind
    os.utime(tmp_path / "b.nii", ns=(1, stamps["b"][0][2]))
    assert shown(earlier).files.keys() == {"b"}, "its time tells"
    assert shown(None).files.keys() == {"a", "b"}, "nobody knows from what"


def test_label_maps_that_do_not_lie_on_their_images_are_named_above_their_volumes(monkeypatch) -> None:
    """Such as one that was saved without its affine: its voxels seem to be of 1 mm."""
    labels = np.zeros((4, 4, 4), np.uint8)
    shown = ShownCase("a", {}, labels, labels, (1.0,) * 3, own_slices(labels.shape), note=f"{cases.ELSEWHERE} (…).")
    monkeypatch.setattr(
        cases, "load", lambda case, *_: replace(shown, name=case.name, note=shown.note * (case.name == "a"))
    )
    monkeypatch.setattr(cases, "with_wide_ct", lambda images, *_: images)
    scored, gaps = Mock(cases=[ScoredCase(name, None, Path("p"), {}) for name in "ab"]), list[str]()
    cases.load_worst(Mock(label_names={1: "x"}), scored, 2, Mock(), gaps)
    assert gaps == [f"{cases.MISPLACED}: a."]


def test_charts_of_several_runs_say_if_their_data_or_cases_differ(finished: Path, copied: Path, tmp_path: Path) -> None:
    target = tmp_path / "comparison.html"

    def text_of() -> str:
        assert run(report.act, [str(finished), str(copied), "--out", str(target)]) == 0
        return Page(target.read_text()).text

    strips = "Dice of each case, minus that of run (right of 0: higher)"
    alike = text_of()
    assert ", not comparable" not in alike and ", on different cases" not in alike and f"{strips}," not in alike
    changed(copied, held_out=NAMES[:2])
    text = text_of()
    assert "Mean Dice on held-out cases (up to 2 cases), on different cases" in text and ", not comparable" not in text
    changed(copied, name="other")
    text = text_of()
    assert "Loss in training, not comparable" in text and f"{strips}, of different data" in text
    assert "Mean Dice on held-out cases (up to 2 cases), on different cases, not comparable" in text


def picture(name: str, **more: Any) -> PicturedCase:
    label = np.zeros((20, 20, 20), int)
    label[4:9, 4:9, 4:9] = 1
    false = label.copy()
    false[15:18, 15:18, 15:18] = 1
    return PicturedCase(name, 1.0 + label, label, false, (1.0,) * 3, own_slices(label.shape), **more)


def test_titles_within_a_picture_keep_their_distance_from_the_row_above() -> None:
    for lost in ({}, {"truth": 2, "prediction": 1}):
        figure = figure_of_cases([picture(name, vanished=lost) for name in "abc"], ["liver"], 3, False, Path())
        figure.draw_without_rendering()
        assert all(panel.title.get_window_extent().x0 >= 0 for panel in figure.axes), "whole"
        for row in (1, 2):
            above, below = figure.axes[3 * (row - 1)], figure.axes[3 * row]
            room = above.get_window_extent().y0 - below.title.get_window_extent().y1
            assert room >= 0.15 * figure.dpi, "inches"


def test_a_picture_says_which_regions_its_grid_loses() -> None:
    assert count_vanished_briefly({"truth": 0, "prediction": 0}) == ""
    said = "regions too small to draw: 2 true, 1 predicted"
    assert count_vanished_briefly({"truth": 2, "prediction": 1}) == said
    figure = figure_of_cases([picture("a", vanished={"truth": 1})], ["liver"], 1, False, Path())
    first, second, _ = figure.axes
    assert "\nregions too small to draw: 1 true\n" in first.get_title() and "small" not in second.get_title()


def test_regions_of_the_files_that_training_s_grid_loses_are_counted_in_its_picture(tmp_path: Path, alone) -> None:
    data = nnunet(tmp_path / "D", cases=5)
    for path in (data / "labelsTr").iterdir():
        label = np.zeros((14, 12, 10), np.uint8)
        label[2:7, 2:6, 2:6] = label[11, 9, 7] = 1  # a region that stays, and a voxel that does not
        save(path, label)
    flags = f"--preset debug --device cpu --tile 8 --patch 4 --spacing 4,4,4 --data {data} --cache {tmp_path}/cache"
    trainer = trainer_of(config_of(flags.split()), alone, tmp_path)
    case = next(iter(trainer.data.dataset.cases.values()))
    pictured = trainer.validation._pictured(case, np.asarray(case.label), 0)
    assert pictured.truth.any() and pictured.vanished == {"truth": 1, "prediction": 0}
    shutil.rmtree(data / "labelsTr")
    assert trainer.validation._pictured(case, np.asarray(case.label), 0).vanished["truth"] == 1, "it is read once"


def test_regions_are_false_against_the_consensus_of_several_readers() -> None:
    full, none = np.zeros((20, 20, 20), np.uint8), np.zeros((20, 20, 20), np.uint8)
    full[4:9, 4:9, 4:9] = 1
    scored = scores_of(1.0, {"lesion": (1,)}, (none, full))
    told, table = "false against the readers' consensus: a reader may have outlined", sizes_table(scored)
    assert table is not None and told not in table.note
    readers = replace(scored.cases[0], doubt=Doubt({"ann": Path("a"), "ben": Path("b")}))
    table = sizes_table(replace(scored, cases=(readers,)))
    assert table is not None and told in table.note
    far = none.copy()
    far[15:18, 15:18, 15:18] = 1
    shown = ShownCase("a", {}, full, full | far, (1.0,) * 3, own_slices(full.shape))
    case = ScoredCase("a", Path("t"), Path("p"), {"lesion": {"Dice": 0.5, DISPUTED_ML: 1.0}})
    note = elsewhere_note(case, shown, {"lesion": [1]})
    assert note.startswith("In none of these planes, against the readers' consensus: 1 false region of lesion (")
    first, *others = shown.slices
    coarse = replace(shown, slices=(first._replace(resampled=True), *others))
    told = "the readers' consensus, counted in the drawn voxels, which are not the file's: 1 false region of lesion ("
    assert told in elsewhere_note(case, coarse, {"lesion": [1]})
    drawn = figure_of_cases([picture("a", disputed=far > 0)], ["lesion"], 1, False, Path()).get_suptitle()
    assert "The truth is the readers' consensus." in drawn


def test_maps_with_their_maximum_outside_the_body_are_counted() -> None:
    body, inside, outside = (np.zeros((12, 12, 12)) for _ in range(3))
    body[:6] = 1
    inside[2, 2, 2] = outside[10, 2, 2] = 1
    cautions = [caution_about(seen, body > 0) for seen in (inside, outside, outside / 2, 0 * inside)]
    entries = [{"heat": "png", "heat_caution": text} for text in cautions]

    def told(cases: list[dict[str, Any]]) -> str:
        return CaseSection("", (), "", (), {"cases": cases}).maps_outside

    what = "the maximum or a large part is outside the body: do not read such a map as a reason."
    assert told(entries) == f"In 2 of 4 shown maps, {what}"
    assert told(entries[1:2]) == f"In the shown map, {what}"
    assert told(entries[:1]) == "" == told([{"heat": "", "heat_caution": cautions[1]}])


def test_settings_that_held_for_some_steps_are_told_and_those_that_never_held_are_not(finished: Path) -> None:
    record = read_record(finished)
    last = max(row["step"] for row in record.train)

    def said(*starts: tuple[int, dict[str, Any]]) -> list[str]:
        history = [{}, *({"step": step, "changed": changed} for step, changed in starts)]
        return changed_on_the_way(replace(record, content={**record.content, "history": history}))

    lr, back = {"lr": [0.1, 0.2]}, {"lr": [0.2, 0.1]}
    assert said((1, lr)) == [
        "Settings changed when this run was resumed: --lr 0.1 -> 0.2 from step 1. Below are the last ones."
    ]
    assert said((1, lr), (1, back)) == said((last + 1, lr)) == said((1, {"patience": [1, 2], "epochs": [1, 2]})) == []
    assert "from step 1." in said((2, lr), (1, {}))[0], "resumed from an older checkpoint"
    assert said((1, {"gone": [1, 2]}), (1, lr)) == said((1, lr)) and said() == []
    history = append_start([{}], 1, 1, {}, ["the data are others: 6 cases added"])
    (told,) = changed_on_the_way(replace(record, content={**record.content, "history": history}))
    assert told == "From step 1, where this run was resumed, the data are others: 6 cases added."
    back = append_start(history, 1, 1, {}, ["the data are others: 6 cases removed"])
    (told,) = changed_on_the_way(replace(record, content={**record.content, "history": back}))
    assert told.endswith("6 cases added; then, before any further step, the data are others: 6 cases removed.")
    history = append_start([{}], last + 1, 1, {}, ["the data are others: 6 cases added"])
    assert changed_on_the_way(replace(record, content={**record.content, "history": history})) == [], "before a step"


def test_comparisons_name_runs_whose_settings_changed_and_how_many_cases_each_trains_on(
    finished: Path, tmp_path
) -> None:
    record = read_record(finished)
    history = [{}, {"step": 1, "changed": {"lr": [0.1, 0.2]}}]
    resumed = replace(record, content={**record.content, "history": history})
    told = "later: settings changed when this run was resumed: --lr 0.1 -> 0.2 from step 1. Below are the last ones."
    assert cautions_about_each({"once": record, "later": resumed}).count(told) == 1
    assert told not in cautions_about_each({"once": record, "later": record})
    fewer = replace(record, content={**record.content, "dataset": {**record.dataset, "train": ["one"]}})
    told = "These runs were trained on different cases and validated on the same ones."
    asked = replace(fewer, content={**fewer.content, "config": {**record.config, "train_cases": 1}})
    assert told in cautions_about([record, fewer]) and told not in cautions_about([record, record])
    assert told not in cautions_about([record, asked]), "the table says so"
    table = settings_table({"all": record, "one": fewer})
    assert table is not None and settings_table({"all": record, "later": resumed}) is None
    (row,) = table.rows
    assert (row.name, row.cells) == ("cases to train on", [str(len(record.dataset["train"])), "1"])


def test_points_that_run_are_told_from_those_that_were_killed(tmp_path: Path) -> None:
    made = make_sweep_folder(tmp_path)
    (name,) = (point.name for point in refresh_points(made, read_sweep(made)).points if point.state == "running")
    lock = RunLock(made / name)
    lock.take()
    assert f"{name} is running." in Page(page_of_sweep(made, {})).text
    lock.release()
    text = Page(page_of_sweep(made, {})).text
    assert f"{name} was killed after step" in text and "is running" not in text


def test_several_checkpoints_of_one_run_are_called_their_mean(tmp_path: Path) -> None:
    made = {"run": "r", "weights": {"/r/step-20/w": "0", "/r/step-60/w": "1"}, "settings": {}}
    (tmp_path / "prediction.json").write_text(json.dumps(made))
    assert weights_behind(tmp_path) == "the mean of /r/step-20/w, /r/step-60/w"
    (tmp_path / "prediction.json").write_text(json.dumps(made | {"weights": {"/r/step-20/w": "0"}}))
    assert weights_behind(tmp_path) == "/r/step-20/w"


def test_a_page_does_not_give_another_run_s_labels_its_own_names(finished: Path, tmp_path: Path, capsys) -> None:
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    out = tmp_path / "out"
    out.mkdir()
    write_json(out / "prediction.json", {"run": str(other), "weights": {}, "files": [], "inputs": {}})
    record = read_record(finished)
    _refuse_other_classes(record, records_behind(out))
    content = json.loads((other / "config.json").read_text())
    names = [*content["dataset"]["labels"]]
    labels = content["dataset"]["labels"]
    labels[names[1]], labels[names[2]] = labels[names[2]], labels[names[1]]
    write_json(other / "config.json", content)
    assert run(report.act, [str(finished), "--prediction", str(out)]) == USAGE
    said = capsys.readouterr().err
    assert f"{other} predicted these label maps, whose values stand for other classes than in {finished}: name" in said
