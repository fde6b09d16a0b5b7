"""The acceptance program tells wrong results from slow ones. ``.ci/accept`` runs all of it."""

import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqpar.attention import kernels
from seqpar.cli import doctor
from seqpar.cluster.acceptance import networks, program, runs, speed, two_ranks
from seqpar.cluster.acceptance.check import (
    MEASURED,
    RIGHT,
    WRONG,
    Check,
    Ended,
    Error,
    Outcome,
    Site,
    judged,
    run_module,
)
from seqpar.cluster.acceptance.kernels import check_kernels, check_repeats
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.models.build import NETWORKS, layout_of
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import run_ranks


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(torch.device("cpu"), tmp_path)


def test_an_error_beyond_its_bound_or_no_number_is_wrong() -> None:
    fine = {"a": Error(1e-3, 1e-2), "b": Error(0.9e-5, 1e-5)}
    outcome = judged(fine, {"kernels": ["flash"]})
    assert outcome.verdict == RIGHT and "closest to its bound: b 9.0e-06 (at most 1e-05)" in outcome.text
    assert outcome.figures == {"a": 1e-3, "b": 0.9e-5, "kernels": ["flash"]}
    for bad in (2e-2, float("nan"), float("inf")):
        outcome = judged({**fine, "a": Error(bad, 1e-2)})
        json.dumps(outcome.figures, allow_nan=False)
        assert outcome.verdict == WRONG and outcome.text.startswith("a ") and "b" not in outcome.text


def fails(site: Site) -> Outcome:
    raise RuntimeError("no kernel image")


def is_too_large(site: Site) -> Outcome:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("check", "code", "verdict"),
    [
        (lambda site: judged({"x": Error(1.0, 2.0)}), 0, "right"),
        (lambda site: Outcome(MEASURED, "slow: 100 s", {"seconds": 100.0}), 0, "measured"),
        (two_ranks.check_library, 0, "left out"),
        (is_too_large, 0, "left out"),
        (lambda site: judged({"x": Error(3.0, 2.0)}), 1, "wrong"),
        (fails, 1, "wrong"),
    ],
)
def test_the_program_ends_with_1_for_a_wrong_number_and_never_for_a_slow_one(
    check: Callable[[Site], Outcome], code: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("kernels", 1, check), Check("other", 2, fails)]
    assert program.accept("cpu", 1, tmp_path / "record.json", checks) == code
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["parts"]) == ["kernels"] and record["parts"]["kernels"]["verdict"] == verdict
    assert record["versions"]["torch"] == torch.__version__ and record["device"]
    assert verdict in capsys.readouterr().out


def is_killed(site: Site) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_check_that_is_killed_is_wrong_and_the_others_run(tmp_path: Path) -> None:
    checks = [Check("killed", 1, is_killed), Check("next", 1, lambda site: judged({"x": Error(1.0, 2.0)}))]
    assert program.accept("cpu", 1, tmp_path / "record.json", checks) == 1
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert parts["killed"]["verdict"] == WRONG and "SIGKILL" in parts["killed"]["text"]
    assert parts["next"]["verdict"] == RIGHT
    page = (tmp_path / "record.md").read_text()
    assert "2 checks, wrong: killed; left out: none" in page and "| 1 | next | right |" in page


def refuses(*of: torch.Tensor) -> None:
    raise RuntimeError("no plan for this")


def test_a_kernel_that_is_slightly_off_or_fails_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqpar.cluster.acceptance.kernels.LENGTHS", ((37, 53), (8, 512)))
    monkeypatch.setattr("seqpar.cluster.acceptance.kernels.WIDTHS", (8,))
    outcome = check_kernels(site)
    assert outcome.verdict == RIGHT
    assert [name for name in outcome.figures if name.startswith("float32")] == [
        "float32 flash, CPU width 8, 37 x 53",
        "float32 flash, CPU width 8, 8 x 512",
        "float32 plain width 8, 8 x 512",  # not picked: another kernel of the device
    ]
    right = kernels.CPU_FLASH
    wrong = replace(right, _backward=lambda *of: tuple(1.05 * grad for grad in right._backward(*of)))
    monkeypatch.setattr("seqpar.cluster.acceptance.kernels.kernel_for", lambda *of: wrong)
    outcome = check_kernels(site)
    assert outcome.verdict == WRONG and "float32 flash, CPU width 8" in outcome.text
    monkeypatch.setattr("seqpar.cluster.acceptance.kernels.kernel_for", lambda *of: replace(right, _forward=refuses))
    outcome = check_kernels(site)
    assert outcome.verdict == WRONG and "no plan" in outcome.figures["failed"]["float32 flash, CPU width 8, 37 x 53"]


