"""What the evaluations of tasks share: predictions are scored one after the other, and several are compared."""

import argparse
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from seqpar.cluster.exit_codes import DATA
from seqpar.data.errors import DataError
from seqpar.data.files import SUFFIXES, strip_suffix
from seqpar.data.formats.dataset import Dataset
from seqpar.data.phantom.phantom_files import is_generated
from seqpar.prediction.prediction_folder import RECORD, inputs_of, replaced_line
from seqpar.report.cautions import (
    above_scores,
    begun_unknown,
    cautions_of_validation,
    cautions_together,
    records_behind,
)
from seqpar.report.images import images_beside, other_images, unlisted_maps
from seqpar.report.record import RunRecord, from_here, mixed_line, predicted_otherwise, read_record, runs_behind
from seqpar.report.tables import Score, Table, TableHead, TableRow
from seqpar.runs.fold_folder import runs_of
from seqpar.runs.run_folder import holds_folds, holds_run, read_config, run_of_validation, tested_cases, validation_in
from seqpar.scores.class_scores import TABLE
from seqpar.scores.comparison import about_scans
from seqpar.scores.label_classes import Labels, choose_labels, joined_in, labels_of_run, with_declared_by
from seqpar.scores.label_files import missing_line
from seqpar.scores.summary_files import write_output, writing_alone
from seqpar.tasks.seen_cases import NEW, NONE_SEEN, SEEN, Seen
from seqpar.tasks.training_data import copies_of_run, sides_of_each
from seqpar.terminal import next_command
from seqpar.weights.facts import not_one_split

ELSEWHERE = "; --images FOLDER adds images that are stored elsewhere"


@dataclass
class ScoringJob:
    """One prediction to score.

    - ``name``: as the command line names it
    - ``cases``: what a task scores of it
    - ``files``: to write, by kind: "json", "csv" and "calibration", a picture
    - ``faults``: what is wrong with other cases
    - ``missing``: cases of the truth without a prediction
    - ``note``: a line on files that are not written
    - ``seen``: which cases are not new to the runs behind it
    - ``runs``: those that predicted it, if all are still there
    - ``known``: the same next to other predictions, where the validation of a run counts as well
    - ``records``: of those that predicted it, as far as they can be read
    - ``cautions``: what to know of these
    """

    name: str
    cases: Any
    files: Mapping[str, Path]
    faults: list[DataError] = field(default_factory=list)
    missing: Sequence[str] = ()
    note: str = ""
    seen: Seen = NONE_SEEN
    runs: Sequence[Path] = ()
    known: Seen = NONE_SEEN
    records: list[RunRecord] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """Where the predictions are: the folder of a single label map, or of its table, says how it was made."""
        path = Path(self.name)
        return path.parent if self.only or path.name == TABLE and path.is_file() else path

    @property
    def only(self) -> str:
        """The case of a single label map; "" of other predictions."""
        path = Path(self.name)
        return strip_suffix(path.name) if path.is_file() and path.name.endswith(SUFFIXES) else ""


@dataclass(frozen=True)
class ScoredPrediction:
    """The scores of a prediction.

    - ``names``: of its cases
    - ``cases``: what the comparison needs of each
    - ``text``: what is printed
    - ``line``: one line that sums up
    - ``contents``: of the files, by kind, or what writes it
    """

    name: str
    names: Sequence[str]
    cases: Any
    text: str
    line: str
    contents: Mapping[str, str | Callable[[Path], object]]


