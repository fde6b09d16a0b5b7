"""RunRequest: the settings of a run, from its command line, the run that it resumes, and the planner's choices."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.environment import Launcher
from seqpar.launch.job import exit_codes
from seqpar.launch.models.build import NETWORKS, refuse_unknown
from seqpar.launch.planning.auto_preset import plan_from_data
from seqpar.launch.planning.auto_settings import choose, device_of
from seqpar.launch.planning.batch_size import hold_global_batch, how_held, keep_global_batch
from seqpar.launch.planning.curriculum import choose_lessons, is_open, refuse_lessons
from seqpar.launch.planning.feasibility import refuse
from seqpar.launch.runs.archive import is_archive
from seqpar.launch.runs.run_folder import read_config
from seqpar.launch.runs.stale_status import killed
from seqpar.launch.runs.start_history import changed_settings
from seqpar.launch.settings.command_line import continued, idle_in_groups_of_one, parse, refuse_idle, shortened_warmup
from seqpar.launch.settings.config import AUTO, Config
from seqpar.launch.settings.curriculum import Lesson, lessons_of
from seqpar.launch.settings.presets import FROM_DATA
from seqpar.launch.training.data import TrainingData, look_at, open_data
from seqpar.launch.weights.nnunet_settings import with_plans

COME_AGAIN = (exit_codes.USAGE, exit_codes.DATA, exit_codes.MEMORY, exit_codes.NONFINITE)


@dataclass(frozen=True)
class RunRequest:
    """The resolved settings of a run, and where they came from.

    ``preset_reason`` says why the preset is this one. ``choices`` holds what the planner chose, by name: a sentence,
    then lines with figures. ``data`` is set where the planner needed its channels, so that it is opened once;
    ``fingerprint`` is set in its place for a dry run, which prepares nothing.
    ``idle`` is a line on flags that do nothing here.
    ``flags``: the settings on the command line.
    ``changes``: the settings of a resumed run that are not what they were.
    ``lessons``: the run's, one without a curriculum; ``config`` is that of the first.
    """

    config: Config
    preset: str
    preset_reason: str
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    data: TrainingData | None = None
    idle: str = ""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    flags: frozenset[str] = frozenset()
    lessons: tuple[Lesson, ...] = ()

    def __post_init__(self) -> None:
        if not self.lessons:
            object.__setattr__(self, "lessons", lessons_of(self.config))


@dataclass(frozen=True)
class _CommandLine:
    """The command line: its config, the names of the flags in it, and the preset."""

    config: Config
    flags: set[str]
    preset: str
    preset_reason: str
    names_preset: bool
    asked_out: str  # the folder on the command line; another one may be taken
    has_plan: bool  # nnU-Net's plans or weights say what the data would otherwise decide

    def numbers(self, *names: str) -> dict[str, int]:
        """Returns those of the settings that the command line has, and leaves them not open (0)."""
        return {name: getattr(self.config, name) for name in names if name in self.flags and getattr(self.config, name)}


def read_request(arguments: Sequence[str], launcher: Launcher) -> RunRequest:
    """Returns the resolved settings: command line, resumed run, planner's choices; refuses what cannot work."""
    line = _read_line(arguments, launcher)
    config, preset, reason = line.config, line.preset, line.preset_reason
    changes = dict[str, list[Any]]()
    if config.resume:
        saved = _read_saved(line)
        before = Config.from_dict(saved["config"])
        config = continued(before, config, line.flags - {"resume", "again", "batch", "accumulate"})
        preset, reason = saved.get("preset", preset), f"as the run in {config.out} began"
    refuse_unknown(config, line.flags)
    refuse_idle(config, line.flags)
    config, warmup = shortened_warmup(config, line.flags)
    plans = preset in FROM_DATA and not config.resume and not line.has_plan
    fingerprint = look_at(config) if config.dry_run or plans else None
    auto: dict[str, tuple[str, ...]] = {}
    if plans and fingerprint:
        num_ranks = max(launcher.world, config.seqpar)
        config, auto = plan_from_data(config, line.flags, fingerprint, device_of(config, launcher), num_ranks)
    config, choices, data = _choose_open_settings(config, launcher, fingerprint if config.dry_run else None)
    choices = {**auto, **choices}
    if warmup:
        choices = {"warmup": (warmup,), **choices}
    if line.config.out != line.asked_out:
        sentence = f"--again: {line.asked_out} holds a run that has ended, so this one goes into {config.out}"
        choices = {"out_choice": (sentence,), **choices}
    num_groups, lessons = max(launcher.world, config.seqpar) // config.seqpar, lessons_of(config)
    if config.resume:
        lessons = _keep_global_batches(lessons, saved["layout"], before, num_groups, line)
        changes = changed_settings(lessons_of(before)[0].config, lessons[0].config)
    elif config.global_batch > 0:
        lessons, sentence = _hold_global_batches(lessons, num_groups, line)
        choices = {**choices, "global_batch": (sentence,)}
    refuse_lessons(lessons)
    idle, flags = idle_in_groups_of_one(config, line.flags), frozenset(line.flags)
    return RunRequest(lessons[0].config, preset, reason, choices, data, idle, changes, fingerprint, flags, lessons)


def _keep_global_batches(
    lessons: tuple[Lesson, ...], layout: Mapping[str, Any], before: Config, num_groups: int, line: _CommandLine
) -> tuple[Lesson, ...]:
    """Returns the lessons with the batches that keep a run's tiles a step; ``layout``: that of its config.json."""
    tiles = layout.get("global_batches") or [layout["data"] * before.batch * before.accumulate]
    if "global_batch" in line.flags and any(line.config.global_batch != number for number in tiles):
        raise ValueError(
            f"--global-batch {line.config.global_batch}: the run in {line.config.out} has "
            f"{' and '.join(map(str, tiles))} tiles a step, which it keeps on any ranks: leave it out"
        )
    flags = line.numbers("batch", "accumulate")
    kept = [keep_global_batch(each.config, number, num_groups, flags) for each, number in zip(lessons, tiles)]
    return tuple(replace(lesson, config=config) for lesson, config in zip(lessons, kept))