def test_networks_of_every_kind_are_compared_with_float64(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {config.network for config in networks.small_networks().values()}
    assert names == {*NETWORKS} - {*networks.BETWEEN} and {*networks.BETWEEN} < {*NETWORKS}
    few = {
        name: config for name, config in networks.small_networks().items() if name in ("vit, primus", "nnunet-plain")
    }
    monkeypatch.setattr(networks, "small_networks", lambda: few)
    outcome = networks.check_networks(site)
    assert outcome.verdict == RIGHT and len(outcome.figures) == 2 * 3 * 2
    assert 0 < outcome.figures["nnunet-plain, fp32, logits"] < 1e-4


def test_operations_of_a_step_are_counted(site: Site) -> None:
    outcome = networks.count_a_step(site)
    assert outcome.verdict == MEASURED and min(outcome.figures.values()) >= 0
    assert outcome.figures["launches"] > 100 and 100 < outcome.figures["launches planned for a GPU"] < 1000


def on_two_ranks(mesh: Mesh) -> tuple[dict[str, float], dict[str, int]]:
    some = "halo, ulysses", "swap, gather-kv", "halo, nnunet-resenc"
    return two_ranks.errors_of_modes(mesh, some), two_ranks.wrong_types(mesh)


def test_two_ranks_are_compared_with_one_process_in_every_mode_and_type() -> None:
    assert {f"{mode}, {name}" for mode in ("gather", "halo", "swap") for name in ("gather-kv", "ulysses")} <= {
        *two_ranks.cases()
    }
    for config in two_ranks.cases().values():
        layout_of(config)  # is large enough for two ranks
    first, second = run_ranks(2, on_two_ranks)
    assert len(first[0]) == 3 and all(0 < error < 1e-10 for error in first[0].values()) and second[0] == {}
    for _, types in (first, second):
        assert types["int16"] == types["bool"] == 0 and not any(types.values())


def test_on_a_gpu_what_has_not_begun_in_its_parts_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "pick_device", lambda *of: torch.device("cuda"))
    monkeypatch.setattr(program, "device_name", lambda of: "a GPU")
    monkeypatch.setattr(program, "PART_S", program.SHORTEST_S + 2.0)

    def is_slow(site: Site) -> Outcome:
        time.sleep(max(0.0, site.left_s - program.SHORTEST_S + 0.01))
        return Outcome(MEASURED, "slow")

    def has_no_end(site: Site) -> Outcome:
        time.sleep(60)
        raise AssertionError

    checks = [Check("slow", 1, is_slow), Check("late", 1, fails), Check("of another part", 2, is_slow)]
    assert program.accept("auto", 0, tmp_path / "record.json", checks) == 0
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert [each["verdict"] for each in parts.values()] == ["measured", "left out", "measured"]
    assert "left out: late" in capsys.readouterr().out
    monkeypatch.setattr(program, "SHORTEST_S", 0.0)
    monkeypatch.setattr(program, "PART_S", 1.0)
    assert program.accept("auto", 0, None, [Check("without end", 1, has_no_end)]) == 0
    assert "did not end within the 1 s of part 1" in capsys.readouterr().out


def test_a_program_that_does_not_end_is_ended_and_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = site.folder / "sleeper"
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # in a job too they start their own ranks
    sleeper.write_text('#!/bin/sh\necho "asleep in job $SLURM_JOB_ID."\nexec sleep 60\n')
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    ended = run_module("cli.train", [], site, 1.0)
    assert (
        ended.code is None
        and ended.seconds < 10
        and "did not end in time" in str(ended)
        and "asleep in job ." in str(ended)
    )


