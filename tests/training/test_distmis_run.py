"""A run as DistMIS's, small: joined labels, cut volumes, Dice of a sigmoid, replicas, and a part for tests alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from seqpar.cli import evaluate, predict
from seqpar.cluster.exit_codes import USAGE, run
from seqpar.data.volumes import read_volume
from seqpar.models import unet_families
from seqpar.weights.weight_files import read_weights
from tests.support.folders import decathlon
from tests.support.training_runs import Hook, farthest, losses, status, trained

OWN = """
    --preset distmis --fold 50:25:25 --crop-to 16 8 8 --tile 16 8 8 --iterations 4 --epochs 1 --workers 0 --lr 0.01
    --device cpu --val-every 1
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distmis")
    data = decathlon(folder / "Task01_BrainTumour", cases=8)
    trained(1, [*OWN.split(), "--data", str(data), "--cache", str(folder / "cache")], folder / "run")
    return folder


def test_it_learns_one_sigmoid_of_the_joined_labels_and_cases_for_tests_are_in_no_other_part(made: Path) -> None:
    content = json.loads((made / "run" / "config.json").read_text())["dataset"]
    parts = [content[name] for name in ("train", "held_out", "test")]
    assert [len(part) for part in parts] == [4, 2, 2] and len(set(sum(parts, []))) == 8
    assert content["labels"] == {"background": 0, "tumour": 1} and content["recipe"]["crop_to"] == [16, 8, 8]
    rows = [json.loads(line) for line in (made / "run" / "metrics.jsonl").read_text().splitlines()]
    assert set(rows[-1]["dice"]) == {"tumour"} and "dice_loss" in rows[0] and "ce_loss" not in rows[0]
    assert status(made / "run")["state"] == "finished" and len(losses(made / "run")) == 4
    summary = json.loads((made / "run" / "validation" / "summary.json").read_text())
    assert [case["metrics"].keys() for case in summary["metric_per_case"]] == [{"(1, 2, 3)"}] * 2


def test_the_part_for_tests_is_predicted_and_scored_alone(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = made / "Task01_BrainTumour", made / "predictions"
    line = [str(made / "run"), "-i", str(data), "-o", str(out), "--test-part", "--device", "cpu"]
    assert run(predict.act, line) == 0
    tested = json.loads((made / "run" / "config.json").read_text())["dataset"]["test"]
    assert sorted(path.name for path in out.glob("*.nii.gz")) == [f"{case}.nii.gz" for case in tested]
    assert set(np.unique(read_volume(out / f"{tested[0]}.nii.gz")[0])) <= {0, 1}
    capsys.readouterr()
    assert run(evaluate.act, [str(data), str(out), "--test-of", str(made / "run"), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 cases, 1 class: mean Dice" in said and "Dice tumour" in said


def replicas(made: Path, ranks: int, out: Path, hook: Hook | None = None) -> Path:
    """Returns a run of six steps of four volumes, which so many ranks share, at a rate of 0.04 / ranks for each."""
    shares = f"--batch {4 // ranks} --lr {0.04 / ranks} --iterations {6 * ranks} --scale-lr --val-every 0"
    data = ["--data", str(made / "Task01_BrainTumour"), "--cache", str(made / "cache")]
    trained(ranks, [*OWN.split(), *data, "--precision", "fp64", "--amsgrad", *shares.split()], out, hook=hook)
    assert len(losses(out)) == 6
    return out


@pytest.mark.started
def test_replicas_are_one_process_with_as_many_times_the_batch(made: Path, tmp_path: Path) -> None:
    """Six steps of its network, loss and Adam with AMSGrad; without synchronised batch norm they are not."""
    alone = replicas(made, 1, tmp_path / "alone")
    wanted = read_weights(alone / "model.safetensors")
    for ranks in (2, 4):
        shared = replicas(made, ranks, tmp_path / str(ranks))
        assert farthest(losses(shared), losses(alone)) <= 1e-10
        state = read_weights(shared / "model.safetensors")
        assert state.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (state[name] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), name

    def own_norms(rank: int) -> None:
        unet_families.norm_groups = lambda *of: (None, None)

    assert farthest(losses(replicas(made, 2, tmp_path / "own", own_norms)), losses(alone)) > 1e-4


def test_a_run_without_such_a_part_is_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((made / "run" / "config.json").read_text())
    del content["dataset"]["test"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    line = [str(made / "Task01_BrainTumour"), str(tmp_path), "--test-of", str(tmp_path)]
    assert run(evaluate.act, line) == USAGE
    assert "kept no cases for tests: train with three shares" in capsys.readouterr().err
