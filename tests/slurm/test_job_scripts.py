"""The job scripts without a cluster: they parse, and a chain goes on or ends as status.json says.

Stand-ins replace srun, sbatch and scancel here; tests/slurm runs the same scripts on a real Slurm.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from seqpar.cluster import exit_codes
from seqpar.data.files import write_json
from seqpar.parallel.launcher import Launcher
from seqpar.runs.run_folder import describe_run
from seqpar.training import run_request

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "launch" / "slurm"


def scripts() -> Iterator[Path]:
    """Yields every shell script that git knows, or would."""
    listing = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for path in (ROOT / name for name in names if name):
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:40].split(b"\n")[0].endswith(b"bash"):
            yield path


def test_every_shell_script_parses() -> None:
    paths = sorted(scripts())
    assert {"frontier.sbatch", "generic.sbatch", "chain.sh", "link.sh", "run", "slurm"} <= {path.name for path in paths}
    for path in paths:
        process = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (Debian: shellcheck)")
def test_shellcheck_finds_nothing_in_any_shell_script() -> None:
    process = subprocess.run(["shellcheck", *sorted(scripts())], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout


class Jobs:
    """Runs link.sh as a chain's jobs do, with a stand-in for srun that does as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "bin").mkdir()
        for name in ("srun", "scancel", "sbatch", "squeue", "scontrol"):
            stub = folder / "bin" / name
            stub.write_text(f'#!/bin/bash\necho "$*" >> {folder}/{name}.txt\nsleep 0.02\n. {folder}/{name}.act\n')
            stub.chmod(0o755)
        for name in ("scancel", "scontrol"):
            (folder / f"{name}.act").touch()
        (folder / "squeue.act").write_text("echo 8; echo 9\n")  # the chain's next two jobs
        (folder / "sbatch.act").write_text(f"wc -l < {folder}/sbatch.txt\n")
        self.env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}

    def job(self, code: int, state: str = "", said: int = 0, verdict: int = 0, step: int = 0, flags: str = "") -> int:
        """Returns the exit code of a job in which srun ends with ``code``; ``said`` is status.json's code."""
        status = json.dumps({"state": state, "step": 9, "why": '"code": 2, "state": "none"', "code": said}, indent=2)
        acts = [
            f"echo {verdict} > $SEQPAR_VERDICT" if verdict else "",
            f"mkdir -p {self.run}/checkpoints; echo step-{step} > {self.run}/checkpoints/latest" if step else "",
            f"cat > {self.run}/status.json <<'END'\n{status}\nEND" if state else "",
            f"touch {self.run}/config.json; exit {code}",
        ]
        (self.folder / "srun.act").write_text("\n".join(acts))
        line = ["srun", "-n4", "python", "launch/train.py", *flags.split(), "--out", str(self.run)]
        env = {**self.env, "SEQPAR_CHAIN": "c"}
        return subprocess.run(["bash", SLURM / "link.sh", *line], env=env, capture_output=True).returncode

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


@pytest.mark.parametrize(
    "ends, code",
    [
        (dict(code=75, state="preempted", said=75), 75),
        (dict(code=143, state="preempted", said=75), 75),  # a rank was still on its way out
        (dict(code=137, state="running"), 137),  # killed: nobody could write
        (dict(code=143), 143),  # before there was a status
        (dict(code=137, state="failed", said=1), 1),  # its peers' loss
    ],
)
def test_a_chain_goes_on_after_a_loss_and_a_preemption(jobs: Jobs, ends: dict[str, int], code: int) -> None:
    assert jobs.job(**ends) == code
    assert jobs.calls("scancel") == []
    assert jobs.job(code=0, state="finished") == 0
    assert [call.endswith("--resume") for call in jobs.calls("srun")] == [False, True]


