"""The settings of a run's steps: batch, epochs, learning rate, optimizer, precision."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from seqpar.optimization.optimizers import OPTIMIZERS
from seqpar.optimization.schedules import SCHEDULES
from seqpar.settings.curriculum import parse_curriculum
from seqpar.settings.field import ABOVE_0, ABOVE_0_TO_1, AT_LEAST_1, NOT_NEGATIVE, SEED, TILES, Circumstances, setting
from seqpar.settings.network_settings import TOKENS

PRECISIONS = ("fp32", "tf32", "bf16", "fp64")
_OWN_BETAS = ", ".join(
    f"{name} {' '.join(f'{beta:g}' for beta in kind.betas)}" for name, kind in OPTIMIZERS.items() if kind.betas
)
_LESSONS = "the lessons of --curriculum have their own"
_STATE = "the optimizer's saved state belongs to it"
_optimizer = partial(setting, section="optimization")
_of_steps = partial(_optimizer, acts_when=lambda c: c.schedule == "step", why="--schedule {schedule} has no steps")


def _betas_needed(config: Any) -> str:
    """Returns how many decay rates the optimizer takes."""
    betas = OPTIMIZERS[config.optimizer].betas
    numbers = f"{len(betas)} numbers, such as {' '.join(f'{beta:g}' for beta in betas)}"
    count = {0: "none", 1: "one number, its momentum"}.get(len(betas), numbers)
    return f"--optimizer {config.optimizer} takes {count}"


def _has_other_betas(preset: Any, config: Any) -> bool:
    """Returns whether a preset's decay rates are those of another optimizer; adam and adamw share theirs."""
    return len({preset.optimizer, config.optimizer} | {"adam", "adamw"}) > 2


def _needs_a_gpu(config: Any, here: Circumstances) -> str:
    return "without a GPU" if here.has_gpu is False and config.precision == "tf32" else ""


@dataclass(frozen=True)
class OptimizerSettings:
    """Steps and what they do to the weights; a part of ``Config``."""

    batch: int = _optimizer(
        0,
        "tiles per sequence group (ranks that share a tile) and micro-batch; 0: chosen by memory",
        bounds=TILES,
        metavar="TILES",
        common=True,
        acts_when=lambda c: not c.curriculum,
        why=_LESSONS,
    )
    accumulate: int = _optimizer(
        1,
        "micro-batches per step",
        bounds=AT_LEAST_1,
        metavar="BATCHES",
        acts_when=lambda c: not any(lesson.micros for lesson in parse_curriculum(c.curriculum)),
        why=_LESSONS,
    )
    global_batch: int = _optimizer(
        0,
        "tiles of a step over all ranks, kept by --accumulate (or --batch) on any number of them; 0: not kept",
        bounds=TILES,
        metavar="TILES",
    )
    epochs: int = _optimizer(
        200,
        "epochs",
        bounds=AT_LEAST_1,
        metavar="EPOCHS",
        common=True,
        acts_when=lambda c: not c.curriculum,
        why=_LESSONS,
    )
    iterations: int = _optimizer(50, "steps per epoch", bounds=AT_LEAST_1, metavar="STEPS", common=True)
    curriculum: str = _optimizer(
        "",
        "lessons of the run, TILE:EPOCHS[:BATCH[xMICRO-BATCHES]], as in 64:4800,128:1200,whole:300: small tiles around "
        "labelled voxels first; replaces --tile, --epochs and --batch",
        metavar="LESSONS",
        tasks=("segment", "pretrain"),
        fixed="its lessons say where the run is",
    )
    lr: float = _optimizer(
        1e-4, "learning rate at its highest, after the warm-up", bounds=ABOVE_0, metavar="RATE", common=True
    )
    optimizer: str = _optimizer("adam", "optimizer", choices=tuple(OPTIMIZERS), fixed=_STATE)
    weight_decay: float = _optimizer(
        0.0, "weight decay (not of norms, biases, positions)", bounds=NOT_NEGATIVE, metavar="RATE"
    )
    decay_all: bool = _optimizer(
        False,
        "weight decay of norms, biases and positions too (nnU-Net)",
        acts_when=lambda c: bool(c.weight_decay),
        why="there is no --weight-decay",
    )
    betas: tuple[float, ...] = _optimizer(
        (),
        f"decay rates: two of Adam, sgd's momentum, rmsprop's momentum and decay ({_OWN_BETAS})",
        metavar="RATE",
        acts_when=lambda c: len(c.betas) <= len(OPTIMIZERS[c.optimizer].betas),
        why=_betas_needed,
        gives_way=_has_other_betas,
    )
    amsgrad: bool = _optimizer(
        False,
        "divide by the largest of Adam's second moments so far",
        acts_when=lambda c: OPTIMIZERS[c.optimizer].has_amsgrad or not c.amsgrad,
        why="only adam and adamw have it",
        fixed=_STATE,
    )
    layer_decay: float = _optimizer(
        1.0,
        "ratio of a layer's learning rate to that of the next, in the encoder (0.75 is usual)",
        bounds=ABOVE_0_TO_1,
        metavar="FACTOR",
        networks=TOKENS,
    )
    schedule: str = _optimizer("cosine", "learning rate schedule", choices=tuple(SCHEDULES))
    decay_epochs: int = _of_steps(
        0, "with --schedule step: epochs after which the rate falls", bounds=NOT_NEGATIVE, metavar="EPOCHS"
    )
    decay_factor: float = _of_steps(
        0.1, "with --schedule step: what the rate is then multiplied by", bounds=ABOVE_0, metavar="FACTOR"
    )
    cycle_epochs: int = _optimizer(
        8,
        "with --schedule cyclic: epochs of a cycle",
        bounds=AT_LEAST_1,
        metavar="EPOCHS",
        acts_when=lambda c: c.schedule == "cyclic",
        why="--schedule {schedule} has no cycles",
    )
    scale_lr: bool = _optimizer(
        False, "at the start, multiply --lr and divide --iterations by the number of sequence groups"
    )
    warmup: int = _optimizer(0, "epochs of linear warm-up", bounds=NOT_NEGATIVE, metavar="EPOCHS")
    clip: float = _optimizer(0.0, "largest global gradient norm; 0: no clipping", bounds=NOT_NEGATIVE, metavar="NORM")
    precision: str = _optimizer(
        "fp32",
        "arithmetic; tf32 is NVIDIA's",
        choices=PRECISIONS,
        metavar="TYPE",
        common=True,
        idle_here=_needs_a_gpu,
    )
    seed: int = _optimizer(0, "seed of everything that is random", bounds=SEED, metavar="NUMBER")
