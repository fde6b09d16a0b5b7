"""The names of the modes, and the mode of a name."""

from seqpar.decoders.modes.auto import Auto
from seqpar.decoders.modes.gather import Gather
from seqpar.decoders.modes.halo import Halo
from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.nogather import NoGather
from seqpar.decoders.modes.swap import Swap
from seqpar.parallel.mesh import AnyGroup, as_group

_MODES: dict[str, type[Gather] | type[NoGather] | type[Halo] | type[Swap] | type[Auto]] = {
    mode.name: mode for mode in (Gather, NoGather, Halo, Swap, Auto)
}
MODES = tuple(_MODES)


def choose_mode(name: str, group: AnyGroup | None) -> Mode:
    """Returns the mode that brings tokens, image and label to where they are decoded.

    - ``name``: gather (every rank decodes the whole tile), halo (its box), swap (whole samples), auto (swap where the
      batch divides, else halo), or nogather (each rank its part alone, which is not exact)
    - ``group``: the encoder's: ours, torch's ``ProcessGroup`` or a ``DeviceMesh`` of one direction; None: none shares
    """
    if name not in _MODES:
        raise ValueError(f"--mode {name}: choose one of {', '.join(MODES)}")
    return _MODES[name](as_group(group))