@pytest.mark.parametrize(
    "ends, code",
    [
        (dict(code=0, state="finished"), 0),
        (dict(code=143, state="finished"), 0),
        (dict(code=2), 2),
        (dict(code=143, verdict=2), 2),  # a rank that was still starting was ended by a signal
        (dict(code=75, verdict=3), 3),
        (dict(code=143, state="failed", said=3), 3),
        (dict(code=137, state="failed", said=4), 4),
        (dict(code=5, state="failed", said=5), 5),
        (dict(code=143, state="failed", said=130), 130),
    ],
)
def test_a_chain_ends_when_a_run_has_ended_or_would_fail_again(jobs: Jobs, ends: dict[str, int], code: int) -> None:
    assert jobs.job(**ends) == code
    assert jobs.calls("scancel")[0].endswith("--name c --state PENDING")
    assert jobs.job(code=0, state="finished") == 0  # where scancel could not reach it
    assert len(jobs.calls("srun")) == 1


def test_what_was_written_when_the_batch_shell_was_killed_is_read_by_the_next_job(jobs: Jobs) -> None:
    for state, said, more in (("preempted", 75, 1), ("running", 0, 1), ("failed", 4, 0), ("finished", 0, 0)):
        shutil.rmtree(jobs.run, ignore_errors=True)
        before = len(jobs.calls("srun"))
        jobs.job(code=0, state=state, said=said)
        text = (jobs.run / "jobs.txt").read_text()
        (jobs.run / "jobs.txt").write_text(text.splitlines()[0] + "\n")  # as if it had ended there
        os.utime(jobs.run / "jobs.txt", (1, 1))
        jobs.job(code=0, state="finished")
        assert len(jobs.calls("srun")) - before == 1 + more, state


def test_a_chain_ends_after_three_jobs_without_a_new_checkpoint(jobs: Jobs) -> None:
    codes = [jobs.job(code=137, step=step) for step in (4, 8, 8, 8, 8, 8)]
    assert codes == [137] * 5 + [0] and len(jobs.calls("srun")) == 5


def test_a_chain_of_fine_tuning_jobs_goes_on_with_the_line_that_began_it(jobs: Jobs, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(1)}, weights)
    flags = f"--preset debug --weights {weights}"
    for _ in range(2):
        jobs.job(code=75, state="preempted", said=75, flags=flags)
    first, second = jobs.calls("srun")
    assert second == f"{first} --resume"
    began = run_request.read_request(first.split()[3:], Launcher("alone"))
    write_json(jobs.run / "config.json", describe_run(began.config, began.preset, {}, {"data": 1}))
    weights.unlink()  # a saved run needs it no more
    assert run_request.read_request(second.split()[3:], Launcher("alone")).config.resume


def test_a_chain_of_five_folds_goes_on_while_any_of_them_does(jobs: Jobs) -> None:
    """Three jobs in a row find other checkpoints of the folds, and no config.json but those in their folders."""
    for fold in range(4):
        checkpoints = jobs.run / f"fold{fold}" / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "latest").write_text("step-100\n")
        (jobs.run / f"fold{fold}" / "config.json").touch()
        assert jobs.job(code=75, state="preempted", said=75) == 75
        (jobs.run / "config.json").unlink()
    assert [call.endswith("--resume") for call in jobs.calls("srun")] == [True] * 4 and jobs.calls("scancel") == []
    assert (jobs.run / "jobs.txt").read_text().splitlines()[2].startswith("step-100" * 3 + " job 7")


def test_a_chain_waits_longer_each_time_for_another_training_in_the_run_folder(jobs: Jobs) -> None:
    def starts() -> list[str]:
        return jobs.calls("scontrol")[-2:]

    for number in range(4):  # more than the jobs in a row that bring a run no further
        assert jobs.job(code=6 if number else 143, verdict=6, step=4) == 6
        assert starts() == [f"update JobId={job} StartTime=now+{10 * 2**number}minutes" for job in (8, 9)]
    assert jobs.job(code=143, state="preempted", said=75, step=8) == 75
    for minutes in [10 * 2**number for number in range(7)] + [1440] * 2:
        jobs.job(code=6, verdict=6, state="failed", said=4, step=8)  # the other training's end
        assert starts()[0].endswith(f"=now+{minutes}minutes")
    assert jobs.calls("scancel") == [] and len(jobs.calls("scontrol")) == 2 * 13
    assert not list(jobs.run.glob("verdict*"))
    jobs.job(code=6, verdict=6, state="finished", step=8)
    os.utime(jobs.run / "status.json", (1e10, 1e10))  # the other ended after this job was refused
    jobs.job(code=0)
    assert len(jobs.calls("srun")) == 15, "what the other has finished, no job begins again"


