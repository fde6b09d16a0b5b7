"""On every plane, in reports and in pictures, it can be seen which side is the patient's left; sizes of voxels."""

import base64
import json
import re
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import nibabel
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from seqpar.cli import evaluate, report
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.data.geometry import make_geometry, to_canonical
from seqpar.report.cases import _case_view, viewer_section
from seqpar.report.cautions import of_open_sides
from seqpar.report.embedded_volumes import ShownCase, planes_of
from seqpar.report.images import other_voxels, spacings_of
from seqpar.report.pictures import PicturedCase, _tint, figure_of_cases
from seqpar.report.planes import (
    COLOURS,
    COUNTED,
    DOUBTED,
    NEAREST,
    PLANES,
    TINT,
    counted,
    fullest_planes,
    orientation_text,
    plane_of,
    sides,
    slices_of,
    tilt_of,
)
from seqpar.report.record import RunRecord, ScoredCase, read_record
from seqpar.weights.weight_files import digest
from tests.support.report_page import NAMES, Page, decode, own_slices, unroll, written

ENDS = {"R": (0, -1), "L": (0, 0), "A": (1, -1), "P": (1, 0), "S": (2, -1), "I": (2, 0)}  # dim, and which end of it
WANTED = {False: ["APSI", "RLSI", "RLAP"], True: ["PASI", "LRSI", "LRAP"]}


def nearest_side(picture: np.ndarray) -> int:
    """Returns the side of a picture where all that is bright lies: 0 left, 1 right, 2 top, 3 bottom."""
    lines = picture[:, 0], picture[:, -1], picture[0], picture[-1]
    (side,) = [number for number, line in enumerate(lines) if line.all()]
    return side


@pytest.mark.parametrize("neurological", [False, True])
def test_each_letter_stands_where_the_patients_side_is(neurological: bool) -> None:
    for (_, dim), letters in zip(PLANES, sides(neurological)):
        assert sorted(letters) == sorted(letter for letter, (across, _) in ENDS.items() if across != dim)
        for number, letter in enumerate(letters):
            volume, (across, end) = np.zeros((4, 5, 6)), ENDS[letter]
            np.moveaxis(volume, across, 0)[end] = 1
            assert nearest_side(plane_of(volume, dim, 2, neurological)) == number
    assert f"left is on the {'left' if neurological else 'right'} of" in orientation_text(neurological)
    assert sides(neurological)[2].index("L") == (0 if neurological else 1)


@pytest.mark.parametrize("neurological", [False, True])
def test_a_runs_picture_shows_letters_and_convention(neurological: bool) -> None:
    image, label = np.ones((8, 10, 12)), np.zeros((8, 10, 12), int)
    image[:3], label[1:3, 4:6, 4:6] = 9, 1  # bright in the patient's left
    case = PicturedCase("a", image, label, np.roll(label, 1, 0), (1.0, 1.0, 3.0), own_slices(label.shape))
    figure = figure_of_cases([case], ["tumour"], 1, neurological, Path())
    assert figure.get_suptitle().endswith(
        f"\n1 held-out case, in planes with most of the truth\n{orientation_text(neurological)}.\n{COUNTED}."
    )
    for panel, letters, (plane, dim) in zip(figure.axes, WANTED[neurological], PLANES):
        assert [text.get_text() for text in panel.texts] == [*letters, "2 mm"]
        at = fullest_planes(label)[dim]
        assert panel.get_title().split("\n")[-1] == f"{plane} {at + 1} / {label.shape[dim]}"
        shown = np.asarray(panel.images[0].get_array())
        assert panel.yaxis_inverted() and shown.shape == tuple(np.delete(label.shape, dim)[::-1])
        if dim:
            bright = np.flatnonzero(shown.mean(0) > 5)
            assert bright.tolist() == ([0, 1, 2] if neurological else [5, 6, 7])


