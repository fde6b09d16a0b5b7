"""Runs that are too large for the free memory, refused before step 1, and runs that were killed, named afterwards."""

import json
import signal
import socket
from dataclasses import replace
from html import escape

import pytest
import torch

from seqpar.cli import evaluate, export, predict, report, train
from seqpar.cluster import exit_codes
from seqpar.cluster.host_memory import Memory
from seqpar.parallel.launcher import Launcher
from seqpar.planner import memory_check
from seqpar.planner.chooser import plan_here
from seqpar.runs.run_owner import RunOwner
from seqpar.runs.run_status import describe_kill
from seqpar.settings.config import Config
from seqpar.settings.presets import debug
from seqpar.training import gradients, setup
from tests.support.ranks import alone_mesh
from tests.support.training_runs import Launch, at, die, status, trained

GIB = 2**30
FREE = (6 * 2**20, 3 * 2**20)  # bytes, as two ranks of one host see it, at slightly different times


def test_a_run_beyond_the_free_memory_is_refused_on_all_ranks_before_step_1(flags, tmp_path) -> None:
    def hook(rank: int) -> None:
        setup.refuse_beyond_free = memory_check.refuse_beyond_free
        memory_check.memory_here = lambda: Memory(FREE[rank], GIB, "the limit of control group /job")

    out = tmp_path / "run"
    with Launch(2, [*flags, "--seqpar", "2", "--batch", "64"], out, hook) as launch:
        assert launch.wait() == [4, 4], launch.said()
    why = status(out)["why"]
    assert (status(out)["state"], status(out)["code"], status(out)["step"]) == ("failed", 4, 0)
    assert launch.said().count(why) == 1 and "Traceback" not in launch.said()
    assert "too little memory for the first step: a rank needs" in why
    assert "3.0 MiB free for its 2 ranks, 1.5 MiB each (of 1.00 GiB, the limit of control group /job)" in why
    assert "use --batch" in why and "--accumulate" in why
    assert not (out / "metrics.jsonl").exists() and not list(out.glob("lock*"))


SMALL = replace(
    debug(), batch=2000, tile=(16, 16, 16), depth=1, embed_dim=48, heads=2, decoder="plain", decoder_width=4
)


