"""The training loop: DDP or sharded weights over data x seq, one agreement a step, exact resume, an orderly end."""

import json
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from seqpar.collectives import all_reduce, whole
from seqpar.consensus import agree, gather_texts
from seqpar.data.files import write_json
from seqpar.data.sampling.loader import Loader, MicroBatch
from seqpar.launch.job.exit_codes import NonFinite
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.models.optimizer import learning_rate, make_optimizer, set_learning_rate
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.runs.journal import Journal, epoch_line, peak_memory_mb
from seqpar.launch.runs.run_folder import Status
from seqpar.launch.settings.config import Config
from seqpar.launch.training.data import TrainingData
from seqpar.launch.training.data_parallel import at_hand, shard
from seqpar.launch.training.pictures import draw_progress
from seqpar.launch.training.stragglers import Stragglers
from seqpar.launch.training.validation import Validation
from seqpar.launch.weights import checkpoint
from seqpar.launch.weights.checkpoint import NotSaved, Progress
from seqpar.launch.weights.files import write_weights
from seqpar.launch.weights.states import whole_tensors
from seqpar.losses import DiceCE
from seqpar.mesh import Mesh, equal_weights
from seqpar.messages import expect
from seqpar.vit.dropout import DropoutKey

GO_ON, SAVE, LEAVE, BROKEN = range(4)


