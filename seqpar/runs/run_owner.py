"""RunOwner: the process that holds a run folder, and what shows for certain that it has ended."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

NO_RUN_ID = ("", "none")  # torchrun's without --rdzv-id
FIRST_NAMESPACE = "pid:[4026531836]"  # of processes in no container; Linux has this number fixed
NOT_TOLD = ("", "?")  # when a process started, where the kernel does not say


@dataclass(frozen=True)
class RunOwner:
    """A process with its host, its scheduler's job, and what tells it from others of the same number.

    ``boot`` and ``namespace``: of the kernel and of the container within which ``pid`` has a meaning; ``began``: when
    the process started, in the kernel's clock; all empty where the system does not say. ``attempts``: how often its
    launchers have restarted it, by their own names for it. ``user``: its number, -1 where it was not written down; what
    a launcher says of another user's jobs shows nothing.
    """

    host: str
    pid: int
    machine: str = ""
    boot: str = ""
    namespace: str = ""
    began: str = ""
    job: str = ""
    cluster: str = ""
    chain: str = ""
    user: int = -1
    attempts: dict[str, int] = field(default_factory=dict)
    since: float = 0.0

    @classmethod
    def this_process(cls) -> "RunOwner":
        """Returns this process."""
        env, attempts, namespace = os.environ, dict[str, int](), ""
        job, run_id = env.get("SLURM_JOB_ID", ""), env.get("TORCHELASTIC_RUN_ID", "")
        if job:
            attempts[f"job {job} of {env.get('SLURM_CLUSTER_NAME', '')}"] = _number(env.get("SLURM_RESTART_COUNT"))
        if run_id not in NO_RUN_ID:
            attempts[f"torchrun {run_id}"] = _number(env.get("TORCHELASTIC_RESTART_COUNT"))
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_line("/etc/machine-id"),
            boot=_line("/proc/sys/kernel/random/boot_id"),
            namespace=namespace,
            began=_began(os.getpid()),
            job=job,
            cluster=env.get("SLURM_CLUSTER_NAME", ""),
            chain=env.get("SEQPAR_CHAIN", ""),
            user=os.getuid(),
            attempts=attempts,
            since=time.time(),
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "RunOwner":
        """Returns the owner that `to_json` described; entries of later versions are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` reads."""
        return asdict(self)

    def why_gone(self, now: "RunOwner") -> str:
        """Returns what shows to the process ``now`` that this one has ended, "" where nothing does."""
        if self._shares_numbers_with(now):
            began = _began(self.pid)
            has_ended = not began or began != self.began and not {began, self.began} & {*NOT_TOLD}
            return "which has ended" if has_ended else ""
        in_no_container = self.namespace == now.namespace == FIRST_NAMESPACE  # of containers, several may share a name
        is_one_machine = self.machine and (self.host, self.machine) == (now.host, now.machine)
        if in_no_container and is_one_machine and self.boot and now.boot:
            return "whose machine has been restarted since"
        if self.user != now.user:
            return ""
        if any(now.attempts.get(name, number) > number for name, number in self.attempts.items()):
            return "which its launcher has started again"
        if self.cluster == now.cluster and self.job != now.job:
            if self.chain and self.chain == now.chain:
                return "an earlier job of this chain"  # Slurm starts one after the other (-d singleton)
            if self.job and _job_has_ended(self.job):
                return "whose Slurm job has ended"
        return ""

    def _shares_numbers_with(self, other: "RunOwner") -> bool:
        """Returns whether a process number means the same to both: one kernel, one container."""
        is_one_kernel = self.boot == other.boot and (self.boot or self.host == other.host and not self.namespace)
        return bool(is_one_kernel) and self.namespace == other.namespace

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


def _began(pid: int) -> str:
    """Returns when a process started, "" if there is none; "?" if the kernel does not tell.

    /proc may hide the processes of other users, or be missing.
    """
    with suppress(OSError, ValueError, IndexError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "?"


def _job_has_ended(job: str) -> bool:
    """Returns whether Slurm says that a job does not run; False where it does not answer."""
    try:
        squeue = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return False
    if squeue.returncode:
        return "Invalid job id" in squeue.stderr
    return squeue.stdout.strip() in ("", "PENDING")


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
