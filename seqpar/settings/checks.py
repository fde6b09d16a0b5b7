"""What a config is refused for before anything is built, with the nearest that works."""

import math
import re
from collections.abc import Collection, Iterable, Sequence

from seqpar.attention.strategies import check_strategy
from seqpar.data.formats.splits import FOLDS, OTHER_FOLDS, parse_percentages
from seqpar.data.sampling.augmentation import recipe_of
from seqpar.losses.terms import check_signs, check_weights
from seqpar.optimization.optimizers import OPTIMIZERS
from seqpar.pipeline.named_placements import PLACEMENTS, parse_cuts
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.data_settings import ALL_FOLDS, prepare_settings
from seqpar.settings.loss_settings import CLASS_LOSSES
from seqpar.settings.network_settings import check_stages
from seqpar.text import flag_name, format_sides, in_flags, parse_duration

LARGEST_TILE = 65536
NETWORK = ("network", "pretraining")  # sections that a network is built from
_OF_PREDICTION = ("task", "targets", "mode", "split", "seqpar", "precision", "val_mirror")  # what else predict takes


def check(config: Config, networks: Sequence[str]) -> None:
    """Raises ``ValueError`` for what cannot work, before anything is allocated, with the nearest that does.

    ``networks``: the names that there are.
    """
    check_values(config, networks, SETTINGS)
    _check_network(config)
    _check_run(config)
    if config.task == "classify":
        _check_classes(config)


def check_network(config: Config, networks: Sequence[str]) -> None:
    """Raises ``ValueError`` for settings that no network can be built from or predict with, such as those of a damaged
    run.

    ``networks``: the names that there are.
    """
    names = [name for name, own in SETTINGS.items() if own.section in NETWORK or name in _OF_PREDICTION]
    check_values(config, networks, names)
    _check_network(config)


def check_values(config: Config, networks: Collection[str], names: Iterable[str]) -> None:
    """Raises ``ValueError`` for a setting among ``names`` that is not one of its choices, or out of its bounds."""
    for name in names:
        value, bounds = getattr(config, name), SETTINGS[name].bounds
        choices = networks if name == "network" else SETTINGS[name].choices
        if choices and value not in choices:
            raise ValueError(f"--{flag_name(name)} {value}: choose one of {', '.join(choices)}")
        if bounds and not bounds.allows(value):
            raise ValueError(f"--{flag_name(name)} {value}: {bounds.text}")


_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def settings_in(text: str) -> list[str]:
    """Returns the settings that an error names, as arguments or as flags."""
    names = dict.fromkeys(word.replace("-", "_") for word in _FLAG.findall(in_flags(text)))
    return [name for name in names if name in SETTINGS]


def as_in_file(text: str) -> str:
    """Returns an error about flags with the keys of config.json in their place, for values that nobody typed."""
    return _FLAG.sub(lambda match: key if (key := match[1].replace("-", "_")) in SETTINGS else match[0], in_flags(text))


def _check_network(config: Config) -> None:
    if not config.tile:
        raise ValueError("--tile is left to the data of --task classify, which are not looked at here: give it")
    if len(config.tile) != 3:
        raise ValueError(f"--tile {' '.join(map(str, config.tile))}: give one number, or three")
    if not 1 <= min(config.tile) <= max(config.tile) <= LARGEST_TILE:
        raise ValueError(f"--tile {format_sides(config.tile)}: it must be in [1, {LARGEST_TILE}]")
    _check_patch(config.patch)
    check_stages(config.stage_depths)
    if config.embed_dim % config.heads:
        divisors = [heads for heads in range(1, config.embed_dim + 1) if config.embed_dim % heads == 0]
        near = min(divisors, key=lambda heads: abs(heads - config.heads))
        raise ValueError(f"--heads {config.heads} does not divide --embed-dim {config.embed_dim}: use --heads {near}")
    if config.stem != "patch" and (set(config.patch) != {8} or config.split != "spatial"):
        raise ValueError(
            f"--stem {config.stem} with --patch {format_sides(config.patch)} --split {config.split}: its convolutions "
            "embed boxes of patches of 8: use --patch 8 --split spatial"
        )
    if not 0 <= config.heads_per_chunk <= config.heads:
        raise ValueError(f"--heads-per-chunk {config.heads_per_chunk}: choose 1 to {config.heads}, or 0 for by size")
    if config.attention != "auto":
        check_strategy(config.attention, config.seqpar, config.heads, config.keep_kv)


