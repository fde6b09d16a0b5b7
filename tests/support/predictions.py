"""Prediction in tests: run folders with random weights, a network that answers with the image, and the act."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from torch import Tensor, nn

from seqpar.cli import predict
from seqpar.cluster import exit_codes
from seqpar.data.preparation.recipe import Recipe
from seqpar.models.build import build_network
from seqpar.parallel.mesh import Group, Mesh
from seqpar.settings.config import Config
from seqpar.tasks.lookup import task_of
from seqpar.weights.weight_files import write_weights
from tests.support.folders import image_array, save

ROOT = Path(__file__).parents[2]
SMALL = Config(tile=(8, 8, 8), patch=4, embed_dim=12, depth=1, heads=2, decoder_width=4)
RECIPE = Recipe(("T1",), ("zscore",), (None,), None, (0, 1), False, 100)


def make_run(out: Path, recipe: Recipe = RECIPE, config: Config = SMALL, **keys: Any) -> Path:
    """Writes a run folder with random weights, as train leaves one; ``keys`` go into its data set's description."""
    labels = {f"label {value}": n for n, value in enumerate(recipe.values)}
    dataset = {"labels": labels, "regions": {}, "regions_class_order": [], "recipe": recipe.to_json(), **keys}
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"config": asdict(config), "dataset": dataset}))
    outputs = len(dataset["regions"] if config.targets == "regions" and dataset["regions"] else labels)
    write_weights(out / "model.safetensors", build_network(config, len(recipe.modalities), outputs, Group("seq")))
    return out


class Echo(nn.Module):
    """Stands where a decoder does and says what label the image shows: the image is its own prediction."""

    uses_image, num_features = True, 1

    def __init__(self, values: tuple[int, ...], regions: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__()
        self.values, self.regions = values, regions

    def forward(self, features: Any, image: Tensor, grid: Any = None) -> tuple[Tensor, Any]:
        if self.regions:
            is_in = [sum((image - value).abs() < 0.5 for value in members) for members in self.regions]
            return torch.cat([2.0 * inside - 1.0 for inside in is_in], 1), grid and grid.scaled(4)
        return torch.cat([-((image - value) ** 2) for value in self.values], 1), grid and grid.scaled(4)


def labelled(shape: tuple[int, ...], values: tuple[int, ...]) -> np.ndarray:
    """Returns noise of labels: a voxel that moves shows."""
    return np.random.default_rng(0).choice(values, shape)


def act(place: Path, run: Path, *more: str, images: str = "images", out: str = "out") -> int:
    return predict.act([str(run), "-i", str(place / images), "-o", str(place / out), *more])


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


def on_ranks(mesh: Mesh, *arguments: str) -> int:
    options = predict._parser().parse_args(list(arguments))
    members = predict._members(options)
    faults = task_of(members[0].run.config).predict(predict._request(options), members, mesh)
    return exit_codes.DATA if faults else 0


def write_images(folder: Path) -> Path:
    """Writes three cases, of sizes that are multiples of nothing."""
    for n, shape in enumerate([(14, 12, 10), (9, 17, 8), (21, 7, 13)]):
        save(folder / f"c_{n:03d}_0000.nii.gz", image_array(n, shape))
    return folder
