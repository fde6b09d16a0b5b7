"""How the data of a run are prepared, from its settings."""

from dataclasses import replace

from seqpar.data.formats.joined_labels import parse_joins
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.settings.data_settings import DataSettings


def prepare_settings(config: DataSettings) -> PrepareSettings:
    """Returns the settings of preparation; raises ValueError for what cannot be, with the flag."""
    sides = config.crop_to
    if sides and (len(sides) != 3 or min(sides) < 1):
        raise ValueError(f"--crop-to {' '.join(map(str, sides))}: give three sides in voxels, such as 240 240 152")
    return replace(
        PrepareSettings.spaced(config.spacing),
        joins=parse_joins(config.join_labels),
        crop_to=(sides[0], sides[1], sides[2]) if sides else None,
        normalise=config.normalise,
        cut_labels=config.force,
    )
