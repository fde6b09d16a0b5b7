"""Prepares a data set: each case once, into a cache that training maps; resumes, and updates what changed.

Also checks its files as preparation would read them, without writing anything.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.files import write_json
from seqpar.data.formats.dataset import Case, Dataset, no_labels_error
from seqpar.data.formats.joined_labels import join_labels
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.cache import PreparedCase, PreparedDataset, check_cache, open_cache, read_record
from seqpar.data.preparation.cache_index import (
    cache_folder,
    is_current,
    is_of_settings,
    refuse_in_data,
    refuse_other,
    same_sources,
    sources_of,
    withdraw_index,
    write_index,
)
from seqpar.data.preparation.cache_writer import (
    CacheError,
    as_cache_error,
    cache_lock,
    discard,
    invalidate_cache,
    refuse_foreign,
    refuse_while_read,
    remove_partial_files,
    write_case,
)
from seqpar.data.preparation.fingerprint import read_geometries
from seqpar.data.preparation.preparation import prepare_case
from seqpar.data.preparation.prepared_case import (
    Properties,
    SettingsError,
    channel_to_source,
    image_to_source,
    labels_to_source,
    refuse_unannotated,
)
from seqpar.data.preparation.recipe import PrepareSettings, Recipe
from seqpar.data.preparation.recipe_survey import case_lost_error, decide_recipe
from seqpar.data.preparation.waiting import run_token, wait_for, writing_progress
from seqpar.data.volumes import digest_file, join_digests
from seqpar.data.workers import (
    Progress,
    ReportProgress,
    WorkerDied,
    default_workers,
    map_in_processes,
    no_item_progress,
    no_progress,
)

__all__ = [
    "PrepareSettings", "PreparedCase", "PreparedDataset", "Properties", "Recipe", "Report", "cache_folder",
    "channel_to_source", "check_cache", "check_sources", "image_to_source", "is_current", "labels_to_source",
    "open_cache", "prepare", "prepare_case", "prepared",
]  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What a preparation did: the ids prepared, kept and without foreground, and all faults."""

    path: Path
    prepared: tuple[str, ...]
    kept: tuple[str, ...]
    empty: tuple[str, ...]
    faults: tuple[DataError, ...]


def prepare(
    dataset: Dataset,
    out: str | Path,
    settings: PrepareSettings | None = None,
    workers: int | None = None,
    progress: Progress = no_progress,
    replace: bool = True,
    labelled: bool = True,
    needs_all: bool = False,
) -> Report:
    """Brings the cache in ``out`` up to date; returns a report, which lists bad cases instead of raising them.

    workers: processes; 0 works in this one (default: the number of cores, at most 8).
    replace: whether to prepare cases again that were prepared with other settings, instead of raising an error.
    labelled: whether to refuse a data set without labels.
    needs_all: whether to prepare nothing if the headers of a case show that it cannot be used.
    """
    settings, out = settings or PrepareSettings(), Path(out)
    workers = default_workers() if workers is None else workers
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be 0 (none) or more")
    if labelled and not dataset.labels and dataset.volume_classes is None:
        raise no_labels_error(dataset)
    if is_current(dataset, out, settings):  # writes nothing, since the folder may be read-only
        return _report(dataset, out, [], [])
    refuse_in_data(dataset, out)
    total = len(dataset.cases)
    with cache_lock(out, lambda: progress(0, total)):
        refuse_other(dataset, out, None if replace else settings)
        if is_current(dataset, out, settings):  # prepared by the process that this one waited for
            return _report(dataset, out, [], [])
        was_finished = is_of_settings(out, settings)
        remove_partial_files(out, set(dataset.ids))
        broken = faults_of_headers(dataset, settings, workers, progress)
        dataset = dataset.without(broken)
        if needs_all and broken:
            return Report(out, (), (), (), _in_order(dataset.faults))
        for name in broken:
            discard(out, name)
        if not dataset.cases:
            withdraw_index(out)
            return _report(dataset, out, [], [])

        def counted(done: float, total: int) -> None:
            progress(len(broken) + done, len(broken) + total)

        recipe, was_surveyed = decide_recipe(dataset, out, settings, workers, counted)

        def second_half(done: float, total: int) -> None:
            counted((total + done) / 2, total)

        work = _Work(out, recipe)
        try:
            refuse_while_read(out)
        except CacheError:
            if any(map(work.replaces, dataset.cases)):
                raise
        try:
            made, faults = _run(work, dataset, workers, second_half if was_surveyed else counted)
        finally:
            remove_partial_files(out, set(dataset.ids))
        if any(isinstance(fault, SettingsError) for fault in (*broken.values(), *faults)) and not was_finished:
            # so that the sides asked for next are not refused because of these
            withdraw_index(out)
        else:
            write_index(dataset, out, settings, recipe)
        return _report(dataset, out, made, faults)


