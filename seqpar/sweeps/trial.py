"""Trial: the training of one point of a sweep, as Ray Tune runs it; a rank in each bundle of a placement group.

Whatever ends a trial's actors, ends its ranks: the kernel kills them with the process that started them. This module
is imported in every worker of Ray, and needs no torch.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from seqpar.cluster.exit_codes import FINAL, PREEMPTED
from seqpar.data.files import read_json
from seqpar.parallel.processes import (
    LEAVE_SIGNALS,
    PARENT,
    STOP_FILE,
    environment_of_ranks,
    free_port,
    rank_variables,
    start_python,
)
from seqpar.runs.metrics_tail import MetricsTail, score_of
from seqpar.terminal import python_module

POLL_S = 0.2
GRACE_S = 25.0  # for the other ranks, once one has failed
LEAVE_S = 120.0  # for ranks that were asked to leave: they save first
LEAVING = "leaving"  # this file in a sweep's folder asks all of its trials to leave


@dataclass(frozen=True)
class TrialTask:
    """What a trial needs to know of its training.

    - ``flags``: of train, all but --out and --resume
    - ``sweep``: the folder of the sweep, in which ``name`` is the run folder
    - ``variables``: what its ranks find in their environment besides
    """

    name: str
    flags: tuple[str, ...]
    ranks: int
    sweep: str
    variables: dict[str, str]

    @property
    def run(self) -> Path:
        return Path(self.sweep) / self.name

    @property
    def arguments(self) -> list[str]:
        """What every rank's Python is started with; a run that has begun resumes."""
        begin = self.flags if not (self.run / "config.json").exists() else ("--resume", "--take-over")
        return ["-u", *python_module("train"), *begin, "--out", str(self.run)]


