"""Pretrains an encoder without labels: ``torchrun launch/pretrain.py --seqpar 4 --preset mae``; flags as train's.

It is training for the task ``pretrain``: tokens are hidden and rebuilt from the others (a masked autoencoder).
"""

from collections.abc import Sequence

from seqpar.cli.train import act as train
from seqpar.cluster import exit_codes
from seqpar.runs.run_folder import holds_run, read_config
from seqpar.settings.parser import Parser
from seqpar.settings.presets import PRESETS

TASK = "pretrain"


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 finished, 75 preempted and resumable; a user's errors are raised."""
    own, _ = _parser().parse_known_args(list(arguments))
    if own.task not in (None, TASK):
        raise ValueError(f"--task {own.task}: this program pretrains: start train for other tasks")
    if own.resume and own.out and holds_run(own.out):
        task = read_config(own.out).get("config", {}).get("task", TASK)
        if task != TASK:
            raise ValueError(f"--resume --out {own.out}: that run has --task {task}: resume it with train")
    return train([*([] if own.task else ["--task", TASK]), *arguments])


def _parser() -> Parser:
    """Returns the parser of what is looked at here, and of --help."""
    names = [name for name, preset in PRESETS.items() if preset().task == TASK]
    parser = Parser(
        TASK,
        usage="%(prog)s [--data FOLDER] [--out RUN] [any flag of train]",
        description="Pretrains the encoder of a network on images without labels, by hiding most of their tokens and "
        "rebuilding them; without --data on built-in phantom brains. train --weights RUN starts from it.",
        epilog="All flags of train work here too, such as --resume, --seqpar, --dry-run: train --help all lists them. "
        "Exit codes are those of train.",
    )
    add = parser.add_argument
    add("--preset", metavar="NAME", help=f"named settings to start from: {', '.join(names)}, or any of train's "
        "(mae with a GPU, else mae-laptop)")  # fmt: skip
    add("--data", metavar="FOLDER", help="data set as train takes it, or a folder of images")
    add("--mask-ratio", metavar="SHARE", help="share of a tile's tokens that is hidden (0.75)")
    add("--rebuild-blocks", metavar="BLOCKS", help="blocks that rebuild what is hidden (2)")
    add("--rebuild-width", metavar="CHANNELS", help="width of a token in these blocks; 0: as in the encoder (0)")
    add("--normalised-targets", action="store_true", help="rebuild each patch without its mean, and divided by its "
        "standard deviation")  # fmt: skip
    add("--out", metavar="FOLDER", help="run folder; none: runs/<preset>-<time>")
    add("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    add("--task", metavar="TASK", help="pretrain, and nothing else here")
    return parser


def main() -> None:
    """Ends the process with the act's exit code."""
    exit_codes.leave(exit_codes.run(act))


if __name__ == "__main__":
    main()
