"""Pretraining as a run: equal on any ranks, interrupted and resumed, without labels, and what starts from it."""

import json
import shutil
import signal
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from seqpar import DropoutKey
from seqpar.cli import export, predict, prepare, pretrain, train
from seqpar.data.geometry import make_geometry
from seqpar.planner.step_counter import StepSetup, count_step
from seqpar.report import pictures
from seqpar.report.planes import COUNTED
from seqpar.runs.journal import Journal, read_metrics
from seqpar.runs.metrics_tail import what_was_learned
from seqpar.settings.command_line import default_preset
from seqpar.settings.presets import PRESETS
from seqpar.tasks.lookup import TASKS
from seqpar.tasks.pretrain import validation
from seqpar.tasks.pretrain.data import open_image_data
from seqpar.tasks.pretrain.pretraining import flags_of_training
from seqpar.tasks.pretrain.validation import RebuiltTile, figure_of_tiles
from seqpar.training import gradients
from seqpar.weights.pretrained import weights_file
from tests.support.configs import NoStop, config_of, trainer_of
from tests.support.folders import image_array, nnunet, save, write_json
from tests.support.messages import refused_with
from tests.support.training_runs import at, die, farthest, losses, signalled, status, trained, weights

# as the tiny runs of train, but for what those say of labels and decoders
TINY = """
    --preset mae-debug --tile 16 --patch 4 --embed-dim 12 --heads 2 --depth 1 --workers 0 --augment none --batch 2
    --iterations 2 --epochs 3 --lr 0.01 --device cpu --val-every 1 --fold all
"""


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> list[str]:
    """Returns the flags of a tiny run on a folder of images, without labels or any description."""
    root = tmp_path_factory.mktemp("images")
    for case in range(3):
        save(root / "scans" / f"scan_{case}.nii.gz", image_array(case, (22, 20, 18)))
    arguments = [*TINY.split(), "--data", str(root / "scans"), "--cache", str(root / "cache")]
    trained(1, [*arguments, "--iterations", "1", "--epochs", "1"], root / "first", act=pretrain.act)
    return arguments


def test_one_and_three_ranks_have_the_same_losses_on_images_without_labels(images, tmp_path) -> None:
    for ranks in (1, 3):
        more = ["--seqpar", str(ranks), "--precision", "fp64"]
        said = trained(ranks, [*images, *more], tmp_path / str(ranks), act=pretrain.act).said()
        assert "validation on 3 cases that the run trains on: mean squared error" in said and "held-out" not in said
    assert farthest(losses(tmp_path / "3"), losses(tmp_path / "1")) < 1e-12
    rows = [[r["loss"] for r in read_metrics(tmp_path / n / "metrics.jsonl") if r["kind"] == "val"] for n in "13"]
    assert farthest(*rows) < 1e-12 and len(rows[0]) == 3


@pytest.fixture(scope="module")
def undisturbed_images(images, tmp_path_factory) -> Path:
    """Returns the folder of a pretraining that nothing disturbed."""
    whole = tmp_path_factory.mktemp("undisturbed") / "whole"
    trained(1, images, whole, act=pretrain.act)
    return whole


@pytest.mark.started
def test_a_pretraining_that_had_to_leave_goes_on_to_the_same_bits(images, undisturbed_images, tmp_path) -> None:
    out = tmp_path / "run"
    leave = at(gradients.Gradients, "_backward", 0, signalled(signal.SIGTERM), call=3)
    trained(1, images, out, expect=75, hook=leave, act=pretrain.act)
    assert status(out)["state"] == "preempted" and 0 < len(losses(out)) < 6
    trained(1, ["--resume"], out, act=pretrain.act)
    assert weights(out) == weights(undisturbed_images) and losses(out) == losses(undisturbed_images)


def test_a_pretraining_that_is_killed_goes_on_to_the_same_bits(images, undisturbed_images, tmp_path) -> None:
    """In a step, and then while it rebuilds held-out tiles."""
    out, line = tmp_path / "run", [*images, "--checkpoint-minutes", "1e-9"]
    for owner, name, call in ((gradients.Gradients, "_backward", 4), (validation.MaskedValidation, "_case", 2)):
        trained(1, line, out, expect=-signal.SIGKILL, hook=at(owner, name, 0, die, call), act=pretrain.act)
        assert status(out)["state"] == "running" and 0 < len(losses(out)) < 6
        line = ["--resume"]
    trained(1, ["--resume"], out, act=pretrain.act)
    assert weights(out) == weights(undisturbed_images) and losses(out) == losses(undisturbed_images)