@pytest.mark.parametrize("neurological", [False, True])
def test_a_report_shows_letters_and_convention(finished: Path, tmp_path: Path, neurological: bool) -> None:
    target = tmp_path / "page.html"
    flags = ["--neurological"] if neurological else []
    assert run(report.act, [str(finished), "--out", str(target), "--cases", "2", *flags]) == 0
    text = target.read_text()
    groups = re.findall(r'<g class="sides"[^>]*>(.*?)</g>', text)
    assert [re.sub("<.*?>", "", group) for group in groups] == WANTED[neurological] * 2
    page = Page(text)
    assert orientation_text(neurological) in page.text and "A front (anterior)" in page.text
    assert f"{COUNTED}." in page.text
    volumes = json.loads(page.scripts["volumes"])
    assert (volumes["sides"], volumes["mirrored"]) == (WANTED[neurological], not neurological)
    entry = volumes["cases"][0]
    truth = unroll(entry["truth"], entry["shape"], entry["columns"])
    at = fullest_planes(truth == 1 + np.bincount(truth.ravel())[1:].argmin())
    sheet = entry["images"][entry["modalities"].index(entry["favourite"])]
    volume = unroll(sheet, entry["shape"], entry["columns"])
    pictures = re.findall(r'<image [^>]*href="data:image/png;base64,([^"]+)"', text)[:3]
    for picture, (_, dim) in zip(pictures, PLANES):
        seen, wanted = decode(base64.b64decode(picture)), plane_of(volume, dim, at[dim], neurological)
        assert seen.shape == wanted.shape and np.abs(seen.astype(int) - wanted).max() <= 3  # the sheet has 64 levels
        assert np.abs(seen.astype(int) - wanted[:, ::-1]).max() > 30


def test_a_report_follows_its_run_unless_told_otherwise(copied: Path) -> None:
    content = json.loads((copied / "config.json").read_text())
    content["config"]["neurological"] = True
    (copied / "config.json").write_text(json.dumps(content))
    assert orientation_text(True) in written(copied).text
    assert orientation_text(False) in written(copied, "--no-neurological").text


@pytest.fixture
def test_set(finished: Path, tmp_path: Path) -> dict[str, Path]:
    """Two cases that the run has never seen, as nnU-Net names them; the network wants four modalities."""
    places = {kind: tmp_path / kind for kind in ("images", "labels", "found")}
    for folder in places.values():
        folder.mkdir()
    for number, name in enumerate(NAMES[:2]):
        data = finished.parent / "data" / name
        for channel, kind in enumerate(("t1c", "t1n", "t2f", "t2w")):
            shutil.copy(data / f"{name}-{kind}.nii.gz", places["images"] / f"new{number}_{channel:04d}.nii.gz")
        for kind in ("labels", "found"):
            shutil.copy(data / f"{name}-seg.nii.gz", places[kind] / f"new{number}.nii.gz")
    return places


def report_on(run_folder: Path, places: dict[str, Path], *more: object) -> tuple[int, Page]:
    target = places["found"].parent / "page.html"
    target.unlink(missing_ok=True)
    line = [str(run_folder), "--truth", str(places["labels"]), "--prediction", str(places["found"])]
    code = run(report.act, [*line, "--out", str(target), *map(str, more)])
    return code, Page(target.read_text() if target.exists() else "")


def test_a_test_set_is_shown_with_its_images(finished: Path, test_set: dict[str, Path], page: Page) -> None:
    code, bare = report_on(finished, test_set)
    assert code == 0 and bare.cases == ["new0", "new1"]
    assert bare.text.count("The images of this case are not known: name their folder with --images") == 2
    assert "any more" not in bare.text and json.loads(bare.scripts["volumes"])["cases"][0]["images"] == []
    code, shown = report_on(finished, test_set, "--images", test_set["images"])
    assert code == 0 and shown.cases == ["new0", "new1"] and "not known" not in shown.text
    own = {case["name"]: case for case in json.loads(page.scripts["volumes"])["cases"]}
    for number, case in enumerate(json.loads(shown.scripts["volumes"])["cases"]):
        names = "images", "truth", "shape", "spacing", "modalities", "favourite"
        assert {name: case[name] for name in names} == {name: own[NAMES[number]][name] for name in names}