class Trainer:
    """Trains ``net`` on ``material`` as ``config`` says; ``run`` returns whether it finished or was preempted."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        material: TrainingData,
        net: SegmentationNet,
        status: Status,
        described: dict[str, Any],
        saved: Path | None = None,
    ) -> None:
        self.config, self.mesh, self.material, self.status = config, mesh, material, status
        self.described, self.saved, self.out = described, saved, status.path.parent
        self.net = net.to(torch.float64 if config.precision == "fp64" else torch.float32)
        if not config.shard_weights:
            self.net.to(mesh.device)
        equal_weights(self.net, mesh.world)
        if config.compile:
            for block in self.net.encoder.blocks:
                block.mlp.compile()  # type: ignore[union-attr]
        self.stepped: torch.nn.Module = self.net
        if config.shard_weights:
            shard(self.net, mesh)
        elif mesh.world.size > 1:
            self.stepped = self._ddp()
        self.optimiser = make_optimizer(config, self.net)
        self.loss = DiceCE(
            regions=material.regions, batch_dice=config.batch_dice, ignore_label=material.dataset.ignore_label
        )
        self.loss_groups = self.net.mode.loss_groups(mesh.data, config.batch)
        self.progress = Progress(global_batch=global_batch(config, mesh))
        self.validation = Validation(config, mesh, material, self.loss)
        self.journal = Journal(self.out, False, 0)
        self.last_save = time.monotonic()
        self.last_saved: Progress | None = None
        self.stragglers = Stragglers(mesh.hosts)
        self._time_waiting()
        status.steps = config.steps

    def _time_waiting(self) -> None:
        """Lets waiting for others be told from own work: after its last gradient a rank only waits, in DDP's sums."""
        clock = self.mesh.world.watch.clock
        for parameter in self.net.parameters() if self.mesh.world.size > 1 else ():
            parameter.register_post_accumulate_grad_hook(lambda p: clock.mark_ready(p.is_cuda))

    def _ddp(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            self.net,
            process_group=self.mesh.world.handle,
            gradient_as_bucket_view=True,
        )

    def run(self, stopper: Stopper) -> str:
        """Returns "finished" or "preempted"; the checkpoint, the journal and the pictures are written."""
        self._rehearse()
        if self.saved:
            self.progress = checkpoint.load(self.saved, self.net, self.optimiser, self.mesh.world.index)
            assert self.progress.global_batch == global_batch(self.config, self.mesh)
        agree(0, self.mesh.world)  # settings with which a rank cannot begin are not kept
        if self.mesh.is_first:
            write_json(self.out / "config.json", self.described)
        self.status.step = self.progress.step
        step, validated = self.progress.step, self.progress.validated
        self.journal = Journal(self.out, self.mesh.is_first, step, validated, self.config.tensorboard)
        if self.config.resume:
            self.journal.say(
                f"resumed at step {self.progress.step} of {self.config.steps}"
                + ("" if self.saved else ": nothing was saved before")
            )
        self.journal.attempt(lambda: self.status.write_unless_over("running"))
        self.last_save, self.last_saved = time.monotonic(), replace(self.progress) if self.saved else None
        loader = Loader(
            self.material.tiles(self.config),
            self.net.encoder.layout,
            self.mesh,
            batch=self.config.batch,
            steps=range(self.progress.step, self.config.steps),
            accumulate=self.config.accumulate,
            workers=self.config.workers,
            seed=self.config.seed,
        )
        with loader:
            left = self._loop(loader, stopper)
        stopper.end()
        if not left:
            self._finish()
        self.journal.close()
        return "preempted" if left else "finished"

    def _finish(self) -> None:
        """Writes the weights for others, the verdict, and where everything lies."""
        weights = whole_tensors(self.net.state_dict(), self.mesh.is_first)
        if self.mesh.is_first:
            self.journal.attempt(lambda: draw_progress(self.out))
            write_weights(self.out / "model.safetensors", weights)
        self._write_status("finished")
        lines = [f"finished: best mean Dice {self.progress.best:.3f} at step {self.progress.best_step}"]
        told = ["progress.png", "validation.png", "validation/summary.json", "metrics.jsonl"]
        told += ["model.safetensors", "config.json"]
        lines += [f"  {self.out / name}" for name in told if (self.out / name).exists()]
        self.journal.say("\n".join(lines))

    def _rehearse(self) -> None:
        """Runs one forward and backward that nobody keeps.

        DDP arranges its buckets anew after the first backward, which changes the order of sums from 3 ranks up:
        so every start, fresh or resumed, has had its first backward before the first step that counts.
        """
        layout, config = self.net.encoder.layout, self.config
        tokens = (config.batch, layout.counts[self.mesh.seq.index])
        image = torch.zeros(*tokens, self.material.num_channels, *layout.patch, device=self.mesh.device)
        label = torch.zeros(*tokens, *layout.patch, device=self.mesh.device, dtype=torch.long)
        with self._arithmetic():
            logits = self.stepped(self._cast(image), None, DropoutKey(0, 0, tuple(range(config.batch))))
        self.loss(logits, self.net.arrange(label), self.loss_groups).backward()
        self.optimiser.zero_grad()

    def _loop(self, loader: Loader, stopper: Stopper) -> bool:
        """Returns whether the run left before its end."""
        config, rows = self.config, list[dict[str, Any]]()
        began, first = time.monotonic(), self.progress.step
        if first and first % config.iterations == 0 and self._end_epoch(stopper):  # was left in validation
            return self._leave(stopper)
        while self.progress.step < config.steps:
            stepped = self._step([next(loader) for _ in range(config.accumulate)], stopper)
            if stepped is None:
                self._save(must=True)
                return self._leave(stopper)
            row, decision = stepped
            rows.append(row)
            if self.progress.step == first + 1:
                self.mesh.set_timeout(config.timeout)
            step, epoch_ends = self.progress.step, self.progress.step % config.iterations == 0
            self.journal.record("train", step - 1, **row)
            pace = (time.monotonic() - began) / (step - first)
            left_s = pace * (config.steps - step)
            done = (step - 1) % config.iterations + 1
            epoch = (step - 1) // config.iterations
            self.journal.progress(epoch_line(epoch, config.epochs, done / config.iterations, rows, left_s), epoch_ends)
            if epoch_ends:
                rows = []
                if decision == LEAVE or self._end_epoch(stopper):
                    decision = LEAVE
            if step == config.steps:
                decision = max(decision, SAVE)
            if decision != GO_ON:
                self._save(must=decision == LEAVE or step == config.steps)
            if decision == LEAVE and not self.progress.step == self.progress.validated == config.steps:
                return self._leave(stopper)
        return False

    def _leave(self, stopper: Stopper) -> bool:
        stopper.ignore()
        self._write_status("preempted", stopper.reason, code=75)
        step, total = self.progress.step, self.config.steps
        self.journal.say(f"left at step {step} of {total} ({stopper.reason}); go on with --resume --out {self.out}")
        return True

    def _end_epoch(self, stopper: Stopper) -> bool:
        """Validates where it is due; returns whether that was left early, because the run has to go."""
        step, every = self.progress.step, self.config.val_every * self.config.iterations
        self.journal.attempt(lambda: draw_progress(self.out))
        due = step == self.config.steps or every > 0 and step % every == 0
        if not due or self.progress.validated == step:
            return False
        with at_hand(self.net, self.mesh):
            found = self.validation.run(self.net, self.journal, stopper, keep=step == self.config.steps)
        if found is None:
            return True
        self.journal.record("val", step, epoch=(step - 1) // self.config.iterations, **found.row)
        self.journal.say(found.text)
        self.progress.validated = step
        if found.score > self.progress.best:
            self.progress.best, self.progress.best_step = found.score, step
            self._save(is_best=True)
        return False

    def _step(self, micros: list[MicroBatch], stopper: Stopper) -> tuple[dict[str, Any], int] | None:
        """Returns the step's row for the journal, and what all ranks decided to do after it.

        None where all leave in its middle, between two micro-batches: the step is then as if it had not begun.
        """
        config, began = self.config, time.perf_counter()
        step = self.progress.step
        rate = learning_rate(config, step)
        set_learning_rate(self.optimiser, rate)
        self.mesh.world.watch.clock.measure()
        sums = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            if number and stopper.here():
                self.optimiser.zero_grad()
                return None
            if last:
                expect("gradients", self.mesh.world)
            with nullcontext() if last else self._unsummed():
                sums += self._backward(micro) / len(micros)
        self.mesh.synchronize()
        data_wait_s = sum(micro.wait_s for micro in micros)
        busy_s = time.perf_counter() - began - self.mesh.world.watch.clock.take_waited() + data_wait_s
        own_finite = bool(torch.isfinite(sums[0]))
        norm = whole(torch.nn.utils.clip_grad_norm_(self.net.parameters(), config.clip or math.inf))
        decision = self._decide(own_finite and bool(torch.isfinite(norm)), stopper)
        if decision == BROKEN:
            self._report_broken(step, float(sums[0]), micros)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.progress.step += 1
        self.status.step = self.progress.step
        mean = self._over_ranks(sums, busy_s) / self.mesh.world.size
        seconds = time.perf_counter() - began + data_wait_s
        tokens = self.progress.global_batch * self.net.encoder.layout.num_tokens
        row = {
            "epoch": step // config.iterations,
            "loss": float(mean[0]),
            "dice_loss": float(mean[1]),
            "ce_loss": float(mean[2]),
            "lr": rate,
            "grad_norm": float(norm),
            "tokens_per_s": tokens / seconds,
            "data_wait_s": data_wait_s,
            "peak_mem_mb": peak_memory_mb(self.mesh.device),
        }
        return row, decision

    def _backward(self, micro: MicroBatch) -> Tensor:
        """Returns loss, Dice and cross-entropy of a micro-batch after adding its gradients."""
        key = DropoutKey(self.config.seed, self.progress.step, micro.samples)
        label = self.net.arrange(micro.label)
        with self._arithmetic():
            logits = self.stepped(self._cast(micro.image), None, key)
        parts = self.loss.parts(logits, label, self.loss_groups)
        (parts.total / self.config.accumulate).backward()
        self.mesh.world.watch.clock.count_since_ready()
        return torch.stack(parts).detach().double()

    def _over_ranks(self, sums: Tensor, busy_s: float) -> Tensor:
        """Returns the sums over all ranks; on the way each rank's own seconds are compared, and a slow one named."""
        world = self.mesh.world
        if world.size == 1:
            return sums
        row = torch.cat([sums, sums.new_zeros(world.size)])
        row[len(sums) + world.index] = busy_s
        row = all_reduce(row, world)
        for slow in self.stragglers.note(row[len(sums) :].tolist()):
            self.journal.say(f"warning: {slow}")
            place = {"rank": slow.rank, "host": slow.host}
            self.journal.record("slow", self.progress.step - 1, **place, factor=slow.factor, seconds=slow.seconds)
        return row[: len(sums)]

    def _cast(self, image: Tensor) -> Tensor:
        return image.double() if self.config.precision == "fp64" else image

    def _unsummed(self) -> Any:
        """Returns a context in which gradients are added up on this rank alone (shards are summed at once)."""
        return self.stepped.no_sync() if isinstance(self.stepped, DistributedDataParallel) else nullcontext()

    def _arithmetic(self) -> Any:
        if self.config.precision == "bf16":
            return torch.autocast(self.mesh.device.type, torch.bfloat16)
        return nullcontext()

    def _decide(self, finite: bool, stopper: Stopper) -> int:
        """Returns what all ranks do after this step: the weightiest of what any of them wants."""
        wish = GO_ON
        if not finite:
            wish = BROKEN
        elif self.mesh.is_first and time.monotonic() - self.last_save > 60 * self.config.checkpoint_minutes:
            wish = SAVE
        decision, leaves = agree(wish, self.mesh.world), stopper.here()
        return LEAVE if leaves and decision != BROKEN else decision

    def _report_broken(self, step: int, loss: float, micros: list[MicroBatch]) -> None:
        cases = ", ".join(sorted({case for micro in micros for case in micro.cases}))
        told = "" if math.isfinite(loss) else f"rank {self.mesh.world.index}: loss {loss} on {cases}"
        causes = [text for text in gather_texts(told, self.mesh.world) if text]
        if not causes:
            batches = gather_texts(cases, self.mesh.world)
            causes = [f"the gradient is not finite; the batch held {', '.join(dict.fromkeys(batches))}"]
        raise NonFinite(
            f"step {step}: {'; '.join(causes)}. No weight was changed. Lower --lr, set --clip 1, use --precision fp32, "
            "or look at these cases"
        )

    def _save(self, is_best: bool = False, must: bool = False) -> None:
        """Saves, unless just this was saved; where it fails and need not be now, training goes on and tries again."""
        progress = replace(self.progress)
        if progress == self.last_saved:
            return
        folder = self.out / "checkpoints"
        try:
            told = json.dumps(self.described)
            checkpoint.save(folder, self.net, self.optimiser, progress, self.mesh.world, told, is_best)
            self.last_saved = progress
        except NotSaved as error:
            if must:
                raise
            self.journal.say(f"warning: {error}; going on, next try in {self.config.checkpoint_minutes:g} minutes")
        self.last_save = time.monotonic()

    def _write_status(self, state: str, why: str = "", code: int = 0) -> None:
        self.journal.attempt(lambda: self.status.write(state, why, code))


def global_batch(config: Config, mesh: Mesh) -> int:
    """Returns the tiles of one step over all ranks."""
    return mesh.data.size * config.batch * config.accumulate