@pytest.mark.started
def test_training_starts_from_a_pretraining_and_prediction_does_not(images, flags, tmp_path, capsys) -> None:
    out = tmp_path / "mae"
    launch = trained(1, images, out, act=pretrain.act, pictures=True)
    said = launch.said()
    assert "75% of the tokens hidden, and rebuilt by 2 blocks x 12" in said and "16 visible" in said
    assert "M + rebuilder " in said
    assert f"next: python launch/train.py --preset debug --weights {out} --data " in said
    assert "finished: best error of hidden voxels " in said and " if they were filled with the tile's mean)" in said
    for name in ("progress.png", "validation.png", "model.safetensors"):
        assert (out / name).stat().st_size > 1000
    more = ["--tile", "24", "--patch", "4", "--weights", str(out), "--layer-decay", "0.8"]
    tuned = trained(1, [*flags, *more, "--epochs", "1"], tmp_path / "tuned").said()
    (line,) = (line for line in tuned.splitlines() if line.startswith("weights from"))
    assert "positions resized from 64 tokens to 6x6x6" in line and "new: decoder (" in line
    assert "left out: rebuilder (" in line and "its step" not in line
    left = Path(shutil.copytree(out, tmp_path / "left"))
    assert weights_file(str(left)) == left / "model.safetensors"
    ended = json.loads((left / "status.json").read_text())
    for state, how in (("preempted", "was stopped early"), ("failed", "failed"), ("running", "was killed")):
        write_json(left / "status.json", ended | {"state": state, "step": 1, "steps": 9})
        more[more.index("--weights") + 1] = str(left)
        assert train.act([*flags, *more, "--out", str(tmp_path / "dry"), "--dry-run"]) == 0
        assert weights_file(str(left)).parent.parent == left / "checkpoints", "those of the end are older"
        assert f"; {left} {how}: these weights are of its step {ended['step']} of 9" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is a pretraining, which predicts no labels: train --weights"):
        predict.act([str(out), "-i", str(tmp_path), "-o", str(tmp_path / "labels")])
    capsys.readouterr()
    assert export.act([str(out), str(tmp_path / "mae.zip")]) == 0
    archive = f"--preset debug --weights {tmp_path / 'mae.zip'} --data LABELLED"
    assert f"next: python launch/train.py {archive}" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "mae.zip") as file:
        use = json.loads(file.read("about.json"))["use"]
    assert use.startswith("seqpar-train --preset debug --weights mae.zip --data LABELLED") and str(tmp_path) not in use


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--mask-ratio 0.99", "--mask-ratio 0.99 leaves 1 of 64 tokens, fewer than the 2 ranks"),
        ("--rebuild-width 13", "--rebuild-width 13: --heads 2 does not divide it: use --rebuild-width 12"),
        ("--mask-ratio 0.001", "--mask-ratio 0.001 hides none of 64 tokens"),
        ("--join-labels all=1", "--join-labels would do nothing: --task pretrain"),
        ("--positions none", "hidden tokens could not be told apart"),
        ("--decoder unetr", "--decoder would do nothing"),
        ("--dice squared", "--dice would do nothing"),
        ("--dice-smooth 0.1", "--dice-smooth would do nothing"),
        ("--pipe 2", "a masked autoencoder is not cut into stages"),
        ("--task segment", "this program pretrains: start train"),
    ],
)
def test_what_a_pretraining_cannot_do_is_refused_before_it_begins(images, more, says) -> None:
    with refused_with(says):
        pretrain.act([*images, "--seqpar", "2", *more.split(), "--dry-run"])


def test_settings_of_pretraining_are_refused_elsewhere(flags, tmp_path) -> None:
    with pytest.raises(ValueError, match="--mask-ratio would do nothing"):
        train.act([*flags, "--mask-ratio", "0.5"])
    write_json(tmp_path / "config.json", {"config": {"task": "segment"}})
    with pytest.raises(ValueError, match="that run has --task segment: resume it with train"):
        pretrain.act(["--resume", "--out", str(tmp_path)])


