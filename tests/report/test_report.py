"""A report is one well-formed page that loads nothing, says what the run says, and shows the slices that it claims."""

import json
import math
import re
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest

from seqpar.cli import evaluate, report
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.prediction.class_statistics import ClassStatistics
from seqpar.report import rendering
from seqpar.report.cautions import _found_in_none, reached_in_validation
from seqpar.report.record import RunRecord, read_record
from seqpar.report.run_page import main_settings
from seqpar.report.tables import Absent
from seqpar.settings.presets import debug
from tests.support.folders import save, write_json
from tests.support.report_page import NAMES, Page, unroll, written


def test_the_page_is_well_formed_and_loads_nothing(page: Page, finished: Path) -> None:
    assert page.scripts["code"] and page.attributes
    loading = {"src", "href", "xlink:href", "data", "poster", "action", "srcset"}
    used = [value for _, name, value in page.attributes if name in loading]
    assert used  # the slices
    assert all(value.startswith(("data:image/png;base64,", "#")) for value in used)  # markers of charts
    text = (finished / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\(|<link|fetch\(|XMLHttpRequest", text)


def test_names_from_files_are_escaped(page: Page, finished: Path) -> None:
    text = (finished / "report.html").read_text()
    assert "<b>" not in text
    assert NAMES[2] in page.text
    assert NAMES[2] in [case["name"] for case in json.loads(page.scripts["volumes"])["cases"]]


def test_json_in_the_page_ends_no_script_and_has_no_nan() -> None:
    template = rendering._environment(None).from_string("{{ value | nan_to_none | tojson }}")
    text = template.render(value={"name": "</script><!--", "values": [math.nan, math.inf, 0.5]})
    assert "<" not in text
    assert json.loads(text, parse_constant=pytest.fail) == {"name": "</script><!--", "values": [None, None, 0.5]}


def test_numbers_are_those_of_the_summary(page: Page, finished: Path) -> None:
    summary = json.loads((finished / "validation" / "summary.json").read_text())
    assert list(summary["classes"]) == ["NCR", "ED", "ET", "WT", "TC"]
    for name, key in summary["classes"].items():
        kinds = ("mean", "median", "global")
        wanted = [summary[kind][key]["Dice"] for kind in kinds]
        wanted += [summary[kind][key][metric] for metric in ("NSD", "HD95") for kind in kinds[:2]]
        assert page.cells["metrics", name] == [*wanted, 0, summary["num_values"][key]["Dice"]]
    for entry in summary["metric_per_case"]:
        case = Path(entry["prediction_file"]).name.removesuffix(".nii.gz")
        wanted = [entry["metrics"][key]["Dice"] for key in summary["classes"].values()]
        assert page.cells["per-case", case][:-1] == wanted


def test_worst_cases_come_first(page: Page, finished: Path) -> None:
    order = [page.cells["per-case", name][-1] for name in page.cases]
    assert len(order) == len(NAMES)
    assert order == sorted(order) and order[0] < order[-1] == 1.0
    assert "All 3 cases, the lowest mean Dice first." in page.text
    fewer = written(finished, "--cases", 2)
    assert fewer.cases == page.cases[:2]
    assert "The 2 of 3 cases with the lowest mean Dice, the lowest first." in fewer.text
    assert written(finished, "--cases", 0).cases == []
    written(finished)


def test_embedded_volumes_are_the_cases_slices(page: Page, finished: Path) -> None:
    volumes = json.loads(page.scripts["volumes"])
    numbers = {1: 1, 2: 2, 3: 3}
    assert [label["name"] for label in volumes["labels"]] == ["NCR", "ED", "ET"]
    for case in volumes["cases"]:
        assert case["factors"] == [1, 1, 1]
        files = {"truth": finished.parent / "data" / case["name"] / f"{case['name']}-seg.nii.gz"}
        files["prediction"] = finished / "validation" / f"{case['name']}.nii.gz"
        cache = json.loads((finished.parent / "cache" / "cases" / case["name"] / "case.json").read_text())
        box = tuple(slice(*bounds) for bounds in cache["properties"]["box"])
        for kind, path in files.items():
            whole = np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj).astype(np.uint8)
            shown = unroll(case[kind], case["shape"], case["columns"])
            assert set(np.unique(shown)) == {0, *numbers}
            assert np.array_equal(shown, whole[box]), kind
        image = np.load(finished.parent / "cache" / "cases" / case["name"] / "image.npy")
        for number, text in enumerate(case["images"]):
            grey = unroll(text, case["shape"], case["columns"]).astype(float)
            assert ((grey == 0) | (image[number] != 0)).all()
            inside = image[number] != 0
            assert np.corrcoef(grey[inside], image[number][inside])[0, 1] > 0.98
        assert len(case["images"]) == len(case["modalities"]) == 4


def test_slices_are_counted_in_the_file(page: Page, finished: Path) -> None:
    entry = json.loads(page.scripts["volumes"])["cases"][0]
    truth = unroll(entry["truth"], entry["shape"], entry["columns"])
    truth = truth == 1 + np.bincount(truth.ravel(), minlength=4)[1:].argmin()  # the rarest label
    fullest = [int(truth.sum(tuple({0, 1, 2} - {dim})).argmax()) + 1 for dim in range(3)]
    cache = json.loads((finished.parent / "cache" / "cases" / entry["name"] / "case.json").read_text())
    starts, sides = [first for first, _ in cache["properties"]["box"]], [26, 30, 22]
    assert min(starts) > 0, "it was cropped"
    path = finished.parent / "data" / entry["name"] / f"{entry['name']}-seg.nii.gz"
    letters = nibabel.aff2axcodes(nibabel.load(path).affine)
    for dim, (name, at) in enumerate(zip(("sagittal", "coronal", "axial"), fullest)):
        in_file = starts[dim] + at if letters[dim] in "RAS" else sides[dim] + 1 - starts[dim] - at
        assert f"{name} {in_file} / {sides[dim]}" in page.text and entry["slices"][dim][at - 1] == in_file
    assert entry["at"] == [at - 1 for at in fullest] and entry["counts"] == sides


def test_scores_on_cases_that_chose_the_weights_are_said_to_be_too_good(page: Page, copied: Path) -> None:
    assert "were chosen on these cases" not in page.text, "there was only one validation"
    path = copied / "metrics.jsonl"
    (row,) = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] == "val"]
    better = json.dumps(json.loads(row) | {"step": 1, "dice": {"NCR": 0.75, "ED": None}})
    path.write_text(f"{better}\n{path.read_text()}")
    text = written(copied).text
    assert "The weights that predict uses were chosen on these cases" in text
    last = f"All other scores, those of single cases included, are of step {debug().steps:,}, the last one: "
    assert f"{last}predict uses the weights of step 1, whose mean Dice was 0.750. The large numbers are" in text
    html = (copied / "report.html").read_text()
    (tile,) = re.findall(r'<div data-class="NCR">.*?</div>', html)
    own = f"step {debug().steps:,}: {page.cells['metrics', 'NCR'][0]:.3f} (too few to tell, n = 3)"
    assert "<dd>0.750</dd>" in tile and f"up to 2 cases, step 1; {own}" in tile, "what predict uses leads"
    assert f"Dice of every case, after step {debug().steps:,}, worst first" in html
    assert "0.750. Its weights are the best of 2 validations on them" in reached_in_validation(read_record(copied))[0]


