"""Opens and describes images with label maps."""

import sys
from collections.abc import Sequence

import numpy as np

from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.joined_labels import join_labels
from seqpar.data.formats.recognise import find_dataset, read_dataset
from seqpar.data.formats.splits import tested_ids
from seqpar.data.phantom.builtin import phantom, phantom_fingerprint
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.preparation.cache_index import outdated_cache
from seqpar.data.preparation.fingerprint import Fingerprint, read_fingerprint
from seqpar.data.preparation.prepare_dataset import prepared
from seqpar.data.workers import no_progress
from seqpar.scores.label_classes import learned_regions
from seqpar.settings.config import Config
from seqpar.settings.data_settings import prepare_settings
from seqpar.tasks.training_data import (
    TrainingData,
    about_mirrored_copies,
    case_lines,
    exchanged_sides,
    mirrors_sides_of,
    refuse_for_soft_labels,
    refuse_weights,
    split_of,
    splits_by_patient,
    training_tiles,
)
from seqpar.terminal import ProgressBar
from seqpar.text import name_images, quantity

MAX_CLASSES = 12  # with lines of their own


def open_data(config: Config, is_first: bool) -> TrainingData:
    """Returns the data of a run; the first process prepares what is missing, the others wait for its files.

    Needs no process group. Raises ``ValueError`` where the data do not allow the config's split or augmentation.
    """
    folder = config.data or str(
        phantom(config.phantoms, is_first, ProgressBar("making phantoms") if is_first else no_progress)
    )
    settings, progress = prepare_settings(config), ProgressBar("preparing") if is_first else no_progress
    source = read_dataset(folder)
    for note in source.notes if is_first else ():
        print(f"warning: {note}", file=sys.stderr, flush=True)
    _refuse_unprepared(join_labels(source, settings.joins), config)
    dataset = prepared(source, config.cache or None, settings, is_first=is_first, progress=progress)
    if is_first and config.data and (line := outdated_cache(find_dataset(config.data), dataset.path.absolute())):
        print(line, flush=True)
    train_ids, held_out_ids = split_of(dataset, config)
    tiles = training_tiles(dataset, train_ids, config)
    by_patient = splits_by_patient(config)
    test_ids = tested_ids(dataset, config.fold, by_patient)
    return TrainingData(dataset, train_ids, held_out_ids, tiles, config.targets, test_ids, by_patient)


def _refuse_unprepared(source: Dataset, config: Config) -> None:
    """Refuses what the description of a data set does not allow, before its preparation, which may take hours."""
    if source.faults or not source.labels:
        return  # preparation says so
    split_of(source, config)
    refuse_for_soft_labels(config, source.soft)
    refuse_weights(config, tuple(learned_regions(source.labels, source.regions, config.targets) or source.labels))


def read_headers(config: Config) -> Fingerprint:
    """Returns what the headers of a run's data say; nothing is prepared or written."""
    settings = prepare_settings(config)
    if not config.data:
        return phantom_fingerprint(config.phantoms, settings.joins)
    dataset = join_labels(read_dataset(config.data), settings.joins)
    refuse_for_soft_labels(config, dataset.soft)
    return read_fingerprint(dataset, spacing=settings.own_spacing)


def describe_data(fingerprint: Fingerprint, config: Config) -> str:
    """Returns a line on a data set; raises ``ValueError`` where it does not allow the config's split."""
    train_ids, held_out_ids = split_of(fingerprint, config)
    refuse_weights(config, fingerprint.outputs(config.targets))
    channels = _listed(name_images(fingerprint.modalities), "channel")
    outputs = _listed(fingerprint.outputs(config.targets), "output")
    voxels = "x".join(map(str, fingerprint.shape))
    millimetres = "x".join(f"{size:.3g}" for size in fingerprint.spacing)
    return (
        f"{fingerprint.name} ({fingerprint.layout}): {quantity(len(fingerprint.ids), 'case')}, "
        f"{len(train_ids)} to train on, {len(held_out_ids)} held out; {channels}; learns {outputs}; median "
        f"{voxels} voxels of {millimetres} mm"
    )


def _listed(names: Sequence[str], what: str) -> str:
    return f"{quantity(len(names), what)} ({', '.join(names)})"


def summary_of_data(data: TrainingData, config: Config) -> str:
    """Returns the lines that say what a run trains on; reads a small file of each case."""
    dataset, lines = data.dataset, case_lines(data, config)
    counts = np.array([case.properties.counts for _, case in sorted(dataset.cases.items())])  # by case and class id
    if dataset.regions:
        names = {number: name for name, number in dataset.labels.items()}
        regions = (f"{name} = {' + '.join(names[n] for n in ids)}" for name, ids in dataset.regions.items())
        lines.append(f"  regions, which may overlap: {', '.join(regions)}")
    every = [*dataset.labels, *(dataset.regions or ())]
    if sides := exchanged_sides(every, config.augment):
        note = f"  note: --augment {config.augment} mirrors tiles, which exchanges {sides}"
        lines.append(f"{note}; --augment none does not mirror")
    directions = config.mirror if mirrors_sides_of(dataset.recipe.plan, config.mirror) else ()
    copies = about_mirrored_copies(every, directions, f"--val-mirror {config.val_mirror}")
    lines += [f"  note: {told}" for told in copies]
    lines += _doubt(dataset)
    return "\n".join(
        [*lines, *_class_lines(dataset, counts), *_ignored(dataset.ignore_label), *data.about_untaught(config)]
    )


def _doubt(dataset: PreparedDataset) -> list[str]:
    """Returns a line on labels with doubt."""
    readers = dataset.described.get("readers", ())
    what = f"the mean of {quantity(len(readers), 'reader')}: {', '.join(readers)}" if readers else "their probabilities"
    return [] if dataset.soft is None else [f"  labels with doubt: the target is {what}; labels below by consensus"]


def _class_lines(dataset: PreparedDataset, counts: np.ndarray) -> list[str]:
    """Returns for each label in how many cases it is, of those annotated for it, and which share of voxels it has."""
    shares = counts / counts.sum(1, keepdims=True)
    shown = [dataset.annotated.get(name) for name in sorted(dataset.cases)]
    foreground = [(name, number) for name, number in dataset.labels.items() if number]
    foreground = [(name if name.startswith("label") else f"label {name}", number) for name, number in foreground]
    width = max(len(name) for name, _ in foreground)
    lines = list[str]()
    for name, number in foreground[:MAX_CLASSES]:
        known = np.array([own is None or number in own for own in shown])
        cases = quantity(int(known.sum()), "annotated case" if not known.all() else "case")
        share = f", {shares[known, number].mean():.2%} of the voxels" if known.any() else ""
        lines.append(f"  {name:{width}}  in {np.count_nonzero(counts[known, number])} of {cases}{share}")
    more = len(foreground) - MAX_CLASSES
    return [*lines, f"  … and {more} more labels"] if more > 0 else lines


def _ignored(label: int | None) -> list[str]:
    return [] if label is None else ["  voxels of the ignore label count neither in the loss nor in scores"]
