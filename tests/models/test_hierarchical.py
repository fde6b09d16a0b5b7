"""An encoder of stages and its decoder on any ranks are those of one process; merging sends nothing."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from seqpar import DiceCE, DropoutKey, SeqParViT
from seqpar.models.build import build_network, family_of, layout_of
from seqpar.models.network import Network
from seqpar.optimization.optimizers import layer_lr_scale
from seqpar.parallel.collectives import all_gather, all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.planner.feasibility import check_feasible
from seqpar.planner.memory_counter import saved_bytes
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.rules import refuse_settings_without_effect
from tests.support.marks import long_case
from tests.support.messages import refused_with
from tests.support.ranks import once_per_world, relative, summed

CHANNELS, CLASSES = 2, 3
STAGES = Config(
    tile=(16, 8, 24), patch=2, encoder="hierarchical", stage_depths=(1, 1, 1), embed_dim=6, heads=1, decoder="unetr",
    decoder_width=2, positions="learned+rope", mlp="swiglu", dropout=0.2, drop_path=0.1, layer_scale=0.5, batch=3,
)  # fmt: skip
CASES = {
    "gather, spatial": replace(STAGES, attention="gather-kv"),
    "gather, ordered": replace(STAGES, split="ordered", attention="gather-x"),
    "halo, spatial": replace(STAGES, mode="halo", attention="ulysses"),
    "halo, ordered": replace(STAGES, mode="halo", split="ordered", attention="gather-kv", keep_kv=True),
    "swap, spatial": replace(STAGES, mode="swap", attention="gather-kv", batch=4),
    "windows, halo": replace(STAGES, mode="halo", window=3, stage_depths=(2, 2, 1), keep_kv=True),
    "windows, plain": replace(
        STAGES, encoder="plain", depth=3, window=4, patch=4, mode="swap", batch=4, decoder="plain"
    ),
    "primus, halo": replace(
        STAGES, mode="halo", decoder="primus", patch=(4, 2, 4), stage_depths=(2, 1), attention="auto"
    ),
}
Outcome = dict[str, Tensor]


def outcome(config: Config, group: Group) -> Outcome:
    """Returns loss, logits, and the gradients at the image and at each weight, averaged over the group."""
    net = build_network(config, CHANNELS, CLASSES, group).double()
    layout, dice = net.layout, torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():  # norms that begin at 0 would hide what lies behind them
            p.add_(torch.randn(p.shape, generator=dice), alpha=0.1)
    image = torch.randn(config.batch, CHANNELS, *config.tile, generator=dice, dtype=torch.float64)
    label = torch.randint(CLASSES, (config.batch, *config.tile), generator=dice)
    part = layout.cut(image, group.index).requires_grad_()
    target = net.arrange(layout.cut(label, group.index))
    logits = net(part, None, DropoutKey(3, 1, tuple(range(config.batch))))
    assert isinstance(logits, Tensor)
    loss = DiceCE()(logits, target, net.loss_groups(None, config.batch))
    loss.backward()
    parts = all_gather(part.grad, group, 1, layout.counts).split(layout.counts, 1)  # type: ignore[arg-type]
    names = [name for name, _ in net.named_parameters()]
    totals = summed([p.grad for p in net.parameters()], group)  # type: ignore[misc]
    return {
        "loss": all_reduce(loss.detach(), group) / group.size,
        "logits": whole_logits(net, logits.detach(), label, group),
        "input": layout.join(parts) / group.size,
        **{name: total / group.size for name, total in zip(names, totals)},
    }


def whole_logits(net: Network, logits: Tensor, label: Tensor, group: Group) -> Tensor:
    """Returns the logits of all voxels of the batch, voxels by classes; as often as ranks have some, their mean."""
    numbers = net.arrange(net.layout.cut(torch.arange(label.numel()).view_as(label), group.index)).flatten()
    whole = torch.zeros(label.numel(), CLASSES + 1, dtype=torch.float64)
    whole[numbers] = torch.cat([logits.movedim(1, -1).flatten(0, 3), torch.ones(len(numbers), 1)], 1).double()
    whole = all_reduce(whole, group)
    return whole[:, :CLASSES] / whole[:, CLASSES:]


@cache
def one_process(name: str) -> Outcome:
    return outcome(replace(CASES[name], mode="gather", attention="auto", split="spatial", keep_kv=False), Group("seq"))


def gaps_of_cases(mesh: Mesh) -> dict[str, dict[str, float]]:
    """Returns how far every case is from one process, by tensor."""
    gaps = {}
    for name, config in CASES.items():
        if config.mode == "swap" and config.batch % mesh.seq.size:
            continue
        got, want = outcome(replace(config, seqpar=mesh.seq.size), mesh.seq), one_process(name)
        assert got.keys() == want.keys()
        assert not [key for key, tensor in want.items() if float(tensor.abs().max()) < 1e-9], "nothing to compare"
        gaps[name] = {key: relative(got[key], want[key]) for key in want}
    return gaps


def gap_of_parts_alone(mesh: Mesh) -> float:
    """Returns how far logits are where each rank decodes its own box alone: the control."""
    config = replace(STAGES, mode="nogather", attention="gather-kv", seqpar=mesh.seq.size)
    return relative(outcome(config, mesh.seq)["logits"], one_process("gather, spatial")["logits"])


def sent_by_encoder(mesh: Mesh) -> dict[str, Counter[str]]:
    """Returns what forward and backward of the encoder send, by split and kind."""
    sent = {}
    for split in ("spatial", "ordered"):
        net = SeqParViT(1, STAGES.tile, 2, 8, (1, 2, 1), 2, attention="gather-kv", group=mesh.seq, split=split).double()
        mesh.seq.traffic.clear()
        net(net.layout.cut(torch.zeros(1, 1, *STAGES.tile, dtype=torch.float64), mesh.seq.index)).sum().backward()
        sent[split] = mesh.seq.traffic.copy()
    return sent


def held_by_encoder(mesh: Mesh) -> int:
    """Returns the bytes that a rank holds for backward of eight cubes."""
    net = SeqParViT(1, 32, 4, 24, (2, 1, 1), 2, attention="gather-kv", group=mesh.seq, split="ordered")
    part = net.layout.cut(torch.zeros(1, 1, 32, 32, 32), mesh.seq.index)
    return saved_bytes(net, lambda: net(part))


of_world = once_per_world(gaps_of_cases, gap_of_parts_alone, sent_by_encoder, held_by_encoder)


@pytest.mark.parametrize("world", [1, 2, long_case(3), long_case(4)])
def test_every_mode_and_split_equals_one_process(world: int) -> None:
    """Logits, loss, the gradients at the image and at each weight; on 4 ranks parts are uneven."""
    assert len([one_process(name) for name in CASES]) == len(CASES)  # here, so that ranks inherit it
    for seen in of_world(world):
        for name, gaps in seen["gaps_of_cases"].items():
            assert max(gaps.values()) < 1e-12, (name, {key: gap for key, gap in gaps.items() if gap >= 1e-12})
        if world > 1:
            assert seen["gap_of_parts_alone"] > 1e-3, "a control that parts alone pass"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_only_attention_sends_and_as_many_bytes_as_its_stages_have_keys_and_values(world: int) -> None:
    tokens = 8 * 4 * 12
    u = sum(
        layers * (tokens >> 3 * stage) * (8 << stage) * 8 for stage, layers in enumerate((1, 2, 1))
    )  # bytes of float64
    for split in ("spatial", "ordered"):
        every = sum((seen["sent_by_encoder"][split] for seen in of_world(world)), Counter[str]())
        assert every == {"attention": (2 + 4) * (world - 1) * u}


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_held_for_backward_falls_with_the_ranks(world: int) -> None:
    whole = of_world(1)[0]["held_by_encoder"]
    assert max(seen["held_by_encoder"] for seen in of_world(world)) <= (1 / world + 0.03) * whole


def test_the_decoder_has_nothing_between_tokens_and_image_to_invent() -> None:
    net = build_network(replace(STAGES, patch=8, tile=(32, 32, 64)), 1, 2, Group("seq"), device="meta")
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if name.startswith("decoder.ups")}
    first = {name: shape[1] for name, shape in shapes.items() if name.endswith("block.conv1.weight")}
    joined = [shapes[name.replace("block.conv1", "up")][1] for name in first]
    assert [channels // up for channels, up in zip(first.values(), joined)] == [2, 2, 1, 1, 2]
    assert net.taps == (0, 1) and not [name for name, _ in net.named_parameters() if "branches" in name]
    assert net.describe().endswith("128 tokens, merged to 16, then 2 a tile")
    assert family_of(STAGES).describe_tile(STAGES) == "patch 2: 384 tokens, merged to 48, then 6"


def test_the_rate_of_a_layer_falls_towards_the_image_merging_as_the_blocks_behind_it() -> None:
    config = replace(STAGES, layer_decay=0.5)
    names = ["encoder.patch_embed.proj.weight", "encoder.blocks.0.norm1.weight", "encoder.merges.0.norm.weight"]
    names += ["encoder.blocks.1.norm1.weight", "encoder.merges.1.norm.weight", "encoder.blocks.2.norm1.weight"]
    assert [layer_lr_scale(name, config.optimizer_options) for name in names] == [
        1 / 16,
        1 / 8,
        1 / 4,
        1 / 4,
        1 / 2,
        1 / 2,
    ]
    assert layer_lr_scale("encoder.norm.weight", config.optimizer_options) == 1


def test_the_decoder_of_all_stages_is_taken_where_none_is_typed() -> None:
    for line, taken in (
        ("--preset paper --encoder hierarchical", ("unetr", 16)),
        ("--preset laptop --encoder hierarchical", ("unetr", 8)),
        ("--preset paper --encoder hierarchical --decoder plain", ("plain", 128)),
        ("--preset paper --encoder hierarchical --decoder-width 24", ("unetr", 24)),
        ("--preset paper", ("plain", 128)),
    ):
        _, config, _ = parse(line.split(), "paper")
        assert (config.decoder, config.decoder_width) == taken, line


REFUSED = [
    ("--window 1", "--window 1: give its side in tokens, at least 2"),
    ("--window 4", "--window 4 would do nothing: a tile has 4 x 4 x 4 tokens"),
    ("--window 4 --split ordered", "--window 4 with --split ordered: windows need boxes: use --split spatial"),
    ("--window 4 --attention ulysses --seqpar 2", "--attention would do nothing: --window 4 fetches from neighbours"),
    ("--window 4 --heads-per-chunk 2", "--heads-per-chunk would do nothing: --window 4 takes all heads"),
    ("--window 4 --task pretrain", "--window would do nothing: --task pretrain does not use it"),
    ("--window 4 --task classify", "--window would do nothing: --task classify does not use it"),
    ("--window 4 --network unet-hou", "--window would do nothing"),
    (
        "--encoder hierarchical --depth 3",
        "--depth would do nothing: --network vit with --encoder hierarchical does not",
    ),
    ("--stage-depths 2 2", "--stage-depths would do nothing: --network vit with --encoder plain does not have it"),
    ("--encoder hierarchical --skips paper", "--skips would do nothing"),
    ("--encoder hierarchical --network unet-hou", "--encoder would do nothing: --network unet-hou does not have it"),
    ("--encoder hierarchical --task classify", "--encoder hierarchical with --task classify: .* use --encoder plain$"),
    ("--encoder hierarchical --task pretrain", "--encoder hierarchical with --task pretrain: .* use --encoder plain$"),
    ("--encoder hierarchical --stage-depths 4", "--stage-depths 4: give the blocks of two stages or more"),
    ("--encoder hierarchical --stage-depths 2 0", "--stage-depths 2 0: give the blocks"),
    ("--encoder hierarchical --tile 40 --patch 4 --stage-depths 1 1 1", "multiples of 16: use --tile 48"),
    ("--encoder hierarchical --tile 32 --patch 8 --seqpar 9", "leave 8 tokens of tile 32, fewer than ranks"),
]


@pytest.mark.parametrize("line, why", REFUSED)
def test_flags_that_do_not_belong_together_are_refused(line: str, why: str) -> None:
    def read() -> None:
        _, config, flags = parse(["--preset", "debug", *line.split()], "debug")
        family_of(config)
        refuse_settings_without_effect(config, flags)
        check_feasible(config)

    with refused_with(why):
        read()


def test_a_tile_is_divided_into_cubes_and_only_voxels_are_asked_for() -> None:
    layout = layout_of(replace(STAGES, tile=(32, 8, 24), seqpar=2))
    assert layout.patch == (8, 8, 8) and layout.counts == (6, 6)
