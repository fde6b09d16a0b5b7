"""Networks without tokens behind the modes: every exact mode and split equals one process, over several steps too."""

import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from seqpar.decoders.unets.unet_blocks import ConvBlock, Up, VoxelDropout
from seqpar.losses import DeepSupervision, DiceCE
from seqpar.models.build import NETWORKS, build_network, build_on_meta, family_of, layout_of
from seqpar.models.classifier_families import CLASSIFIERS
from seqpar.models.pipelined import PartOfBatch
from seqpar.models.pretraining_family import PRETRAINED
from seqpar.models.unet_families import format_stages, parse_stages
from seqpar.optimization.optimizers import make_optimizer
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.feasibility import check_feasible
from seqpar.planner.memory_counter import saved_bytes
from seqpar.prediction.sliding_window import padded_shape
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.training.run_request import read_request
from seqpar.vit.dropout import DropoutKey
from tests.support.boxes import numbers
from tests.support.marks import long_case
from tests.support.messages import refused_with
from tests.support.nets import FEW, Outcome, train_net
from tests.support.ranks import relative

CHANNELS, CLASSES = 2, 3
STAGES = "133:111 333:122 333:222 333:211"
DEEP = Config(
    network="nnunet-plain", stages=STAGES, deep_supervision=True, features=2, tile=(16, 8, 12), precision="fp64",
    optimizer="sgd", lr=1e-2, betas=(0.99, 0.0), weight_decay=1e-3,
)  # fmt: skip
RESIDUAL = replace(DEEP, network="nnunet-resenc", deep_supervision=False)
BATCH_NORM = replace(DEEP, network="unet-hou", stages="", deep_supervision=False)
EXACT = [(mode, split) for mode in ("gather", "halo", "swap") for split in ("spatial", "ordered")] + [
    ("auto", "spatial")
]


def train(group: Group, config: Config, samples: int, steps: int) -> Outcome:
    """Returns a rank's outcome; loss and gradients are averaged over the group."""
    net = build_network(config, CHANNELS, CLASSES, group).double()
    with torch.no_grad():  # norms that begin at 0 would hide what lies behind them
        for number, p in enumerate(net.parameters()):
            p += 0.1 * numbers(1000 + number, *p.shape)
    image = numbers(1, samples, CHANNELS, *config.tile)
    label = torch.randint(CLASSES, (samples, *config.tile), generator=torch.Generator().manual_seed(1))
    return train_net(net, (image, label), make_optimizer(net, config.optimizer_options), steps, config.dropout > 0)


@cache
def one_process(config: Config, samples: int, steps: int) -> Outcome:
    return train(Group("seq"), config, samples, steps)


def train_all(mesh: Mesh, cases: list[tuple[Config, int, int]]) -> list[Outcome]:
    return [train(mesh.seq, replace(config, seqpar=mesh.seq.size), *more) for config, *more in cases]


def gaps(got: Outcome, want: Outcome) -> dict[str, float]:
    """Returns relative differences; of a bias before a norm, whose gradient is rounding, to the largest gradient."""
    largest = max(float(grad.abs().max()) for grad in want.grads.values())

    def gap(a: Tensor, b: Tensor, unit: float) -> float:
        size = float(b.abs().max())
        return float((a - b).abs().max()) / (size if size > 1e-10 * unit else unit)

    return {
        "logits": float((got.logits - want.logits[got.voxels]).abs().max() / want.logits.abs().max()),
        "loss": relative(got.loss, want.loss),
        "gradients": max(gap(got.grads[name], want.grads[name], largest) for name in want.grads),
        "after the steps": max(gap(got.state[name], want.state[name], 1.0) for name in want.state),
    }


