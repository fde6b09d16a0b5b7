"""Checks a data set's files as preparation would read them, without writing anything."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.preparation.cache import read_record
from seqpar.data.preparation.cache_index import files_of, sources_of
from seqpar.data.preparation.preparation import prepare_case
from seqpar.data.preparation.prepare_dataset import faults_of_headers, labelled, nothing_to_learn
from seqpar.data.preparation.recipe import PrepareSettings, Recipe
from seqpar.data.preparation.recipe_survey import case_lost_error, decide_recipe
from seqpar.data.volumes import digest_file
from seqpar.data.workers import Progress, ReportProgress, WorkerDied, default_workers, map_in_processes, no_progress


def check_sources(
    dataset: Dataset,
    out: Path,
    settings: PrepareSettings,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> list[DataError]:
    """Returns what is wrong with a data set's files; each case is read and prepared in memory.

    A case of the cache in ``out`` is not prepared again if its files still have the same bytes.
    """
    workers = default_workers() if workers is None else workers
    broken = faults_of_headers(dataset, workers, progress)
    faults, total = list(broken.values()), len(dataset.cases) - len(broken)
    if total == 0:
        return sorted(faults, key=lambda fault: fault.path)
    dataset, done, has_foreground = dataset.without(broken), 0, False
    try:
        recipe, was_surveyed = decide_recipe(dataset, out, settings, workers, progress, keep=False)
    except DataError as error:
        return [error]

    def beat(shares: dict[int, float]) -> None:
        checked = done + sum(shares.values())
        progress((total + checked) / 2 if was_surveyed else checked, total)

    with closing(map_in_processes(_Check(out, recipe), dataset.cases, workers, beat)) as outcomes:
        for case, outcome in outcomes:
            done += 1
            if isinstance(outcome, WorkerDied):
                outcome = case_lost_error(case, outcome)
            if isinstance(outcome, DataError):
                faults.append(outcome)
            else:
                has_foreground |= outcome
    if dataset.labels and not faults and not has_foreground:
        return [nothing_to_learn(dataset)]
    return sorted(faults, key=lambda fault: fault.path)


@dataclass(frozen=True)
class _Check:
    """Raises DataError if a case cannot be prepared; returns whether it has labelled voxels."""

    out: Path
    recipe: Recipe

    def __call__(self, case: Case, tell: ReportProgress) -> bool:
        labelled(case, self.recipe)
        record = read_record(self.out, case.id)
        if record is None or Recipe.from_json(record["recipe"]) != self.recipe:
            return bool(prepare_case(case, self.recipe, tell).locations)
        looks_the_same = record["sources"] == sources_of(case)
        for path, digest in zip(files_of(case), record["digests"]):
            if digest_file(path) != digest and looks_the_same:
                raise DataError(path, "has other bytes than when it was prepared, but the same size and modification "
                                "time: it may be damaged; copy it again, or touch it if it is right")  # fmt: skip
        return bool(record["locations"] if looks_the_same else prepare_case(case, self.recipe, tell).locations)
