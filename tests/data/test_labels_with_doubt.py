"""Several readers per case, and labels that are probabilities: from files to tiles, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from seqpar.data.boxes import crop
from seqpar.data.errors import DataError
from seqpar.data.formats.joined_labels import join_labels, parse_joins
from seqpar.data.formats.nnunet_plans import BY_TORCH
from seqpar.data.formats.recognise import is_folder_of_dataset, read_dataset
from seqpar.data.geometry import to_canonical
from seqpar.data.preparation.cache import PreparedDataset, open_cache
from seqpar.data.preparation.cache_index import is_current
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.data.preparation.prepared_case import load_case
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.augmentation_presets import RECIPES
from seqpar.data.sampling.tiles import TileKey, TileSource
from seqpar.data.volumes import read_volume
from seqpar.losses import Probabilities, Readers
from tests.data.test_as_nnunet import STRAIGHT, by_plan, write_case
from tests.support.bad_data import prepared, rewrite
from tests.support.folders import image_array, nnunet, save, several_readers, write_json

READERS = ("ann", "ben", "cy")


def cache_of(root: Path, settings: PrepareSettings | None = None) -> PreparedDataset:
    data = read_dataset(root)
    data = join_labels(data, settings.joins) if settings else data
    report = prepare(data, root.parent / "cache", settings, workers=0)
    assert not report.faults, report.faults
    assert is_current(data, root.parent / "cache", settings or PrepareSettings())
    return open_cache(root.parent / "cache")


def as_prepared(path: Path, data: PreparedDataset, case: str) -> np.ndarray:
    """Returns the first channels of a label file as its case was cropped, in canonical axes ``c W D H``."""
    array, geometry, _ = read_volume(path)
    return crop(to_canonical(array, geometry.orientation), data.cases[case].properties.box)


def test_the_target_of_several_readers_is_their_mean(tmp_path: Path) -> None:
    root = several_readers(tmp_path / "D")
    data = cache_of(root)
    case, soft = data.cases["c_001"], data.soft
    assert soft == Readers(3, 3) and case.label.dtype == np.uint8
    maps = [as_prepared(root / f"labelsTr_{reader}" / "c_001.nii.gz", data, "c_001")[0] for reader in READERS]
    target = soft.target(torch.from_numpy(np.array(case.label))[None], torch.float64)[0].numpy()
    assert (target == np.mean([[one == k for k in range(3)] for one in maps], 0)).all()
    assert (target % 1 != 0).sum() > 0 and len(np.unique(maps[0] - maps[1])) > 1  # the readers differ
    consensus = data.consensus(case.label)
    votes = np.stack([np.sum([one == k for one in maps], 0) for k in range(3)])
    assert (consensus == votes.argmax(0)).all() and (votes.max(0) == 2).any()
    assert case.properties.counts == tuple(int((consensus == k).sum()) for k in range(3))
    for k in (1, 2):  # a voxel that one reader gave may be drawn
        rows = {tuple(row) for row in case.locations[k].tolist()}
        assert rows == {tuple(row) for row in np.argwhere(np.any([one == k for one in maps], 0)).tolist()}
    assert data.described["readers"] == list(READERS)


def soft_files(root: Path, cases: int = 2, classes: int = 3, **more: object) -> Path:
    """Writes an nnU-Net raw folder whose labels are probabilities."""
    names = {"background": 0, **{f"class {n}": 2 * n for n in range(1, classes)}}
    nnunet(root, cases, labels=names, soft_labels=True, **more)
    for n in range(cases):
        shares = np.random.default_rng(n).dirichlet([1.0] * classes, image_array(0).shape)
        save(root / "labelsTr" / f"c_{n:03d}.nii.gz", shares.astype(np.float32))
    return root


def test_probabilities_are_kept_to_one_part_in_255(tmp_path: Path) -> None:
    data = cache_of(soft_files(tmp_path / "D"))
    case = data.cases["c_000"]
    assert data.soft == Probabilities(3) and case.label.dtype == np.int32
    given = as_prepared(tmp_path / "D" / "labelsTr" / "c_000.nii.gz", data, "c_000")
    target = data.soft.target(torch.from_numpy(np.array(case.label))[None], torch.float64)[0].numpy()
    assert abs(target - given).max() < 1 / 255 and abs(target.sum(0) - 1).max() < 1e-12
    assert (data.consensus(case.label) == given.argmax(0)).mean() > 0.99
    assert set(case.locations) == {1, 2}
    sure = {tuple(row) for row in np.argwhere(given[1] > 0.51).tolist()}
    near = {tuple(row) for row in np.argwhere(given[1] > 0.49).tolist()}
    assert sure <= {tuple(row) for row in case.locations[1].tolist()} <= near


def test_joined_labels_have_the_sum_of_their_probabilities(tmp_path: Path) -> None:
    root = soft_files(tmp_path / "D", classes=4)
    data = cache_of(root, PrepareSettings(joins=parse_joins("both=2,6")))
    given = as_prepared(root / "labelsTr" / "c_000.nii.gz", data, "c_000")
    label = torch.from_numpy(np.array(data.cases["c_000"].label))[None]
    target = data.soft.target(label, torch.float64)[0].numpy()
    assert list(data.labels) == ["background", "both", "class 2"]
    assert abs(target - np.stack([given[0], given[1] + given[3], given[2]])).max() < 1 / 255


@pytest.mark.parametrize("write", [several_readers, soft_files])
def test_labels_with_doubt_are_resampled(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = cache_of(write(tmp_path / "D"), PrepareSettings(spacing=(2.0, 1.0, 1.5)))
    label = torch.from_numpy(np.array(data.cases["c_000"].label))[None]
    target = data.soft.target(label, torch.float64)[0]
    assert tuple(target.shape[1:]) == data.cases["c_000"].image.shape[1:] and float(target.min()) >= 0
    assert float((target.sum(0) - 1).abs().max()) < 1e-12 and float(target[1:].sum()) > 0


@pytest.mark.parametrize("by", ["splines", "torch"])
def test_by_nnunets_plan_each_readers_label_is_resampled_as_one_alone(by: str, tmp_path: Path) -> None:
    torch_kwargs = {"resampling_fn_seg": "resample_torch_fornnunet"} if by == "torch" else {}
    own, case = by_plan(spacing=[1.1, 1.2, 1.9], **torch_kwargs), write_case(tmp_path, STRAIGHT)
    loaded, num = load_case(case, own.recipe), len(own.recipe.values)
    assert (own.plan.label_resampling.function == BY_TORCH) == (by == "torch")
    rng = np.random.default_rng(1)
    maps = [(loaded.image[0] > level).astype(np.uint8) * int(rng.integers(1, num)) for level in (100, 200, 250)]
    readers = replace(own, recipe=replace(own.recipe, readers=3))
    soft = readers.recipe.soft
    together = readers.prepare(loaded._replace(ids=soft.join(maps)), case)
    assert together.label.shape == together.image.shape[1:] != maps[0].shape
    for digit, one in zip(soft.digits(together.label), maps):
        # what is labelled is never outside: of all readers, which splines do not ask for
        alone = own.prepare(loaded._replace(ids=one), case).label
        assert (digit == alone).all() if by == "splines" else (digit == alone).mean() > 0.95
    likely = replace(own, recipe=replace(own.recipe, probabilities=True))
    shares = np.stack([np.mean([one == k for one in maps], 0) for k in range(num)])
    label = likely.prepare(loaded._replace(ids=likely.recipe.soft.encode(shares)), case).label
    target = likely.recipe.soft.target(torch.from_numpy(label)[None], torch.float64)[0]
    assert float((target.sum(0) - 1).abs().max()) < 1e-12 and 0.3 < float(target[0].mean()) < 1


def tiles_of(data: PreparedDataset, name: str) -> TileSource:
    return TileSource.of(data, data.ids, augment(name, (8, 8, 8), soft=data.soft))


@pytest.mark.parametrize("name", [*RECIPES, "light+intensity-shift", "light+corruption"])
def test_tiles_have_codes_of_their_case_whatever_is_done_to_them(name: str, tmp_path: Path) -> None:
    root = soft_files(tmp_path / "D", cases=1, classes=5)
    data = cache_of(root)
    codes = {0, *np.unique(data.cases["c_000"].label).tolist()}
    source = tiles_of(data, name)
    assert source.label_dtype == np.int32 if data.soft.num_digits < 4 else np.int64
    for sample in range(6):
        tile = source.draw(TileKey(1, 0, sample))
        assert tile.label.dtype == source.label_dtype and {*np.unique(tile.label).tolist()} <= codes


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "paper"])
def test_each_readers_label_moves_as_a_label_map(name: str) -> None:
    image, rng = np.zeros((1, 14, 14, 14), np.float32), np.random.default_rng(0)
    soft, maps = Readers(9, 5), [rng.integers(0, 9, image.shape[1:]) for _ in range(5)]
    assert soft.join(maps).dtype == np.int32
    for seed in range(4):
        _, code = augment(name, (10, 10, 10), soft=soft)(image, soft.join(maps), seed)
        alone = [augment(name, (10, 10, 10))(image, one.astype(np.uint8), seed)[1] for one in maps]
        assert all((a == b).all() for a, b in zip(soft.digits(code), alone))


def test_data_without_doubt_keep_their_cache(tmp_path: Path) -> None:
    prepare(read_dataset(nnunet(tmp_path / "D")), tmp_path / "cache", workers=0)
    index = json.loads((tmp_path / "cache" / "cache.json").read_text())
    assert not {"readers", "soft_labels"} & {*index["dataset"]}
    assert not {"readers", "probabilities"} & {*index["recipe"]}
    data = open_cache(tmp_path / "cache")
    assert data.soft is None and data.consensus(data.cases["c_000"].label).dtype == np.uint8


def test_lists_of_cases_name_a_label_per_reader(tmp_path: Path) -> None:
    root = several_readers(tmp_path / "D", cases=2)
    content = json.loads((root / "dataset.json").read_text())
    labels = {f"c_{n:03d}": [f"labelsTr_{reader}/c_{n:03d}.nii.gz" for reader in READERS] for n in range(2)}
    images = {name: f"imagesTr/{name}_0000.nii.gz" for name in labels}
    explicit = {name: {"images": [images[name]], "label": labels[name]} for name in labels}
    entries = [{"image": images[name], "label": labels[name], "fold": n} for n, name in enumerate(labels)]
    lists = {
        "dataset.json": content | {"dataset": explicit},
        "list.json": {key: content[key] for key in ("labels", "readers")} | {"training": entries},
    }
    for name, written in lists.items():
        write_json(root / name, written)
        data = read_dataset(root if name == "dataset.json" else root / name)
        assert not data.faults and data.readers == READERS
        assert [path.parent.name for path in data.cases[0].labels] == [f"labelsTr_{reader}" for reader in READERS]
        broken = json.loads(json.dumps(written).replace(', "labelsTr_cy/c_000.nii.gz"', ""))
        write_json(root / name, broken)
        (fault, *_) = read_dataset(root if name == "dataset.json" else root / name).faults
        assert "a list of 3" in str(fault)
    assert is_folder_of_dataset(root / "labelsTr_ann")


def declared(**more: object) -> Callable[[Path], None]:
    """Returns what changes keys of dataset.json; None removes one."""

    def change(root: Path) -> None:
        content = json.loads((root / "dataset.json").read_text()) | more
        write_json(root / "dataset.json", {key: value for key, value in content.items() if value is not None})

    return change


def spoiled(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda root: rewrite(root / name, change)


def moved(root: Path) -> None:
    path = root / "labelsTr_ben" / "c_001.nii.gz"
    save(path, np.asarray(nibabel.load(path).dataobj), np.eye(4))


def many(root: Path) -> None:
    labels = {"background": 0, **{f"label {n}": n for n in range(1, 200)}}
    declared(labels=labels)(several_readers(root, tuple("abcdefg")))


FAULTS_OF_READERS = {
    "one": (declared(readers=["ann"]), "readers is ['ann']; it must list at least two names"),
    "twice": (declared(readers=["ann", "ann"]), "each once"),
    "path": (declared(readers=["ann", "../b"]), "names of letters"),
    "no list": (declared(readers="ann"), "readers is 'ann'"),
    "both": (declared(soft_labels=True), "declares both readers and soft_labels"),
    "unknown": (declared(readers=["ann", "dan"]), "labelsTr_dan: is missing; an nnU-Net raw folder has imagesTr"),
    "ignore": (
        declared(labels={"background": 0, "organ": 1, "tumour": 2, "ignore": 3}),
        'declares both an ignore label and "readers"; remove one',
    ),
    "annotated": (declared(annotated={"c_000": ["organ"]}), "labels with doubt show all classes; remove the list"),
    "many": (many, "7 readers of 200 labels are more than the 53 bits of a voxel can store: give at most 6 readers"),
    "lost": (lambda root: (root / "labelsTr_cy" / "c_001.nii.gz").unlink(), "labelsTr_cy/c_001.nii.gz: is missing"),
    "extra": (lambda root: save(root / "labelsTr_cy" / "c_9.nii.gz", np.zeros((2, 2, 2))), "is a label without images"),
    "value": (spoiled("labelsTr_ben/c_001.nii.gz", lambda x: x * 3), "labelsTr_ben/c_001.nii.gz: has voxels of value"),
    "moved": (moved, "labelsTr_ben/c_001.nii.gz: does not match"),
}  # fmt: skip


@pytest.mark.parametrize("which", FAULTS_OF_READERS)
def test_wrong_labels_of_readers_are_named(which: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harm, message = FAULTS_OF_READERS[which]
    root = several_readers(tmp_path / "D", cases=2)
    harm(root)
    assert message in prepared(root, tmp_path / "cache", capfd)


LABEL = "labelsTr/c_001.nii.gz"
FAULTS_OF_PROBABILITIES = {
    "undeclared": (declared(soft_labels=None), 'has 3 channels; a label has one value per voxel, or declare "soft_'),
    "no flag": (declared(soft_labels=1), "soft_labels is 1; it must be true or false"),
    "channels": (spoiled(LABEL, lambda x: x[..., :2]), 'has 2 channels; with "soft_labels", it needs the probab'),
    "map": (spoiled(LABEL, lambda x: x[..., 0]), "has 1 channel; with"),
    "sum": (spoiled(LABEL, lambda x: x * 0.9), "voxels whose probabilities do not have the sum 1, but up to 0.9;"),
    "percent": (spoiled(LABEL, lambda x: x * 100), "probabilities are from 0 to 1"),
    "nan": (spoiled(LABEL, lambda x: np.where(x > 0.9, np.nan, x)), "are NaN or infinite"),
    "negative": (spoiled(LABEL, lambda x: x - [[[[0.5, -0.5, 0]]]]), "has values from -0."),
    "many": (declared(labels={f"l{n}": n for n in range(1, 8)} | {"background": 0}), "give at most 7 labels"),
}  # fmt: skip


@pytest.mark.parametrize("which", FAULTS_OF_PROBABILITIES)
def test_wrong_probabilities_are_named(which: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harm, message = FAULTS_OF_PROBABILITIES[which]
    root = soft_files(tmp_path / "D")
    harm(root)
    assert message in prepared(root, tmp_path / "cache", capfd)


def test_the_error_names_the_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must list at least two names"):
        read_dataset(several_readers(tmp_path / "D", readers=("ann",)))