@pytest.mark.parametrize(("world", "batch"), [(2, 2), long_case(4, 4)])
def test_every_exact_mode_and_split_equals_one_process(world: int, batch: int, ranks: Callable[..., list]) -> None:
    """Also after four steps of SGD with momentum 0.99 in halo (in swap and on 4 ranks two), of every norm and block."""
    many = 4 if world == 2 else 2
    steps = {("halo", "spatial"): many, ("swap", "ordered"): 2}
    exact = EXACT if world == 2 else FEW
    cases = [(replace(DEEP, mode=mode, split=split), batch, steps.get((mode, split), 1)) for mode, split in exact]
    cases += [(replace(RESIDUAL, mode="halo"), 1, many), (replace(BATCH_NORM, mode="halo"), batch, many)]
    cases += [(replace(BATCH_NORM, mode="swap"), batch, 2)]
    wanted = [one_process(replace(case[0], mode="gather", split="spatial"), *case[1:]) for case in cases]
    every_rank = ranks(world, train_all, cases, timeout=240)
    for number, (case, want) in enumerate(zip(cases, wanted)):
        for outcome in (outcomes[number] for outcomes in every_rank):
            differences = gaps(outcome, want)
            assert differences.pop("after the steps") < 1e-10, case
            assert max(differences.values()) < 1e-12, (case, differences)
        seen = torch.cat([outcomes[number].voxels for outcomes in every_rank]).unique()
        assert torch.equal(seen, torch.arange(len(want.logits))), "some voxels have no logits"


@pytest.mark.started
def test_dropout_draws_by_the_voxels_of_the_whole_volume(ranks: Callable[..., list]) -> None:
    """In boxes, whole on each rank, of whole samples, and where cells are computed again."""
    config = replace(BATCH_NORM, dropout=0.5)
    cases = [(replace(config, mode=mode, grad_checkpoint=again), 2, 2) for mode in ("gather", "halo", "swap")
             for again in ("none", "full")]  # fmt: skip
    want = one_process(config, 2, 2)
    for outcomes in ranks(2, train_all, cases, timeout=240):
        for case, outcome in zip(cases, outcomes):
            differences = gaps(outcome, want)
            assert differences.pop("after the steps") < 1e-10, case
            assert max(differences.values()) < 1e-12, (case, differences)
    assert gaps(one_process(BATCH_NORM, 2, 2), want)["logits"] > 1e-2, "the control: without dropout"


def test_dropout_drops_its_share_and_enlarges_the_rest() -> None:
    net = build_network(replace(BATCH_NORM, dropout=0.25), CHANNELS, CLASSES, Group("seq")).double()
    drops = [(name, m) for name, m in net.named_modules() if isinstance(m, VoxelDropout)]
    cells = [name for name, m in net.unet.cells.items() if isinstance(m, (ConvBlock, Up))]
    assert [name.split(".")[2] for name, _ in drops] == cells[1:], "all but the first convolution"
    x, key = torch.ones(3, 8, 12, 10, 14, dtype=torch.float64), DropoutKey(1, 2, (0, 1, 5))
    image, pair = numbers(1, 2, CHANNELS, *BATCH_NORM.tile), DropoutKey(1, 2, (3, 4))
    staged, micro = net.staged(), PartOfBatch(net.layout.cut(image, 0), net.layout, pair)
    values = {-1: staged.image(micro)}
    for number, sources in enumerate(staged.takes):  # as the stages of a pipe run them
        values[number] = staged.run_cell(number, [values[source] for source in sources], micro)
    assert torch.equal(values[staged.outputs[0]][0], net(micro.part, None, pair))
    assert not torch.equal(values[staged.outputs[0]][0], net(micro.part))
    _, drop = drops[0]
    drop.key = key.at(4)
    kept = drop(x)
    assert set(kept.unique().tolist()) == {0.0, 1 / 0.75}
    for rows in (kept.flatten(2).transpose(0, 1).flatten(1), kept.flatten(1), kept.movedim(2, 0).flatten(1)):
        shares = (rows == 0).double().mean(1)
        assert (shares - 0.25).abs().max() < 5 * (0.25 * 0.75 / rows.shape[1]) ** 0.5, "for each channel, sample, row"
    drop.key = key.at(5)
    assert not torch.equal(drop(x), kept)
    drop.key = None
    assert drop(x) is x and net.eval() and drop(x) is x


def test_nogather_is_another_function_with_equal_statistics_on_all_ranks(ranks: Callable[..., list]) -> None:
    config = replace(BATCH_NORM, mode="nogather")
    first, second = (outcomes[0] for outcomes in ranks(2, train_all, [(config, 1, 2)]))
    want = one_process(replace(config, mode="gather"), 1, 2)
    assert min(gaps(first, want)["logits"], gaps(second, want)["logits"]) > 1e-3
    statistics = [name for name in want.state if "running" in name]
    assert statistics and all(torch.equal(first.state[name], second.state[name]) for name in statistics)


