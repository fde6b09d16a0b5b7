"""What the evaluations of tasks share: predictions are scored one after the other, and several are compared."""

import argparse
import filecmp
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from seqpar.cluster.exit_codes import DATA
from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.phantom.phantom_files import is_generated
from seqpar.prediction.prediction_folder import RECORD, mixed_line, predicted_otherwise
from seqpar.report.record import RunRecord, above_scores, chosen_on_them, read_record
from seqpar.report.tables import Score, Table, TableHead, TableRow
from seqpar.runs.run_folder import holds_run, tested_cases
from seqpar.scores.label_files import MAX_NAMED, missing_line
from seqpar.scores.summary_files import write_output, writing_alone
from seqpar.terminal import next_command
from seqpar.text import quantity


@dataclass
class ScoringJob:
    """One prediction to score.

    - ``name``: as the command line names it
    - ``cases``: what a task scores of it
    - ``files``: to write, by kind: "json", "csv" and "calibration", a picture
    - ``faults``: what is wrong with other cases
    - ``missing``: cases of the truth without a prediction
    - ``note``: a line on files that are not written
    """

    name: str
    cases: Any
    files: Mapping[str, Path]
    faults: list[DataError] = field(default_factory=list)
    missing: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class ScoredPrediction:
    """The scores of a prediction.

    - ``cases``: what the comparison needs of each
    - ``text``: what is printed
    - ``line``: one line that sums up
    - ``contents``: of the files, by kind, or what writes it
    """

    name: str
    cases: Any
    text: str
    line: str
    contents: Mapping[str, str | Callable[[Path], object]]


