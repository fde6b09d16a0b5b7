"""The settings of a run's course: validation and curves, its folder, memory and device, time limits."""

from dataclasses import dataclass
from functools import partial

from seqpar.parallel.meeting import START_S
from seqpar.settings.field import ABOVE_0, AT_LEAST_1, BELOW_1, NOT_NEGATIVE, SECONDS, SUPERVISED, VOXELS, setting
from seqpar.settings.network_settings import TOKENS
from seqpar.vit.blocks import RECOMPUTED

TOKEN_ORDERS = ("auto", "whd", "hwd")
UNKNOWN_TRAINERS = ("take", "refuse")
TRACKERS = ("none", "wandb", "trackio")
DEVICE_KINDS = ("auto", "cpu", "cuda")
MIRRORS = ("none", "W", "D", "H", "WD", "WH", "DH", "WDH")
_watching = partial(setting, section="validation and curves")
_running = partial(setting, section="run folder")
_device = partial(setting, section="memory and device")
_limits = partial(setting, section="time limits and checks")


@dataclass(frozen=True)
class RunSettings:
    """How a run is watched, kept and limited; a part of ``Config``."""

    val_every: int = _watching(
        10,
        "epochs between validations (one always ends the run)",
        bounds=NOT_NEGATIVE,
        metavar="EPOCHS",
        common=True,
    )
    patience: int = _watching(
        0,
        "validations in a row without a better score after which the run ends as finished; 0: never",
        bounds=NOT_NEGATIVE,
        metavar="VALIDATIONS",
        acts_when=lambda c: c.val_every > 0 and not c.curriculum,
        why=lambda c: "a curriculum trains every lesson to its end" if c.curriculum else "--val-every 0 validates once",
    )
    val_cases: int = _watching(
        0,
        "held-out cases per validation, with --task classify from each class in turn; 0: all (a run "
        "always validates when it ends)",
        bounds=NOT_NEGATIVE,
        metavar="CASES",
    )
    val_overlap: float = _watching(
        0.5, "overlap of sliding windows in validation, as a share", bounds=BELOW_1, metavar="SHARE", tasks=VOXELS
    )
    val_window: str = _watching(
        "sliding",
        "how validation predicts a volume: in sliding windows, in one pass over all of it, or both, to record "
        "which is better for predict",
        choices=("sliding", "whole", "both"),
        tasks=VOXELS,
    )
    val_mirror: str = _watching(
        "none",
        "directions in which validation, and later predict, flip a volume, to average the logits; with nnU-Net's "
        "weights those that it flipped",
        choices=MIRRORS,
        tasks=VOXELS,
    )
    tensorboard: bool = _watching(False, "write curves and pictures for TensorBoard too")
    tracker: str = _watching("none", "send curves and pictures to an experiment tracker too", choices=TRACKERS)
    neurological: bool = _watching(False, "show the patient's left on the left, else on the right (radiological)")

    out: str = _running("", "run folder; none: runs/<preset>-<time>", metavar="FOLDER", common=True)
    weights: str = _running(
        "",
        "pretrained weights to start from: run folder, file (ours, MONAI's, MedNeXt's, Primus', nnU-Net's), or address",
        metavar="RUN",
        common=True,
    )
    token_order: str = _running(
        "auto",
        "order of tokens in --weights of Primus; auto: the trainer's order in files of pretrainings, else whd",
        choices=TOKEN_ORDERS,
        acts_when=lambda c: bool(c.weights),
        why="there are no --weights",
    )
    trainer_unknown: str = _running(
        UNKNOWN_TRAINERS[0],
        "nnU-Net's --weights by a trainer that is not one of its own: take them if all tensors fit the plan's network, "
        "or refuse them",
        choices=UNKNOWN_TRAINERS,
        acts_when=lambda c: bool(c.weights),
        why="there are no --weights",
    )
    resume: bool = _running(False, "continue the run in --out from its last checkpoint", common=True)
    again: bool = _running(
        False, "if --out holds a run: continue it if it was interrupted; if it has ended, use OUT-2, OUT-3, ..."
    )
    take_over: bool = _running(
        False,
        "take --out over from a training that may still run there; that one then leaves",
        acts_when=lambda c: bool(c.out),
        why="nobody holds a new folder; or name the folder with --out",
    )
    checkpoint_minutes: float = _running(15.0, "minutes between checkpoints", bounds=ABOVE_0, metavar="MINUTES")

    grad_checkpoint: str = _device(
        "none", "what backward recomputes: less memory, more time", choices=RECOMPUTED, common=True
    )
    mlp_chunks: int = _device(
        1,
        "chunks of tokens that an MLP takes in turn, recomputed in backward; 1: all at once",
        bounds=AT_LEAST_1,
        metavar="CHUNKS",
        networks=TOKENS,
    )
    shard_weights: bool = _device(False, "shard weights, gradients and optimizer states over all ranks (FSDP2)")
    compile: bool = _device(False, "compile the MLPs of the blocks", networks=TOKENS)
    cuda_graph: bool = _device(
        False,
        "replay each step's passes as CUDA graphs, for small tiles",
        tasks=SUPERVISED,
        acts_when=lambda c: c.seqpar == c.pipe == 1 and not c.shard_weights,
        why="ranks exchange messages within a pass (--seqpar, --pipe, --shard-weights)",
        idle_here=lambda c, here: "without a GPU" if here.has_gpu is False and c.cuda_graph else "",
    )
    deterministic: bool = _device(
        False,
        "the same bits each time on the same GPUs, slower; CPUs do so anyway",
        idle_here=lambda c, here: "without a GPU" if here.has_gpu is False and c.deterministic else "",
    )
    device: str = _device("auto", "device; auto: a GPU if there is one", choices=DEVICE_KINDS, common=True)

    time_limit: str = _limits(
        "", "save and leave before this time has passed: minutes, H:MM:SS or none", metavar="TIME", common=True
    )
    start_timeout: float = _limits(
        START_S, "seconds that ranks may wait until step 1 is done", bounds=SECONDS, metavar="SECONDS"
    )
    timeout: float = _limits(
        300.0, "seconds that ranks may wait from step 2 on, saving included", bounds=SECONDS, metavar="SECONDS"
    )
    debug_collectives: bool = _limits(False, "check each collective: slow, names ranks that differ")
    dry_run: bool = _limits(False, "print what would run, check it, and stop", common=True)

    @property
    def mirror(self) -> tuple[int, ...]:
        """The directions of ``val_mirror`` by their numbers: 0 W, 1 D, 2 H."""
        return tuple(number for number, letter in enumerate("WDH") if letter in self.val_mirror)