def test_a_patients_page_says_what_was_predicted_where_the_truth_had_nothing() -> None:
    counts = ((1, 1), (1, 0), (3, 3), (3, 2), (3, 0))
    assert [_found_in_none("lesion", Absent(*both, 0), "held-out") for both in counts] == [
        "In the 1 held-out case without lesion, it predicted some.",
        "In the 1 held-out case without lesion, it predicted none.",
        "In the 3 held-out cases without lesion, it predicted some.",
        "In 2 of the 3 held-out cases without lesion, it predicted some.",
        "In none of the 3 held-out cases without lesion did it predict any.",
    ]


def test_scores_tell_the_step_that_they_are_of(page: Page, copied: Path) -> None:
    """A run that goes on keeps them until it ends again."""
    assert f"after step {debug().steps:,}" in page.text
    assert f"After step {debug().steps:,}, the only validation, whose weights predict uses." in page.text
    assert page.text.count(f"too few to tell, n = 3, step {debug().steps:,}") == 5, "each tile says it"
    (copied / "status.json").write_text(json.dumps({"state": "preempted", "step": debug().steps + 7, "why": "SIGTERM"}))
    page = written(copied)
    assert "Left early" in page.text and f"after step {debug().steps:,}" in page.text


def test_validation_leaves_what_evaluate_would_say(finished: Path, tmp_path: Path) -> None:
    truth = tmp_path / "truth"
    truth.mkdir()
    for path in (finished.parent / "data").glob("*/*-seg.nii.gz"):
        shutil.copy(path, truth / f"{path.parent.name}.nii.gz")
    target = tmp_path / "summary.json"
    line = [str(truth), str(finished / "validation"), "--json", str(target), "--csv", str(tmp_path / "x.csv")]
    regions = ("NCR=1", "ED=2", "ET=3", "WT=1,2,3", "TC=1,3")
    assert evaluate.act([*line, "--workers", "1", *(part for r in regions for part in ("--regions", r))]) == 0
    written, wanted = (json.loads(p.read_text()) for p in (finished / "validation" / "summary.json", target))
    for kind in ("mean", "median", "global", "num_values", "foreground_mean"):
        assert json.dumps(written[kind]) == json.dumps(wanted[kind])
    assert written["faults"] == []


