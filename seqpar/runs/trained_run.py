"""Reads a run folder for prediction: its settings, what its data mean, and the networks of its checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from seqpar.attention.strategies import check_strategy
from seqpar.cluster.devices import device_here
from seqpar.data.addresses import local_file
from seqpar.data.errors import DataError
from seqpar.data.preparation.preparation import preparation_of
from seqpar.data.preparation.prepared_case import Preparation
from seqpar.data.preparation.recipe import Recipe
from seqpar.models.build import NETWORK_NAMES, build_network, build_on_meta, family_of, layout_of
from seqpar.models.network import Network
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.rendezvous import start
from seqpar.planner.attention_choice import choose_fastest
from seqpar.runs.archive import is_archive
from seqpar.runs.run_folder import read_best_step, read_config, read_windows
from seqpar.runs.run_status import weights_taken
from seqpar.scores.label_classes import learned_regions
from seqpar.settings.checks import as_in_file, check_network
from seqpar.settings.config import Config
from seqpar.settings.lessons import lesson_at, lessons_of
from seqpar.weights import checkpoint
from seqpar.weights.facts import differing_flags, read_facts
from seqpar.weights.weight_files import archived_shapes, read_weights, shorten_list

LAST = "model.safetensors"  # what a finished run leaves next to its checkpoints


@dataclass(frozen=True)
class TrainedRun:
    """A training run: its config, how its cases were prepared, and what its outputs stand for.

    ``windows`` is the mean Dice by kind of window that its validation measured, the better first; ``whole_grid`` the
    most tokens per direction in the whole passes among them; ``temperatures`` what it fitted by kind of window.
    """

    path: Path
    config: Config
    recipe: Recipe
    labels: dict[str, int]  # class ids, as in the cache; of whole volumes where --task is classify
    regions: dict[str, tuple[int, ...]]
    regions_class_order: tuple[int, ...]  # class ids
    windows: Mapping[str, float] = field(default_factory=dict)
    whole_grid: tuple[int, ...] = ()
    temperatures: Mapping[str, float] = field(default_factory=dict)

    @property
    def window(self) -> str:
        """The kind of window to predict by: the better of those measured, sliding windows where none was.

        Cases that have one class each pass whole.
        """
        return "whole" if self.config.task == "classify" else next(iter(self.windows), "sliding")

    @property
    def learns_regions(self) -> bool:
        """Whether the networks' outputs are regions, which may overlap; else they are labels."""
        return bool(self.regions) and self.config.targets != "labels"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The networks' outputs by name: regions, or labels."""
        return tuple(self.regions if self.learns_regions else self.labels)

    @property
    def output_order(self) -> tuple[int, ...]:
        """The class id that each output's voxels get where outputs are regions; empty where they are labels."""
        return self.regions_class_order if self.learns_regions else ()

    @property
    def preparation(self) -> Preparation:
        """How cases are prepared for the networks."""
        return preparation_of(self.recipe)

    @property
    def averaged(self) -> str:
        """What networks of the run are averaged, in words; "" if there is one, or if weights were named."""
        return ""

    @property
    def mirror(self) -> tuple[int, ...]:
        """The directions over whose flips predictions are averaged where nothing else is asked for."""
        return self.config.mirror

    @property
    def window_rule(self) -> str:
        """Where sliding windows lie and what they weigh: one of ``window_grid.RULES``."""
        return self.config.window_rule

    @property
    def why_not_whole(self) -> str:
        """Why the networks are not to predict whole volumes in one pass; "" where they may."""
        return ""

    def window_group(self, sizes: Sequence[int], memory: float) -> int:
        """Returns how many ranks of ``memory`` bytes share a window: the most of ``sizes`` that training allows."""
        return max(size for size in sizes if size <= self.config.seqpar)

    def check_share(self, size: int, mode: str = "") -> None:
        """Raises ValueError if ``size`` ranks cannot share the trained tile; for ``mode`` see ``load_nets``."""
        try:
            layout_of(replace(self.config, seqpar=size, mode=mode or prediction_mode(self), batch=1))
        except ValueError as error:
            if str(error).startswith(("mode=", "--mode")):
                raise
            # it may advise what a trained run cannot change
            raise ValueError(f"{str(error).rpartition(': use ')[0] or error}: use a smaller `seqpar`") from error

    def can_share(self, size: int) -> bool:
        """Returns whether ``size`` ranks can share the trained tile."""
        try:
            self.check_share(size)
        except ValueError:
            return False
        return True

    def weights_of(self, checkpoints: Sequence[str]) -> tuple[Path, ...]:
        """Returns the files of weights that ``--checkpoint`` names, each once, by default the best."""
        return tuple(dict.fromkeys(find_weights(self, name) for name in checkpoints or ["best"]))

    @property
    def rounds_resampled(self) -> bool:
        """Whether logits in half precision stay so when they are resampled."""
        return True

    def load_nets(self, files: Sequence[Path], mesh: Mesh, mode: str = "") -> list[Network]:
        """Returns the network with the weights of each file, ready to predict; for ``mode`` see ``load_nets``."""
        return load_nets(self, files, mesh, mode)


