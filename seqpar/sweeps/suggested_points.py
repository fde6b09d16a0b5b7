"""Points that optuna suggests one after the other, by the scores of those before, as a search algorithm of Ray Tune.

Sampled values are those of ``--space``: optuna knows listed values by their number, and ranges as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

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
        self.by_trial = dict[
            str, Mapping[str, Any]
        ]()  # settings of points that optuna has not suggested, or no longer knows
        sampler = optuna.samplers.TPESampler(seed=seed + len(known))
        self.optuna = OptunaSearch(_distributions(space), metric="score", mode="max", sampler=sampler)
        for point in known:
            if point.is_over and point.score == point.score:
                self.optuna.add_evaluated_point(_numbered(space, point.settings), point.score)

    def __getstate__(self) -> dict[str, Any]:
        """Returns nothing: what optuna needs to go on are the points of sweep.json."""
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Returns the next trial's task, ``FINISHED`` after the last one."""
        if self.ends():
            return str(Searcher.FINISHED)
        if self.waiting:
            point = self.waiting.pop(0)
            self.by_trial[trial_id] = point.settings
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
        """Returns the settings of a point that is not there yet, None where there is none.

        Where optuna suggests those that are there again and again, it is the first one left of the listed values.
        """
        for number in range(TRIES):
            ask = f"{trial_id}-{number}" if number else trial_id
            settings = self._settings(self.optuna.suggest(ask) or {})
            if name_of_point(settings) not in self.names:
                if number:  # the trial's own id stands for the one that is taken
                    self.optuna._ot_trials[trial_id] = self.optuna._ot_trials.pop(ask)
                return settings
            self.optuna.on_trial_complete(ask)  # without a value: pruned
            self.optuna._completed_trials.discard(ask)
        left = [] if self.space.ranges else self.space.points()
        for settings in left:
            if name_of_point(settings) not in self.names:
                self.by_trial[trial_id] = settings  # optuna hears of it once it has a score
                return settings
        return None

    def _settings(self, suggested: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.space.values[name][suggested[name]] if name in self.space.values else rounded(suggested[name])
            for name in self.space.names
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tells optuna what a point came to."""
        settings = self.by_trial.pop(trial_id, None)
        if settings is None:
            self.optuna.on_trial_complete(trial_id, result, error)
        elif result and not error:
            self.optuna.add_evaluated_point(_numbered(self.space, settings), result["score"])


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
