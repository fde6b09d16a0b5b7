"""RunRequest: the settings of a run, from its command line, the run that it resumes, and the planner's choices."""

import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seqpar.data.addresses import absolute, is_address, local_file
from seqpar.data.errors import DataError
from seqpar.data.files import refuse_unwritable
from seqpar.data.formats.recognise import place_in_data
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.models.build import NETWORK_NAMES, family_of
from seqpar.parallel.consensus import run_on_rank0_before_mesh
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.meeting import Meeting
from seqpar.parallel.rendezvous import count_gpus
from seqpar.planner.batch_size import (
    SCALED,
    describe_global_batch,
    hold_global_batch,
    keep_global_batch,
    keeps_scaled_rate,
    scale_learning_rate,
)
from seqpar.planner.chooser import device_of, fill_pipeline
from seqpar.planner.feasibility import check_lessons
from seqpar.planner.preset_from_data import plan_from_data
from seqpar.runs.archive import is_archive
from seqpar.runs.fold_folder import has_ended, runs_of
from seqpar.runs.run_folder import (
    CONFIG,
    SWEEP_FILE,
    holds_folds,
    holds_run,
    read_config,
    refuse_foreign_status,
)
from seqpar.runs.run_status import changed_settings, describe_kill, edited_settings
from seqpar.settings.checks import as_in_file, check, check_network, check_values, settings_in
from seqpar.settings.command_line import default_preset, naming_preset, parse, shortened_warmup, wants_gpu
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.curriculum import parse_curriculum
from seqpar.settings.data_settings import ALL_FOLDS, OWN
from seqpar.settings.field import Circumstances
from seqpar.settings.lessons import Lesson, lessons_of
from seqpar.settings.parallel_settings import AUTO
from seqpar.settings.presets import FROM_DATA
from seqpar.settings.rules import (
    FILES,
    as_typed,
    describe_settings_without_effect,
    fixed_changes,
    refuse_settings_without_effect,
    settings_on_resume,
)
from seqpar.tasks.lookup import task_of
from seqpar.tasks.training_data import TrainingData
from seqpar.text import flag_name, quantity
from seqpar.training.open_settings import choose_open_settings


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
    planned: frozenset[str]  # settings that files of nnU-Net decide: "prepare" among them, all that the data would

    def numbers(self, *names: str) -> dict[str, int]:
        """Returns those of the settings that the command line has, and leaves them not open (0)."""
        return {name: getattr(self.config, name) for name in names if name in self.flags and getattr(self.config, name)}


def read_request(arguments: Sequence[str], launcher: Launcher, meeting: Meeting | None = None) -> RunRequest:
    """Returns the resolved settings: command line, resumed run, planner's choices; refuses what cannot work.

    - ``meeting``: of the ranks, at which the first one says what data and device decide
    """
    line = _read_line(arguments, launcher)
    with nullcontext() if line.config.resume else naming_preset(line.preset, line.flags):
        return _resolve(line, launcher, meeting, wants_gpu(arguments))


