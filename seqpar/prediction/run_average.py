"""Runs that predict together: whether they fit each other, their mean, how many ranks share a window."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from seqpar.data.errors import DataError
from seqpar.data.workers import ReportProgress
from seqpar.prediction.logits_to_labels import entropy_of, to_labels
from seqpar.prediction.predictor import PredictionSettings
from seqpar.prediction.window_grid import rows_at_once
from seqpar.runs.archive import digest_of, is_archive
from seqpar.runs.trained_run import TrainedRun
from seqpar.scores.label_files import DISAGREEMENT, ENTROPY
from seqpar.text import quantity
from seqpar.weights.weight_files import digest


@dataclass(frozen=True)
class EnsembleMember:
    """A run with the settings and the weights that it predicts with."""

    run: TrainedRun
    settings: PredictionSettings
    weights: tuple[Path, ...]


def check_compatible_runs(runs: Sequence[TrainedRun]) -> None:
    """Raises ValueError where probabilities of these runs do not mean the same, or where one of them comes twice."""
    first, seen = runs[0], set[Path]()
    for run in runs:
        if run.path.resolve() in seen:
            raise ValueError(f"{run.path} is named twice and would count twice: name it once")
        seen.add(run.path.resolve())
        for what, one in _meaning(first).items():
            if (other := _meaning(run)[what]) != one:
                advice = "name runs that learn the same from the same channels, or predict with each alone"
                if what == "axes":
                    advice = "average two runs, or two results folders of nnU-Net's: seqpar-export makes one of a run"
                raise ValueError(
                    f"{first.path} and {run.path} do not fit together: their {what} are {_text(one)} and "
                    f"{_text(other)}; {advice}"
                )


def check_no_duplicates(members: Iterable[EnsembleMember]) -> list[EnsembleMember]:
    """Returns the members; raises ValueError where one has the weights of another, such as a copy or an export."""
    every, seen = list(members), dict[str, tuple[Path, Path]]()
    if sum(len(member.weights) for member in every) == 1:
        return every
    has_archive = any(is_archive(member.run.path) for member in every)  # whose bytes are those of a zip
    for member in every:
        for file in member.weights:
            own = digest_of(file) if has_archive else digest(file)
            run, before = seen.setdefault(own, (member.run.path, file))
            if run != member.run.path or before != file:
                one, other = (before, file) if run == member.run.path else (run, member.run.path)  # folds, or runs
                raise ValueError(f"{one} and {other} hold the same weights, which would count twice: name one of them")
    return every


def _meaning(run: TrainedRun) -> dict[str, Any]:
    """Returns what a run takes and what its outputs stand for, in the files' label values."""
    values = run.recipe.values or tuple(run.labels.values())  # of voxels, or of whole volumes
    return {
        "axes": (run.preparation.axes,),
        "channels": run.recipe.modalities,
        "outputs": run.outputs,
        "labels": {name: values[n] for name, n in run.labels.items()},
        "regions": {name: sorted(values[n] for n in members) for name, members in run.regions.items()},
        "labels of regions": tuple(values[n] for n in run.output_order),
    }


def _text(meaning: Any) -> str:
    if isinstance(meaning, dict):
        return ", ".join(f"{name} {value}" for name, value in meaning.items()) or "none"
    return ", ".join(map(str, meaning)) or "none"


