"""``--preset distmis`` is DistMIS's training: every figure that it states, and what the config makes."""

import math
from pathlib import Path

import pytest
import torch

from seqpar.models.build import build_loss, build_network
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.command_line import parse
from seqpar.settings.data_settings import prepare_settings
from seqpar.settings.presets import distmis
from seqpar.training import run_request
from tests.support.folders import nnunet
from tests.support.pages import page, shown_commands


def test_the_figures_that_it_states() -> None:
    config = distmis()
    assert (config.tile, config.batch, config.epochs, config.lr) == ((240, 240, 152), 2, 250, 1e-4)
    assert (config.schedule, config.scale_lr, config.foreground) == ("constant", True, 0)
    assert (config.optimizer, config.fold, config.targets, config.augment) == ("adam", "70:15:15", "sigmoids", "none")
    assert config.mode == "auto", "two ranks take a whole volume each"
    assert config.iterations == 338 // config.batch, "of 484 cases 338 train"
    settings = prepare_settings(config)
    assert (settings.joins, settings.crop_to) == ((("tumour", (1, 2, 3)),), (240, 240, 152))
    assert settings.normalise == "volume"
    check_feasible(config)
    assert (config.clip, config.warmup, config.weight_decay, config.precision) == (0, 0, 0, "fp32"), "Keras's own"
    (first, *_) = make_optimizer(torch.nn.Linear(1, 1), config.optimizer_options).param_groups
    assert first["betas"] == (0.9, 0.999) and not first["amsgrad"]


def test_its_cycles_are_as_the_page_says() -> None:
    config = parse(["--preset", "distmis", "--schedule", "cyclic"], "paper")[1]
    rates = [learning_rate(config.schedule_options, epoch * 169) for epoch in (0, 4, 8, 12)]
    assert rates == pytest.approx([0.25e-4, 1e-4, 0.25e-4, 1e-4], rel=1e-12)
    assert "8 epochs a cycle, from a quarter of `--lr`" in page("explanation/presets-distmis").read_text()


@pytest.mark.parametrize(("flags", "count"), [("", 406_793), ("--network unet-distmis-text", 351_809)])
def test_its_networks_have_as_many_parameters_as_it_says(flags: str, count: int) -> None:
    config = parse(["--preset", "distmis", *flags.split()], "paper")[1]
    net = build_network(config, 4, 1, Group("seq"), device="meta", has_regions=True)
    statistics = sum(b.numel() for name, b in net.named_buffers() if "running" in name)
    total = sum(p.numel() for p in net.parameters()) + statistics * (config.network == "unet-distmis")
    assert total == count


def test_its_norm_and_kernels_begin_as_in_keras() -> None:
    torch.manual_seed(0)
    config = parse(["--preset", "distmis", "--tile", "16", "16", "16", "--crop-to", "16", "16", "16"], "paper")[1]
    net = build_network(config, 4, 1, Group("seq"), device="cpu", has_regions=True)
    norms = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm3d)]
    assert norms and all((norm.momentum, norm.eps) == (pytest.approx(1 - 0.9), 1e-3) for norm in norms)
    kernels = [m.weight.detach().flatten() for m in net.modules() if isinstance(m, torch.nn.Conv3d)]
    spread = float(torch.cat(kernels).std())
    assert spread == pytest.approx(0.05 * 0.8796, rel=0.01), "0.8796: of a normal of 1 cut off at 2"
    for module in net.modules():
        if isinstance(module, torch.nn.ConvTranspose3d):  # Glorot's: 6 over the sum of both fans, under the root
            bound = math.sqrt(6 / (sum(module.weight.shape[:2]) * 27))
            assert 0.95 * bound < float(module.weight.detach().abs().max()) <= bound
        elif isinstance(module, torch.nn.Conv3d):
            assert float(module.weight.detach().abs().max()) <= 0.1, "normal of 0.05, cut off at two of it"


def test_its_loss_is_dice_alone_of_sums_over_the_batch_with_a_hundredth_added() -> None:
    loss = build_loss(distmis(), [(1,)])
    logits = torch.randn(2, 1, 4, 4, 4, dtype=torch.float64)
    label = (torch.rand(2, 4, 4, 4) < torch.tensor([0.05, 0.6]).view(2, 1, 1, 1)).long()
    probability, truth = logits.sigmoid()[:, 0], label.double()
    wanted = 1 - (2 * (probability * truth).sum() + 0.01) / (probability.sum() + truth.sum() + 0.01)
    assert loss(logits, label).item() == pytest.approx(wanted.item(), rel=1e-12)


