"""One run from start to end on this rank, lesson by lesson; and its dry run."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from seqpar.cluster.stop_request import StopRequest
from seqpar.cluster.torch_setup import keep_memory, recomputes, without_torch_compile
from seqpar.data.addresses import describe_download, is_missing, local_file
from seqpar.data.errors import DataError
from seqpar.data.formats.joined_labels import join_labels
from seqpar.data.preparation.cache_index import cache_folder
from seqpar.models.build import build_on_meta
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.rendezvous import check_seqpar
from seqpar.planner.chooser import plan_here
from seqpar.planner.feasibility import require_peers
from seqpar.planner.printer import describe_dry_run
from seqpar.runs.run_folder import describe_results, read_status
from seqpar.runs.run_status import StatusFile, describe_unfinished, list_changes, warn_if_killed
from seqpar.runs.sweep_folder import counts_for_scores
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.data_settings import prepare_settings
from seqpar.settings.lessons import Lesson, lesson_at
from seqpar.tasks.lookup import task_of
from seqpar.tasks.training_data import TrainingData
from seqpar.training.open_settings import sizes_of
from seqpar.training.run_request import RunRequest
from seqpar.training.setup import first_lines, make_trainer
from seqpar.weights import checkpoint
from seqpar.weights.facts import WEIGHTS, describe_cases_behind


def dry_run(request: RunRequest, launcher: Launcher) -> int:
    """Prints what would run, by the headers of the data; allocates and writes nothing, and needs no other rank."""
    config = request.config
    num_ranks = max(launcher.world, config.group_ranks)
    check_seqpar(config.seqpar, num_ranks, config.pipe)
    require_peers(config, num_ranks)
    assert request.fingerprint is not None
    weights_line = _check_weights(config, *sizes_of(request.fingerprint, config))
    if launcher.rank == 0:
        task = task_of(config)
        data, sizes = task.describe(request.fingerprint, config), sizes_of(request.fingerprint, config)
        here = replace(launcher, world=num_ranks)
        warn_if_killed(*[Path(config.out)] * bool(config.out))
        print(first_lines(request, here))
        for lesson in request.lessons:
            own, stages = lesson.config, list[str]()
            if own.pipe > 1:
                from seqpar.planner.pipeline_printer import plan_pipe_here

                plan, stages = plan_pipe_here(own, here, *sizes)
            else:
                plan = plan_here(own, here, *sizes)
            print(describe_dry_run(own, request.preset, plan, *sizes, data, len(lesson.steps), stages))
        if weights_line:
            print(weights_line)
        if advice := task.tile_advice(config, request.flags, request.preset, request.fingerprint):
            print(advice)
    return 0


def describe_finished(request: RunRequest) -> str:
    """Returns the lines of a resumed run that has finished, so that nothing is written; "" for others.

    With other settings it is not over: it may have more steps or patience, or these may have to be refused.
    """
    config, out = request.config, Path(request.config.out)
    status = read_status(out) if config.resume and not request.changes else {}
    if status.get("state") != "finished" or not (out / WEIGHTS).is_file():
        return ""
    why = f" ({status['why']})" if status.get("why") else ""
    first = f"{out} has finished at step {status.get('step')} of {config.steps}{why}: nothing is left to do; to "
    first += "train on, raise --epochs"
    return "".join(f"{line}\n" for line in (first, *describe_results(out), *task_of(config).next_lines(out)))


def refuse_fewer_steps(config: Config) -> None:
    """Raises ValueError if a run to be resumed has done more steps than its settings allow by now."""
    done = checkpoint.latest_step(Path(config.out) / "checkpoints") if config.resume else 0
    if 0 < config.steps < done:
        needed = -(-done // config.iterations)
        raise ValueError(
            f"--epochs {config.epochs} means {config.steps:,} steps, and {config.out} has done {done:,} already: give "
            f"--epochs {needed} or more to resume it, or predict with what is there"
        )


_LENGTH = {"epochs", "iterations", "patience", "curriculum", "val_every"}  # of a run: more steps, or an end here


def refuse_changes_of_finished(request: RunRequest) -> None:
    """Raises ValueError for flags with which nothing is left to train, and which the run would record all the same."""
    out, is_finished = request.config.out, read_status(request.config.out).get("state") == "finished"
    if not request.config.resume:
        return
    typed = {n: pair for n, pair in request.changes.items() if n in request.flags and counts_for_scores(n, *pair)}
    changes = {n: pair for n, pair in typed.items() if n not in ("data", "global_batch", *_LENGTH)}
    if not is_finished:  # a validation may be left
        changes = {n: pair for n, pair in changes.items() if SETTINGS[n].section != "validation and curves"}
    done, steps = checkpoint.latest_step(Path(out) / "checkpoints"), request.lessons[-1].steps.stop
    if changes and (done >= steps or (is_finished and not _LENGTH & typed.keys())):
        raise ValueError(
            f"--resume --out {out}: no step is left after step {done:,} that would use {list_changes(changes)}: leave "
            "that out, or give a larger --epochs to train on"
        )


def refuse_other_weights(config: Config) -> None:
    """Raises ValueError if ``--weights`` do not fit the network, before data are prepared for it.

    Where they are prepared, or the data decide on the network, this is found as soon when the weights are loaded.
    """
    if not config.weights or config.resume or not config.tile or not config.data:
        return
    settings = prepare_settings(config)
    dataset = join_labels(task_of(config).read_dataset(config.data), settings.joins)
    if dataset.faults or (cache_folder(dataset, config.cache or None, settings) / "cache.json").exists():
        return
    outputs = dataset.labels if dataset.volume_classes is None else dataset.volume_classes.names
    _check_weights(config, len(dataset.modalities), max(2, len(outputs)))  # of the outputs, weights need no number


def _check_weights(config: Config, channels: int, outputs: int) -> str:
    """Returns what a run takes of ``--weights`` or would download, "" for none; ValueError if they do not fit."""
    if not config.weights or config.resume:
        return ""
    if is_missing(config.weights):
        return describe_download(config.weights)
    from seqpar.weights.pretrained import load_pretrained, weights_file  # it knows the names of four libraries

    line = load_pretrained(build_on_meta(config, Group("seq"), channels, outputs), config)
    path = weights_file(config.weights)
    remarks = describe_unfinished(local_file(config.weights), path)
    return "; ".join(filter(None, [line, *remarks, describe_cases_behind(path)]))


def run_lessons(request: RunRequest, mesh: Mesh, data: TrainingData, status: StatusFile, stopper: StopRequest) -> bool:
    """Returns whether the run finished; else all ranks left it, and it can be resumed.

    A lesson begins from the checkpoint that the one before it left, as a resumed run does. So what a run becomes does
    not depend on where it was interrupted.
    """
    if mesh.device.type == "cpu":
        keep_memory()
    saved = _find(status, mesh) if request.config.resume else None
    if request.config.resume and saved is None:
        _refuse_results_without_checkpoint(status.path.parent)
    number = lesson_at(request.config, checkpoint.read_progress(saved).step) if saved else 0
    is_first = True
    while True:
        lesson = request.lessons[number]
        with _compiler(lesson.config):
            trainer = make_trainer(request, mesh, _tiles_of(lesson, data), status, number, saved, is_first)
            if not trainer.run(stopper):
                return False
        del trainer  # and its memory, before the next lesson's
        number, is_first = number + 1, False
        if number == len(request.lessons):
            return True
        saved = _find(status, mesh)
        mesh.set_timeout(request.config.start_timeout)  # another tile: everything runs for the first time again


def _compiler(config: Config) -> AbstractContextManager[None]:
    """Returns a context without torch's compiler, or with it where the run may ask for it."""
    return nullcontext() if config.compile or config.shard_weights or recomputes(config) else without_torch_compile()


def _tiles_of(lesson: Lesson, data: TrainingData) -> TrainingData:
    """Returns the data with tiles of the lesson's size and places."""
    return data.with_tiles(replace(lesson.config, foreground=lesson.foreground))


def _refuse_results_without_checkpoint(out: Path) -> None:
    """Raises DataError where a run that would begin anew has results, since a copy may lack its checkpoints."""
    names = (WEIGHTS, "validation/summary.json", "window.json")  # the last is written once a checkpoint is
    results = next((name for name in names if (out / name).is_file()), None)
    if results:
        raise DataError(
            out,
            f"has {results} but no checkpoint to continue from, so that it would be replaced: copy its checkpoints as "
            f"well, or begin another run (--weights {out}, another --out)",
        )


def _find(status: StatusFile, mesh: Mesh) -> Path | None:
    return checkpoint.find_on_all_ranks(status.path.parent / "checkpoints", mesh.world)
