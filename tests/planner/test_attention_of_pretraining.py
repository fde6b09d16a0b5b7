"""Attention of a pretraining is planned by the tokens that come to it: the visible ones, all where they are rebuilt."""

from dataclasses import replace

from seqpar.attention.cost_model import Layer, cost, fastest_strategy, fastest_strategy_of_model, memory_of
from seqpar.cluster.devices import Link
from seqpar.planner.attention_choice import attention_waiting, choose_within_memory, layers_of, unfused_scores
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from tests.planner.test_plan import GCD

MAE = replace(PRESETS["mae"](), seqpar=4, batch=1, tile=(96, 96, 96))  # 1,728 tokens, 432 of them visible
ALL = replace(MAE, task="segment")
SLOW = replace(GCD, links={8: Link(1e9, 5e-4)})  # messages cost as much as what is in them


def chosen(config: Config) -> str:
    return choose_within_memory(config, SLOW, lambda named: 0.0)[0].attention


def test_layers_are_as_long_as_what_comes_to_them() -> None:
    sizes = [(layer.sizes, layer.width, count) for layer, count in layers_of(replace(MAE, rebuild_width=96))]
    assert sizes == [((108,) * 4, 864, 16), ((432,) * 4, 96, 2)]
    uneven = layers_of(replace(MAE, mask_ratio=0.9))
    assert uneven[0][0].sizes == (44, 43, 43, 43)  # of 173
    assert [(layer.sizes, count) for layer, count in layers_of(ALL)] == [((432,) * 4, 16)]


def test_the_strategy_is_the_quickest_for_the_visible_tokens() -> None:
    """Few messages where there are few tokens, few bytes where there are many."""
    assert chosen(ALL) == chosen(replace(MAE, mask_ratio=0.01)) == "ulysses"
    assert chosen(MAE) == chosen(replace(ALL, tile=(96, 96, 24))) != "ulysses"
    assert chosen(replace(MAE, rebuild_blocks=200)) == "ulysses"


def test_waiting_and_scores_are_of_both_networks() -> None:
    named = replace(MAE, attention="gather-kv")
    of_encoder, of_rebuilder = replace(named, rebuild_blocks=0), replace(named, depth=0)
    waiting = [attention_waiting(config, SLOW) for config in (named, of_encoder, of_rebuilder)]
    assert abs(waiting[0] - waiting[1] - waiting[2]) < 1e-12 and waiting[1] > 0 and waiting[2] > 0
    one = 12 * 2  # heads, bytes of a number
    assert unfused_scores(named, 0) == one * (16 * 108 * 432 + 2 * 432 * 1728) + 2 * one * 432 * 1728
    again = unfused_scores(replace(named, grad_checkpoint="full"), 0)
    assert again == 3 * one * 432 * 1728


def test_layers_of_one_size_are_chosen_for_as_one() -> None:
    layer = Layer((108,) * 4, 12, 864)
    for left in (None, 1e6, 1e9):
        once, twice = fastest_strategy(layer, SLOW.machine(4, "bf16"), False, left, 5), [(layer, 2), (layer, 3)]
        assert fastest_strategy_of_model(twice, SLOW.machine(4, "bf16"), False, left)[0] == once[0]
        one = cost(once[0], layer, SLOW.machine(4, "bf16"))
        assert memory_of([(one, 2), (one, 3)]) == one.memory(5) and memory_of([(one, 5)], True) == one.memory(1)
