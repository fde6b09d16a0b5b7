"""Prediction on several ranks, whole passes and their memory, and the script itself."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqpar.cli import predict
from seqpar.cluster import exit_codes
from seqpar.data.errors import DataError
from seqpar.decoders.modes.named_modes import MODES
from seqpar.models.build import build_network
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.mesh import Group
from seqpar.planner.memory_counter import MemoryCounter
from seqpar.prediction.prediction_memory import footprint
from seqpar.prediction.predictor import PredictionSettings
from seqpar.prediction.run_average import EnsembleMember
from seqpar.runs.trained_run import read_run
from seqpar.tasks.segment import prediction
from tests.support.folders import image_array, save, tree
from tests.support.predictions import RECIPE, ROOT, SMALL, act, make_run, on_ranks, voxels, write_images
from tests.support.training_runs import Launch


@pytest.mark.started
def test_label_files_are_the_same_on_any_number_of_ranks(ranks, images, tmp_path) -> None:
    recipe = replace(RECIPE, spacing=(1.5, 0.8, 1.0))
    for how, its_recipe in (("as they are", RECIPE), ("resampled", recipe)):
        run = make_run(tmp_path / how, its_recipe)
        for window, worlds in (("sliding", ((1, 1), (3, 1))), ("whole", ((1, 1), (2, 2)))):
            files = []
            for world, size in worlds:
                out = tmp_path / f"{how}-{window}-{world}"
                more = ("--window", window, "--probabilities")
                codes = ranks(world, on_ranks, str(run), "-i", str(images), "-o", str(out), *more, seqpar=size)
                assert codes == [0] * world
                files.append(tree(out))
            assert len(files[0]) == 1 + 3 + 6
            if window == "sliding":
                labels = [{name: body for name, body in one.items() if "/" not in name} for one in files]
                assert all(one == labels[0] for one in labels)
            for case, n in itertools.product(range(3), range(2)):
                folders = [tmp_path / f"{how}-{window}-{world}" for world, _ in worlds]
                parts = [voxels(out / "probabilities" / f"c_{case:03d}_label-{n}.nii.gz") for out in folders]
                assert all(np.abs(part - parts[0]).max() < 1e-5 for part in parts)
                ids = [voxels(out / f"c_{case:03d}.nii.gz") for out in folders]
                assert all((one == ids[0])[np.abs(parts[0] - 0.5) > 1e-4].all() for one in ids)


def test_a_size_that_is_not_the_files_is_said_to_come_after_resampling(images, tmp_path, capsys) -> None:
    for folder, recipe, words in (("same", RECIPE, 0), ("finer", replace(RECIPE, spacing=(1.5, 0.8, 1.0)), 3)):
        assert act(tmp_path, make_run(tmp_path / folder, recipe), out=f"{folder}-out") == 0
        said = capsys.readouterr().out
        assert said.count(" voxels after resampling, ") == words and said.count(" windows") == 3, said


def test_a_run_predicts_on_groups_that_cannot_have_its_strategy(ranks, images, tmp_path) -> None:
    """hybrid:2 takes 4 ranks or more: a choice of training that changes no number."""
    run = make_run(tmp_path / "run", config=replace(SMALL, seqpar=4, attention="hybrid:2"))
    written = []
    for world in (1, 2):
        out = tmp_path / str(world)
        codes = ranks(world, on_ranks, str(run), "-i", str(images), "-o", str(out), "--window", "whole")
        assert codes == [0] * world
        written.append(tree(out))
    assert len(written[0]) == 1 + 3 and all(one.keys() == written[0].keys() for one in written)


@pytest.mark.parametrize("window", ["sliding", "whole"])
def test_ranks_that_cannot_cut_the_trained_tile_form_groups_that_can_and_say_so(images, tmp_path, window) -> None:
    run = make_run(tmp_path / "run", config=replace(SMALL, seqpar=4))  # 2 x 2 x 2 tokens
    assert act(tmp_path, run, "--window", window, out="alone") == 0

    def predict_there(arguments: Sequence[str]) -> int:
        return predict.act([*arguments[:-2], "-o", arguments[-1]])  # in place of train's --out

    flags = [str(run), "-i", str(images), "--window", window]
    with Launch(3, flags, tmp_path / "out", act=predict_there) as launch:
        assert launch.wait() == [0] * 3, launch.said()
    assert "--seqpar 1: 3 ranks cannot share the trained tile, so 3 groups of 1 rank predict" in launch.said()
    for name in ("c_000.nii.gz", "c_001.nii.gz", "c_002.nii.gz"):
        assert (voxels(tmp_path / "out" / name) == voxels(tmp_path / "alone" / name)).mean() > 1 - 1e-3
    with Launch(3, [*flags, "--seqpar", "3"], tmp_path / "refused", act=predict_there) as launch:
        assert set(launch.wait()) == {2}
    assert "--seqpar 3 cannot cut the token grid (2, 2, 2) into boxes: use a smaller --seqpar\n" in launch.said()
    assert not (tmp_path / "refused").exists()
    member = EnsembleMember(read_run(run), PredictionSettings(window), ())
    fitting = (predict.fitting_seqpar([member], world, 1e12)[0] for world in (1, 2, 4, 6, 12, 16))
    assert list(fitting) == ([1, 2, 4, 2, 4, 4] if window == "sliding" else [1, 2, 4, 2, 4, 8])
    edited = replace(member.run, config=replace(member.run.config, patch=(5, 5, 5)))
    with pytest.raises(DataError, match=r"run/config.json: has settings that exclude each other \("):
        predict.fitting_seqpar([replace(member, run=edited)], 2, 1e12)


def test_more_ranks_than_tokens_are_refused_before_they_start(images, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(predict, "start_missing_ranks", lambda *_: 0)
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run, "--seqpar", "8") == 0, "it would start them"
    with pytest.raises(ValueError, match="num_ranks=9 is more than the 8 tokens"):
        act(tmp_path, run, "--seqpar", "9")


def test_a_whole_pass_says_what_it_takes(images, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run, "--window", "whole") == 0
    assert capsys.readouterr().out.count("MiB on each rank") == 3


@pytest.fixture(scope="module")
def predicted_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a run, and what one process predicts in a whole pass."""
    place = tmp_path_factory.mktemp("alone")
    write_images(place / "images")
    assert act(place, make_run(place / "run"), "--window", "whole", out="alone") == 0
    return place


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_pass_of_every_mode_ends_alike_on_two_ranks(mode: str, ranks, predicted_alone, tmp_path, capfd) -> None:
    """What one rank cannot do, all say together; the exact modes write what one process does."""
    run = predicted_alone / "run"
    more = ("-i", str(predicted_alone / "images"), "--window", "whole")
    capfd.readouterr()
    out = tmp_path / "out"
    assert ranks(2, on_ranks, str(run), *more, "-o", str(out), "--mode", mode, timeout=40) == [0, 0]
    assert capfd.readouterr().out.count("MiB on each rank") == 3
    for name in ("c_000.nii.gz", "c_001.nii.gz", "c_002.nii.gz"):
        same = voxels(out / name) == voxels(predicted_alone / "alone" / name)
        assert mode == "nogather" or same.mean() > 1 - 1e-3