def read_run(path: str | Path) -> TrainedRun:
    """Reads the run in a folder that train wrote, or in an archive that export wrote, which may be an address."""
    path = local_file(path)
    content, windows = read_config(path), read_windows(Path(path))
    step = None if is_archive(path) else weights_taken(Path(path)).step
    fits = step is None or read_best_step(path) in (None, step)  # else the weights that were measured are gone
    try:
        dataset, config = content["dataset"], Config.from_dict(content["config"])
        check_network(config, NETWORK_NAMES)
        regions = {name: tuple(members) for name, members in dataset["regions"].items()}
        order = tuple(dataset["regions_class_order"]) if regions else ()
        if config.targets == "sigmoids":
            regions = learned_regions(dataset["labels"], regions, config.targets)
            order = tuple(value for (value,) in regions.values())
        run = TrainedRun(
            Path(path),
            config if step is None else replace(config, tile=lessons_of(config)[lesson_at(config, step)].config.tile),
            Recipe.from_json(dataset["recipe"]),
            _labels_of(dataset),
            regions,
            order,
            windows.dice,
            tuple(windows.whole_grid),
            windows.temperatures if fits else {},
        )
        ids, values = {*run.labels.values()}, run.recipe.values
        if values and not ids <= {*range(len(values))}:
            raise ValueError(f"its labels are {run.labels}, and its recipe has the values {values}: it is damaged")
        if is_archive(path):
            _refuse_other_shapes(run)
        return run
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            path if is_archive(path) else Path(path) / "config.json",
            f"lacks what prediction needs ({error}); give the folder of a training run",
        ) from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        if is_archive(path):
            told = f"cannot be used ({as_in_file(str(error))}); copy it again, or export the run again"
            raise DataError(path, told) from None
        raise DataError(f"{path}/config.json", as_in_file(str(error)).removeprefix("config.json: ")) from None


def _refuse_other_shapes(run: TrainedRun) -> None:
    """Raises DataError for an archive whose weights are not those of its config's network.

    Neither is in memory yet: an archive may announce any sizes.
    """
    state = {name: torch.empty(shape, device="meta") for name, shape in archived_shapes(run.path).items()}
    config = _with_fitting_attention(replace(run.config, mode=prediction_mode(run), seqpar=1))
    config = replace(config, tile=_tile_of(config, state))
    blocks = config.depths if isinstance(config.depths, int) else sum(config.depths)
    if family_of(config).attends and blocks > len(state):  # each has several tensors; made one by one, they take hours
        raise DataError(
            run.path, f"its config.json has {blocks} blocks, and its weights are {len(state)} tensors: copy it again, "
            "or export the run again"
        )  # fmt: skip
    own = build_on_meta(config, Group("seq"), len(run.recipe.modalities), len(run.outputs)).state_dict()
    if differing := [name for name in {**own, **state} if _shape(own, name) != _shape(state, name)]:
        raise DataError(
            run.path, f"its weights are not those of the network in its config.json: {shorten_list(differing, 4)} "
            "differ; copy it again, or export the run again"
        )  # fmt: skip


