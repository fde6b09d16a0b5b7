"""A report's pictures: sheets of volumes, outlines, curves and strips."""

import json
import math
import re
from dataclasses import replace
from importlib import resources
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
from matplotlib.colors import to_hex

from seqpar.data.formats.recognise import find_inputs
from seqpar.data.preparation.prepare_dataset import prepared
from seqpar.report import pictures, plots
from seqpar.report.cases import greys_of, viewer_section, with_wide_ct
from seqpar.report.curves import NEUTRAL, Diagram, Line
from seqpar.report.embedded_volumes import (
    ShownCase,
    coarsen,
    coarsen_label,
    draw_plane,
    embed,
    encode,
    most_disagreement,
    outline,
    png,
    sheet,
)
from seqpar.report.images import Images, same_cases
from seqpar.report.pictures import PicturedCase, figure_of_cases
from seqpar.report.planes import (
    COLOURS,
    DISPUTED,
    LINES,
    TINT,
    TINTED,
    bar_length,
    fullest_planes,
    plane_of,
    ranks_of,
)
from seqpar.report.plots import Strips, draw_chart, make_strips
from seqpar.report.record import RunRecord
from seqpar.report.rendering import _environment
from seqpar.runs.run_folder import predict_command
from seqpar.runs.sweep_folder import Point, Sweep
from seqpar.sweeps.results import _figure_of_sweep
from seqpar.tasks.case_validation import when_validated
from seqpar.tasks.pretrain.validation import RebuiltTile, figure_of_tiles
from tests.support.configs import config_of, trainer_of
from tests.support.folders import label_array, nnunet, save
from tests.support.report_page import own_slices, unroll