def refusal(config: Config, free: float) -> str:
    """Returns why a config is refused where so many bytes are free, "" where it is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "memory_here", lambda: Memory(int(free), 64 * GIB))
        try:
            memory_check.refuse_beyond_free(config, alone_mesh(), 4, 4)
        except exit_codes.TooLittleMemory as error:
            return str(error)
    return ""


def needed(config: Config) -> float:
    """Returns the bytes that a process alone needs for a step, without those that libraries have taken already."""
    need = plan_here(replace(config, device="cpu"), Launcher("test"), 4, 4)
    return sum(size for name, size in need.memory.items() if name != "apart")


@pytest.mark.started
def test_what_the_refusal_advises_fits_and_the_next_larger_does_not() -> None:
    """A batch of 2000 where a twentieth of its memory is free."""
    free = needed(SMALL) / 20
    words = refusal(SMALL, free).split()
    batch, accumulate = int(words[words.index("--batch") + 1]), int(words[words.index("--accumulate") + 1])
    assert batch * accumulate == 2000 and 40 <= batch <= 100
    larger = min(size for size in range(batch + 1, 2001) if 2000 % size == 0)
    assert needed(replace(SMALL, batch=batch)) <= free < needed(replace(SMALL, batch=larger))
    pooled = refusal(replace(SMALL, batch_dice=True), free)
    assert f"use --batch {batch}" in pooled and "--accumulate" not in pooled
    resumed = refusal(replace(SMALL, batch_dice=True, resume=True), free)
    assert "try more sequence groups, " in resumed and "--batch" not in resumed


def test_where_a_tile_does_not_fit_what_keeps_the_numbers_is_advised_and_then_what_does_not(monkeypatch) -> None:
    one = replace(SMALL, batch=1, tile=(32, 32, 32), patch=(4, 4, 4), embed_dim=24, depth=24)
    need = needed(one)
    assert refusal(one, 1.01 * need) == ""
    assert refusal(one, 0.7 * need).endswith("use --mlp-chunks 8")
    assert needed(replace(one, mlp_chunks=8)) <= 0.7 * need
    monkeypatch.setattr(memory_check, "memory_savings", lambda config, named: ())
    assert "try --precision bf16, a " in refusal(one, 0.7 * need)


def test_what_fits_is_planned_once_and_what_runs_on_a_gpu_is_not(monkeypatch) -> None:
    counted, planned = [], memory_check.plan_complete_config
    monkeypatch.setattr(memory_check, "plan_complete_config", lambda *of: counted.append(of) or planned(*of))
    monkeypatch.setattr(memory_check, "largest_batch", None)
    assert refusal(SMALL, 16 * GIB) == "" and len(counted) == 1
    alone = alone_mesh()
    on_gpu = replace(alone, device=torch.device("cuda", 0))
    memory_check.refuse_beyond_free(SMALL, on_gpu, 4, 4)
    assert len(counted) == 1  # its allocator says itself when its memory is out


def test_a_killed_run_is_named_by_every_later_command_until_it_goes_on(flags, tmp_path, capfd) -> None:
    out = tmp_path / "run"
    with Launch(
        1, [*flags, "--checkpoint-minutes", "1e-9"], out, at(gradients.Gradients, "_backward", 0, die, 4)
    ) as one:
        assert one.wait() == [-signal.SIGKILL] and status(out)["state"] == "running"
    process = f"process {one.pids[0]} on {socket.gethostname()}, which has ended; the last step that it recorded is 3"
    sentence = f"{out} was killed: its status.json says running, but it was held by {process}"
    nowhere, page = str(tmp_path / "none"), tmp_path / "page.html"
    for act, line in (
        (predict.act, [str(out), "-i", nowhere, "-o", nowhere]),
        (evaluate.act, [nowhere, str(out / "validation")]),
        (export.act, [str(out), str(tmp_path / "run.zip")]),
        (report.act, [str(out), "--out", str(page)]),
        (train.act, [*flags, "--out", str(out)]),
        (train.act, ["--resume", "--dry-run", "--out", str(out)]),
    ):
        exit_codes.run(act, line)
        assert sentence in capfd.readouterr().err, act.__module__
    assert ">Killed</span>" in page.read_text() and escape(sentence) in page.read_text()
    again = trained(1, ["--resume"], out)
    assert again.said().count(sentence) == 1 and describe_kill(out) == ""
    assert exit_codes.run(report.act, [str(out), "--out", str(page)]) == 0
    assert "killed" not in capfd.readouterr().err and ">Finished</span>" in page.read_text()


def test_a_run_is_called_killed_only_where_that_is_certain(tmp_path) -> None:
    assert describe_kill(tmp_path / "none") == "" == describe_kill(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"state": "running"}))
    killed = "was killed: its status.json says running, but no process holds it; it recorded no step"
    assert describe_kill(tmp_path) == f"{tmp_path} {killed}"
    lock = tmp_path / "lock-1.json"
    this = RunOwner.this_process()
    lock.write_text(json.dumps(this.to_json()))
    assert describe_kill(tmp_path) == ""  # it lives
    lock.write_text(json.dumps(replace(this, host="node7", machine="m7", boot="b7").to_json()))
    assert describe_kill(tmp_path) == ""  # nothing shows that it does not
    lock.write_text("")
    assert describe_kill(tmp_path) == ""  # it is just being written
    lock.write_text(json.dumps(replace(this, began="0").to_json()))
    assert f"held by process {this.pid}" in describe_kill(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"state": "preempted"}))
    assert describe_kill(tmp_path) == ""
