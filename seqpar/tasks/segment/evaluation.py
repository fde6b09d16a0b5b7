"""Scores label maps, and says which of several predictions is best."""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seqpar.data.errors import DataError
from seqpar.runs.run_folder import read_config
from seqpar.scores.comparison import Scored, compare
from seqpar.scores.label_classes import choose_labels, labels_of_run
from seqpar.scores.label_files import Pair, dataset_at, folders_of_truth, match_cases, score_pairs, validation_of
from seqpar.scores.label_scores import WORDS, Scores, format_table, summarise
from seqpar.scores.postprocessing import POSTPROCESSING, learn_postprocessing, mean_of
from seqpar.scores.summary_files import csv_text, output_files, refuse_foreign, summary_content, write_output
from seqpar.tasks.case_evaluation import CaseEvaluation, ScoredPrediction, ScoringJob, refuse_duplicates
from seqpar.terminal import next_command
from seqpar.text import quantity


class LabelMapEvaluation(CaseEvaluation):
    """Scores folders of label maps, single label maps, and runs, which stand for their last validation."""

    words = WORDS

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.dataset, self.pairs = dataset_at(options.truth), dict[str, list[Pair]]()
        if options.test_of and not (options.regions or options.brats or options.dataset):
            self.labels = labels_of_run(read_config(options.test_of)["dataset"])
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
                refuse_foreign({"find-best": self._place(options.groups[path])}, data)
            for folder in (file.parent for file in files.values()):
                if folder.exists() and not os.access(folder, os.W_OK):
                    raise DataError(folder, "cannot be written to: choose other places by --json and --csv")
            says_missing = not (validation or options.common)
            jobs.append(ScoringJob(str(path), pairs, files, faults, missing if says_missing else []))
            self.pairs[str(path)] = pairs
        return jobs

    def score(self, job: ScoringJob) -> ScoredPrediction | None:
        """Prints a line per case as soon as it has scores."""
        settings = {name: getattr(self.options, name) for name in ("nsd_tolerance", "lesion_wise", "empty")}
        cases: list[tuple[Pair, Scores]] = []
        workers = min(self.options.workers, max(len(job.cases), 1))
        for pair, result in score_pairs(job.cases, self.labels, settings, workers):
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
        groups = defaultdict[Path, dict[str, tuple[Pair, Scores]]](dict)
        for one in scored:
            pairs = {pair.case: pair for pair in self.pairs[one.name]}
            own = {case: (pairs[case], scores) for case, scores in one.cases.items()}
            groups[self.options.groups[Path(one.name)]] |= own
        common = sorted(set.intersection(*map(set, groups.values())))
        if not common:
            raise ValueError(
                "--find-best: no case is in all predictions, so that none is best: give predictions of one"
            )
        dice = {
            path: float(summarise([cases[case][1] for case in common])["foreground_mean"]["Dice"])
            for path, cases in groups.items()
        }
        best = max(dice, key=lambda path: np.nan_to_num(dice[path], nan=-1.0))
        lines = [f"best of {len(dice)} by mean Dice over {quantity(len(common), 'case')}: {best}"]
        lines += [f"  {value:.4f}  {path}" for path, value in dice.items()]
        learned = learn_postprocessing(
            [groups[best][case][0] for case in common], self.labels, min(self.options.workers, len(common))
        )
        place = self._place(best)
        write_output(place, json.dumps(learned.content(self.labels.classes), indent=2) + "\n")
        names = {values: name for name, values in self.labels.classes.items()}
        kept = [names.get(values, "all labels together") for values in learned.steps]
        if kept:
            raised = f"{mean_of(learned.before):.4f} to {mean_of(learned.after):.4f}"
            lines.append(f"keeping the largest component of {', then of '.join(kept)} raises it from {raised}: {place}")
        else:
            lines.append(f"keeping largest components raises it for no class: {place}")
        more = ["--postprocessing", place] if kept else []
        is_run = any((best / name).exists() for name in ("config.json", "folds.json", "plans.json"))
        if is_run:
            lines.append(f"next: {next_command('predict', best, '-i', 'IMAGES', '-o', 'PREDICTIONS', *more)}")
        elif kept:
            lines.append(f"next: predict as for {best}, with --postprocessing {place}")
        return "\n".join(lines)

    def _place(self, prediction: Path) -> Path:
        """Returns where the postprocessing of a prediction is written."""
        if self.options.find_best != Path():
            return Path(self.options.find_best)
        return (prediction if prediction.is_dir() else prediction.parent) / POSTPROCESSING
