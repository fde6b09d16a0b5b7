"""Which attention strategy a config runs: the named one, or, where it is left open, the one that the planner chooses.

The cost model (``seqpar.attention.cost_model``) compares strategies; here it is given the config's layer, the device's
links and speed, and the memory that the plan leaves.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from seqpar.attention.cost_model import Layer, cost, fastest_strategy_of_model, memory_of
from seqpar.attention.strategies import Strategy, check_strategy
from seqpar.cluster.devices import DTYPES, Device
from seqpar.models.build import family_of
from seqpar.settings.config import Config


def is_attention_open(config: Config) -> bool:
    """Returns whether there is a strategy to choose: for attention to all tokens, on several ranks, none is named."""
    return family_of(config).attends and config.attention == "auto" and config.seqpar > 1 and not config.window


def layers_of(config: Config) -> list[tuple[Layer, int]]:
    """Returns the sizes of the config's attention layers, and how many have each."""
    element, per_chunk = DTYPES[config.precision].itemsize, config.heads_per_chunk or None
    return [
        (Layer(each.sizes, each.heads, each.width, config.batch, element, per_chunk), each.depth)
        for each in family_of(config).attention_layers(config)
    ]


def strategy_of(config: Config) -> Strategy:
    """Returns the strategy that the config names; gather-kv where none is, or nothing crosses ranks."""
    if config.seqpar == 1 or config.attention == "auto":
        return Strategy("gather-kv")
    return check_strategy(config.attention, config.seqpar, config.heads, config.keep_kv)


def is_recomputed(config: Config) -> bool:
    """Returns whether one layer at a time holds what attention needs for the backward."""
    return config.grad_checkpoint != Config().grad_checkpoint


def attention_waiting(config: Config, device: Device) -> float:
    """Returns the seconds a micro-batch that attention waits for messages of a strategy, which windows have not."""
    if not family_of(config).attends or config.window:
        return 0.0
    machine, strategy = device.machine(config.seqpar, config.precision), strategy_of(config)
    return sum(cost(strategy, layer, machine, config.keep_kv).waiting * count for layer, count in layers_of(config))


def unfused_scores(config: Config, transient: int) -> float:
    """Returns the bytes that attention would need on top if it were not fused.

    Each layer saves softmax's output, of this rank's queries and all keys, for its backward; that computes the
    gradients of the output and of the scores, which take the place of ``transient`` bytes.
    """
    if not family_of(config).attends:
        return 0.0
    most = config.window**3 or math.inf  # keys of a token
    scores = [
        (layer.batch * layer.heads * max(layer.sizes) * min(sum(layer.sizes), most) * layer.element, count)
        for layer, count in layers_of(config)
    ]
    largest = max(one for one, _ in scores)
    saved = largest if is_recomputed(config) else sum(one * count for one, count in scores)
    return saved + max(0, 2 * largest - transient)


def choose_within_memory(
    config: Config, device: Device, planned_bytes: Callable[[Config], float]
) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with the quickest strategy that fits the device, and why, a line for each strategy.

    The memory that is left for attention follows from the plan of the quickest of all.

    - ``device``: what one rank has
    - ``planned_bytes``: returns the bytes that a config with a named strategy needs on the fullest rank
    """
    layers, machine = layers_of(config), device.machine(config.seqpar, config.precision)
    recomputed = is_recomputed(config)
    quickest, _ = fastest_strategy_of_model(layers, machine, config.keep_kv)
    costs = [(cost(quickest, layer, machine, config.keep_kv), count) for layer, count in layers]
    left = (device.memory - planned_bytes(replace(config, attention=str(quickest)))) / (
        1 + device.fragmentation
    ) + memory_of(costs, recomputed)
    strategy, why = fastest_strategy_of_model(layers, machine, config.keep_kv, left, recomputed)
    return replace(config, attention=str(strategy)), why


def choose_quickest(config: Config, device: Device) -> Config:
    """Returns the config with the quickest strategy for one sample in float32, whatever memory it needs."""
    if not is_attention_open(config):
        return config
    layers = [(replace(layer, batch=1, element=4), count) for layer, count in layers_of(config)]
    strategy, _ = fastest_strategy_of_model(layers, device.machine(config.seqpar, config.precision), config.keep_kv)
    return replace(config, attention=str(strategy))
