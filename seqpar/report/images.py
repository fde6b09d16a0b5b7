"""Where a report finds the images of its cases: files that the caller names, else prepared data; sizes of voxels.
And which label maps a folder of predictions does not name.
"""

import os
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.data.errors import DataError
from seqpar.data.files import read_json, strip_suffix, suffix_of
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import find_inputs, is_folder_of_dataset
from seqpar.data.preparation.cache import PreparedCase, PreparedDataset, open_cache, read_record
from seqpar.data.preparation.cache_index import same_source, sources_of
from seqpar.data.preparation.preparation import preparation_of, prepare_case
from seqpar.data.preparation.prepared_case import Properties
from seqpar.data.preparation.recipe import Recipe
from seqpar.data.volumes import digest_file, files_digest, read_geometry
from seqpar.losses import Readers
from seqpar.report.curves import WORDS_OF_WINDOWS
from seqpar.report.embedded_volumes import Bytes
from seqpar.report.planes import grey_window, limits_of
from seqpar.report.record import CaseScores, RunRecord
from seqpar.runs.metrics_tail import of_one_way
from seqpar.runs.sweep_folder import list_some
from seqpar.scores.label_files import MAX_NAMED, dataset_at, list_label_files
from seqpar.text import name_images, quantity
from seqpar.weights.facts import FILE_DIGESTS
from seqpar.weights.weight_files import shorten_list

Stamps = Mapping[str, Sequence[Sequence[Any]]]  # name, size and time of each file of a case, by the case's name


class FoundImage(NamedTuple):
    """A case's image ``c W D H`` as the network takes it, in canonical axes.

    ``label``: its class ids ``W D H``, where the cache has them
    ``disputed``: the mask of what several readers label differently; empty without several readers
    """

    image: np.ndarray
    label: np.ndarray | None
    properties: Properties
    disputed: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Images:
    """The images that can be shown.

    ``files`` are cases by name whose files are prepared when they are shown; ``place`` says where they lie. There,
    ``others`` have the names of cases, but are other scans.
    """

    recipe: Recipe
    cache: PreparedDataset | None
    files: Mapping[str, Case] = field(default_factory=dict)
    place: str = ""
    others: Collection[str] = ()

    def of(self, name: str) -> FoundImage | None:
        """Returns a case's image, None where it is not known; raises DataError if its files cannot be used."""
        if name in self.files:
            prepared = prepare_case(self.files[name], self.recipe)
            return self._canonical(prepared.image, prepared.properties)
        cached = self.cache.cases.get(name) if self.cache else None
        if cached is None:
            return None
        found = self._canonical(cached.image, cached.properties)
        if self.cache is None or not (cached.folder / "label.npy").is_file():  # classes of volumes need none
            return found
        soft, preparation = self.cache.soft, preparation_of(self.recipe)
        maps = [self.cache.consensus(cached.label)]
        maps += [soft.disputed(cached.label)] if isinstance(soft, Readers) else []
        label, *disputed = (preparation.canonical(one, cached.properties) for one in maps)
        return found._replace(label=label, disputed=disputed)

    def _canonical(self, image: np.ndarray, properties: Properties) -> FoundImage:
        preparation = preparation_of(self.recipe)
        return FoundImage(preparation.canonical(image, properties), None, preparation.canonical_properties(properties))

    def missing(self, name: str) -> str:
        """Returns why a case is shown without its image, and what to do."""
        if self.place:
            which = f"another scan under the name {name}" if name in self.others else f"no image of {name}"
            return f"{self.place} holds {which}; only the labels are shown."
        return "The images of this case are not known: name their folder with --images. Only the labels are shown."


def count_shown(have_image: Sequence[bool]) -> str:
    """Returns how many cases a page shows, and how many of them without an image."""
    lacking = have_image.count(False)
    which = "" if lacking == len(have_image) else f"{lacking} "
    told = f", {which}without {'an image' if lacking == 1 else 'images'} (the page says why)" * bool(lacking)
    return f"{quantity(len(have_image), 'case')} shown{told}"


def recipe_of(record: RunRecord) -> Recipe:
    """Returns how a run prepares its images; raises DataError if config.json does not say."""
    try:
        return Recipe.from_json(record.dataset["recipe"])
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"does not say how images are prepared ({type(error).__name__}: {error}); use --cases 0"
        raise DataError(record.path / "config.json", problem) from None