def test_a_prediction_by_another_run_is_not_called_this_ones(
    finished: Path, test_set: dict[str, Path], tmp_path: Path
) -> None:
    other, record = shutil.copytree(finished, tmp_path / "elsewhere"), test_set["found"] / "prediction.json"
    record.write_text(json.dumps({"run": str(other), "weights": {}}))
    text = report_on(finished, test_set)[1].text
    assert "found, by elsewhere" in text and "This prediction was made by elsewhere, not by run." in text
    gone = {"run": "/gone/run", "weights": {"/gone/run/config.json": digest(finished / "config.json")}}
    record.write_text(json.dumps(gone))
    text = report_on(finished, test_set)[1].text
    assert "found, by run" in text and "This prediction was made by" not in text, "it has moved"
    unknown = "which predicted these cases, is no longer there: whether they were in its training data is not known."
    assert unknown not in text
    record.write_text(json.dumps({"run": "/gone/other", "weights": {}}))
    text = report_on(finished, test_set)[1].text
    assert "This prediction was made by other, not by run." in text and f"/gone/other, {unknown}" in text


def test_labels_where_the_image_is_0_are_said_to_be_left_out(finished: Path, test_set: dict[str, Path]) -> None:
    file = test_set["found"] / "new0.nii.gz"
    image = nibabel.load(file)
    labels = np.asarray(image.dataobj).copy()
    assert (
        not labels[:2, :2, :2].any()
        and not np.asarray(nibabel.load(next(test_set["images"].iterdir())).dataobj)[0].any()
    )
    labels[:2, :2, :2] = 1
    nibabel.save(nibabel.Nifti1Image(labels, image.affine, image.header), file)
    volume = 8 * float(np.prod(image.header.get_zooms()[:3])) / 1000
    code, shown = report_on(finished, test_set, "--images", test_set["images"])
    note = f"Not shown, since the image is 0 there: {volume:.3g} ml of the prediction."
    assert code == 0 and shown.text.count("Not shown, since the image is 0 there") == 1 and note in shown.text


def test_images_of_the_run_are_shown_only_where_they_were_predicted(finished: Path, tmp_path: Path) -> None:
    data, found = finished.parent / "data", tmp_path / "found"
    truth, line = tmp_path / "truth", ["--truth", str(tmp_path / "truth"), "--prediction", str(found)]
    stamps = dict[str, list[list[object]]]()
    for folder in (truth, found):
        folder.mkdir()
        for name in NAMES[:2]:
            shutil.copy(data / name / f"{name}-seg.nii.gz", folder / f"{name}.nii.gz")
    for name in NAMES[:2]:
        files = [data / name / f"{name}-{kind}.nii.gz" for kind in ("t1c", "t1n", "t2f", "t2w")]
        stamps[name] = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]

    def shown(**inputs: object) -> list[int]:
        if inputs:
            (found / "prediction.json").write_text(json.dumps({"files": [], **inputs}))
        assert run(report.act, [str(finished), *line, "--out", str(tmp_path / "page.html")]) == 0
        made = Page((tmp_path / "page.html").read_text())
        numbers = [len(case["images"]) for case in json.loads(made.scripts["volumes"])["cases"]]
        assert made.text.count("The images of this case are not known") == numbers.count(0)
        return numbers

    assert shown() == [0, 0], "nothing tells that these are not other patients with the same names"
    assert shown(inputs=stamps) == [4, 4]
    other = {**stamps, NAMES[1]: [[name, size + 1, time] for name, size, time in stamps[NAMES[1]]]}
    assert shown(inputs=other) == [4, 0]
    assert shown(inputs={}) == [0, 0] and shown(inputs=dict.fromkeys(NAMES[:2], [])) == [0, 0]
    line = line[2:]
    assert shown(inputs=other) == [4, 0], "without a truth just so"