def test_a_budget_of_bytes_is_kept() -> None:
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (40, 50, 30), np.uint8)
    truth = (image > 200).astype(np.uint8)
    free = embed([image] * 2, truth, truth, (1, 1, 2), 10**7)
    assert free.factors == (1, 1, 1)
    for budget in (40_000, 9_000, 1_500):
        made = embed([image] * 2, truth, truth, (1, 1, 2), budget)
        assert made.num_bytes <= budget < free.num_bytes
        assert made.factors[2] <= min(made.factors[:2])  # the thick slices are thinned out last
        assert made.shape == tuple(-(-side // f) for side, f in zip(image.shape, made.factors))
        unrolled = unroll(made.truth, list(made.shape), made.columns)
        assert np.array_equal(unrolled, coarsen_label(truth, made.factors))


def test_curves_of_few_steps_have_whole_steps_and_one_scale_in_all_panels(tmp_path, monkeypatch) -> None:
    rows = [{"kind": "train", "step": step, "loss": 1.0, "lr": 0.1} for step in range(2)]
    rows.append({"kind": "val", "step": 2, "loss": 1.0, "dice": {"tumour": 0.0}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    figures = list[Any]()
    plots.draw_progress(tmp_path)
    figures[0].draw_without_rendering()
    for panel in figures[0].axes:
        assert panel.get_xlim() == (0, 2) and [float(place) for place in panel.get_xticks()] == [0, 1, 2]
    assert not figures[0].axes[1].lines[0].get_clip_on(), "a Dice of 0 is seen whole"


def test_coarse_images_are_means_of_blocks() -> None:
    image = np.random.default_rng(1).integers(0, 256, (5, 4, 3), np.uint8)
    made = coarsen(image, (2, 3, 1))
    assert made.shape == (3, 2, 3)
    assert made[0, 0, 1] == np.rint(image[:2, :3, 1].mean())
    assert made[2, 1, 2] == np.rint(image[4:, 3:, 2].mean())


def test_a_sheet_can_be_unrolled() -> None:
    volume = np.random.default_rng(2).integers(0, 256, (7, 5, 11), np.uint8)
    assert np.array_equal(unroll(encode(png(sheet(volume, 4))), [7, 5, 11], 4), volume)


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_an_outline_encloses_just_the_mask(density: float) -> None:
    mask = np.random.default_rng(3).random((9, 7)) < density
    area, edges = 0, 0
    for line in re.findall(r"M(\d+) (\d+)([^z]*)z", outline(mask)):
        x, y = int(line[0]), int(line[1])
        for kind, length in re.findall(r"([hv])(-?\d+)", line[2]):
            edges += abs(int(length))
            if kind == "h":
                area -= int(length) * y  # Green's theorem, inside on the right with y downwards
                x += int(length)
            else:
                y += int(length)
        assert (x, y) == (int(line[0]), int(line[1]))
    padded = np.pad(mask, 1).astype(int)
    assert area == mask.sum()
    assert edges == np.abs(np.diff(padded, axis=0)).sum() + np.abs(np.diff(padded, axis=1)).sum()


def test_two_labels_share_one_line_that_of_the_higher_number() -> None:
    labels = np.zeros((4, 6), int)
    labels[:, :3], labels[:, 3:5] = 1, 2
    edges = {number: re.findall(r"[hv](-?\d+)", outline(labels, number)) for number in (1, 2)}
    assert sum(map(abs, map(int, edges[1]))) == 3 + 3 + 4 and sum(map(abs, map(int, edges[2]))) == 2 * (2 + 4)
    assert outline(labels, 1).count("m") == 1 and "z" not in outline(labels, 1) and outline(labels, 2).endswith("z")
    labels[1:3, 1:2] = 2
    inside = np.where(labels == 1, 2, np.where(labels == 2, 1, 0))[:, :3]
    assert outline(inside, 1) == "", "within a higher label no edge is its own"


def test_a_rare_label_within_a_common_one_has_a_line_of_its_own() -> None:
    labels = np.zeros((8, 8, 8), np.uint8)
    labels[1:7, 1:7, 1:7], labels[1:3, 3:5, 3:5], labels[3, 3, 5] = 2, 1, 4
    assert ranks_of(labels, 0 * labels).tolist() == [0, 2, 1, 4, 3], "a label without a voxel is drawn nowhere"
    case = ShownCase("a", {}, labels, 0 * labels, (1.0,) * 3, own_slices(labels.shape))
    (truth, colour, path), (_, around, outside) = draw_plane(case, "sagittal", 0, 1, False).outlines[2:]  # lines
    assert (
        (truth, colour, around) == ("truth", COLOURS[0], COLOURS[1]) and path.endswith("z") and outside.count("M") == 1
    )
    section = viewer_section([(case, case.embedded(10**6))], ["core", "edge"], False)
    assert section.volumes["cases"][0]["ranks"] == [0, 2, 1, 4, 3] and f". {LINES}." in f"{section.orientation}."
    picture = PicturedCase("a", np.ones(labels.shape), labels, 0 * labels, (1.0,) * 3, own_slices(labels.shape))
    panel = figure_of_cases([picture], ["core", "edge"], 1, False, Path()).axes[0]
    colours = [to_hex(one.get_edgecolor()[0]) for one in panel.collections]
    assert colours == [COLOURS[1], COLOURS[0]], "the rarer one is above"


def test_each_edge_between_labels_is_drawn_once_in_a_picture() -> None:
    """That of a lesion at the edge of an organ too: it is the lesion's alone."""
    labels = np.zeros((12, 12, 12), np.uint8)
    labels[2:10, 2:10, 2:10], labels[5:7, 5:7, 7:11], labels[2:4, 4:8, 4:8] = 1, 2, 3
    labels[0, 0, 0] = 3  # which has no line, as an ignored label
    picture = PicturedCase("a", np.ones(labels.shape), labels, 0 * labels, (1.0,) * 3, own_slices(labels.shape))
    for panel, dim in zip(figure_of_cases([picture], ["liver", "lesion"], 1, False, Path()).axes, range(3)):
        plane = plane_of(labels % 3, dim, fullest_planes(labels % 3)[dim], False)
        lines = [line for drawn in panel.collections for line in drawn.get_segments()]
        closed = [bool((line[0] == line[-1]).all()) for line in lines]
        middles = [(x, y) for line, ends in zip(lines, closed) for x, y in line[ends:].tolist() if (x + y) % 1]
        padded = np.pad(plane.astype(int), 1)
        edges = sum(np.count_nonzero(np.diff(padded, axis=axis)) for axis in (0, 1))
        assert len(set(middles)) == len(middles) == edges
        assert all(ends or not sum(line[[0, -1]].ravel() % 1 != 0.5) for line, ends in zip(lines, closed)), "they meet"


@pytest.mark.parametrize("generated", [True, False])
def test_a_picture_names_its_run_and_says_that_phantoms_are_generated(tmp_path, monkeypatch, generated: bool) -> None:
    """It travels without its folder."""
    figures = list[Any]()
    for module in (plots, pictures):
        monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure))
    run = tmp_path / "small" / "lr-$1$"
    run.mkdir(parents=True)
    data = tmp_path / "phantoms" / "Dataset998_PhantomLiver"
    data.mkdir(parents=True)
    config = {"dataset": {"generated": generated}, "config": {"data": str(data)}}
    (run / "config.json").write_text(json.dumps(config))
    if generated:
        (data.parent / "phantom.json").write_text(json.dumps({"kind": "liver", "seed": 3}))
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 0, "loss": 1.0, "lr": 0.1, "seconds": 1.0}))
    volume = np.ones((4, 4, 4), np.uint8)
    summary = {
        "names": ["a", "b"],
        "metric_per_case": [{"truth": "a", "probabilities": [1, 0]}],
        "confusion": [[1, 0], [0, 0]],
    }
    tile = RebuiltTile("a", 1.0 * volume, 1.0 * volume, volume > 0, (1.0,) * 3, own_slices(volume.shape)[2])
    for is_point in (False, True):
        plots.draw_progress(run)
        pictures.draw_scores(run / "validation.png", summary)
        case = PicturedCase("a", volume, volume, volume, (1.0,) * 3, own_slices(volume.shape))
        figures += [figure_of_cases([case], ["b"], 1, False, run), figure_of_tiles([tile], False, run)]
        name = "Run small/lr-\\$1\\$" if is_point else "Run lr-\\$1\\$"
        said = {figure.get_suptitle().split("\n")[0] for figure in figures}
        assert said == {f"{name}{': generated phantoms, not patients' * generated}"} and len(figures) == 4
        (run.parent / "sweep.json").write_text("{}")
        figures.clear()
    of_sweep = _figure_of_sweep(run.parent, Sweep({}, (Point(run.name, {}),))).subfigs[0].get_suptitle()
    assert of_sweep.startswith(f"Sweep small{': generated phantoms, not patients' * generated}\n1 point")
    assert plots.name_of_run(run, "run") == "run small/lr-$1$", "within a sentence"
    said = "  (IMAGES: new cases; python launch/phantom.py --kind liver --seed 4 --out new-liver-4 makes some in "
    said += "new-liver-4/Dataset998_PhantomLiver)"
    assert predict_command(run).endswith(f" -i IMAGES -o PREDICTIONS{said * generated}")
    assert plots.title_of("n" * 190, generated, "more").count("\n") == 3, "a long name is seen whole"