def bytes_held(mesh: Mesh) -> int:
    config = Config(network="nnunet-plain", tile=(32, 32, 32), features=4, mode="halo", seqpar=mesh.seq.size)
    net = build_network(config, 1, 2, mesh.seq)
    label = torch.zeros(1, 32, 32, 32, dtype=torch.long)
    part, target = (net.layout.cut(x, mesh.seq.index) for x in (torch.randn(1, 1, 32, 32, 32), label))
    return saved_bytes(net, lambda: DiceCE()(net(part), net.arrange(target), net.mode.loss_groups(None, 1)))


def test_a_u_net_in_halo_holds_its_share(ranks: Callable[..., list]) -> None:
    (one,) = ranks(1, bytes_held)
    for world in (2, 4):
        assert max(ranks(world, bytes_held)) <= (1 / world + 0.10) * one


def test_a_whole_image_passes_alone_whatever_its_size() -> None:
    net = build_network(RESIDUAL, CHANNELS, CLASSES, Group("seq")).double().eval()
    image = numbers(1, 1, CHANNELS, 19, 11, 13)
    padded = torch.nn.functional.pad(image, (0, 3, 0, 1, 0, 1))
    with torch.no_grad():
        assert net(image).shape == (1, CLASSES, 19, 11, 13)
        assert torch.equal(net(image), net.unet(padded)[..., :19, :11, :13])


def test_levels_are_weighted_by_halves_and_see_the_label_in_the_middle() -> None:
    label = torch.arange(2 * 4 * 4 * 4).view(2, 4, 4, 4) % 3
    fine, coarse = numbers(1, 2, 3, 4, 4, 4), numbers(2, 2, 3, 2, 4, 2)
    loss = DeepSupervision(DiceCE(), [(1, 1, 1), (2, 1, 2)])
    want = (2 * DiceCE()(fine, label) + DiceCE()(coarse, label[:, 1::2, :, 1::2])) / 3
    assert relative(loss([fine, coarse], label), want) < 1e-15
    parts = loss.parts([fine, coarse], label)
    assert relative(parts.total, parts.terms["dice"] + parts.terms["ce"]) < 1e-15
    with pytest.raises(ValueError, match="expected logits of 2 levels, got 1"):
        loss([fine], label)


@pytest.mark.parametrize(
    ("network", "more", "unit"),
    [
        ("vit", {"patch": 8}, (8, 8, 8)),
        ("nnunet-plain", {}, (8, 8, 8)),
        ("nnunet-resenc", {"stages": STAGES}, (4, 4, 4)),
        ("unet-hou", {}, (4, 4, 4)),
        ("unet-hou", {"tile": (96, 64, 64)}, (8, 8, 8)),
        ("unet-distmis", {}, (8, 8, 32)),
        ("unet-distmis-text", {}, (8, 8, 8)),
        ("unet-lamp", {}, (32, 32, 32)),
        ("se-unet-lamp", {"features": 4}, (32, 32, 32)),
        ("mednext-s-k5", {"features": 4}, (16, 16, 16)),
    ],
)
def test_a_layouts_patch_is_what_the_network_cannot_cut(network: str, more: dict, unit: tuple) -> None:
    before = torch.get_rng_state()
    config = Config(network=network, **{"tile": (32, 32, 32), **more})
    assert layout_of(config).patch == unit
    assert torch.equal(torch.get_rng_state(), before)
    assert family_of(config).describe(config) and family_of(config).describe_tile(config)


def test_the_last_axis_of_distmis_is_not_cut_on_eight_ranks() -> None:
    layout = layout_of(Config(network="unet-distmis", tile=(32, 32, 16), seqpar=8, mode="halo"))
    assert all(box[2] == (0, 1) for box in map(layout.box, range(8)))


