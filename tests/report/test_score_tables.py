"""What tables of scores say: of volumes, regions, coarse voxels, and cases that lack a class."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import USAGE, run
from seqpar.data.preparation.transforms import resample_label
from seqpar.report.cases import _case_view, planes_note, viewer_section
from seqpar.report.cautions import reached_and_found, too_much
from seqpar.report.embedded_volumes import ShownCase
from seqpar.report.planes import COLOURS, count_vanished_regions, vanished_note
from seqpar.report.record import CaseScores, parse_scores, read_record, step_sentence
from seqpar.report.tables import (
    Score,
    dice_table,
    mean_over,
    metrics_table,
    predicted_volumes,
    score_strips,
    sizes_table,
    volume_score,
    volumes_table,
    voxel_cautions,
    what_is_absent,
    what_is_missing,
    what_volumes_count,
)
from seqpar.scores.comparison import what_is_low
from seqpar.scores.label_classes import Labels
from seqpar.scores.label_files import Doubt, Pair
from seqpar.scores.label_scores import DEFAULT_SETTINGS, format_dice, score, summarise
from seqpar.scores.summary_files import summary_content
from seqpar.tasks.segment.page import headline
from tests.support.folders import write_json
from tests.support.label_folders import save
from tests.support.report_page import own_slices


def scores_of(
    mm: float, classes: dict[str, tuple[int, ...]], *maps: tuple[np.ndarray, np.ndarray], ignore: int | None = None
) -> CaseScores:
    """Scores of cases with voxels of ``mm``; the first map of each is the truth."""
    rows = [score(truth, prediction, classes, (mm, mm, mm), ignore=ignore) for truth, prediction in maps]
    pairs = [Pair(f"case-{n}", Path("t.nii.gz"), Path(f"case-{n}.nii.gz")) for n in range(len(maps))]
    labels = Labels(classes, frozenset(range(9)), None)
    content = summary_content(list(zip(pairs, rows)), labels, summarise(rows)) | {"settings": DEFAULT_SETTINGS}
    return parse_scores(content, "here", None)


def test_it_is_said_which_labels_a_volume_and_a_mean_dice_are_of() -> None:
    alone = "Each volume counts only its class's label: an organ's volume leaves out lesions with labels of their own."
    assert what_volumes_count({"liver": "1", "lesion": "2"}).strip() == alone
    assert what_volumes_count({"liver": "(1, 2)", "lesion": "2"}).endswith("all labels of its class: liver = 1 + 2.")
    regions = what_volumes_count({"NCR": "1", "ET": "3", "TC": "(1, 3)"})
    assert regions.endswith("its class: TC = NCR + ET."), "names of labels say more than their numbers"
    assert what_volumes_count({"liver": "1"}) == "" == mean_over(["liver"])
    assert mean_over(["liver", "lesion"]) == "The mean Dice is the mean of liver and lesion."
    full = np.ones((4, 4, 4), np.uint8)
    note = dice_table(scores_of(1.0, {"liver": (1,), "lesion": (2,)}, (full, full))).note
    assert note.startswith("The mean Dice of a case is the mean of liver and lesion. A class that has no Dice")
    assert dice_table(scores_of(1.0, {"liver": (1,)}, (full, full))).note == ""


def test_labels_that_share_a_colour_are_named() -> None:
    names = [f"organ {n}" for n in range(len(COLOURS) + 1)]
    said = f"Colours repeat after {len(COLOURS)} labels, as in organ 0 and organ 8: point at a plane to read its label"
    assert viewer_section([], names, False).orientation.endswith(said)
    assert "repeat" not in viewer_section([], names[:-1], False).orientation


def test_volumes_are_no_finer_than_their_voxels() -> None:
    full = np.zeros((20, 20, 20), np.uint8)
    full[4:9, 4:9, 4:9] = 1
    for mm, text in ((1.0, "0.12"), (6.0, "27.0"), (12.0, "216")):
        table = volumes_table(scores_of(mm, {"liver": (1,)}, (full, full)))
        assert [cell.text for cell in table.rows[0].cells] == [text] * 2  # type: ignore[union-attr]


def test_a_small_volume_is_not_shown_as_none() -> None:
    speck, none = np.zeros((2, 20, 20, 20), np.uint8)
    speck[4:7, 4, 4] = 1  # 0.003 ml
    scored = scores_of(1.0, {"lesion": (1,)}, (speck, none))
    sizes, volumes = sizes_table(scored), volumes_table(scored)
    assert [cell.text for cell in volumes.rows[0].cells] == ["0.003", "0.00"]  # type: ignore[union-attr]
    assert sizes is not None
    assert [cell.text for cell in sizes.rows[0].cells[:4]] == ["0.003", "0.00", "-0.003", "0.003"]  # type: ignore[union-attr]
    predicted = predicted_volumes(scores_of(1.0, {"lesion": (1,)}, (none, speck))).rows[0].cells
    assert [cell.text for cell in predicted] == ["0.003"]  # type: ignore[union-attr]
    assert volume_score(0.4, 0).text == "0.4" and volume_score(math.nan, 2).text == "–"
    assert volume_score(3e-17, 0).text == "0", "the rounding of a sum is no volume"


def test_a_case_that_only_one_map_has_the_class_in_is_told_from_a_measured_one() -> None:
    full, empty = np.zeros((20, 20, 20), np.uint8), np.zeros((20, 20, 20), np.uint8)
    full[4:9, 4:9, 4:9] = 1
    scored = scores_of(1.0, {"lesion": (1,)}, (full, np.roll(full, 2, 0)), (empty, full), (full, empty))
    table = metrics_table(scored)
    assert table.rows[0].cells[-2].text == "2" and table.heads[4].below[-1] == "substituted"  # type: ignore[union-attr]
    assert table.heads[4].below == ("measured mean", "mean with substitutes", "median with substitutes", "substituted")
    assert table.rows[0].cells[-5].text == "2.0 (n = 1)" and "The measured mean leaves such cases out" in table.note  # type: ignore[union-attr]
    dice, distance = score_strips(scored, {})
    assert (dice.title, distance.title) == ("Dice of each case", "HD95 of each case, mm")
    dots = {title: hollow for _, _, title, hollow in (*dice.rows[0].dots, *distance.rows[0].dots)}
    assert dots == {
        "case-0: 0.6": False,
        "case-1: 0; no lesion in truth; 0.125 ml predicted": True,
        "case-2: 0; no lesion predicted; 0.125 ml in truth": True,
        "case-0: 2": False,
        "case-1: 34.64; substituted, no lesion in truth; 0.125 ml predicted": True,
        "case-2: 34.64; substituted, no lesion predicted; 0.125 ml in truth": True,
    }
    rows = {row.name: row.cells[0].text for row in dice_table(scored).rows}  # type: ignore[union-attr]
    assert rows == {"case-0": "0.600", "case-1": "0.000 (none in truth)", "case-2": "0.000 (none predicted)"}
    assert "' (no overlap)'" in str(dice_table(scores_of(1.0, {"lesion": (1,)}, (full, np.roll(full, 9, 0)))).rows)
    assert metrics_table(scores_of(1.0, {"lesion": (1,)}, (empty, full))).heads[4].below == ("value", "substituted")
    nothing = scores_of(1.0, {"lesion": (1,)}, (full, full), (empty, empty))
    assert metrics_table(nothing).heads[4].below == ("mean", "median", "substituted")
    assert metrics_table(nothing).rows[0].cells[-2].text == "0"  # type: ignore[union-attr]


def test_a_class_that_some_readers_outlined_is_not_called_absent_without_a_word() -> None:
    row = {"n_ref": 0.0, "n_pred": 9.0, "VolumeMl": 153.0, "TrueVolumeMl": 0.0}
    assert what_is_missing("lesion", row) == "no lesion in truth; 153 ml predicted"
    said = what_is_missing("lesion", row | {"DisputedMl": 62.7})
    assert said == "no lesion in the readers' consensus, but 62.7 ml by some readers; 153 ml predicted"
    assert (
        what_is_missing("lesion", row | {"DisputedMl": 0.0}) == "no lesion in the readers' consensus; 153 ml predicted"
    )
    found = {"n_ref": 9.0, "n_pred": 0.0, "VolumeMl": 0.0, "TrueVolumeMl": 12.0, "DisputedMl": 3.0}
    assert what_is_missing("lesion", found) == "no lesion predicted; 12 ml in the readers' consensus"


def test_a_class_is_absent_only_from_the_part_that_is_labelled() -> None:
    """The lesion of the truth, or all of the image, has the ignore label: nobody said that there is none."""
    classes, found = {"lesion": (1,)}, np.zeros((9, 9, 9), np.uint8)
    found[2:6, 2:6, 2:6] = 1
    truths = np.where(found, 9, 0), np.full(found.shape, 9)
    scored = scores_of(10.0, classes, *((truth, found) for truth in truths), ignore=9)
    cases = sorted(scored.cases, key=lambda case: case.name)
    rows = [case.scores for case in cases]
    assert [row["lesion"]["UnlabelledMl"] for row in rows] == [64, 729] and rows[0]["lesion"]["VolumeMl"] == 0
    said = what_is_absent(scored)
    assert said.startswith("The labelled part of 1 of 2 cases has no lesion: where none is predicted (1 case)")
    assert said.endswith("Cases that are not annotated for lesion, and left out: 1 of 2."), "all of it is unlabelled"
    assert cases[0].volumes == " · ml in the labelled part, truth → prediction: lesion 0 → 0"
    assert format_dice(rows[0]["lesion"], 3) == "– (in neither map, where labelled)"
    as_read = score(truths[0], found, classes, np.full(3, 10.0), ignore=9)["lesion"]
    assert format_dice(as_read, 3) == "– (in neither map, where labelled)", "numpy's numbers too"
    near = np.where(np.roll(found, 2, 0), 1, 0)
    row = score(truths[0], near, classes, (10, 10, 10), ignore=9)["lesion"]
    assert what_is_missing("lesion", row) == "no lesion in the labelled part; 32 ml predicted"
    shown = ShownCase("0", {}, 0 * found, found, (10.0,) * 3, own_slices(found.shape), ignored=truths[0] == 9)
    note = planes_note(cases[0], shown, ["lesion"])
    assert (
        note
        == "no lesion in the labelled part; predicted in the volume shown: 64 ml · planes with most of the prediction"
    )
    nothing = planes_note(cases[1], replace(shown, hidden=[1], ignored=truths[1] == 9), ["lesion"])
    assert nothing.startswith("not annotated; predicted in the volume shown: 64 ml · ")
    assert "UnlabelledMl" not in score(found, found, classes, (1, 1, 1))["lesion"], "no such label"


def test_regions_that_the_network_s_grid_loses_are_said() -> None:
    """A network at 4 mm is drawn at 4 mm: a lesion of one voxel of 1 mm is not there."""
    fine = np.zeros((32, 32, 20), np.uint8)
    fine[3:19, 3:19, 2:18], fine[28, 28, 10], fine[30, 4, 3] = 1, 1, 2
    coarse = resample_label(fine, (8, 8, 5))
    assert count_vanished_regions(fine, coarse, (1, 2)) == 2 and count_vanished_regions(fine, coarse, (2, 3)) == 1
    assert count_vanished_regions(fine, fine, (1, 2)) == 0 and count_vanished_regions(0 * fine, 0 * coarse, (1,)) == 0
    fine[30, 4, 3], fine[19, 10, 10] = 0, 2  # the rim of the first
    coarse = resample_label(fine, (8, 8, 5))
    assert count_vanished_regions(fine, coarse, (1, 2)) == 2 and count_vanished_regions(fine, coarse, [(1, 2)]) == 1
    nested = [(1,), (2,), (1, 2)]
    assert count_vanished_regions(fine, coarse, nested) == 2, "a spot alone, of two classes, and one within a region"
    said = vanished_note({"prediction": 0, "truth": 2}, (4.0, 4.0, 4.0))
    assert "voxels of 4 × 4 × 4 mm, in which 2 regions of the truth are too small to be seen." in said
    assert "1 region of the truth is too small" in vanished_note({"truth": 1}, (4.0,) * 3)
    assert vanished_note({"prediction": 0, "truth": 0}, (4.0,) * 3) == ""


def test_a_single_case_has_no_means(finished: Path) -> None:
    full = np.zeros((20, 20, 20), np.uint8)
    full[4:9, 4:9, 4:9] = 1
    one = scores_of(1.0, {"lesion": (1,)}, (full, np.roll(full, 2, 0)))
    (tile,), note = headline(read_record(finished), one)
    assert (tile.score.text, tile.more) == ("0.600", "n = 1")
    assert note == "Dice of a single case, which says little about others."
    table = sizes_table(one)
    assert table and table.heads[1].below[-1] == "absolute error"
    assert " mean" not in table.note.partition(" A region")[0]


def test_regions_found_have_an_interval_by_their_number_and_false_ones_are_counted_per_case() -> None:
    truth, prediction, none = np.zeros((3, 40, 40, 8), np.uint8)
    for n in range(8):
        truth[5 * n : 5 * n + 3, :3, :3] = 1
    prediction[:33, :1, :1] = 1  # touches the first seven by a column
    prediction[0, 20::4, 0] = prediction[0, 20, 0:2] = 1  # five specks that touch none
    scored = scores_of(3.5, {"lesion": (1,)}, (truth, prediction), (truth, truth), (none, none), (none, none))
    table = sizes_table(scored)
    assert table is not None
    low, high = stats.binomtest(15, 16).proportion_ci(method="wilson")
    texts = [cell if isinstance(cell, str) else cell.text for cell in table.rows[0].cells]
    assert texts[2] == "-1.90" and texts[4:] == [
        "15 of 16",
        "5 (1.25 per case)",
        f"0.938 ({low:.3f} to {high:.3f}), with 5 false",
    ]
    assert table.heads[2].below == ("regions found", "false regions", "sensitivity (regions)")
    assert "voxels larger than 3 mm have none" in table.note and "by as little as one voxel" in table.note
    few = sizes_table(scores_of(3.5, {"lesion": (1,)}, *[(truth[:15], truth[:15])] * 1))
    specks = np.zeros((24, 24, 24), np.uint8)
    specks[::2, ::2, ::2] = 1
    many = sizes_table(scores_of(1.0, {"vessel": (1,)}, (0 * specks, specks)))
    assert many is not None and many.rows[0].cells[5].text == "1728 (1,728 per case)"  # type: ignore[union-attr]
    assert few is not None and few.rows[0].cells[-1] == "too few to tell"


def test_regions_too_small_to_count_are_said_and_what_touches_them_is_not_false() -> None:
    truth, prediction = np.zeros((2, 40, 20, 20), np.uint8)
    truth[2:8, 2:8, 2:8] = truth[20:22, 2:4, 2:4] = truth[30, 12, 12] = 1  # two of up to 50 mm³
    prediction[2:8, 2:8, 2:8] = prediction[21, 3, 3] = prediction[36, 18, 18] = 1
    table = sizes_table(scores_of(1.0, {"lesion": (1,)}, (truth, prediction)))
    assert table is not None
    found, false, _ = (cell.text if isinstance(cell, Score) else cell for cell in table.rows[0].cells[4:])
    assert found == "1 of 1, 2 too small" and false == "1 (1 per case)"
    assert "it touches no region or margin, not even of a region too small to count" in table.note


def test_a_prediction_of_many_times_the_true_volume_is_warned_of() -> None:
    full, none = np.ones((20, 20, 20), np.uint8), np.zeros((20, 20, 20), np.uint8)
    small = none.copy()
    small[4:9, 4:9, 4:9] = 1
    assert too_much(scores_of(1.0, {"vessel": (1,)}, (small, full))) == (
        "The predicted volume of vessel, 8 ml, is 64 times the true one, 0.125 ml: most of it is wrong, and regions "
        "may be found by chance."
    )
    disputed = scores_of(1.0, {"vessel": (1,)}, (small, full))
    disputed.cases[0].scores["vessel"]["DisputedMl"] = 1.0
    assert too_much(disputed).endswith("ml: most of it is outside the readers' consensus, though a reader may agree.")
    soft = scores_of(1.0, {"vessel": (1,)}, (small, full))
    soft = replace(soft, cases=(replace(soft.cases[0], doubt=Doubt({}, (0, 1))),))
    assert too_much(soft).endswith("ml: most of it is where the truth calls it less probable than not.")
    small[:] = 0
    small.flat[:2250] = 1  # of 8,000 voxels
    assert " is 3.6 times the true one, 2.25 ml" in too_much(scores_of(1.0, {"vessel": (1,)}, (small, full)))
    small[:] = 0
    small[4:9, 4:9, 4:9] = 1
    two = too_much(scores_of(1.0, {"vessel": (1,)}, (small, full), (small, full)))
    assert two.startswith("The mean predicted volume of vessel, 8 ml, is 64 times the mean true one, 0.125 ml: ")
    both = too_much(scores_of(1.0, {"vessel": (1,), "tree": (1, 2)}, (small, full)))
    assert both.count("The predicted") == both.count("; the predicted volume of tree") == both.count("by chance") == 1
    assert too_much(scores_of(1.0, {"vessel": (1,)}, (small, small), (none, small), (full, small))) == ""
    assert too_much(scores_of(1.0, {"vessel": (1,)}, (none, full))) == "", "there is nothing to compare with"


def test_voxel_cautions_are_warned_of() -> None:
    full = np.zeros((20, 20, 20), np.uint8)
    full[4:9, 4:9, 4:9] = 1
    said = voxel_cautions(scores_of(6.0, {"liver": (1,)}, (full, full)))
    assert "coarse, of up to 216 mm³: a single voxel may count as a region" in said
    assert "sides of 6 mm on average: a boundary that is one voxel off may count as wrong" in said
    assert "changes small regions much" in voxel_cautions(scores_of(3.0, {"liver": (1,)}, (full, full)))
    fine = scores_of(1.5, {"liver": (1,)}, (full, full))
    assert voxel_cautions(fine).startswith("The surface Dice (NSD) has a tolerance of 1 mm, and voxels have sides of 1")
    fine = scores_of(1.0, {"liver": (1,)}, (full, full))
    assert voxel_cautions(fine) == "" and "of up to 5 mm" in voxel_cautions(fine, [5.0]), "thick slices"
    assert voxel_cautions(scores_of(0.4, {"kidney": (1,)}, (full, full)), [0.12, 0.72]).startswith(
        "The surface Dice (NSD) has a tolerance of 1 mm, up to 8 voxels: it does"
    ), "one case of thick slices among fine ones"
    tiny = scores_of(0.1, {"kidney": (1,)}, (full, full))
    assert voxel_cautions(tiny) == (
        "The surface Dice (NSD) has a tolerance of 1 mm, up to 10 voxels: it does not see errors below that. "
        "--nsd-tolerance of evaluate sets another. Regions are counted with a margin of 3 mm, up to 30 voxels: "
        "what is predicted within it counts neither as false nor as a region of its own. No true region of kidney is "
        "larger than 50 mm³: all are too small to count, so none is found or missed."
    )


def test_it_is_said_how_many_cases_lack_a_class_and_how_they_count() -> None:
    full, empty = np.zeros((20, 20, 20), np.uint8), np.zeros((20, 20, 20), np.uint8)
    full[4:9, 4:9, 4:9] = 1
    classes = {"lesion": (1,)}
    scored = scores_of(1.0, classes, (full, full), (empty, full), (empty, full), (empty, empty))
    assert what_is_absent(scored) == (
        "The truth of 3 of 4 cases has no lesion: where some is predicted (2 cases), the Dice counts as 0; "
        "where none is predicted (1 case), the case is left out."
    )
    assert what_is_absent(scored) in metrics_table(scored).note
    (tile,), _ = headline(None, scored)  # type: ignore[arg-type]
    assert tile.more == "too few to tell, n = 3 (2 cases counted as 0: none in the truth)"
    lacking = scores_of(1.0, classes, *[(empty, empty)] * 2)
    assert headline(None, lacking)[0][0].more == "no case has a Dice, n = 0"  # type: ignore[arg-type]
    (alone,), _ = headline(None, scores_of(1.0, classes, *[(full, full)] * 5))  # type: ignore[arg-type]
    assert alone.more == "all cases alike, n = 5", "an interval from 1 to 1 would look like certainty"
    as_brats = replace(scored, settings={"empty": "brats"})
    assert what_is_absent(as_brats).endswith("where none is predicted (1 case), the Dice counts as 1.")
    one = what_is_absent(scores_of(1.0, classes, (empty, full)))
    assert one.startswith("The truth of 1 of 1 case has no lesion: where some is predicted (1 case), the Dice")
    assert what_is_absent(scores_of(1.0, classes, (full, full))) == "The truth of the case has every class."
    hidden = replace(scored, cases=(replace(scored.cases[0], scores={"lesion": {"n_ref": math.nan}}),))
    assert what_is_absent(hidden) == "Cases that are not annotated for lesion, and left out: 1 of 1."


def test_a_class_that_a_case_is_not_annotated_for_has_no_numbers_in_it() -> None:
    full = np.zeros((20, 20, 20), np.uint8)
    full[4:9, 4:9, 4:9], full[12:16, 12:16, 12:16] = 1, 2
    scored = scores_of(1.0, {"liver": (1,), "lesion": (2,)}, (full, full), (full, full), (full, full))
    first = scored.cases[0]
    first = replace(first, scores=first.scores | {"lesion": dict.fromkeys(first.scores["lesion"], math.nan)})
    scored = replace(scored, cases=(first, *scored.cases[1:]))
    table = sizes_table(scored)
    assert table and "over 3 cases (lesion: 2), those without" in table.note
    assert [row.cells[4].text for row in table.rows] == ["3 of 3", "2 of 2"]  # type: ignore[union-attr]
    shown = ShownCase("a", {}, full, full, (1.0, 1.0, 1.0), own_slices(full.shape))
    caption = _case_view(first, shown, ["liver", "lesion"], {}, False).caption
    assert "nan" not in caption and "no lesion" not in caption and ", lesion – (not annotated) · ml, truth" in caption
    assert not any(hollow for strips in score_strips(scored, {}) for row in strips.rows for *_, hollow in row.dots)


def test_a_truth_without_a_declaration_has_the_classes_of_the_run_that_predicted(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth, found = tmp_path / "truth", tmp_path / "found"
    for folder in (truth, found):
        save(folder / "new.nii.gz", np.ones((4, 4, 4), np.uint8))
    assert run(evaluate.act, [str(truth), str(found)]) == USAGE
    assert f"there is no dataset.json in {truth} or above it: declare" in capsys.readouterr().err
    (found / "prediction.json").write_text(json.dumps({"run": str(finished)}))
    assert (labels := read_record(finished).labels) is not None
    for pair in ((truth, found), (truth / "new.nii.gz", found / "new.nii.gz")):
        assert run(evaluate.act, [*map(str, pair)]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"classes as in {finished}, as no dataset.json declares those of the truth")
        assert f"new: Dice {next(iter(labels.classes))} " in said
    shutil.copytree(found, tmp_path / "by-hand", ignore=shutil.ignore_patterns("prediction.json"))
    assert run(evaluate.act, [str(truth), str(found), str(tmp_path / "by-hand")]) == USAGE, "of one nothing is known"
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    content = json.loads((other / "config.json").read_text())
    content["dataset"] |= {"regions": {}}
    (other / "config.json").write_text(json.dumps(content))
    (found / "prediction.json").write_text(json.dumps({"runs": [{"run": str(path)} for path in (finished, other)]}))
    assert run(evaluate.act, [str(truth), str(found)]) == USAGE, "they have other classes"


def test_what_a_run_learned_as_one_class_is_scored_as_one(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its label maps hold one value where the truth has two."""
    content = json.loads((finished / "config.json").read_text())
    own = {"labels": {"background": 0, "organ": 1, "lesion": 2}, "values": [0, 1, 2], "regions": {}}
    for name, joined in (("joined", [[3, 2]]), ("otherwise", [[3, 1]])):
        shutil.copytree(finished, tmp_path / name)
        recipe = content["dataset"]["recipe"] | {"joined": joined}
        write_json(
            tmp_path / name / "config.json", content | {"dataset": content["dataset"] | own | {"recipe": recipe}}
        )
        write_json(tmp_path / f"by-{name}" / "prediction.json", {"run": str(tmp_path / name)})
    declared = tmp_path / "data" / "dataset.json"
    labels = {"background": 0, "organ": 1, "solid": 2, "glass": 3}

    def content_of(labels: dict[str, int]) -> dict:
        return {"channel_names": {"0": "CT"}, "labels": labels, "file_ending": ".nii.gz", "numTraining": 1}

    write_json(declared, content_of(labels))
    truth, found = np.ones((6, 6, 6), np.uint8), np.ones((6, 6, 6), np.uint8)
    truth[2:4], truth[4:], found[2:] = 2, 3, 2
    save(declared.parent / "labelsTr" / "a.nii.gz", truth)
    save(declared.parent / "imagesTr" / "a_0000.nii.gz", truth)
    for name in ("by-joined", "by-otherwise", "by-hand"):
        save(tmp_path / name / "a.nii.gz", found)

    def said(*words: str) -> str:
        line = [declared.parent / "labelsTr", *(tmp_path / name for name in words if name.startswith("by-")), *words]
        assert run(evaluate.act, [str(word) for word in line if not str(word).startswith("by-")]) == 0
        return capsys.readouterr().out

    for names in (["by-joined"], ["by-joined", "by-hand"]):
        out = said(*names)
        assert out.startswith(f"classes as in {tmp_path / 'joined'}, which learned joined labels (lesion 2+3); ")
        assert out.count("a: Dice organ 1.0000, lesion 1.0000\n") == len(names) and "cannot tell" not in out
    told = f"Caution: {tmp_path / 'joined'} learned joined labels (--join-labels): it cannot tell solid and glass from"
    for out in (said("by-joined", "--dataset", str(declared)), said("by-joined", "by-otherwise")):
        assert "a: Dice organ 1.0000, solid 0.6667, glass 0.0000\n" in out and told in out and "classes as" not in out
    assert "classes as" not in said("by-hand")
    for names in (("lesion", "organ", "other"), ("a", "solid", "glass")):  # of another data set
        write_json(declared, content_of(dict(zip(("background", *names), range(4)))))
        out = said("by-joined")
        assert f"a: Dice {names[0]} 1.0000, {names[1]} 0.6667, {names[2]} 0.0000\n" in out
        assert "classes as" not in out and f"{tmp_path / 'joined'} learned joined labels" in out
    assert "cannot tell" not in said("by-joined", "--regions", "organ=1", "--regions", "lesion=2,3")