def test_a_folder_of_labels_has_the_images_beside_it(finished: Path, test_set: dict[str, Path]) -> None:
    root = test_set["labels"].parent / "Dataset009_Balls"
    for kind, name in (("images", "imagesTs"), ("labels", "labelsTs")):
        shutil.copytree(test_set[kind], root / name)
    assert len(list((root / "imagesTs").iterdir())) == 8
    places = {**test_set, "labels": root / "labelsTs"}
    assert json.loads(report_on(finished, places)[1].scripts["volumes"])["cases"][0]["images"] == []
    (root / "dataset.json").write_text("{}")
    code, shown = report_on(finished, places)
    assert code == 0 and [len(case["images"]) for case in json.loads(shown.scripts["volumes"])["cases"]] == [4, 4]


def test_an_image_that_is_missing_or_elsewhere_is_said(finished: Path, test_set: dict[str, Path], capsys) -> None:
    (test_set["images"] / "new1_0002.nii.gz").unlink()
    code, some = report_on(finished, test_set, "--images", test_set["images"])
    assert code == 0 and "new1_0002.nii.gz: is missing" in some.text
    assert f"{test_set['images']} holds no image of new1; only the labels are shown" in some.text
    assert [len(case["images"]) for case in json.loads(some.scripts["volumes"])["cases"]] == [4, 0]
    empty = test_set["images"].parent / "empty"
    empty.mkdir()
    assert report_on(finished, test_set, "--images", empty)[0] == DATA
    assert report_on(finished, test_set, "--images", empty, "--cases", 0)[0] == USAGE
    first, second = capsys.readouterr().err.splitlines()
    assert "has no cases" in first and "--images would do nothing" in second


@pytest.mark.parametrize("orientation", ["RAS", "LPS", "SAL", "LPI", "PIR"])
def test_slices_have_the_numbers_that_the_file_gives_them(orientation: str) -> None:
    """Each voxel of the file holds the number of its own slice; crop and turn take it to the page."""
    ends, shape = {"R": 0, "L": 0, "A": 1, "P": 1, "S": 2, "I": 2}, (8, 10, 12)
    affine = np.zeros((4, 4))
    for axis, letter in enumerate(orientation):
        affine[ends[letter], axis] = 1 if letter in "RAS" else -1
    affine[3, 3] = 1
    affine[:3, :3] = Rotation.from_euler("xyz", (9, -6, 14), degrees=True).as_matrix() @ affine[:3, :3]  # oblique
    geometry, box = make_geometry(shape, affine), ((1, 7), (2, 8), (2, 8))
    for dim, slices in enumerate(slices_of(geometry, box, (6, 6, 6))):
        axis = next(n for n, letter in enumerate(orientation) if ends[letter] == dim)
        file = np.indices(shape)[axis] + 1
        turned = to_canonical(file, orientation)[tuple(slice(*side) for side in box)]
        assert list(slices.numbers) == np.moveaxis(turned, dim, 0)[:, 0, 0].tolist()
        assert slices.total == shape[axis] and slices.text(0) == f"{slices.numbers[0]} / {shape[axis]}"
    coarse = slices_of(geometry, box, (3, 3, 3))[1], slices_of(geometry, box, (6, 6, 6))[1]
    assert list(coarse[0].numbers) == coarse[1].coarsened(2) and len(coarse[1].coarsened(4)) == 2


@pytest.mark.parametrize("angle", [0.0, 4.0, 14.0, -30.0])
def test_the_tilt_of_an_oblique_image_is_said_from_five_degrees_on(angle: float) -> None:
    affine = np.diag((-1.0, 1.0, 3.0, 1.0))  # as LAS, of thick slices
    affine[:3, :3] = Rotation.from_euler("x", angle, degrees=True).as_matrix() @ affine[:3, :3]
    slices, label = slices_of(make_geometry((6, 6, 6), affine), ((0, 6),) * 3, (6, 6, 6)), np.zeros((6, 6, 6), np.uint8)
    label[2:4, 2:4, 2:4] = 1
    shown = ShownCase("a", {}, label, label, (1.0, 1.0, 3.0), slices)
    case = ScoredCase("a", Path("t"), Path("p"), {"lesion": {"Dice": 1.0}})
    caption, above = _case_view(case, shown, ["lesion"], {}, False).caption, counted([slices])
    picture = PicturedCase("a", 1.0 * label, label, label, (1.0, 1.0, 3.0), slices)
    title = figure_of_cases([picture], ["lesion"], 1, False, Path()).get_suptitle().replace("\n", " ")
    if abs(angle) < 5:
        assert "tilted" not in f"{caption}{above}{title}"
    else:
        assert caption.endswith(f" mm · planes tilted by {abs(angle):.0f}°")
        told = f". Oblique images: planes are tilted by up to {abs(angle):.0f}°; letters name the nearest sides"
        assert above.endswith(told) and f"{above}." in title


