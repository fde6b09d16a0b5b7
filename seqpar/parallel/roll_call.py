"""The roll call of a start: every rank's host and GPU; a GPU that two ranks have is refused."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from seqpar.parallel.launcher import SHARE_GPU, Launcher
from seqpar.parallel.watchdog import these
from seqpar.quantity import quantity


class Place(NamedTuple):
    """Where a rank runs: its host, and what tells its GPU from others there ("" where it has none of its own)."""

    host: str
    gpu: str = ""


def own_place(launcher: Launcher, device: torch.device, env: Mapping[str, str] = os.environ) -> Place:
    """Returns where this rank runs; without its GPU where ``env`` lets ranks share one."""
    host = launcher.host or socket.gethostname()
    return Place(host, "" if env.get(SHARE_GPU) == "1" else _identity(device))


def _identity(device: torch.device) -> str:
    """Returns uuid and bus of a GPU, those that this torch knows; two dies of a card differ in one of them."""
    if device.type != "cuda":
        return ""
    facts = torch.cuda.get_device_properties(device)
    names = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
    return " ".join(str(getattr(facts, name)) for name in names if hasattr(facts, name))


def roll_call(launcher: Launcher, store: Any, own: Place, timeout_s: float) -> tuple[str, ...]:
    """Returns every rank's host; raises with the names of ranks that never came, or that have one GPU together."""
    keys = [f"host/{rank}" for rank in range(launcher.world)]
    store.set(keys[launcher.rank], json.dumps(own))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:  # DistError is one
        try:
            missing = these([rank for rank, key in enumerate(keys) if not store.check([key])])
        except RuntimeError:  # it counted the ranks, gave up first and names them
            missing = "some, which rank 0 names,"
        raise TimeoutError(
            f"of {launcher.world} ranks, {missing} did not start within {timeout_s:.0f} s; "
            "look at their logs, or start fewer"
        ) from None
    places = [Place(*json.loads(store.get(key))) for key in keys]
    refuse_shared_gpus(places)
    return tuple(place.host for place in places)


def refuse_shared_gpus(places: Sequence[Place]) -> None:
    """Raises where ranks have one GPU together, which NCCL meets by ending the processes; alike on all ranks."""
    ranks_of: dict[Place, list[int]] = {}
    for rank, place in enumerate(places):
        if place.gpu:
            ranks_of.setdefault(place, []).append(rank)
    for place, ranks in ranks_of.items():
        if len(ranks) > 1:
            count = sum(other.host == place.host for other in ranks_of)
            raise ValueError(
                f"{these(ranks)} have one GPU of {place.host} together ({place.gpu.split()[0]}), and each rank needs "
                f"its own: start at most {quantity(count, 'rank')} there, let each see another GPU, or "
                "use --device cpu"
            )