def test_a_volume_that_no_whole_pass_can_take_is_a_fault_on_all_ranks(ranks, images, tmp_path, capfd) -> None:
    run = make_run(tmp_path / "run")
    save(images / "c_003_0000.nii.gz", image_array(3, (14, 29, 10)))

    def count(net: SegmentationNet, shape: Any, *more: Any) -> Any:
        if shape[1] > 20:
            raise ValueError("too large")
        return footprint(net, shape, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "footprint", count)
        arguments = (str(run), "-i", str(images), "-o", str(tmp_path / "out"), "--window", "whole")
        assert ranks(2, on_ranks, *arguments, timeout=40) == [exit_codes.DATA] * 2
    assert capfd.readouterr().err.count("error: c_003") == 1
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 3


def test_memory_is_counted_not_guessed() -> None:
    """What is alive at once: on real tensors and on tensors without data the same, in a network as in a sum."""
    x = torch.ones(1000)
    with MemoryCounter() as alive:
        y = x + 1
        z = (y * 2).sum()
        del y
        z = z + x
    assert alive.most == 2 * x.nbytes + 4 and alive.now == x.nbytes
    net = build_network(SMALL, 1, 2, Group("seq")).eval()
    large = footprint(net, (30, 32, 32), 2, 1)
    with torch.no_grad(), MemoryCounter() as alive:
        part, layout = net.encoder.place(torch.randn(1, 1, 30, 32, 32))
        alive.peaks.clear()
        net(part, layout)
    assert max(large.encoder, large.decoder) == pytest.approx(alive.most, rel=0.02)
    small = footprint(net, (16,) * 3, 2, 1)
    assert 7 < large.decoder / small.decoder < 9 and 7 < large.encoder / small.encoder < 9
    assert large.weights == small.weights == sum(p.nbytes for p in net.parameters())
    assert all(not p.is_meta for p in net.parameters())


@pytest.mark.started
def test_the_script_runs_alone_from_any_folder(images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    line = [sys.executable, ROOT / "launch" / "predict.py", run, "-i", images, "-o", "out", "--mirror", "W", "H"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "3 cases" in done.stdout and len(list((tmp_path / "out").glob("*.nii.gz"))) == 3