def test_a_job_that_is_refused_leaves_the_verdict_of_the_one_that_runs_alone(jobs: Jobs) -> None:
    began, go = jobs.folder / "began", jobs.folder / "go"
    other = {**jobs.env, "SEQPAR_CHAIN": "c", "SLURM_JOB_ID": "6"}
    (jobs.folder / "srun.act").write_text(f"touch {began}; until [ -e {go} ]; do sleep 0.05; done; exit 143")
    line = ["bash", str(SLURM / "link.sh"), "srun", "launch/train.py", "--out", str(jobs.run)]
    with subprocess.Popen(line, env=other) as running:
        while not began.exists():
            time.sleep(0.02)
        assert jobs.job(code=6, verdict=6) == 6
        go.touch()
        assert running.wait() == 143 and jobs.calls("scancel") == []


def test_a_verdict_of_an_earlier_chain_does_not_count(jobs: Jobs) -> None:
    jobs.job(code=3, state="failed", said=3)
    (jobs.run / "jobs.txt").unlink()  # what chain.sh does
    assert jobs.job(code=137) == 137  # lost before it could write anything
    jobs.job(code=0, state="finished")
    assert len(jobs.calls("srun")) == 3


def test_a_single_job_gets_a_run_folder_that_a_requeue_finds(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "srun.act").write_text("exit 75")
    env = {**jobs.env, "SLURM_JOB_NAME": "seqpar"}
    done = subprocess.run(["bash", SLURM / "link.sh", "srun", "x/train.py", "--patch", "4"], env=env, cwd=tmp_path)
    assert done.returncode == 75 and jobs.calls("srun") == ["x/train.py --patch 4 --out runs/seqpar-7"]
    assert jobs.calls("scancel") == []
    done = subprocess.run(["bash", SLURM / "link.sh", "srun", "x/predict.py", "RUN"], env=env, cwd=tmp_path)
    assert jobs.calls("srun")[1:] == ["x/predict.py RUN"], "other acts are passed on as they are"


def test_chain_submits_all_its_jobs_under_the_runs_own_name(jobs: Jobs, tmp_path: Path) -> None:
    def chain(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", SLURM / "chain.sh", *arguments], env=jobs.env, cwd=tmp_path, capture_output=True, text=True
        )

    script = str(SLURM / "frontier.sbatch")
    done = chain("-n", "3", "-N", "2", script, "--patch", "4", "--out", "run")
    assert done.returncode == 0 and "scancel --name" in done.stdout
    first, *others = jobs.calls("sbatch")
    assert others == [first] * 2 and "-N 2" in first and "-d singleton" in first
    assert first.endswith(f"{script} --patch 4 --out run")
    chain(script, f"--out={tmp_path}/other")
    names = {call.split("-J ")[1].split()[0] for call in jobs.calls("sbatch")}
    assert len(names) == 2 and len(jobs.calls("sbatch")) == 13
    for wrong in ([], [script], ["-n", "x", script, "--out", "run"], ["-n"], ["nothing.sbatch", "--out", "run"]):
        done = chain(*wrong)
        assert done.returncode == 2 and "usage: chain.sh" in done.stderr, wrong
    assert len(jobs.calls("sbatch")) == 13
    (tmp_path / "weights.pt").touch()
    mistyped = {
        "launch/slurm/fronteir.sbatch --weights weights.pt --out run": "no job script launch/slurm/fronteir.sbatch",
        "-n 3 -A abc -p batch --mem=0 frontier --out run": "no job script frontier",
        f"{script} --data DATA": "error: --out RUN is needed",
        f"-n x {script} --out run": "error: -n x: a number of jobs is needed",
        "-N2 generic.sbatch --out run": "no job script generic.sbatch",
        "--exclusive frontier --out run": "none of these is a job script that is there: --exclusive frontier --out run",
    }
    for typed, problem in mistyped.items():
        done = chain(*typed.split())
        assert done.returncode == 2 and problem in done.stderr and "usage: chain.sh" in done.stderr, typed
    assert len(jobs.calls("sbatch")) == 13 and not (tmp_path / "other" / "run").exists()