class CaseEvaluation(ABC):
    """Scores predictions, prints and writes the scores and, of several predictions, says which is best.

    - ``options``: the command line of evaluate
    - ``only``: the cases to score; None for all
    - ``labels``: that are scored; None of classes
    """

    labels: Labels | None = None
    images = staticmethod(images_beside)  # where the images of a truth are, None if it has none
    replaced = staticmethod(replaced_line)  # a sentence on predictions that have changed
    unlisted = staticmethod(unlisted_maps)  # cases that a prediction's record does not name, and a sentence

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.only = tested_cases(options.test_of) if options.test_of else None
        self.subjects: Mapping[str, str] = {}  # the patient of each case, if a table names it

    @abstractmethod
    def open(self) -> list[ScoringJob]:
        """Returns what is to be scored; raises what cannot be, before an hour of distances."""

    @abstractmethod
    def score(self, job: ScoringJob) -> ScoredPrediction | None:
        """Returns the scores of a prediction, None if no case has one; adds to the job's faults."""

    @abstractmethod
    def words(self, text: str) -> list[str]:
        """Returns what the scores in a printed text mean, a line for each."""

    @abstractmethod
    def find_seen(self, job: ScoringJob, record: RunRecord) -> Seen:
        """Returns which scored cases a run was trained on, or chose its weights by."""

    @abstractmethod
    def of(self, cases: Any, names: Sequence[str]) -> Any:
        """Returns what the comparison needs of some cases alone."""

    @abstractmethod
    def compare(self, scored: Sequence[ScoredPrediction]) -> str:
        """Returns which of several predictions is best, on the cases that all of them have."""

    def find_best(self, scored: Sequence[ScoredPrediction]) -> str:
        """Returns which prediction is best, folds taken together, and what postprocessing raises its score."""
        raise ValueError("--find-best is for label maps: remove it")

    def run(self) -> int:
        """Returns the exit code: 0, or that of data if something is wrong with a case."""
        jobs, scored, told, scans = self.open(), list[ScoredPrediction](), set[str](), ""
        for job in jobs:
            if len(jobs) > 1:
                print(f"\n{job.name}:", flush=True)
            if on_phantoms := self._look_up(job):
                print(on_phantoms, flush=True)  # above the first score
            line, names = "no case could be scored", list[str]()
            if result := self.score(job):
                words = [line for line in self.words(result.text) if line not in told]
                told.update(words)
                print("\n".join([result.text, *words]), end="\n\n", flush=True)
                scored.append(result)
                line, names, scans = result.line, [*result.names], about_scans(result.names, self.subjects)
                written = {path: result.contents[kind] for kind, path in job.files.items() if kind in result.contents}
                with writing_alone(written):
                    for path, content in written.items():
                        try:
                            write_output(path, content)
                            line += f"; {path}"
                        except DataError as error:
                            job.faults.append(error)
            for text in filter(None, [job.note, missing_line(job.missing), *self._cautions(job, names), scans]):
                print(text, flush=True)
            for fault in job.faults:
                print(f"error: {fault}", file=sys.stderr, flush=True)
            print(line + (f"; faults {len(job.faults)}" if job.faults else ""), flush=True)
        first, which, every = self._first_of(jobs, scored) if scored else ([], "", False)
        if len(scored) > 1:
            lines = [which] * bool(which) + [self.compare(first)]
            lines += [f"\nall cases together, new or not:\n{self.compare(scored)}"] * every
            if self.options.find_best is None and not set.intersection(*(set(one.names) for one in scored)):  # pooled
                lines += cautions_together(Path(job.name) for job in jobs)
                lines += filter(None, [about_scans([name for one in scored for name in one.names], self.subjects)])
            print("\n" + "\n".join(lines), flush=True)
        for caution in _about_folds([Path(job.name) for job in jobs]):
            print(f"\n{caution}", flush=True)
        if self.options.find_best is not None and scored:
            lines = [which] * (bool(which) and len(scored) == 1) + [self.find_best(first)]
            lines += cautions_together(Path(job.name) for job in jobs)
            print("\n" + "\n".join(lines), flush=True)
        if len(jobs) == len(scored) == 1:
            for text in self._next_lines(jobs[0].runs):
                print(text, flush=True)
        return DATA if any(job.faults for job in jobs) else 0

    def _first_of(
        self, jobs: Sequence[ScoringJob], scored: Sequence[ScoredPrediction]
    ) -> tuple[Sequence[ScoredPrediction], str, bool]:
        """Returns predictions with the cases that lead their comparison, a sentence on which, and if there are others.

        They are new to all runs behind the predictions, if any are.
        """
        names = [set(one.names) for one in scored]
        cases = sorted(set.intersection(*names) or set.union(*names))
        groups, told = Seen.by_any([job.known for job in jobs]).apart(cases)
        led = next(iter(groups.values()))
        first = [replace(one, names=own, cases=self.of(one.cases, own)) for one in scored
                 if (own := [name for name in one.names if name in led])]  # fmt: skip
        if not told or len(first) < len(scored):  # some folds have no such case
            return scored, "", False
        if len(scored) > 1:
            told = told.replace(NEW, "new to all runs").replace(SEEN, f"{SEEN} by at least one of these runs")
        return first, told, len(groups) > 1

    def _look_up(self, job: ScoringJob) -> str:
        """Gives the job what is known of the runs behind it and of its cases; returns what to say above the scores of
        phantoms, or "".
        """
        prediction, is_own = job.place, not job.only or job.place.name.startswith("validation")
        validated = run_of_validation(prediction) if is_own else None
        found = list[Seen]()
        behind = [(validated, "")] if validated else runs_behind(prediction)
        runs, gone = [run for run, why in behind if not why], [why for _, why in behind if why]
        unknown = [str(run) for run, why in behind if why]
        job.runs = () if validated or gone else runs
        for run in filter(holds_run, runs):  # others have no record
            try:
                record = read_record(run)
                job.records.append(record)
                job.cautions += cautions_of_validation(record) if validated else begun_unknown(record)
                own = record.weights
                job.cautions += filter(None, [own.not_the_best * bool(validated), own.describe_lost(), own.edited])
                if self.labels is not None:
                    job.cautions += other_values(run, labels_of_run(record.dataset), self.labels)
                    job.cautions += parts_of_joined(run, joined_in(record.dataset), self.labels)
                    job.cautions += _cautions_on_sides(record, None if validated else prediction)
                found.append(self.find_seen(job, record))
            except (DataError, ValueError, OSError) as error:  # of a damaged record: scores do not need it
                gone += [f"{error}: whether these cases were in its training data is not known."] * (not validated)
                unknown.append(str(run))
        job.cautions += gone
        if found:
            unlisted, _ = self.unlisted(prediction)
            job.known = Seen.by_any(found, unknown, predicted_otherwise(prediction), unlisted)
            job.seen = NONE_SEEN if validated else job.known
        has_phantoms = any(one.has_phantoms for one in job.records)
        generated = is_generated(self.options.truth) or validated is not None and has_phantoms
        return above_scores(generated, has_phantoms)

    def _cautions(self, job: ScoringJob, scored: Sequence[str]) -> list[str]:
        """Returns what a report on the same scores says; ``scored``: the names of the cases that have some."""
        prediction, lines = job.place, list[str]()
        if not run_of_validation(prediction):
            place, inputs = self.images(self.options.truth), inputs_of(prediction)
            for record in job.records:
                with suppress(ValueError):  # of a damaged record
                    lines += other_images(record, place, inputs, scored)
        lines += [*job.cautions, *job.seen.of(scored).sentences]
        others = predicted_otherwise(prediction)
        if job.only in others:
            lines.append(f"warning: {job.name} was predicted with other settings than those of {prediction}/{RECORD}")
        elif others and not job.only:
            lines.append(mixed_line(prediction, others))
        names, unlisted = self.unlisted(prediction)
        lines += [unlisted] * (not job.only or job.only in names)
        return list(dict.fromkeys([*lines, self.replaced(Path(job.name) if job.only else validation_in(prediction))]))

    def _next_lines(self, runs: Sequence[Path]) -> list[str]:
        """Returns the command that shows the scored cases, if a single run folder predicted them."""
        options, (prediction,) = self.options, self.options.prediction
        prediction = prediction.parent if prediction.is_file() else prediction
        if not (options.truth.is_dir() and len(runs) == 1 and holds_run(runs[0])):
            return []
        shown = [from_here(str(runs[0])), "--truth", options.truth, "--prediction", prediction]
        line = next_command("report", *shown, *["--common"] * bool(options.common or options.test_of))
        own = "" if self.labels is None or images_beside(options.truth) else ELSEWHERE
        return [f"next: {line}  (scores and cases on one page{own})"]