def test_without_validation_the_journal_speaks(copied: Path) -> None:
    shutil.rmtree(copied / "validation")
    page = written(copied)
    assert page.cases == [] and "only a run that came to its end" in page.text
    assert page.cells["metrics", "NCR"] == [0.5, 0.5]
    assert all(map(math.isnan, page.cells["metrics", "ED"]))


def test_without_prepared_images_the_labels_are_shown(copied: Path, page: Page) -> None:
    content = json.loads((copied / "config.json").read_text())
    content["dataset"]["prepared"] = str(copied / "gone")
    (copied / "config.json").write_text(json.dumps(content))
    bare = written(copied)
    assert bare.cases == page.cases
    assert "prepared data are not where" in bare.text
    assert "cropped to the labels." in bare.text and "grey levels" not in bare.text
    assert "to the body. Images are stored in 64 grey levels, so values are rounded; the brightest half" in page.text
    case = json.loads(bare.scripts["volumes"])["cases"][0]
    assert case["images"] == [] and unroll(case["truth"], case["shape"], case["columns"]).max() == 3


def test_without_truth_files_the_cache_has_the_truth(copied: Path, page: Page) -> None:
    summary = (copied / "validation" / "summary.json").read_text()
    (copied / "validation" / "summary.json").write_text(summary.replace("-seg.nii.gz", "-lost.nii.gz"))
    assert json.loads(written(copied).scripts["volumes"]) == json.loads(page.scripts["volumes"])


def test_a_failed_run_says_why(copied: Path) -> None:
    for name in ("metrics.jsonl", "validation/summary.json"):
        (copied / name).unlink()
    failed = {"state": "failed", "step": -1, "why": "loss <nan>", "code": 5, "time": 0}
    (copied / "status.json").write_text(json.dumps(failed))
    page = written(copied)
    assert "Failed" in page.text and "loss <nan>" in page.text and "No step has been recorded" in page.text


def test_a_damaged_summary_is_a_gap(copied: Path) -> None:
    (copied / "validation" / "summary.json").write_text('{"mean": {}}')
    assert "cannot be used" in written(copied).text