def _hold_global_batches(
    lessons: tuple[Lesson, ...], num_groups: int, line: _CommandLine
) -> tuple[tuple[Lesson, ...], str]:
    """Returns the lessons with the batches that make ``--global-batch``, and a sentence on how."""
    flags = line.numbers("batch", "accumulate")
    now = [replace(each, config=hold_global_batch(each.config, num_groups, flags)) for each in lessons]
    how = dict.fromkeys(how_held(was.config, own.config, num_groups) for was, own in zip(lessons, now))
    return tuple(now), "; ".join(how)


def _read_line(arguments: Sequence[str], launcher: Launcher) -> _CommandLine:
    """Returns the command line; where a scheduler starts a run's line again, it resumes that run."""
    has_gpu = torch.cuda.is_available()
    preset, config, flags = parse(arguments, "paper" if has_gpu else "laptop", NETWORKS)
    asked_out, parsed = config.out, config
    config = with_plans(config, flags)
    has_plan = config is not parsed
    names_preset = any(text.startswith("--preset") for text in arguments)
    reason = "as told" if names_preset else f"the default where there is {'an' if has_gpu else 'no'} accelerator"
    if not config.resume and is_restart(launcher) and holds_run(config.out):
        config = replace(config, resume=True)
    elif config.again:
        config = _again(config)
    return _CommandLine(config, flags, preset, reason, names_preset, asked_out, has_plan)


def _again(config: Config) -> Config:
    """Returns the config of ``--again``: it continues an interrupted run, or takes the next folder without one."""
    if config.resume or not config.out:
        needed = "--out, the folder of the first run" if not config.out else "no --resume: leave one of both out"
        raise ValueError(f"--again needs {needed}")
    out, number = config.out, 1
    while holds_run(out) and _has_ended(out):
        number += 1
        out = f"{config.out}-{number}"
    return replace(config, out=out, resume=holds_run(out), again=False)


def _has_ended(out: str) -> bool:
    """Returns whether a run has finished, or failed of what would come again if it went on."""
    try:
        status = json.loads((Path(out) / "status.json").read_text())
        return status["state"] == "finished" or (status["state"] == "failed" and status["code"] in COME_AGAIN)
    except (OSError, ValueError, KeyError, TypeError):  # it was killed as it began
        return False


def _read_saved(line: _CommandLine) -> dict[str, Any]:
    """Returns the config.json of the run that the command line resumes."""
    out = line.config.out
    if not out:
        raise ValueError("--resume needs --out, the run folder to continue")
    if is_archive(out):
        raise ValueError(
            f"--resume --out {out}: that is a file, and training goes on only in the run folder that it wrote: name "
            f"that folder, or start a new one from an exported run's weights (--weights {out})"
        )
    content = read_config(out)
    preset = content.get("preset", line.preset)
    if line.names_preset and line.preset != preset:
        raise ValueError(f"--preset {line.preset}: the run in {out} goes on as it began, {preset}: leave it out")
    return content


def _choose_open_settings(
    config: Config, launcher: Launcher, fingerprint: Fingerprint | None
) -> tuple[Config, dict[str, tuple[str, ...]], TrainingData | None]:
    """Returns the config with group size and batch filled in, why they are these, and the data if it was needed."""
    if config.seqpar != AUTO and config.curriculum and not is_open(config):
        return *choose_lessons(config, launcher), None
    if config.seqpar != AUTO and config.batch and not config.curriculum:
        return config, {}, None
    if config.seqpar != AUTO and not config.curriculum:
        refuse(config)  # before data is prepared
    data = None if fingerprint else open_data(config, launcher.rank == 0)
    source = fingerprint or data
    sizes = sizes_of(source, config)
    if config.curriculum:
        return *choose_lessons(config, launcher, _largest_of(source, config), *sizes), data
    return *choose(config, launcher, *sizes), data


def sizes_of(source: Fingerprint | TrainingData | None, config: Config) -> tuple[int, int]:
    """Returns the channels of the images and the outputs of the network."""
    assert source is not None
    if isinstance(source, Fingerprint):
        return len(source.modalities), len(source.outputs(config.targets))
    return source.num_channels, source.num_outputs


def _largest_of(source: Fingerprint | TrainingData | None, config: Config) -> tuple[int, ...]:
    """Returns the voxels per direction that hold every case; by headers alone before what preparation crops."""
    assert source is not None
    if isinstance(source, Fingerprint):
        return source.largest(PrepareSettings.spaced(config.spacing).spacing)
    shapes = [case.properties.shape for case in source.dataset.cases.values()]
    return tuple(max(sides) for sides in zip(*shapes))


def refuse_other_run(config: Config) -> None:
    """Refuses a run folder that holds a run already, unless that one is resumed."""
    if not config.resume and holds_run(config.out):
        was_killed = f" ({sentence})" if (sentence := killed(config.out)) else ""
        raise ValueError(
            f"--out {config.out} holds a run already{was_killed}: add --resume to continue it, or name another folder"
        )


def is_restart(launcher: Launcher) -> bool:
    """Returns whether a scheduler or torchrun starts the command line again."""
    return launcher.attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def holds_run(out: str) -> bool:
    """Returns whether a folder holds a run that has begun."""
    return bool(out) and (Path(out) / "config.json").exists()