def other_values(run: Path, written: Labels, scored: Labels) -> list[str]:
    """Returns a caution if a run writes some classes as other values than those that are scored under their names."""
    others = [
        f"{name} as {' and '.join(map(str, values))}, which is scored as {' and '.join(map(str, scored.classes[name]))}"
        for name, values in written.classes.items()
        if name in scored.classes and {*scored.classes[name]} != {*values}
    ]
    return [f"Caution: {run} writes {'; '.join(others)}. The scores compare other classes."] * bool(others)


def _about_folds(runs: Sequence[Path]) -> list[str]:
    """Returns a caution if the five runs of one folder are among some, and are not of one split."""
    own = {Path(os.path.realpath(run.parent if run.name == "validation" else run)) for run in runs}
    for folder in {run.parent for run in own}:
        folds, contents = [*map(Path, runs_of(folder))], list[Mapping[str, Any]]()
        if holds_folds(folder) and own.issuperset(folds):
            for run in folds:
                with suppress(DataError, ValueError):
                    contents.append(read_config(run))
            told = not_one_split(contents)
            return [f"Caution: {told}: together these folds are no cross-validation."] * bool(told)
    return []


def _cautions_on_sides(record: RunRecord, prediction: Path | None) -> list[str]:
    """Returns cautions if a run's training, or its way of predicting, exchanged left and right.

    - ``prediction``: None for the run's own validation
    """
    from seqpar.report.run_page import made_by  # few evaluations make a page

    ways = None if prediction is None else [made.get("settings", {}) for made in made_by(prediction)]
    training = sides_of_each({str(record.path): record}, with_copies=False)
    return [f"Caution: {told}" for told in (*training, *copies_of_run(record, ways))]


