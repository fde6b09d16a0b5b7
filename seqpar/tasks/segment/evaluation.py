"""Scores label maps, and says which of several predictions is best."""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.runs.run_folder import read_description
from seqpar.scores.comparison import FEW, TOO_FEW, Scored, compare
from seqpar.scores.label_classes import choose_labels, labels_of_run
from seqpar.scores.label_files import (
    Pair,
    dataset_at,
    folders_of_truth,
    map_pairs,
    match_cases,
    score_pairs,
    validation_of,
)
from seqpar.scores.label_scores import DEFAULT_SETTINGS, WORDS, Scores, format_table, summarise
from seqpar.scores.postprocessing import POSTPROCESSING, learn_postprocessing, mean_of
from seqpar.scores.summary_files import csv_text, output_files, refuse_foreign, summary_content, write_output
from seqpar.tasks.case_evaluation import CaseEvaluation, ScoredPrediction, ScoringJob, refuse_duplicates
from seqpar.tasks.segment.label_map_folder import SavedProbabilities
from seqpar.terminal import next_command
from seqpar.text import quantity

Members = tuple[Path, ...]  # one prediction, or two that are averaged
Cases = dict[str, tuple[Pair, Scores]]


class LabelMapEvaluation(CaseEvaluation):
    """Scores folders of label maps, single label maps, and runs, which stand for their last validation."""

    words = WORDS

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.dataset, self.pairs = dataset_at(options.truth), dict[str, list[Pair]]()
        if options.test_of and not (options.regions or options.brats or options.dataset):
            self.labels = labels_of_run(read_description(options.test_of))
        else:
            regions = options.regions or ()
            self.labels = choose_labels(options.truth, self.dataset, options.dataset, regions, options.brats)

    def open(self) -> list[ScoringJob]:
        options, jobs = self.options, list[ScoringJob]()
        data = folders_of_truth(options.truth, self.dataset)
        validations = [(path, validation_of(path)) for path in options.prediction]
        refuse_duplicates((path, validation or path) for path, validation in validations)
        for path, validation in validations:
            pairs, missing, faults = match_cases(
                options.truth, validation or path, self.dataset, self.only, options.common
            )
            files = output_files(path if validation is None else None, options.json, options.csv)
            refuse_foreign(files, data)
            if options.find_best is not None:
                for other in {*options.groups.values()}:
                    own = options.groups[path]
                    refuse_foreign({"find-best": self._place(*dict.fromkeys((own, other)))}, data)
            for folder in (file.parent for file in files.values()):
                if folder.exists() and not os.access(folder, os.W_OK):
                    raise DataError(folder, "cannot be written to: choose other places by --json and --csv")
            says_missing = not (validation or options.common)
            jobs.append(ScoringJob(str(path), pairs, files, faults, missing if says_missing else []))
            self.pairs[str(path)] = pairs
        return jobs

    def score(self, job: ScoringJob) -> ScoredPrediction | None:
        """Prints a line per case as soon as it has scores."""
        settings, cases = self._settings, list[tuple[Pair, Scores]]()
        for pair, result in self._scores_of(job.cases):
            if isinstance(result, DataError):
                job.faults.append(result)
                continue
            cases.append((pair, result))
            dices = ", ".join(f"{name} {row['Dice']:.4f}" for name, row in result.items())
            print(f"{pair.case}: Dice {dices}", flush=True)
        if not cases:
            return None
        summary = summarise([scores for _, scores in cases])
        content = summary_content(cases, self.labels, summary)
        content |= {"settings": settings, "faults": list(map(str, job.faults)), "missing": list(job.missing)}
        mean = summary["foreground_mean"]
        return ScoredPrediction(
            job.name,
            {pair.case: scores for pair, scores in cases},
            f"\n{format_table(summary, self.labels.classes)}",
            f"{quantity(len(cases), 'case')}, {quantity(len(self.labels.classes), 'class')}: "
            f"mean Dice {mean['Dice']:.4f}, "
            f"HD95 {mean['HD95']:.2f} mm, NSD {mean['NSD']:.4f} at {settings['nsd_tolerance']:g} mm",
            {"json": json.dumps(content, indent=2) + "\n", "csv": csv_text(cases, self.labels)},
        )

    def compare(self, scored: Sequence[ScoredPrediction]) -> str:
        return compare([Scored(one.name, one.cases) for one in scored])

    def find_best(self, scored: Sequence[ScoredPrediction]) -> str:
        groups = defaultdict[Path, Cases](dict)
        for one in scored:
            pairs = {pair.case: pair for pair in self.pairs[one.name]}
            own = {case: (pairs[case], scores) for case, scores in one.cases.items()}
            groups[self.options.groups[Path(one.name)]] |= own
        common = sorted(set.intersection(*map(set, groups.values())))
        if not common:
            raise ValueError(
                "--find-best: no case is in all predictions, so that none is best: give predictions of one"
            )
        with TemporaryDirectory(prefix="seqpar-") as folder:
            tried: dict[Members, Cases] = {(path,): {case: cases[case] for case in common}
                                           for path, cases in groups.items()}  # fmt: skip
            lines = self._add_means(tried, Path(folder)) if len(groups) > 1 else []
            return "\n".join([*lines, *self._say_best(tried, len(common))])

    def _add_means(self, tried: dict[Members, Cases], folder: Path) -> list[str]:
        """Adds the mean of each two predictions whose probabilities are there; returns a line on the others."""
        saved = dict[Path, dict[str, SavedProbabilities]]()
        for (path,), cases in tried.items():
            found = {case: SavedProbabilities.of(pair.prediction) for case, (pair, _) in cases.items()}
            if None not in found.values():
                saved[path] = {case: one for case, one in found.items() if one}
        lacking = [path for (path,) in tried if path not in saved]
        for number, (first, second) in enumerate(combinations(saved, 2)):
            place = folder / str(number)
            place.mkdir()
            pairs = [pair._replace(prediction=place / pair.prediction.name) for pair, _ in tried[first,].values()]
            files = {pair.case: (saved[first][pair.case], saved[second][pair.case]) for pair in pairs}
            for _, fault in map_pairs(partial(_write_mean, files=files), pairs, self._workers(pairs)):
                if isinstance(fault, DataError):
                    raise fault
            tried[first, second] = {pair.case: (pair, _known(scores)) for pair, scores in self._scores_of(pairs)}
        if not lacking:
            return []
        return [f"no averages with {', '.join(map(str, lacking))}: they need the probabilities that --npz writes"]

    def _say_best(self, tried: Mapping[Members, Cases], count: int) -> list[str]:
        """Returns lines on which is best, and learns and writes its postprocessing; ``count``: of the cases."""
        dice = {
            members: float(summarise([scores for _, scores in cases.values()])["foreground_mean"]["Dice"])
            for members, cases in tried.items()
        }
        best = max(dice, key=lambda members: np.nan_to_num(dice[members], nan=-1.0))
        few = f" ({TOO_FEW})" if count < FEW and len(dice) > 1 else ""
        lines = [f"highest mean Dice of {len(dice)} over {quantity(count, 'case')}{few}: {_named(best)}"]
        lines += [f"  {value:.4f}  {_named(members)}" for members, value in dice.items()]
        pairs = [pair for pair, _ in tried[best].values()]
        learned, place = learn_postprocessing(pairs, self.labels, self._workers(pairs)), self._place(*best)
        write_output(place, json.dumps(learned.content(self.labels.classes), indent=2) + "\n")
        names = {values: name for name, values in self.labels.classes.items()}
        kept = [names.get(values, "all labels together") for values in learned.steps]
        if kept:
            raised = f"{mean_of(learned.before):.4f} to {mean_of(learned.after):.4f}"
            lines.append(f"keeping the largest component of {', then of '.join(kept)} raises it from {raised}: {place}")
        else:
            lines.append(f"keeping largest components raises it for no class: {place}")
        more = ["--postprocessing", place] if kept else []
        if all(any(any(path.glob(name)) for name in ("config.json", "folds.json", "fold_*")) for path in best):
            lines.append(f"next: {next_command('predict', *best, '-i', 'IMAGES', '-o', 'PREDICTIONS', *more)}")
        elif kept or len(best) > 1:
            together = ", by one command that names both runs" if len(best) > 1 else ""
            with_it = f", with --postprocessing {place}" if kept else ""
            lines.append(f"next: predict as for {' and '.join(map(str, best))}{together}{with_it}")
        return lines

    def _scores_of(self, pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Scores | DataError]]:
        return score_pairs(pairs, self.labels, self._settings, self._workers(pairs))

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in DEFAULT_SETTINGS}

    def _workers(self, pairs: Sequence[Pair]) -> int:
        return min(self.options.workers, max(len(pairs), 1))

    def _place(self, *predictions: Path) -> Path:
        """Returns where the postprocessing of a prediction, or of the mean of two, is written."""
        if self.options.find_best != Path():
            return Path(self.options.find_best)
        first = predictions[0]
        if len(predictions) > 1:
            name = "___".join(("ensemble", *(path.name for path in predictions)))
            return first.parent / "ensembles" / name / POSTPROCESSING
        return (first if first.is_dir() else first.parent) / POSTPROCESSING


def _named(members: Members) -> str:
    return f"the mean of {members[0]} and {members[1]}" if len(members) > 1 else str(members[0])


def _write_mean(pair: Pair, files: Mapping[str, tuple[SavedProbabilities, SavedProbabilities]]) -> None:
    first, second = files[pair.case]
    first.write_mean(second, pair.prediction)


def _known(scores: Scores | DataError) -> Scores:
    """Returns scores; raises what kept a case from having some."""
    if isinstance(scores, DataError):
        raise scores
    return scores
