"""The names of the modes, and the mode of a name."""

from seqpar.decoders.modes.auto import Auto
from seqpar.decoders.modes.gather import Gather
from seqpar.decoders.modes.halo import Halo
from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.nogather import NoGather
from seqpar.decoders.modes.swap import Swap
from seqpar.mesh import Group

_MODES: dict[str, type[Gather] | type[NoGather] | type[Halo] | type[Swap] | type[Auto]] = {
    mode.name: mode for mode in (Gather, NoGather, Halo, Swap, Auto)
}
MODES = tuple(_MODES)


def choose_mode(name: str, group: Group) -> Mode:
    """Returns the mode of that name on ``group``."""
    if name not in _MODES:
        raise ValueError(f"--mode {name}: choose one of {', '.join(MODES)}")
    return _MODES[name](group)