def test_a_whole_volume_with_another_last_side_is_refused_by_distmis_alone() -> None:
    for network, refused in (("unet-distmis", True), ("unet-distmis-text", False)):
        net = build_network(Config(network=network, tile=(16, 16, 16)), 1, 2, Group("seq"), "meta")
        net.refuse_whole(padded_shape((20, 12, 9), net.layout))
        with pytest.raises(ValueError, match="24x16x32 .* is always 16: use sliding") if refused else nullcontext():
            net.refuse_whole(padded_shape((20, 12, 17), net.layout))


BAD = {
    "--network unet": "choose one of vit, nnunet-plain",
    "--network nnunet-plain --tile 36": "--tile 32 32 32",
    "--network nnunet-plain --tile 7": "--tile 8 or more",
    "--network unet-lamp --tile 48": "--tile 64 64 64",
    "--network unet-distmis --tile 32 32 20": "multiple of 8",
    "--network nnunet-plain --stages 333": "such as '133:111",
    "--network nnunet-plain --stages 333:111,333-222": "such as '133:111",
    "--network nnunet-plain --stages '233:111 333:222'": "odd",
    "--network nnunet-plain --patch 4": "--patch would do nothing: --network nnunet-plain does not have it, only vit",
    "--network nnunet-plain --attention ulysses": "--attention would do nothing",
    "--network nnunet-plain --grad-checkpoint attention": "--grad-checkpoint attention: .*choose none or full",
    "--network unet-lamp --deep-supervision": "--deep-supervision would do nothing",
    "--features 9": "--features would do nothing: --network vit",
    "--network nnunet-plain --seqpar 128": "--seqpar 64 or less",
    "--network nnunet-plain --mode swap --seqpar 2 --batch 3": "use --batch 2 or 4",
}


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_work_is_refused_where_it_was_typed(text: str) -> None:
    with refused_with(BAD[text]):
        _, config, names = parse(shlex.split(text), "debug")
        refuse_settings_without_effect(config, names)
        check_feasible(replace(config, batch=config.batch or 1))


def test_batch_norm_of_a_single_value_is_refused_with_what_is_needed() -> None:
    line = "--preset debug --device cpu --network unet-lamp --features 2"
    words = "leaves one value of each channel in the coarsest stage of unet-lamp.*: use --batch 2, or a larger --tile"
    alone, two = Launcher("alone"), Launcher("test", 0, 2)
    with pytest.raises(ValueError, match=f"--tile 32 with --batch 1 {words}"):
        read_request([*line.split(), "--batch", "1"], alone)
    with pytest.raises(ValueError, match=f"lesson of tile 32x32x32: --tile 32 with --batch 1 {words}"):
        read_request([*line.split(), "--curriculum", "64:1:1,32:1:1"], alone)
    for launcher, more in ((alone, "--batch 2"), (alone, "--batch 1 --tile 64 32 32"), (two, "--batch 1")):
        assert read_request([*line.split(), *more.split()], launcher).config.network == "unet-lamp"


ALL = {"segment": NETWORKS, "classify": CLASSIFIERS, "pretrain": PRETRAINED}


@pytest.mark.parametrize(("task", "network"), [(task, name) for task, networks in ALL.items() for name in networks])
def test_a_family_knows_whether_its_network_has_batch_norm(task: str, network: str) -> None:
    small = Config(task=task, network=network, tile=(64, 64, 64), patch=(8, 8, 8), embed_dim=12, heads=2, depth=1)
    norms = ("own", "batch", "instance") if task == "segment" and network != "vit" else ("own",)
    for norm in norms:
        features = {"vit": 0, "resattnet18-text": 8, "resattnet34-text": 8}.get(network, 2)
        config = replace(small, norm=norm, features=features)
        modules = build_on_meta(config, Group("seq")).modules()
        found = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules)
        assert family_of(config).has_batch_norm(config) == found, config


def test_what_a_preset_sets_is_ignored_where_the_network_does_not_know_it() -> None:
    for preset in ("debug", "laptop", "paper", "modern"):
        _, config, names = parse(["--preset", preset, "--network", "nnunet-resenc"], "debug")
        refuse_settings_without_effect(config, names)
        check_feasible(replace(config, batch=1))


def test_stages_are_spelled_as_they_are_read() -> None:
    assert format_stages(parse_stages(STAGES)) == STAGES


def test_every_network_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "u-nets.md").read_text()
    assert all(f"| `{name}` |" in page for name in NETWORKS if name != "vit")
