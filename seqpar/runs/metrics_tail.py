"""Follows the metrics.jsonl that a training is writing; needs no torch, so that many processes can follow runs."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

# what validations are compared by, of each task
SCORES = {
    "segment": "mean Dice",
    "classify": "balanced accuracy",
    "pretrain": "error of hidden voxels",
}
MEASURED_ON = "measured_on"  # in a validation's row: which cases it scored, and how
ERRORS = ("pretrain",)  # tasks whose measure is an error: its score is higher where the error is lower


class MetricsTail:
    """Reads what has been added to ``path`` since the last reading.

    A resumed training rewrites the file without the rows that it repeats; then all of it is read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._node = 0, -1

    def read(self) -> list[dict[str, Any]]:
        """Returns the new rows, without a last line that is still being written; none if there is no file."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._start())
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line))]

    def _start(self) -> int:
        """Returns where the new rows begin: at 0 in a file that is another one, or shorter than it was."""
        state = self.path.stat()
        if state.st_ino != self._node or state.st_size < self._at:
            self._at, self._node = 0, state.st_ino
        return self._at


def _row(line: bytes) -> dict[str, Any]:
    """Returns the row of a line, {} for what a kill left of one."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and "step" in row else {}


def score_of_error(error: float) -> float:
    """Returns the score, from 0 to 1, of an error: the lower the error, the higher the score."""
    return 1 / (1 + error)


def measure_of(task: str, score: float) -> float:
    """Returns what ``SCORES`` names, as people read it, of a score: the score itself, or the error behind it."""
    return 1 / score - 1 if task in ERRORS and score > 0 else score


def task_of_row(row: Mapping[str, Any]) -> str:
    """Returns for which task a validation's row was written."""
    return "classify" if "scores" in row else "segment" if "dice" in row else "pretrain"


def score_of(row: Mapping[str, Any]) -> float:
    """Returns what the validations of a task are compared by, as ``SCORES`` calls it; NaN where no class has one."""
    task = task_of_row(row)
    if task == "pretrain":
        return score_of_error(float(row["loss"]))
    values = row["dice"].values() if task == "segment" else [row["scores"][SCORES[task]]]
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else math.nan


BY_WINDOW = "by_window"  # of a validation that predicted in windows and in one pass: what each of both gave
OF_ONE_WAY = ("loss", "dice", "global_dice")


