"""What a run is asked to do: command line, resumed settings, and what was left open."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from seqpar.environment import Launcher
from seqpar.launch.planning.auto_settings import choose
from seqpar.launch.planning.batch_size import keep_global_batch
from seqpar.launch.planning.feasibility import refuse
from seqpar.launch.runs.run_folder import read_config
from seqpar.launch.settings.command_line import continued, parse, refuse_idle
from seqpar.launch.settings.config import AUTO, Config
from seqpar.launch.training.data import open_data


@dataclass(frozen=True)
class RunRequest:
    """What was asked for: the settings, and where they came from."""

    config: Config
    preset: str
    why: str
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # what was left open, and why it is what it is

    @property
    def told(self) -> list[str]:
        """The first line on each choice."""
        return [lines[0] for lines in self.chosen.values()]


def read_request(arguments: Sequence[str], launcher: Launcher) -> RunRequest:
    default = "paper" if torch.cuda.is_available() else "laptop"
    preset, config, given = parse(arguments, default)
    told = any(text.startswith("--preset") for text in arguments)
    why = "as told" if told else f"the default where there is {'an' if default == 'paper' else 'no'} accelerator"
    if not config.resume and _is_restart(launcher) and _holds_run(config.out):
        config = replace(config, resume=True)  # the scheduler runs the same line again
    if config.resume:
        if not config.out:
            raise ValueError("--resume needs --out, the run folder to continue")
        content = read_config(config.out)
        began = content.get("preset", preset)
        if told and preset != began:
            raise ValueError(f"--preset {preset}: the run in {config.out} goes on as it began, {began}: leave it out")
        wish: dict[str, int] = {name: getattr(config, name) for name in ("batch", "accumulate") if name in given}
        config = continued(Config.from_dict(content["config"]), config, given - {"resume", *wish})
        tiles = content["layout"]["data"] * config.batch * config.accumulate
        preset, why = began, f"as the run in {config.out} began"
    refuse_idle(config, given)
    chosen = dict[str, tuple[str, ...]]()
    if config.seqpar == AUTO or not config.batch:
        if config.seqpar != AUTO:
            refuse(config)  # before data is prepared
        config, chosen = choose(config, launcher, *channels_of(config, launcher))
    if config.resume:
        groups = max(launcher.world, config.seqpar) // config.seqpar
        config = keep_global_batch(config, tiles, groups, wish)
    refuse(config)
    return RunRequest(config, preset, why, chosen)


def channels_of(config: Config, launcher: Launcher) -> tuple[int, int]:
    """Returns the channels of images and outputs of the network."""
    if config.dry_run:
        return 4, 4  # no data is prepared
    material = open_data(config, launcher.rank == 0)
    return material.num_channels, material.num_outputs


def _is_restart(launcher: Launcher) -> bool:
    return launcher.attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _holds_run(out: str) -> bool:
    return bool(out) and (Path(out) / "config.json").exists()


def refuse_other_run(config: Config) -> None:
    if not config.resume and _holds_run(config.out):
        raise ValueError(f"--out {config.out} holds a run already: add --resume to continue it, or name another folder")