def test_slices_of_a_tilted_gantry_are_called_askew() -> None:
    affine = np.diag((1.0, 1.0, 3.0, 1.0)) + 3 * np.tan(np.radians(20)) * np.eye(4)[[3, 2, 3, 3]] * [0, 0, 1, 0]
    slices = slices_of(make_geometry((6,) * 3, affine), ((0, 6),) * 3, (6,) * 3)
    assert tilt_of(slices) == "planes tilted by 20°, slices askew by 20°"
    assert "slices are askew by up to 20°, but are drawn straight" in counted([slices])


def test_sides_that_a_file_leaves_open_have_no_letters() -> None:
    geometry, label = make_geometry((6, 6, 6), np.eye(4)), np.zeros((6, 6, 6), np.uint8)
    label[2:4, 2:4, 2:4] = 1
    slices = slices_of(replace(geometry, qform_code=0, sform_code=0), ((0, 6),) * 3, (6, 6, 6))
    shown, known = (ShownCase("a", {}, label, label, (1.0,) * 3, own) for own in (slices, own_slices(label.shape)))
    for neurological in (False, True):
        for case, letters in ((shown, ["????"] * 3), (known, WANTED[neurological])):
            drawn = planes_of(case, neurological)
            assert ["".join(letter for *_, letter in plane.sides) for plane in drawn] == letters
    section = viewer_section([(case, case.embedded(10**6)) for case in (shown, known)], ["lesion"], False)
    picture = PicturedCase("a", 1.0 * label, label, label, (1.0,) * 3, slices)
    figure = figure_of_cases([picture], ["lesion"], 1, False, Path())
    assert [text.get_text() for text in figure.axes[0].texts[:4]] == ["?"] * 4
    assert DOUBTED in figure.get_suptitle().replace("\n", " ") and DOUBTED in section.orientation
    (told,) = of_open_sides(section.volumes)
    why = "does not say how the patient lies: its qform_code and sform_code are both 0. Pictures mark its sides with ?:"
    assert told.startswith(f"The file of a {why}")
    (told,) = of_open_sides({"cases": section.volumes["cases"][:1] * 2})
    assert told.startswith(f"In 2 cases (a, a) the file {why}")


def test_a_page_names_cases_whose_files_leave_open_how_the_patient_lies(
    finished: Path, test_set: dict[str, Path]
) -> None:
    for kind in ("labels", "found"):
        image = nibabel.load(test_set[kind] / "new0.nii.gz")
        header = image.header.copy()
        header["qform_code"] = header["sform_code"] = 0
        nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), None, header), test_set[kind] / "new0.nii.gz")
    code, page = report_on(finished, test_set)
    assert code == 0 and "The file of new0 does not say how the patient lies" in page.text
    cases = json.loads(page.scripts["volumes"])["cases"]
    assert {case["name"]: bool(case["open_sides"]) for case in cases} == {"new0": True, "new1": False}


def test_slices_are_said_to_be_the_nearest_ones_only_where_voxels_were_resampled() -> None:
    geometry, box = make_geometry((8, 10, 12), np.eye(4)), ((1, 7), (2, 8), (2, 8))
    same, finer = (slices_of(geometry, box, (6, 6, side)) for side in (6, 12))
    assert counted([same, same]) == COUNTED and counted([same, finer]) == f"{COUNTED}{NEAREST}"
    label = np.zeros((6, 6, 12), np.uint8)
    label[2:4, 2:4, 4:8] = 1
    case = PicturedCase("a", np.ones(label.shape), label, label, (1.0, 1.0, 0.5), finer)
    title = figure_of_cases([case], ["lesion"], 1, False, Path()).get_suptitle().replace("\n", " ")
    assert title.endswith(f" {COUNTED}{NEAREST}.") and "not DICOM instance numbers" in title
    several = figure_of_cases([replace(case, truth=0 * label, modality="FLAIR")], ["lesion"], 5, False, Path())
    told = "The first 1 of 5 held-out cases, shown on FLAIR, in planes with most of the truth, or of the prediction"
    assert told in several.get_suptitle()
    shown = ShownCase("a", {"CT": label}, label, label, (1.0, 1.0, 0.5), finer)
    assert f"{COUNTED}{NEAREST}" in viewer_section([(shown, shown.embedded(10**6))], ["lesion"], False).orientation


