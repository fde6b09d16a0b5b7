"""The planner answers with a table and the line to run; what it says of the paper's setting, and of what fits."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.benches.plan import timed_answer
from seqpar.cli import plan
from seqpar.cluster.devices import DEVICES
from seqpar.planner.fit import most_tiles, plans, smallest_that_fits
from seqpar.planner.needs import RunToPlan
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from tests.support.folders import nnunet

ROOT = Path(__file__).parents[2]
# "Long Sequence": ViT-B, tile 96, patch 4, batch 1, fp32; the strategy is left open here
PAPER = replace(PRESETS["paper"](), patch=4, batch=1, attention="auto")
GCD = DEVICES["mi250x"]
SMALL = Config(tile=(16, 16, 16), patch=4, depth=2, embed_dim=24, heads=3, decoder_width=8, batch=1)


def test_the_paper_needs_four_ranks_where_attention_is_not_fused_and_one_here() -> None:
    """Its node has 8 ranks, so that groups are of 1, 2, 4 or 8. One layer's scores: 12 heads x 13,824² x 4 bytes."""
    rows = list(plans(RunToPlan(PAPER, GCD, ranks=8), (1, 2, 4, 8)))
    assert [p.fits_unfused for p in rows] == [False, False, True, True]
    assert [p.fits for p in rows] == [True] * 4
    one_layer = 12 * 13824**2 * 4
    assert rows[0].scores - 12 * one_layer <= 2 * one_layer and rows[0].scores > 12 * one_layer > GCD.memory
    assert rows[1].scores < 0.52 * rows[0].scores


def test_the_command_is_taken_by_train_and_means_the_plan(capsys: pytest.CaptureFixture) -> None:
    arguments = ["--tile", "120", "120", "78", "--patch", "4", "--preset", "modern", "--seqpar", "4", "--no-qkv-bias"]
    assert plan.act([*arguments, "--device", "h200"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.split("\n\n")[1].splitlines())) <= 100, "the table is readable in 100 columns"
    assert "padded to 120x120x80" in said and "18000 tokens" in said
    line = shlex.split(said.strip().splitlines()[-1])
    assert line[:3] == ["torchrun", "--nproc-per-node", "4"] and Path(line[3]).samefile(ROOT / "launch" / "train.py")
    preset, config, _ = parse(line[4:], "debug")
    assert (preset, config.tile, config.seqpar, config.batch) == ("modern", (120, 120, 80), 4, 1)
    assert not config.qkv_bias and config.attention in ("ulysses", "gather-x", "gather-kv", "hybrid:2")


def test_a_presets_warm_up_is_shortened_as_train_does(capsys: pytest.CaptureFixture) -> None:
    line = ["--preset", "modern", "--tile", "32", "--depth", "1", "--device", "h200", "--seqpar", "1"]
    assert plan.act([*line, "--epochs", "5"]) == 0
    said = capsys.readouterr().out
    assert "--warmup 4 instead of the preset's 10: the run has 5 epochs" in said
    _, config, _ = parse(shlex.split(said.strip().splitlines()[-1])[4:], "debug")
    assert (config.warmup, config.epochs) == (4, 5), "the command has it"
    with pytest.raises(ValueError, match="--warmup 5 leaves no epoch of 5"):
        plan.act([*line, "--epochs", "5", "--warmup", "5"])


def test_sizes_that_cannot_be_say_why() -> None:
    config = replace(PAPER, tile=(32, 32, 32), patch=16, depth=1)
    why = {p.config.seqpar: p.why for p in plans(RunToPlan(config, GCD, ranks=32, timed=False))}
    assert "does not divide 32 ranks" in why[3] and "--seqpar 8" in why[16] and not why[8]
    assert "nodes of 8" in {p.config.seqpar: p.why for p in plans(RunToPlan(config, GCD), (6,))}[6]
    assert "--mode swap" in next(plans(RunToPlan(replace(config, mode="swap", batch=3), GCD), (2,))).why