def test_what_decides_where_no_preset_is_named_is_the_task() -> None:
    lines: tuple[list[str], ...] = ([], ["--task", "pretrain"], ["--task=classify"])
    assert [default_preset(line, True) for line in lines] == ["paper", "mae", "paper"]
    assert [default_preset(line, False) for line in lines] == ["laptop", "mae-laptop", "laptop"]


def test_images_alone_are_prepared_beforehand_as_a_pretraining_takes_them(images, tmp_path, capsys) -> None:
    scans, cache = images[images.index("--data") + 1], tmp_path / "cache"
    line = [scans, "--task", "pretrain", "--out", str(cache), "--normalise", "volume", "--workers", "0"]
    assert prepare.act(line) == 0
    said = capsys.readouterr().out
    assert "3 prepared" in said and f"pretrain.py --data {scans} --cache {cache} --normalise volume" in said
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    config = config_of([*images, "--cache", str(cache), "--normalise", "volume"])
    assert set(open_image_data(config, True).dataset.recipe.schemes) == {"volume"}
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == before


def test_memory_falls_with_what_is_hidden(images) -> None:
    def held(ratio: str, ranks: int) -> tuple[int, int]:
        config = config_of([*images, "--depth", "6", "--mask-ratio", ratio, "--seqpar", str(ranks)])
        step = count_step(StepSetup(config))
        return step.tokens, step.tokens + step.decoder

    alone = held("0.75", 1)
    assert alone[0] < 0.36 * held("0.25", 1)[0]  # a quarter of the tokens to three
    for ranks in (2, 4):
        for part, whole in zip(held("0.75", ranks), alone):
            assert part < (1 / ranks + 0.05) * whole, (ranks, part / whole)