def test_one_point_of_its_grid_trains_the_network_as_run() -> None:
    grid, small = shown_commands(page("explanation/presets-distmis"), "tune.py --space lr=1e-4,5e-4")
    assert grid.split("--preset")[0] == small.split("--preset")[0]
    flags = grid.split("--space ")[1].split("--")[0].split()
    lists = dict(flag.split("=") for flag in flags)
    assert lists == {
        "lr": "1e-4,5e-4,1e-3,5e-3", "norm": "own,group", "betas": "0.9:0.99,0.9:0.999", "amsgrad": "no,yes",
    }  # fmt: skip
    assert math.prod(len(values.split(",")) for values in lists.values()) == 32
    counts = list[int]()
    for norm in lists["norm"].split(","):
        config = parse(["--preset", "distmis", "--norm", norm], "paper")[1]
        net = build_network(config, 4, 1, Group("seq"), device="meta", has_regions=True)
        statistics = sum(b.numel() for name, b in net.named_buffers() if "running" in name)
        counts.append(sum(p.numel() for p in net.parameters()) + statistics)
    assert counts == [406_793, 404_589], "group norm has no statistics"


def test_its_grid_is_made_of_flags_that_act() -> None:
    line = "--preset distmis --amsgrad --betas 0.9 0.99 --norm group --tile 16 --crop-to 16 16 16"
    config = parse(line.split(), "paper")[1]
    net = build_network(config, 4, 1, Group("seq"), device="cpu", has_regions=True)
    assert {type(m).__name__ for m in net.modules() if "Norm" in type(m).__name__} == {"GroupNorm", "LastAxisNorm"}
    (first, *_) = make_optimizer(net, config.optimizer_options).param_groups
    assert first["amsgrad"] and first["betas"] == (0.9, 0.99)


def test_the_rate_grows_with_the_ranks_and_an_epoch_keeps_its_tiles(tmp_path: Path) -> None:
    root = nnunet(tmp_path / "D", cases=5)
    line = f"--preset debug --batch 2 --lr 0.001 --iterations 10 --scale-lr --data {root}".split()

    def config_on(world: int, *more: str):
        return run_request.read_request([*line, *more], Launcher("alone", world=world)).config

    alone, four = config_on(1), config_on(4)
    assert (alone.lr, alone.iterations) == (0.001, 10) and (four.lr, four.iterations) == (0.004, 2)
    assert config_on(4, "--no-scale-lr").lr == 0.001
    assert config_on(4, "--seqpar", "2").lr == 0.002


def test_a_scaled_run_that_goes_on_keeps_its_rate_on_any_ranks(tmp_path: Path) -> None:
    from seqpar.runs.run_folder import describe_run
    from tests.support.folders import write_json

    line = f"--preset debug --batch 2 --lr 0.001 --iterations 8 --scale-lr --out {tmp_path}".split()
    began = run_request.read_request(line, Launcher("alone", world=4))
    layout = {"data": 4, "global_batches": [8]}
    starts = [{"ranks": 4}, {"ranks": 2}]
    write_json(tmp_path / "config.json", describe_run(began.config, "debug", {}, layout, starts))
    for more in ([], line):
        again = run_request.read_request([*more, "--resume", "--out", str(tmp_path)], Launcher("alone", world=2)).config
        assert (again.lr, again.iterations, again.accumulate) == (0.004, 2, 2)
    with pytest.raises(ValueError, match="--lr: a resumed run keeps what --scale-lr made of it, 0.004"):
        run_request.read_request(["--lr", "0.0007", "--resume", "--out", str(tmp_path)], Launcher("alone"))
    with pytest.raises(ValueError, match="--lr: a resumed run keeps"):  # half of it is no line of the first start
        run_request.read_request(["--lr", "0.002", "--resume", "--out", str(tmp_path)], Launcher("alone"))
    other = ["--no-scale-lr", "--lr", "0.0007", "--resume", "--out", str(tmp_path)]
    assert run_request.read_request(other, Launcher("alone")).config.lr == 0.0007