def _resolve(line: _CommandLine, launcher: Launcher, meeting: Meeting | None, on_gpu: bool) -> RunRequest:
    """Returns the resolved settings of a command line."""
    config, preset, reason = line.config, line.preset, line.preset_reason
    changes = dict[str, list[Any]]()
    if config.resume:
        saved = _read_saved(line)
        before = Config.from_dict(saved["config"])
        num_groups = _groups_at_start(saved["history"], before)
        of_start = SCALED if keeps_scaled_rate(before, config, line.flags, num_groups) else set()
        edited = edited_settings(config.out, saved)
        if fixed := next((name for name in edited if SETTINGS[name].fixed), ""):
            was, now = (as_typed(fixed, value) for value in edited[fixed])
            problem = f"has {now}, and the run's last checkpoint {was}, which cannot change: put that value back"
            raise DataError(f"{config.out}/config.json", problem)
        config = settings_on_resume(before, config, line.flags - {"resume", "again", "batch", "accumulate"} - of_start)
        preset, reason = saved.get("preset", preset), f"as the run in {config.out} began"
    family_of(config)  # refuses a network of another task
    refuse_settings_without_effect(config, line.flags)
    _refuse_start(config, launcher)
    if meeting is not None and not config.dry_run and config.group_ranks <= launcher.world:
        _refuse_other_files(config, meeting)
    config, warmup = shortened_warmup(config, line.flags)
    config, dealt = fill_pipeline(config, line.flags)
    plans = preset in FROM_DATA and not config.resume and "prepare" not in line.planned
    fingerprint = task_of(config).read_headers(config) if config.dry_run else None
    auto: dict[str, tuple[str, ...]] = {}
    if plans and fingerprint:
        config, auto = _plan(config, line.flags | line.planned, fingerprint, launcher)
    elif plans:
        config, auto = _plan_by_first(config, line.flags | line.planned, launcher, meeting or Meeting(launcher))
    config, choices, data = choose_open_settings(config, launcher, fingerprint if config.dry_run else None)
    choices = {**auto, **choices, **dealt}
    if config.prepare != OWN:
        from seqpar.weights.nnunet_settings import describe_preparation

        choices = {"prepare": (describe_preparation(config),), **choices}
    if warmup:
        choices = {"warmup": (warmup,), **choices}
    if line.config.out != line.asked_out:
        sentence = f"--again: {line.asked_out} holds a run that has ended, so this one goes into {config.out}"
        choices = {"out_choice": (sentence,), **choices}
    num_groups = max(launcher.world, config.group_ranks) // config.group_ranks
    if config.scale_lr and not config.resume:
        config, sentence = scale_learning_rate(config, num_groups)
        choices = {**choices, "scale_lr": (sentence,)}
    lessons = lessons_of(config)
    if config.resume:
        lessons = _keep_global_batches(lessons, saved["layout"], before, num_groups, line)
        began = replace(lessons_of(before)[0].config, **{name: pair[0] for name, pair in edited.items()})
        changes = changed_settings(began, lessons[0].config)
    elif config.global_batch > 0:
        lessons, sentence = _hold_global_batches(lessons, num_groups, line)
        choices = {**choices, "global_batch": (sentence,)}
    check_lessons(lessons, num_groups)
    here = Circumstances(seqpar=config.seqpar, has_gpu=on_gpu)
    idle, flags = describe_settings_without_effect(config, line.flags, here), frozenset(line.flags)
    return RunRequest(lessons[0].config, preset, reason, choices, data, idle, changes, fingerprint, flags, lessons)


def _plan(
    config: Config, flags: Collection[str], fingerprint: Fingerprint, launcher: Launcher
) -> tuple[Config, dict[str, tuple[str, ...]]]:
    """Returns the config with what the data and the device here decide, and why, by name."""
    num_ranks = max(launcher.world, config.group_ranks)
    return plan_from_data(config, flags, fingerprint, device_of(config, launcher), num_ranks)


def _plan_by_first(
    config: Config, flags: Collection[str], launcher: Launcher, meeting: Meeting
) -> tuple[Config, dict[str, tuple[str, ...]]]:
    """Returns, on every rank, what the first one plans: one reads the headers, and hosts' memories may differ."""

    def plan() -> dict[str, Any]:
        planned, why = _plan(config, flags, task_of(config).read_headers(config), launcher)
        return {"config": json.loads(planned.to_json()), "why": why}

    chosen = run_on_rank0_before_mesh(plan, meeting, "plan", config.start_timeout)
    return Config.from_dict(chosen["config"]), {name: tuple(lines) for name, lines in chosen["why"].items()}


def _groups_at_start(history: Sequence[Any], config: Config) -> int:
    """Returns on how many sequence groups a run began, 0 if that is not known; ``config``: as it was last started."""
    starts = [start for start in history if isinstance(start, dict)]
    if any({"seqpar", "pipe"} & {*start.get("changed", ())} for start in starts):
        return 0
    ranks = starts[0].get("ranks") if starts else 0
    return ranks // config.group_ranks if isinstance(ranks, int) else 0