def find_images(
    record: RunRecord, folder: Path | None, truth: Path | None, predicted: Stamps | None, gaps: list[str]
) -> Images:
    """Returns the images of a run's data, and of the cases in ``folder``, which come first.

    - ``truth``: without a folder, the data set that this is, or is a part of, has the images
    - ``predicted``: the files that each case was predicted from, None for the run's own validation. Other cases may
      have the names of the run's own, whose prepared images are shown only if they were made from these files
    - ``gaps``: what is lacking is added to them; a folder without any usable case raises DataError
    """
    recipe, place = recipe_of(record), record.dataset.get("prepared")
    try:
        cache = open_cache(Path(str(place))) if place else None
    except DataError:
        cache = None
    has_cache = cache is not None
    if cache is not None and predicted is not None:
        cache = same_cases(cache, predicted)
    if folder is not None:
        cases, faults = find_inputs((folder,), recipe.modalities)
        if not cases and faults:
            raise faults[0]
        gaps += [f"An image is left out: {fault}." for fault in faults]
        return Images(recipe, cache, *_of_prediction(cases, predicted, folder, truth is not None, gaps))
    if truth is not None and (images := images_beside(truth)) is not None:
        try:
            cases, _ = find_inputs((images,), recipe.modalities)  # what is wrong with some is said by their scores
            return Images(recipe, cache, *_of_prediction(cases, predicted, images, True, gaps))
        except DataError as error:
            gaps.append(f"The images of the data set cannot be shown: {error}.")
    elif not has_cache and predicted is None:
        gaps.append(f"The prepared data are not where the run had them ({place or 'no folder is recorded'}): name the "
                    "folder of the images with --images to see them.")  # fmt: skip
    return Images(recipe, cache)


def _of_prediction(
    cases: Sequence[Case], predicted: Stamps | None, place: Path, is_scored: bool, gaps: list[str]
) -> tuple[dict[str, Case], str, list[str]]:
    """Returns the cases in ``place`` by name, this place, and the names of those that were predicted from other images,
    which are not among the cases; ``gaps`` names them.

    Sizes and digests count, so that copies under other names and times are the same.
    """
    own = {case.id: case for case in cases}
    if others := _from_others(own, predicted or {}):
        shown = ", ".join(others[:MAX_NAMED]) + ", …" * (len(others) > MAX_NAMED)
        one = len(others) == 1
        are = "is of another scan than the one that was" if one else "are of other scans than those that were"
        it, images = ("it is", "image") if one else ("they are", "images")
        scored = " Their true labels may be of other patients as well, and are scored all the same." * is_scored
        gaps.append(f"Caution: the {images} of {shown} {are} predicted; {it} not shown.{scored}")
    return {name: case for name, case in own.items() if name not in others}, str(place), others


def _from_others(cases: Mapping[str, Case], predicted: Stamps) -> list[str]:
    """Returns the names of cases that were predicted from other images."""
    others = list[str]()
    for name in sorted(cases.keys() & predicted.keys()):
        with suppress(DataError):
            there = sources_of(replace(cases[name], label=None, more_labels=()))
            if any(_is_other(*pair) for pair in zip(there, predicted[name], strict=False)):
                others.append(name)
    return others


def other_images(record: RunRecord, place: Path | None, predicted: Stamps, scored: Collection[str]) -> list[str]:
    """Returns a sentence if scored cases were predicted from other images than a truth has under their names.

    - ``place``: where the truth's images are, if they are known; ``predicted``: the files behind each prediction
    - ``scored``: the names of the scored cases
    """
    others, cases = list[str](), dict[str, Case]()
    if place is not None and predicted:
        with suppress(DataError, OSError):
            found = find_inputs((place,), recipe_of(record).modalities)[0]
            cases = {case.id: case for case in found if case.id in scored and case.id in predicted}
            others = _from_others(cases, predicted)
    if not others:
        return []
    told = f"Caution: {len(others)} of {quantity(len(cases), 'scored case')}, such as {others[0]},"
    if len(others) == 1:
        return [f"{told} was predicted from another file than its image in {place}: unless that is the same image, "
                "copied or converted, the truth is another patient's."]  # fmt: skip
    return [f"{told} were predicted from other files than their images in {place}: unless these are the same images, "
            "copied or converted, the truth is that of other patients."]  # fmt: skip


