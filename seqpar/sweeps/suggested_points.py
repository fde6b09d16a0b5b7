"""Points that optuna suggests one after the other, by the scores of those before, as a search algorithm of Ray Tune.

Sampled values are those of ``--space``: optuna knows listed values by their number, and ranges as they are. Ray's own
``OptunaSearch`` is not used: it suggests points again that are there already, and a resumed sweep would need its
pickled state, which a killed driver may not have written.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial
from ray.tune.search import Searcher

from seqpar.runs.sweep_folder import Point
from seqpar.sweeps.space import TRIES, Space, name_of_point, rounded

Task = dict[str, Any]


class SuggestedPoints(Searcher):
    """Returns the tasks of points that are known and not over, then those that optuna suggests, ``samples`` in all.

    - ``known``: the points so far; those that have a score are what optuna begins with
    - ``task_of``: returns the task of a new point, by its name and settings, after noting it down
    - ``ends``: whether no further point is to begin
    """

    def __init__(
        self,
        space: Space,
        samples: int,
        known: Sequence[Point],
        task_of: Callable[[str, Mapping[str, Any]], Task],
        ends: Callable[[], bool],
        seed: int = 0,
    ) -> None:
        super().__init__(metric="score", mode="max")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.samples, self.task_of, self.ends = space, samples, task_of, ends
        self.names = {point.name for point in known}
        self.waiting = [point for point in known if not point.is_over]
        self.distributions = _distributions(space)
        self.trials = dict[str, optuna.Trial]()  # of the points that optuna has suggested, by Ray's ids
        self.others = dict[str, Mapping[str, Any]]()  # settings of the other points that train, by Ray's ids
        sampler = optuna.samplers.TPESampler(seed=seed + len(known))
        self.study = optuna.create_study(sampler=sampler, direction="maximize")
        for point in known:
            if point.is_over and point.score == point.score:
                self._add(point.settings, point.score)

    def __getstate__(self) -> dict[str, Any]:
        """Returns nothing: optuna resumes from the points of sweep.json."""
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Returns the next trial's task, ``FINISHED`` after the last one."""
        if self.ends():
            return str(Searcher.FINISHED)
        if self.waiting:
            point = self.waiting.pop(0)
            self.others[trial_id] = point.settings
            return {"task": self.task_of(point.name, point.settings)}
        if len(self.names) >= self.samples:
            return str(Searcher.FINISHED)
        settings = self._new(trial_id)
        if settings is None:
            return str(Searcher.FINISHED)
        name = name_of_point(settings)
        self.names.add(name)
        return {"task": self.task_of(name, settings)}

    def _new(self, trial_id: str) -> dict[str, Any] | None:
        """Returns the settings of a point that is not there yet, None if there is none.

        Where optuna suggests those that are there again and again, it is the first one left of the listed values.
        """
        for _ in range(TRIES):
            trial = self.study.ask(self.distributions)
            settings = self._settings(trial.params)
            if name_of_point(settings) not in self.names:
                self.trials[trial_id] = trial
                return settings
            self.study.tell(trial, state=TrialState.PRUNED)
        left = [] if self.space.ranges else self.space.points()
        for settings in left:
            if name_of_point(settings) not in self.names:
                self.others[trial_id] = settings  # optuna hears of it once it has a score
                return settings
        return None

    def _settings(self, suggested: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.space.values[name][suggested[name]] if name in self.space.values else rounded(suggested[name])
            for name in self.space.names
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tells optuna what a point came to."""
        score = None if error or not result or result["score"] != result["score"] else float(result["score"])
        if trial := self.trials.pop(trial_id, None):
            self.study.tell(trial, score, state=TrialState.FAIL if score is None else TrialState.COMPLETE)
        elif (settings := self.others.pop(trial_id, None)) and score is not None:
            self._add(settings, score)

    def _add(self, settings: Mapping[str, Any], score: float) -> None:
        """Tells optuna of a point that it has not suggested."""
        params = _numbered(self.space, settings)
        self.study.add_trial(create_trial(params=params, distributions=self.distributions, value=score))


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    """Returns what optuna draws from."""
    every: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(range(len(values))) for name, values in space.values.items()
    }
    ranges = {name: FloatDistribution(one.low, one.high, log=one.kind == "log") for name, one in space.ranges.items()}
    return {**every, **ranges}


def _numbered(space: Space, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a point's settings as optuna knows them."""
    return {
        name: space.values[name].index(settings[name]) if name in space.values else settings[name]
        for name in space.names
    }