def test_the_smallest_group_that_fits_is_chosen_and_less_memory_takes_more_ranks() -> None:
    run = RunToPlan(PAPER, GCD)
    rows = list(plans(run, (1, 2, 4, 8)))
    needs = [p.total for p in rows]
    assert needs == sorted(needs, reverse=True)
    for p in rows:
        tight = [replace(each, device=replace(GCD, memory=p.total)) for each in rows]
        assert smallest_that_fits(tight).config.seqpar == p.config.seqpar
    assert smallest_that_fits([replace(each, device=replace(GCD, memory=2.0**30)) for each in rows]) is None


def test_the_most_tiles_fill_the_memory() -> None:
    config = replace(PRESETS["paper"](), depth=2, batch=1)
    run = RunToPlan(config, replace(GCD, memory=5 * 2**30), timed=False)
    (one,) = plans(run, (1,))
    tiles = most_tiles(run, one)
    fits, over = (next(plans(replace(run, config=replace(config, batch=n)), (1,))) for n in (tiles, tiles + 1))
    assert 4 < tiles < 32 and fits.fits and not over.fits


def test_channels_and_classes_are_the_datas_unless_others_are_asked_for(capsys, tmp_path: Path) -> None:
    line = ["--tile", "32", "--patch", "8", "--depth", "1", "--seqpar", "1", "--device", "a100"]
    data = ["--data", str(nnunet(tmp_path / "D", 1))]
    for more, counts in (([], "4 channels, 4 classes"), (data, "1 channel, 2 classes"),
                         ([*data, "--classes", "5"], "1 channel, 5 classes")):  # fmt: skip
        assert plan.act([*line, *more]) == 0
        said = capsys.readouterr().out
        assert counts in said and ("planned with --classes 5, though the network for" in said) is ("5" in more)


def test_nothing_that_fits_is_refused_with_what_takes_less() -> None:
    line = "--tile 128 --patch 4 --depth 2 --seqpar 8 --mode halo --memory 1.5 --device a100"
    with pytest.raises(ValueError, match="nothing fits: --seqpar 8 needs .*: try --precision bf16"):
        plan.act(line.split())
    with pytest.raises(ValueError, match="--ranks 12 do not fill nodes of 8: plan for 8 or 16, or say with --node"):
        plan.act(["--ranks", "12", "--device", "a100"])
    with pytest.raises(ValueError, match="--classes 0: it must be in"):
        plan.act(["--classes", "0"])
    with pytest.raises(ValueError, match="--measured nowhere is not what launch/doctor.py writes"):
        plan.act(["--measured", "nowhere", "--device", "a100"])


def test_what_is_kept_can_be_planned_by_every_size() -> None:
    config = replace(PAPER, tile=(32, 32, 32), depth=1, keep_kv=True)
    assert [p.why for p in plans(RunToPlan(config, GCD, timed=False), (1, 2, 4, 8))] == [""] * 4


def doctors(folder: Path, bytes_per_s: float) -> Path:
    """Returns what the doctor of 16 ranks on two nodes writes."""
    kinds = {"all_gather": {"latency_s": 3e-4, "bytes_per_s": bytes_per_s}}
    groups = {name: {"size": size, **kinds} for name, size in (("seq", 4), ("data", 4), ("world", 16))}
    figures = {
        "device": "x",
        "world": 16,
        "nodes": 2,
        "matmul_flops_per_s": {"float32": 10e12, "bfloat16": 80e12},
        "groups": groups,
    }
    file = folder / f"{bytes_per_s:g}.json"
    file.write_text(json.dumps(figures))
    return file