def test_voxels_of_another_size_or_shape_than_in_training_are_named_unless_they_are_resampled(finished: Path) -> None:
    record = read_record(finished)
    sides = (1.1, 1.0, 1.3)

    def told(*times: float, record: RunRecord = record) -> str:
        return other_voxels(record, {"near": sides, "far": tuple(side * t for side, t in zip(sides, times))})

    assert [told(*[t] * 3) for t in (0.85, 1, 1.2)] == ["", "", ""] and other_voxels(record, {}) == ""
    for times in ((0.7, 0.7, 0.7), (2, 2, 2), (0.5, 0.5, 4)):  # the last have the volume of the run's own
        shape = " × ".join(f"{side * t:.3g}" for side, t in zip(sides, times))
        own = " × ".join(f"{side:.3g}" for side in sides)
        assert told(*times) == (
            "1 of 2 cases has voxels of another size or shape than the run's own cases: "
            f"far of {shape} mm, the run's of {own} mm. This run does not resample, so the network sees structures at "
            "another scale than in training, and may miss or invent them."
        )
    recipe = {**record.dataset["recipe"], "spacing": [1.0, 1.0, 1.0]}
    for other in ({"recipe": recipe}, {"prepared": "gone"}):
        content = {**record.content, "dataset": {**record.dataset, **other}}
        assert bool(told(2, 2, 2, record=replace(record, content=content))) == ("prepared" in other), (
            "or its validation"
        )
    files = {name: finished / "validation" / f"{name}.nii.gz" for name in (NAMES[0], "missing")}
    assert spacings_of(files) == {NAMES[0]: pytest.approx(sides)}


FILES = {"image": "t1c", "label": "seg"}


