"""Decides the recipe of a data set, from its headers alone or by a survey of its files, which the cache keeps."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.files import read_json, write_json
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.preparation.cache import VERSION
from seqpar.data.preparation.cache_index import describe_dataset, json_round_trip, sources_of
from seqpar.data.preparation.cache_writer import as_cache_error
from seqpar.data.preparation.prepared_case import load_case
from seqpar.data.preparation.recipe import (
    Finding,
    PrepareSettings,
    Recipe,
    draft_recipe,
    finish_recipe,
    needs_survey,
    survey,
)
from seqpar.data.workers import Progress, ReportProgress, WorkerDied, map_in_processes, no_item_progress


@dataclass(frozen=True)
class _Survey:
    recipe: Recipe

    def __call__(self, case: Case, tell: ReportProgress = no_item_progress) -> Finding:
        if "ct" not in self.recipe.schemes:
            return survey(case, None, None, self.recipe)
        loaded = load_case(case, self.recipe)
        return survey(case, loaded.image, loaded.ids, self.recipe)


def decide_recipe(
    dataset: Dataset, out: Path, settings: PrepareSettings, workers: int, progress: Progress, keep: bool = True
) -> tuple[Recipe, bool]:
    """Returns the recipe, and whether files were surveyed, which happens if it depends on them and they have changed.

    A surveyed case counts as half done in ``progress``, since preparing it reads it once more.

    keep: whether to write the survey's result into the cache folder ``out``.
    """
    draft = draft_recipe(dataset, settings)
    if not needs_survey(dataset, settings):
        return draft, False
    key = {
        "version": VERSION,
        "settings": json_round_trip(settings.described()),
        "dataset": describe_dataset(dataset),
        "sources": {},
    }
    try:
        key["sources"] = {case.id: sources_of(case) for case in dataset.cases}
        stored = read_json(out / "recipe.json")
        if stored["key"] == key:
            return Recipe.from_json(stored["recipe"]), False
    except (DataError, KeyError, TypeError):
        pass  # none yet, or an unreadable file, whose case is reported below
    findings, ended_ids, total = dict[str, Finding](), list[str](), len(dataset.cases)

    def beat(shares: dict[int, float]) -> None:
        progress((len(ended_ids) + sum(shares.values())) / 2, total)

    with closing(map_in_processes(_Survey(draft), dataset.cases, workers, beat)) as outcomes:
        for case, outcome in outcomes:
            ended_ids.append(case.id)
            if isinstance(outcome, WorkerDied):
                raise case_lost_error(case, outcome)
            if isinstance(outcome, Finding):
                findings[case.id] = outcome
    in_order = [findings[name] for name in sorted(findings)]  # not in the order in which they finished
    recipe = finish_recipe(draft, dataset, settings, in_order)
    if keep:
        with as_cache_error(out):
            write_json(out / "recipe.json", {"key": key, "recipe": recipe.to_json()})
    return recipe, True


def case_lost_error(case: Case, why: WorkerDied) -> DataError:
    """Returns the error for a case whose process ended without a result."""
    return DataError(case.images[0], f"could not be prepared: {why}; free memory, or use fewer --workers")
