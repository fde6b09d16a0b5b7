"""Scores label maps, and says which of several predictions is best."""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import strip_suffix
from seqpar.data.geometry import to_canonical
from seqpar.data.phantom.phantom_files import is_generated
from seqpar.data.preparation.prepared_case import CLOSE
from seqpar.report.cautions import records_behind
from seqpar.report.curves import Diagram, reliability_diagram
from seqpar.report.images import about_names, recorded_cases
from seqpar.report.planes import colours_of
from seqpar.report.plots import draw_figure, title_of
from seqpar.report.record import RunRecord
from seqpar.runs.run_folder import read_description
from seqpar.scores.class_scores import (
    Floats,
    calibration_content,
    count_tenths,
    error_of_tenths,
    filled_tenths,
    format_calibration,
)
from seqpar.scores.comparison import FEW, TOO_FEW, Scored, add_fold, compare, remarks_on
from seqpar.scores.label_classes import Labels, hidden_classes, labels_of_run
from seqpar.scores.label_files import (
    Pair,
    about_held_out,
    dataset_at,
    folders_of_truth,
    map_pairs,
    match_cases,
    read_reference,
    refuse_unknown,
    score_pairs,
    validation_of,
)
from seqpar.scores.label_scores import (
    DEFAULT_SETTINGS,
    Scores,
    format_dice,
    format_table,
    not_measured,
    summarise,
    words_of,
)
from seqpar.scores.postprocessing import POSTPROCESSING, learn_postprocessing, mean_of
from seqpar.scores.summary_files import (
    csv_text,
    output_files,
    refuse_duplicates,
    refuse_foreign,
    summary_content,
    without_larger,
    write_output,
)
from seqpar.tasks.case_evaluation import (
    CaseEvaluation,
    ScoredPrediction,
    ScoringJob,
    labels_to_score,
    lead_with_new,
)
from seqpar.tasks.seen_cases import Seen, find_seen
from seqpar.tasks.segment.label_map_folder import SavedProbabilities
from seqpar.tasks.segment.validation import dataset_of, label_files
from seqpar.terminal import next_command
from seqpar.text import quantity, rounded

Members = tuple[Path, ...]  # one prediction, or two that are averaged
Cases = dict[str, tuple[Pair, Scores]]