def test_the_inside_of_a_ring_is_tinted_and_its_hole_is_not() -> None:
    """Two lines alone are a ring, or a disc within a disc."""
    ring, inner = np.zeros((16, 16, 16), np.uint8), np.zeros((16, 16, 16), np.uint8)
    ring[3:13, 3:13, 3:13], ring[3:13, 6:10, 6:10], inner[3:13, 6:10, 6:10] = 1, 0, 1
    ring[0, 0, 0] = 2  # ignored
    case = PicturedCase("a", np.ones(ring.shape), ring, inner, (1.0,) * 3, own_slices(ring.shape))
    figure = figure_of_cases([case], ["tumour"], 1, False, Path())
    for panel, dim in zip(figure.axes, range(3)):
        for labels, tint in zip((ring, inner), panel.images[1:]):
            plane = plane_of(labels, dim, fullest_planes(ring)[dim], False) == 1
            assert np.allclose(np.asarray(tint.get_array())[..., 3], TINT * plane) and (dim or plane.any())
    shown = ShownCase("a", {}, ring % 2, inner, (1.0,) * 3, own_slices(ring.shape))
    drawn = draw_plane(shown, "sagittal", 0, 8, False).outlines
    assert [kind for kind, _, _ in drawn] == ["inside bare"] * 2 + ["truth", "prediction"], "lines are above"
    assert [path for _, _, path in drawn[:2]] == [outline(plane_of(one, 0, 8, False) == 1) for one in (ring, inner)]
    assert drawn[0][2].count("M") == 2 and drawn[1][2].count("M") == 1, "a hole is a way of its own"
    css = resources.files("seqpar.report").joinpath("template/page.css").read_text()
    assert f"path.inside {{ fill-opacity: {TINT:g}".replace("0.", ".") in css


