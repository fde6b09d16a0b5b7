"""``--preset paper`` is the paper: every figure that it states, in the config and in what the config makes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from seqpar.data.formats.splits import split
from seqpar.models.build import build_loss, build_network
from seqpar.models.transformer_families import FOREGROUND
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group
from seqpar.planner.batch_size import choose_batch
from seqpar.planner.feasibility import check_feasible
from seqpar.runs.run_status import StatusFile
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS, paper
from seqpar.tasks.segment.data import open_data
from seqpar.training.run_request import read_request
from seqpar.training.setup import make_trainer
from tests.support.configs import net_of, trainer_of
from tests.support.folders import NEW, brats
from tests.support.messages import refused_with
from tests.support.ranks import relative

NO_BOXES = {(96, 16, 4), (96, 16, 8), (96, 8, 8)}  # side, patch, ranks whose ordered chunks are no boxes
TINY = dict(depth=1, embed_dim=12, heads=2, decoder_width=4, tile=(8, 8, 8), patch=4, batch=1, workers=0, device="cpu")


def small(**more: Any) -> Config:
    """Returns the paper's settings with a tiny network."""
    return replace(paper(), **TINY, **more)


@pytest.fixture(scope="module")
def brains(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("brats")
    brats(root / "data", [f"BraTS-GLI-0000{n}-000" for n in range(5)], NEW, "-", (1, 2, 3))
    return str(root / "data"), str(root / "cache")


def test_the_figures_that_it_states() -> None:
    config = paper()
    assert (config.depth, config.embed_dim, config.heads) == (12, 768, 12)
    assert (config.tile, config.patch, config.precision) == ((96, 96, 96), (16, 16, 16), "fp32")
    assert (config.optimizer, config.lr, config.weight_decay) == ("adam", 1e-4, 0)
    assert (config.augment, config.interpolation) == ("paper", "cubic"), "as in batchgenerators' example of brains"
    assert (config.schedule, config.warmup, config.iterations, config.fold) == ("cosine", 0, 50, "90:10")
    assert (config.mode, config.attention, config.split, config.positions) == (
        "gather", "gather-kv", "spatial", "learned",
    )  # fmt: skip
    assert (config.decoder, config.decoder_width) == ("plain", 128)
    assert (config.loss, config.dice, config.loss_weights, config.batch_dice) == ("dice-ce", "squared", (), False)
    assert (config.targets, config.foreground, config.output_bias) == ("labels", 0.0, False)
    assert config.loss_terms == ("dice", "ce")
    (first, *_) = make_optimizer(net_of(small()), small().optimizer_options).param_groups
    taken = (config.epochs, config.dropout, config.mlp, config.mlp_ratio, config.qkv_bias, config.val_overlap)
    assert taken == (400, 0, "gelu", 4, True, 0.5) and first["betas"] == (0.9, 0.999), "what it leaves open"
    assert (config.clip, config.accumulate, config.drop_path, config.layer_scale) == (0, 1, 0, 0), "nothing of ours"
    assert type(make_optimizer(net_of(small()), small().optimizer_options)) is torch.optim.Adam


@pytest.mark.parametrize("patch", [16, 8, 4])
@pytest.mark.parametrize("side", [96, 128])
def test_its_tiles_and_patches_can_run_on_its_groups(side: int, patch: int) -> None:
    config = replace(paper(), tile=(side,) * 3, patch=patch, depth=1, batch=1)
    for seqpar in (1, 2, 4, 8):
        for mode, order in (("gather", "spatial"), ("gather", "ordered"), ("nogather", "spatial")):
            check_feasible(replace(config, seqpar=seqpar, mode=mode, split=order))
        both = replace(config, seqpar=seqpar, mode="nogather", split="ordered")
        if (side, patch, seqpar) in NO_BOXES:
            with refused_with("needs boxes, but --split ordered cuts .*: use --split spatial"):
                check_feasible(both)
        else:
            check_feasible(both)


def test_its_batches_are_written_out() -> None:
    """32 in the base case, 16 at tile 128, 1 at patch 4 on groups of 4; another network's follows from memory."""
    assert [choose_batch(replace(paper(), seqpar=size)).batch for size in (1, 2, 4, 8)] == [32] * 4
    assert choose_batch(replace(paper(), tile=(128, 128, 128))).batch == 16
    assert choose_batch(replace(paper(), mode="nogather", tile=(128, 128, 128), seqpar=2)).batch == 16
    assert choose_batch(replace(paper(), patch=4, seqpar=4)).batch == 1
    assert choose_batch(replace(paper(), patch=4, seqpar=4, precision="bf16")).batch > 1


def test_the_rate_is_the_cosine_from_the_first_step_to_the_last() -> None:
    config = replace(paper(), epochs=1, iterations=5)
    rates = [learning_rate(config.schedule_options, step) for step in range(5)]
    assert rates == pytest.approx([1e-4, 9.045085e-5, 6.545085e-5, 3.454915e-5, 9.54915e-6], rel=1e-6)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=1e-4)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    for rate in rates:
        assert rate == pytest.approx(torchs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        torchs.step()


class Cases:
    splits = ()

    def __init__(self, count: int) -> None:
        self.ids = tuple(f"c{n:04d}" for n in range(count))


@pytest.mark.parametrize(("count", "held_out"), [(10, 1), (24, 2), (60, 6), (484, 48), (1250, 125), (1251, 125)])
def test_a_tenth_of_the_cases_is_held_out(count: int, held_out: int) -> None:
    cases = Cases(count)
    train, others = split(cases, "90:10")
    assert (len(train), len(others)) == (count - held_out, held_out)
    assert sorted([*train, *others]) == list(cases.ids)
    assert split(cases, "90:10") == (train, others)


def test_exclusive_labels_are_learned_by_a_softmax_and_tiles_are_drawn_anywhere(brains, alone, tmp_path: Path) -> None:
    data, cache = brains
    config = small(data=data, cache=cache)
    labels = open_data(config, True)
    assert labels.output_names == ("background", "NCR", "ED", "ET") and labels.regions == ()
    assert labels.tiles.foreground == 0
    regions = open_data(replace(config, targets="regions"), True)
    assert regions.output_names == ("WT", "TC", "ET") and len(regions.regions) == 3
    trainer = trainer_of(config, alone, tmp_path)
    assert trainer.net.decoder.classes.weight.shape[0] == 4 and trainer.loss.regions == ()
    assert {"NCR", "ED", "ET", "WT", "TC"} >= trainer.data.classes.keys() >= {"WT", "TC", "ET"}, "scores are of both"


def test_what_the_data_leave_without_effect_is_said(brains, flags, alone, tmp_path: Path, capsys) -> None:
    data, cache = brains
    tiny = ["--preset", "debug", "--depth", "1", "--embed-dim", "12", "--heads", "2", "--tile", "8", "--device", "cpu"]

    def said(*more: str) -> list[str]:
        asked = read_request([*tiny, *more], Launcher("test"))
        capsys.readouterr()
        make_trainer(asked, alone, open_data(asked.config, True), StatusFile(tmp_path))
        return [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]

    regions, labels = ["--data", data, "--cache", cache], flags[flags.index("--data") :][:4]
    assert said(*regions, "--dice-background") == [
        "--dice-background: no effect because the outputs are regions, without a background"
    ]
    assert said(*labels, "--targets", "labels") == ["--targets labels: no effect because the data declare no regions"]
    assert said(*labels, "--targets", "sigmoids") == [], "outputs and loss are others"
    assert said(*regions, "--targets", "labels", "--dice-background") == said(*labels, "--dice-background") == []


def test_its_loss_is_v_nets_dice_of_all_classes_and_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, 4, 3, generator=generator, dtype=torch.float64)
    label = torch.randint(0, 4, (2, 5, 4, 3), generator=generator)
    probability, truth = logits.softmax(1), F.one_hot(label, 4).movedim(-1, 1).double()
    sums = lambda x: x.flatten(2).sum(2)  # noqa: E731
    dice = (2 * sums(probability * truth) + 1e-5) / (sums(probability**2) + sums(truth**2) + 1e-5)
    want = (1 - dice.mean(), F.cross_entropy(logits, label))
    parts = build_loss(paper()).parts(logits, label)
    assert relative(parts.terms["dice"], want[0]) < 1e-13 and relative(parts.terms["ce"], want[1]) < 1e-13
    assert relative(parts.total, sum(want)) < 1e-13
    weighted = build_loss(replace(paper(), loss_weights=(0.9, 0.1))).parts(logits, label)
    assert relative(weighted.total, 0.9 * want[0] + 0.1 * want[1]) < 1e-13


