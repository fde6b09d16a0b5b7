"""How many ranks share a window in prediction."""

from collections.abc import Sequence

from seqpar.prediction.run_average import Member
from seqpar.quantity import quantity


def fitting_seqpar(members: Sequence[Member], world: int, memory: float) -> tuple[int, str]:
    """Returns how many ranks, of ``memory`` bytes each, share a window; all ranks share a whole volume.

    Then a line where they are fewer because more could not cut a trained tile, "" elsewhere.
    """
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    shared = [size for size in sizes if all(member.run.can_share(size) for member in members)]
    wholes = [member.settings.window == "whole" for member in members]
    groups = zip(members, wholes)
    chosen = max(shared[-1] if whole else member.run.window_group(shared, memory) for member, whole in groups)
    most = world if any(wholes) else max(member.run.config.seqpar for member in members)
    refused = [size for size in sizes if chosen < size <= most and size not in shared]
    if not refused:
        return chosen, ""
    ranks = f"{quantity(world // chosen, 'group')} of {quantity(chosen, 'rank')}"
    return chosen, f"--seqpar {chosen}: {refused[-1]} ranks cannot share the trained tile, so {ranks} predict"
