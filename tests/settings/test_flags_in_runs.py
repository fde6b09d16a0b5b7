"""Flags whose effect shows in data, in a step, in weights or in the journal."""

import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqpar.models.build import build_network
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.parallel.rendezvous import pick_device
from seqpar.planner import memory_check
from seqpar.planner.feasibility import check_feasible
from seqpar.runs.journal import read_metrics
from seqpar.tasks.lookup import task_of
from seqpar.tasks.segment.data import open_data
from seqpar.training import setup
from seqpar.training import trainer as training
from tests.support.class_folders import class_folder
from tests.support.configs import NoStop, config_of, trainer_of
from tests.support.folders import nnunet, write_json
from tests.support.training_runs import trained


def test_full_augmentation_keeps_zero_background_where_scores_are_of_what_is_not_zero(flags, tmp_path):
    def kept(*more: str) -> bool:
        config = config_of(flags, *more)
        return open_data(config, True).tiles.augmentation.keep_background

    assert kept("--augment", "full") and not kept("--augment", "light")
    ct = nnunet(tmp_path / "D", cases=5, channels=("CT",))
    assert not kept("--augment", "full", "--data", str(ct), "--cache", str(tmp_path / "c"))


def test_a_synthesis_that_the_labels_do_not_allow_is_refused_before_ranks_meet(flags, tmp_path):
    other = nnunet(tmp_path / "D", cases=5, labels={"background": 0, "hippocampus": 1})
    config = config_of([*flags, "--data", str(other), "--cache", str(tmp_path / "c"), "--synthesis", "0.5"])
    with pytest.raises(ValueError, match="--synthesis 0.5: the labels of D"):
        open_data(config, True)


def test_what_a_data_sets_description_does_not_allow_is_refused_before_it_is_prepared(tmp_path):
    data, cache = nnunet(tmp_path / "D", cases=5), tmp_path / "cache"
    labelled = class_folder(tmp_path / "classes", 10)
    for line, error in {
        f"--data {data} --fold 7": "--fold 7: the folds are 0 to 4",
        f"--data {data} --class-weights 1 2 3": "--class-weights 1 2 3: 2 are needed, for background, tumour",
        f"--data {data} --class-weights 1 2 --targets sigmoids": "1 are needed, for tumour",
        f"--data {data} --join-labels a=1 --class-weights 1": "2 are needed, for background, a",
        f"--data {data} --task pretrain --fold 7": "--fold 7: the folds are 0 to 4",
        f"--data {labelled} --task classify --fold 7": "--fold 7: the folds are 0 to 4",
        f"--data {labelled} --task classify --class-weights 1": "2 are needed, for healthy, ill",
    }.items():
        config = config_of([*line.split(), "--cache", str(cache)])
        with pytest.raises(ValueError, match=error):
            task_of(config).open_data(config, True)
        with pytest.raises(ValueError, match=error):  # of a dry run
            task_of(config).describe(task_of(config).read_headers(config), config)
    assert not cache.exists()


def test_a_data_sets_own_folds_may_be_more_than_five(tmp_path):
    root, names = nnunet(tmp_path / "D", cases=7), [f"c_{n:03d}" for n in range(7)]
    splits = [{"train": [name for name in names if name != held_out], "val": [held_out]} for held_out in names]
    write_json(root / "splits_final.json", splits)
    config = config_of(["--data", str(root), "--fold", "6"])
    check_feasible(config)
    assert open_data(config, True).held_out_ids == ("c_006",)
    with pytest.raises(ValueError, match="--fold 7: the folds are 0 to 6"):
        open_data(replace(config, fold="7"), True)


def test_clipping_bounds_what_the_optimizer_sees(flags, tmp_path, alone):
    from seqpar.data.sampling.loader import Loader

    norms = []
    for clip in ("0", "0.001"):
        trainer = trainer_of(config_of(flags, "--clip", clip), alone, tmp_path)
        net = trainer.net
        trainer.optimizer.step = lambda: norms.append(
            math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters()))
        )
        tiles = trainer.data.tiles
        with Loader(tiles, net.encoder.layout, alone, batch=2, steps=range(1), workers=0) as loader:
            make_row, _ = trainer._step(loader, NoStop())
        assert make_row()["grad_norm"] > 0.01
    assert norms[0] > 0.01 and norms[1] == pytest.approx(0.001, rel=1e-2)


