"""statistics.csv next to the label maps: volume and mean intensity of each class in each case."""

import csv
import io
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import SUFFIXES, refuse_special, write_text
from seqpar.text import millilitres, name_images

NAME = "statistics.csv"


class ClassStatistics:
    """Keeps statistics.csv, a line per case and class, whole after every case; used by the first rank.

    - ``classes``: the label values that make up each class
    - ``modalities``: whose means and standard deviations are given, in the files' own numbers; with their units
    """

    def __init__(self, folder: Path, classes: Mapping[str, Sequence[int]], modalities: Sequence[str]) -> None:
        self.path, self.classes = folder / NAME, classes
        kinds = (f"{kind} {name}" for kind in ("mean", "sd") for name in modalities)
        self.columns = ["case", "class", "voxels", "ml", *kinds]
        self._rows: list[list[str]] = []

    def open(self) -> None:
        """Takes over the lines of cases whose label map is next to the table; refuses a table with other columns."""
        lines = read_lines(self.path, may_be_cut=True)
        self._rows = [line for line in lines[1:] if line and self._has_labels(line[0])]
        if self._rows and self.columns not in (lines[0], _named(lines[0])):
            raise DataError(
                self.path, f"has the columns {', '.join(lines[0])}, and predict would write {', '.join(self.columns)}; "
                "choose another --output"
            )  # fmt: skip

    @property
    def cases(self) -> set[str]:
        """The cases that have all their lines."""
        counts = Counter(line[0] for line in self._rows if len(line) == len(self.columns))
        return {case for case, count in counts.items() if count == len(self.classes)}

    def _has_labels(self, case: str) -> bool:
        return any((self.path.parent / f"{case}{suffix}").is_file() for suffix in SUFFIXES)

    def add(self, case: str, labels: np.ndarray, image: np.ndarray, voxel_ml: float) -> None:
        """Writes a case's lines; ``labels`` ``W D H`` are the file's values, ``image`` ``c W D H`` its numbers."""
        self._rows = [row for row in self._rows if row[0] != case]
        self._rows += [[case, *map(_cell, row)] for row in statistics_of(labels, image, voxel_ml, self.classes)]
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self._rows])
        write_text(self.path, text.getvalue())

    def volumes(self, case: str) -> str:
        """Returns the volume of each class of a case in words."""
        return ", ".join(f"{row[1]} {millilitres(float(row[3]))} ml" for row in self._rows if row[0] == case)


def statistics_of(
    labels: np.ndarray, image: np.ndarray, voxel_ml: float, classes: Mapping[str, Sequence[int]]
) -> list[list[Any]]:
    """Returns a row per class: its name, voxels, ml, then each channel's mean and each one's standard deviation.

    Both are NaN where the class has no voxel; the standard deviation is that of its voxels, divided by their number.
    """
    values = labels.ravel()
    voxels = np.bincount(values)
    middles = [float(channel.mean()) for channel in image]  # subtracted, or squares of large numbers would cancel
    shifted = [channel.ravel().astype(np.float64) - middle for channel, middle in zip(image, middles)]
    sums, squares = ([np.bincount(values, x**power) for x in shifted] for power in (1, 2))
    rows: list[list[Any]] = []
    for name, members in classes.items():
        present = [value for value in members if value < len(voxels)]
        count = int(voxels[present].sum())
        means, parts = (
            [float(total[present].sum()) / count if count else float("nan") for total in totals]
            for totals in (sums, squares)
        )
        deviations = [float(np.sqrt(max(part - mean**2, 0.0))) if count else mean for part, mean in zip(parts, means)]
        own = [mean + middle for mean, middle in zip(means, middles)]
        rows.append([name, count, count * voxel_ml, *own, *deviations])
    return rows


def read_lines(path: Path, may_be_cut: bool = False) -> list[list[str]]:
    """Returns the lines of a table, none if it is not there; raises DataError if it cannot be read.

    - ``may_be_cut``: leave a last line out that lacks its end
    """
    refuse_special(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        return list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1] if may_be_cut else text)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            path, f"cannot be read ({error}); save it as CSV in UTF-8, or choose another --output"
        ) from error


def drop_cases(folder: Path, cases: Collection[str]) -> None:
    """Removes the lines of these cases from a folder's statistics.csv, and the file if no line is left."""
    lines = read_lines(folder / NAME)
    with suppress(FileNotFoundError):
        if kept := [line for line in lines[1:] if line and line[0] not in cases]:
            text = io.StringIO(newline="")
            csv.writer(text, lineterminator="\n").writerows([lines[0], *kept])
            write_text(folder / NAME, text.getvalue())
        else:
            (folder / NAME).unlink()


def read_statistics(folder: Path) -> tuple[list[str], dict[tuple[str, str], list[float]]]:
    """Returns the modalities of a folder's statistics.csv and, by case and class, its ml, means, standard deviations.

    Both are empty if there is no such file; raises DataError if it is damaged.
    """
    path = folder / NAME
    refuse_special(path)
    try:
        head, *lines = csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig")))
        kinds = [name.removeprefix("mean ") for name in head if name.startswith("mean ")]
        if head != ["case", "class", "voxels", "ml", *(f"{kind} {name}" for kind in ("mean", "sd") for name in kinds)]:
            raise ValueError(f"its columns are {', '.join(head)}")
        rows = {(case, name): [float(cell or "nan") for cell in cells] for case, name, _, *cells in lines}
        if any(len(numbers) != 1 + 2 * len(kinds) for numbers in rows.values()):
            raise ValueError("a line has another number of columns than the first")
        return kinds, rows
    except FileNotFoundError:
        return [], {}
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise DataError(path, f"is no table that predict --statistics wrote ({error})") from None


def _named(columns: Sequence[str]) -> list[str]:
    """Returns the columns of a table in which older versions called images without a name "channel 0" and so on."""
    images = [name.removeprefix("mean ") for name in columns if name.startswith("mean ")]
    names = {f"{kind} {a}": f"{kind} {b}" for kind in ("mean", "sd") for a, b in zip(images, name_images(images))}
    return [names.get(name, name) for name in columns]


def _cell(value: Any) -> str:
    """Returns a number as text; nothing for NaN."""
    return str(value) if not isinstance(value, float) else "" if np.isnan(value) else f"{value:.6g}"