class LabelMapEvaluation(CaseEvaluation):
    """Scores folders of label maps, single label maps, and runs, which stand for their last validation."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.dataset, self.pairs = dataset_at(options.truth, options.dataset), dict[str, list[Pair]]()
        if options.test_of and not (options.regions or options.brats or options.dataset):
            self.labels: Labels = labels_of_run(read_description(options.test_of))
        else:
            self.labels = labels_to_score(options, self.dataset)

    def open(self) -> list[ScoringJob]:
        options, jobs = self.options, list[ScoringJob]()
        data = folders_of_truth(options.truth, self.dataset)
        validations = [(path, validation_of(path)) for path in options.prediction]
        refuse_duplicates((path, validation or path) for path, validation in validations)
        for path, validation in validations:
            folder = validation or path
            more = self.dataset, self.only, options.common, self.labels.classes.values()
            pairs, missing, faults = match_cases(options.truth, folder, *more)
            own = strip_suffix(path.name)  # whatever the truth is called
            if len(validations) == 1 and path.is_file() and own in (recorded_cases(path.parent) or ()):
                pairs = [pairs[0]._replace(case=own)]
            files = output_files(path if validation is None else None, options.json, options.csv)
            files, note = without_larger(files, path)
            refuse_foreign(files, data)
            if options.calibration:
                require_probabilities(pairs, "--calibration")
                if "json" in files:  # none next to a run's own scores
                    picture = files["json"].with_name(f"{files['json'].stem}-calibration.png")
                    refuse_foreign({"calibration": picture}, data)
                    files["calibration"] = picture
            if options.find_best is not None:
                for other in {*options.groups.values()}:
                    own = options.groups[path]
                    place = self._place(*dict.fromkeys((own, other)))
                    refuse_foreign({"find-best": place, **files}, data)
            for folder in (file.parent for file in files.values()):
                if folder.exists() and not os.access(folder, os.W_OK):
                    raise DataError(folder, "cannot be written to: choose other places by --json and --csv")
            says_missing = not (validation or options.common)
            note = " ".join(filter(None, [note, about_held_out(path), about_names(path, options.truth)]))
            jobs.append(ScoringJob(str(path), pairs, files, faults, missing if says_missing else [], note))
            self.pairs[str(path)] = pairs
        refuse_unknown(self.labels, chain.from_iterable(self.pairs.values()))
        return jobs

    def score(self, job: ScoringJob) -> ScoredPrediction | None:
        """Prints a line per case as soon as it has scores."""
        settings, cases = self._settings, list[tuple[Pair, Scores]]()
        for pair, result in self._scores_of(job.cases):
            if isinstance(result, DataError):
                job.faults.append(result)
                continue
            cases.append((pair, result))
            dices = ", ".join(f"{name} {format_dice(row, 4)}" for name, row in result.items())
            print(f"{pair.case}: Dice {dices}", flush=True)
        if not cases:
            return None
        summary = summarise([scores for _, scores in cases])
        content = summary_content(cases, self.labels, summary)
        content |= {"settings": settings, "faults": list(map(str, job.faults)), "missing": list(job.missing)}
        groups, told = job.seen.apart(pair.case for pair, _ in cases)
        each = {which: [one for one in cases if one[0].case in own] for which, own in groups.items()} if told else {}
        each = each or {"": cases}
        summaries = {which: summarise([scores for _, scores in own]) for which, own in each.items()}
        tables = {
            which: "\n".join([format_table(one, self.labels.classes), *remarks_on(one, each[which], settings)])
            for which, one in summaries.items()
        }
        text = f"\n{lead_with_new(told, tables, format_table(summary, self.labels.classes), len(cases))}"
        which, shown = next(iter(each.items()))
        mean, replaced = summaries[which]["foreground_mean"], not_measured(scores for _, scores in shown)
        if told:
            parts = {name: summary_content(own, self.labels, summaries[name]) for name, own in each.items()}
            kept = ("foreground_mean", "mean", "median", "num_values", "global")
            content["groups"] = {
                name: {"cases": groups[name], **{kind: part[kind] for kind in kept}} for name, part in parts.items()
            }
        contents: dict[str, str | Callable[[Path], object]] = {"csv": csv_text(cases, self.labels)}
        if self.options.calibration:
            from seqpar.report.run_page import made_by  # few evaluations make a page

            parts, counts, faults = dict[str, dict[str, Floats]](), dict[str, int](), list[DataError]()
            for name, own in each.items():
                pairs = [pair for pair, _ in own]
                parts[name], counts[name] = calibrate(pairs, self.labels, self._workers(job.cases), faults)
            job.faults += faults
            content["calibration"] = calibration_content(_added(parts.values()))
            for name, group in content.get("groups", {}).items():
                group["calibration"] = calibration_content(parts[name])
            tenths = parts[which]
            text += f"\n\n{format_calibration(tenths, self.labels.classes, which, share_of(job.cases))}"
            heats = {made.get("settings", {}).get("temperature", 1) for made in made_by(job.place)} - {1}
            text += "".join(f"\n(probabilities were computed at a temperature of {own:.3g})" for own in sorted(heats))
            if tenths:
                by = records_behind(job.place)  # its page has these colours
                colours = by[0].class_colours(self.labels.classes) if by else colours_of(self.labels.classes)
                diagram = calibration_diagram(tenths, counts[which], colours, which)
                title = title_of(job.name, is_generated(self.options.truth), diagram.quantity)
                about = about_calibration(job.cases)
                contents["calibration"] = lambda path: draw_figure(title, [diagram], about, [path])
        contents["json"] = json.dumps(content, indent=2) + "\n"
        return ScoredPrediction(
            job.name,
            [pair.case for pair, _ in cases],
            {pair.case: scores for pair, scores in cases},
            text,
            f"{quantity(len(shown), 'case')}{f' {which}' * bool(which)}, "
            f"{quantity(len(self.labels.classes), 'class')}: "
            f"mean Dice {rounded(mean['Dice'], 4)}, HD95 {rounded(mean['HD95'], 2)} mm{replaced}, "
            f"NSD {rounded(mean['NSD'], 4)} at {settings['nsd_tolerance']:g} mm",
            contents,
        )

    def words(self, text: str) -> list[str]:
        asked, pairs = self.options, chain.from_iterable(self.pairs.values())
        truth = next(((own.doubt.consensus, bool(own.doubt.readers)) for own in pairs if own.doubt), ("", False))
        return words_of(asked.lesion_wise, asked.centreline, "–" in text, *truth, self.labels.ignore is not None)

    def find_seen(self, job: ScoringJob, record: RunRecord) -> Seen:
        return trained_on(record, {pair.case: pair.truth for pair in job.cases}, job.place)

    def of(self, cases: dict[str, Scores], names: Sequence[str]) -> dict[str, Scores]:
        return {name: cases[name] for name in names}

    def compare(self, scored: Sequence[ScoredPrediction]) -> str:
        return compare([Scored(one.name, one.cases) for one in scored])

    def find_best(self, scored: Sequence[ScoredPrediction]) -> str:
        groups = defaultdict[Path, Cases](dict)
        for one in scored:
            pairs = {pair.case: pair for pair in self.pairs[one.name]}
            own = {case: (pairs[case], scores) for case, scores in one.cases.items()}
            add_fold(groups[self.options.groups[Path(one.name)]], own)
        common = sorted(set.intersection(*map(set, groups.values())))
        if not common:
            raise ValueError("--find-best: no case is in all predictions, so none is best: give predictions of one")
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
        among, few = (f" among {len(dice)},", f" ({TOO_FEW})" * (count < FEW)) if len(dice) > 1 else ("", "")
        lines = [f"highest mean Dice{among} over {quantity(count, 'case')}{few}: {_named(best)}"]
        lines += [f"  {rounded(value, 4)}  {_named(members)}" for members, value in dice.items()]
        pairs = [pair for pair, _ in tried[best].values()]
        learned, place = learn_postprocessing(pairs, self.labels, self._workers(pairs)), self._place(*best)
        write_output(place, json.dumps(learned.content(self.labels.classes), indent=2) + "\n")
        names = {values: name for name, values in self.labels.classes.items()}
        kept = [names.get(values, "all labels together") for values in learned.steps]
        if kept:
            was, now = (f"{mean_of(dices):.4f}" for dices in (learned.before, learned.after))
            raised = f"raises it from {was} to {now}" if was != now else f"raises it from {was} by less than 0.0001"
            kept_of = f"keeping the largest component of {', then of '.join(kept)}"
            lines.append(f"{kept_of} {raised}, with background in place of others: {place}")
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


def trained_on(record: RunRecord, truths: Mapping[str, Path | None], prediction: Path) -> Seen:
    """Returns the scored cases that a run was trained on; ``truths``: their label maps, by name."""
    own = {name: record.config[name] for name in ("data", "phantoms") if name in record.config}
    config = replace(record.network_settings, **own)
    return find_seen(record, truths, lambda: label_files(dataset_of(config)), prediction)


def require_probabilities(pairs: Sequence[Pair], flag: str) -> None:
    """Raises DataError for the first case without probabilities; ``flag``: what needs them."""
    for pair in pairs:
        if SavedProbabilities.of(pair.prediction) is None:
            raise DataError(
                pair.prediction, f"has no probabilities, which {flag} needs: predict with --npz, or remove {flag}"
            )


def calibrate(
    pairs: Sequence[Pair], labels: Labels, workers: int, faults: list[DataError]
) -> tuple[dict[str, Floats], int]:
    """Returns how probable each class was in the voxels of all cases, and how often it was there, by tenths ``t 3``.

    Where the truth has doubt, a voxel counts by its share of the class. Also returns of how many cases: in those
    without a labelled voxel nothing is known. One is in memory after the other. A class without an output is left out.

    - ``faults``: gets what is wrong with a case
    """
    every = list[dict[str, Floats]]()  # small
    for _, result in map_pairs(partial(calibrate_pair, labels=labels), pairs, workers):
        faults.append(result) if isinstance(result, DataError) else every.append(result)
    tenths = _added(every)
    num_cases = sum(any(tenths[:, 0].any() for tenths in own.values()) for own in every)
    return {name: tenths[name] for name in labels.classes if name in tenths}, num_cases


def _added(parts: Iterable[Mapping[str, Floats]]) -> dict[str, Floats]:
    tenths = dict[str, Floats]()
    for name, own in chain.from_iterable(part.items() for part in parts):
        tenths[name] = tenths[name] + own if name in tenths else own
    return tenths


CONTRADICTED = 0.01  # share of voxels; postprocessing of nested regions may leave a few


def calibrate_pair(pair: Pair, labels: Labels) -> dict[str, Floats]:
    """Returns the tenths of one case, of the classes that its truth shows."""
    saved = SavedProbabilities.of(pair.prediction)
    if saved is None:
        raise DataError(pair.prediction, "has no probabilities: predict with --npz")
    (probabilities, geometry), outputs = saved.read(), saved.outputs
    truth = read_reference(pair.truth, pair.doubt)
    if probabilities.shape != (len(outputs), *geometry.shape):
        raise DataError(
            saved.path, f"has probabilities of shape {probabilities.shape}, and {pair.prediction} is a label map of "
            f"{geometry.shape} with {len(outputs)} outputs: predict the case again"
        )  # fmt: skip
    if not ((probabilities >= 0) & (probabilities <= 1.001)).all():
        raise DataError(saved.path, "holds numbers that are no probabilities: predict the case again")
    if (share := saved.contradicted(probabilities)) > CONTRADICTED:
        why = "another label is more probable" if (0,) in outputs else "the label's region is less probable than not"
        raise DataError(
            saved.path, f"holds probabilities of another prediction than {pair.prediction}: in {100 * share:.3g}% of "
            f"its labelled voxels, {why}: predict the case again"
        )  # fmt: skip
    counted = np.ones(truth.values.shape, bool) if labels.ignore is None else truth.values != labels.ignore
    hidden, tenths = hidden_classes(labels.classes, pair.shown), dict[str, Floats]()
    for name, own in labels.classes.items():
        if name not in hidden and (channels := _channels_of(own, outputs)):
            given, shares = to_canonical(probabilities[channels].sum(0), geometry.orientation), truth.shares(own)
            if not (shares.min() >= -CLOSE and shares.max() <= 1 + CLOSE):  # nor NaN
                raise DataError(pair.truth, "holds numbers that are no probabilities: write some from 0 to 1")
            rows = zip(given, shares, counted)
            tenths[name] = np.sum([count_tenths(row[keep], right[keep]) for row, right, keep in rows], axis=0)
    return tenths


def _channels_of(values: Sequence[int], outputs: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns the outputs whose probabilities add up to that of a class, none if there are no such outputs.

    Labels exclude each other; regions do not, so that only a region of the same labels stands for a class.

    - ``values``: the label values of the class; those that no output knows count as another
    - ``outputs``: the label values of each output
    """
    if (0,) in outputs:
        return [number for number, (value,) in enumerate(outputs) if value in values]
    known = {value for value in values if any(value in region for region in outputs)}
    return [number for number, region in enumerate(outputs) if set(region) == known][:1]