def _keep_global_batches(
    lessons: tuple[Lesson, ...], layout: Mapping[str, Any], before: Config, num_groups: int, line: _CommandLine
) -> tuple[Lesson, ...]:
    """Returns the lessons with the batches that keep a run's tiles a step; ``layout``: that of its config.json."""
    had = [layout["data"] * own.config.batch * own.config.accumulate for own in lessons_of(before)]
    tiles = layout.get("global_batches") or had  # earlier versions did not record them
    if len(tiles) != len(had):
        lacks = f"has {quantity(len(tiles), 'number')} in 'global_batches' for {quantity(len(had), 'lesson')}"
        raise DataError(Path(line.config.out) / CONFIG, f"{lacks}: restore it or train again")
    if "global_batch" in line.flags and any(line.config.global_batch != number for number in tiles):
        raise ValueError(
            f"--global-batch {line.config.global_batch}: the run in {line.config.out} has "
            f"{' and '.join(map(str, tiles))} tiles a step, which it keeps on any ranks: remove it"
        )
    flags = line.numbers("batch", "accumulate")
    kept = [keep_global_batch(each.config, number, num_groups, flags) for each, number in zip(lessons, tiles)]
    kept += [each.config for each in lessons[len(kept) :]]  # lessons that are new
    return tuple(replace(lesson, config=config) for lesson, config in zip(lessons, kept, strict=True))


def _hold_global_batches(
    lessons: tuple[Lesson, ...], num_groups: int, line: _CommandLine
) -> tuple[tuple[Lesson, ...], str]:
    """Returns the lessons with the batches that make ``--global-batch``, and a sentence on how."""
    flags, entries = line.numbers("batch", "accumulate"), parse_curriculum(line.config.curriculum)
    typed = [flags | {"batch": entry.batch, "accumulate": entry.micros} for entry in entries] or [flags]
    now = [
        replace(each, config=hold_global_batch(each.config, num_groups, own))
        for each, own in zip(lessons, typed, strict=True)
    ]
    how = dict.fromkeys(describe_global_batch(was.config, own.config, num_groups) for was, own in zip(lessons, now))
    return tuple(now), "; ".join(how)


def _read_line(arguments: Sequence[str], launcher: Launcher) -> _CommandLine:
    """Returns the command line; where a scheduler starts a run's line again, it resumes that run."""
    on_gpu = wants_gpu(arguments)
    preset, config, flags = parse(arguments, default_preset(arguments, on_gpu), NETWORK_NAMES)
    asked_out, planned = config.out, frozenset[str]()
    if config.weights and not config.dry_run:
        local_file(config.weights)  # an address is downloaded before anything asks whether it is there
    if config.plans or config.weights or "prepare" in flags:
        from seqpar.weights.nnunet_settings import with_plans  # nnU-Net's files have settings too

        config, planned = with_plans(config, flags)
    names_preset = any(text.startswith("--preset") for text in arguments)
    reason = "from the command line" if names_preset else f"the default {'with' if on_gpu else 'without'} a GPU"
    if not config.resume and is_requeued(launcher) and holds_run(config.out):
        config = replace(config, resume=True)
    elif config.again:
        config = _again(config)
    return _CommandLine(config, flags, preset, reason, names_preset, asked_out, planned)


def _again(config: Config) -> Config:
    """Returns the config of ``--again``: it continues an interrupted run, or takes the next folder without one."""
    check_again_flag(config.out, config.resume)
    out, number = config.out, 1
    while holds_run(out) and has_ended(out):
        number += 1
        out = f"{config.out}-{number}"
    return replace(config, out=out, resume=holds_run(out), again=False)


def check_again_flag(out: str, resume: bool) -> None:
    """Refuses ``--again`` without a folder, or with what it decides by itself."""
    if resume or not out:
        needed = "--out, the folder of the first run" if not out else "no --resume: leave one of both out"
        raise ValueError(f"--again needs {needed}")


