"""The planner's figures, each against the same figure worked out by hand for a small network."""

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from seqpar.cluster.devices import DEVICES, Device, Link, measured
from seqpar.planner.fit import plans
from seqpar.planner.needs import Plan, RunToPlan
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from tests.support import references

GCD, GIB = DEVICES["mi250x"], 2**30
SMALL = Config(
    tile=(16, 16, 16), patch=4, depth=2, embed_dim=24, heads=4, decoder_width=8, batch=1, attention="gather-kv"
)
LINK = Link(1e9, 1e-3)
SLOW_LINKS = replace(GCD, links={8: LINK})


@dataclass(frozen=True)
class ByHand:
    """Sums over the small network: n tokens of e numbers, k classes and c channels of p^3 voxels; bytes of float32."""

    config: Config
    channels: int = 4
    outputs: int = 4

    @property
    def tokens(self) -> int:
        return math.prod(side // self.config.patch[0] for side in self.config.tile)

    @property
    def spread(self) -> int:
        """u: the bytes of one rank's tokens."""
        return 4 * self.tokens * self.config.embed_dim // self.config.seqpar

    @property
    def parameters(self) -> int:
        e, w, stages = self.config.embed_dim, self.config.decoder_width, int(math.log2(self.config.patch[0]))
        embedding = e * self.channels * self.config.patch[0] ** 3 + e + self.tokens * e
        block = 12 * e * e + 12 * e  # no biases on keys
        decoder = 27 * (e * w + (stages - 1) * w * w) + stages * 2 * w + (w + 1) * self.outputs
        return embedding + self.config.depth * block + 2 * e + decoder

    @property
    def operations(self) -> dict[str, float]:
        """Of one process, forward; the embedding is a product of matrices, the classes a convolution."""
        e, w, n = self.config.embed_dim, self.config.decoder_width, self.tokens
        embedding = 2 * n * e * self.channels * self.config.patch[0] ** 3
        finer = 8 * n  # points of the second stage, where the classes are too
        return {
            "embedding": embedding,
            "blocks": 24 * n * e * e * self.config.depth,
            "attention": 4 * n * n * e * self.config.depth,
            "convolution": 2 * 27 * (n * e * w + finer * w * w),
            "classes": 2 * finer * w * self.outputs,
        }


def planned(config: Config, device: Device = GCD, ranks: int = 8, size: int = 2, **more: int) -> Plan:
    """Returns the plan of a group of ``size``; ``more``: channels and outputs, and whether seconds are planned too."""
    (plan,) = plans(RunToPlan(config, device, ranks=ranks, **{"timed": False, **more}), (size,))
    assert not plan.why, plan.why
    return plan


timed = functools.partial(planned, timed=True)


@pytest.mark.parametrize("data", [{}, {"channels": 9}, {"outputs": 9}])
def test_weights_gradients_and_states_are_the_networks(data: dict[str, int]) -> None:
    memory = planned(SMALL, **data).memory
    size = 4 * ByHand(SMALL, **data).parameters
    assert memory["weights"] == memory["gradients"] == size
    assert 0 <= memory["optimizer"] - 2 * size < 4 * 60  # Adam's two moments, and a number of steps for each tensor
    part = (16**3 // 2) * (4 * data.get("channels", 4) + 1)  # float32 channels, labels of a byte
    assert memory["input"] == part


def test_a_unetr_has_the_weights_of_monais_table() -> None:
    config = replace(SMALL, decoder="unetr", qkv_bias=False, mode="halo")
    shapes = references.unetr_shapes(4, 4, 4, (4, 4, 4), f=8, e=24, hidden=96, depth=2)
    assert planned(config).memory["weights"] == 4 * sum(map(math.prod, shapes.values()))


ROWS = {  # of docs/explanation/attention.md: what a rank sends in a layer, in u; with --keep-kv
    "gather-kv": (lambda p: 6 * (p - 1), lambda p: 4 * (p - 1)),
    "gather-x": (lambda p: 3 * (p - 1), lambda p: 2 * (p - 1)),
    "ulysses": (lambda p: 8 * (p - 1) / p, None),
    "hybrid:2": (lambda p: 8 / 2 + 6 * (p / 2 - 1), lambda p: 8 / 2 + 4 * (p / 2 - 1)),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("keep", [False, True])
def test_attention_sends_what_the_manual_says(name: str, keep: bool) -> None:
    """Mode gather sends the tokens once more, and the label's bytes: without these a layer's bytes are left."""
    of_layer = ROWS[name][keep]
    if of_layer is None:
        return
    config = replace(SMALL, seqpar=4, attention=name, keep_kv=keep)
    hand = ByHand(config)
    rest = planned(config, size=4).sent["seq"] - 3 * (hand.spread + 16**3 / 4)
    assert rest == 2 * of_layer(4) * hand.spread
    twice = planned(replace(config, accumulate=2), size=4).sent["seq"]
    assert twice == 2 * planned(config, size=4).sent["seq"]


def test_bf16_halves_what_attention_sends_and_the_tokens_that_are_gathered_and_no_weights() -> None:
    whole, half = planned(SMALL), planned(replace(SMALL, precision="bf16"))
    assert whole.sent["seq"] - half.sent["seq"] == (2 * 6 + 1) * ByHand(replace(SMALL, seqpar=2)).spread / 2
    assert half.memory["weights"] == whole.memory["weights"] and half.sent["world"] == whole.sent["world"]


def test_gradients_are_summed_over_all_ranks_and_shards_move_three_times() -> None:
    size = 4 * ByHand(SMALL).parameters
    assert planned(SMALL).sent["world"] == 2 * 7 / 8 * size
    assert planned(SMALL, ranks=16).sent["world"] == 2 * 15 / 16 * size
    assert planned(replace(SMALL, accumulate=3)).sent["world"] == 2 * 7 / 8 * size
    shared = planned(replace(SMALL, shard_weights=True))
    assert shared.sent["world"] == 3 * 7 / 8 * size  # weights come twice, gradients go once
    assert shared.memory["optimizer"] == planned(SMALL).memory["optimizer"] // 8
    block = 4 * (12 * 24 * 24 + 12 * 24)
    rest = size - 2 * block
    assert shared.memory["weights"] == size // 8 + 2 * block + rest
    assert shared.memory["gradients"] == size // 8 + block + rest


BLOCKS = {  # of docs/how-to/short-of-memory.md: what a block holds for backward, in widths of a token
    16: {},
    11: {"grad_checkpoint": "attention"},
    7: {"mlp_chunks": 4},
    2: {"grad_checkpoint": "attention", "mlp_chunks": 4},
    1: {"grad_checkpoint": "full"},
}


@pytest.mark.parametrize("widths", BLOCKS)
def test_a_block_holds_what_the_manual_says(widths: int) -> None:
    config = replace(SMALL, embed_dim=96, **BLOCKS[widths])
    saved = [planned(replace(config, depth=depth)).memory["tokens"] for depth in (2, 3)]
    assert (saved[1] - saved[0]) / ByHand(replace(config, seqpar=2)).spread == pytest.approx(widths, rel=0.04)


def test_seconds_are_operations_over_the_rate_of_their_kind() -> None:
    """Where memory and starting cost nothing: forward once, backward twice, flash attention's two and a half times.

    The embedding has no gradient at its input. The decoder is each rank's whole.
    """
    ideal = replace(GCD, bandwidth=math.inf, launch_seconds=0.0)
    done, rate = ByHand(SMALL).operations, {kind: share * 47.9e12 for kind, share in GCD.shares.items()}
    products = done["blocks"] / 2 * 3 + done["embedding"] / 2 * 2
    seconds = products / rate["matmul"] + done["attention"] / 2 * 3.5 / rate["attention"]
    seconds += 3 * (done["convolution"] + done["classes"]) / rate["convolution"]  # channels first, in float32
    plan = timed(SMALL, ideal)
    assert plan.seconds["computing"] == pytest.approx(seconds, rel=1e-9)
    assert timed(replace(SMALL, accumulate=2), ideal).seconds["computing"] == pytest.approx(2 * seconds, rel=1e-9)
    assert plan.mfu == pytest.approx(3 * sum(done.values()) / 2 / plan.step_seconds / 47.9e12, rel=1e-9)


def test_messages_take_latency_and_bytes_over_the_bandwidth() -> None:
    """A layer gathers keys and values, gathers them again and scatters their gradients; then tokens and label."""
    hand = ByHand(replace(SMALL, seqpar=2))
    size = 2 * 6 * hand.spread + hand.spread + 16**3 / 2
    messages = 2 * 3 + 2
    plan = timed(SMALL, SLOW_LINKS)
    assert plan.seconds["waiting"] == pytest.approx(size / LINK.bandwidth + messages * LINK.latency, rel=1e-9)
    summing = plan.sent["world"] / LINK.bandwidth + 2 * 7 * LINK.latency - plan.seconds["computing"] / 2
    assert plan.seconds["summing"] == pytest.approx(summing, rel=1e-9)


def test_messages_that_travel_together_wait_once() -> None:
    """Tokens and label come from three ranks each, and a sum over eight passes fourteen hops; attention's do not."""
    hop = 1e-6
    together = replace(GCD, links={8: replace(LINK, hop=hop)})
    alone, once = (timed(SMALL, device, size=4).seconds for device in (SLOW_LINKS, together))
    assert alone["waiting"] - once["waiting"] == pytest.approx(2 * 2 * (LINK.latency - hop), rel=1e-9)
    assert alone["summing"] - once["summing"] == pytest.approx(13 * (LINK.latency - hop), rel=1e-9)


def test_a_device_that_is_half_as_fast_in_all_takes_twice_as_long() -> None:
    half = replace(
        SLOW_LINKS,
        peak={name: rate / 2 for name, rate in GCD.peak.items()},
        bandwidth=GCD.bandwidth / 2,
        launch_seconds=2 * GCD.launch_seconds,
        links={8: Link(LINK.bandwidth / 2, 2 * LINK.latency)},
    )
    for config in (SMALL, replace(SMALL, precision="bf16", decoder="unetr", mode="halo", attention="ulysses")):
        whole, slow = (timed(config, device) for device in (SLOW_LINKS, half))
        assert slow.seconds == pytest.approx({name: 2 * seconds for name, seconds in whole.seconds.items()})
        assert slow.memory == whole.memory and slow.sent == whole.sent
        assert whole.seconds.keys() == {"computing", "update", "waiting", "summing"}


def test_measured_figures_are_taken(tmp_path: Path) -> None:
    rates, file = {"float32": 10e12, "bfloat16": 80e12}, tmp_path / "doctor.json"
    group = {"size": 4, "all_gather": {"latency_s": 3e-4, "bytes_per_s": 5e9, "seconds": [[1, 1.0]]}}
    all_of_them = {**group, "size": 16, "all_reduce": {"latency_s": 1.5e-3, "bytes_per_s": 1e9}}
    figures = {"device": "x", "world": 16, "nodes": 2, "memory_bytes": 40 * 2**30, "matmul_flops_per_s": rates}
    file.write_text(json.dumps({**figures, "groups": {"seq": group, "data": group, "world": all_of_them}}))
    device = measured(str(file), GCD, "fp32")
    latency = pytest.approx(1e-4)  # a message of three, or of fifteen
    assert device.node == 8 and device.link(4) == Link(5e9, latency) and device.link(16) == Link(1e9, latency)
    assert device.shares["matmul"] * device.peak["fp32"] == pytest.approx(10e12) and device.memory == 40 * 2**30
    paper = replace(PRESETS["paper"](), patch=4, batch=1, attention="gather-kv")
    rated, slow = (timed(paper, d, ranks=16, size=4) for d in (GCD, device))
    faster = 0.55 * 47.9e12 / 10e12  # by products of matrices, which take most of the time
    assert slow.seconds["computing"] / rated.seconds["computing"] == pytest.approx(faster, rel=0.2)
    assert slow.memory == rated.memory
    file.write_text(json.dumps({"device": "x", "matmul_flops_per_s": 5e12}))
    alone = measured(str(file), GCD, "fp32")
    assert alone.shares["matmul"] * GCD.peak["fp32"] == pytest.approx(5e12) and alone.links == GCD.links
    for changed in ({"latency_s": -3}, {"bytes_per_s": 0}, {"latency_s": math.nan}):
        odd = {**group, "all_gather": {**group["all_gather"], **changed}}
        file.write_text(json.dumps({**figures, "groups": {"seq": odd}}))
        with pytest.raises(ValueError, match="is no speed, time or size"):
            measured(str(file), GCD, "fp32")
    elsewhere = {"device": "AMD EPYC", "matmul_flops_per_s": {"float32": 3e10}}, {"device": "NVIDIA H100 80GB HBM3"}
    for changed in elsewhere:
        file.write_text(json.dumps(figures | changed))
        with pytest.raises(ValueError, match=f"was measured on .*{changed['device']}.*, and the plan is for MI250X"):
            measured(str(file), GCD, "fp32")
    for changed in ({"matmul_flops_per_s": "fast"}, {"memory_bytes": -5}):
        file.write_text(json.dumps(figures | changed))
        with pytest.raises(ValueError, match="is not what launch/doctor.py writes as JSON"):
            measured(str(file), GCD, "fp32")


def test_the_papers_long_sequence_in_figures() -> None:
    """ViT-B, tile 96, patch 4, batch 1, float32, if attention were not fused: four ranks of 64 GiB, as in the paper."""
    paper = replace(PRESETS["paper"](), patch=4, batch=1, attention="auto")
    rows = list(plans(RunToPlan(paper, GCD, ranks=8, timed=False), (1, 2, 4)))
    assert [(p.total + p.scores) / GIB for p in rows] == pytest.approx([132.7, 69.0, 37.1], rel=0.01)
    assert rows[0].total / GIB == pytest.approx(13.2, rel=0.01)