MIN_VOXELS = 100  # of a tenth that is drawn
ABOUT_CALIBRATION = (
    "Each dot: the voxels of all cases whose probability of the class is within one tenth. Below the dashed line the "
    "class is there less often than its probability says (overconfident), above it more often. ECE (from 0.1): "
    "expected calibration error, the mean distance from that line over voxels, without those below 0.1, which are "
    f"mostly background. A tenth of fewer than {MIN_VOXELS} voxels is not drawn. Voxels of a case are alike: a few "
    "cases say little about others, however many voxels they have."
)


def share_of(pairs: Iterable[Pair]) -> str:
    """Returns what the share of a class is if the truth has doubt; "" otherwise."""
    return next((pair.doubt.share for pair in pairs if pair.doubt), "")


def about_calibration(pairs: Iterable[Pair]) -> str:
    """Returns what a reliability diagram shows."""
    share = share_of(pairs)
    return ABOUT_CALIBRATION + f" The share is {share}." * bool(share)


def calibration_diagram(
    tenths: Mapping[str, Floats], cases: int, class_colours: Mapping[str, str], which: str = ""
) -> Diagram:
    """Returns the reliability diagram of classes over the voxels of cases; ``which``: what is known of these."""
    errors = {name: error_of_tenths(own[1:]) for name, own in tenths.items()}
    counts = {name: int(own[1:, 0].sum()) for name, own in tenths.items()}
    few = {
        name: quantity(count, "voxel") if count else "no voxel" for name, count in counts.items() if count < MIN_VOXELS
    }
    labels = {
        name: f"{name}: " + (f"{few[name]} above 0.1" if name in few else f"ECE (from 0.1) {error:.3f}")
        for name, error in errors.items()
    }
    points = {
        labels[name]: [point for point in filled_tenths(own) if point[2] >= MIN_VOXELS] for name, own in tenths.items()
    }
    colours = {labels[name]: class_colours[name] for name in tenths}
    over, up = "probability of the class", "share of voxels of the class"
    title = f"Calibration of the voxels of {quantity(cases, 'case')}{f' {which}' * bool(which)}"
    return reliability_diagram(title, over, up, points, colours)


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