def test_a_picture_shows_where_readers_disagree_and_is_read_on_bone() -> None:
    labels, bone = np.zeros((8, 8, 8), np.uint8), np.ones((8, 8, 8))
    labels[2:6, 2:6, 2:6] = 1
    disputed = np.zeros(labels.shape, bool)
    disputed[2, 2:6, 2:6] = True
    known = bone, labels, labels, (1.0,) * 3, own_slices(labels.shape)
    alone, doubted = PicturedCase("a", *known), PicturedCase("b", *known, disputed=disputed)
    figure = figure_of_cases([alone, doubted], ["core"], 2, False, Path())
    told = [text.get_text() for text in figure.legends[0].texts]
    assert told == ["truth", "prediction", "core", TINTED, "readers disagree"]
    areas = [list(panel.images[1:-2]) for panel in figure.axes]  # below what is inside the lines
    assert [len(area) for area in areas] == [0, 0, 0, 1, 1, 1], "above the image of the case with readers alone"
    assert to_hex(areas[4][0].cmap(1.0)) == DISPUTED and areas[4][0].get_alpha().any()
    assert not figure_of_cases([alone], ["core"], 1, False, Path()).legends[0].texts[4:]
    assert all(text.get_path_effects() for panel in figure.axes for text in panel.texts), "white letters have an edge"
    css = resources.files("seqpar.report").joinpath("template/page.css").read_text()
    assert css.count(DISPUTED) == 2 and css.count("disputed") == 2, "the page shows it in the same colour"


def drawn(strips: Strips | None) -> str:
    """Returns strips as a page draws them."""
    template = _environment(None).from_string(
        '{% from "macros.html" import strips_of_cases %}{{ strips_of_cases([one]) }}'
    )
    return template.render(one=strips)


def test_strips_show_each_case_that_has_a_value() -> None:
    text = drawn(make_strips("Dice", {"a&b": [(0.25, "x<"), (math.nan, "y")], "c": [(math.nan, "x<")]}, 0, 1))
    assert text.count("<circle") == 1 and "x&lt;: 0.25" in text and "a&amp;b" in text
    assert make_strips("Dice", {"c": [(math.nan, "x")]}, 0, 1) is None


@pytest.mark.parametrize(("most", "last"), [(18.1, "20"), (20.0, "20"), (0.37, "0.4"), (374.0, "400"), (0.0, "1")])
def test_strips_of_distances_end_at_a_mark(most: float, last: str) -> None:
    strips = make_strips("HD95", {"a": [(most / 2, "x"), (most, "y")]}, 0.0, None)
    assert strips is not None
    place, text = strips.ticks[-1]
    assert text == last and place == pytest.approx(strips.width - 14, abs=0.2)
    assert max(x for x, *_ in strips.rows[0].dots) <= place
    assert len(strips.ticks) >= 4


def test_a_box_is_drawn_of_five_cases_and_explained() -> None:
    values = [(n / 8, "x") for n in range(6)]
    text = drawn(make_strips("Dice", {"a": values[:5]}, 0, 1))
    assert text.count("<rect") == 1
    assert "Vertical line: median; grey box: the middle half of the cases (not a confidence interval)." in text
    few = drawn(make_strips("Dice", {"a": values[:4]}, 0, 1))
    assert "<rect" not in few and few.count('class="median"') == 1 and "Vertical line: median.</p>" in few
    alone = drawn(make_strips("Dice", {"a": values[:1]}, 0, 1))
    assert "median" not in alone and "<rect" not in alone