def test_chain_keeps_what_jobs_said_until_slurm_takes_the_next_ones(jobs: Jobs, tmp_path: Path) -> None:
    said, line = tmp_path / "run" / "jobs.txt", [SLURM / "generic.sbatch", "--out", "run"]

    def chain() -> tuple[int, str]:
        done = subprocess.run(["bash", SLURM / "chain.sh", *line], env=jobs.env, cwd=tmp_path, capture_output=True)
        return done.returncode, done.stderr.decode()

    said.parent.mkdir(exist_ok=True)
    said.write_text("my jobs\n")
    assert chain() == (3, "error: run/jobs.txt is there, and no chain wrote it: name another folder by --out\n")
    assert said.read_text() == "my jobs\n" and not jobs.calls("sbatch")
    said.write_text(of_jobs := "step-100 job 7 restart 0 on node1, today\nover: ended with code 3\n")
    (tmp_path / "sbatch.act").write_text("exit 1")
    assert chain()[0] == 1 and said.read_text() == of_jobs
    (tmp_path / "sbatch.act").write_text("echo 8")
    assert chain()[0] == 0 and not [path for path in said.parent.iterdir() if "jobs" in path.name]


class Node:
    """Runs job scripts as on a node, with stand-ins: srun runs its line, apptainer the line in an image, each noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "env" / "bin").mkdir(parents=True)
        for name, act in {
            "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
            "apptainer": 'while [ "${1##*.}" != sif ]; do shift; done; shift; INSIDE=1 exec "$@"',
            "python": 'echo "inside ${INSIDE:-no}, ${MIOPEN_USER_DB_PATH:+own} cache" >> "$NOTED/python"; exit 3',
            "ray": 'echo "inside ${INSIDE:-no}" >> "$NOTED/ray"; [ "$1" = health-check ] || exec sleep 60',
            "module": "",
        }.items():
            self.stand_in(name, act)
        self.env = {
            "PATH": f"{folder}/env/bin:{os.environ['PATH']}", "NOTED": str(folder), "SEQPAR_ENV": str(folder / "env"),
            "SEQPAR_HOME": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS": "2",
            "SLURM_PROCID": "0", "HOME": str(folder), "USER": "me", "SLURM_SUBMIT_DIR": str(folder),
            "nnUNet_raw": str(folder / "env"),
        }  # fmt: skip

    def stand_in(self, name: str, act: str) -> None:
        path = self.folder / "env" / "bin" / name
        path.write_text(f'#!/bin/bash\necho "$*" >> {self.folder}/{name}\n{act}\n')
        path.chmod(0o755)

    def run(self, script: str, **env: str) -> subprocess.CompletedProcess:
        for name in ("srun", "apptainer", "python", "ray"):
            (self.folder / name).unlink(missing_ok=True)
        what = ["--space", "lr=1"] if script == "tune.sbatch" else ["doctor", "--pipe", "2"]
        line, env = ["bash", str(SLURM / script), *what], {**self.env, **env}
        return subprocess.run(line, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60)

    def noted(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("script", ["generic.sbatch", "frontier.sbatch", "tune.sbatch"])
def test_with_an_image_every_program_of_a_job_runs_in_it_and_without_one_none(script: str, tmp_path: Path) -> None:
    node, act = Node(tmp_path), "tune" if script == "tune.sbatch" else "doctor"
    image = tmp_path / "seqpar.sif"
    plain = node.run(script)
    assert plain.returncode == 3 and node.noted("apptainer") == [], plain.stderr
    assert f"-u {ROOT}/launch/{act}.py" in node.noted("python")[0] and "inside no" in node.noted("python")[1]
    gone = node.run(script, SEQPAR_IMAGE=str(image))
    assert gone.returncode == 2 and gone.stderr.count("\n") == 1 and "there is no such file: build it" in gone.stderr
    assert str(image) in gone.stderr and node.noted("srun") == [] == node.noted("python"), "refused before srun"
    image.touch()
    assert "unset SEQPAR_ENV_TAR" in node.run(script, SEQPAR_IMAGE=str(image), SEQPAR_ENV_TAR="env.tar.gz").stderr
    for probe, flag in (("rocm-smi", "--rocm "), ("nvidia-smi", "--nv ")):
        node.stand_in(probe, "")
        done = node.run(script, SEQPAR_IMAGE=str(image), SEQPAR_BIND="/data,/scratch")
        assert done.returncode == 3, done.stderr
        for call in node.noted("apptainer"):
            assert call.startswith(f"exec {flag}--bind {tmp_path},/data,/scratch") and f",{tmp_path}/env " in call
            assert f"--pwd {tmp_path} {image} " in call
        started, told = node.noted("python")
        assert started.startswith(f"-u -P -m seqpar.cli.{act} ") and told.startswith("inside 1")
        assert told.endswith(", own cache") or act == "tune"
        assert {line for line in node.noted("ray") if "inside" in line} == ({"inside 1"} if act == "tune" else set())
        (tmp_path / "env" / "bin" / probe).unlink()
    node.run(script, SEQPAR_IMAGE=str(image), SEQPAR_IMAGE_FLAGS="--cleanenv --no-home")
    assert all(call.startswith("exec --cleanenv --no-home --bind") for call in node.noted("apptainer"))
    (tmp_path / "env" / "bin" / "apptainer").unlink()
    bare = node.run(script, SEQPAR_IMAGE=str(image), PATH=f"{tmp_path}/env/bin:/usr/bin:/bin")
    assert bare.returncode == 2 and "no apptainer on" in bare.stderr and node.noted("srun") == []


def test_a_sweep_that_ends_at_once_gives_its_exit_code(tmp_path: Path) -> None:
    node, slow = Node(tmp_path), tmp_path / "slow.sh"
    slow.write_text('kill() { sleep 0.5; builtin kill "$@"; }\n')  # the sweep has ended by then
    done = node.run("tune.sbatch", BASH_ENV=str(slow))
    assert (done.returncode, done.stderr) == (3, "")


def test_definitions_of_images_name_their_parts_and_what_they_copy_is_there() -> None:
    for path in (SLURM / "seqpar-cuda.def", SLURM / "seqpar-rocm.def"):
        head, *parts = re.split(r"^%(\w+)\n", path.read_text(), flags=re.M)
        sections = dict(zip(parts[::2], parts[1::2]))
        assert head.startswith("Bootstrap: docker\nFrom: {{ BASE }}\n")
        assert {*sections} == {"arguments", "files", "post", "environment", "test", "runscript", "help"}
        (base,) = re.findall(r"^    BASE=(\S+)$", sections["arguments"], re.M)
        assert re.fullmatch(r"docker\.io/(pytorch/pytorch@sha256:[0-9a-f]{64}|rocm/pytorch:rocm[\d.]+_\S+[\d.]+)", base)
        for source, target in (line.split() for line in sections["files"].strip().splitlines()):
            assert (ROOT / source).exists() and target == f"/opt/seqpar/{source}"
        for script in ("post", "test", "runscript", "environment"):
            assert subprocess.run(["sh", "-n"], input=sections[script], text=True).returncode == 0
        assert (ROOT / sections["post"].split("/opt/seqpar/")[1].strip()).exists()


def test_a_users_error_is_written_down_before_a_rank_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arguments: object) -> int:
        raise ValueError("no")

    monkeypatch.setenv("SEQPAR_VERDICT", str(tmp_path / "verdict"))
    assert exit_codes.run(lambda arguments: exit_codes.PREEMPTED, []) == 75 and not (tmp_path / "verdict").exists()
    assert exit_codes.run(refuse, []) == 2
    assert exit_codes.run(lambda arguments: exit_codes.DATA, []) == 3
    assert (tmp_path / "verdict").read_text() == "2\n", "the first rank's counts"
