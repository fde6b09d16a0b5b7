"""Command lines that start from a file which looks like an nnU-Net checkpoint, and holds no U-Net of its plans."""

from pathlib import Path
from typing import Any

import pytest
import torch

from seqpar.cli import plan
from seqpar.models.build import build_network
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from seqpar.training.run_request import read_request
from seqpar.weights import nnssl
from seqpar.weights.pretrained import load_pretrained
from tests.support import references
from tests.support.nnunet_networks import DATASET, configuration, plans_of

FLAGS = """
    --preset debug --tile 16 8 24 --patch 8 --embed-dim 72 --depth 2 --heads 4 --mlp swiglu
    --mlp-ratio 2.6666666666666665
    --attention-norm --positions learned+rope --layer-scale 0.1 --decoder primus --no-output-bias
"""
PRIMUS = {"c": 1, "k": 3, "patch": 8, "grid": (3, 1, 2), "e": 72, "depth": 2, "widths": [32, 16]}
PLANS = plans_of({**configuration("PlainConvUNet"), "patch_size": [24, 8, 16]})


def write_own(path: Path, config: Config) -> None:
    nnssl.write_pretrained(path, build_network(config, 1, 3, Group("seq")), None, ("zscore",), "CC0")


def write_theirs(path: Path, **entries: Any) -> None:
    state = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    torch.save({"network_weights": state, "init_args": {"fold": "all"}, "current_epoch": 1000, **entries}, path)


@pytest.mark.parametrize("kind", ["nnssl", "primus", "own"])
def test_pretrainings_and_primus_start_a_training_from_the_command_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setitem(nnssl.SIZES, "PrimusXS", (72, 2, 4))
    file, launcher = tmp_path / "checkpoint_final.pth", read_launcher({})
    line = [*FLAGS.split(), "--weights", str(file)]
    if kind == "own":
        write_own(file, read_request(FLAGS.split(), launcher).config)
    elif kind == "primus":
        settings = {"plans": PLANS, "configuration": "3d_fullres", "dataset_json": DATASET, "fold": 0}
        write_theirs(file, trainer_name="nnUNet_Primus_M_Trainer", init_args=settings)
    else:
        write_theirs(file, trainer_name="SimMIMEvaTrainer", nnssl_adaptation_plan={"pretrain_patch_size": [24, 8, 16]})
    config = read_request(line, launcher).config
    assert (config.network, config.tile, config.weights) == ("vit", (16, 8, 24), str(file))
    net = build_network(config, 1, 3, Group("seq"))
    assert load_pretrained(net, config).startswith(f"weights from {file} (Primus")
    if kind == "own":
        assert plan.act([*line, "--seqpar", "1", "--device", "a100"]) == 0
        assert "6 tokens" in capsys.readouterr().out
