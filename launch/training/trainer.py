"""The training loop: each step, each validation, what the run records, and how it ends."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.collectives import whole
from seqpar.consensus import raise_together
from seqpar.data.files import write_json
from seqpar.data.sampling.loader import Loader, MicroBatch
from seqpar.launch.job.exit_codes import PREEMPTED
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.models.loss import loss_of
from seqpar.launch.models.net import Net
from seqpar.launch.models.optimizer import learning_rate, make_optimizer, set_learning_rate
from seqpar.launch.models.resized import UNCHANGED, Resizing
from seqpar.launch.runs.boards import Board, open_boards
from seqpar.launch.runs.journal import Journal, epoch_fields, peak_memory_mb
from seqpar.launch.runs.run_folder import Status, next_lines, result_files, write_window
from seqpar.launch.settings.config import Config
from seqpar.launch.training.after_step import AfterStep, Decision, raise_non_finite
from seqpar.launch.training.data import TrainingData, step_tiles
from seqpar.launch.training.data_parallel import gathered
from seqpar.launch.training.gradients import Gradients
from seqpar.launch.training.pictures import draw_progress
from seqpar.launch.training.stragglers import Stragglers, sum_over_ranks, time_waiting
from seqpar.launch.training.validation import Validation
from seqpar.launch.weights import checkpoint
from seqpar.launch.weights.checkpoint import Progress
from seqpar.launch.weights.files import write_weights
from seqpar.launch.weights.states import whole_tensors
from seqpar.mesh import Mesh, equal_weights


class Trainer:
    """Trains ``net`` on ``data`` with the settings of ``config``.

    ``description``: content of the run's config.json; ``saved``: the checkpoint to go on from; ``steps``: of the run,
    those that it trains, by default all; ``resizing``: the checkpoint's tensors that another tile resizes.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        data: TrainingData,
        net: Net,
        status: Status,
        description: dict[str, Any],
        saved: Path | None = None,
        steps: range | None = None,
        resizing: Resizing = UNCHANGED,
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
        self.loss = loss_of(config, data.regions, data.dataset.ignore_label)
        self.gradients = Gradients(config, mesh, data, self.net, self.loss)
        self.optimizer = make_optimizer(config, self.net)
        self.progress = Progress(global_batch=global_batch(config, mesh))
        self.journal = Journal(self.out, False, 0)
        self.after_step = AfterStep(config, mesh, self.out / "checkpoints", description, status.lock)
        self.validation = Validation(config, mesh, data, self.loss, self.after_step.refuse_taken_over)
        self.stragglers = Stragglers(mesh.hosts)
        time_waiting(self.net, mesh.world)
        status.steps = config.steps

    def run(self, stopper: Stopper) -> bool:
        """Returns whether all steps were done; else all ranks left the run, and it can be resumed."""
        self.gradients.warm_up()
        if self.saved:
            tiles = self.progress.global_batch
            self.progress = checkpoint.load(self.saved, self.net, self.optimizer, self.mesh.world.index, self.resizing)
            assert self.progress.global_batch == tiles or self.progress.step == self.steps.start
            self.progress.global_batch = tiles
        boards = self._open_boards()  # settings with which a rank cannot begin are not kept
        self._open_journal(boards)
        self.after_step.begin(self.progress if self.saved else None)
        with self._loader() as loader:
            finished = self._loop(loader, stopper)
        goes_on = finished and self.steps.stop < self.config.steps
        if not goes_on:
            stopper.finish()
        if finished and not goes_on:
            self._finish()
        self.journal.close()
        return finished

    def _open_boards(self) -> list[Board]:
        """Returns the first rank's boards; raises on all ranks what it fails of."""
        boards, error = list[Board](), None
        if self.mesh.is_first:
            begun = next((start["time"] for start in self.description.get("history", ())), "")
            try:
                boards = open_boards(self.config, self.out, self.progress.step, begun)
            except ValueError as problem:
                error = problem
        raise_together(error, self.mesh.world, name_rank=False)
        return boards

    def _open_journal(self, boards: Sequence[Board]) -> None:
        """Writes config.json, opens metrics.jsonl at the current step, and says from where a run is resumed."""
        self.status.step = step = self.progress.step
        if self.mesh.is_first:
            write_json(self.out / "config.json", self.description)
        self.journal = Journal(self.out, self.mesh.is_first, step, self.progress.validated, boards)
        if self.config.resume:
            nothing = "" if self.saved else ": nothing was saved before"
            self.journal.say(f"resumed at step {step} of {self.config.steps}{nothing}")
        self.journal.begin(step, self.config.steps)
        self.journal.attempt(lambda: self.status.write_unless_over("running"))

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

    def _loop(self, loader: Loader, stopper: Stopper) -> bool:
        """Returns whether all steps were done; else the run was saved and left."""
        config, rows = self.config, list[dict[str, Any]]()
        began, first = time.monotonic(), self.progress.step
        if first and first % config.iterations == 0 and not self._end_epoch(stopper):  # was left in validation
            return self._leave(stopper)
        while self.progress.step < self.steps.stop:
            result = self._step([next(loader) for _ in range(config.accumulate)], stopper)
            if result is None:
                self._save(must=True)
                return self._leave(stopper)
            row, decision = result
            rows.append(row)
            step = self.progress.step
            if step == first + 1:
                self.mesh.set_timeout(config.timeout)
            epoch_ends = step % config.iterations == 0
            self.journal.record("train", step - 1, **row)
            left_s = (time.monotonic() - began) / (step - first) * (config.steps - step)
            self.journal.progress(epoch_fields(step, config.epochs, config.iterations, rows, left_s), epoch_ends)
            if epoch_ends:
                rows = []
                if decision == Decision.LEAVE or not self._end_epoch(stopper):
                    decision = Decision.LEAVE
            if step == self.steps.stop:
                decision = max(decision, Decision.SAVE)
            if decision != Decision.GO_ON:
                self._save(must=decision == Decision.LEAVE or step == self.steps.stop)
            if decision == Decision.LEAVE and not step == self.progress.validated == config.steps:
                return self._leave(stopper)
        if self.steps.stop < config.steps:  # the next steps begin from what is saved, a validation made up included
            self._save(must=True)
        return True

    def _step(self, micros: list[MicroBatch], stopper: Stopper) -> tuple[dict[str, Any], Decision] | None:
        """Returns the step's row of metrics.jsonl and the decision of all ranks.

        None where all ranks leave between two micro-batches: the step is then as if it had not begun.
        """
        config, step, began = self.config, self.progress.step, time.perf_counter()
        rate = learning_rate(config, step)
        set_learning_rate(self.optimizer, rate)
        self.mesh.world.watch.clock.measure()
        sums = self.gradients.add(micros, step, stopper)
        if sums is None:
            self.optimizer.zero_grad()
            return None
        self.mesh.synchronize()
        data_wait_s = sum(micro.wait_s for micro in micros)
        own_s = time.perf_counter() - began - self.mesh.world.watch.clock.take_waited() + data_wait_s
        norm = whole(torch.nn.utils.clip_grad_norm_(self.net.parameters(), config.clip or math.inf))
        decision = self.after_step.decide(bool(torch.isfinite(sums[0]) and torch.isfinite(norm)), stopper)
        if decision == Decision.BROKEN:
            raise_non_finite(step, float(sums[0]), micros, self.mesh.world)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.status.step = self.progress.step
        mean = self._mean_over_ranks(sums, own_s)
        seconds = time.perf_counter() - began + data_wait_s
        row = {
            "epoch": step // config.iterations,
            "loss": float(mean[0]),
            **{f"{name}_loss": float(value) for name, value in zip(self.loss.weights, mean[1:])},
            "lr": rate,
            "grad_norm": float(norm),
            f"{self.net.counted}_per_s": self.progress.global_batch * self.net.num_counted() / seconds,
            "seconds": seconds,
            "data_wait_s": data_wait_s,
            "peak_mem_mb": peak_memory_mb(self.mesh.device),
        }
        return row, decision

    def _mean_over_ranks(self, sums: Tensor, own_s: float) -> Tensor:
        """Returns the mean over all ranks; a rank whose own seconds are many is reported on the way."""
        sums, seconds = sum_over_ranks(sums, own_s, self.mesh.world)
        for slow in self.stragglers.note(seconds):
            self.journal.say(f"warning: {slow}")
            place = {"rank": slow.rank, "host": slow.host}
            self.journal.record("slow", self.progress.step - 1, **place, factor=slow.factor, seconds=slow.seconds)
        return sums / self.mesh.world.size

    def _end_epoch(self, stopper: Stopper) -> bool:
        """Validates where that is due; returns whether the run goes on (False: all ranks left the validation)."""
        step, every = self.progress.step, self.config.val_every * self.config.iterations
        self.journal.attempt(lambda: draw_progress(self.out))
        is_last = step == self.config.steps
        if not (is_last or every > 0 and step % every == 0) or self.progress.validated == step:
            return True
        began = time.monotonic()
        with gathered(self.net, self.mesh, self.config.shard_weights):
            result = self.validation.run(self.net, self.journal, stopper, keep=is_last)
        if result is None:
            return False
        seconds = time.monotonic() - began
        self.journal.record("val", step, epoch=(step - 1) // self.config.iterations, **result.row, seconds=seconds)
        self.journal.say(result.text)
        self.journal.picture("validation", step, self.out / "validation.png")
        self.progress.validated = step
        if result.score > self.progress.best:
            self.progress.best, self.progress.best_step = result.score, step
            self._save(is_best=True)
            self.after_step.refuse_taken_over()
            self.journal.attempt(lambda: write_window(self.out, result.windows, step, result.whole_grid))
        return True

    def _leave(self, stopper: Stopper) -> bool:
        """Returns False, for a run that did not finish, after saying why and how to resume it."""
        stopper.ignore_signals()
        self._write_status("preempted", stopper.reason, PREEMPTED)
        step, total = self.progress.step, self.config.steps
        self.journal.say(f"left at step {step} of {total} ({stopper.reason}); go on with --resume --out {self.out}")
        return False

    def _finish(self) -> None:
        """Writes model.safetensors and the status, and prints where everything lies."""
        weights = whole_tensors(self.net.state_dict(), self.mesh.is_first)
        self.after_step.refuse_taken_over()
        if self.mesh.is_first:
            self.journal.attempt(lambda: draw_progress(self.out))
            write_weights(self.out / "model.safetensors", weights, self.net.settings)
        self._write_status("finished")
        best = f"finished: best mean Dice {self.progress.best:.3f} at step {self.progress.best_step}"
        self.journal.say("\n".join([best, *(f"  {path}" for path in result_files(self.out)), *next_lines(self.out)]))

    def _save(self, is_best: bool = False, must: bool = False) -> None:
        self.after_step.save(self.net, self.optimizer, self.progress, self.journal, is_best, must)

    def _write_status(self, state: str, why: str = "", code: int = 0) -> None:
        self.journal.attempt(lambda: self.status.write(state, why, code))


def global_batch(config: Config, mesh: Mesh) -> int:
    """Returns the tiles of one step over all ranks."""
    return mesh.data.size * config.batch * config.accumulate
