"""The Ray that a sweep runs on, and what its nodes have."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqpar.cluster.devices import num_devices


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


NODES_S = 300.0
ANSWER_S = 20.0
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # of HTTP/2, and empty settings
OBJECT_STORE_BYTES = 100 * 2**20  # trials share nothing but their settings
# nothing sent, no token in the home folder, no files of Tune's own loggers; Tune's signal handlers are off
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_THRESHOLD_S": "60",
}


@dataclass(frozen=True)
class Cluster:
    """A Ray that is there.

    - ``devices``: GPUs, or cores if there are none or none are wanted; ``on_gpu``: which of both
    - ``bundle``: what Ray reserves for a rank
    - ``own``: processes of a Ray that this process has started, none of a running cluster
    """

    devices: int
    bundle: dict[str, float]
    own: tuple[int, ...] = ()
    on_gpu: bool = False

    def lost(self) -> str:
        """Returns which process of Ray's has ended without being asked to, "" where none has."""
        return next((f"process {pid} of Ray's on this machine has ended" for pid in self.own if not _runs(pid)), "")


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of a running cluster; raises ``ValueError`` for anything but HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"--ray {address}: give the HOST:PORT of a running cluster, or auto for one on this machine")
    return host.strip("[]"), int(port)


def require_answer(address: str, seconds: float = ANSWER_S) -> None:
    """Raises ``ConnectionError`` if nothing at the address speaks gRPC as Ray does; Ray itself waits for minutes.

    - ``address``: HOST:PORT, or auto, which stands for ``$RAY_ADDRESS`` or what Ray finds on this machine
    """
    place = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if not place:
        return
    host, port = split_address(place)
    until = time.monotonic() + seconds
    while why := _silence(host, port, max(0.1, until - time.monotonic())):
        if time.monotonic() > until:
            raise ConnectionError(
                f"--ray {address}: no cluster answers{f' at {place}' if place != address else ' there'} within "
                f"{seconds:g} s ({why}): start one with ray start --head, or give the address of another"
            )
        time.sleep(0.5)  # it may be about to start


def _silence(host: str, port: int, seconds: float) -> str:
    """Returns what shows that no server of gRPC is there, "" if one answers; such servers send their settings first."""
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return ""
            connection.settimeout(seconds)
            connection.sendall(_HELLO)
            answer = connection.recv(9)
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer[3:4] == b"\x04" else "what listens there is not Ray"


@contextmanager
def ray_cluster(address: str, device: str, gpus_here: bool, devices: int = 0, nodes: int = 1) -> Iterator[Cluster]:
    """Yields a Ray, started here or, with an address, running already; one that was started here ends with the block.

    - ``device``: that of the runs, as --device has it
    - ``gpus_here``: whether this machine has GPUs for them; a running cluster may have them where this machine has none
    - ``devices``: how many of this machine's are used; 0: all
    - ``nodes``: how many nodes of a running cluster to wait for
    """
    import ray  # it takes seconds

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    before = _children()
    try:
        if address:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        else:
            count = devices or num_devices(gpus_here)
            amounts = {"num_gpus": count} if gpus_here else {"num_cpus": count, "num_gpus": 0}
            with _other_group():
                ray.init(
                    "local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    object_store_memory=OBJECT_STORE_BYTES,
                    **amounts,
                )
    except Exception as error:  # of a node that is slow to start, Ray raises no other kind
        where = (
            f"--ray {address}: no cluster answers there"
            if address
            else "Ray could not be started here; the same command tries again"
        )
        raise ConnectionError(f"{where} ({str(error).splitlines()[0] if str(error) else error!r})") from None
    try:
        _wait_for(nodes)
        on_gpu, count, bundle = rank_bundle(ray.nodes(), device, gpus_here)
        own = () if address else tuple(sorted(_children() - before))
        yield Cluster(count, bundle, own, on_gpu)
    finally:
        ray.shutdown()


@contextmanager
def _other_group() -> Iterator[None]:
    """Within the block, processes begin in another process group than ours.

    So a signal to our group, as ``timeout`` sends it, reaches this process alone: Ray lives until all runs have saved.
    They ignore a closed terminal, which ends a whole session's leader and its group.
    """
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    home, leader = os.getpgrp(), subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=os.setpgrp)
    try:
        with suppress(OSError):  # who leads a session cannot change its group
            os.setpgid(0, leader.pid)
        yield
    finally:
        with suppress(OSError):
            os.setpgid(0, home)
        leader.kill()
        leader.communicate()
        signal.signal(signal.SIGHUP, hang_up)


def _wait_for(nodes: int) -> None:
    """Returns once the cluster has ``nodes`` nodes; raises ``TimeoutError`` if they do not come."""
    import ray  # it takes seconds

    until = time.monotonic() + NODES_S
    while (count := sum(node["Alive"] for node in ray.nodes())) < nodes:
        if time.monotonic() > until:
            raise TimeoutError(f"--ray-nodes {nodes}: {count} nodes came within {NODES_S:.0f} s")
        time.sleep(0.5)


def _children() -> set[int]:
    """Returns the processes that this one has started and that run; none where the kernel does not say."""
    every = set[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            every |= {int(word) for word in path.read_text().split()}
        except OSError:
            continue
    return {pid for pid in every if _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