def test_validation_comes_as_often_as_told(flags, tmp_path, alone, monkeypatch):
    steps = []
    trainer = trainer_of(config_of(flags, *["--val-every", "2", "--epochs", "5"]), alone, tmp_path)
    trainer.journal = training.Journal(tmp_path, False, 0)
    monkeypatch.setattr(trainer.validation, "run", lambda *of, **more: steps.append(trainer.progress.step))
    for step in range(1, 11):
        trainer.progress.step = step
        if step % 2 == 0:
            trainer._end_epoch(NoStop())
    assert steps == [4, 8, 10]


@pytest.mark.parametrize("origin", ["seqpar", "MONAI"])
def test_weights_are_taken(flags, tmp_path, origin):
    from seqpar import export_monai, write_weights
    from seqpar.weights.pretrained import load_pretrained

    more = ["--decoder", "unetr", "--patch", "16", "--depth", "12"] if origin == "MONAI" else []
    more += ["--tile", "32"] if origin == "MONAI" else []
    source = build_network(config_of(flags, *more, "--seed", "9"), 1, 2, Group("seq"))
    file = tmp_path / "weights"
    if origin == "seqpar":
        write_weights(file, source)
    else:
        torch.save({"state_dict": export_monai(source)}, file)
    config = config_of(flags, *more, "--weights", str(file))
    net = build_network(config, 1, 2, Group("seq"))
    sentence = load_pretrained(net, config)
    assert f"({origin})" in sentence and ("--heads 2 are taken" in sentence) == (origin == "MONAI")
    for name, tensor in source.encoder.state_dict().items():
        assert torch.equal(net.encoder.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="do not fit the encoder.*--depth"):
        load_pretrained(build_network(replace(config, embed_dim=24), 1, 2, Group("seq")), replace(config, embed_dim=24))
    if origin == "MONAI":
        torch.save({"state_dict": export_monai(source), "hyper_parameters": {"num_heads": 4}}, file)
        with pytest.raises(ValueError, match="trained with 4 heads: use --heads 4"):
            load_pretrained(net, config)


def test_the_device_is_the_told_one():
    assert pick_device(Launcher("alone"), "cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="use device='cpu'"):
            pick_device(Launcher("alone"), "cuda")


def test_ranks_wait_for_the_phantom_that_the_first_one_makes(tmp_path, monkeypatch):
    """In a fresh cache the others ask before anything is there."""
    from seqpar.data.phantom import builtin

    def make(out, cases, settings, workers, progress):
        time.sleep(1)
        (out / "made").touch()
        progress(cases, cases)

    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "write_phantom", make)
    config = config_of([])
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        folder = builtin.phantom(config.phantoms, False)
        os._exit(0 if (folder / "made").exists() else 1)
    time.sleep(0.5)
    builtin.phantom(config.phantoms, True)
    _, code = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(code) == 0


RECIPES = {  # published, in small: of one output, of lesions in an organ, of a curriculum
    "distmis": "--join-labels tumour=1,2 --crop-to 16 16 16 --tile 16",
    "hou": "--tile 16 --global-batch 2 --batch 2",
    "lamp": "--curriculum 32:1:2,whole:1:2 --grad-checkpoint none",
}


def plan_memory(rank: int) -> None:
    """Lets a run plan its memory first, as all but those of tests do."""
    setup.refuse_beyond_free = memory_check.refuse_beyond_free


@pytest.mark.parametrize("preset", RECIPES)
def test_a_published_recipe_trains_from_the_command_line_to_a_validation(preset: str, tmp_path: Path) -> None:
    data = nnunet(tmp_path / "D", cases=8, labels={"background": 0, "liver": 1, "tumour": 2})
    line = f"--preset {preset} --features 2 --iterations 1 --workers 0 --device cpu {RECIPES[preset]} --data {data}"
    line += "" if preset == "lamp" else " --epochs 1"
    trained(1, [*line.split(), "--cache", str(tmp_path / "cache")], tmp_path / "out", hook=plan_memory)
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["kind"] for row in rows if row["kind"] in ("train", "val")][-2:] == ["train", "val"]
