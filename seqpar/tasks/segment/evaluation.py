"""Scores label maps, and says which of several predictions is best."""

import argparse
import json
import os
from collections.abc import Sequence

from seqpar.data.errors import DataError
from seqpar.runs.run_folder import read_config
from seqpar.scores.comparison import Scored, compare
from seqpar.scores.label_classes import choose_labels, labels_of_run
from seqpar.scores.label_files import Pair, dataset_at, folders_of_truth, match_cases, score_pairs, validation_of
from seqpar.scores.label_scores import WORDS, Scores, format_table, summarise
from seqpar.scores.summary_files import csv_text, output_files, summary_content
from seqpar.tasks.case_evaluation import CaseEvaluation, ScoredPrediction, ScoringJob, refuse_duplicates


class LabelMapEvaluation(CaseEvaluation):
    """Scores folders of label maps, single label maps, and runs, which stand for their last validation."""

    words = WORDS

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.dataset = dataset_at(options.truth)
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
            pairs, missing, faults = match_cases(options.truth, validation or path, self.dataset, self.only)
            files = output_files(path if validation is None else None, options.json, options.csv, data)
            for folder in (file.parent for file in files.values()):
                if folder.exists() and not os.access(folder, os.W_OK):
                    raise DataError(folder, "cannot be written to: choose other places by --json and --csv")
            jobs.append(ScoringJob(str(path), pairs, files, faults, [] if validation else missing))
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
            f"cases {len(cases)}, classes {len(self.labels.classes)}: mean Dice {mean['Dice']:.4f}, "
            f"HD95 {mean['HD95']:.2f} mm, NSD {mean['NSD']:.4f} at {settings['nsd_tolerance']:g} mm",
            {"json": json.dumps(content, indent=2) + "\n", "csv": csv_text(cases, self.labels)},
        )

    def compare(self, scored: Sequence[ScoredPrediction]) -> str:
        return compare([Scored(one.name, one.cases) for one in scored])
