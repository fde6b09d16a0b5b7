"""Sets a run up: folder, network, trainer, the lines that say what it will do; what a resumed run must keep."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from seqpar.cluster.rank_facts import device_name, facts_of
from seqpar.cluster.start_ranks import describe_launcher
from seqpar.cluster.torch_setup import check_precision, missing_compiler
from seqpar.data.addresses import local_file
from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import remove_leftovers
from seqpar.data.formats.splits import data_faults, scans_on_both_sides
from seqpar.data.phantom.phantom_files import is_generated
from seqpar.models.build import build_network, family_of
from seqpar.models.network import Network, Resizing
from seqpar.parallel.consensus import gather_texts, raise_on_all_ranks, refuse_unequal, run_on_rank0
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.pipeline.stages import StageMap
from seqpar.planner.chooser import choose_attention
from seqpar.planner.memory_check import refuse_beyond_free
from seqpar.planner.printer import describe_decoding, describe_lessons
from seqpar.runs.run_folder import describe_run, read_config
from seqpar.runs.run_lock import RunLock
from seqpar.runs.run_log import RunLog
from seqpar.runs.run_status import StatusFile, append_start, changes_line, describe_kill, describe_unfinished
from seqpar.settings.config import Config
from seqpar.settings.field import Circumstances
from seqpar.settings.lessons import Lesson
from seqpar.settings.rules import FILES, describe_settings_without_effect
from seqpar.tasks.training_data import TrainingData
from seqpar.text import quantity
from seqpar.training.run_request import RunRequest, refuse_other_run
from seqpar.training.trainer import Trainer, global_batch
from seqpar.weights import checkpoint
from seqpar.weights.facts import (
    ANCESTORS,
    CASES_UNKNOWN,
    FILE_DIGESTS,
    IS_UNKNOWN,
    LEARNED,
    VALIDATED,
    VOXELS,
    about_cases_learned,
    are_cases_unknown,
    cases_learned_before,
    cases_of_other_fold,
    other_scans,
    read_dataset,
    reordered_names,
    sets_learned,
    sets_of_earlier_data,
)
from seqpar.weights.weight_files import checkpoint_of, is_exported, is_of_torch

# what config.json says of data, and what it is called; networks know channels and outputs by their order alone
_MEANINGS = {
    "modalities": "channels",
    "labels": "labels",
    "values": "label values",
    "regions": "regions",
    "regions_class_order": "order of regions",
    "ignore_label": "ignore label",
    "volume_classes": "classes",
}


def refuse_other_outputs(began: Mapping[str, Any], now: Mapping[str, Any], data: str, out: Path) -> None:
    """Raises DataError where channels or outputs of the data are others than those that a run began with.

    - ``began``, ``now``: what config.json says of the data, then and now
    - ``data``: where they are; ``out``: the run folder
    """
    for key, word in _MEANINGS.items():
        had, has = _names(began.get(key)), _names(now.get(key))
        if key in began and had != has:
            raise DataError(
                data or now["prepared"],
                f"has the {word} {_listed(has)}, but the run in {out} learned {_listed(had)}: restore them, or start "
                f"another run from its weights (--weights {out} with another --out)",
            )


_MAY_DIFFER = (*FILES, "workers", "device", "time_limit", "start_timeout", "timeout")  # between hosts


def refuse_unequal_ranks(config: Config, data: TrainingData, group: Group) -> None:
    """Raises ValueError on every rank if some were started with other settings or data than the first.

    Of the data, the description and two prepared cases are compared: hosts may keep them in folders of their own.
    """
    described = {name: value for name, value in data.describe().items() if name != "prepared"}
    digests = [data.dataset.cases[case].digest for case in (*data.train_ids[:1], *data.train_ids[-1:])]
    settings = {name: value for name, value in asdict(config).items() if name not in _MAY_DIFFER}
    refuse_unequal(settings, {"finds other data than rank 0 in its --data": [described, digests]}, group)


def cases_that_changed_sides(began: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns a line on cases that the run trained on and that are held out now, "" if there are none."""
    trained = ({*began.get("train", ())} - {*began.get("held_out", ())}) | {*began.get(LEARNED, ())}
    trained -= other_scans(began, now)
    trained |= cases_learned_before(began, now)  # by their voxels, under whatever name
    trained -= scans_on_both_sides(now).keys()  # which never changed sides
    moved = sorted(trained & {*now["held_out"], *now.get("test", ())})
    if not moved:
        return ""
    return (
        f"warning: this run trained on {quantity(len(moved), 'case')} that it holds out now, or keeps for tests, such "
        f"as {moved[0]}: such scores say nothing of new cases"
    )