def test_a_median_of_distances_leaves_substitutes_out() -> None:
    pairs: list[tuple[float, str] | tuple[float, str, str]] = [(10.0, "a"), (90.0, "b", "substituted")]
    text = drawn(make_strips("HD95", {"a": pairs}, 0, 100, is_measured=True))
    assert text.count("hollow") == 1 and "median" not in text, "of the two only one is measured"
    text = drawn(make_strips("HD95", {"a": [*pairs, (30.0, "c")]}, 0, 100, is_measured=True))
    assert "Vertical line: median (for HD95, of the measured distances only)." in text
    twenty = drawn(make_strips("HD95", {"a": [(20.0, "d")] * 2}, 0, 100))
    line = '<line class="median" x1="([0-9.]+)"'
    assert re.findall(line, text) == re.findall(line, twenty), "halfway between 10 and 30"
    assert 'class="median"' in drawn(make_strips("Dice", {"a": pairs}, 0, 100)), "a Dice of 0 is a score"


def test_a_long_name_leaves_room_for_its_dots() -> None:
    text = drawn(make_strips("Dice", {"n" * 90: [(0.25, "a"), (0.75, "b")], "short": [(1.0, "a")] * 5}, 0, 1))
    places = [float(x) for x in re.findall(r'cx="([-.0-9]+)"', text)]
    assert len(places) == 7 and 200 < places[0] < places[1] < places[2] < 520
    assert min(float(w) for w in re.findall(r'<rect[^>]*width="([-.0-9]+)"', text)) >= 0


def chart(*lines: Line, quantity: str = "Loss", high: float | None = None) -> str:
    made = draw_chart(Diagram(quantity, "step", lines, low=0.0, high=high, styles=NEUTRAL))
    assert made is not None
    return str(made.svg)


def test_a_value_alone_is_seen() -> None:
    """A run that was ended after its first step, or validated once."""
    assert chart(Line("training", [1], [[0.5]])).count("<use") == 1
    assert "<use" not in chart(Line("training", [1, 2], [[0.5, 0.4]]))
    assert chart(Line("held out", [1, 2, 3], [[0.5, math.nan, 0.4]], dots=True)).count("<use") == 2
    assert draw_chart(Diagram("Dice", "step", [Line("ET", [1], [[math.nan]], dots=True)])) is None


def test_a_chart_takes_the_colours_of_its_page_and_names_nothing_of_its_own() -> None:
    """In the dark and on paper, and with other charts next to it: no outer style sheet, address or size."""
    text = chart(Line("a", [1, 2], [[0.5, 0.4]]), Line("b", [1, 2], [[0.5, 0.3]], dots=True))
    assert text.startswith("<svg viewBox=") and text.count('class="curve"') == 2
    assert "var(--line)" in text and "#d9dde2" not in text and "font" not in text and "<style" not in text
    assert not re.search(r"https?:|xlink|url\(|<metadata|#000000", text)
    names = re.findall(r' id="([^"]+)"', text)
    assert names and len(set(names)) == len(names) and all(f'href="#{name}"' in text for name in names)
    assert "currentColor" in chart(Line("Loss", [1, 2], [[0.5, 0.4]])), "one line alone has the colour of the text"


def test_a_long_line_is_drawn_by_mean_and_range_of_its_pieces() -> None:
    values = np.random.default_rng(0).random(6000)
    (line,) = re.findall(r'<g class="curve">\s*<path d="([^"]+)"', chart(Line("Loss", range(6000), [values.tolist()])))
    assert line.count("L") + line.count("M") <= plots.BUCKETS
    few = chart(Line("Loss", range(100), [values[:100].tolist()], noisy=True), high=1.0)
    heights = [
        [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]
        for path in re.findall(r'<path d="([^"]+)"[^>]*stroke: currentColor', few)
    ]
    faint, smooth = heights
    assert np.std(smooth) < 0.6 * np.std(faint), "a running mean over the faint values"
    template = _environment(None).from_string('{% from "macros.html" import charts %}{{ charts(all) }}')
    for steps, noisy, said in ((100, True, 1), (10, True, 0), (100, False, 0)):
        made = draw_chart(Diagram("Loss", "step", [Line("Loss", range(steps), [values[:steps].tolist()], noisy=noisy)]))
        assert template.render(all=[made]).count("solid: mean of the last 10 steps.") == said