def _check_patch(patch: Sequence[int]) -> None:
    typed = format_sides(patch) if len(patch) == 3 else " ".join(map(str, patch))
    if len(patch) != 3:
        raise ValueError(f"--patch {typed}: give one number, or three")
    if min(patch) < 1:
        raise ValueError(f"--patch {typed}: it must be at least 1")
    sides = (1, 2, 4, 8, 16) if len(set(patch)) > 1 else (2, 4, 8, 16)
    nearest = [min(sides, key=lambda side: abs(math.log2(side / p))) for p in patch]
    if nearest != list(patch):
        raise ValueError(f"--patch {typed}: the decoders double the grid; use --patch {format_sides(nearest)}")


def _check_run(config: Config) -> None:
    kind = OPTIMIZERS[config.optimizer]
    if config.betas and (len(config.betas) < len(kind.betas) or not all(0 <= beta < 1 for beta in config.betas)):
        count = {1: "a number", 2: "two numbers"}.get(len(kind.betas), "numbers")
        usual = " ".join(f"{beta:g}" for beta in kind.betas)
        raise ValueError(f"--betas {' '.join(map(str, config.betas))}: {count} in [0, 1), such as {usual}")
    if config.shard_weights and kind.whole:
        raise ValueError(
            f"--shard-weights: a step of {config.optimizer} looks at whole parameters, which no rank then has: "
            "remove it, or take another --optimizer"
        )
    if config.pipe > 1:
        _check_pipe(config)
    if config.schedule == "step" and not config.decay_epochs:
        raise ValueError("--schedule step needs --decay-epochs, the epochs after which the rate falls")
    check_signs("--class-weights", config.class_weights)
    if config.loss_weights:
        try:
            check_weights(config.loss_weights, config.loss_terms)
        except ValueError as error:
            raise ValueError(f"--loss-weights with --loss {config.loss}: {error}") from None
    if config.warmup and config.warmup >= config.epochs:
        raise ValueError(
            f"--warmup {config.warmup} leaves no epoch of {config.epochs}: use --warmup {config.epochs - 1}"
        )
    is_named = config.fold in ("90:10", "all", ALL_FOLDS) or re.fullmatch("[0-9]+", config.fold)
    if not is_named and not parse_percentages(config.fold):
        raise ValueError(
            f"--fold {config.fold}: give a fold's number, such as 0; 90:10 (no other two shares); three percentages, "
            "such as 70:15:15; all, or all5"
        )
    if not config.data and config.task == "segment" and config.phantoms < FOLDS:
        raise ValueError(f"--phantoms {config.phantoms}: five folds need at least 5 cases")
    if not config.data and config.fold.isdigit() and int(config.fold) >= FOLDS:
        raise ValueError(f"--fold {config.fold}: the folds are 0 to {FOLDS - 1}; {OTHER_FOLDS}")
    prepare_settings(config)
    try:
        recipe_of(config.augment)
    except ValueError as error:
        raise ValueError(f"--augment {config.augment}: {error}") from None
    parse_duration(config.time_limit)


def _check_classes(config: Config) -> None:
    """Refuses what does not go with one class a volume."""
    if config.loss not in CLASS_LOSSES:
        raise ValueError(f"--loss {config.loss} with --task classify: it takes voxels: use {' or '.join(CLASS_LOSSES)}")


def _check_pipe(config: Config) -> None:
    """Refuses what does not go with stages on different ranks."""
    if config.shard_weights:
        raise ValueError(
            "--shard-weights with --pipe: each rank holds the weights of its stages alone: leave one of the two out"
        )
    if config.placement not in PLACEMENTS:
        parse_cuts(config.placement, config.pipe)
