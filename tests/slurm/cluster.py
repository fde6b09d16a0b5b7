"""A real Slurm on this machine: pretend Frontier nodes, each with a slurmd of its own, on the loopback alone.

Nothing of it needs systemd, munge, cgroups or accounting; it is for tests, since nobody proves who he is.
"""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 300.0  # seconds, for machines with much else to do
CONF = """

ClusterName=pretend
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
SrunPortRange={srun}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
ReturnToService=2
KillWait=30
JobRequeue=1
EnforcePartLimits=ALL
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=DEFAULT Boards=1 SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1 CoreSpecCount=8 RealMemory=512000 \
  Gres=gpu:8 Feature=nvme State=UNKNOWN
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports}
PartitionName=DEFAULT Nodes=ALL MaxTime=02:00:00 DefaultTime=5 State=UP
PartitionName=batch Default=YES OverSubscribe=EXCLUSIVE
PartitionName=shared OverSubscribe=NO
"""


def lacking() -> str:
    """Returns why no Slurm can run here; empty where one can."""
    for program in ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: slurm-wlm)"
    if os.getuid() != 0:
        return "Slurm's daemons start jobs as root only"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _make_device(Path(folder) / "gcd0")
        except OSError as error:
            return f"no device can be made here for a pretend GPU ({error.strerror})"
    return ""


def _make_device(path: Path) -> None:
    """Makes another /dev/null: Slurm takes only a device for a GPU."""
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


class Cluster:
    """Slurm's daemons and what they run; a context manager that ends them all."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, [f"frontier{n:05d}" for n in range(1, nodes + 1)]
        for name in ("state", "spool", "log", "run", "dev"):
            (folder / name).mkdir(parents=True)
        for n in range(8):
            _make_device(folder / "dev" / f"gcd{n}")
        host, port = socket.gethostname().split(".")[0], _free_ports(200)
        ports = {"port": port, "ports": f"[{port + 1}-{port + nodes}]", "srun": f"{port + 100}-{port + 199}"}
        conf = CONF.format(host=host, folder=folder, names=f"frontier[00001-{nodes:05d}]", **ports)
        (folder / "slurm.conf").write_text(conf)
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/dev/gcd[0-7] Flags=amd_gpu_env\n")
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the tests ends the daemons too
        try:
            self._start("slurmctld")
            for node in self.nodes:
                self._start(node)
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *of: object) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        for pid, _ in self._processes("SLURM_CONF", self.env["SLURM_CONF"]):
            with contextlib.suppress(OSError):  # jobs, their shells and their steps' managers
                os.kill(pid, signal.SIGKILL)

    def _start(self, name: str) -> None:
        command = ["slurmctld", "-D"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]
        with open(self.folder / "log" / f"{name}.said", "a") as said:
            self.daemons[name] = subprocess.Popen(command, env=self.env, stdout=said, stderr=said)

    def wait_for_nodes(self) -> None:
        """Waits until every node is idle."""
        wanted = sorted(f"{node} idle" for node in self.nodes)
        self.wait(
            lambda: sorted(set(self.ask("sinfo", "-h", "-N", "-o", "%N %T", check=False).split("\n"))) == wanted,
            "all nodes are idle",
        )

    def wait(self, true: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
        """Returns once something is true."""
        until = time.monotonic() + patience
        while not true():
            assert time.monotonic() < until, f"it never came true that {what}\n{self.report()}"
            time.sleep(0.05)

    def ask(self, *command: str, check: bool = True, **env: str) -> str:
        """Returns what a command said that was given in the repository."""
        env = {**self.env, **env}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.report()}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns what Slurm knows of a job."""
        shown = self.ask("scontrol", "-o", "show", "job", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_for_job(self, number: str) -> str:
        """Returns the exit code of a job once it is over, as Slurm tells it: ``code:signal``."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.job(number)["JobState"] in over, f"job {number} is over")
        return self.job(number)["ExitCode"]

    def ranks(self, job: str, step: str = "launch/train.py") -> dict[int, tuple[int, str]]:
        """Returns process id and node of each rank of a job that is there."""
        places = {}
        for pid, env in self._processes("SLURM_JOB_ID", job):
            with contextlib.suppress(OSError):
                if step in Path(f"/proc/{pid}/cmdline").read_text() and "SLURM_STEP_NODELIST" in env:
                    places[int(env["SLURM_PROCID"])] = (pid, env["SLURMD_NODENAME"])
        return places

    def cut_power(self, node: str, job: str) -> None:
        """Ends a node with all that runs on it at once, so that nothing there hears a signal, and tells Slurm."""
        ranks = [pid for pid, where in self.ranks(job).values() if where == node]
        managers = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in ranks}
        self.daemons[node].kill()
        for pid in (*managers, *ranks):
            os.kill(pid, signal.SIGKILL)
        self.daemons[node].wait()
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")

    def mend(self, node: str) -> None:
        """Brings a node back."""
        self._start(node)
        self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_for_nodes()

    @staticmethod
    def _processes(name: str, value: str) -> Iterator[tuple[int, dict[str, str]]]:
        """Yields the processes that were started with this variable, and their environment."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                entries = path.read_bytes().decode(errors="replace").split("\0")
                env = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                if env.get(name) == value and int(path.parent.name) != os.getpid():
                    yield int(path.parent.name), env

    def report(self) -> str:
        """Returns the queue and the end of the controller's log, for whoever has to find out why."""
        queue = subprocess.run(["squeue"], env=self.env, capture_output=True, text=True).stdout
        return queue + (self.folder / "log/slurmctld.log").read_text(errors="replace")[-1500:]


def _free_ports(count: int) -> int:
    """Returns the first of ``count`` neighbouring ports that nobody uses, below the ephemeral ones."""
    for first in range(30200, 32600, count):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError(f"no {count} neighbouring ports are free")


if __name__ == "__main__":
    print(lacking(), end="")