def _read_saved(line: _CommandLine) -> dict[str, Any]:
    """Returns the config.json of the run that the command line resumes."""
    out = line.config.out
    if not out:
        raise ValueError("--resume needs --out, the run folder to continue")
    refuse_folder_of_five(line.config)
    if is_archive(out):
        raise ValueError(
            f"--resume --out {out}: that is a file, and training resumes only in the run folder that it wrote: name "
            f"that folder, or start a new one from an exported run's weights (--weights {out})"
        )
    if not holds_run(out):
        why = "there is no config.json in it" if Path(out).is_dir() else "it does not exist"
        raise ValueError(
            f"--resume --out {out}: no run has begun there, as {why}: leave out --resume to begin one, or name another "
            "folder"
        )
    content = read_config(out)
    lacking = [part for part in ("config", "dataset", "layout") if not isinstance(content.get(part), dict)]
    if not lacking:
        tiles = content["layout"].get("global_batches") or [content["layout"].get("data")]
        is_whole = isinstance(tiles, list) and all(isinstance(number, int) and number > 0 for number in tiles)
        lacking = [] if is_whole else ["layout.global_batches"]
    if not isinstance(content.setdefault("history", []), list):
        lacking.append("history")
    if lacking:
        raise DataError(
            f"{out}/config.json", f"lacks {lacking[0]!r}, so the run cannot be resumed: restore it, or begin anew"
        )
    try:
        _refuse_damaged(Config.from_dict(content["config"]), line.flags)
    except ValueError as error:
        problem = f"cannot be used ({as_in_file(str(error)).removeprefix('config.json: ')}): restore it, or begin anew"
        raise DataError(f"{out}/config.json", problem) from None
    preset = content.get("preset", line.preset)
    if line.names_preset and line.preset != preset:
        raise ValueError(f"--preset {line.preset}: the run in {out} continues as it began, {preset}: remove it")
    return content


def refuse_unlike_folds(runs: Sequence[str], typed: Sequence[str], flags: Sequence[str], launcher: Launcher) -> None:
    """Raises ValueError for flags that would make folds that begin now other networks than folds that have begun, or
    train them on other data or tiles a step; those that any run may change when it resumes are allowed.

    - ``runs``: the folders of folds that have begun
    - ``typed``: the flags typed now; ``flags``: all those with which folds begin
    """
    ends = "Remove it, or train five folds with it in another --out"
    for run in runs:
        line, new = (_read_line([*given, "--resume", "--out", run], launcher) for given in (typed, flags))
        try:
            saved = _read_saved(line)
        except DataError:  # a fold that continues says so itself
            continue
        before, now = Config.from_dict(saved["config"]), line.config
        reasons = {name: SETTINGS[name].fixed for name in fixed_changes(before, now, line.flags)}
        if "weights" in line.flags and now.weights != (before.weights and absolute(before.weights)):
            reasons["weights"] = "folds from other first weights do not compare"
        for name, why in reasons.items():
            values = (getattr(each, name) for each in (now, before))
            asked, began = (as_typed(name, "unset" if value in ("", ()) else value) for value in values)
            raise ValueError(f"{asked}: {run} began with {began}, and all five folds need the same: {why}. {ends}")
        config, layout = new.config, saved["layout"]
        tiles = layout.get("global_batches") or [layout["data"] * before.batch * before.accumulate]
        num_groups = max(launcher.world, config.group_ranks) // config.group_ranks
        asked_tiles = config.global_batch or config.batch * config.accumulate * num_groups
        names = ("global_batch", "batch", "accumulate") if config.global_batch or config.seqpar != AUTO else ()
        sized = [name for name in names if name in line.flags]
        if sized and asked_tiles and not config.curriculum and [asked_tiles] != tiles:
            asked = " ".join(as_typed(name, getattr(now, name)) for name in sized)
            raise ValueError(
                f"{asked}: folds that begin now would have {quantity(asked_tiles, 'tile')} a step, and {run} has "
                f"{' and '.join(map(str, tiles))}: all five folds need the same. {ends}"
            )