def test_biases_of_the_outputs_are_torchs_own() -> None:
    usual, own = (build_network(small(output_bias=flag), 1, 4, Group("seq")).decoder.classes for flag in (True, False))
    prior = math.log(FOREGROUND / (1 - FOREGROUND))
    assert torch.equal(usual.weight, own.weight)
    assert usual.bias[1:].tolist() == pytest.approx([prior] * 3)
    bound = 1 / math.sqrt(own.weight.shape[1])  # torch draws it from -bound to bound
    assert len(set(own.bias.tolist())) == 4 and own.bias.abs().max() <= bound


def test_its_decoders_convolutions_have_no_bias_where_a_norm_follows() -> None:
    decoder = net_of(small()).decoder
    assert [conv.bias for conv in decoder.convs] == [None, None] and decoder.classes.bias is not None


def test_its_weights_begin_as_said() -> None:
    torch.manual_seed(0)
    net = build_network(replace(small(), embed_dim=120), 4, 4, Group("seq"))
    matrices = {name: p.detach() for name, p in net.named_parameters() if p.ndim > 1}
    for name, p in matrices.items():
        if name.startswith("encoder"):
            wanted = (4 * 4**3) ** -0.5 if "patch_embed" in name else 0.02
            assert float(p.std()) == pytest.approx(wanted, rel=0.1), name
        else:
            bound = p[0].numel() ** -0.5  # torch draws from -bound to bound
            assert 0.9 * bound < float(p.abs().max()) <= bound, name


def test_queries_stay_and_keys_and_values_are_collected_by_name() -> None:
    blocks = net_of(replace(small(), seqpar=4)).encoder.blocks
    assert {str(block.attn.strategy) for block in blocks} == {"gather-kv"}


PRESENT = {  # of the presets before the paper's choices became settings
    "modern": dict(dice="linear", targets="regions", foreground=0.33, output_bias=True, attention="auto"),
    "laptop": dict(dice="linear", targets="regions", foreground=0.33, output_bias=True, attention="auto"),
    "debug": dict(dice="linear", targets="regions", foreground=1.0, output_bias=True, attention="auto"),
}


@pytest.mark.parametrize("name", PRESENT)
def test_the_other_presets_keep_theirs(name: str) -> None:
    config = PRESETS[name]()
    for setting, value in PRESENT[name].items():
        assert getattr(config, setting) == value, setting
    assert (config.loss, config.loss_weights, config.dice_background) == ("dice-ce", (), False)


def test_only_presets_of_ours_shift_tiles_that_show_a_label() -> None:
    """Figure 19 decided it; presets that follow a release centre these tiles as it does."""
    ours = {"modern", "laptop", "debug", "auto"}
    assert {name for name, preset in PRESETS.items() if preset().foreground_shift} == ours