def test_a_run_that_cannot_begin_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = site.folder / "refusing"
    refusing.write_text("#!/bin/sh\necho 'error: no place'\nexit 3\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(refusing))
    began = time.monotonic()
    outcome = runs.check_stops(site)
    assert time.monotonic() - began < 60 and outcome.verdict == WRONG
    assert "stopped: ended with code 3" in outcome.text and "rank lost: ended with code 3" in outcome.text
    assert "error: no place" in outcome.text


def test_a_run_that_lacks_steps_is_no_equal(site: Site) -> None:
    fine, lost = Ended(0, "", 1.0), Ended(1, "", 1.0)
    whole = runs.Trained(fine, [1.0, 0.5])
    assert runs.Trained(fine, [1.0, 0.5]).apart(whole) == 0.0
    assert runs.Trained(fine, [1.0, 0.4]).apart(whole) == pytest.approx(0.2)
    for other in (runs.Trained(fine, [1.0]), runs.Trained(lost, [1.0, 0.5]), runs.Trained(fine, [])):
        assert other.apart(whole) == float("inf") == other.averaged(2).apart(whole.averaged(1))
    assert runs.Trained(fine, [1.0, 0.5, 2.0]).averaged(2).losses == [0.75, 2.0]


def test_a_run_in_which_nothing_was_compiled_shows_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = runs.Trained(Ended(0, "", 1.0), [1.0, 0.5])
    monkeypatch.setattr(runs, "train", lambda *of: trained)
    monkeypatch.setattr(runs.shutil, "which", str)
    assert runs.check_compiled(site).verdict == WRONG
    (site.folder / "inductor").mkdir()
    (site.folder / "inductor" / "kernel.py").touch()
    assert runs.check_compiled(site).verdict == RIGHT


def test_attention_is_timed_by_kernel_and_by_heads_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TURNS", 1)
    outcome = speed.measure_attention(site)
    assert set(outcome.figures["heads_at_a_time"]) == {"1", "2", "4"}
    assert isinstance(outcome.figures["math"], float) and outcome.verdict == MEASURED


def test_the_page_next_to_the_record_replaces_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes, record = tmp_path / "a.md", tmp_path / "a.json"
    notes.write_text("# My notes")
    os.mkfifo(tmp_path / "pipe")
    for file, code, why in (
        (record, DATA, f"{notes}: is there, and doctor did not write it: name another file by --json"),
        (notes, USAGE, f"the page for people would replace it: name it {record}"),
        (tmp_path / "pipe", DATA, f"{tmp_path}/pipe: is no file (but a pipe, socket or device)"),
    ):
        assert run(doctor.act, ["--accept", "--json", str(file)]) == code
        assert why in capsys.readouterr().err
    assert notes.read_text() == "# My notes" and not record.exists()
    assert program.accept("cpu", 1, tmp_path / "b.json", []) == 0
    checks = [Check("kernels", 1, lambda site: Outcome(MEASURED, "fast"))]
    assert program.accept("cpu", 1, tmp_path / "b.json", checks) == 0
    assert (tmp_path / "b.md").read_text().startswith(program.PAGE)


def test_job_scripts_that_are_there_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(doctor.act, ["--job-scripts", str(tmp_path)]) == 0
    (tmp_path / "launch" / "slurm" / "generic.sbatch").write_text("edited")
    assert run(doctor.act, ["--job-scripts", str(tmp_path)]) == 2
    assert f"{tmp_path}/launch/slurm exists: name another folder" in capsys.readouterr().err
    assert (tmp_path / "launch" / "slurm" / "generic.sbatch").read_text() == "edited"


def test_job_scripts_on_a_full_disk_leave_nothing_half(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(source: Path, target: Path) -> None:
        (target / source.name).touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr(shutil, "copy", full)
    assert run(doctor.act, ["--job-scripts", str(tmp_path)]) == 3
    assert f"{tmp_path}/launch/slurm: cannot be written (No space left" in capsys.readouterr().err
    assert not (tmp_path / "launch" / "slurm").exists()


def test_flags_that_go_with_the_other_use_of_the_doctor_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, why in (
        ("--part 2", "--part would do nothing: it names a part of --accept"),
        ("--accept --seqpar 2", "--seqpar would do nothing: --accept starts its own ranks"),
        ("--accept --json /no/folder/x", "its folder does not exist"),
        ("--accept --part 4", "invalid choice"),
        ("--job-scripts . --out runs", "--out would do nothing: --job-scripts only writes files"),
    ):
        assert run(doctor.act, line.split()) == 2
        assert why in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert run(doctor.act, ["--accept"]) == 2
    assert "--accept starts its own ranks, but 2 were started" in capsys.readouterr().err


def test_bits_that_differ_from_time_to_time_are_wrong(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = check_repeats(site)
    assert outcome.verdict == RIGHT and set(outcome.figures.values()) == {0.0}
    assert not torch.are_deterministic_algorithms_enabled()  # for the checks after it

    def drifts(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.rand(3),)

    monkeypatch.setattr("seqpar.cluster.acceptance.kernels._attention", drifts)
    outcome = check_repeats(site)
    assert outcome.verdict == WRONG and outcome.text.startswith("attention ")