def test_pictures_show_image_masked_rebuilt_and_difference(images, tmp_path, alone, monkeypatch) -> None:
    trainer, drawn = trainer_of(config_of([*images, "--seed", "3"]), alone, tmp_path), list[RebuiltTile]()
    monkeypatch.setattr(validation, "draw_tiles", lambda path, tiles, *_: drawn.extend(tiles))
    journal = Journal(tmp_path, True, 0)
    result = trainer.validation.run(trainer.net, journal, NoStop())
    journal.close()
    assert result is not None and len(drawn) == 3
    tile = drawn[0]
    assert tile.image.shape == (16, 16, 16) and tile.hidden.mean() == 0.75
    assert np.array_equal(tile.rebuilt[~tile.hidden], tile.image[~tile.hidden])
    of_all = float(((tile.rebuilt - tile.image)[tile.hidden] ** 2).mean())
    part = trainer.net.layout.cut(torch.from_numpy(tile.image)[None, None], 0)
    output = trainer.net(part, None, DropoutKey(0, -1, (0,)))  # runs of other seeds are compared
    assert of_all == pytest.approx(float(trainer.loss(output, part).detach()), rel=1e-5), "training counts padding"
    shape = trainer.data.dataset.cases[trainer.validation.ids[0]].image.shape[1:]
    first, scan = [max(0, (16 - side + 1) // 2) for side in shape], np.zeros((16, 16, 16), bool)
    scan[tuple(slice(begin, begin + side) for begin, side in zip(first, shape))] = True
    assert max(first) and not tile.image[~scan].any() and tile.image[scan].all(), "in one direction it is padded"
    error = float(((tile.rebuilt - tile.image)[tile.hidden & scan] ** 2).mean())
    assert tile.error == pytest.approx(error, rel=1e-5) and tile.error != pytest.approx(of_all, rel=1e-2)
    of_mean = float(((tile.image[scan].mean() - tile.image)[tile.hidden & scan] ** 2).mean())
    assert tile.error_of_mean == pytest.approx(of_mean, rel=1e-5)
    assert result.row["error_of_mean"] == pytest.approx(np.mean([one.error_of_mean for one in drawn]))
    assert result.row["loss"] == pytest.approx(np.mean([one.error for one in drawn]))
    assert 0.05 < result.row["padding"] < 0.3 and "error of hidden voxels of scans " in result.text
    assert trainer.validation.measured_on(trainer.description["dataset"]["digests"]).endswith(" padding=0")
    figure = figure_of_tiles([tile], False, tmp_path)
    *panels, bar = figure.axes
    titles = [panel.get_title() for panel in panels]
    assert all(name in title for title, name in zip(titles, validation.COLUMNS)) and len(titles) == 4
    assert f"error {error:.3f}\n(error of the tile's mean: {of_mean:.3f})" in titles[2]
    form = bar.xaxis.get_major_formatter()
    assert (form(0.5), form(0.0)) == ("+0.5", "0"), "the difference has a bar with signs"
    flat = [one.images[0].get_cmap().get_bad().tolist() for one in (panels[1], panels[3])]
    assert all(len(set(colour[:3])) > 1 for colour in flat[:1]) and flat[0] != flat[1], "no grey stands for hidden"
    gone = [np.ma.getmaskarray(one.images[0].get_array()) for one in panels]
    assert np.array_equal(gone[1], ~gone[3]) and 0.5 < gone[1].mean() < 1 and not gone[0].any() and not gone[2].any()
    assert [text.get_text() for text in figure.legends[0].texts] == ["hidden patch", "visible patch, not compared"]
    assert tile.name.split() == [trainer.validation.ids[0]], "it may be a patient's"
    twice = figure_of_tiles([tile, replace(tile, image=3 * tile.image)], False, tmp_path)
    assert len({panel.images[0].get_clim() for panel in (twice.axes[3], twice.axes[7])}) == 1, "one scale for all tiles"
    assert bar.get_xlabel() == "too dark ← rebuilt − image, in normalised intensity → too bright"
    title = " ".join(figure_of_tiles([tile], False, tmp_path).get_suptitle().split())
    assert trainer.data.dataset.modalities == ("channel 0",), "an image alone and unnamed needs no name"
    assert "Hidden patches, rebuilt" in title and "axial plane through the tile's middle" in title
    of_two = " ".join(figure_of_tiles([replace(tile, modality="T1")], False, tmp_path).get_suptitle().split())
    assert "Hidden patches of T1, rebuilt" in of_two and "hidden voxels of the scan, of all modalities." in of_two
    said = f"{tile.axial.numbers[8]} / {tile.axial.total}: image"
    assert titles[0] == f"{trainer.validation.ids[0]}\naxial {said}" and f"{COUNTED}." in title, "planes have numbers"
    masked = np.asarray(figure_of_tiles([tile], False, tmp_path).axes[1].images[0].get_array())
    shown = pictures.plane_of(np.where(tile.hidden, np.nan, tile.image), 2, 8, False)
    assert np.array_equal(masked[~np.isnan(shown)], shown[~np.isnan(shown)])


def test_pictures_of_ct_have_one_window_in_hounsfield_units(tmp_path, alone, monkeypatch) -> None:
    line = [*TINY.split(), "--data", str(nnunet(tmp_path / "D", channels=("CT",))), "--cache", str(tmp_path / "cache")]
    trainer, drawn = trainer_of(config_of(line), alone, tmp_path), list[RebuiltTile]()
    monkeypatch.setattr(validation, "draw_tiles", lambda path, tiles, *_: drawn.extend(tiles))
    journal = Journal(tmp_path, True, 0)
    trainer.validation.run(trainer.net, journal, NoStop())
    journal.close()
    scan = next(iter((tmp_path / "D" / "imagesTr").glob(f"{drawn[0].name}_*"))).as_posix()
    assert drawn[0].hounsfield is not None
    shown, values = drawn[0].image * drawn[0].hounsfield[0] + drawn[0].hounsfield[1], nibabel.load(scan).get_fdata()
    assert np.median(shown) == pytest.approx(np.median(values[values > 0]), rel=0.05)
    tiles = [replace(drawn[0], hounsfield=(50.0, 100.0), image=np.full((4, 4, 4), value)) for value in (-3.0, 2.0)]
    tiles = [replace(tile, rebuilt=tile.image, hidden=tile.image > 9) for tile in tiles]
    *panels, bar = (figure := figure_of_tiles(tiles, False, tmp_path)).axes
    assert "shown from −50 HU (black) to 200 HU (white), in the axial" in " ".join(figure.get_suptitle().split())
    assert panels[0].images[0].get_clim() == panels[4].images[0].get_clim() == (-3, 2), "one window for all tiles"
    assert bar.get_xlabel() == "too dark ← rebuilt − image, in normalised intensity (1 is 50 HU) → too bright"
    other = figure_of_tiles([replace(tiles[0], hounsfield=None)], False, tmp_path)
    assert "HU" not in other.get_suptitle() and "HU" not in other.axes[-1].get_xlabel()


def test_of_patches_of_several_modalities_that_are_normalised_together_the_guess_is_each_modality_s_mean(
    tmp_path, alone, monkeypatch
) -> None:
    data, tile_of = ["--data", str(nnunet(tmp_path / "D", channels=("T1", "PET")))], validation.middle_of
    data += ["--cache", str(tmp_path / "cache")]
    offsets = np.array([0, 2], np.float32)[:, None, None, None]  # as of a CT and a PET
    monkeypatch.setattr(validation, "middle_of", lambda case, tile: tile_of(case, tile) + offsets)
    trainer, drawn = trainer_of(config_of([*TINY.split(), *data, "--normalised-targets"]), alone, tmp_path), []
    monkeypatch.setattr(validation, "draw_tiles", lambda path, tiles, *_: drawn.extend(tiles))
    journal = Journal(tmp_path, True, 0)
    result = trainer.validation.run(trainer.net, journal, NoStop())
    journal.close()
    assert result is not None
    case = trainer.data.dataset.cases[trainer.validation.ids[0]]
    whole = torch.from_numpy(validation.middle_of(case, (16, 16, 16)))
    patches = trainer.net.layout.cut(whole[None], 0)[0]  # n c p p p
    spread = patches.flatten(1).var(1) + 1e-6
    targets = (patches - patches.flatten(1).mean(1).view(-1, 1, 1, 1, 1)) / spread.sqrt().view(-1, 1, 1, 1, 1)
    ones = torch.zeros(1, 1, 16, 16, 16)
    ones[validation._of_scan(case, (16, 16, 16))] = 1
    inside = trainer.net.layout.cut(ones, 0)[0] > 0
    means = torch.stack([channel[inside[:, 0]].mean() for channel in targets.unbind(1)])
    _, hidden = trainer.net(patches[None], None, DropoutKey(0, -1, (0,)))
    squares = (targets - means.view(1, -1, 1, 1, 1)).square()[hidden]
    expected = float(squares[inside.expand_as(patches)[hidden]].mean())
    assert drawn[0].error_of_mean == pytest.approx(expected, rel=1e-4) and abs(means).max() > 0.5
    assert (
        drawn[0].guess == result.row["guess"] == "each modality's mean" and "with each modality's mean)" in result.text
    )
    told = f"error is 9.0000, and that of each modality's mean is {result.row['error_of_mean']:.4f}."
    assert told in what_was_learned([{"step": 1, **result.row, "loss": 9.0}], True)[1]


class Turned:
    """A preparation whose arrays have other axes than W D H, and grow in other directions."""

    @staticmethod
    def canonical(volume: np.ndarray, properties: Any) -> np.ndarray:
        return volume.transpose(2, 1, 0)[:, :, ::-1]

    @staticmethod
    def canonical_properties(properties: Any) -> Any:
        return SimpleNamespace(box=((0, 9), (1, 8), (3, 14)), shape=(9, 7, 11), spacing=(1, 1, 2), geometry=properties)


@pytest.mark.parametrize("side", [4, 5, 16])
@pytest.mark.parametrize("upwards", [True, False])
def test_a_rebuilt_tile_has_the_slice_numbers_of_its_file_in_whatever_axes_it_was_prepared(side, upwards) -> None:
    geometry = make_geometry((9, 8, 20), np.diag([1, 1, 2 if upwards else -2, 1]))
    numbers = (np.arange(3, 14) if upwards else 19 - np.arange(3, 14)) + 1  # of the crop's planes along H
    image = np.broadcast_to(numbers[::-1, None, None], (11, 7, 9))[None].astype(np.float32)
    case: Any = SimpleNamespace(image=image, properties=geometry)
    tile: Any = (side,) * 3
    axial, spacing = validation.axial_slices(case, tile, Turned())  # type: ignore[arg-type]
    shown = Turned.canonical(validation.middle_of(case, tile)[0], geometry)
    inside = np.flatnonzero(shown.any((0, 1)))
    assert [shown[:, :, n].max() for n in inside] == [axial.numbers[n] for n in inside] and side // 2 in inside
    assert (axial.total, spacing, len(axial.numbers)) == (20, (1, 1, 2), side)


@pytest.mark.parametrize(
    ("error", "normalised", "caution"),
    [
        (0.5, False, ""),
        (0.9, False, "Little was learned: the best error is 0.9000, and that of the tile's mean is 1.0000."),
        (1.1, True, "Nothing was learned: the best error is 1.1000, and that of each patch's own mean is 1.0000."),
    ],
)
def test_a_pretraining_that_learned_little_says_so_when_it_ends(error, normalised, caution, tmp_path) -> None:
    rows = [{"kind": "val", "step": n, "loss": error + n, "error_of_mean": 1.0} for n in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads(replace(PRESETS["mae-debug"](), normalised_targets=normalised).to_json())
    (tmp_path / "config.json").write_text(json.dumps({"config": config, "preset": "mae-debug"}))
    lines = TASKS["pretrain"].next_lines(tmp_path)
    warnings = [line for line in lines if not line.startswith("next: ")]
    assert warnings == ([f"warning: {caution} Train longer."] if caution else [])
    assert len(lines) == 2 + len(warnings)
    assert ("  (once it has learned more)" in lines[-2]) == bool(caution)


def test_the_training_after_a_pretraining_on_phantoms_has_as_many(tmp_path) -> None:
    for count, said in ((12, True), (PRESETS["debug"]().phantoms, False)):
        config = json.loads(replace(PRESETS["mae-debug"](), phantoms=count).to_json())
        (tmp_path / "config.json").write_text(json.dumps({"config": config, "preset": "mae-debug"}))
        assert (f"--phantoms {count}" in " ".join(flags_of_training(tmp_path))) == said


def test_debug_pretrains_the_encoder_of_debug() -> None:
    debug, mae = PRESETS["debug"](), PRESETS["mae-debug"]()
    for name in ("tile", "patch", "embed_dim", "depth", "heads", "positions", "mlp", "mlp_ratio"):
        assert getattr(debug, name) == getattr(mae, name)
    recipe = PRESETS["mae"]()
    assert (recipe.embed_dim, recipe.depth, recipe.heads, recipe.patch[0], recipe.tile[0]) == (864, 16, 12, 8, 160)
    assert (recipe.mask_ratio, recipe.rebuild_blocks, recipe.lr, recipe.weight_decay) == (0.75, 2, 3e-4, 0.05)
    assert (recipe.optimizer, recipe.betas, recipe.decay_all, recipe.clip) == ("adamw", (0.9, 0.98), True, 1)
    assert (recipe.schedule, recipe.warmup, recipe.epochs, recipe.iterations) == ("poly", 50, 1000, 250)
    assert (recipe.global_batch, recipe.drop_path, recipe.layer_scale, recipe.attention_norm) == (8, 0.2, 0.1, True)
    assert (recipe.positions, recipe.mlp, recipe.spacing) == ("learned+rope", "swiglu", "1,1,1")
    assert (recipe.augment, recipe.precision) == ("light", "bf16"), "other than nnssl's"


@pytest.mark.started
def test_the_loss_of_debugs_fifty_steps_falls(tmp_path) -> None:
    """On built-in phantoms, as it is started; the mean of the first five steps against that of the last ten."""
    few = ["--phantoms", "2", "--fold", "all", "--spacing", "4,4,4", "--cache", str(tmp_path / "cache")]
    line = ["--preset", "mae-debug", "--val-every", "0", "--workers", "0", "--device", "cpu", *few]
    trained(1, line, tmp_path / "run", act=pretrain.act)
    loss = losses(tmp_path / "run")
    assert len(loss) == 50 and np.mean(loss[-10:]) < 0.95 * np.mean(loss[:5])


def test_a_described_folder_without_some_labels_is_read_as_images(images, tmp_path) -> None:
    from tests.support.folders import nnunet

    root = nnunet(tmp_path / "Dataset003_Half", cases=3)
    shutil.rmtree(root / "labelsTr")
    (root / "labelsTr").mkdir()
    at_data = images.index("--data")
    line = [*images[:at_data], "--data", str(root), "--tile", "8", "--epochs", "1"]
    trained(1, line, tmp_path / "run", act=pretrain.act)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["dataset"]["labels"] == {}