class RankProcess:
    """The process of a rank, which dies with this one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, str, int]:
        """Returns name and address of this node, and a free port."""
        return socket.gethostname(), ray.util.get_node_ip_address(), free_port("")

    def start(self, arguments: Sequence[str], variables: dict[str, str], log: str) -> None:
        """Starts the rank; what it prints is appended to the file ``log``."""
        env = {**environment_of_ranks(), **variables, PARENT: str(os.getpid())}
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            self.process = start_python(arguments, env, **streams)

    def poll(self) -> int | None:
        """Returns the exit code, None while the rank runs."""
        return None if self.process is None else self.process.poll()

    def send(self, number: int) -> None:
        """Sends a signal to the rank, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Ranks:
    """All ranks of a training: the first one here, the others in actors of the placement group's further bundles."""

    def __init__(self, task: TrialTask) -> None:
        self.own, self.others = RankProcess(), list[Any]()
        group = ray.util.get_current_placement_group()
        for bundle in range(1, task.ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            resources = {name: amount for name, amount in group.bundle_specs[bundle].items() if name in ("CPU", "GPU")}
            options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
            actor = ray.remote(RankProcess).options(scheduling_strategy=place, **options)
            self.others.append(actor.remote())
        first, address, port = self.own.place()
        hosts = [first, *(host for host, *_ in ray.get([other.place.remote() for other in self.others]))]
        self.where = ", ".join(
            f"{host} x {hosts.count(host)}" if task.ranks > 1 else host for host in dict.fromkeys(hosts)
        )
        log = str(Path(task.sweep) / "logs" / f"{task.name}.txt")
        for rank, host in enumerate(hosts):
            local_rank, local_world = hosts[:rank].count(host), hosts.count(host)
            own = rank_variables(rank, task.ranks, local_rank, local_world, address, port)
            self._call(rank, "start", task.arguments, {**task.variables, **own}, log)

    def _call(self, rank: int, method: str, *arguments: Any) -> Any:
        if rank == 0:
            return getattr(self.own, method)(*arguments)
        return ray.get(getattr(self.others[rank - 1], method).remote(*arguments))

    def codes(self) -> list[int | None]:
        """Returns each rank's exit code, None where it runs."""
        return [self.own.poll(), *ray.get([other.poll.remote() for other in self.others])]

    def send(self, number: int) -> None:
        """Sends a signal to all ranks that run; the ranks of an actor that was lost have ended with it."""
        for rank in range(1 + len(self.others)):
            with suppress(RayActorError):
                self._call(rank, "send", number)

    def wait(self, seconds: float) -> list[int | None]:
        """Returns the exit codes once all ranks have ended, or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while None in (codes := self.codes()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return codes

    def end(self, seconds: float) -> list[int | None]:
        """Asks all ranks to save and leave, and kills those that have not left after ``seconds``."""
        self.send(signal.SIGTERM)
        if None in (codes := self.wait(seconds)):
            self.send(signal.SIGKILL)
            codes = self.wait(GRACE_S)
        return codes


class Trial(tune.Trainable):
    """The training of a point; a result is a validation, the last one says how the training ended."""

    def setup(self, config: dict[str, Any]) -> None:
        self.task = TrialTask(**config["task"])
        self.tail = MetricsTail(self.task.run / "metrics.jsonl")
        self.result: dict[str, Any] = {"score": 0.0, "loss": 0.0, "step": 0, "code": -1}
        self.ranks: Ranks | None = None

    def step(self) -> dict[str, Any]:
        """Returns the next validation, or how the training ended; raises if it has to resume from its checkpoint."""
        if self.ranks is None:
            if self._asked_to_leave():
                return self._over(PREEMPTED)
            self.ranks = Ranks(self.task)
            self.result["where"] = self.ranks.where
        while True:
            codes = self.ranks.codes()
            if self._next_validation():
                return dict(self.result)
            if any(codes):  # a rank has failed: the others notice, or are ended
                codes = self.ranks.wait(GRACE_S)
            if any(codes) or None not in codes:
                return self._ended([code for code in self.ranks.end(0) if code is not None])
            if self._asked_to_leave():
                self.ranks.end(LEAVE_S)
                return self._over(PREEMPTED)
            time.sleep(POLL_S)

    def _ended(self, codes: Sequence[int]) -> dict[str, Any]:
        """Returns the last result; raises where the training was killed, so that Ray begins the trial again.

        One that left because of a file ``stop`` in its folder was not.
        """
        self._next_validation()
        code = next((code for code in codes if code in FINAL), max(codes, key=abs))
        has_left = code == PREEMPTED or code - 128 in LEAVE_SIGNALS  # the latter: before it had begun
        was_asked = has_left and (self._asked_to_leave() or self._has_left_by_file())
        if code and code not in FINAL and not was_asked:
            raise RuntimeError(f"the training of {self.task.name} ended with exit code {code}")
        return self._over(PREEMPTED if was_asked else code)

    def _over(self, code: int) -> dict[str, Any]:
        self.result |= {"code": code, "done": True}
        return dict(self.result)

    def _next_validation(self) -> bool:
        """Takes the new rows of the journal into the result; returns whether a validation is among them."""
        rows = [row for row in self.tail.read() if row.get("kind") in ("train", "val")]
        for row in rows:
            if row["kind"] == "train":
                self.result |= {"loss": row["loss"]}
            else:
                self.result |= {"score": score_of(row), "step": row["step"]}
        return any(row["kind"] == "val" for row in rows)

    def _asked_to_leave(self) -> bool:
        return (Path(self.task.sweep) / LEAVING).exists()

    def _has_left_by_file(self) -> bool:
        path = self.task.run / "status.json"
        why = str(read_json(path).get("why", "")) if path.is_file() else ""
        return why.startswith(f"file {self.task.run / STOP_FILE}")

    def cleanup(self) -> None:
        """Lets the ranks of a trial that Ray ends early save and leave."""
        if self.ranks is not None:
            with suppress(RayActorError):
                self.ranks.end(LEAVE_S)