def tested_cases_that_chose(now: Mapping[str, Any]) -> str:
    """Returns a line on cases that a run keeps for tests now and that earlier validations scored, "" if none did."""
    moved = sorted({*now.get(VALIDATED, ())} & {*now.get("test", ())})
    if not moved:
        return ""
    return (
        f"warning: {quantity(len(moved), 'case')} that this run keeps for tests now helped to choose its weights, such "
        f"as {moved[0]}: such scores tend to be too good"
    )


_SIDES = {"train": "trained on", "held_out": "held out", "test": "kept for tests"}


def data_that_changed(began: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns words on cases that came, went or changed since a run was last started, and on those that changed
    sides of its split; none of runs that recorded no digests.

    - ``began``, ``now``: what config.json says of the data, then and now
    """
    had, has, lines = began.get("digests", {}), now["digests"], list[str]()
    if not had:
        return lines
    was, sides = _sides(began), _sides(now)
    recorded, there = had.keys() | was.keys(), has.keys() | sides.keys()  # earlier versions: digests of used cases
    changed = sorted(case for case in has if had.get(case, has[case]) != has[case])
    recipes = json.loads(json.dumps([began.get("recipe"), now.get("recipe")]))  # lists, not tuples
    if recipes[0] != recipes[1] and len(changed) == len(had.keys() & has.keys()) > 0:
        lines.append("the data are not prepared as they were when this run was last started")
        which = FILE_DIGESTS if FILE_DIGESTS in began else VOXELS  # earlier versions recorded no files
        files, before = (content.get(which, {}) for content in (now, began))
        changed = [case for case in changed if case in before and before[case] != files.get(case, before[case])]
    cases = {"changed": changed, "added": sorted(sides.keys() - recorded), "removed": sorted(recorded - there)}
    listed = [f"{quantity(len(some), 'case')} {kind}, such as {some[0]}" for kind, some in cases.items() if some]
    if listed:
        lines.append(f"the data are not those with which this run was last started: {'; '.join(listed)}")
    moved = dict[tuple[str, str], list[str]]()
    for case in sorted(recorded & there):
        if (before := was.get(case, "left out")) != (side := sides.get(case, "left out")):
            moved.setdefault((before, side), []).append(case)
    if told := "; ".join(_tell_move(*pair, some) for pair, some in moved.items()):
        lines.append(f"the split is not the one with which this run was last started: {told}")
    return lines


def _sides(described: Mapping[str, Any]) -> dict[str, str]:
    """Returns on which side of a split each case is, in words."""
    found = dict[str, str]()
    for part, words in _SIDES.items():
        for case in described.get(part, ()):
            found[case] = f"{found[case]} and {words}" if case in found else words
    return found


def _tell_move(was: str, now: str, cases: Sequence[str]) -> str:
    verbs = ("was", "is") if len(cases) == 1 else ("were", "are")
    return f"{quantity(len(cases), 'case')} that {verbs[0]} {was} {verbs[1]} now {now}, such as {cases[0]}"


def _names(value: Any) -> list[str]:
    """Returns names in the order of their numbers."""
    if isinstance(value, Mapping) and "names" in value:
        value = value["names"]
    return [str(value)] if isinstance(value, int) else list(map(str, value or ()))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def first_lines(request: RunRequest, launcher: Launcher) -> str:
    """Returns what a run prints first: the planner's choices, preset, ranks, main settings, idle flags, changes."""
    config, world, kind = request.config, launcher.world, family_of(request.config)
    tiles = quantity(config.batch, "tile") + (" a step" if world == config.accumulate == 1 else "")
    lines = [
        f"seqpar: preset {request.preset} ({request.preset_reason}); {quantity(world, 'rank')}"
        f"{_groups(config, world)}, {describe_launcher(launcher)}",
        f"  tile {'x'.join(map(str, config.tile))}, {kind.describe_tile(config)}; {kind.describe(config)}",
        f"  {f'mode {config.mode}, ' if config.seqpar > 1 else ''}{config.precision}, {tiles}"
        f"{' per sequence group' if world > 1 else ''}"
        f"{f', {config.accumulate} times a step' if config.accumulate > 1 else ''}",
        textwrap.fill(f"({_words(config, world)})", 110, initial_indent="  ", subsequent_indent="  "),
    ]
    last = filter(None, [describe_lessons(config), request.idle, changes_line(request.changes)])
    return "\n".join([*(lines[0] for lines in request.choices.values()), *lines, *last])


def _groups(config: Config, world: int) -> str:
    """Returns how ranks are arranged; nothing for one."""
    pipe = f"pipe {config.pipe} x " if config.pipe > 1 else ""
    return f" = data {world // config.group_ranks} x {pipe}seq {config.seqpar}" if world > 1 else ""


def _words(config: Config, world: int) -> str:
    """Returns what the words of the first lines mean."""
    words = ["rank: a process with its device"]
    if world > 1:
        words.append("data: groups with different tiles")
    if config.pipe > 1:
        words.append("pipe: ranks with different layers")
    if world > 1:
        words.append("seq: ranks that share a tile, a sequence group")
    words.append("tile: the crop that a step trains on")
    if family_of(config).attends:
        words.append("patch: the voxels of one token")
    else:
        words.append("cube: the smallest block that a rank can have")
    return "; ".join(words)


def open_folder(status: StatusFile, lock: RunLock, config: Config, log: RunLog) -> tuple[int, str]:
    """Makes the run folder, takes its lock, clears it of what a killed run was writing, writes that it has begun,
    and opens its log file.

    Returns the lock's ticket.
    """
    out = status.path.parent
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        was_killed = describe_kill(out)
        source = lock.take(config.take_over)
        if source:
            print(f"{out} is taken over from {source}", flush=True)
        if was_killed:
            print(f"warning: {was_killed}", flush=True)
        try:
            refuse_other_run(replace(config, out=str(out)))  # it may have come since the command line was read
        except ValueError:
            lock.release()
            raise
        for folder in (out, *(path for path in out.glob("validation*") if path.is_dir())):
            remove_leftovers(folder)
        status.open()
    except OSError as error:
        raise unwritable(f"--out {out}", error) from None
    log.open(out / "train.log")
    return lock.ticket


def make_trainer(
    request: RunRequest,
    mesh: Mesh,
    data: TrainingData,
    status: StatusFile,
    number: int = 0,
    saved: Path | None = None,
    is_first: bool = True,
) -> Trainer:
    """Returns the trainer of a lesson, after printing the network's size and how attention crosses ranks.

    - ``number``: of the lesson
    - ``saved``: the checkpoint to resume from
    - ``is_first``: whether this start of the run begins with this lesson
    """
    lesson, out = request.lessons[number], status.path.parent
    config = lesson.config if is_first else replace(lesson.config, resume=False)
    _refuse_unequal_choices(request.lessons, mesh)
    check_precision(config.precision, facts_of(mesh))
    if config.compile:
        raise_on_all_ranks(missing_compiler(mesh.device.type != "cpu"), mesh.world)
    before = read_config(out) if config.resume or not is_first else {}
    data_before = before.get("dataset", {})
    data_now = data.describe() | ({"generated": True} if is_generated(config.data) else {})
    data_now |= run_on_rank0(lambda: data.describe_cases(config), mesh.world)
    refuse_other_outputs(data_before, data_now, config.data, out)
    net, attention_reasons = _build_net(config, mesh, data, before["layout"] if saved and is_first else {})
    mode_line = describe_decoding(net, config)
    learned_from = data_before if saved else {}  # a run that saved nothing begins anew, with other weights
    weights_line, others = "", other_scans(learned_from, data_now)
    learned = {*learned_from.get("train", ()), *learned_from.get(LEARNED, ())} - {*data_now["train"]} - others
    learned |= cases_learned_before(learned_from, data_now) | scans_on_both_sides(data_now).keys()
    origin: dict[str, Any] = {ANCESTORS: sets} if (sets := sets_of_earlier_data(learned_from, data_now)) else {}
    origin |= {name: learned_from[name] for name in (IS_UNKNOWN,) if name in learned_from}
    if config.weights and not saved:
        weights_line, more, origin = _load_weights(net, config, data_now, mesh)
        learned |= more
    data_now |= origin | ({LEARNED: sorted(learned)} if learned else {})
    progress = checkpoint.read_progress(saved) if saved else checkpoint.Progress()
    validated = {*data.ids_to_validate(config.val_cases)}
    if progress.validated > 0:
        validated |= {*data_before.get(VALIDATED, data_before.get("held_out", ()))} - others
    data_now |= {VALIDATED: sorted(validated)} if validated != {*data_now["held_out"]} else {}
    layout = {"ranks": mesh.world.size, "data": mesh.data.size, "seqpar": mesh.seq.size, "hosts": mesh.hosts}
    step, history, changed = progress.step, before.get("history", ()), data_that_changed(data_before, data_now)
    # the stages of a lesson before have other costs
    stages, stage_lines = _stages(config, mesh, net, before if step > lesson.steps.start else {})
    if stages is not None:
        layout |= {"pipe": config.pipe, "stages": {"cuts": stages.cuts, "places": stages.places}}
        layout |= {"placement": stage_lines}
    layout |= {"devices": gather_texts(device_name(mesh.device), mesh.world), "parameters": net.num_parameters()}
    layout |= {"strategy": str(net.attention), "attention": attention_reasons, **request.choices}
    layout["global_batches"] = [global_batch(each.config, mesh) for each in request.lessons]
    if is_first:
        history = append_start(history, step, mesh.world.size, request.changes, changed)
    resizing = net.resized(request.lessons[number - 1].config.tile) if 0 < step == lesson.steps.start else {}
    description = describe_run(config, request.preset, data_now, layout, history)
    if mesh.is_first:
        print("\n".join(_lesson_lines(request, number, resizing)), flush=True)
        divided = data_faults(data_now)
        divided = f"warning: {divided}" if divided else ""
        sides = cases_that_changed_sides(learned_from, data_now), tested_cases_that_chose(data_now)
        for warning in filter(None, (*(f"warning: {line}" for line in changed), *sides, divided)):
            print(warning, flush=True)
        here = Circumstances(declares_regions=bool(data.dataset.regions), learns_regions=bool(data.regions))
        if is_first and (idle := describe_settings_without_effect(config, request.flags, here)):
            print(idle, flush=True)
        lines = [
            _size_line(net, lesson, mesh) + (f"; {mode_line}" if net.group.size > 1 else ""),
            *([_outputs_line(data)] if is_first else []),
        ]
        lines += [f"attention: {reason}" for reason in attention_reasons[:1] if net.group.size > 1]
        lines += [weights_line] * bool(weights_line)
        lines += stage_lines
        print("\n".join(lines), flush=True)
    trainer = Trainer(config, mesh, data, net, status, description, saved, lesson.steps, resizing, stages)
    trainer.validation.refuse_whole(net)
    return trainer


def _build_net(
    config: Config, mesh: Mesh, data: TrainingData, saved_layout: Mapping[str, Any]
) -> tuple[Network, Sequence[str]]:
    """Returns the network, and the reasons for its attention strategy; refuses one beyond the free memory.

    Where the strategy is left open, the first rank plans, and its choice holds on all. ``saved_layout`` is the
    ``layout`` of the resumed run's config.json, which keeps its strategy.
    """
    sizes = data.num_channels, data.num_outputs
    choice = run_on_rank0(lambda: choose_attention(config, mesh.launcher, *sizes, saved_layout), mesh.world)
    strategy, reasons = (choice[0], choice[1:]) if choice else (config.attention, ())
    named = replace(config, attention=strategy)
    refuse_beyond_free(named, mesh, *sizes)
    net = build_network(named, *sizes, mesh.seq, bool(data.regions), data=mesh.data)
    return net, reasons or net.attention_choice


def _stages(
    config: Config, mesh: Mesh, net: Network, before: Mapping[str, Any]
) -> tuple[StageMap | None, Sequence[str]]:
    """Returns the stages of a run over a pipe, and lines about them; a resumed run keeps those that it has.

    ``before``: content of the resumed run's config.json
    """
    if config.pipe == 1:
        return None, ()
    from seqpar.training.stage_choice import choose_stages  # few runs have a pipe

    net.to(mesh.device, torch.float64 if config.precision == "fp64" else torch.float32)
    asked = [getattr(config, name) for name in ("placement", "objective")]
    had = [before.get("config", {}).get(name) for name in ("placement", "objective")]
    recorded = before["layout"].get("stages", {}) if asked == had else {}
    return choose_stages(config, mesh, net, recorded)


def _load_weights(
    net: Network, config: Config, described: Mapping[str, Any], mesh: Mesh
) -> tuple[str, set[str], dict[str, Any]]:
    """Returns the line of ``load_pretrained``, with cautions, the cases besides the run's own that they learned, and
    what config.json says of the data sets that they have learned from.

    An error on one rank is raised on all.

    - ``described``: the data, as config.json will have them
    """
    from seqpar.runs.trained_run import read_run
    from seqpar.weights.nnunet_settings import fold_of_training
    from seqpar.weights.pretrained import load_pretrained, weights_file  # it knows the names of four libraries

    line, learned, origin, error = "", set[str](), dict[str, Any](), None
    try:
        if is_exported(path := local_file(config.weights)):
            read_run(path)  # refuses weights of other sizes than its network's
        before = read_dataset(weights_file(config.weights))
        learned = cases_learned_before(before, described)
        origin = {ANCESTORS: sets} if (sets := sets_learned(before)) else {}
        if is_of_torch(path):
            fold = fold_of_training(checkpoint_of(path, mapped=True), config.data)
            learned |= cases_of_other_fold(fold, config.fold, described)
        moved = reordered_names(before, described)
        told = [*describe_unfinished(path, weights_file(config.weights)), *about_cases_learned(learned, described)]
        if are_cases_unknown(weights_file(config.weights), before):
            origin[IS_UNKNOWN] = True
            told.append(CASES_UNKNOWN)
        line = "; ".join([load_pretrained(net, config), *moved, *told])
    except Exception as problem:
        error = problem
    raise_on_all_ranks(error, mesh.world)
    return line, learned, origin


def _size_line(net: Network, lesson: Lesson, mesh: Mesh) -> str:
    steps, tiles = quantity(len(lesson.steps), "step"), quantity(global_batch(lesson.config, mesh), "tile")
    return f"network: {net.describe()}; {steps} of {tiles}"


def _lesson_lines(request: RunRequest, number: int, resizing: Resizing) -> list[str]:
    """Returns which lesson begins, and what is resized for it; nothing if there is no curriculum."""
    if not request.config.curriculum:
        return []
    tile = "x".join(map(str, request.lessons[number].config.tile))
    lines = [f"lesson {number + 1} of {len(request.lessons)}: tile {tile}"]
    return lines + [
        f"{name}: resized from {'x'.join(map(str, grid.old))} to {'x'.join(map(str, grid.new))} tokens, and with it "
        "what the optimizer holds for each token"
        for name, grid in resizing.items()
    ]


def _outputs_line(data: TrainingData) -> str:
    """Returns what the network's outputs stand for."""
    names = data.output_names
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"outputs: {', '.join(names[:8])}{more} ({data.kind_of_outputs})"


def _chosen(config: Config) -> str:
    """Returns the flags whose values may follow from a device's memory."""
    flags = {"seqpar": config.seqpar, "batch": config.batch, "tile": " ".join(map(str, config.tile))}
    if config.curriculum:
        flags = {"seqpar": config.seqpar, "curriculum": config.curriculum}
    flags |= {"embed-dim": config.embed_dim, "depth": config.depth, "heads": config.heads}
    return " ".join(f"--{name} {value}" for name, value in flags.items())


def _refuse_unequal_choices(lessons: Sequence[Lesson], mesh: Mesh) -> None:
    """Refuses ranks that chose differently, because the memory of their devices differs."""
    choices = dict.fromkeys(gather_texts(_chosen(lessons[0].config), mesh.world))
    if len(choices) > 1:
        raise ValueError(f"ranks have different memory and chose {' and '.join(choices)}: give one of these")