@pytest.mark.started
def test_the_line_starts_as_many_ranks_as_were_planned(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    sizes = ["--tile", "32", "--depth", "1", "--patch", "16"]
    file = str(doctors(tmp_path, 1e9))

    def line(*flags: str) -> str:
        assert plan.act([*sizes, *flags]) == 0
        return capsys.readouterr().out.strip().splitlines()[-1]

    sixteen = line("--ranks", "16", "--seqpar", "4", "--device", "a100")
    assert sixteen.startswith("srun -N 2 --ntasks-per-node 8 python ")
    twelve = ["--ranks", "12", "--seqpar", "4"]
    assert line(*twelve, "--device", "a100", "--node", "4").startswith("srun -N 3 --ntasks-per-node 4 python ")
    assert line(*twelve, "--device", "a100", "--node", "12").startswith("torchrun --nproc-per-node 12 ")
    on_cpu = line("--seqpar", "1", "--device", "cpu")
    assert "--device cpu" in on_cpu and "--device" not in line("--seqpar", "1", "--device", "a100")
    assert f"--measured {file}" in line("--seqpar", "2", "--measured", file, "--device", "a100")


def test_what_is_said_of_sizes_holds_for_those_that_were_looked_at(capsys: pytest.CaptureFixture) -> None:
    sizes = ["--tile", "64", "--depth", "2", "--patch", "4", "--device", "a100", "--memory", "4.6"]

    def said(*flags: str) -> str:
        assert plan.act([*sizes, *flags]) == 0
        return " ".join(capsys.readouterr().out.split())

    alone = said("--seqpar", "1")
    assert "--seqpar 1 fits, with up to" in alone and "without a fused attention kernel, it would not fit" in alone
    two = said("--ranks", "2")
    assert "is the smallest of these that fits" in two and "without a fused attention kernel, none would fit" in two
    assert "without a fused attention kernel, --seqpar 4 would be needed" in said("--ranks", "4")


WITHOUT_COMPILER = """
import gc, sys, torch, weakref
from seqpar.cli import plan
from seqpar.cluster.torch_setup import without_torch_compile

plan.act(sys.argv[1:])
try:
    with without_torch_compile():
        stand_in = weakref.ref(sys.modules["torch._dynamo"])
        torch._dynamo.disable(recursive=False)(type("Class", (), {}))
        torch.optim.Adam([torch.zeros(1)])
        raise KeyError
except KeyError:
    gc.collect()
assert "torch._dynamo" not in sys.modules and stand_in() is None, "whatever happens, nothing is left of it"
with without_torch_compile():
    torch.optim.Adam([torch.zeros(1)])
    assert not hasattr(sys.modules["torch._dynamo"], "__file__")
    assert torch._dynamo.config.cache_size_limit > 0, "where more is asked, the compiler comes"
assert torch._dynamo.__file__
assert plan.act([*sys.argv[1:], "--grad-checkpoint", "full", "--mlp-chunks", "2"]) == 0  # for which it is needed
torch.optim.Adam([torch.zeros(1)])
"""


@pytest.mark.started
def test_the_script_plans_from_any_folder_without_torchs_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench of the planner's first row, on a small plan; importing the compiler would take as long as torch."""
    monkeypatch.chdir(tmp_path)
    flags = "--tile 32 --seqpar 2 --depth 2 --device a100"
    row = timed_answer(flags)
    assert row["exit code"] == 0 and row["sizes counted"] == 1 and 0 < row["first row s"] <= row["whole answer s"]
    assert "train.py" in row["answer"] and "--seqpar 2" in row["answer"]
    line = [sys.executable, "-c", WITHOUT_COMPILER, *flags.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


def test_the_page_shows_a_row_as_it_is_planned_now(capsys):
    page = (ROOT / "docs" / "how-to" / "read-a-plan.md").read_text()
    line = "--tile 240 240 155 --patch 4 --preset modern --device mi250x"
    assert plan.act([*line.split(), "--seqpar", "16"]) == 0
    row = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("    16 "))
    assert f"python launch/plan.py {line}\n" in page and f"\n{row.rstrip()}\n" in page


def test_the_largest_tile_of_a_cpu_is_planned_without_measuring_it(monkeypatch, capsys) -> None:
    """Measuring the convolutions of the largest tiles takes minutes, and their seconds are not printed."""
    monkeypatch.setattr(plan, "measure_cpu", lambda _: pytest.fail("measured"))
    line = ["--largest-tile", "--preset", "debug", "--device", "cpu", "--memory", "1", "--seqpar", "1"]
    assert plan.act(line) == 0
    assert "--seqpar 1: --tile " in capsys.readouterr().out
