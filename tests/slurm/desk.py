"""Where the tests hand in jobs: the shipped scripts, a pretend Frontier, and runs of a tiny network on tiny data.

`module`, `sbcast` and `conda-unpack` are stand-ins that note how they were called; all else of Slurm is real. The
pretend nodes have one disk between them where real ones have one each: `tar` unpacks for one node after the other.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.slurm.cluster import PATIENCE, ROOT, Cluster
from tests.support.folders import nnunet

FRONTIER, GENERIC = "launch/slurm/frontier.sbatch", "launch/slurm/generic.sbatch"
TINY = """
    --preset debug --tile 16 --patch 8 --embed-dim 12 --heads 2 --depth 1 --decoder-width 4 --workers 0 --augment none
    --batch 2 --iterations 48 --epochs 1 --mode gather --val-overlap 0 --lr 0.01 --device cpu --seqpar 2 --decoder plain
"""


class Desk:
    """Hands in jobs and watches runs; ``folder`` holds all that they write."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "bin").mkdir()
        self.stub("module", "")
        self.stub("sbcast", 'cp "$2" "$3"')  # sbcast -pf FROM TO
        self.stub("tar", f'exec flock {folder}/tar.lock {shutil.which("tar")} "$@"')
        nnunet(folder / "Dataset001_Tiny", cases=5)
        self.flags = [*TINY.split(), "--data", str(folder / "Dataset001_Tiny"), "--cache", str(folder / "cache")]
        self.env = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SEQPAR_ENV": str(Path(sys.executable).parent.parent),
            "PYTHONPATH": str(ROOT),
            "RANKS_PER_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def stub(self, name: str, act: str) -> Path:
        """Writes a stand-in that notes its arguments."""
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.folder}/stubs.txt\n{act}\n')
        path.chmod(0o755)
        return path

    def submit(self, *arguments: str, **env: str) -> str:
        """Returns the number of a new job; ``arguments`` are sbatch's."""
        logged = ["--parsable", "-o", str(self.folder / "%j.out")]
        return self.cluster.ask("sbatch", *logged, *arguments, **{**self.env, **env})

    def frontier(self, *arguments: str, **env: str) -> str:
        """Returns the number of a job of ``frontier.sbatch`` on two nodes."""
        return self.submit("-N2", FRONTIER, *arguments, **env)

    def chain(self, count: int, *arguments: str) -> list[str]:
        """Returns the numbers of a chain's jobs; ``arguments`` are sbatch's."""
        output = self.cluster.ask("launch/slurm/chain.sh", "-n", str(count), *arguments, **self.env)
        return [line.split()[1] for line in output.splitlines() if line.startswith("job ")]

    def shared(self, ranks: int = 2) -> list[str]:
        """Returns sbatch's arguments for some ranks on a part of the first node, by ``generic.sbatch``."""
        part = f"--ntasks-per-node={ranks} --gpus-per-node={ranks} --cpus-per-task=1"
        return [*["-t", "10", "-p", "shared", "-w", "frontier00001", "-N1"], *part.split(), GENERIC]

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def ended(self, job: str, code: int) -> None:
        """Waits for a job and checks its exit code."""
        self.cluster.wait_for_job(job)
        exit_code = self.cluster.job(job)["ExitCode"]
        assert exit_code == f"{code}:0", f"job {job} ended with {exit_code}:\n{self.log(job)}\n{self.cluster.report()}"

    def hold_at(self, run: Path, job: str, step: int, world: int = 4) -> dict[int, tuple[int, str]]:
        """Returns a job's ranks once the run has done ``step`` steps; the last one is stopped, so that all wait."""
        metrics = run / "metrics.jsonl"

        def there() -> bool:
            said = metrics.read_text() if metrics.exists() else ""
            if said.count('"kind": "train"') < step or len(self.cluster.ranks(job)) != world:
                return False
            return status(run)["state"] == "running"  # a job before it may have gone further

        self.cluster.wait(there, f"job {job} brings {run.name} to step {step}")
        ranks = self.cluster.ranks(job)
        os.kill(ranks[world - 1][0], signal.SIGSTOP)
        assert status(run)["state"] == "running", "the run was over before it could be disturbed"
        return ranks

    def release(self, job: str) -> None:
        """Lets a held rank go on."""
        for pid, _ in self.cluster.ranks(job).values():
            os.kill(pid, signal.SIGCONT)

    def at_once(self, job: str) -> None:
        """Lets a requeued job start soon, which Slurm would hold back for two minutes.

        Not in the second in which it ended: its new credential would count as revoked with the old one.
        """
        waiting = ("PENDING", "BeginTime")
        wait = self.cluster.wait
        wait(
            lambda: (self.cluster.job(job)["JobState"], self.cluster.job(job)["Reason"]) == waiting,
            f"{job} is requeued",
        )
        self.cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")

    def alone(self, act: str, *arguments: str) -> None:
        """Runs an act outside of Slurm, as one process."""
        command = [sys.executable, str(ROOT / "launch" / f"{act}.py"), *arguments]
        done = subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr


def status(run: Path) -> dict:
    return dict(json.loads((run / "status.json").read_text()))


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()
