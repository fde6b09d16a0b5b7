"""What a page says of its run besides curves: version, machine, time, certainty of scores, volumes, lesions."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

import seqpar
from seqpar.cli import report
from seqpar.cluster.exit_codes import run
from seqpar.report.cases import _case_view, elsewhere_note, planes_note, planes_of, viewer_section
from seqpar.report.cautions import trained_on_some
from seqpar.report.curves import step_axis, training_diagrams
from seqpar.report.embedded_volumes import ShownCase
from seqpar.report.pictures import PicturedCase, figure_of_cases
from seqpar.report.planes import COLOURS, RUN_COLOURS
from seqpar.report.plots import draw_chart
from seqpar.report.record import ScoredCase, read_record
from seqpar.report.rendering import _environment
from seqpar.report.run_page import how_predicted
from seqpar.report.several_runs import page_of_several
from seqpar.settings.presets import debug
from seqpar.tasks.lookup import TASKS
from tests.support.folders import save
from tests.support.report_page import NAMES, Page, own_slices, written
from tests.support.reported_run import make_run

TEN = own_slices((10, 10, 10))


@pytest.fixture(scope="module")
def html(page: Page, finished: Path) -> str:
    return (finished / "report.html").read_text()


def setting(html: str, name: str) -> list[str]:
    return re.findall(rf"<tr><th>{re.escape(name)}</th><td>(.*?)</td></tr>", html)


def test_version_and_number_of_ranks_are_both_there(html: str) -> None:
    assert setting(html, "version of seqpar") == [seqpar.__version__]
    assert setting(html, "seqpar") == [str(debug().seqpar)]


def test_a_resumed_run_shows_the_command_that_began_it_and_those_that_resumed_it(copied: Path) -> None:
    path = copied / "config.json"
    content = json.loads(path.read_text())
    lines = [["train", "--preset", "debug"], ["train", "--resume"], ["train", "--resume", "--epochs", "9"]]

    def shown(**more: object) -> list[list[str]]:
        path.write_text(json.dumps({**content, "command": lines[-1], **more}))
        written(copied)
        html = (copied / "report.html").read_text()
        return [setting(html, name) for name in ("command", "resumed with")]

    starts = [{"step": 40 * n, "command": line} for n, line in enumerate(lines)]
    later = "train --resume (from step 40); train --resume --epochs 9 (from step 80)"
    assert shown(history=starts) == [["train --preset debug"], [later]]
    assert shown(history=starts[:1]) == [["train --preset debug"], []]
    assert shown() == [["train --resume --epochs 9"], []], "an older run knows its last one alone"


def test_time_machine_and_size_are_there(html: str, copied: Path) -> None:
    seconds = 2 * debug().steps + 65
    assert setting(html, "training time")[0].startswith(f"{seconds // 60}:{seconds % 60:02d}: {debug().steps} steps")
    assert "(median 2 s), 1 validation 1:05" in setting(html, "training time")[0]
    assert setting(html, "hardware") == ["2 × Chip 1 on 2 nodes"]
    assert setting(html, "parameters") == ["2.51 M: encoder 2.50 M + decoder 0.01 M"]
    content = json.loads((copied / "config.json").read_text())
    few = content["config"] | {"epochs": 1, "iterations": 1, "network": "nnunet-plain", "tile": [8, 8, 8]}
    few |= {"stages": "333:111 333:222 333:222 333:222"}
    (copied / "config.json").write_text(json.dumps(content | {"config": few}))
    html = written(copied).text
    assert "1 epoch × 1 step, " in html and "8 × 8 × 8 voxels, 1 cube of 8 × 8 × 8 voxels" in html
    # as an older version wrote it
    content["layout"] = {name: content["layout"][name] for name in ("ranks", "data", "seqpar")}
    (copied / "config.json").write_text(json.dumps(content))
    (copied / "metrics.jsonl").write_text((copied / "metrics.jsonl").read_text().replace("seconds", "other"))
    written(copied)
    text = (copied / "report.html").read_text()
    assert [setting(text, name) for name in ("training time", "hardware", "parameters")] == [["–"]] * 3


def test_an_encoder_of_stages_has_its_blocks_and_tokens_and_a_plain_one_its_windows(copied: Path) -> None:
    content = json.loads((copied / "config.json").read_text())
    sizes = {"tile": [32, 32, 64], "patch": [4, 4, 4], "embed_dim": 24, "heads": 2, "depth": 7, "decoder": "unetr"}
    hierarchical = {"encoder": "hierarchical", "stage_depths": [1, 2, 1], "window": 0}
    for network, described in (
        (hierarchical, ("stages of 1 × 24 + 2 × 48 + 1 × 96, from 2 heads", "1024 tokens, merged to 128, then 16")),
        (hierarchical | {"window": 3}, ("from 2 heads in windows of 3 tokens a side", "merged to 128, then 16")),
        ({"window": 4}, ("7 blocks × 24, 2 heads in windows of 4 tokens a side", "patch 4: 1024 tokens")),
    ):
        (copied / "config.json").write_text(json.dumps(content | {"config": content["config"] | sizes | network}))
        written(copied)
        text = (copied / "report.html").read_text()
        for name, words in zip(("network", "tile"), described):
            (said,) = setting(text, name)[:1]
            assert words in said, (name, said)


def test_scores_in_large_numbers_have_interval_and_number_of_cases(html: str, page: Page, copied: Path) -> None:
    for number, name in enumerate(("NCR", "ED", "ET", "WT", "TC")):
        values = [page.cells["per-case", case][number] for case in NAMES]
        tile = re.search(rf'<div data-class="{name}">.*?</div>', html)
        assert tile and f"<dd>{np.mean(values):.3f}</dd>" in tile[0] and "too few to tell, n = 3" in tile[0]
    (copied / "validation" / "summary.json").unlink()
    journal = written(copied)
    assert "in the validation after step" in journal.text and "up to 2 cases" in journal.text


def test_scans_of_one_patient_are_said_to_be_no_independent_cases(tmp_path: Path) -> None:
    run_folder = make_run(tmp_path, ["sub-1_ses-1", "sub-1_ses-2", "sub-2"])
    said = "3 scans of 2 patients: any interval takes scans as independent, so it is too narrow."
    leak = "2 of 3 held-out cases are other scans of patients whom the run was trained on: scores in validation are too"
    text = written(run_folder).text
    assert said in text and leak not in text
    path = run_folder / "config.json"
    content = json.loads(path.read_text())
    content["dataset"]["train"] = ["sub-1_ses-3"]
    path.write_text(json.dumps(content))
    assert leak in written(run_folder).text
    other = shutil.copytree(run_folder, tmp_path / "other")
    text = page_of_several([read_record(run_folder), read_record(other)], {"segment": TASKS["segment"].compare})[0]
    assert said in text and text.count(leak) == 2


def test_it_is_said_in_which_windows_cases_were_predicted(copied: Path) -> None:
    path = copied / "config.json"
    content, summary = json.loads(path.read_text()), copied / "validation" / "prediction.json"
    content["config"] |= {"val_overlap": 0.25, "val_window": "sliding"}
    path.write_text(json.dumps(content))
    assert "windows that overlap by 25 %; another overlap changes scores a little." in written(copied).text
    content["config"]["val_window"] = "whole"
    path.write_text(json.dumps(content))
    scores = json.loads((copied / "validation/summary.json").read_text()) | {"window": "whole"}
    (copied / "validation/summary.json").write_text(json.dumps(scores))
    assert "Each case was predicted in one pass." in written(copied).text
    record, ways = read_record(copied), [{"window": "sliding", "overlap": 0.5}, {"window": "whole", "overlap": None}]
    made = [{"run": str(copied), "weights": {}, "settings": way} for way in ways]
    for runs, said in (
        (made[:1], "windows that overlap by 50 %"),
        (made[1:], "in one pass"),
        (made, ": in one pass; in windows"),
    ):
        summary.write_text(json.dumps({"runs": runs}))
        assert said in how_predicted(summary.parent, record)


def test_predictions_for_training_cases_are_not_shown_without_a_word(copied: Path) -> None:
    record, (first, second) = read_record(copied), ("c_000", "c_001")
    record.content["dataset"]["train"] = [first, second]
    (one,), (two,) = (trained_on_some(record, [*names, "new"], "moved") for names in ([first], [first, second]))
    assert f"1 of 2 cases has the name of a case that run moved was trained on, such as {first}" in one
    assert "2 of 3 cases have the names of cases that run moved was trained on" in two
    assert trained_on_some(record, ["new"], "moved") == []
    learned = replace(
        record, content={**record.content, "dataset": {**record.dataset, "voxels": {first: "1", second: "2"}}}
    )
    (seen,) = trained_on_some(learned, [first, "new"], "moved", {first: "8", "new": "2"})
    assert "1 of 2 cases was in the training data of run moved, such as new: predictions" in seen


def test_a_low_dice_has_a_caution_next_to_it(copied: Path) -> None:
    path, caution = copied / "validation" / "summary.json", "the predictions hardly overlap the truth"
    content, key = json.loads(path.read_text()), "1"  # NCR

    def tile() -> str:
        written(copied)
        (found,) = re.findall(r'<div data-class="NCR">.*?</div>', (copied / "report.html").read_text())
        return found

    for dice, is_low in ((0.3, False), (0.2999, True), (math.nan, False)):
        content["mean"][key]["Dice"] = dice
        for case in content["metric_per_case"]:
            case["metrics"][key] |= {"Dice": dice, "Sensitivity": 0.1}
        path.write_text(json.dumps(content))
        assert (caution in tile()) == is_low, dice


def test_volumes_and_lesions_are_those_of_the_files(html: str, page: Page, finished: Path) -> None:
    ml: dict[str, list[tuple[float, float]]] = {"ED": [], "WT": []}
    for case in NAMES:
        files = finished.parent / "data" / case / f"{case}-seg.nii.gz", finished / "validation" / f"{case}.nii.gz"
        images = [nibabel.load(path) for path in files]
        spacing = images[0].header.get_zooms()
        voxel, maps = float(np.prod(spacing)) / 1000, [np.asarray(image.dataobj) for image in images]
        ml["ED"].append(tuple(np.count_nonzero(m == 2) * voxel for m in maps))
        ml["WT"].append(tuple(np.count_nonzero(m) * voxel for m in maps))
        shown = page.cells["volumes-per-case", case]
        assert shown[2:4] == pytest.approx(ml["ED"][-1]) and shown[6:8] == pytest.approx(ml["WT"][-1])
        assert f"ED {ml['ED'][-1][0]:.3g} → {ml['ED'][-1][1]:.3g}" in page.text
    for name, rows in ml.items():
        errors = [abs(truth - found) for truth, found in rows]
        cells = page.cells["sizes", name]
        bias = np.mean(rows, 0)[1] - np.mean(rows, 0)[0]
        assert cells[:4] == pytest.approx([*np.mean(rows, 0), bias, np.mean(errors)])
        assert cells[4:] == [3, 0]  # one lesion a case, each of them touched; too few to tell more
    assert (
        html.count("too few to tell</td>") == 5
        and "mean absolute error" in html
        and "Connected regions" in html
        and "Lesions" not in html
    )
    turned = json.loads(page.scripts["volumes"])["cases"][0]["spacing"]
    assert sorted(turned) == pytest.approx(sorted(map(float, spacing)))
    assert f"voxels of {' × '.join(f'{step:.3g}' for step in turned)} mm" in page.text


def test_a_page_of_an_older_summary_has_no_table_of_sizes(copied: Path) -> None:
    path = copied / "validation" / "summary.json"
    path.write_text(re.sub(r'"(TrueVolumeMl|VolumeMl|Lesion..)": [^,}]+,\s*', "", path.read_text()))
    old = written(copied)
    assert not [row for table, row in old.cells if table in ("sizes", "volumes-per-case")] and old.cases


def test_a_plane_has_a_scale_bar_of_its_length(html: str) -> None:
    bars = re.findall(r'<g class="scale"[^>]*><line x1="([\d.]+)" x2="([\d.]+)".*?<text[^>]*>([\d.]+) mm', html)
    assert len(bars) == 3 * len(NAMES)
    assert all(float(end) - float(start) == pytest.approx(float(length)) for start, end, length in bars)


def test_colours_are_those_of_the_runs_picture(page: Page) -> None:
    labels = json.loads(page.scripts["volumes"])["labels"]
    label = np.zeros((8, 8, 8), int)
    for number in range(1, 4):
        label[2 : 8 - number, 2:6, 2:6] = number
    case = PicturedCase("a", np.ones((8, 8, 8)), label, label, (1.0, 1.0, 1.0), own_slices((8, 8, 8)))
    figure = figure_of_cases([case], [entry["name"] for entry in labels], 1, False, Path())
    lines = {
        text.get_text(): line.get_color() for line, text in zip(figure.legends[0].get_lines(), figure.legends[0].texts)
    }
    assert [lines[entry["name"]] for entry in labels] == [entry["colour"] for entry in labels]


def test_a_long_name_is_seen_whole_above_its_pictures() -> None:
    label = np.ones((8, 8, 8), int)
    case = PicturedCase(
        "BraTS-GLI-00000-000 (generated, not a patient)",
        np.ones((8, 8, 8)),
        label,
        label,
        (1.0,) * 3,
        own_slices(label.shape),
    )
    figure = figure_of_cases([case], ["liver"], 1, False, Path())
    figure.draw_without_rendering()
    boxes = [panel.title.get_window_extent() for panel in figure.axes]
    assert boxes[0].x0 >= 0 and boxes[0].x1 < boxes[1].x0


def test_a_volume_of_a_single_slice_is_outlined_in_the_slice_alone() -> None:
    label = np.zeros((8, 8, 1), int)
    label[2:5, 3:6] = 1
    case = PicturedCase("a", np.ones((8, 8, 1)), label, 1 - label, (1.0,) * 3, own_slices(label.shape))
    panels = figure_of_cases([case], ["liver"], 1, False, Path()).axes
    assert sorted(len(panel.collections) for panel in panels) == [0, 0, 2]


def test_a_class_has_one_colour_everywhere_and_runs_have_others(html: str, page: Page) -> None:
    chart = html[html.index("Mean Dice on held-out") :]
    keys = dict(re.findall(r'<i style="background:(#\w+)"></i>(\w+)', chart[: chart.index("</figure>")]))
    in_curves = {name: colour for colour, name in keys.items()}
    viewer = {label["name"]: label["colour"] for label in json.loads(page.scripts["volumes"])["labels"]}
    legend = {name: colour for colour, name in re.findall(r'<i style="background:(#\w+)"></i>(NCR|ED|ET)<', html)}
    strips = html[html.index('<figure class="strip">') :]
    dots = list(dict.fromkeys(re.findall(r'<circle [^>]*fill="(#\w+)"', strips[: strips.index("</figure>")])))
    assert viewer == {name: legend[name] for name in viewer} and dots[:3] == list(viewer.values())
    assert in_curves["NCR"] == viewer["NCR"] and len(dots) == 5
    assert not set(RUN_COLOURS) & set(COLOURS)


def test_classes_that_share_a_colour_differ_in_dashes_and_markers() -> None:
    names = [f"organ {n}" for n in range(20)]
    rows = [{"step": step, "loss": 1.0, "cases": 5, "dice": dict.fromkeys(names, 0.5)} for step in (1, 2)]
    diagram = training_diagrams([], rows, classes=names)[-1]
    looks = [(style.colour, style.dashes) for _, style in diagram.named()]
    assert len(set(looks)) == 20 and len({colour for colour, _ in looks}) == len(COLOURS)
    markers = [(style.colour, style.marker) for _, style in diagram.named()]
    assert len(set(markers)) == 20, "a single validation draws no dashes"
    chart = draw_chart(diagram)
    assert chart and len({look for look, _ in chart.keys}) == 20 and chart.title.endswith("cases (up to 5 cases)")
    assert chart.keys[8][1] == "▽ organ 8" and chart.keys[16][1] == "✚ organ 16"


def test_a_chart_of_losses_says_of_how_many_cases_and_steps_they_are() -> None:
    steps = [{"step": n, "epoch": n // 20, "loss": 1.0} for n in range(50)]  # the last epoch was left early
    rows = [{"step": step, "loss": 1.0, "cases": 5, "dice": {"liver": 0.5}} for step in (20, 40)]
    losses, scores = training_diagrams(steps, rows)
    assert [line.label for line in losses.lines] == ["training", "held out (n = 5)"], "each case has a loss"
    assert scores.quantity.endswith("(up to 5 cases)") and losses.over == scores.over == "step (20 an epoch)"
    chart = draw_chart(losses)
    assert chart and chart.about_lines == "Pale: each step; solid: mean of the last 5 steps."
    without = [{"step": 50, "loss": 3.7, "error_of_mean": 3.9, "cases": 2}]
    guess = training_diagrams(steps, without)[0].lines[2]
    assert guess.dashed and guess.rows == [[3.9]], "a pretraining is seen next to a guess"
    assert step_axis([steps, steps[:20]]) == "step (20 an epoch)" and step_axis([steps, steps[:9]]) == "step"


FILES = {"image": "t1c", "label": "seg"}


def test_a_report_on_other_data_has_a_name_of_its_own_and_says_what_was_trained_on(
    finished: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    content = json.loads((copied / "config.json").read_text())
    content["dataset"]["train"], data = ["case-a-t1c"], finished.parent / "data"
    entries = [{kind: f"{data / n / n}-{end}.nii.gz" for kind, end in FILES.items()} for n in NAMES[:2]]
    listed = {"labels": {"0": "background", "1": "NCR", "2": "ED", "3": "ET"}, "training": entries}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    content["config"]["data"] = str(tmp_path / "list.json")
    (copied / "config.json").write_text(json.dumps(content))
    own = written(copied).text
    truth, found = tmp_path / "truth", tmp_path / "found"
    for folder in (truth, found):
        folder.mkdir()
        for name in NAMES[:2]:
            shutil.copy(finished.parent / "data" / name / f"{name}-seg.nii.gz", folder / f"{name}-t1c.nii.gz")
    line = [str(copied), "--truth", str(truth), "--prediction", str(found), "--cases", "0"]
    assert run(report.act, line) == 0
    said = capsys.readouterr().out
    assert "1 of 2 scored cases was in the run's training data (case-a-t1c): its scores say little" in said
    assert "scores-found.html" in said and Page((copied / "report.html").read_text()).text == own
    other = (copied / "scores-found.html").read_text()
    scored = f"Scores of the predictions in folder {found} against {truth}, not of the run's own validation."
    assert scored in Page(other).text and "<title>moved · truth</title>" in other and "Scores of the pred" not in own
    assert other.index("Scores of the predictions") < other.index('class="tiles"'), "above the cards"
    save(truth / "case-a-t1c.nii.gz", nibabel.load(truth / "case-b-t1c.nii.gz").get_fdata().astype(np.uint8))
    assert run(report.act, line) == 0
    assert "training" not in capsys.readouterr().out, "another case of the same name"


def test_a_case_without_the_class_says_so_and_what_was_predicted() -> None:
    truth, prediction = np.zeros((10, 10, 10), np.uint8), np.zeros((10, 10, 10), np.uint8)
    prediction[2:4, 2:4, 2:4] = 1
    case = ScoredCase("a", Path("t"), Path("p"), {"tumour": {"Dice": 0.0, "VolumeMl": 1.2}})
    shown = ShownCase("a", {}, truth, prediction, (1.0, 1.0, 1.0), TEN)
    assert planes_note(case, shown, ["tumour"]) == "no tumour; predicted 1.2 ml · planes with most of the prediction"
    litre = replace(case, scores={"tumour": {"Dice": 0.0, "VolumeMl": 1042.42}})
    assert planes_note(litre, shown, ["tumour"]).startswith("no tumour; predicted 1042 ml")
    nothing = ShownCase("a", {}, truth, truth, (1.0, 1.0, 1.0), TEN)
    none = ScoredCase("a", Path("t"), Path("p"), {"tumour": {"Dice": math.nan}})
    assert planes_note(none, nothing, ["tumour"]) == "no tumour; predicted none · middle planes"
    assert planes_note(case, ShownCase("a", {}, prediction, truth, (1.0, 1.0, 1.0), TEN), ["tumour"]) == (
        "planes with most of the truth"
    )
    prediction[2] *= 2
    prediction[4:6, 2:4, 2:4] = 1
    both = ShownCase("a", {}, prediction, truth, (1.0, 1.0, 1.0), TEN)
    assert planes_note(case, both, ["liver", "tumour"]) == "planes with most of the tumour in the truth"
    assert planes_of(both, False)[0].slice == "3 / 10"


def test_regions_that_no_shown_plane_cuts_are_counted_and_their_place_is_told() -> None:
    """Planes follow the truth: a false lesion elsewhere would go unseen."""
    truth, prediction = np.zeros((40, 40, 40), np.uint8), np.zeros((40, 40, 40), np.uint8)
    truth[4:10, 4:10, 4:10] = 1
    truth[20:24, 20:24, 20:24] = 1
    prediction[5:10, 4:10, 4:10] = 1
    prediction[30:34, 30:35, 30:36] = 1
    case = ScoredCase("a", Path("t"), Path("p"), {"tumour": {"Dice": 0.5}})
    shown = ShownCase("a", {}, truth, prediction, (1.0, 1.0, 1.0), own_slices(truth.shape))
    missed = "1 missed region of tumour (0.064 ml, at sagittal 21, coronal 21, axial 21)"
    one = "1 false region of tumour (0.12 ml, at sagittal 31, coronal 31, axial 31)"
    assert elsewhere_note(case, shown, {"tumour": [1]}) == f"In none of these planes: {one}, {missed}."
    parts = replace(shown, prediction=np.where(prediction == 1, 2, 0))
    whole = f"In none of these planes: {one}, {missed}.".replace("tumour", "whole")
    assert elsewhere_note(case, parts, {"whole": [1, 2]}) == whole, "a region of several labels"
    prediction[37, 37, 37] = 1
    two = "2 false regions of tumour (the largest: 0.12 ml, at sagittal 31, coronal 31, axial 31)"
    assert elsewhere_note(case, shown, {"tumour": [1]}) == f"In none of these planes: {two}, {missed}."
    view = _case_view(case, replace(shown, note="No image."), ["tumour"], {"tumour": [1]}, False)
    assert view.note == f"In none of these planes: {two}, {missed}. No image."
    picture = PicturedCase("a", 1.0 * truth, truth, prediction, (1.0,) * 3, own_slices(truth.shape))
    first, *others = figure_of_cases([picture], ["tumour"], 1, False, Path("run")).axes
    assert first.get_title() == "a\nregions not shown: 2 false, 1 missed\nsagittal 5 / 40"
    assert [panel.get_title() for panel in others] == ["coronal 5 / 40", "axial 5 / 40"]
    unknown = figure_of_cases([replace(picture, hidden=[1])], ["tumour"], 1, False, Path("run")).axes[0]
    assert "false" not in unknown.get_title(), "the truth does not show the class"
    in_plane = np.where(np.indices(truth.shape)[2] == 4, prediction | (truth > 0), 0 * truth)
    in_plane[30, 30, 4] = 1
    near = replace(shown, truth=np.where(np.arange(40) < 15, truth, 0), prediction=in_plane)
    assert elsewhere_note(case, near, {"tumour": [1]}) == "", "an axial plane shows it"
    open_ = replace(shown, ignored=prediction > truth)
    assert elsewhere_note(case, open_, {"tumour": [1]}) == f"In none of these planes: {missed}.", (
        "the truth leaves it open"
    )
    left = "The truth leaves 0.121 ml unlabelled (ignore label; hatched: 0.2% of the volume shown)."
    beyond = replace(shown, ignored=prediction < 0, unlabelled_ml=30.0)
    assert beyond.unlabelled == "The truth leaves 30 ml unlabelled (ignore label; not in the volume shown)."
    assert not beyond.areas
    assert (
        _case_view(case, open_, ["tumour"], {"tumour": [1]}, False).note == f"In none of these planes: {missed}. {left}"
    )
    assert replace(shown, ignored=prediction < 0).unlabelled == "" == shown.unlabelled
    hidden = replace(shown, hidden=[1])
    assert "false" not in elsewhere_note(case, hidden, {"tumour": [1]}), "the truth does not show the class"
    patient = replace(case, truth=None, scores={"tumour": {"VolumeMl": 1.0}})
    alone = replace(shown, truth=0 * truth)
    others = "2 predicted regions of tumour (the largest: 0.12 ml, at sagittal 31, coronal 31, axial 31)"
    assert elsewhere_note(patient, alone, {"tumour": [1]}) == f"In none of these planes: {others}."


def test_a_missing_prediction_is_a_gap_and_not_the_end(copied: Path, page: Page) -> None:
    (copied / "validation" / f"{page.cases[0]}.nii.gz").unlink()
    bare = written(copied)
    assert bare.cases == page.cases[1:] and f"Case {page.cases[0]} cannot be shown: " in bare.text
    (copied / "validation" / f"{page.cases[1]}.nii.gz").unlink()
    bare = written(copied)
    assert bare.text.count("cannot be shown") == 1, "one sentence for several"
    assert f"2 cases cannot be shown ({page.cases[0]}, {page.cases[1]}). The first: " in bare.text


def test_a_map_of_doubt_hides_no_image_until_it_is_asked_for() -> None:
    """A classifier's map is what its viewer is for."""
    ball = np.ones((10, 10, 10), np.uint8)
    case = ShownCase("a", {"T1": ball}, ball, ball, (1.0,) * 3, TEN, heat=ball, heat_name="entropy")
    template = _environment(None).from_string('{% from "cases.html" import viewer %}{{ viewer(cases) }}')
    for labels, opacity in ((["tumour"], 0), ([], 65)):
        section = viewer_section([(case, case.embedded(10**6))], labels, False)
        assert f'id="heat" min="0" max="100" value="{opacity}"' in template.render(cases=section)


def test_a_page_of_ct_says_which_values_it_keeps() -> None:
    nothing = np.zeros((4, 4, 4), np.uint8)
    for limits, said in (
        ((6.4, 163.0), "Of the CT, everything below 6 HU (such as fat and air) is equally black, everything above "
         "163 HU (such as bone) equally white."),
        ((-60.0, 900.0), "below −60 HU (such as air) is equally black, everything above 900 HU equally white."),
    ):  # fmt: skip
        case = ShownCase(
            "a", {"CT": nothing}, nothing, nothing, (1.0,) * 3, own_slices((4, 4, 4)), "", {"CT": limits}, True
        )
        assert viewer_section([(case, case.embedded(10**6))], (), False).note.endswith(said)
        low, high = (f"{limit:.0f} HU" for limit in limits)
        caption = _case_view(ScoredCase("a", None, Path("a"), {}), case, (), {}, False).caption
        assert f"shown on CT from {low} (black) to {high} (white)" in caption
    mr = replace(case, is_ct=False)
    assert " HU" not in _case_view(ScoredCase("a", None, Path("a"), {}), mr, (), {}, False).caption
    assert "HU" not in viewer_section([(mr, mr.embedded(10**6))], (), False).note
