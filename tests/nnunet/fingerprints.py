"""Five generated data sets, what seqpar finds in them, and what nnU-Net's fingerprint and plans say of them."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from tests.nnunet.real_nnunet import oblique

DRAWN = 1_000_000  # voxels in the statistics; nnU-Net draws a hundred times as many
LABELS = {"background": 0, "organ": 1, "tumour": 2}
DATASETS: dict[str, dict[str, Any]] = {
    "Dataset201_CT": {"channels": ["CT"]},
    "Dataset202_MR": {"channels": ["T1", "T2"]},
    "Dataset203_Ignore": {"channels": ["CT"], "labels": {**LABELS, "ignore": 3}},
    "Dataset204_Regions": {
        "channels": ["T1", "CT"], "labels": {**LABELS, "organ": [1, 2]}, "regions_class_order": [1, 2], "border": 6,
    },
    "Dataset205_Thick": {"channels": ["CT"], "slices": (5.0, 4.0, 6.0, 4.5), "depth": 9},
}  # fmt: skip


def make_dataset(raw: Path, name: str) -> Path:
    """Writes one of the data sets: four cases of noise and nested blobs, with labels that reach into zeros."""
    kind, folder = DATASETS[name], raw / name
    channels, border = kind["channels"], kind.get("border", 0)
    for part in ("imagesTr", "labelsTr"):
        (folder / part).mkdir(parents=True)
    for number in range(4):
        rng = np.random.default_rng([int(name[7:10]), number])
        shape = (*(int(side) for side in rng.integers(30, 38, 2)), kind.get("depth", 26))
        at = (np.indices(shape) / np.array(shape)[:, None, None, None] - 0.5) * 2
        label = sum(((at - rng.uniform(-0.2, 0.2)) ** 2).sum(0) < radius**2 for radius in (0.6, 0.3)).astype(np.uint8)
        if "ignore" in kind.get("labels", LABELS):
            label[:6] = 3
        if border:
            label[1, 1, 1] = 1  # outside what is not 0: nnU-Net cuts it off
        affine = oblique((0.8 + 0.01 * number, 0.75, kind.get("slices", (1.5,) * 4)[number]), (-1, 1, 1))
        for channel in range(len(channels)):
            image = rng.normal(40 + 90.0 * label, 60).round() + 200 * channel
            image = np.where(image == 0, 1, image) if not border else image
            inside = np.zeros(shape, bool)
            inside[tuple(slice(border, side - border) for side in shape)] = True
            saved = nibabel.Nifti1Image((image * inside).astype(np.int16), affine)
            nibabel.save(saved, folder / "imagesTr" / f"case_{number}_{channel:04d}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, affine), folder / "labelsTr" / f"case_{number}.nii.gz")
    content = {
        "channel_names": {str(n): channel for n, channel in enumerate(channels)},
        "labels": kind.get("labels", LABELS), "numTraining": 4, "file_ending": ".nii.gz",
    } | {key: kind[key] for key in ("regions_class_order",) if key in kind}  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def found(folder: Path, cache: Path) -> dict[str, Any]:
    """Returns what seqpar finds in a data set, in nnU-Net's words and axes."""
    from seqpar.data.formats.recognise import read_dataset
    from seqpar.data.preparation.fingerprint import read_fingerprint
    from seqpar.data.preparation.prepare_dataset import open_cache, prepare
    from seqpar.data.preparation.recipe_survey import MASKED_SHARE, SAMPLED_VOXELS
    from seqpar.planner.tile_choice import target_spacing
    from seqpar.runs.nnunet_export import images_of

    assert SAMPLED_VOXELS == DRAWN and MASKED_SHARE == 0.75
    dataset = read_dataset(folder)
    assert not prepare(dataset, cache, workers=0).faults
    prepared, fingerprint = open_cache(cache), read_fingerprint(dataset)
    images = images_of(prepared.recipe, folder)
    spacing = target_spacing(fingerprint) or fingerprint.spacing
    shapes = [sorted(case.properties.box_shape) for _, case in sorted(prepared.cases.items())]
    intensities = {
        str(n): dict(i)
        for n, (i, scheme) in enumerate(zip(images.intensities, images.schemes))
        if scheme.startswith("CT")
    }
    return {
        "spacings": [sorted(sides) for sides in fingerprint.spacings],
        "shapes_after_crop": shapes,
        "spacing": sorted(spacing),
        "normalization_schemes": list(images.schemes),
        "use_mask_for_norm": list(images.masked),
        "intensities": intensities,
    }


def told(root: Path, name: str) -> dict[str, Any]:
    """Returns the same of nnU-Net's fingerprint and plans."""
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor

    number = int(name[7:10])
    extractor = DatasetFingerprintExtractor(number, 1)
    assert extractor.num_foreground_voxels_for_intensitystats == 100 * DRAWN
    extractor.num_foreground_voxels_for_intensitystats = DRAWN
    extractor.run()
    api.plan_experiments([number], "ExperimentPlanner", 8)
    preprocessed = root / "nnUNet_preprocessed" / name
    fingerprint = json.loads((preprocessed / "dataset_fingerprint.json").read_text())
    plans = json.loads((preprocessed / "nnUNetPlans.json").read_text())
    planned = plans["configurations"]["3d_fullres"]
    schemes = planned["normalization_schemes"]
    intensities = plans["foreground_intensity_properties_per_channel"]
    keys = ("mean", "std", "percentile_00_5", "percentile_99_5")
    return {
        "spacings": [sorted(sides) for sides in fingerprint["spacings"]],
        "shapes_after_crop": [sorted(sides) for sides in fingerprint["shapes_after_crop"]],
        "spacing": sorted(planned["spacing"]),
        "normalization_schemes": schemes,
        "use_mask_for_norm": planned["use_mask_for_norm"],
        "intensities": {
            n: {key: one[key] for key in keys} for n, one in intensities.items() if schemes[int(n)].startswith("CT")
        },
    }


def write_told(root: Path, out: Path) -> None:
    """Makes the data sets in ``root``, and writes what nnU-Net says of them."""
    said = {}
    for name in DATASETS:
        make_dataset(root / "nnUNet_raw", name)
        said[name] = told(root, name)
    out.write_text(json.dumps(said, indent=1) + "\n")
