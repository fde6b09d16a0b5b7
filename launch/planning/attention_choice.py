"""Which attention strategy a config runs: the named one, or, where it is left open, the one that the planner chooses.

The cost model (``seqpar.attention.cost_model``) compares strategies; here it is given the config's layer, the device's
links and speed, and the memory that the plan leaves.
"""

from collections.abc import Callable
from dataclasses import replace

from seqpar.attention.cost_model import Layer, choose, cost
from seqpar.attention.strategies import Strategy, check_strategy
from seqpar.launch.hardware.devices import DTYPES, Device
from seqpar.launch.models.build import kind_of, layout_of
from seqpar.launch.settings.config import Config


def is_open(config: Config) -> bool:
    """Returns whether there is a strategy to choose: for a network that attends, on several ranks, none is named."""
    return kind_of(config).attends and config.attention == "auto" and config.seqpar > 1


def layer_of(config: Config) -> Layer:
    """Returns the sizes of one of the config's attention layers."""
    sizes = layout_of(config).counts
    per_chunk = config.heads_per_chunk or None
    return Layer(sizes, config.heads, config.embed_dim, config.batch, DTYPES[config.precision].itemsize, per_chunk)


def strategy_of(config: Config) -> Strategy:
    """Returns the strategy that the config names; gather-kv where none is, or nothing crosses ranks."""
    if config.seqpar == 1 or config.attention == "auto":
        return Strategy("gather-kv")
    return check_strategy(config.attention, config.seqpar, config.heads, config.keep_kv)


def saved_layers(config: Config) -> int:
    """Returns how many layers hold what attention needs for the backward at a time: one where it is recomputed."""
    return config.depth if config.grad_checkpoint == Config().grad_checkpoint else 1


def attention_waiting(config: Config, device: Device) -> float:
    """Returns the seconds a micro-batch that attention waits for messages."""
    if not kind_of(config).attends:
        return 0.0
    machine = device.machine(config.seqpar, config.precision)
    return cost(strategy_of(config), layer_of(config), machine, config.keep_kv).waiting * config.depth


def unfused_scores(config: Config, transient: int) -> float:
    """Returns the bytes that attention would need on top if it were not fused.

    Each layer saves softmax's output, of this rank's queries and all keys, for its backward; that computes the
    gradients of the output and of the scores, which take the place of ``transient`` bytes.
    """
    if not kind_of(config).attends:
        return 0.0
    layer = layer_of(config)
    one = layer.batch * layer.heads * max(layer.sizes) * sum(layer.sizes) * layer.element
    return saved_layers(config) * one + max(0, 2 * one - transient)


def choose_within_memory(
    config: Config, device: Device, planned_bytes: Callable[[Config], float]
) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with the quickest strategy that fits the device, and why, a line for each strategy.

    The memory that is left for attention follows from the plan of the quickest of all.

    - ``device``: what one rank has
    - ``planned_bytes``: returns the bytes that a config with a named strategy needs on the fullest rank
    """
    layer, machine = layer_of(config), device.machine(config.seqpar, config.precision)
    quickest, _ = choose(layer, machine, config.keep_kv)
    depth = saved_layers(config)
    needed = cost(quickest, layer, machine, config.keep_kv).memory(depth)
    left = (device.memory - planned_bytes(replace(config, attention=str(quickest)))) / (
        1 + device.fragmentation
    ) + needed
    strategy, why = choose(layer, machine, config.keep_kv, left, depth)
    return replace(config, attention=str(strategy)), why


def choose_quickest(config: Config, device: Device) -> Config:
    """Returns the config with the quickest strategy for one sample in float32, whatever memory it needs."""
    if not is_open(config):
        return config
    layer = replace(layer_of(config), batch=1, element=4)
    strategy, _ = choose(layer, device.machine(config.seqpar, config.precision), config.keep_kv)
    return replace(config, attention=str(strategy))