def test_a_ct_is_drawn_in_hounsfield_units_with_its_window(tmp_path: Path, alone) -> None:
    data = nnunet(tmp_path / "D", cases=5, channels=("CT",))
    small = "--preset debug --tile 16 --patch 8 --device cpu --cache"
    trainer = trainer_of(config_of([*small.split(), str(tmp_path / "cache"), "--data", str(data)]), alone, tmp_path)
    cases = trainer.data.dataset.cases.values()
    drawn = [trainer.validation._pictured(case, np.asarray(case.label), 0) for case in cases]
    for one in drawn:
        hounsfield = nibabel.load(data / "imagesTr" / f"{one.name}_0000.nii.gz").get_fdata()
        assert one.is_ct and np.median(one.image) == pytest.approx(np.median(hounsfield[hounsfield > 0]), rel=0.02)
    assert not any(one.hidden for one in drawn)
    case = next(iter(cases))
    trainer.data.dataset.annotated[case.id] = ()
    assert list(trainer.validation._pictured(case, np.asarray(case.label), 0).hidden) == [1], "nobody outlined it"
    bright = replace(drawn[0], image=drawn[0].image + 500)
    figure = figure_of_cases([drawn[0], bright], ["tumour"], 2, False, Path())
    low, high = figure.axes[0].images[0].get_clim()
    assert figure.axes[3].images[0].get_clim() == (low, high), "all cases have the same window"
    assert f"shown on CT from {low:.0f} HU (black) to {high:.0f} HU (white), in planes" in figure.get_suptitle()
    dark = replace(drawn[0], image=np.linspace(-160, 0.4, 1000).reshape(10, 10, 10), truth=np.ones((10, 10, 10), int))
    dark = replace(dark, prediction=dark.truth)
    assert (
        "from −159 HU (black) to 0 HU (white)" in figure_of_cases([dark], ["tumour"], 1, False, Path()).get_suptitle()
    )
    assert "HU" not in figure_of_cases([replace(bright, is_ct=False)], ["tumour"], 1, False, Path()).get_suptitle()
    for low, high in ((117, 300), (288, 353)):  # of thin vessels, darker than which the network takes nothing
        clipped = np.full((10, 10, 10), float(low))
        clipped[4, 4, :4] = np.linspace(low, high, 4)
        figure = figure_of_cases([replace(dark, image=clipped)], ["vessel"], 1, False, Path())
        assert figure.axes[0].images[0].get_clim() == (low, high), "a window has a width"
        said = figure.get_suptitle().replace("\n", " ")
        assert f"from {low} HU (black) to {high} HU (white), in" in said and "HU (such as soft tissue, fat" in said


def test_the_picture_of_a_validation_says_if_an_earlier_one_was_better(tmp_path: Path, monkeypatch) -> None:
    def row(step: int, score: float) -> dict[str, Any]:
        return {"kind": "val", "step": step, "loss": 1.0, "scores": {"balanced accuracy": score}}

    figures = list[Any]()
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure))
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row(n, n / 1000)) for n in (1, 300, 900)) + "\n")
    journal: Any = SimpleNamespace(path=tmp_path / "metrics.jsonl", steps_done=700, best_step=None)
    cases = [{"truth": name, "probabilities": [0.4, 0.6]} for name in ("a", "b")]
    summary = {"names": ["a", "b"], "metric_per_case": cases, "confusion": [[0, 1], [0, 1]]}
    labels = np.ones((8, 8, 8), np.uint8)
    picture = PicturedCase("a", 1.0 * labels, labels, labels, (1.0,) * 3, own_slices(labels.shape))
    tile = RebuiltTile("a", 1.0 * labels, 1.0 * labels, labels > 0, (1.0,) * 3, own_slices(labels.shape)[2])
    for score in (0.2, 0.4):
        when = when_validated(journal, row(700, score))
        pictures.draw_scores(tmp_path / "validation.png", summary, when)
        pictures.draw_cases(tmp_path / "validation.png", [picture], ["b"], 1, when, False)
        figures.append(figure_of_tiles([tile], False, tmp_path, when))
    after = "fter step 700, not with the weights that predict uses (step 300)", "fter step 700, the best so far"
    for told, own in zip(after, (figures[:3], figures[3:])):  # a later row is of a run that was resumed before it
        scores, drawn, rebuilt = (figure.get_suptitle().split("\n") for figure in own)
        assert scores[-1] == f"2 held-out cases, a{told}" and drawn[1] == f"A{told}."
        assert f"A{told}: hidden patches" in " ".join(rebuilt)
    assert all(figure._suptitle.get_window_extent().x1 <= figure.bbox.width for figure in figures)
    for journal.best_step, told in ((-1, after[1]), (1, after[1]), (300, after[0]), (500, "fter step 700")):
        assert when_validated(journal, row(700, 0.2)) == f"a{told}", "the weights of the better one are gone"
    journal.best_step = None
    journal.path.unlink()
    assert when_validated(journal, row(700, 0.2)) == f"a{after[1]}", "the first one"
    assert when_validated(journal, row(700, math.nan)) == "after step 700", "no case has a class"


