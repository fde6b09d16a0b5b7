"""Runs of networks without tokens: any number of ranks, resumed, in shards, predicted, planned, reported."""

import json
import re
import signal
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest
import torch

import seqpar
from seqpar.cli import plan, predict, report
from seqpar.cluster.exit_codes import USAGE
from seqpar.data.volumes import read_volume
from seqpar.runs.journal import read_metrics
from seqpar.training import after_step
from seqpar.weights.weight_files import read_weights
from tests.support.folders import nnunet, write_json
from tests.support.training_runs import Launch, at, farthest, losses, prepare, scores, signalled, trained

TINY = """
    --preset debug --tile 16 --features 2 --workers 0 --augment none --batch 2 --iterations 4 --epochs 1
    --val-overlap 0 --lr 0.01 --device cpu --precision fp64
"""
DEEP = "--network nnunet-plain --stages 133:111,333:122,333:222,333:211 --deep-supervision --optimizer sgd"
BATCH_NORM = "--network unet-hou --mode halo"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("unets")
    nnunet(root / "Dataset001_Tiny", cases=5)
    line = [*TINY.split(), "--data", str(root / "Dataset001_Tiny"), "--cache", str(root / "cache")]
    prepare(line)
    return line


@pytest.fixture(scope="module")
def deep(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("deep") / "run"
    trained(1, [*flags, *DEEP.split()], out)
    return out


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_weights(run / "model.safetensors")


def apart(run: Path, other: Path) -> float:
    """Returns the largest difference of two runs' weights; biases before norms are nothing but rounding."""
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-3)) for n in theirs)


def test_whole_passes_that_distmis_cannot_make_are_refused_before_the_first_step(flags, tmp_path) -> None:
    run, thin = tmp_path / "run", ["--spacing", "1,1,0.5", "--cache", str(tmp_path / "cache")]
    with Launch(1, [*flags, *thin, "--network", "unet-distmis", "--tile", "8", "--val-window", "both"], run) as launch:
        assert launch.wait() == [USAGE]
        said = launch.said()
    assert re.search(r"error: --val-window both: case c_\d+: .* is always 8: use .* \(--val-window sliding\)", said)
    assert not (run / "metrics.jsonl").exists() and "Traceback" not in said


@pytest.mark.parametrize(
    ("world", "more"), [(2, "--seqpar 2 --mode halo"), (4, "--seqpar 2 --mode swap --batch 2 --accumulate 1")]
)
def test_losses_scores_and_weights_are_those_of_one_process(flags, deep, tmp_path, world, more) -> None:
    """On 2 x 2 ranks each group has half of the tiles a step."""
    alone = deep
    if world == 4:
        trained(1, [*flags, *DEEP.split(), "--batch", "4"], tmp_path / "alone")
        alone = tmp_path / "alone"
    trained(world, [*flags, *DEEP.split(), *more.split()], tmp_path / "run")
    assert farthest(losses(tmp_path / "run"), losses(alone)) <= 1e-9
    assert scores(tmp_path / "run") == scores(alone) and apart(tmp_path / "run", alone) < 1e-8
    row = read_metrics(alone / "metrics.jsonl")[0]
    assert row["voxels_per_s"] > 0 and row["loss"] == pytest.approx(row["dice_loss"] + row["ce_loss"])


def test_batch_norm_is_the_batchs_whoever_holds_it_and_resumes(flags, tmp_path) -> None:
    """Data 2 x seq 2, left after two steps, goes on alone to the weights and statistics of one process."""
    run = [*flags, *BATCH_NORM.split(), "--batch", "2", "--no-batch-dice"]
    trained(1, run, tmp_path / "alone")
    hook = at(after_step.AfterStep, "decide", 1, signalled(signal.SIGUSR1), call=1)
    again = ["--seqpar", "2", "--batch", "1", "--grad-checkpoint", "full"]  # moves no statistics a second time
    trained(4, [*run, *again], tmp_path / "run", expect=75, hook=hook)
    trained(1, ["--resume", "--seqpar", "1"], tmp_path / "run")
    assert farthest(losses(tmp_path / "run"), losses(tmp_path / "alone")) <= 1e-9
    assert apart(tmp_path / "run", tmp_path / "alone") < 1e-8
    state = weights(tmp_path / "alone")
    counted = {int(tensor) for name, tensor in state.items() if name.endswith("num_batches_tracked")}
    assert counted == {4}, "the first forward, which warms up, counts as a batch"


