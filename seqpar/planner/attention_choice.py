"""Which attention strategy a config runs: the one that it names, or else the one that the planner chooses.

The cost model (``seqpar.attention.cost_model``) compares strategies; this file gives it the config's layers, the
device's links and speed, and the memory that the plan leaves.
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
    """Returns whether a strategy is to be chosen: several ranks attend to all tokens, and none is named."""
    return family_of(config).attends and config.attention == "auto" and config.seqpar > 1 and not config.window


def layers_of(config: Config) -> list[tuple[Layer, int]]:
    """Returns the config's attention layers by size, and how many layers have that size."""
    element, per_chunk = DTYPES[config.precision].itemsize, config.heads_per_chunk or None
    return [
        (Layer(each.sizes, each.heads, each.width, config.batch, element, per_chunk), each.depth)
        for each in family_of(config).attention_layers(config)
    ]


def strategy_of(config: Config) -> Strategy:
    """Returns the strategy that the config names; gather-kv if it names none, or for one rank."""
    if config.seqpar == 1 or config.attention == "auto":
        return Strategy("gather-kv")
    return check_strategy(config.attention, config.seqpar, config.heads, config.keep_kv)


def is_recomputed(config: Config) -> bool:
    """Returns whether only one layer at a time stores what attention needs for backward."""
    return config.grad_checkpoint != Config().grad_checkpoint


def attention_waiting(config: Config, device: Device) -> float:
    """Returns the seconds per micro-batch that attention waits for messages; windows do not wait."""
    if not family_of(config).attends or config.window:
        return 0.0
    machine, strategy = device.machine(config.seqpar, config.precision), strategy_of(config)
    return sum(cost(strategy, layer, machine, config.keep_kv).waiting * count for layer, count in layers_of(config))


def unfused_scores(config: Config, transient: int) -> float:
    """Returns the additional bytes that unfused attention would need.

    Each layer saves the softmax of this rank's queries and all keys for backward. Backward computes the gradients of
    the output and of the scores, which replace ``transient`` bytes.
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
    """Returns the config with the fastest strategy that fits the device, and why, a line for each strategy.

    The memory left for attention follows from the plan of the fastest strategy of all.

    - ``device``: of one rank
    - ``planned_bytes``: returns the bytes that a config with a named strategy needs on the fullest rank
    """
    layers, machine = layers_of(config), device.machine(config.seqpar, config.precision)
    recomputed = is_recomputed(config)
    fastest, _ = fastest_strategy_of_model(layers, machine, config.keep_kv)
    costs = [(cost(fastest, layer, machine, config.keep_kv), count) for layer, count in layers]
    left = (device.memory - planned_bytes(replace(config, attention=str(fastest)))) / (
        1 + device.fragmentation
    ) + memory_of(costs, recomputed)
    strategy, why = fastest_strategy_of_model(layers, machine, config.keep_kv, left, recomputed)
    return replace(config, attention=str(strategy)), why


def choose_fastest(config: Config, device: Device) -> Config:
    """Returns the config with the fastest strategy for one sample in float32, whatever memory it needs."""
    if not is_attention_open(config):
        return config
    layers = [(replace(layer, batch=1, element=4), count) for layer, count in layers_of(config)]
    strategy, _ = fastest_strategy_of_model(layers, device.machine(config.seqpar, config.precision), config.keep_kv)
    return replace(config, attention=str(strategy))