class CaseEvaluation(ABC):
    """Scores predictions, prints and writes the scores and, of several predictions, says which is best.

    - ``options``: the command line of evaluate
    - ``only``: the cases to score; None for all
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.only = tested_cases(options.test_of) if options.test_of else None

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
    def seen_in_training(self, job: ScoringJob, record: RunRecord) -> list[str]:
        """Returns a line if a run was trained on scored cases."""

    @abstractmethod
    def compare(self, scored: Sequence[ScoredPrediction]) -> str:
        """Returns which of several predictions is best, on the cases that all of them have."""

    def find_best(self, scored: Sequence[ScoredPrediction]) -> str:
        """Returns which prediction is best, folds taken together, and what postprocessing raises its score."""
        raise ValueError("--find-best is for label maps: remove it")

    def run(self) -> int:
        """Returns the exit code: 0, or that of data if something is wrong with a case."""
        jobs, scored, told = self.open(), list[ScoredPrediction](), set[str]()
        for job in jobs:
            if len(jobs) > 1:
                print(f"\n{job.name}:", flush=True)
            on_phantoms, *cautions = self._cautions(job)
            if on_phantoms:
                print(on_phantoms, flush=True)  # above the first score
            line = "no case could be scored"
            if result := self.score(job):
                words = [line for line in self.words(result.text) if line not in told]
                told.update(words)
                print("\n".join([result.text, *words]), end="\n\n", flush=True)
                scored.append(result)
                line = result.line
                written = {path: result.contents[kind] for kind, path in job.files.items() if kind in result.contents}
                with writing_alone(written):
                    for path, content in written.items():
                        try:
                            write_output(path, content)
                            line += f"; {path}"
                        except DataError as error:
                            job.faults.append(error)
            for text in filter(None, [job.note, missing_line(job.missing), *cautions]):
                print(text, flush=True)
            for fault in job.faults:
                print(f"error: {fault}", file=sys.stderr, flush=True)
            print(line + (f"; faults {len(job.faults)}" if job.faults else ""), flush=True)
        if len(scored) > 1:
            print(f"\n{self.compare(scored)}", flush=True)
        if self.options.find_best is not None and scored:
            print(f"\n{self.find_best(scored)}", flush=True)
        if len(jobs) == len(scored) == 1:
            for text in self._next_lines():
                print(text, flush=True)
        return DATA if any(job.faults for job in jobs) else 0

    def _cautions(self, job: ScoringJob) -> list[str]:
        """Returns what a report on the same scores says: of phantoms, or "", and of cases that the runs have seen."""
        prediction = Path(job.name)
        is_run = holds_run(prediction)
        records, lines = list[RunRecord](), list[str]()
        for run in filter(holds_run, [prediction] if is_run else _runs_behind(prediction)):  # others have no record
            with suppress(DataError, ValueError, OSError):  # data may have moved since: scores do not need them
                record = read_record(run)
                records.append(record)
                lines += chosen_on_them(record) if is_run else self.seen_in_training(job, record)
        if others := predicted_otherwise(prediction):
            lines.append(mixed_line(prediction, others))
        generated = is_generated(self.options.truth) or is_run and any(record.has_phantoms for record in records)
        on_phantoms = above_scores(generated, any(record.has_phantoms for record in records))
        return [on_phantoms, *dict.fromkeys(lines)]

    def _next_lines(self) -> list[str]:
        """Returns the command that shows the scored cases, if a single run folder predicted them."""
        options, (prediction,) = self.options, self.options.prediction
        runs = _runs_behind(prediction)
        if not (options.truth.is_dir() and len(runs) == 1 and holds_run(runs[0])):
            return []
        run = runs[0]
        run = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
        more = ["--common"] if options.common or options.test_of else []
        line = next_command("report", run, "--truth", options.truth, "--prediction", prediction, *more)
        return [f"next: {line}  (scores and cases on one page)"]


SEEN, NAMESAKE = "seen in training", "with the name of a training case"


class Seen(NamedTuple):
    """Which of ``total`` scored cases a run was trained on.

    - ``same``: those with the same file; ``namesakes``: those that may be other cases of the same name
    - ``chose``: those that were held out, and on which the best weights were chosen
    """

    same: Sequence[str]
    namesakes: Sequence[str]
    total: int
    chose: Sequence[str] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self.same, *self.namesakes))

    @property
    def words(self) -> str:
        """What is known of the cases that are not new."""
        return " or ".join([SEEN] * bool(self.same) + [NAMESAKE] * bool(self.namesakes))

    def mark(self, case: str) -> str:
        """Returns what is known of a case before what else is said of it; "" of a new one."""
        if case in self.namesakes:
            return "Has the name of a training case. "
        return f"{SEEN.capitalize()}. " * (case in self.same)

    def apart(self, cases: Iterable[str]) -> tuple[list[str], str]:
        """Returns which cases are new, and a sentence on which the scores are of; "" if all are new."""
        new, seen, alike = [case for case in cases if case not in self.names], len(self.same), len(self.namesakes)
        if not (seen or alike):
            return new, ""
        if not new:
            none_new = f"No score of new cases: all {seen} were {SEEN}, and the numbers below are of these."
            which = f"All {seen + alike} cases {f'were {SEEN} or ' * bool(seen)}have the names of training cases"
            return new, f"{which}: if these are the same, no number below is of a new case." if alike else none_new
        was = "was seen" if seen == 1 else "were seen"
        has = "has the name of a training case" if alike == 1 else "have the names of training cases"
        has += " and may have been seen"
        others = "The other one" if seen + alike == 1 else f"The other {seen + alike}"
        told = f"Of the other {seen + alike}, {seen} {was}, and {alike} {has}"
        if not (seen and alike):
            told = f"{others} {was if seen else has}"
        chose = f", of which {len(self.chose)} helped to choose the run's weights" * bool(self.chose)
        return new, f"The scores are of the {quantity(len(new), 'case')} not {SEEN}{chose}. {told}."

    @property
    def sentences(self) -> list[str]:
        """One for each kind, if there are any."""
        sentences, little = list[str](), "say little about new cases"
        for found, one, many, told in (
            (self.same, "was in the run's training data", "were in the run's training data", little),
            (self.namesakes, "has the name of a training case", "have the names of training cases", little),
            (self.chose, *["helped to choose the run's weights"] * 2, "tend to be too good"),
        ):
            if found:
                shown = ", ".join(found[:MAX_NAMED]) + ", …" * (len(found) > MAX_NAMED)
                what, whose = (one, "its scores") if len(found) == 1 else (many, "their scores")
                if_so = f"if {'it is' if len(found) == 1 else 'they are'} the same, " * (found is self.namesakes)
                of = f"{len(found)} of {quantity(self.total, 'scored case')} {what} ({shown})"
                sentences.append(f"{of}: {if_so}{whose} {told}.")
        return sentences


NONE_SEEN = Seen((), (), 0)


def find_seen(
    record: RunRecord, scored: Mapping[str, Path | None], read_files: Callable[[], Mapping[str, Path]]
) -> Seen:
    """Returns which scored cases are among those that the run was trained on, or chose its weights by.

    - ``scored``: a file of each case by name, None if it is not known
    - ``read_files``: returns the same file of each case of the run's data set; cases of another data set may have the
      names of these
    """
    train, held_out = (set(map(str, record.dataset.get(part, ()))) for part in ("train", "held_out"))
    names = [name for name in scored if name in train | held_out]
    try:
        files = read_files() if names else {}
    except (DataError, ValueError, OSError):
        files = {}
    both = {name: (scored[name], files.get(name)) for name in names}
    unknown = [name for name, pair in both.items() if not all(path and path.is_file() for path in pair)]
    same = [n for n, (a, b) in both.items() if n not in unknown and a and b and filecmp.cmp(a, b, shallow=False)]
    chose = [name for name in same if name not in train] if len(record.held_out) > 1 else []
    seen, namesakes = ([name for name in names if name in train] for names in (same, unknown))
    return Seen(seen, namesakes, len(scored), chose)


def seen_table(seen: Seen, rows: Mapping[str, Sequence[Score]]) -> Table:
    """Returns the scores of new cases next to those of the others; ``rows``: both of each kind of score."""
    heads = [TableHead(text) for text in ("Score", f"Not {SEEN}", seen.words.capitalize())]
    note = f"Cases {seen.words} say little about new ones: the charts and the other tables are of the others."
    return Table("seen-in-training", heads, [TableRow(kind, pair) for kind, pair in rows.items()], "class", note)


def _runs_behind(prediction: Path) -> list[Path]:
    """Returns the runs that predicted a folder, none if it does not say."""
    try:
        content = read_json(prediction / RECORD)
        return [Path(made["run"]) for made in content.get("runs", [content])]
    except (DataError, ValueError, KeyError, TypeError, AttributeError):
        return []


def refuse_duplicates(places: Iterable[tuple[Path, Path]]) -> None:
    """Raises ``ValueError`` if two predictions have the same place; ``places``: with what the command line names."""
    seen = set[Path]()
    for named, place in places:
        if place.resolve() in seen:
            raise ValueError(f"{named} is named twice, and nothing is better than itself: name it once")
        seen.add(place.resolve())