def _is_other(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Returns whether a file, or a series, is not the one that was predicted; earlier versions recorded no digest.

    Digests of another length are of another kind: times tell then.
    """
    if not len(now) == len(before) == len(_STAMP):
        return False
    (*_, size, time, digest), (*_, size_before, time_before, digest_before) = now, before
    has_changed = digest != digest_before if len(digest) == len(str(digest_before)) else time != time_before
    return bool(size != size_before or has_changed)


def images_beside(truth: Path) -> Path | None:
    """Returns where the images of a truth are: a data set itself, the images beside a data set's folder of labels."""
    folder = Path(os.path.realpath(truth))
    if folder.name.startswith("labels") and is_folder_of_dataset(folder):
        images = folder.with_name("images" + folder.name.removeprefix("labels"))
        return images if images.is_dir() else None
    with suppress(DataError):  # of a list of annotated classes, whose labels nothing in the folder names
        dataset = dataset_at(truth)
        if dataset is not None and (dataset.faults or any(case.images for case in dataset.cases)):
            return truth
    return None


def same_cases(cache: PreparedDataset, stamps: Stamps) -> PreparedDataset:
    """Returns the cache with only those cases that were prepared from these very files."""
    same = dict[str, PreparedCase]()
    for name in set(stamps).intersection(cache.cases):
        record, files = read_record(cache.path, name), stamps[name]
        own = record["sources"] if record is not None else []
        if files and all(any(same_source(one, file) for one in own) for file in files):
            same[name] = cache.cases[name]
    return replace(cache, cases=same)


_STAMP = ("name", "size", "time", "digest")  # of a file, as predict records it
OTHER_SIZE = 1.25  # times as long as the longest side of a run's voxels, or as short as the shortest
Spacing = tuple[float, ...]


def changed_since(record: RunRecord, scored: CaseScores, shown: Collection[str]) -> list[str]:
    """Returns a sentence on ``shown`` cases of a run's own validation whose images, labels or predictions are other
    files by now; none on those that a fault names already.
    """
    truths = {case.name: case.truth for case in scored.cases if case.truth and case.name in shown
              and not any(fault.startswith(f"{case.truth}:") for fault in scored.faults)}  # fmt: skip
    recorded, place = record.dataset.get(FILE_DIGESTS, {}), record.dataset.get("prepared")
    prepared, changed = dict[str, str](), list[str]()
    with suppress(DataError, OSError, LookupError):
        prepared = {name: case.files for name, case in open_cache(Path(str(place))).cases.items() if name in truths}
    for name, truth in truths.items():
        with suppress(DataError, OSError):
            known = recorded.get(name, "")
            is_other = prepared.get(name, known) != known
            if known and truth.is_file():
                is_other = is_other or files_digest([digest_file(truth)]) not in known.split()
            changed += [name] * bool(known and is_other)
    for case in scored.cases:
        with suppress(DataError, OSError):
            known = scored.digests.get(case.name)
            is_other = known and case.name in shown and case.prediction.is_file()
            changed += [case.name] * bool(is_other and digest_file(case.prediction) != known)
    if not changed:
        return []
    changed = list(dict.fromkeys(changed))
    return [f"Since they were scored, files of {shorten_list(changed, 3)} were replaced: the pictures show the new "
            "files, and scores and volumes are of the old ones. Validate or evaluate again."]  # fmt: skip


def spacings_of(files: Mapping[str, Path]) -> dict[str, Spacing]:
    """Returns the sides of the voxels of volumes in mm, in canonical axes, by name; unreadable files have none."""
    spacings = dict[str, Spacing]()
    for name, path in files.items():
        with suppress(DataError):
            spacings[name] = read_geometry(path)[0].canonical_spacing
    return spacings


def _own_spacings(record: RunRecord) -> list[Spacing]:
    """Returns the sides of the voxels of a run's cases, at least of those that its last validation left; else none."""
    try:
        cache = open_cache(Path(str(record.dataset.get("prepared"))))
        names = map(str, (*record.dataset["train"], *record.dataset["held_out"]))
        return [cache.cases[name].properties.geometry.canonical_spacing for name in names if name in cache.cases]
    except (DataError, OSError, ValueError, KeyError, TypeError):
        folder = record.path / "validation"
        files = list_label_files(folder) if folder.is_dir() else {}
        return list(spacings_of({name: paths[0] for name, paths in files.items()}).values())


def other_voxels(record: RunRecord, spacings: Mapping[str, Spacing]) -> str:
    """Returns a sentence if voxels of cases have another size or shape than all of a run's own, and none are resampled.

    - ``spacings``: sides of a voxel of each case, in mm
    """
    recipe = record.dataset.get("recipe") or {}
    own = [] if recipe.get("spacing") or recipe.get("plan") or not spacings else _own_spacings(record)
    if not own:
        return ""
    ends = [(min(sides), max(sides)) for sides in zip(*own)]
    odd = {
        name: sides
        for name, sides in spacings.items()
        if any(not low / OTHER_SIZE <= side <= high * OTHER_SIZE for side, (low, high) in zip(sides, ends))
    }
    if not odd:
        return ""
    name, sides = next(iter(odd.items()))
    ranges = [f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}" for low, high in ends]
    return (
        f"{len(odd)} of {quantity(len(spacings), 'case')} {'has' if len(odd) == 1 else 'have'} voxels of another size "
        f"or shape than the run's own cases: {name} of {' × '.join(f'{side:.3g}' for side in sides)} mm, the run's of "
        f"{' × '.join(ranges)} mm. This run does not resample, so the network sees structures at another scale than in "
        "training, and may miss or invent them."
    )


def grey_images(
    image: FoundImage, modalities: Sequence[str]
) -> tuple[dict[str, Bytes], dict[str, tuple[float, float]], bool]:
    """Returns the channels of a prepared image as grey levels, what black and white are, and whether it is a CT."""
    pictures, ranges, properties = dict[str, Bytes](), dict[str, tuple[float, float]](), image.properties
    rows = zip(name_images(modalities), image.image, properties.schemes, properties.means, properties.stds)
    for name, channel, scheme, mean, std in rows:
        pictures[name], low, high = to_grey(np.asarray(channel), scheme)
        ranges[name] = low * std + mean, high * std + mean
    return pictures, ranges, "ct" in properties.schemes


def to_grey(channel: NDArray[Any], scheme: str) -> tuple[Bytes, float, float]:
    """Returns a channel as grey levels, and the values that are black and white; ``scheme``: how it was prepared."""
    outside = channel == 0 if scheme == "zscore" else np.zeros(channel.shape, bool)
    low, high = limits_of([channel]) if scheme == "ct" else grey_window(channel)
    scaled = np.clip((channel - low) / max(float(high - low), 1e-6), 0, 1) * 255
    grey: Bytes = np.where(outside, 0, np.rint(scaled)).astype(np.uint8)
    return grey, float(low), float(high)


def recorded_cases(prediction: Path, needed: Sequence[str] = ("files", "inputs")) -> set[str] | None:
    """Returns the cases that a folder's prediction.json names; None if there is none, or an older version wrote it.

    - ``needed``: what it must tell
    """
    try:
        record = read_json(prediction / "prediction.json")
        _ = [record[part] for part in needed]
        maps = {strip_suffix(name) for name in record["files"] if "/" not in name and suffix_of(name)}
        return {*map(as_utf8, maps.union(*(record.get(part, ()) for part in ("inputs", "label_maps", "voxels"))))}
    except (DataError, OSError, KeyError, TypeError, AttributeError):
        return None


def as_utf8(name: str) -> str:
    """Returns a name in UTF-8, also if another locale or another system wrote it."""
    with suppress(UnicodeError):
        return unicodedata.normalize("NFC", name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape"))
    return name


def about_names(prediction: Path, truth: Path) -> str:
    """Returns a caution if a single label map is compared with a truth that has the name of another predicted case."""
    own, other = (as_utf8(strip_suffix(path.name)) for path in (prediction, truth))
    if not prediction.is_file() or own == other or not {own, other} <= (recorded_cases(prediction.parent) or set()):
        return ""
    return f"Caution: {prediction} is of case {own}, and {truth} has the name of another case that was predicted."


def unlisted_maps(folder: Path) -> tuple[list[str], str]:
    """Returns the cases whose label maps joined a folder of predictions that does not name them, and a sentence."""
    if (known := recorded_cases(folder)) is None:
        return [], ""
    there = list_label_files(folder)
    others = {case: files[0].name for case, files in there.items() if as_utf8(case) not in known}
    named = f"{quantity(len(there), 'label map')} in {folder}, such as {next(iter(others.values()), '')}"
    return list(others), say_unlisted(len(others), named)


def say_unlisted(count: int, among: str) -> str:
    """Returns a sentence on predictions that their folder's prediction.json does not name, "" if there are none.

    - ``among``: of how many they are some, where these are, and one of them
    """
    if not count:
        return ""
    it, case = ("it", "this case") if count == 1 else ("them", "these cases")
    return (
        f"{count} of {among}, {'is' if count == 1 else 'are'} not in its prediction.json: another network or program "
        f"may have made {it}, and whether that has seen {case} is not known."
    )


def scored_twice(record: RunRecord) -> list[str]:
    """Returns a sentence if the label maps of a run's validation are on another grid than its curves' scores."""
    if not (size := own_grid(record)):
        return []
    there = "scores in curves are measured there. The other scores are of its label maps on the grid of the files"
    how = "Where these grids differ, validation resamples labels, and predict probabilities, so the maps that predict"
    return [f"Validation predicts on the run's own grid ({size}): {there}. {how} writes score a little differently."]


def grids_of(records: Mapping[str, RunRecord]) -> dict[str, list[str]]:
    """Returns the runs whose validations segment, by the grid where their curves are measured; "": that of the files.

    Grids with the same prepared cases count as one.
    """
    known = {name: one for name, one in records.items() if one.held_out and one.network_settings.task == "segment"}
    grids, digests = dict[str, list[str]](), [one.dataset.get("digests") or {} for one in known.values()]
    for name, record in known.items():
        grids.setdefault(own_grid(record), []).append(name)
    shared = [case for case in digests[0] if all(case in own for own in digests)] if digests else []
    is_one = bool(shared) and all(own[case] == digests[0][case] for own in digests for case in shared)
    return {} if "" in grids and is_one else grids


def about_windows(records: Mapping[str, RunRecord]) -> list[str]:
    """Returns a sentence if validations did not predict all cases in windows, or all in one pass."""
    ways = dict[str, list[str]]()
    for name, record in records.items():
        usual, held_out = record.config.get("val_window", "sliding"), of_one_way(record.held_out)
        own = {WORDS_OF_WINDOWS.get(row.get("window", usual), "") for row in held_out if "dice" in row} - {""}
        if own:
            ways.setdefault(" or ".join(sorted(own)), []).append(name)
    if len(ways) < 2 and not any(" or " in way for way in ways):
        return []
    each = "; ".join(f"{way} ({list_some(names, ', ')})" for way, names in ways.items())
    return [f"Validations predicted cases in different ways: {each}. That alone changes losses and scores."]


def about_grids(
    records: Mapping[str, RunRecord], others: str = "The other scores are of label maps on the grid of the files."
) -> list[str]:
    """Returns a sentence if curves are not of the files' grid, or of several grids; ``others``: on other scores."""
    grids = grids_of(records)
    if len(grids) < 2:
        told = "These runs were validated on their own grid ({}): their curves in validation are measured there."
        return [f"{told.format(grid)} {others}" for grid in grids if grid]
    each = "; ".join(f"{grid or 'the voxels of the files'} ({list_some(names, ', ')})" for grid, names in grids.items())
    told = f"These runs were validated on different grids: {each}. Their curves in validation cannot be compared."
    return [f"{told} {others}"]


def own_grid(record: RunRecord) -> str:
    """Returns the voxels to which a segmentation's run resamples its cases, in words; "" if they keep their own."""
    recipe = record.dataset.get("recipe") or {}  # a plan of nnU-Net's has probabilities resampled
    sizes = () if recipe.get("plan") else recipe.get("spacing") or ()
    is_other = bool(sizes) and record.config.get("task", "segment") == "segment"
    return f"voxels of {' × '.join(f'{size:.3g}' for size in sizes)} mm" * is_other
