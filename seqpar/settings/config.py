"""Config: every setting of a run with its default, its bounds and its line in --help."""

import dataclasses
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from seqpar.attention.strategies import NAMES
from seqpar.decoders.modes.named_modes import MODES
from seqpar.decoders.named_decoders import DECODERS
from seqpar.losses.named_losses import LOSSES
from seqpar.losses.terms import LossOptions
from seqpar.optimization.optimizers import OPTIMIZERS, OptimizerOptions
from seqpar.optimization.schedules import SCHEDULES, ScheduleOptions
from seqpar.parallel.layout import SPLITS
from seqpar.parallel.meeting import START_S
from seqpar.settings.data_settings import DataSettings
from seqpar.settings.field import ABOVE_0, ABOVE_0_TO_1, AT_LEAST_1, BELOW_1, GAMMA, NOT_NEGATIVE, SEED, setting
from seqpar.settings.network_settings import EncoderSettings
from seqpar.settings.parallel_settings import PipeSettings
from seqpar.settings.pretraining_settings import PretrainSettings
from seqpar.vit.blocks import RECOMPUTED
from seqpar.vit.tokens import POSITIONS

AUTO = 0  # value of --seqpar auto: the planner chooses
PRECISIONS = ("fp32", "tf32", "bf16", "fp64")
TOKEN_ORDERS = ("auto", "whd", "hwd")
TRACKERS = ("none", "wandb", "trackio")
DEVICE_KINDS = ("auto", "cpu", "cuda")
DICE = ("linear", "squared")
NORMS = ("own", "batch", "group", "instance")
_OWN_BETAS = ", ".join(
    f"{name} {' '.join(f'{beta:g}' for beta in kind.betas)}" for name, kind in OPTIMIZERS.items() if kind.betas
)
_layout = partial(setting, topic="layout")
_network = partial(setting, topic="network")
_training = partial(setting, topic="training")
_watching = partial(setting, topic="watching")
_running = partial(setting, topic="running")


