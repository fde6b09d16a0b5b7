"""The settings of a run: a frozen dataclass that refuses what cannot work, and presets as functions."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seqpar.attention.strategies import NAMES, check_strategy
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.layout import SPLITS, Layout
from seqpar.rendezvous import START_S
from seqpar.vit.blocks import RECOMPUTED
from seqpar.vit.tokens import POSITIONS

AUTO = 0  # of --seqpar: chosen by what fits
PRECISIONS = ("fp32", "bf16", "fp64")
_AT_LEAST_1 = (
    "depth", "embed_dim", "heads", "accumulate", "iterations", "epochs", "seqpar", "decoder_width", "patch",
    "mlp_chunks",
)  # fmt: skip
_NOT_NEGATIVE = (
    "batch", "workers", "warmup", "val_every", "val_cases", "clip", "weight_decay", "seed", "layer_scale"
)  # fmt: skip
_SHARES = ("dropout", "drop_path", "val_overlap")
_ABOVE_0 = ("lr", "mlp_ratio", "checkpoint_minutes", "start_timeout", "timeout")


def _flag(default: Any, text: str, choices: Sequence[str] = (), topic: str = "training") -> Any:
    return field(default=default, metadata={"help": text, "choices": tuple(choices), "topic": topic})


@dataclass(frozen=True)
class Config:
    """Every setting of a training run; what a run does follows from it, the data and the ranks."""

    data: str = _flag("", "data set: nnU-Net, MSD, BraTS or MONAI folder; none: built-in phantom brains", topic="data")
    out: str = _flag("", "run folder; none: runs/<preset>-<time>", topic="data")
    spacing: str = _flag("source", "voxels that the data is prepared to: source, median, or R,A,S in mm", topic="data")
    cache: str = _flag("", "folder of prepared data; none: in $SEQPAR_CACHE, else DATA.prepared", topic="data")
    fold: str = _flag("0", "number of nnU-Net's fold or the data set's own, 90:10, or all", topic="data")
    workers: int = _flag(2, "processes per rank that prepare tiles; 0: none", topic="data")
    augment: str = _flag("light", "augmentation", ("none", "light", "full", "paper"), topic="data")
    synthesis: float = _flag(0.0, "share of tiles whose tumour gives way to a synthetic one; 0: none", topic="data")
    foreground: float = _flag(0.33, "share of tiles drawn around a labelled voxel (nnU-Net: 0.33)", topic="data")
    phantoms: int = _flag(24, "number of phantom cases where no --data is given", topic="data")

    seqpar: int = _flag(1, "ranks that share a tile; auto: the fewest whose memory suffices", topic="layout")
    split: str = _flag("spatial", "how a tile's tokens are shared out", SPLITS, topic="layout")
    mode: str = _flag("gather", "how tokens reach the decoder", topic="layout")
    attention: str = _flag("auto", f"how attention crosses ranks: auto, {', '.join(NAMES)}, hybrid:U", topic="layout")
    keep_kv: bool = _flag(False, "hold what attention gathered until backward: fewer bytes", topic="layout")
    measured: str = _flag("", "what launch/doctor.py measured (--json), to choose and plan by", topic="layout")
    heads_per_chunk: int = _flag(0, "heads whose keys and values are there at a time; 0: by size", topic="layout")
    tile: tuple[int, ...] = _flag((96, 96, 96), "voxels of a tile: one number or three", topic="layout")
    patch: int = _flag(16, "voxels of a token along each side", topic="layout")

    decoder: str = _flag("plain", "decoder", topic="network")
    depth: int = _flag(12, "transformer blocks", topic="network")
    embed_dim: int = _flag(768, "width of a token", topic="network")
    heads: int = _flag(12, "attention heads", topic="network")
    mlp_ratio: float = _flag(4.0, "hidden width of the MLP over --embed-dim", topic="network")
    mlp: str = _flag("gelu", "the blocks' MLP", ("gelu", "swiglu"), topic="network")
    qkv_bias: bool = _flag(True, "biases on queries and values", topic="network")
    attention_norm: bool = _flag(False, "a norm over the joined heads (EVA-02, Primus)", topic="network")
    positions: str = _flag("learned", "position encoding", POSITIONS, topic="network")
    skips: str = _flag("monai", "unetr: which blocks it takes", ("monai", "paper"), topic="network")
    dropout: float = _flag(0.0, "share of activations dropped", topic="network")
    drop_path: float = _flag(0.0, "share of residual branches dropped in the last block", topic="network")
    layer_scale: float = _flag(0.0, "start of the learned factor on each branch; 0: none", topic="network")
    decoder_width: int = _flag(128, "channels of the decoder (unetr: of its finest level)", topic="network")

    batch: int = _flag(0, "tiles per sequence group; 0: chosen by memory", topic="training")
    accumulate: int = _flag(1, "micro-batches per step")
    epochs: int = _flag(200, "epochs")
    iterations: int = _flag(50, "steps per epoch")
    lr: float = _flag(1e-4, "highest learning rate")
    optimizer: str = _flag("adam", "optimiser", ("adam", "adamw", "sgd"))
    weight_decay: float = _flag(0.0, "weight decay (not on norms, biases, positions)")
    betas: tuple[float, ...] = _flag((0.9, 0.999), "Adam's two decay rates (sgd: the first is its momentum)")
    schedule: str = _flag("cosine", "learning rate over the run", ("cosine", "poly", "constant"))
    warmup: int = _flag(0, "epochs of linear warm-up")
    clip: float = _flag(0.0, "largest global gradient norm; 0: any")
    precision: str = _flag("fp32", "arithmetic", PRECISIONS)
    batch_dice: bool = _flag(False, "Dice over the batch rather than per tile")
    seed: int = _flag(0, "number from which all randomness follows")

    val_every: int = _flag(10, "epochs between validations (one always ends the run)", topic="watching")
    val_cases: int = _flag(0, "held-out cases per validation; 0: all", topic="watching")
    val_overlap: float = _flag(0.5, "overlap of sliding windows in validation", topic="watching")
    tensorboard: bool = _flag(False, "write curves for TensorBoard too", topic="watching")

    weights: str = _flag("", "start from these weights (ours, MONAI's or Primus')", topic="running")
    resume: bool = _flag(False, "continue the run in --out exactly where it stopped", topic="running")
    time_limit: str = _flag("", "save and leave before this much time has passed: minutes or H:MM:SS", topic="running")
    checkpoint_minutes: float = _flag(15.0, "minutes between checkpoints", topic="running")
    grad_checkpoint: str = _flag(
        "none", "what backward computes again: less memory, more time", RECOMPUTED, topic="running"
    )
    mlp_chunks: int = _flag(1, "runs of tokens that MLPs take in turn, each computed again in backward; 1: all at once",
                            topic="running")  # fmt: skip
    shard_weights: bool = _flag(
        False, "each rank holds its share of weights, gradients and optimiser states (FSDP2)", topic="running"
    )
    compile: bool = _flag(False, "compile the blocks' MLPs", topic="running")
    device: str = _flag("auto", "device", ("auto", "cpu", "cuda"), topic="running")
    start_timeout: float = _flag(START_S, "seconds that ranks may wait for each other before step 1", topic="running")
    timeout: float = _flag(300.0, "the same from step 2, saving included: who is longer is named", topic="running")
    debug_collectives: bool = _flag(False, "check each collective: slow, names ranks that differ", topic="running")
    dry_run: bool = _flag(False, "say what would run, check it, and stop", topic="running")

    def check(self, decoders: Sequence[str], modes: Sequence[str]) -> None:
        """Refuses what cannot work, before anything is allocated, with the nearest that does."""
        for name, choices in self._choices(decoders, modes).items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{dashed(name)} {getattr(self, name)}: choose one of {', '.join(choices)}")
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ValueError(f"--{dashed(name)} {getattr(self, name)}: it must be at least 1")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{dashed(name)} {getattr(self, name)}: it must not be negative")
        for name in _SHARES:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{dashed(name)} {getattr(self, name)}: it must lie in [0, 1)")
        for name in _ABOVE_0:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{dashed(name)} {getattr(self, name)}: it must be above 0")
        if not 0 <= self.foreground <= 1:
            raise ValueError(f"--foreground {self.foreground}: it must lie in [0, 1]; 0.33 is usual")
        if not 0 <= self.synthesis <= 1:
            raise ValueError(f"--synthesis {self.synthesis}: it must lie in [0, 1]; 0.5 is usual")
        if len(self.tile) != 3:
            raise ValueError(f"--tile {' '.join(map(str, self.tile))}: give one number, or three")
        if self.patch not in (2, 4, 8, 16):
            near = min((2, 4, 8, 16), key=lambda side: abs(math.log2(side / self.patch)))
            raise ValueError(f"--patch {self.patch}: the decoders double the grid; use --patch {near}")
        if self.embed_dim % self.heads:
            fits = min((h for h in range(1, self.embed_dim + 1) if self.embed_dim % h == 0), key=self._far_from_heads)
            raise ValueError(f"--heads {self.heads} does not divide --embed-dim {self.embed_dim}: use --heads {fits}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--betas {' '.join(map(str, self.betas))}: two numbers in [0, 1), such as 0.9 0.999")
        if self.warmup and self.warmup >= self.epochs:
            raise ValueError(f"--warmup {self.warmup} leaves no epoch of {self.epochs}: use --warmup {self.epochs - 1}")
        if self.fold not in ("90:10", "all") and not re.fullmatch("[0-9]+", self.fold):
            raise ValueError(f"--fold {self.fold}: choose a fold's number, such as 0, or 90:10, or all")
        if not self.data and self.phantoms < 5:
            raise ValueError(f"--phantoms {self.phantoms}: five folds need at least 5 cases")
        PrepareSettings.spaced(self.spacing)
        seconds(self.time_limit)
        if not 0 <= self.heads_per_chunk <= self.heads:
            raise ValueError(f"--heads-per-chunk {self.heads_per_chunk}: choose 1 to {self.heads}, or 0 for by size")
        if self.attention != "auto":
            check_strategy(self.attention, self.seqpar, self.heads, self.keep_kv)
        Layout.of(self.tile, self.patch, self.seqpar, self.split)

    def _far_from_heads(self, heads: int) -> int:
        return abs(heads - self.heads)

    def _choices(self, decoders: Sequence[str], modes: Sequence[str]) -> dict[str, tuple[str, ...]]:
        listed = {f.name: f.metadata["choices"] for f in dataclasses.fields(self) if f.metadata["choices"]}
        return {**listed, "decoder": tuple(decoders), "mode": tuple(modes)}

    @property
    def steps(self) -> int:
        return self.epochs * self.iterations

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """Returns the config of a saved run; lists become tuples, unknown names are refused."""
        known = {f.name for f in dataclasses.fields(cls)}
        if values.keys() - known:
            raise ValueError(f"config.json: unknown settings {', '.join(sorted(values.keys() - known))}")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return replace(cls(), **plain)


def dashed(name: str) -> str:
    """Returns a setting's name as it is written on the command line."""
    return name.replace("_", "-")


def seconds(text: str) -> float:
    """Returns a time limit in seconds: minutes, H:MM:SS or D-HH:MM:SS; infinity for none."""
    if not text:
        return math.inf
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text) * 60
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if not match:
        raise ValueError(f"--time-limit {text}: give minutes (110) or H:MM:SS (1:50:00)")
    days, hours, minutes, rest = (int(piece or 0) for piece in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
