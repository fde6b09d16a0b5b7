"""What the nodes of a Ray have for the ranks of runs."""

from collections.abc import Mapping, Sequence
from typing import Any


def rank_bundle(nodes: Sequence[Mapping[str, Any]], device: str, gpus_here: bool) -> tuple[bool, int, dict[str, float]]:
    """Returns whether runs are for GPUs, how many devices there are for them, and what Ray reserves for a rank.

    A rank on a GPU has its share of the node's cores, on every node that has GPUs; a head may have none.

    - ``nodes``: as ``ray.nodes`` has them
    - ``device``: that of the runs, as --device has it
    - ``gpus_here``: whether this machine has GPUs
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    of_gpus = [amounts for amounts in alive if amounts.get("GPU", 0) >= 1]
    if device != "cpu" and of_gpus:
        cores = min(int(amounts.get("CPU", 0)) // int(amounts["GPU"]) for amounts in of_gpus)
        return True, sum(int(amounts["GPU"]) for amounts in of_gpus), {"GPU": 1.0, "CPU": float(max(1, cores))}
    if device == "cuda" or (device != "cpu" and gpus_here):
        raise ValueError("the runs are for GPUs, and Ray sees none: add --device cpu, or start Ray with its GPUs")
    return False, max(1, sum(int(amounts.get("CPU", 0)) for amounts in alive)), {"CPU": 1.0}