class ProbabilityFile:
    """Probabilities ``k W D H`` of a case in a temporary file: rows arrive slab by slab, outputs are read whole.

    The last channel may be their entropy.
    """

    def __init__(self, path: Path, shape: Sequence[int], softmax: bool) -> None:
        self.path, self.shape, self.softmax = path, tuple(shape), softmax
        self.error: OSError | None = None  # raised when the case is written, once all ranks have done their part
        self._file: IO[bytes] | None = None

    def write_rows(self, first_row: int, rows: Tensor) -> None:
        """Writes rows ``k w D H``, beginning with row ``first_row`` of the volume."""
        if self.error is not None:
            return
        try:
            self._file = self._file or open(self.path, "w+b")  # noqa: SIM115
            body = rearrange(rows.float().cpu(), "k w D H -> w k D H").contiguous().numpy()
            self.put(self._file, first_row * body[0].nbytes, body)
        except OSError as error:
            self.error = error

    def put(self, file: IO[bytes], place: int, rows: np.ndarray) -> None:
        """Writes rows ``w k D H`` at a place of the file, in bytes."""
        file.seek(place)
        file.write(rows.data)

    def mapped(self) -> np.ndarray:
        """Returns all probabilities, ``W k D H``, as they lie in the file; raises what kept them from being written."""
        if self.error is not None:
            raise self.error
        if self._file is not None:
            self._file.flush()
        k, w, d, h = self.shape
        return np.memmap(self.path, np.float32, "r", shape=(w, k, d, h))

    def read_output(self, number: int) -> np.ndarray:
        """Returns the probabilities ``W D H`` of one output."""
        return np.array(self.mapped()[:, number])

    def uncertainty(self) -> dict[str, np.ndarray]:
        """Returns the maps of uncertainty ``W D H`` by kind, for a file whose last channel is the entropy."""
        return {ENTROPY: self.read_output(-1)}

    def remove(self) -> None:
        """Closes and removes the temporary file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self.path.unlink(missing_ok=True)


class MeanProbabilities(ProbabilityFile):
    """The mean of the probabilities ``k W D H`` of ``num_runs`` runs in a temporary file: each adds its rows.

    - ``has_entropy``: whether one more channel is the mean of the runs' entropies
    """

    def __init__(
        self, path: Path, shape: Sequence[int], softmax: bool, num_runs: int, has_entropy: bool = False
    ) -> None:
        super().__init__(path, shape, softmax)
        self.num_runs, self.num_outputs = num_runs, shape[0] - has_entropy

    def put(self, file: IO[bytes], place: int, rows: np.ndarray) -> None:
        """Adds a run's share of the mean to what the file holds at a place, in bytes."""
        share = rows / np.float32(self.num_runs)
        file.seek(place)
        before = np.frombuffer(file.read(share.nbytes), np.float32)  # shorter where no run has written
        share.reshape(-1)[: before.size] += before
        super().put(file, place, share)

    def class_ids(self, regions_class_order: Sequence[int]) -> Tensor:
        """Returns the class ids ``W D H`` of the mean, as ``to_labels`` takes them from logits."""
        ids = [to_labels(_centred(rows, regions_class_order), regions_class_order) for rows in self._chunks()]
        return torch.cat(ids).to(torch.int16)

    def uncertainty(self) -> dict[str, np.ndarray]:
        """Returns the entropy of the mean, and by how much it exceeds the mean of the runs' entropies.

        That is the mutual information of a voxel's label and the run: 0 where all runs give the same probabilities.
        """
        total = torch.cat([entropy_of(rows, not self.softmax) for rows in self._chunks()]).numpy()
        return {ENTROPY: total, DISAGREEMENT: np.maximum(total - self.read_output(-1), 0)}

    def _chunks(self) -> Iterator[Tensor]:
        """Yields the outputs' probabilities ``k w D H``, a few rows at a time."""
        whole = self.mapped()[:, : self.num_outputs]  # w k D H
        rows = rows_at_once(whole.shape[1], whole.shape[2:])
        for first in range(0, len(whole), rows):
            yield torch.from_numpy(np.array(whole[first : first + rows])).transpose(0, 1)  # k w D H


def _centred(probabilities: Tensor, regions_class_order: Sequence[int]) -> Tensor:
    """Returns what is above 0 where a region's probability is above one half; labels are compared as they are."""
    return probabilities - 0.5 if regions_class_order else probabilities


def share_of_progress(tell: ReportProgress, number: int, count: int) -> ReportProgress:
    """Returns a function that reports progress of the whole while part ``number`` of ``count`` equal parts is done."""
    return lambda share: tell((number + share) / count)


def fitting_seqpar(members: Sequence[EnsembleMember], world: int, memory: float) -> tuple[int, str]:
    """Returns how many ranks, of ``memory`` bytes each, share a window; all ranks share a whole volume.

    Then a line where they are fewer because more could not cut a trained tile, "" elsewhere.
    """
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    shared = [size for size in sizes if all(member.run.can_share(size) for member in members)]
    for run in (member.run for member in members if not shared):  # not even one rank can
        try:
            run.check_share(1)
        except ValueError as error:
            problem = str(error).removesuffix(": use a smaller `seqpar`")
            raise DataError(f"{run.path}/config.json", f"has settings that exclude each other ({problem})") from None
    wholes = [member.settings.window == "whole" for member in members]
    groups = zip(members, wholes)
    chosen = max(shared[-1] if whole else member.run.window_group(shared, memory) for member, whole in groups)
    most = world if any(wholes) else max(member.run.config.seqpar for member in members)
    refused = [size for size in sizes if chosen < size <= most and size not in shared]
    if not refused:
        return chosen, ""
    ranks = f"{quantity(world // chosen, 'group')} of {quantity(chosen, 'rank')}"
    return chosen, f"--seqpar {chosen}: {refused[-1]} ranks cannot share the trained tile, so {ranks} predict"
