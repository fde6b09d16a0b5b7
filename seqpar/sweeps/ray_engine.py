"""SideBySide: an engine that makes the runs of a list as trials of Ray Tune, as many at a time as devices allow."""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher

from seqpar.cluster.exit_codes import FAULT, PREEMPTED
from seqpar.parallel.processes import STOP_FILE, forward_signals, most_informative_code
from seqpar.sweeps.live_table import LiveTable
from seqpar.sweeps.planned_run import PlannedRun, has_begun, has_finished, refuse_other_flags
from seqpar.sweeps.ray_cluster import Cluster
from seqpar.sweeps.sweep_request import ASHA
from seqpar.sweeps.trial import LEAVING, Trial, TrialTask
from seqpar.terminal import python_module, typed_variable

STORAGE = ".ray"  # what Tune itself writes lies here in the sweep's folder while it runs; sweep.json is our record
REPLACED = "rename this folder, and the sweep trains the point again"
Suggest = Callable[[Callable[[PlannedRun], dict[str, Any]], Callable[[], bool]], Searcher]


@dataclass
class SideBySide:
    """Makes runs side by side, each on ``ranks`` devices.

    - ``max_failures``: how often a killed training resumes from its checkpoint
    - ``stop_early``: whether asha ends runs that fall behind; ``first_step`` and ``last_step``: of all runs, the steps
      of the earliest first validation and of the latest last one
    - ``until``: when to leave, by ``time.monotonic``
    - ``stopped``: names of runs that were ended early
    - ``on_end``: called when a run is over
    - ``refuse_taken_over``: raises if another sweep has the folder by now
    - ``suggest``: makes the search algorithm that adds runs, as many as ``total`` says; it takes what makes a run's
      task, and whether no further run is to begin. None: the runs are all there
    """

    cluster: Cluster
    ranks: int
    max_failures: int = 2
    stop_early: str = "none"
    first_step: int = 1
    last_step: int = 1
    until: float = float("inf")
    signals: list[int] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    on_end: Callable[[], object] = lambda: None
    refuse_taken_over: Callable[[], object] = lambda: None
    suggest: Suggest | None = None
    total: int = 0

    def make(self, runs: Sequence[PlannedRun], root: Path) -> int:
        """Returns 0 once every run is over in its folder below ``root``, else the exit code of one that is not.

        75: they were left early.
        """
        for run in runs:
            if has_begun(root / run.name):
                refuse_other_flags(run, root / run.name, REPLACED)
        open_runs = [run for run in runs if not has_finished(root / run.name) and run.name not in self.stopped]
        total = max(self.total, len(runs))
        num_open = total - (len(runs) - len(open_runs))
        if not num_open:
            return 0
        watch = _Watch(LiveTable(root, total, total - num_open), root, self.stopped)
        (root / LEAVING).unlink(missing_ok=True)
        thread = threading.Thread(target=self._fit, args=(open_runs, num_open, root, watch), daemon=True)
        with forward_signals([], self.signals):
            thread.start()
            num_over = watch.table.over
            while thread.is_alive():
                thread.join(0.2)
                self._refuse_lost()
                if watch.table.over > num_over:
                    num_over = watch.table.over
                    self.on_end()
                if not watch.leaves and (self.signals or time.monotonic() > self.until or (root / STOP_FILE).is_file()):
                    watch.leave()
                watch.refresh()
        self._refuse_lost()
        watch.table.close()
        (root / LEAVING).unlink(missing_ok=True)
        shutil.rmtree(root / STORAGE, ignore_errors=True)
        if watch.error is not None:
            raise watch.error
        return PREEMPTED if watch.leaves else most_informative_code(list(watch.codes.values()))

    def _refuse_lost(self) -> None:
        self.refuse_taken_over()
        if lost := self.cluster.lost():
            raise ConnectionError(f"{lost}: the same command with --resume continues")

    def _fit(self, runs: Sequence[PlannedRun], num_open: int, root: Path, watch: "_Watch") -> None:
        """Has Ray Tune make the runs; an error is left for the thread that waits."""
        shutil.rmtree(root / STORAGE, ignore_errors=True)
        bundles = [self.cluster.bundle] * self.ranks
        resources = tune.PlacementGroupFactory(bundles, strategy="PACK")  # in one node where they fit
        space, own = {"task": tune.grid_search([self._task(run, root) for run in runs])}, dict[str, Any]()
        try:
            if self.suggest is not None:
                searcher = self.suggest(partial(self._task, root=root), lambda: watch.leaves)
                space, at_a_time = {}, max(1, self.cluster.devices // self.ranks)
                own = {"search_alg": ConcurrencyLimiter(searcher, at_a_time), "num_samples": num_open}
            tune.Tuner(
                tune.with_resources(Trial, resources),
                param_space=space,
                tune_config=tune.TuneConfig(
                    **own,
                    metric=None if own else "score",  # a search algorithm has its own
                    mode=None if own else "max",
                    scheduler=self._scheduler(),
                    trial_name_creator=_name_of,
                    trial_dirname_creator=lambda trial: str(trial.trial_id),
                ),
                run_config=tune.RunConfig(
                    name="tune",
                    storage_path=str((root / STORAGE).absolute()),  # Ray takes other paths for addresses
                    failure_config=tune.FailureConfig(max_failures=self.max_failures),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # trainings have their own
                    callbacks=[watch],
                    stop=_Leaving(watch),
                    verbose=0,
                ),
            ).fit()
        except Exception as error:
            watch.error = error

    def _task(self, run: PlannedRun, root: Path) -> dict[str, Any]:
        variables = typed_variable(python_module("train"))
        return asdict(TrialTask(run.name, tuple(run.flags), run.ranks, str(root.absolute()), variables))

    def _scheduler(self) -> TrialScheduler:
        if self.stop_early != ASHA:
            return FIFOScheduler()
        own = {} if self.suggest is None else {"metric": "score", "mode": "max"}
        # it would end runs at max_t, before they have finished
        return ASHAScheduler("step", max_t=self.last_step + 1, grace_period=self.first_step, **own)


def _name_of(trial: Any) -> str:
    return str(trial.config["task"]["name"])


class _Watch(tune.Callback):
    """Follows the trials: for the table, and to know which still train after they were asked to leave."""

    def __init__(self, table: LiveTable, root: Path, stopped: list[str]) -> None:
        self.table, self.root, self.stopped = table, root, stopped
        self.codes, self.training = dict[str, int](), set[str]()
        self.leaves, self.error = False, None  # type: bool, Exception | None
        self._lock = threading.Lock()  # Tune calls from its own thread

    def __getstate__(self) -> dict[str, Any]:
        """Returns nothing: Tune writes down what it was given, to restore it in ways that are not used here."""
        return {}

    def leave(self) -> None:
        """Asks all trials to leave."""
        self.leaves = True
        with suppress(OSError):
            (self.root / LEAVING).touch()
            (self.root / STOP_FILE).unlink(missing_ok=True)
        with self._lock:
            self.table.display.say("leaving: runs save and end")

    def refresh(self) -> None:
        with self._lock:
            self.table.refresh()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = _name_of(trial)
        with self._lock:
            if not self.leaves:
                self.training.add(name)
                self.table.begins(name, trial.num_failures > 0)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict, **info: Any) -> None:
        with self._lock:
            self.table.lies(_name_of(trial), str(result.get("where", "")))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name, code = _name_of(trial), int((trial.last_result or {}).get("code", -1))
        how = {0: "has finished", PREEMPTED: "left early"}.get(code, f"ended with exit code {code}")
        if code < 0:
            self.stopped.append(name)
            code, how = 0, f"was ended early, after step {trial.last_result.get('step')}"
        self._ends(name, code, how)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._ends(_name_of(trial), FAULT, f"failed {trial.num_failures} times; logs/{_name_of(trial)}.txt says why")

    def _ends(self, name: str, code: int, how: str) -> None:
        with self._lock:
            self.codes[name] = code
            if name in self.training:
                self.training.discard(name)
                self.table.ends(name, how)


class _Leaving(tune.Stopper):
    """Ends the experiment once all trials that trained have left."""

    def __init__(self, watch: _Watch) -> None:
        self.watch = watch

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.watch.leaves and not self.watch.training