def test_a_ct_keeps_soft_tissue_though_the_network_takes_it_clipped(tmp_path: Path) -> None:
    """Its files are read once more, if they are those that the run prepared."""
    data = nnunet(tmp_path / "Dataset007_CT", channels=("CT",))
    for n in range(3):
        values, label = np.random.default_rng(n).uniform(-900, 900, (14, 12, 10)), label_array()
        values[label > 0] = np.random.default_rng(n).uniform(20, 60, (label > 0).sum())
        save(data / "imagesTr" / f"c_00{n}_0000.nii.gz", values.astype(np.float32))
    cache = prepared(data, tmp_path / "cache", is_first=True)
    record = RunRecord(tmp_path, {"config": {"data": str(data)}, "dataset": {}}, None, {})
    names, recipe = ["c_000"], cache.recipe

    def kept(images: Images) -> tuple[float, float]:
        found = with_wide_ct(images, record, names).of("c_000")
        assert found is not None
        pictures, ranges, is_ct = greys_of(found, ["CT"])
        assert is_ct and {pictures["CT"].min(), pictures["CT"].max()} == {0, 255}
        return ranges["CT"]

    assert kept(Images(recipe, cache)) == pytest.approx((-150, 250), abs=0.1)
    at_file = Images(recipe, None, {case.id: case for case in find_inputs((data,), recipe.modalities)[0]})
    assert kept(at_file) == pytest.approx((-150, 250), abs=0.1), "and those that were named"
    of_another = Images(recipe, same_cases(cache, {}))
    assert with_wide_ct(of_another, record, names).of("c_000") is None, "a case of another data set, by its name"
    path = data / "imagesTr" / "c_000_0000.nii.gz"
    save(path, np.ones((14, 12, 10), np.float32))
    low, high = kept(Images(recipe, cache))
    assert 19 < low < high < 61, "another file of the name is not that of the run: only what was prepared is known"


@pytest.mark.parametrize(("networks", "labels"), [(2, 2), (2, 3), (3, 3), (3, 2), (5, 3), (1, 3)])
def test_the_most_disagreement_is_what_certain_networks_can_have(networks: int, labels: int) -> None:
    """Of the entropy of the mean minus the mean entropy, over all that certain networks can say."""
    means = (np.bincount(said, minlength=labels) / networks for said in product(range(labels), repeat=networks))
    entropies = [-(mean[mean > 0] * np.log(mean[mean > 0])).sum() for mean in means]
    assert most_disagreement(networks, labels) == pytest.approx(max(entropies))
    assert most_disagreement(2, 9, regions=3) == pytest.approx(3 * math.log(2))


@pytest.mark.parametrize(("width", "length"), [(240, 50), (30, 5), (26, 5), (8, 2), (3.2, 0.5)])
def test_a_scale_bar_is_round_and_short(width: float, length: float) -> None:
    assert bar_length(width) == pytest.approx(length)