@pytest.mark.started
def test_weights_in_shards_become_what_replicated_ones_become(flags, deep, tmp_path) -> None:
    more = "--seqpar 2 --mode halo --shard-weights --grad-checkpoint full"
    trained(2, [*flags, *DEEP.split(), *more.split()], tmp_path / "run")
    assert farthest(losses(tmp_path / "run"), losses(deep)) <= 1e-9
    assert apart(tmp_path / "run", deep) < 1e-8


@pytest.mark.parametrize("window", ["sliding", "whole"])
def test_predictions_are_the_same_on_two_ranks(flags, deep, tmp_path, window) -> None:
    images = Path(flags[flags.index("--data") + 1]) / "imagesTr"
    line = [str(deep), "-i", str(images), "--window", window, "--device", "cpu"]
    assert predict.act([*line, "-o", str(tmp_path / "one")]) == 0
    with Launch(2, [*line, "-o", str(tmp_path / "two"), "--seqpar", "2"], tmp_path / "unused", act=_predict) as launch:
        assert launch.wait() == [0, 0], launch.said()
    assert "MiB on each rank" in launch.said(0) if window == "whole" else "window" in launch.said(0)
    for path in sorted((tmp_path / "one").glob("*.nii.gz")):
        one, two = (np.asarray(read_volume(tmp_path / name / path.name).array) for name in ("one", "two"))
        assert np.array_equal(one, two)


def _predict(arguments) -> int:
    return predict.act([text for at, text in enumerate(arguments) if "--out" not in (text, arguments[at - 1])])


def test_a_run_is_loaded_reported_and_begun_from(flags, deep, tmp_path) -> None:
    net = seqpar.load_run(deep)
    with torch.no_grad():
        assert net(torch.zeros(1, 1, 15, 16, 20, dtype=torch.float64)).shape == (1, 2, 15, 16, 20)
    assert report.act([str(deep), "--out", str(tmp_path / "page.html")]) == 0
    assert "nnunet-plain from 2 features" in (tmp_path / "page.html").read_text()
    described = json.loads((deep / "config.json").read_text())
    (name,) = described["dataset"]["labels"].keys() - {"background"}
    described["dataset"]["labels"] = {"background": 0, "another": 1, name: 2}
    other = write_json(tmp_path / "renamed" / "config.json", described).with_name("model.safetensors")
    copyfile(deep / "model.safetensors", other)
    more = [*DEEP.split(), "--weights", str(other), "--lr", "1e-30", "--epochs", "1"]
    launch = trained(1, [*flags, *more], tmp_path / "begun")
    assert f"caution: their labels are background, another, {name}, and here background, {name}" in launch.said()
    assert "weights from" in launch.said() and apart(tmp_path / "begun", deep) < 1e-6  # they pass through float32
    with Launch(1, [*flags, *more, "--features", "4"], tmp_path / "other") as refused:
        assert refused.wait() == [2]
    assert "do not fit the U-Net" in refused.said() and "--features" in refused.said()


PLAN = "--network nnunet-plain --preset paper --mode halo --device mi250x --tile 128 --batch 2 --ranks 8"


@pytest.mark.started
def test_a_plan_says_what_a_network_without_tokens_needs(capsys) -> None:
    line = PLAN.split()
    assert plan.act(line) == 0
    said = capsys.readouterr().out
    assert "nnunet-plain, mode halo" in said and "64 cubes of 32x32x32 voxels" in said
    rows = {line.split()[0]: line for line in said.splitlines() if line[:7].strip().isdigit()}
    memory = {size: float(row.split("|")[1].split()[-1].rstrip("!")) for size, row in rows.items() if "|" in row}
    assert memory["8"] < memory["2"] < memory["1"]
    assert "unfused" not in said and "--network nnunet-plain" in said.splitlines()[-1]


def test_the_group_is_chosen_by_memory_for_networks_without_tokens_too(flags, tmp_path) -> None:
    launch = trained(
        1, [*flags, *BATCH_NORM.split(), "--seqpar", "auto", "--batch", "0", "--dry-run"], tmp_path / "run"
    )
    assert "--seqpar 1 is the smallest that fits" in launch.said() and "--batch 2 is usual" in launch.said()
    assert "64 cubes of 4x4x4 voxels; unet-hou from 2 features" in launch.said()