def faults_of_headers(
    dataset: Dataset, settings: PrepareSettings, workers: int, progress: Progress = no_progress
) -> dict[str, DataError]:
    """Returns what is wrong with cases whose headers show that they cannot be used, by id."""
    read = read_geometries(dataset, workers, lambda: progress(0, len(dataset.cases)), settings.own_spacing)
    return {name: fault for name, fault in read.items() if isinstance(fault, DataError)}


def _run(work: "_Work", dataset: Dataset, workers: int, progress: Progress) -> tuple[list[str], list[DataError]]:
    """Returns the prepared ids, and the faults of other cases; raises CacheError if the folder cannot be written."""
    total, ended_ids, prepared_ids = len(dataset.cases), list[str](), list[str]()
    faults: list[DataError] = []

    def beat(shares: dict[int, float]) -> None:
        progress(len(ended_ids) + sum(shares.values()), total)

    with closing(map_in_processes(work, dataset.cases, workers, beat)) as outcomes:
        for case, outcome in outcomes:
            if isinstance(outcome, CacheError):
                raise outcome
            if isinstance(outcome, WorkerDied):
                outcome = case_lost_error(case, outcome)
            if isinstance(outcome, DataError):
                faults.append(outcome)
                discard(work.out, case.id)
            elif outcome:
                prepared_ids.append(case.id)
            ended_ids.append(case.id)
    return prepared_ids, faults


def prepared(
    path: str | Path | Dataset,
    out: str | Path | None = None,
    settings: PrepareSettings | None = None,
    *,
    is_first: bool,
    workers: int | None = None,
    token: str | None = None,
    deadline: float = 600.0,
    progress: Progress = no_progress,
    labelled: bool = True,
) -> PreparedDataset:
    """Returns the cache for training: the first process prepares what is missing, the others wait for it.

    A bad case raises the same error in all processes. So does a cache that was made with other settings, since another
    run may be reading it.

    token: a name of this run (default: made from the variables of torchrun or Slurm).
    deadline: seconds without news after which the preparing process counts as lost.
    labelled: whether to refuse a data set without labels.
    """
    settings = settings or PrepareSettings()
    dataset = join_labels(path if isinstance(path, Dataset) else read_dataset(path), settings.joins)
    folder, token = cache_folder(dataset, out, settings), run_token() if token is None else token
    _raise(dataset.faults)
    refuse_other(dataset, folder, settings)
    refuse_in_data(dataset, folder)
    if not (folder / "cache.json").exists():
        refuse_foreign(folder)  # before the progress is announced in it
    if not is_first:
        wait_for(
            folder, folder / "cache.json", token, lambda: is_current(dataset, folder, settings), deadline, progress
        )
    elif not is_current(dataset, folder, settings):
        with writing_progress(folder, token) as announcement:

            def show(done: float, total: int) -> None:
                announcement.tell(done, total)
                progress(done, total)

            _raise(prepare(dataset, folder, settings, workers, show, False, labelled, needs_all=True).faults)
    return open_cache(folder)


def _raise(faults: tuple[DataError, ...]) -> None:
    """Raises the first fault, if any, and says how to see the others."""
    if faults:
        more = f" (and {len(faults) - 1} more; run prepare to see them all)" if len(faults) > 1 else ""
        raise DataError(faults[0].path, faults[0].problem + more)