def parts_of_joined(run: Path, joined: Mapping[int, int], scored: Labels) -> list[str]:
    """Returns a caution if classes are scored that are parts of what a run learned as one.

    - ``joined``: as ``joined_in`` returns it
    """
    groups = [{first, *(value for value, other in joined.items() if other == first)} for first in {*joined.values()}]
    parts = [
        name for name, values in scored.classes.items()
        if any(group & {*values} and group - {*values} for group in groups)
    ]  # fmt: skip
    told = (
        f"Caution: {run} learned joined labels (--join-labels): it cannot tell {' and '.join(parts)} from the rest of"
    )
    return [f"{told} what it joined, and their scores compare a part with the whole."] * bool(parts)


def seen_by_runs(
    record: RunRecord, prediction: Path | None, find: Callable[[RunRecord], Seen], unlisted: Sequence[str] = ()
) -> Seen:
    """Returns which cases the runs behind a prediction have seen; if it does not name them, which ``record`` has.
    Of other runs that are gone nothing is known, which ``unknown_runs`` says.

    - ``find``: returns which a run has seen; ``unlisted``: the cases that the prediction's record does not name
    """
    from seqpar.report.run_page import is_made_by, made_by  # few evaluations make a page

    if prediction is None or not (made := made_by(prediction)):
        return find(record)
    found, gone = list[Seen](), list[str]()
    for own, (run, why) in zip(made, runs_behind(prediction)):
        try:
            is_here = is_made_by(own, record.path) and not (why and run.resolve() == record.path.resolve())
            if is_here or not why:
                found.append(find(record if is_here else read_record(run)))
        except (DataError, ValueError, OSError) as error:  # its folder may be damaged: scores do not need it
            why, is_here = str(error), False
        gone += [str(run)] * bool(why and not is_here)
    return Seen.by_any(found, gone, predicted_otherwise(prediction), unlisted) if found else NONE_SEEN


def unknown_runs(record: RunRecord, prediction: Path | None) -> list[str]:
    """Returns a sentence on each run behind a prediction, but a moved ``record``, if nothing tells what it has seen."""
    from seqpar.report.run_page import is_made_by, made_by  # few evaluations make a page

    sentences, own = list[str](), record.path.resolve()
    for by, (run, why) in zip(made_by(prediction) or [{}], runs_behind(prediction)) if prediction else ():
        if why:
            sentences += [why] * (not by or run.resolve() == own or not is_made_by(by, own))
            continue
        try:
            _ = read_record(run).network_settings
        except (DataError, ValueError, OSError) as error:
            sentences.append(f"{error}: whether these cases were in its training data is not known.")
    return sentences


