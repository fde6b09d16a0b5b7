"""The training loop: each step, each validation, what the run records, and how it ends."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.cluster.exit_codes import PREEMPTED
from seqpar.cluster.stop_request import StopRequest
from seqpar.data.errors import DataError, remedy
from seqpar.data.files import write_json
from seqpar.data.sampling.loader import Loader
from seqpar.models.build import build_loss
from seqpar.models.network import NO_RESIZING, Network, Resizing
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate, set_learning_rate
from seqpar.parallel.collectives import equal_weights
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.processes import STOP_FILE
from seqpar.pipeline.stages import StageMap
from seqpar.report.plots import draw_progress
from seqpar.runs.boards import Board, open_on_first
from seqpar.runs.journal import Journal, epoch_fields, peak_memory_mb
from seqpar.runs.metrics_tail import MEASURED_ON, measure_of, score_of
from seqpar.runs.run_folder import describe_results, window_content
from seqpar.runs.run_status import StatusFile
from seqpar.settings.config import Config
from seqpar.settings.loss_settings import OF_LOSS
from seqpar.tasks.lookup import task_of
from seqpar.tasks.training_data import TrainingData, step_tiles
from seqpar.terminal import resume_command
from seqpar.training.after_step import AfterStep, Decision, raise_non_finite
from seqpar.training.gradients import Gradients
from seqpar.training.pipeline_gradients import PipeGradients, most_by_stage
from seqpar.training.step_times import DelayedRows, HostCopy, SlowRankDetector, sum_over_ranks, time_waiting
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import Progress, restore_best
from seqpar.weights.weight_files import digest, write_weights

CURVES_EVERY_S = 30.0  # drawing takes a second or two, which short epochs would feel
Row = dict[str, Any]  # of metrics.jsonl


class Trainer:
    """Trains ``net`` on ``data`` with the settings of ``config``.

    ``description``: content of the run's config.json; ``saved``: the checkpoint to resume from; ``steps``: of the run,
    those that it trains, by default all; ``resizing``: the checkpoint's tensors that another tile resizes;
    ``stages``: over a pipe, those of the network's cells.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        data: TrainingData,
        net: Network,
        status: StatusFile,
        description: dict[str, Any],
        saved: Path | None = None,
        steps: range | None = None,
        resizing: Resizing = NO_RESIZING,
        stages: StageMap | None = None,
    ) -> None:
        self.steps, self.resizing = steps or range(config.steps), resizing
        self.config, self.mesh, self.data, self.status = config, mesh, data, status
        self.description, self.saved, self.out = description, saved, status.path.parent
        self.net = net.to(torch.float64 if config.precision == "fp64" else torch.float32)
        if not config.shard_weights:
            self.net.to(mesh.device)
        equal_weights(self.net, mesh.world)
        if config.compile:
            for module in self.net.compiled():
                module.compile()
        self.loss = build_loss(config, data.regions, data.dataset.ignore_label, data.dataset.soft)
        self.gradients: Gradients | PipeGradients = (
            Gradients(config, mesh, data, self.net, self.loss)
            if stages is None
            else PipeGradients(config, mesh, data, self.net, self.loss, stages)
        )
        self.optimizer = make_optimizer(self.net, config.optimizer_options)
        self.progress = Progress(global_batch=global_batch(config, mesh))
        self.journal, self._has_score = Journal(self.out, False, 0), True
        self._curves_at = time.monotonic()
        self.task, folder, collect = task_of(config), self.out / "checkpoints", self.gradients.whole_tensors
        again = self._resume_command()
        self.after_step = AfterStep(config, mesh, folder, description, status.lock, collect, again)
        refuse = self.after_step.refuse_taken_over
        self.validation = self.task.validation(config, mesh.without_stages(), data, self.loss, refuse)
        self.stragglers, self.late_rows = SlowRankDetector(mesh.hosts, self.gradients.roles), DelayedRows()
        mesh.world.watch.roles = self.gradients.roles
        time_waiting(self.net, mesh.world)
        status.steps = config.steps

    def run(self, stopper: StopRequest) -> bool:
        """Returns whether all steps were done; else all ranks left the run, and it can be resumed."""
        self.gradients.warm_up()
        if self.saved:
            tiles, rank, shapes = self.progress.global_batch, self.mesh.world.index, self.gradients.whole_shapes()
            self.progress = checkpoint.load(self.saved, self.net, self.optimizer, rank, self.resizing, shapes)
            assert self.progress.global_batch == tiles or self.progress.step == self.steps.start
            self.progress.global_batch = tiles
            starts = self.description.get("history", ())
            since = [own for own in starts if own.get("step", 0) >= self.progress.best_step]
            if any({*OF_LOSS} & own.get("changed", {}).keys() for own in since):
                self.progress.best_loss = None  # of another kind of loss: at a tie it decides nothing
        begun = next((start["time"] for start in self.description.get("history", ())), "")
        # settings with which a rank cannot begin are not kept
        boards = open_on_first(self.config, self.out, self.progress.step, begun, self.mesh.world)
        self._open_journal(boards)
        self.after_step.begin(self.progress if self.saved else None)
        if self.saved:
            self._restore_best()
        self._say_if_anew()
        with self._loader() as loader, self.late_rows:
            finished = self._loop(loader, stopper)
        goes_on = finished and self.steps.stop < self.config.steps
        if not goes_on:
            stopper.finish()
        if finished and not goes_on:
            self._finish()
        self.journal.close()
        return finished

    def _open_journal(self, boards: Sequence[Board]) -> None:
        """Writes config.json, opens metrics.jsonl at the current step, and says from where a run is resumed."""
        self.status.step = step = self.progress.step
        if self.mesh.is_first:
            write_json(self.out / "config.json", self.description)
        lock = self.status.lock
        self.journal = Journal(self.out, self.mesh.is_first, step, self.progress.validated, boards, lock)
        if self.config.resume:
            told = "" if self.saved else ": nothing was saved before"
            told = ": no step is left; to train on, give a larger --epochs" if step >= self.config.steps else told
            self.journal.say(f"resumed at step {step} of {self.config.steps}{told}")
        if self.journal.lost:
            self.journal.say(
                f"warning: {self.journal.path} lacks {self.journal.lost}: there was no room for them, or the file was "
                "lost, cut off or replaced. Training continues without them; if you have a copy of the file, stop, "
                "restore it, and resume"
            )
        self.journal.begin(step, self.config.steps, self.loss.weights)
        self.journal.attempt(self.status.begin)

    def _loader(self) -> Loader:
        config = self.config
        return Loader(
            step_tiles(self.data.tiles, config, global_batch(config, self.mesh)),
            self.net.layout,
            self.mesh,
            batch=config.batch,
            steps=range(self.progress.step, self.steps.stop),
            accumulate=config.accumulate,
            workers=config.workers,
            seed=config.seed,
        )

    def _loop(self, loader: Loader, stopper: StopRequest) -> bool:
        """Returns whether all steps were done; else the run was saved and left."""
        config, rows = self.config, list[dict[str, Any]]()
        began, first = time.monotonic(), self.progress.step
        if first and first % config.iterations == 0 and not self._end_epoch(stopper):  # was left in validation
            return self._leave(stopper)
        while self.progress.step < self.steps.stop and not self._is_out_of_patience():
            result = self._step(loader, stopper)
            if result is None:
                self.late_rows.write()
                self._save(must=True)
                return self._leave(stopper)
            make_row, decision = result
            step = self.progress.step
            if step == first + 1:
                self.mesh.set_timeout(config.timeout)
            epoch_ends = step % config.iterations == 0
            left_s = (time.monotonic() - began) / (step - first) * (config.steps - step)
            self.late_rows.put(partial(self._record, step, make_row, rows, left_s))
            if epoch_ends or decision != Decision.GO_ON or step == self.steps.stop:
                self.late_rows.write()
            if epoch_ends:
                rows = []
                if decision == Decision.LEAVE or not self._end_epoch(stopper):
                    decision = Decision.LEAVE
            is_over = step == self.steps.stop or self._is_out_of_patience()
            if is_over:
                decision = max(decision, Decision.SAVE)
            if decision != Decision.GO_ON:
                self._save(must=decision == Decision.LEAVE or is_over)
            if decision == Decision.LEAVE and not step == self.progress.validated == config.steps:
                return self._leave(stopper)
        is_best = self.progress.best_step == self.progress.step  # a made-up validation has tried to save it only once
        if is_best or self.steps.stop < config.steps:  # the next steps begin from what is saved, that one included
            self._save(must=True)
        return True

    def _record(self, step: int, make_row: Callable[[], Row], rows: list[Row], left_s: float) -> None:
        """Records the step with which ``step`` are done; ``rows``: the epoch's, to which its own comes."""
        rows.append(make_row())
        self.journal.record("train", step - 1, **rows[-1])
        fields = epoch_fields(step, self.config.epochs, self.config.iterations, rows, left_s)
        self.journal.progress(fields, step % self.config.iterations == 0)

    def _step(self, loader: Loader, stopper: StopRequest) -> tuple[Callable[[], Row], Decision] | None:
        """Returns what makes the step's row of metrics.jsonl, and the decision of all ranks.

        None where all ranks leave between two micro-batches: the step is then as if it had not begun.
        """
        config, step, began = self.config, self.progress.step, time.perf_counter()
        micros = [next(loader) for _ in range(config.accumulate)]
        loaded, rate = time.perf_counter(), learning_rate(config.schedule_options, step)
        set_learning_rate(self.optimizer, rate)
        self.mesh.world.watch.clock.measure()
        sums = self.gradients.add(micros, step, stopper)
        if sums is None:
            self.optimizer.zero_grad()
            return None
        loader.begin_next()
        clock = self.mesh.world.watch.clock
        with clock.waiting(sums.is_cuda), clock.paused():  # not this rank's own work: it may wait for other stages
            norm_on_device = self.gradients.clip(config.clip or math.inf)
        found = HostCopy(torch.stack([sums[0], norm_on_device.to(sums)]))
        self.mesh.synchronize()  # the only wait for the device in a step
        own_s = time.perf_counter() - loaded - clock.take_waited()
        loss, norm = found.numbers()
        decision = self.after_step.decide(math.isfinite(loss + norm), stopper)
        if decision == Decision.BROKEN:
            raise_non_finite(step, loss, micros, self.mesh.world)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.status.step = self.progress.step
        own = [own_s, peak_memory_mb(self.mesh.device)] if self.gradients.roles else [own_s]
        of_all = HostCopy(sum_over_ranks(sums, own, self.mesh.world))
        seconds = time.perf_counter() - began
        timed = {
            f"{self.net.counted}_per_s": self.progress.global_batch * self.net.num_counted() / seconds,
            "seconds": seconds,
            "data_wait_s": sum(micro.wait_s for micro in micros),
            "peak_mem_mb": peak_memory_mb(self.mesh.device),
        }
        return partial(self._row, step, rate, of_all, norm, timed), decision

    def _row(self, step: int, rate: float, sums: HostCopy, norm: float, timed: Row) -> Row:
        """Returns the row of a step; a rank whose own seconds are many is reported on the way.

        ``sums``: of the loss and its terms over all ranks, and every rank's own numbers.
        """
        names, numbers = ["loss", *(f"{name}_loss" for name in self.loss.weights)], sums.numbers()
        means = {name: number / self.mesh.stage.size for name, number in zip(names, numbers)}
        of_ranks = numbers[len(names) :]
        width = len(of_ranks) // self.mesh.world.size
        every = [of_ranks[at : at + width] for at in range(0, len(of_ranks), width)]
        for slow in self.stragglers.note([seconds for seconds, *_ in every]):
            self.journal.say(f"warning: {slow}")
            place = {"rank": slow.rank, "host": slow.host}
            self.journal.record("slow", step, **place, factor=slow.factor, seconds=slow.seconds)
        by_stage = most_by_stage(self.gradients.roles, every, ("stage_s", "stage_peak_mem_mb"))
        own = {"epoch": step // self.config.iterations, **means, "lr": rate, "grad_norm": norm}
        return {**own, **timed, **by_stage}

    def _end_epoch(self, stopper: StopRequest) -> bool:
        """Validates if that is due; returns whether the run continues (False: all ranks left the validation)."""
        step, every = self.progress.step, self.config.val_every * self.config.iterations
        if time.monotonic() - self._curves_at > CURVES_EVERY_S:
            self._draw_curves()
        is_last = step == self.config.steps
        if not (is_last or every > 0 and step % every == 0) or self.progress.validated == step and not self._is_anew:
            return True
        has_best = self.progress.best >= 0 and not self._is_anew
        began, self.journal.best_step = time.monotonic(), self.progress.best_step if has_best else -1
        with self.gradients.gathered():
            keep = is_last or self._is_flat(step)  # whether this one is better is not known yet
            result = self.validation.run(self.net, self.journal, stopper, keep)
        if result is None:
            return False
        seconds = time.monotonic() - began
        self.progress.begin_scale(self._measured_on)
        row = {**result.row, "seconds": seconds, MEASURED_ON: self._measured_on}
        self.journal.record("val", step, epoch=(step - 1) // self.config.iterations, **row)
        self.journal.say(result.text)
        self.journal.picture("validation", step, self.out / "validation.png")
        self._has_score = not math.isnan(score_of(result.row))
        self.progress.validated = step
        loss, before = float(result.row["loss"]), replace(self.progress)
        if self.progress.is_beaten_by(result.score, loss):
            if result.score == self.progress.best:
                as_good = f"as good as after step {self.progress.best_step}, with a lower validation loss"
                self.journal.say(f"{as_good}: step {step} is the best now")
            self.progress.best, self.progress.best_step, self.progress.best_loss = result.score, step, loss
            measured = result.windows, step, result.whole_grid, result.temperatures
            self.progress.windows = window_content(*measured) if result.windows else None
            if not self._save() and step < self.steps.stop:  # else it is saved at the end, or the run fails
                self.progress = before
                kept = f"step {before.best_step} stays the best" if before.best_step >= 0 else "none is the best yet"
                self.journal.say(f"warning: the weights of step {step}, the best so far, were not saved: {kept}")
        return True

    def _restore_best(self) -> None:
        """Has ``best`` and window.json be those of a resumed run's progress, which may be that of an earlier step."""
        best = self.progress.best_step
        if not run_on_rank0(lambda: restore_best(self.out / "checkpoints", best), self.mesh.world):
            self.journal.say(
                f"warning: the checkpoint of step {best}, the best, is gone: the next validation is the best"
            )
            none = Progress()
            self.progress = replace(
                self.progress, best=none.best, best_step=none.best_step, best_loss=none.best_loss, windows=None
            )
        if self.progress.best_step < 0:
            self.journal.attempt(lambda: (self.out / "window.json").unlink(missing_ok=True))
        self._write_windows()

    @cached_property
    def _measured_on(self) -> str:
        return self.validation.measured_on(self.description["dataset"]["digests"])

    @property
    def _is_anew(self) -> bool:
        """Whether the next validation will be the best, since it does not compare with the best so far."""
        return not self.progress.compares_with(self._measured_on)

    def _say_if_anew(self) -> None:
        if not self._is_anew:
            return
        step, measure = self.progress.best_step, measure_of(self.config.task, self.progress.best)
        same = self.progress.measured_on.split()[0] == self._measured_on.split()[0]
        other = "measured in another way" if same else "of other cases, or of cases labelled or prepared otherwise"
        patience = ", and --patience counts from the first of them" * (self.config.patience > 0)
        kept = self.out / "checkpoints" / f"step-{step:08d}"
        self.journal.say(
            f"from here on validations are {other}: the best weights are chosen anew among them{patience}. The best "
            f"weights until now, those of step {step} ({self.task.score} {measure:.3f}), stay in {kept}"
        )

    def _write_windows(self) -> None:
        if self.progress.windows is not None:
            self.journal.attempt(lambda: write_json(self.out / "window.json", self.progress.windows))

    def _draw_curves(self) -> None:
        self.journal.draw(lambda: draw_progress(self.out))
        self._curves_at = time.monotonic()

    def _is_flat(self, step: int) -> bool:
        """Returns whether the best validation lies ``--patience`` validations before ``step``."""
        steps = self.config.patience * self.config.val_every * self.config.iterations
        has_best = self.progress.best >= 0 and not self._is_anew
        return steps > 0 and has_best and step - self.progress.best_step >= steps

    def _is_out_of_patience(self) -> bool:
        """Returns whether the run ends here because validations, this step's included, did not become better."""
        return self.progress.validated == self.progress.step and self._is_flat(self.progress.step)

    def _leave(self, stopper: StopRequest) -> bool:
        """Returns False, for a run that did not finish, after saying why and how to resume it."""
        stopper.ignore_signals()
        if self.mesh.is_first:
            self.journal.attempt(lambda: (self.out / STOP_FILE).unlink(missing_ok=True))
        self._write_status("preempted", stopper.reason, PREEMPTED)
        step, total = self.progress.step, self.config.steps
        self.journal.say(f"left at step {step} of {total} ({stopper.reason}); to continue: {self._resume_command()}")
        return False

    def _finish(self) -> None:
        """Writes model.safetensors and the status, and prints where everything lies."""
        weights = self.gradients.whole_tensors(self.net.state_dict(), self.mesh.is_first)
        self.after_step.refuse_taken_over()
        self._draw_curves()
        run_on_rank0(lambda: self._write_weights(weights), self.mesh.world)
        early = f"no better {self.task.score} in {self.config.patience} validations"
        early = early if self.progress.step < self.config.steps else ""
        self._write_status("finished", early)
        measure = measure_of(self.config.task, self.progress.best)
        best = f"finished: best {self.task.score} {measure:.3f} at step {self.progress.best_step}"
        if self.progress.best_step < 0:
            best = f"finished: the best weights are gone; those after step {self.progress.step} are here"
        if not self._has_score:
            best = f"finished: no {self.task.score}, as no validated case has a class to score"
        if early:
            best += f"; ended at step {self.progress.step} of {self.config.steps}: {early} (--patience)"
        if self.journal.active:  # other ranks may not see the folder
            self.journal.say("\n".join([best, *describe_results(self.out), *self.task.next_lines(self.out)]))

    def _write_weights(self, weights: dict[str, Tensor]) -> None:
        path = self.out / "model.safetensors"
        try:
            write_weights(path, weights, self.net.settings)
            self.status.weights = digest(path)
        except OSError as error:
            raise DataError(
                path,
                f"cannot be written ({error.strerror or error}); the checkpoint of step {self.progress.step} is kept: "
                f"{remedy(error)} and continue by {self._resume_command()}",
            ) from error

    def _resume_command(self) -> str:
        ranks = self.mesh.world.size if self.mesh.data.size > 1 else 1  # train starts those of a single group itself
        return resume_command(self.task.train_command[0], self.out, ranks=ranks)

    def _save(self, must: bool = False) -> bool:
        """Saves a checkpoint, and what was measured of it if it is the best; returns whether it is saved."""
        is_saved = self.after_step.save(self.net, self.optimizer, self.progress, self.journal, must)
        self.after_step.refuse_taken_over()
        if is_saved and self.progress.best_step == self.progress.step:
            self._write_windows()
        return is_saved

    def _write_status(self, state: str, why: str = "", code: int = 0) -> None:
        self.journal.attempt(lambda: self.status.write(state, why, code))


def global_batch(config: Config, mesh: Mesh) -> int:
    """Returns the tiles of one step over all ranks."""
    return mesh.data.size * config.batch * config.accumulate