def test_scores_of_label_maps_are_of_new_cases_next_to_those_that_were_seen(
    finished: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, data = json.loads((copied / "config.json").read_text()), finished.parent / "data"
    truth, found, names = tmp_path / "truth", tmp_path / "found", [f"{name}-t1c" for name in NAMES]
    truth.mkdir(), found.mkdir()
    for own, name in zip(NAMES, names):
        shutil.copy(data / own / f"{own}-seg.nii.gz", truth / f"{name}.nii.gz")
        shutil.copy(copied / "validation" / f"{own}.nii.gz", found / f"{name}.nii.gz")
    entries = [{kind: str(data / n / f"{n}-{end}.nii.gz") for kind, end in FILES.items()} for n in NAMES]
    labels = {"0": "background", "1": "NCR", "2": "ED", "3": "ET"}
    (tmp_path / "list.json").write_text(json.dumps({"labels": labels, "training": entries}))
    content["config"]["data"] = str(tmp_path / "list.json")
    line = [str(copied), "--truth", str(truth), "--prediction", str(found), "--cases", "3"]
    summary = json.loads((copied / "validation" / "summary.json").read_text())["metric_per_case"]
    dice = {f"{Path(one['reference_file']).parent.name}-t1c": one["metrics"]["2"]["Dice"] for one in summary}

    def page_of(train: list[str], held_out: list[str]) -> tuple[str, Page]:
        content["dataset"] |= {"train": train, "held_out": held_out}
        (copied / "config.json").write_text(json.dumps(content))
        assert run(report.act, line) == 0
        html = (copied / "scores-found.html").read_text()
        return html, Page(html)

    html, page = page_of(names[:2], [])
    assert "The scores are of the 1 case new to the run. The other 2 were seen in training." in page.text
    new, old = dice[names[2]], (dice[names[0]] + dice[names[1]]) / 2
    assert page.cells["seen-in-training", "mean Dice of ED"] == pytest.approx([new, old])
    assert page.cells["seen-in-training", "cases"] == [1, 2] and page.cells["metrics", "ED"][0] == new
    assert f"{old:.3f} (too few to tell)" in html and "The charts and the other tables are of the cases new" in html
    assert {name for table, name in page.cells if table == "per-case"} == {names[2]}
    assert "Dice of every case new to the run, worst first" in html and "(cases new to the run)." in page.text
    assert html.count('<p class="small">Seen in training. Dice: ') == 2 and len(page.cases) == 3
    html, page = page_of(names, [])
    assert "No new case: all 3 were seen in training." in page.text
    assert 'class="tiles"' not in html and page.cells["metrics", "ED"][0] == pytest.approx(sum(dice.values()) / 3)
    journal = copied / "metrics.jsonl"
    journal.write_text(journal.read_text() + journal.read_text())  # several validations, of which one is the best
    html, page = page_of(names[:1], names[1:2])
    assert page.cells["seen-in-training", "cases"] == [1, 1, 1] and page.cells["metrics", "ED"][0] == new
    assert html.count('<p class="small">Used to choose the weights. Dice: ') == 1 and 'class="tiles"' in html
    html, page = page_of(names[:2], names[2:])
    assert "No new case: the scores are of the 1 case used to choose the weights, which tend to be too" in page.text
    assert 'class="tiles"' in html and page.cells["seen-in-training", "mean Dice of ED"] == pytest.approx([new, old])
    page_of(names[:1], names[1:2])
    (found / "prediction.json").write_text(json.dumps({"run": str(copied), "files": []}))
    capsys.readouterr()
    regions = [part for name in ("NCR=1", "ED=2", "ET=3") for part in ("--regions", name)]
    assert run(evaluate.act, [str(truth), str(found), *regions]) == 0
    said = capsys.readouterr().out
    told = (
        "The scores are of the 1 case new to the run. Of the other 2, 1 was used to choose the weights, and 1 was seen"
    )
    assert (
        said.index(told) < said.index("all 3 cases together, new or not:") and "\n1 case new to the run, 3 cl" in said
    )
    groups = json.loads((found / "summary.json").read_text())["groups"]
    assert groups["new to the run"]["cases"] == names[2:] and groups["new to the run"]["mean"]["2"]["Dice"] == new
    assert [own["cases"] for own in groups.values()] == [names[2:], names[1:2], names[:1]]
    other = Path(shutil.copytree(copied, tmp_path / "other"))
    content["dataset"] |= {"train": names, "held_out": []}
    (other / "config.json").write_text(json.dumps(content))
    rows = (copied / "metrics.jsonl").read_text()
    (copied / "metrics.jsonl").write_text(rows.replace('"NCR": 0.5', '"NCR": 0.0'))
    runs = [{"run": str(folder), "weights": {}} for folder in (copied, other)]
    (found / "prediction.json").write_text(json.dumps({"runs": runs, "files": []}))
    _, page = page_of(names[:1], names[1:2])
    assert "No new case: all 3 were seen in training." in page.text, "by the other run, whose mean with this one it is"
    assert "Of moved alone: at the best validation, the mean Dice of NCR is 0.000" in page.text


def test_a_tint_is_seen_on_white_and_makes_dark_tissue_no_brighter() -> None:
    """A lesion that is darker than its surroundings would look brighter than it is."""
    labels = np.arange(11) % len(COLOURS) + 1
    for grey in (0.0, 0.1, 0.5, 1.0):
        *colours, opacity = _tint(labels[None], len(COLOURS), np.full((1, 11), grey))[0].T
        assert np.all(np.array(colours) <= grey) and np.allclose(opacity, TINT)
        assert grey < 1 or np.all(np.ptp(np.array(colours), axis=0) > 0.2)
    css = resources.files("seqpar.report").joinpath("template/page.css").read_text()
    assert "mix-blend-mode: multiply" in css, "and so it is on the page"