def lead_with_new(told: str, tables: Mapping[str, str], every: str, count: int) -> str:
    """Returns the scores of the first of ``tables``, one for each group of cases, and below it those of all cases.

    - ``told``: which these are; ``every``: the table of all ``count`` cases
    """
    first = [told] * bool(told) + [*tables.values()][:1]
    return "\n".join([*first, *[f"\nall {count} cases together, new or not:", every] * (len(tables) > 1)])


def seen_table(groups: Mapping[str, Mapping[str, Score]]) -> Table | None:
    """Returns the scores of new cases next to those of the others; None of a single group.

    - ``groups``: what is known of cases, and each kind of score over them
    """
    if len(groups) < 2:
        return None
    first = next(iter(groups))
    heads = [TableHead(text) for text in ("Score", *(f"{which[0].upper()}{which[1:]}" for which in groups))]
    rows = [TableRow(kind, [own[kind] for own in groups.values()]) for kind in groups[first]]
    note = f"In brackets: 95 % confidence intervals. The charts and the other tables are of the cases {first}."
    return Table("seen-in-training", heads, rows, "class", note)


def labels_to_score(options: argparse.Namespace, dataset: Dataset | None) -> Labels:
    """Returns the classes that evaluate scores: as its command line asks, or the truth's; of runs that joined some of
    these, what they learned.

    - ``dataset``: that the truth is, if it is one
    """
    for note in dataset.notes if dataset is not None and not dataset.modalities else ():  # of label maps alone
        print(note, flush=True)
    asked = options.dataset, options.regions or (), options.brats
    labels = choose_labels(options.truth, dataset, *asked, partial(_labels_behind, options.prediction))
    joined = None if any(asked) else _joined_behind(options.prediction, labels)
    return with_declared_by(options.truth, dataset, joined) if joined else labels


def _joined_behind(predictions: Sequence[Path], truth: Labels) -> Labels | None:
    """Returns the classes of the runs behind predictions that joined labels of the truth, and prints whose; None if
    none did, if some joined others, or if the truth's labels mean something else.
    """
    found = list[RunRecord]()
    for path in predictions:
        with suppress(DataError, ValueError, OSError):  # of a damaged run: scores do not need it
            found += [record for record in _records_of(path) if record.labels and joined_in(record.dataset)]
    if not found or found[0].labels is None or any(one.labels != found[0].labels for one in found):
        return None
    labels, parts = found[0].labels, joined_in(found[0].dataset)
    others = {name: values for name, values in labels.classes.items() if not parts.keys() & {*values}}
    is_same = all({*truth.classes.get(name, ())} == {*values} for name, values in others.items())
    if labels == truth or not is_same or not {*parts, *parts.values()} <= truth.declared:
        return None
    each = (f"{name} {'+'.join(map(str, own))}" for name, own in labels.classes.items() if parts.keys() & {*own})
    why = f"which learned joined labels ({', '.join(each)}); --dataset scores those of a dataset.json"
    print(f"classes as in {found[0].path}, {why}", flush=True)
    return labels


def _labels_behind(predictions: Sequence[Path]) -> Labels | None:
    """Returns the classes of the runs behind predictions, and prints whose; None if they do not tell, or differ."""
    each = [_records_of(path) for path in predictions]
    found = [record.labels for records in each for record in records]
    if not all(each) or None in found or any(one != found[0] for one in found):
        return None
    print(f"classes as in {each[0][0].path}, as no dataset.json declares those of the truth", flush=True)
    return found[0]


def _records_of(prediction: Path) -> list[RunRecord]:
    """Returns what is known of the runs behind a prediction."""
    folder = prediction if prediction.is_dir() else prediction.parent
    return [read_record(folder)] if holds_run(folder) else records_behind(folder)