@dataclass(frozen=True)
class Config(PipeSettings, PretrainSettings, EncoderSettings, DataSettings):
    """Every setting of a training run; what a run does follows from it, the data and the ranks."""

    seqpar: int = _layout(
        1, "ranks that share a tile; auto: the fewest whose memory suffices", bounds=AT_LEAST_1, metavar="RANKS"
    )
    split: str = _layout("spatial", "which tokens of a tile a rank holds", choices=SPLITS)
    mode: str = _layout(
        "gather",
        "what a rank decodes: the whole tile (gather), its box (halo), whole samples (swap), one of these two (auto), "
        "or its part as if there were no other (nogather)",
        choices=MODES,
    )
    attention: str = _layout(
        "auto", f"how attention crosses ranks: auto, {', '.join(NAMES)}, hybrid:U", metavar="STRATEGY"
    )
    keep_kv: bool = _layout(False, "keep gathered keys and values: fewer bytes sent, more memory")
    measured: str = _layout("", "figures of launch/doctor.py (--json) to choose and plan by", metavar="FILE")
    heads_per_chunk: int = _layout(0, "heads whose keys and values are gathered at a time; 0: by size", metavar="HEADS")
    tile: tuple[int, ...] = _layout((96, 96, 96), "side of a tile in voxels: one number or three", metavar="VOXELS")
    patch: tuple[int, ...] = _layout(
        (16, 16, 16), "side of a token in voxels: 2, 4, 8 or 16, or three of them", metavar="VOXELS"
    )

    network: str = _network(
        "vit",
        "network: a Vision Transformer with a decoder, a U-Net without tokens, or with --task classify a 3D-ResAttNet",
        metavar="NAME",
    )
    decoder: str = _network("plain", "decoder of the tokens", choices=tuple(DECODERS))
    depth: int = _network(12, "transformer blocks", bounds=AT_LEAST_1, metavar="BLOCKS")
    embed_dim: int = _network(768, "width of a token", bounds=AT_LEAST_1, metavar="CHANNELS")
    heads: int = _network(12, "attention heads", bounds=AT_LEAST_1, metavar="HEADS")
    mlp_ratio: float = _network(4.0, "hidden width of the MLP over --embed-dim", bounds=ABOVE_0, metavar="RATIO")
    mlp: str = _network("gelu", "MLP of the blocks", choices=("gelu", "swiglu"))
    qkv_bias: bool = _network(True, "biases on queries and values")
    attention_norm: bool = _network(False, "norm over the joined heads (EVA-02, Primus)")
    positions: str = _network("learned", "position encoding", choices=POSITIONS)
    skips: str = _network("monai", "blocks whose tokens the unetr decoder takes", choices=("monai", "paper"))
    dropout: float = _network(0.0, "share of activations dropped", bounds=BELOW_1, metavar="SHARE")
    drop_path: float = _network(
        0.0, "share of residual branches dropped in the last block", bounds=BELOW_1, metavar="SHARE"
    )
    layer_scale: float = _network(0.0, "initial value of layer scale; 0: none", bounds=NOT_NEGATIVE, metavar="VALUE")
    decoder_width: int = _network(
        128, "channels of the decoder (unetr: of its finest level)", bounds=AT_LEAST_1, metavar="CHANNELS"
    )
    features: int = _network(
        0, "U-Nets, resattnet: channels of the first stage; 0: as published", bounds=NOT_NEGATIVE, metavar="CHANNELS"
    )
    pooling: str = _network(
        "mean", "vit with --task classify: mean of the tokens, or a class token", choices=("mean", "token")
    )
    norm: str = _network("own", "U-Nets: norm of all layers", choices=NORMS)
    stages: str = _network(
        "",
        "nnunet-…: kernel and stride of each stage, as '133:111 333:122 333:222', and maybe features and convolutions "
        "down and up, as 133:111:32:2:2; none: by the tile",
        metavar="STAGES",
    )
    plans: str = _network(
        "",
        "nnunet-…: plans.json of nnU-Net's (or FILE:CONFIGURATION), whose network, tile, batch, spacing and kind of "
        "Dice are taken where no flag says otherwise",
        metavar="FILE",
    )
    deep_supervision: bool = _network(False, "nnunet-…: train the logits of all levels but the coarsest")
    output_bias: bool = _network(True, "start with biases of the outputs by which foreground is rare; else torch's own")

    batch: int = _training(
        0, "tiles per sequence group and micro-batch; 0: chosen by memory", bounds=NOT_NEGATIVE, metavar="TILES"
    )
    accumulate: int = _training(1, "micro-batches per step", bounds=AT_LEAST_1, metavar="BATCHES")
    global_batch: int = _training(
        0,
        "tiles a step over all ranks, held by --accumulate (or --batch) on any number of them; 0: not held",
        bounds=NOT_NEGATIVE,
        metavar="TILES",
    )
    epochs: int = _training(200, "epochs", bounds=AT_LEAST_1, metavar="EPOCHS")
    curriculum: str = _training(
        "",
        "lessons of the run, TILE:EPOCHS[:BATCH[xMICRO-BATCHES]], as 64:4800,128:1200,whole:300: small tiles around "
        "labelled voxels first; in place of --tile, --epochs and --batch",
        metavar="LESSONS",
    )
    iterations: int = _training(50, "steps per epoch", bounds=AT_LEAST_1, metavar="STEPS")
    lr: float = _training(1e-4, "highest learning rate", bounds=ABOVE_0, metavar="RATE")
    optimizer: str = _training("adam", "optimizer", choices=tuple(OPTIMIZERS))
    weight_decay: float = _training(
        0.0, "weight decay (not of norms, biases, positions)", bounds=NOT_NEGATIVE, metavar="RATE"
    )
    decay_all: bool = _training(False, "weight decay of norms, biases and positions too (nnU-Net)")
    betas: tuple[float, ...] = _training(
        (), f"decay rates: two of Adam, sgd's momentum, rmsprop's momentum and decay ({_OWN_BETAS})", metavar="RATE"
    )
    amsgrad: bool = _training(False, "divide by the largest of Adam's second moments so far")
    layer_decay: float = _training(
        1.0,
        "rate of a layer of the encoder over that of the next (0.75 is usual)",
        bounds=ABOVE_0_TO_1,
        metavar="FACTOR",
    )
    schedule: str = _training("cosine", "learning rate schedule", choices=tuple(SCHEDULES))
    decay_epochs: int = _training(
        0, "with --schedule step: epochs after which the rate falls", bounds=NOT_NEGATIVE, metavar="EPOCHS"
    )
    decay_factor: float = _training(
        0.1, "with --schedule step: by what it is multiplied then", bounds=ABOVE_0, metavar="FACTOR"
    )
    cycle_epochs: int = _training(8, "with --schedule cyclic: epochs of a cycle", bounds=AT_LEAST_1, metavar="EPOCHS")
    scale_lr: bool = _training(False, "at the start, multiply --lr and divide --iterations by the groups")
    warmup: int = _training(0, "epochs of linear warm-up", bounds=NOT_NEGATIVE, metavar="EPOCHS")
    clip: float = _training(0.0, "largest global gradient norm; 0: no clipping", bounds=NOT_NEGATIVE, metavar="NORM")
    precision: str = _training("fp32", "arithmetic; tf32 is NVIDIA's", choices=PRECISIONS, metavar="TYPE")
    loss: str = _training("dice-ce", "loss", choices=tuple(LOSSES))
    loss_weights: tuple[float, ...] = _training(
        (), "weights of the loss's terms, such as 0.9 0.1 (1 each)", metavar="WEIGHT"
    )
    class_weights: tuple[float, ...] = _training(
        (), "weights of the outputs in the loss, background first (1 each)", metavar="WEIGHT"
    )
    focal_gamma: float = _training(
        2.0,
        "exponent of the focal loss: the larger, the less do voxels count that are right already",
        bounds=GAMMA,
        metavar="EXPONENT",
    )
    dice: str = _training("linear", "denominator of soft Dice: probabilities, or their squares (V-Net)", choices=DICE)
    dice_smooth: float = _training(
        1e-5, "what soft Dice adds to numerator and denominator", bounds=NOT_NEGATIVE, metavar="NUMBER"
    )
    dice_background: bool = _training(False, "count the background in Dice too, where outputs exclude each other")
    batch_dice: bool = _training(False, "Dice over the batch instead of per tile")
    seed: int = _training(0, "seed of everything that is random", bounds=SEED, metavar="NUMBER")

    val_every: int = _watching(
        10, "epochs between validations (one always ends the run)", bounds=NOT_NEGATIVE, metavar="EPOCHS"
    )
    val_cases: int = _watching(
        0, "held-out cases per validation, of classes from each in turn; 0: all", bounds=NOT_NEGATIVE, metavar="CASES"
    )
    val_overlap: float = _watching(
        0.5, "overlap of sliding windows in validation, as a share", bounds=BELOW_1, metavar="SHARE"
    )
    val_window: str = _watching(
        "sliding",
        "how validation predicts a volume: in sliding windows, in one pass over the whole of it, or both, to record "
        "which is better for predict",
        choices=("sliding", "whole", "both"),
    )
    tensorboard: bool = _watching(False, "write curves and pictures for TensorBoard too")
    tracker: str = _watching("none", "send curves and pictures to an experiment tracker too", choices=TRACKERS)
    neurological: bool = _watching(False, "show the patient's left on the left, else on the right (radiological)")

    weights: str = _running(
        "",
        "pretrained weights to start from: a run folder, or a file (ours, MONAI's, Primus' or nnU-Net's)",
        metavar="RUN",
    )
    token_order: str = _running(
        "auto",
        "order of tokens in --weights of Primus; auto: in files of pretrainings their trainer's, else whd",
        choices=TOKEN_ORDERS,
    )
    resume: bool = _running(False, "continue the run in --out from its last checkpoint")
    again: bool = _running(
        False, "where --out holds a run: continue it if it was interrupted; if it has ended, use OUT-2, OUT-3, ..."
    )
    take_over: bool = _running(False, "take --out over from a training that may still run there; that one then leaves")
    time_limit: str = _running("", "save and leave before this time has passed: minutes or H:MM:SS", metavar="TIME")
    checkpoint_minutes: float = _running(15.0, "minutes between checkpoints", bounds=ABOVE_0, metavar="MINUTES")
    grad_checkpoint: str = _running("none", "what backward recomputes: less memory, more time", choices=RECOMPUTED)
    mlp_chunks: int = _running(
        1,
        "chunks of tokens that an MLP takes in turn, recomputed in backward; 1: all at once",
        bounds=AT_LEAST_1,
        metavar="CHUNKS",
    )
    shard_weights: bool = _running(False, "shard weights, gradients and optimizer states over all ranks (FSDP2)")
    compile: bool = _running(False, "compile the MLPs of the blocks")
    deterministic: bool = _running(False, "the same bits in every run on the same GPUs, slower; a CPU's are anyway")
    device: str = _running("auto", "device; auto: a GPU where there is one", choices=DEVICE_KINDS)
    start_timeout: float = _running(
        START_S, "seconds that ranks may wait for each other before step 1", bounds=ABOVE_0, metavar="SECONDS"
    )
    timeout: float = _running(
        300.0, "seconds that ranks may wait from step 2 on, saving included", bounds=ABOVE_0, metavar="SECONDS"
    )
    debug_collectives: bool = _running(False, "check each collective: slow, names ranks that differ")
    dry_run: bool = _running(False, "print what would run, check it, and stop")

    def __post_init__(self) -> None:
        if isinstance(self.patch, int):  # of a cube, as scripts and the configs of earlier runs have it
            object.__setattr__(self, "patch", (self.patch,) * 3)

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """The names of the loss's terms."""
        return tuple(term.name for term in LOSSES[self.loss](LossOptions()))

    @property
    def group_ranks(self) -> int:
        """The ranks that share a tile: those of all stages."""
        return max(1, self.seqpar) * self.pipe

    @property
    def depths(self) -> int | tuple[int, ...]:
        """The blocks of the encoder, or of each of its stages."""
        return self.depth if self.encoder == "plain" else self.stage_depths

    @property
    def steps(self) -> int:
        return self.epochs * self.iterations

    @property
    def optimizer_options(self) -> OptimizerOptions:
        """What the optimizer is made of."""
        blocks = (self.depths,) if isinstance(self.depths, int) else self.depths
        return OptimizerOptions(
            self.lr,
            self.betas,
            self.amsgrad,
            self.optimizer,
            self.weight_decay,
            self.decay_all,
            self.layer_decay,
            blocks,
        )

    @property
    def schedule_options(self) -> ScheduleOptions:
        """What the learning rate of each step follows from."""
        return ScheduleOptions(
            self.lr,
            self.schedule,
            self.steps,
            self.warmup * self.iterations,
            self.iterations,
            self.decay_epochs * self.iterations,
            self.decay_factor,
            self.cycle_epochs * self.iterations,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """Returns the config of a saved run from its JSON values; refuses unknown names."""
        known = {f.name for f in dataclasses.fields(cls)}
        if values.keys() - known:
            raise ValueError(f"config.json: unknown settings {', '.join(sorted(values.keys() - known))}")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        usual = cls()
        for name, value in plain.items():
            kind = type(getattr(usual, name))
            also = {"patch": int, float: int}  # a cube's side; whole numbers
            if not isinstance(value, (kind, also.get(name) or also.get(kind, kind))):
                raise ValueError(
                    f"config.json: {name} is {value!r}, and a value such as {getattr(usual, name)!r} is needed"
                )
        return replace(usual, **plain)
