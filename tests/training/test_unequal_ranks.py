"""Ranks that were started with other flags or data than the first are refused, on all of them and before they begin."""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from seqpar.cli import predict, train
from seqpar.cluster.exit_codes import USAGE
from tests.support.folders import nnunet
from tests.support.predictions import SMALL, make_run, write_images
from tests.support.training_runs import Launch, prepare, tiny_data


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (["--lr", "0.5", "--seed", "7"], "rank 1 has lr 0.5, seed 7, and rank 0 has lr 0.01, seed 0"),
        (["--data", "Dataset002_Other", "--cache", "other"], "rank 1 finds other data than rank 0 in its --data"),
        (["--workers", "1"], ""),
    ],
    ids=["flags", "data of its host", "workers"],
)
def test_ranks_with_other_flags_or_data_are_refused(tmp_path: Path, second: Sequence[str], says: str) -> None:
    flags = [*tiny_data(tmp_path), "--seqpar", "2", "--epochs", "1"]
    other = nnunet(tmp_path / "Dataset002_Other", cases=5, channels=("T2",))
    second = [str(tmp_path / text) if text in (other.name, "other") else text for text in second]
    for more in ([], second):
        prepare([*flags, *more])

    def act(arguments: Sequence[str]) -> int:
        socket.gethostname = lambda: f"host{os.environ['RANK']}"  # in this process only
        return train.act([*arguments, *(second if os.environ["RANK"] == "1" else ())])

    with Launch(2, flags, tmp_path / "run", act=act) as launch:
        assert launch.wait() == [USAGE if says else 0] * 2, launch.said()
    assert says in launch.said(0)
    assert (tmp_path / "run" / "metrics.jsonl").exists() is not bool(says)


@pytest.mark.parametrize("moves", [True, False], ids=["in another folder", "with another path"])
def test_ranks_of_a_host_on_other_files_are_refused_before_they_wait_for_each_other(
    tmp_path: Path, moves: bool
) -> None:
    flags = [*tiny_data(tmp_path), "--seqpar", "2", "--epochs", "1"]
    flags[flags.index("--data") + 1] = "Dataset001_Tiny"
    for name in ("a", "b"):
        nnunet(tmp_path / name / "Dataset001_Tiny", cases=5)

    def act(arguments: Sequence[str]) -> int:
        is_second = os.environ["RANK"] == "1"
        os.chdir(tmp_path / ("b" if is_second and moves else "a"))
        other = ["--data", str(tmp_path / "b/Dataset001_Tiny")] if is_second and not moves else []
        return train.act([*arguments, *other])

    with Launch(2, flags, tmp_path / "run", act=act) as launch:
        assert launch.wait() == [USAGE] * 2, launch.said()
    places = [tmp_path / name / "Dataset001_Tiny" for name in "ba"]
    assert f"rank 1 has --data {places[0]}, and rank 0 has --data {places[1]}: start all ranks" in launch.said(0)
    assert not (tmp_path / "run/metrics.jsonl").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("run", "more", "says"),
    [
        ("other", [], "rank 1 has other weights than rank 0 in its RUN"),
        ("run", ["--overlap", "0.25"], "rank 1 has overlap 0.25, and rank 0 has overlap 0.5"),
        ("run", [], ""),
    ],
    ids=["weights", "flags", "alike"],
)
def test_ranks_that_predict_otherwise_are_refused(tmp_path: Path, run: str, more: Sequence[str], says: str) -> None:
    images, out = write_images(tmp_path / "images"), tmp_path / "predictions"
    for name, seed in (("run", 0), ("other", 1)):
        make_run(tmp_path / name, config=replace(SMALL, seed=seed))
    line = ["-i", str(images), "-o", str(out), "--device", "cpu"]

    def act(arguments: Sequence[str]) -> int:
        is_second = os.environ["RANK"] == "1"
        return predict.act([str(tmp_path / (run if is_second else "run")), *line, *(more if is_second else ())])

    with Launch(2, [], tmp_path / "unused", act=act) as launch:
        assert launch.wait() == [USAGE if says else 0] * 2, launch.said()
    assert says in launch.said(0) and out.exists() is not bool(says)