def test_scores_of_an_earlier_validation_are_not_called_the_last(finished: Path) -> None:
    record = read_record(finished)
    own, last = int(record.held_out[-1]["step"]), record.held_out[-1]
    for steps, which in ((8, "the last one"), (16, "the last validation whose case scores were kept")):
        rows = [{**last, "step": own - 8}, *({**last, "step": own + more} for more in range(0, steps, 8))]
        taken = replace(record.weights, step=own - 8)
        assert f"of step {own:,}, {which}: " in step_sentence(own, replace(record, held_out=rows, weights=taken))


def test_what_nobody_annotated_is_not_said_to_be_in_every_case(finished: Path, tmp_path: Path) -> None:
    """And a class that was never predicted is not said to overlap too little, whoever left it open elsewhere."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    said = reached_and_found(read_record(run), {})
    path = run / "validation" / "summary.json"
    summary = json.loads(path.read_text())
    for case in summary["metric_per_case"]:
        for row in case["metrics"].values():
            row["n_ref"], row["n_pred"] = math.nan, math.nan
    path.write_text(json.dumps(summary))
    assert not any("Every held-out case has every class" in line for line in reached_and_found(read_record(run), {}))
    assert said
    rows = [{"Dice": 0.0, "n_pred": 0, "n_ref": 5, "Sensitivity": 0.0}]
    rows += [{"Dice": math.nan, "n_pred": math.nan, "n_ref": math.nan}]
    assert what_is_low(0.0, rows, True, 2) == "nothing of this class was predicted"


def test_a_low_dice_of_other_weights_is_not_called_missed_where_the_truth_lacks_the_class() -> None:
    rows = [{"Dice": 0.0, "n_pred": 9, "n_ref": count} for count in (0, 0, 5)]
    absent = "no case has this class, and what is predicted of it counts as false"
    assert what_is_low(0.0, rows[:2], False, 2) == what_is_low(0.0, rows[:2], True, 2) == absent
    told = "in 2 of 3 cases the truth lacks this class: the Dice is 0 if any of it is predicted"
    assert what_is_low(0.0, rows, False, 3) == told and what_is_low(0.5, rows, False, 3) == ""
    assert what_is_low(0.0, rows[2:], False, 1) == what_is_low(0.0, [], False, 1) == "no voxel of the truth was found"