def _refuse_damaged(saved: Config, flags: Set[str]) -> None:
    """Raises ValueError for settings that no run saves; not for those that the command line replaces."""
    check_network(saved, NETWORK_NAMES)
    check_values(saved, NETWORK_NAMES, [name for name in SETTINGS if name not in flags])
    try:
        parse_curriculum(saved.curriculum)
        check(saved, NETWORK_NAMES)
    except ValueError as error:
        if not flags & {*settings_in(str(error))}:
            raise


def _refuse_start(config: Config, launcher: Launcher) -> None:
    """Refuses, before anything is prepared, a run without a device, or a run folder that it may not write; a dry run,
    which may be typed elsewhere, needs no device.
    """
    if not config.dry_run:
        count_gpus(launcher, config.device)
    if config.out and not config.resume and (kept := _place_in_data(Path(config.out), config.data)):
        raise DataError(f"--out {config.out}", f"{kept}, which no run writes into: name another folder")
    refuse_unwritable(Path(config.out or "runs"), f"--out {config.out}" if config.out else "runs")


def _refuse_other_files(config: Config, meeting: Meeting) -> None:
    """Raises ValueError on every rank if one on the first rank's host was started on other files or folders, or in
    another folder; it would wait for data that nobody prepares.
    """
    names = (*FILES, "out")
    given = {name: value for name in names if (value := getattr(config, name))}
    own = {name: value if is_address(value) else os.path.abspath(value) for name, value in given.items()}
    texts = meeting.gather("files", json.dumps([socket.gethostname(), own]), config.start_timeout)
    (host, first), *others = map(json.loads, texts)
    for rank, (where, other) in enumerate(others, 1):
        name = next((name for name in names if first.get(name) != other.get(name)), "")
        if where == host and name:
            theirs, ours = (f"--{flag_name(name)} {each.get(name, 'of its own')}" for each in (other, first))
            raise ValueError(
                f"rank {rank} has {theirs}, and rank 0 has {ours}: start all ranks with the same command, in the same "
                "folder"
            )


def _place_in_data(folder: Path, data: str) -> str:
    is_same = bool(data) and os.path.realpath(folder) == os.path.realpath(data)
    return "belongs to a data set" if is_same else place_in_data(folder)


# what a run writes after its config.json
_OF_A_RUN = (
    "metrics.jsonl", "model.safetensors", "window.json", "validation*", "progress.png", "checkpoints/step-*",
    "checkpoints/best", "checkpoints/latest",
)  # fmt: skip


def refuse_other_run(config: Config) -> None:
    """Refuses a run folder that holds a run already, unless that one is resumed, and the folder of five."""
    refuse_folder_of_five(config)
    if config.out and (Path(config.out) / SWEEP_FILE).is_file():
        raise ValueError(
            f"--out {config.out} holds a sweep, whose status would be lost: name another folder (tune --resume "
            f"--out {config.out} continues the sweep)"
        )
    if not config.resume and holds_run(config.out):
        was_killed = f" ({sentence})" if (sentence := describe_kill(config.out)) else ""
        raise ValueError(
            f"--out {config.out} holds a run already{was_killed}: add --resume to continue it, or name another folder"
        )
    left = [path for name in _OF_A_RUN for path in Path(config.out).glob(name)] if config.out else []
    left = [path for path in left if not path.is_dir() or any(not own.name.startswith(".") for own in path.iterdir())]
    if left and not config.resume:
        raise ValueError(
            f"--out {config.out} holds {left[0].name}, which would be lost, and no config.json: restore that of the "
            "run, or name another folder"
        )
    if config.out and not config.resume:
        refuse_foreign_status(config.out)


def refuse_folder_of_five(config: Config) -> None:
    """Refuses to write a run among five folds, whose status would be lost."""
    if holds_folds(config.out):
        raise ValueError(
            f"--out {config.out} holds five folds: resume them with --fold {ALL_FOLDS} --resume --out {config.out}, "
            f"with one of them by --resume --out {runs_of(config.out)[0]}, or name another folder"
        )


def is_requeued(launcher: Launcher) -> bool:
    """Returns whether a scheduler or torchrun starts the command line again."""
    return launcher.attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