@dataclass(frozen=True)
class _Work:
    """Brings one case of the cache up to date; returns whether it had to be prepared."""

    out: Path
    recipe: Recipe

    def __call__(self, case: Case, tell: ReportProgress = no_item_progress) -> bool:
        labelled(case, self.recipe)
        sources, record = sources_of(case), read_record(self.out, case.id)
        if record is not None and self._takes(Recipe.from_json(record["recipe"])):
            refuse_unannotated(case, record["properties"]["counts"], self.recipe)
            if same_sources(record["sources"], sources):
                return False
            if record["digests"] == [digest_file(path) for path in case.files]:  # only touched or moved
                with as_cache_error(self.out):
                    invalidate_cache(self.out)
                    write_json(self.out / "cases" / case.id / "case.json", {**record, "sources": sources})
                return False
        prepared_case = prepare_case(case, self.recipe, tell)
        refuse_unannotated(case, prepared_case.properties.counts, self.recipe)
        write_case(self.out, case.id, prepared_case, self.recipe, sources)
        return True

    def replaces(self, case: Case) -> bool:
        """Returns whether bringing a case up to date would replace its folder; reads only files that look changed."""
        record = read_record(self.out, case.id)
        if record is None or not self._takes(Recipe.from_json(record["recipe"])):
            return (self.out / "cases" / case.id).exists()
        is_same = same_sources(record["sources"], sources_of(case))
        return not is_same and record["digests"] != [digest_file(path) for path in case.files]

    def _takes(self, recipe: Recipe) -> bool:
        """Returns whether a case that was prepared by this recipe stays; without --force none does that had it."""
        return recipe == self.recipe and recipe.cut_labels <= self.recipe.cut_labels


def labelled(case: Case, recipe: Recipe) -> None:
    """Raises DataError if a case has no label map although the data set's cases have them."""
    if case.label is None and recipe.values:
        raise DataError(case.images[0], "has no label; add it, or remove the image")


def _report(dataset: Dataset, out: Path, prepared_ids: list[str], faults: list[DataError]) -> Report:
    """Returns the report; a data set without any foreground is a fault."""
    records = {name: record for name in dataset.ids if (record := read_record(out, name)) is not None}
    background = [name for name, record in records.items() if dataset.labels and not record["locations"]]
    if background and len(background) == len(records):
        faults = [*faults, nothing_to_learn(dataset)]
    kept = tuple(name for name in records if name not in prepared_ids)
    return Report(out, tuple(sorted(prepared_ids)), kept, tuple(background), _in_order((*dataset.faults, *faults)))


def _in_order(faults: Iterable[DataError]) -> tuple[DataError, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.path))


def nothing_to_learn(dataset: Dataset) -> DataError:
    """Returns the error for a data set in which nothing is labelled."""
    return DataError(dataset.root, "no case has a labelled voxel, so there is nothing to learn; label some")


def check_sources(
    dataset: Dataset,
    out: Path,
    settings: PrepareSettings,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> tuple[Sequence[DataError], dict[str, str]]:
    """Returns what is wrong with a data set's files, and the digest of each case's voxels, if all is right; each case
    is read and prepared in memory.

    A case of the cache in ``out`` is not prepared again if its files still have the same bytes.
    """
    workers = default_workers() if workers is None else workers
    broken = faults_of_headers(dataset, settings, workers, progress)
    faults, total = list(broken.values()), len(dataset.cases) - len(broken)
    if total == 0:
        return _in_order(faults), {}
    dataset, done, has_foreground, voxels = dataset.without(broken), 0, False, dict[str, str]()
    try:
        recipe, was_surveyed = decide_recipe(dataset, out, settings, workers, progress, keep=False)
    except DataError as error:
        return [error], {}

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
                has_foreground |= outcome[0]
                voxels[case.id] = outcome[1]
    if dataset.labels and not faults and not has_foreground:
        return [nothing_to_learn(dataset)], {}
    return _in_order(faults), voxels


@dataclass(frozen=True)
class _Check:
    """Raises DataError if a case cannot be prepared; returns whether it has labelled voxels, and its image's digest."""

    out: Path
    recipe: Recipe

    def __call__(self, case: Case, tell: ReportProgress) -> tuple[bool, str]:
        labelled(case, self.recipe)
        record = read_record(self.out, case.id)
        if record is None or Recipe.from_json(record["recipe"]) != self.recipe:
            return self._prepared(case, tell)
        looks_the_same = [file[:3] for file in record["sources"]] == [file[:3] for file in sources_of(case)]
        for path, digest in zip(case.files, record["digests"]):
            if digest_file(path) != digest and looks_the_same:
                raise DataError(path, "has other bytes than when it was prepared, but the same size and modification "
                                "time: it may be damaged; copy it again, or touch it if it is right")  # fmt: skip
        if not looks_the_same:
            return self._prepared(case, tell)
        refuse_unannotated(case, record["properties"]["counts"], self.recipe)
        return bool(record["locations"]), join_digests(record.get("voxels", ()))

    def _prepared(self, case: Case, tell: ReportProgress) -> tuple[bool, str]:
        found = prepare_case(case, self.recipe, tell)
        refuse_unannotated(case, found.properties.counts, self.recipe)
        return bool(found.locations), join_digests(found.voxels)