def test_two_folders_are_reported_instead(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    truth, predictions, target = tmp_path / "truth", tmp_path / "found", tmp_path / "found" / "page.html"
    truth.mkdir()
    predictions.mkdir()
    (predictions / "dataset.json").write_text('{"channel_names": {"0": "T1"}}')  # nnU-Net's copy
    for name in NAMES[:2]:
        shutil.copy(finished.parent / "data" / name / f"{name}-seg.nii.gz", truth / f"{name}.nii.gz")
    shutil.copy(truth / "case-b.nii.gz", predictions / "case-b.nii.gz")
    line = [str(finished), "--truth", str(truth), "--prediction", str(predictions), "--out", str(target)]
    assert run(report.act, line) == 0, "a prediction of some cases is no fault"
    printed = capsys.readouterr()
    assert "\n1 case without a prediction: case-a\n" in printed.out and not printed.err
    page = Page(target.read_text())
    assert page.cases == ["case-b"] and page.cells["metrics", "WT"] == [1.0, 1.0, 0.0, 0, 1], (
        "mean, median and global are one"
    )
    assert (
        "median are over" not in page.text and "lowest Dice" not in page.text and "made for voxels of 1 mm" in page.text
    )
    assert "Read with care" in page.text and "1 case without a prediction: case-a" in page.text


def test_a_prediction_without_truth_is_shown_with_its_volumes_and_no_score(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    predictions, target = tmp_path / "found", tmp_path / "page.html"
    predictions.mkdir()
    case = finished.parent / "data" / "case-b"
    shutil.copy(case / "case-b-seg.nii.gz", predictions / "case-b.nii.gz")
    record = {"run": str(finished), "weights": {"r/step-7/w.safetensors": "0"}}
    (predictions / "prediction.json").write_text(json.dumps(record))
    line = [str(finished), "--prediction", str(predictions), "--out", str(target)]
    assert run(report.act, line) == 0
    page = Page(target.read_text())
    labels = np.asarray(nibabel.load(predictions / "case-b.nii.gz").dataobj)
    ml = float(np.prod(nibabel.load(predictions / "case-b.nii.gz").header.get_zooms())) / 1000
    assert page.cells["predicted-volumes", "case-b"][1] == pytest.approx((labels == 2).sum() * ml)
    assert page.cases == ["case-b"] and not [table for table, _ in page.cells if table in ("metrics", "per-case")]
    said = page.text
    assert "case-b, predicted by run" in said and "Finished" not in said and "Scores" not in said
    assert said.index("Volumes") < said.index("Cases") < said.index("Configuration") < said.index("Training")
    assert f"in folder {predictions}, without a truth to score them against. Predicted with r/step-7/w" in said
    assert "Dice" not in said[said.index("Cases") : said.index("Configuration")] and "lowest Dice" not in said
    assert "On its 2 held-out cases (too few to tell) this run reached a mean Dice of NCR 0." in said
    assert said.index("For research; not a medical device.") < said.index("On its 2 held-out")
    assert "Every validated case has every class, so it is unknown what would be predicted for a patient who" in said
    assert "A volume is that of all labels of its class: WT = NCR + ED + ET; TC = NCR + ET." in said
    assert "Predicted: NCR " in said and "P shows or hides the prediction" in said
    volumes = json.loads(page.scripts["volumes"])["cases"][0]
    assert not unroll(volumes["truth"], volumes["shape"], volumes["columns"]).any() and volumes["images"] == []
    shutil.copy(predictions / "case-b.nii.gz", predictions / "case-c.nii.gz")
    assert run(report.act, line) == 0 and "Predictions in folder found, by run" in Page(target.read_text()).text
    assert "2 of 2 cases, in the order of their names." in Page(target.read_text()).text
    assert run(report.act, [*line, "--cases", "1"]) == 0
    fewer = "1 of 2 cases, in the order of their names; the others are not on this page (--cases 2 shows all)."
    assert fewer in Page(target.read_text()).text and "in the order" not in said, "a single case needs no order"
    (predictions / "case-c.nii.gz").unlink()
    shutil.copytree(finished, renamed := tmp_path / "liver")
    (predictions / "prediction.json").write_text(json.dumps({**record, "run": str(renamed)}))
    assert run(report.act, [str(renamed), *line[1:]]) == 0 and "case-b, predicted by run liver" in target.read_text()
    assert run(report.act, [str(renamed), "--out", str(target)]) == 0 and "<h1>Run liver</h1>" in target.read_text()
    assert "name their folder with --images" in said, "the run's own case of this name may be another"
    for channel, kind in enumerate(("t1c", "t1n", "t2f", "t2w")):
        (tmp_path / "images").mkdir(exist_ok=True)
        shutil.copy(case / f"case-b-{kind}.nii.gz", tmp_path / "images" / f"case-b_{channel:04d}.nii.gz")
    assert run(report.act, [*line, "--images", str(tmp_path / "images")]) == 0
    assert json.loads(Page(target.read_text()).scripts["volumes"])["cases"][0]["images"]
    runs = [{"run": f"/runs/{name}", "weights": {}} for name in ("first", "second")]
    (predictions / "prediction.json").write_text(json.dumps({"runs": runs}))
    assert run(report.act, line) == 0 and "reached a mean Dice" not in (said := Page(target.read_text()).text)
    assert "case-b, predicted by the mean of first and second" in said and "; no score of this mean exists. " in said
    (predictions / "case-b.nii.gz").unlink()
    assert run(report.act, line) == DATA and "holds no label map" in capsys.readouterr().err


def test_common_leaves_out_what_only_one_folder_has(finished: Path, tmp_path: Path, capsys) -> None:
    truth, predictions, target = tmp_path / "truth", tmp_path / "found", tmp_path / "page.html"
    for folder, names in ((truth, NAMES[:2]), (predictions, ["case-b", "more"])):
        folder.mkdir()
        for name in names:
            of = finished.parent / "data" / "case-b" / "case-b-seg.nii.gz"
            shutil.copy(of, folder / f"{name}.nii.gz")
    line = [str(finished), "--truth", str(truth), "--prediction", str(predictions), "--out", str(target)]
    assert run(report.act, line) == DATA and "more.nii.gz: has no truth" in capsys.readouterr().err
    assert run(report.act, [*line, "--common"]) == 0
    assert "without a prediction" not in Page(target.read_text()).text
    assert run(report.act, [str(finished), "--common"]) == USAGE
    assert "--common would do nothing without --truth and --prediction" in capsys.readouterr().err


def test_a_page_of_phantoms_says_so_above_its_scores(finished: Path, page: Page, tmp_path: Path) -> None:
    assert "generated" not in page.text
    mark = finished.parent / "data" / "phantom.json"
    case = finished.parent / "data" / "case-b"
    (tmp_path / "found").mkdir()
    shutil.copy(case / "case-b-seg.nii.gz", tmp_path / "found" / "case-b.nii.gz")
    try:
        mark.write_text("{}")
        said = written(finished).text
        alone = written(finished, "--prediction", tmp_path / "found", "--out", finished / "report.html").text
        (tmp_path / "found" / "prediction.json").write_text('{"generated": true}')
        of_phantoms = written(finished, "--prediction", tmp_path / "found", "--out", finished / "report.html").text
    finally:
        mark.unlink()
        written(finished)
    assert "Generated phantoms, not patients: these volumes and scores" in of_phantoms
    assert "Cases (generated, not patients)" in said and "(generated phantoms, in the layout of files): " in said
    above = said.index("Generated phantoms, not patients: these scores say nothing about real images.")
    assert above < said.index("n = 3"), "above the first score"
    told = "The network was trained on generated phantoms, not on patients: do not trust what it finds in real images."
    assert alone.index(told) < alone.index("reached a mean Dice") and "(generated, not patients)" not in alone
    content = json.loads((finished / "config.json").read_text())
    content["dataset"] |= {"generated": True, "layout": "BraTS (2023)"}
    main = main_settings(RunRecord(finished, content, None, {}))
    assert "(generated phantoms, in the layout of BraTS 2023)" in main["data"], "their folder has moved"
    assert "blocks × " in main["network"], "sizes have one sign"
    assert not re.search(r"\d ?x ?\d", " ".join(main.values()))
    content["config"] |= {"network": "nnunet-plain", "curriculum": "8x8x8:1,16:2"}
    tile = main_settings(RunRecord(finished, content, None, {}))["tile"]
    assert re.search(r"voxels in the last of 2 lessons, .* of \d+ × \d+ × \d+ voxels", tile), tile


def test_means_and_deviations_that_predict_wrote_are_on_the_page(finished: Path, tmp_path: Path) -> None:
    found = tmp_path / "found"
    found.mkdir()
    shutil.copy(finished.parent / "data" / "case-b" / "case-b-seg.nii.gz", found / "case-b.nii.gz")
    labels = np.asarray(nibabel.load(found / "case-b.nii.gz").dataobj).astype(int)
    image = np.random.default_rng(0).normal(100, 20, (1, *labels.shape))
    line = (finished, "--prediction", found, "--out", finished / "report.html")
    statistics = ClassStatistics(found, {"NCR": (1,), "ED": (2,), "ET": (3,)}, ("T1",))
    statistics.open()
    statistics.add(
        "case-b", labels, image, float(np.prod(nibabel.load(found / "case-b.nii.gz").header.get_zooms())) / 1000
    )
    page = written(*line)
    rows = page.cells["intensities", "case-b"]
    assert rows == pytest.approx([image[0][labels == n].mean() for n in (1, 2, 3)], rel=1e-5)
    assert all(f" ± {image[0][labels == n].std():.0f}" in page.text for n in (1, 2, 3))
    assert "in the image file's own numbers (CT: HU)" in page.text and "standard deviation" in page.text
    table = found / "statistics.csv"
    table.write_text(re.sub(r"(?m)^(case-b,NCR,\d+),[^,]*", r"\1,7", table.read_text()))
    page = written(*line)
    assert len(page.cells["intensities", "case-b"]) == 2
    assert "is of other label maps than these: NCR of case-b cannot be shown." in page.text
    table.write_text("case,class\n")
    page = written(*line)
    assert "intensities" not in dict(page.cells) and "is no table that predict --statistics wrote" in page.text
    table.unlink()
    assert "statistics" not in written(*line).text.partition("Configuration")[0]
    written(finished)


def test_a_data_set_is_reported_against_instead(finished: Path, tmp_path: Path) -> None:
    data, predictions = finished.parent / "data", tmp_path / "found"
    predictions.mkdir()
    entries = []
    for name in NAMES[:2]:
        image, label = (str(data / name / f"{name}-{kind}.nii.gz") for kind in ("t1c", "seg"))
        entries.append({"image": image, "label": label})
        shutil.copy(label, predictions / f"{name}-t1c.nii.gz")
    content = {"labels": {"0": "background", "1": "NCR", "2": "ED", "3": "ET"}, "training": entries}
    (tmp_path / "list.json").write_text(json.dumps(content))
    line = [
        "--truth",
        str(tmp_path / "list.json"),
        "--prediction",
        str(predictions),
        "--out",
        str(tmp_path / "page.html"),
    ]
    assert run(report.act, [str(finished), *line]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert page.cases == ["case-a-t1c", "case-b-t1c"] and page.cells["metrics", "WT"][:3] == [1.0, 1.0, 1.0]


def test_what_cannot_be_reported_on_is_one_clear_line(finished: Path, tmp_path: Path, capsys) -> None:
    assert run(report.act, [str(tmp_path)]) == USAGE
    assert run(report.act, [str(finished), "--truth", str(tmp_path)]) == USAGE
    assert run(report.act, [str(finished), "--cases", "-1"]) == USAGE
    (tmp_path / "config.json").write_text('{"config": {}}')
    assert run(report.act, [str(tmp_path)]) == DATA
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("error: ") for line in lines)
    assert not (tmp_path / "report.html").exists()


def test_the_entropy_is_shown_next_to_the_prediction_and_calibration_below_the_scores(finished, tmp_path) -> None:
    predictions, target, most = tmp_path / "found", tmp_path / "page.html", 3 * math.log(2)
    source = finished.parent / "data" / "case-b" / "case-b-seg.nii.gz"
    image = nibabel.load(source)
    truth, entropy = np.asarray(image.dataobj), np.random.default_rng(0).uniform(0, most, image.shape)
    save(predictions / "case-b.nii.gz", truth, image.affine)
    save(predictions / "uncertainty" / "case-b_entropy.nii.gz", entropy.astype(np.float32), image.affine)
    save(tmp_path / "truth" / "case-b.nii.gz", truth, image.affine)
    for channel, kind in enumerate(("t1c", "t1n", "t2f", "t2w")):
        (tmp_path / "images").mkdir(exist_ok=True)
        shutil.copy(source.with_name(f"case-b-{kind}.nii.gz"), tmp_path / "images" / f"case-b_{channel:04d}.nii.gz")
    line = [str(finished), "--truth", str(tmp_path / "truth"), "--prediction", str(predictions)]
    line += ["--images", str(tmp_path / "images"), "--out", str(target)]

    def written_page(**record: object) -> Page:
        write_json(predictions / "prediction.json", {"run": "r", "weights": {}, **record})
        assert run(report.act, line) == 0
        return Page(target.read_text())

    page = written_page()
    assert json.loads(page.scripts["volumes"])["cases"][0]["heat"] == "", "left by an earlier prediction"
    assert all(word not in page.text for word in ("nats", "Calibration", "no finding"))
    inside = np.stack([np.isin(truth, own) for own in ((1, 2, 3), (1, 3), (3,))])
    declared = {"labels": {"background": 0, "WT": [1, 2, 3], "TC": [1, 3], "ET": [3]}, "regions_class_order": [2, 1, 3]}
    for name, content in (("dataset", declared | {"channel_names": {"0": "T1"}}), ("plans", {})):
        write_json(predictions / "npz" / f"{name}.json", content)
    shares = np.where(inside, 0.75, 0.15).astype(np.float32).transpose(0, 3, 2, 1)
    np.savez_compressed(predictions / "npz" / "case-b.npz", probabilities=shares)
    page = written_page(uncertainty=True)
    (case,) = json.loads(page.scripts["volumes"])["cases"]
    cache = json.loads((finished.parent / "cache" / "cases" / "case-b" / "case.json").read_text())
    box = tuple(slice(*bounds) for bounds in cache["properties"]["box"])
    canonical = nibabel.as_closest_canonical(nibabel.load(predictions / "uncertainty" / "case-b_entropy.nii.gz"))
    shown = unroll(case["heat"], case["shape"], case["columns"]) / 255 * case["most_nats"]
    assert case["heat_name"] == "entropy" and case["most_nats"] == pytest.approx(most)
    assert np.abs(shown - np.asarray(canonical.dataobj)[box]).max() < most / 60, "greys of a page are 64"
    assert page.text.count("2.08 nats") == 2 and "2.08 nats (each region has a probability of 0.5)" in page.text
    assert "A bright spot is no finding" in page.text and "Voxels of a case are alike" in page.text
    labels = [value for _, name, value in page.attributes if name == "aria-label"]
    assert all(f"entropy of case-b, {plane} slice" in " ".join(labels) for plane in ("sagittal", "coronal", "axial"))
    assert "Calibration of the voxels of 1 case" in page.text and "overconfident" in page.text
    assert "No output of the network stands for NCR, ED." in page.text
    assert re.search(r"WT: ECE \(from 0\.1\) 0\.\d{3}", page.text)
    kinds = [value for tag, name, value in page.attributes if (tag, name) == ("path", "class")]
    assert "between" in kinds and kinds[kinds.index("between") + 1] == "prediction", "seen over a map of its own colour"
    assert "disagreement" not in page.text.lower()
    shares = entropy[::-1].astype(np.float32) / 4
    save(predictions / "uncertainty" / "case-b_disagreement.nii.gz", shares, image.affine)
    page = written_page(uncertainty=True, runs=[{"weights": {}}] * 3)
    assert "disagreement of the averaged networks, with the prediction's outlines: 0" in page.text
    assert "comes from networks contradicting each other" in page.text
    assert page.text.count("2.08 nats") == 2 and "1.91 nats (the most that 3 networks can have)" in page.text
    labels = [value for _, name, value in page.attributes if name == "aria-label"]
    assert sum("disagreement of case-b" in label for label in labels) == 3
