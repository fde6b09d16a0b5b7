"""What a training step asks of a GPU, counted on tensors without data: launches, and what is fetched from the host."""

from dataclasses import replace

import pytest
import torch

from seqpar.planner.launch_counter import LaunchCounter, count_launches
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from tests.support.marks import long_case

# one tile by the preset, before norms, losses and constants took fewer launches
BEFORE = {"paper": 998, "modern": 2864}
SMALL = Config(tile=(16, 16, 16), patch=(4, 4, 4), depth=2, embed_dim=24, heads=2, decoder_width=4, batch=2)
DRAWN = {"dropout": 0.1, "drop_path": 0.2, "positions": "learned+rope", "decoder": "unetr"}


@pytest.mark.parametrize("name", ["paper", long_case("modern")])
def test_launches_do_not_grow_with_the_batch(name: str) -> None:
    of_batch = {batch: count_launches(replace(PRESETS[name](), batch=batch))[-1].launches for batch in (1, 4, 8)}
    assert max(of_batch.values()) <= 1.05 * of_batch[1], of_batch
    assert of_batch[1] <= BEFORE[name] / 2, of_batch


# A step of ViT-B in half precision: launches with three blocks and of each further one, and GB with twelve. Without
# data, convolutions return another memory format than on a GPU, which adds 2 and 16 copies.
STEPS = {
    "paper": ({"patch": (4, 4, 4), "precision": "bf16"}, 273, 36, 42.0),
    "modern": ({"tile": (160, 160, 160)}, 536, 48, 68.3),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_half_precision_takes_few_launches_and_bytes(name: str) -> None:
    changes, of_three, of_another, gigabytes = STEPS[name]
    config = replace(PRESETS[name](), batch=1, **changes)
    few, more = (count_launches(replace(config, depth=depth))[-1] for depth in (3, 4))
    assert (few.launches, more.launches - few.launches) == (of_three, of_another), few.by_place
    assert few.moved + 9 * (more.moved - few.moved) <= gigabytes * 1e9
    assert 0 < few.update <= more.update < 20


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, **DRAWN),
        replace(SMALL, **DRAWN, seqpar=4, mode="halo", split="ordered", attention="hybrid:2", precision="bf16"),
        replace(SMALL, **DRAWN, seqpar=2, mode="swap", attention="gather-x", grad_checkpoint="full", mlp_chunks=2),
        replace(SMALL, positions="sincos", decoder="primus", seqpar=2, mode="nogather", attention="ulysses"),
        replace(
            SMALL, seqpar=3, mode="gather", attention="gather-kv", keep_kv=True, class_weights=(1.0, 1.0, 2.0, 1.0)
        ),
        replace(SMALL, seqpar=2, mode="halo", network="nnunet-resenc", deep_supervision=True, tile=(64, 64, 64)),
    ],
    ids=lambda config: f"{config.network} {config.decoder} {config.mode} {config.attention}",
)
def test_nothing_is_fetched_from_the_host_once_a_step_has_run(config: Config) -> None:
    regions = ((1, 2), (2,), (3,), (1,)) if config.decoder == "primus" else ()
    first, second = count_launches(config, rank=config.seqpar - 1, regions=regions, ignore_label=9)
    assert second.fetches == 0, (first.fetches, second.by_name)
    assert 0 < second.launches <= first.launches


def test_the_counter_sees_copies_and_tensors_of_numbers() -> None:
    with LaunchCounter() as counter:
        x = torch.ones(3, device="meta")
        x[1:].view(2, 1).transpose(0, 1)
        assert counter.launches.total() == 1 and not counter.fetches
        torch.arange(3).to("meta")
        torch.tensor([1.0, 2.0], device="meta")
        x + torch.ones(3).to("meta")
    assert counter.fetches.total() == 3