def _labels_of(dataset: Mapping[str, Any]) -> dict[str, int]:
    """Returns what a run's outputs are labels of: voxels, or volumes."""
    names = dataset.get("volume_classes", {}).get("names", ())
    return {str(name): number for number, name in enumerate(names)} or dict(dataset["labels"])


def _tile_of(config: Config, state: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Returns the tile for whose tokens weights have learned positions; the config's where they have none."""
    table = state.get("encoder.pos_embed")
    tiles = [config.tile, *(lesson.config.tile for lesson in lessons_of(config))]
    counts = [math.prod(side // voxels for side, voxels in zip(tile, config.patch)) for tile in tiles]
    return next((t for t, count in zip(tiles, counts) if table is not None and count == table.shape[1]), config.tile)


def find_weights(run: TrainedRun, which: str = "best") -> Path:
    """Returns a file of the run's weights.

    - ``which``: best, latest, or the path of a file or checkpoint folder, or the address of a file
    """
    folder = run.path / "checkpoints"
    if which not in ("best", "latest"):
        path = local_file(which)
        return path / LAST if path.is_dir() else path
    if is_archive(run.path):
        if which != "best":
            raise ValueError(f"checkpoint={which!r}: {run.path} holds one set of weights; remove it")
        return run.path
    if name := checkpoint.named_by(folder, which):
        point = checkpoint.find(folder, name)
        checkpoint.refuse_of_other(point, read_config(run.path))
        return point / LAST
    if (run.path / LAST).is_file():
        return run.path / LAST
    raise DataError(folder, f"holds no checkpoint, and {run.path} no {LAST}; train first, or name a file of weights")


def prediction_mode(run: TrainedRun) -> str:
    """Returns the mode for prediction: auto, or nogather for a network trained so, as only that computes otherwise."""
    return "nogather" if run.config.mode == "nogather" else "auto"


def load_nets(run: TrainedRun, files: Sequence[Path], mesh: Mesh, mode: str = "") -> list[Network]:
    """Returns the run's network with the weights of each file, ready to predict.

    - ``mode``: of the decoder; by default ``prediction_mode``
    """
    config = _with_fitting_attention(replace(run.config, mode=mode or prediction_mode(run), seqpar=mesh.seq.size))
    config = choose_fastest(config, device_here(mesh.device.type))
    nets = []
    for path in files:
        theirs, ours = differing_flags(read_facts(path), config)
        if theirs:
            raise DataError(path, f"holds weights that were trained with {theirs}, and {run.path} has {ours}")
        state = read_weights(path)
        of_tile = replace(config, tile=_tile_of(config, state))
        net = build_network(of_tile, len(run.recipe.modalities), len(run.outputs), mesh.seq)
        own = net.state_dict()
        differing = [name for name in {**own, **state} if _shape(own, name) != _shape(state, name)]
        if differing:
            raise DataError(
                path, f"holds weights of another network than {run.path}: {shorten_list(differing, 4)} differ"
            )
        net.load_state_dict(state)
        dtype = torch.float64 if run.config.precision == "fp64" else torch.float32
        nets.append(net.to(mesh.device, dtype).eval())
    return nets


def _with_fitting_attention(config: Config) -> Config:
    """Returns the config with attention left open where the trained strategy is none of this group's: all are exact."""
    if config.attention == "auto":
        return config
    try:
        check_strategy(config.attention, config.seqpar, config.heads, config.keep_kv)
    except ValueError:
        return replace(config, attention="auto")
    return config


def _shape(state: dict[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def load_run(path: str | Path, which: str = "best") -> Network:
    """Returns the network of a run folder, ready to predict, in this process alone: no process group is needed.

    - ``path``: the folder that train wrote, or the path or address of an archive that export wrote
    - ``which``: best, latest, or the path of a file or checkpoint folder, or the address of a file
    """
    run = read_run(path)
    return load_nets(run, [find_weights(run, which)], start(1, env={}))[0]