def of_one_way(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns validations as curves show them: all by the way of the best, in windows or in one pass, if they measured
    both and their rows are of the one that was better there.
    """
    window = (best_validation(rows) or {}).get("window")
    if not window or not all(window in (row.get(BY_WINDOW) or {}) for row in rows):
        return rows
    return [{**row, **row[BY_WINDOW][window], "window": window} for row in rows]


def basis_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns which cases the last of some validations scored, and how; "" if no row says so."""
    return next((str(row[MEASURED_ON]) for row in reversed(rows) if MEASURED_ON in row), "")


def comparable(rows: Iterable[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the last of some validations: as many as have scored the same cases in the same way.

    Rows that do not say so are taken for such as follow them.
    """
    rows = [*rows]
    last = basis_of(rows)
    others = [at for at, row in enumerate(rows) if row.get(MEASURED_ON, last) != last]
    return rows[others[-1] + 1 :] if others else rows


def best_validation(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the row whose weights a training keeps as the best; None if no row has a score.

    It has the highest score of those that can be compared with the last; of equal ones the lowest loss, and then it is
    the first.
    """

    def order(row: Mapping[str, Any]) -> tuple[float, float]:
        loss = row.get("loss")
        return score_of(row), -loss if isinstance(loss, (int, float)) and math.isfinite(loss) else -math.inf

    return max(
        (row for row in comparable(rows) if "step" in row and not math.isnan(score_of(row))), key=order, default=None
    )


def with_other_weights(step: int, best: int | None) -> str:
    """Returns what scores after ``step`` are not of, if predict uses the weights of another, ``best``; else ""."""
    if not step or not best or step == best:
        return ""
    return f" after step {step:,}, not with the weights that predict uses (step {best:,})"


NOTHING = 5e-4  # of a Dice, which pages and programs show as 0.000


def what_is_not_found(
    rows: Iterable[Mapping[str, Any]],
    present: Mapping[str, int] | None = None,
    kind: str = "held-out",
    untaught: Collection[str] = (),
) -> str:
    """Returns sentences if the best validation of a segmentation has a Dice of 0.000 for some classes; else "".

    - ``present``: in how many validated cases the truth has each class, as far as that is known
    - ``kind``: of the validated cases; ``untaught``: classes that no case to train on has
    """
    best, present = best_validation(rows) or {}, present or {}
    names = [name for name, dice in best.get("dice", {}).items() if dice is not None and dice < NOTHING]
    lacking = [name for name in names if present.get(name) == 0]
    told, begin = list[str](), "At the best validation, the mean Dice of"
    if without := [name for name in names if name in untaught]:
        why = (
            f"no case that the run trains on has {_it(without)}, so the network could not learn to find {_it(without)}"
        )
        absent = [name for name in without if present.get(name) == 0]
        either = f" No {kind} case is known to have {_listed(absent)} either." if absent else ""
        told.append(f"{begin} {_listed(without)} is 0.000: {why}.{either}")
    lacking = [name for name in lacking if name not in without]
    if found := [name for name in names if name not in (*lacking, *without)]:
        it = _it(found)
        hardly = f"what is predicted of {it} hardly overlaps {it}"
        missed = hardly if any(best["dice"][name] for name in found) else f"no voxel of {it} was found"
        where = f"in the {kind} cases that have {it}" if present.keys() >= {*found} else f"where {kind} cases have {it}"
        told.append(
            f"{begin} {_listed(found)} is 0.000: {where}, {missed}. "
            f"Nothing shows that the network has learned to find {it}."
        )
    if lacking:
        it = _it(lacking)
        told.append(
            f"{begin} {_listed(lacking)} is 0.000: no {kind} case is known to have {it}, and what is "
            f"predicted of {it} counts as false. These cases cannot show whether the network finds {it}."
        )
    if unknown := [name for name, dice in best.get("dice", {}).items() if dice is None]:
        finds = f"nothing shows whether the network finds {_it(unknown)}"
        told.append(f"In no {kind} case could {_listed(unknown)} be scored: {finds}.")
        if neither := [name for name in unknown if name in untaught]:
            told.append(f"No case that the run trains on has {_listed(neither)} either.")
    return " ".join(told)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _it(names: Sequence[str]) -> str:
    return "them" if len(names) > 1 else "it"


PADDING = "padding"  # in a pretraining's validation: its share of the hidden voxels, which errors do not count
GUESS = "guess"  # there: with what the error is compared, in words, if not with what `guess_of` returns
OF_MODALITIES = "each modality's mean"  # of patches that are normalised over several modalities together
MUCH = 0.25  # of padding
LITTLE = 0.8  # of the error of a mean; above it, a pretraining has learned little


def guess_of(normalised: bool) -> str:
    """Returns with what a pretraining is compared: a mean in place of what is hidden, in words."""
    return "each patch's own mean" if normalised else "the tile's mean"


def what_was_learned(rows: Iterable[Mapping[str, Any]], normalised: bool) -> tuple[str, str]:
    """Returns a sentence that compares the best error with that of a mean, and a caution if it is no better or close.

    - ``rows``: of the validations
    - ``normalised``: whether patches are rebuilt without their mean
    """
    rows = [row for row in comparable(rows) if isinstance(row.get("error_of_mean"), float)]
    known = [(row["loss"], row["error_of_mean"], row.get(GUESS, guess_of(normalised))) for row in rows]
    known = [one for one in known if all(isinstance(error, float) and math.isfinite(error) for error in one[:2])]
    if not known:
        return "", ""
    error, of_mean, guess = min(known)
    sentence = f"The best error is {error:.4f}. Filling the hidden voxels with {guess} would give {of_mean:.4f}."
    if error <= LITTLE * of_mean:
        return sentence, ""
    learned = "Little was learned" if error < of_mean else "Nothing was learned"
    advice = "Train longer" + ", on tiles that fit into the scans" * (rows[-1].get(PADDING, 0) > MUCH)
    return sentence, f"{learned}: the best error is {error:.4f}, and that of {guess} is {of_mean:.4f}. {advice}."
