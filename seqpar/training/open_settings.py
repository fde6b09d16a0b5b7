"""What a command line leaves open: group size, batch and tile, which the data and the planner decide."""

from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.parallel.launcher import Launcher
from seqpar.planner.chooser import choose_group_and_batch, choose_lessons, has_open_lessons
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.config import Config
from seqpar.settings.parallel_settings import AUTO
from seqpar.tasks.lookup import task_of
from seqpar.tasks.training_data import TrainingData

USUAL = 4  # channels and outputs of a plan without data


def choose_open_settings(
    config: Config, launcher: Launcher, fingerprint: Fingerprint | None
) -> tuple[Config, dict[str, tuple[str, ...]], TrainingData | None]:
    """Returns the config with group size and batch filled in, why they are these, and the data if it was needed."""
    if config.seqpar == AUTO and config.pipe > 1:
        raise ValueError("--seqpar auto with --pipe: it counts whole networks on each rank: give --seqpar a number")
    data = None
    if not config.tile:
        data = None if fingerprint else task_of(config).open_data(config, launcher.rank == 0)
        config = task_of(config).with_tile(config, fingerprint or data)  # type: ignore[arg-type]
    if config.seqpar != AUTO and config.curriculum and not has_open_lessons(config):
        return *choose_lessons(config, launcher), None
    if config.seqpar != AUTO and config.batch and not config.curriculum:
        return config, {}, data
    if config.seqpar != AUTO and not config.curriculum:
        check_feasible(config)  # before data is prepared
    if not fingerprint and data is None:
        data = task_of(config).open_data(config, launcher.rank == 0)
    source = fingerprint or data
    sizes = sizes_of(source, config)
    if config.curriculum:
        return *choose_lessons(config, launcher, _largest_of(source, config), *sizes), data
    return *choose_group_and_batch(config, launcher, *sizes), data


def config_to_plan(
    config: Config, volume: tuple[int, ...], channels: int | None, outputs: int | None
) -> tuple[Config, int, int]:
    """Returns a config to plan, and how many channels and outputs; data decide on what is not asked for.

    - ``volume``: what takes the tile's place, () for nothing
    - ``channels``, ``outputs``: those that are asked for; None: the data's, or 4
    """
    has_tile = bool(volume or config.tile)
    if has_tile and not config.data:
        return config, channels or USUAL, outputs or USUAL
    try:
        fingerprint = task_of(config).read_headers(config)
    except ValueError as error:
        raise error if config.data else ValueError(f"{error}; or give --tile") from None
    own = sizes_of(fingerprint, config)
    for flag, asked, there in zip(("channels", "classes"), (channels, outputs), own):
        if config.data and asked not in (None, there):
            print(f"planned with --{flag} {asked}, though the network for --data {config.data} has {there}", flush=True)
    config = config if has_tile else task_of(config).with_tile(config, fingerprint)
    return config, channels or own[0], outputs or own[1]


def sizes_of(source: Fingerprint | TrainingData | None, config: Config) -> tuple[int, int]:
    """Returns the channels of the images and the outputs of the network."""
    assert source is not None
    if isinstance(source, Fingerprint):
        return len(source.modalities), len(source.outputs(config.targets))
    return source.num_channels, source.num_outputs


def _largest_of(source: Fingerprint | TrainingData | None, config: Config) -> tuple[int, ...]:
    """Returns the voxels per direction that hold every case; by headers alone before what preparation crops."""
    assert source is not None
    if isinstance(source, Fingerprint):
        return source.largest(PrepareSettings.spaced(config.spacing).spacing)
    shapes = [case.properties.shape for case in source.dataset.cases.values()]
    return tuple(max(sides) for sides in zip(*shapes))
