"""Ranks that were started with other flags or data than the first are refused, on all of them and before a step."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from seqpar.cli import train
from seqpar.cluster.exit_codes import USAGE
from tests.support.folders import nnunet
from tests.support.training_runs import Launch, prepare, tiny_data


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (["--lr", "0.5", "--seed", "7"], "rank 1 has lr 0.5, seed 7, and rank 0 has lr 0.01, seed 0"),
        (["--data", "Dataset002_Other", "--cache", "other"], "rank 1 finds other data than rank 0 in its --data"),
        (["--workers", "1"], ""),
    ],
    ids=["flags", "data", "of a host"],
)
def test_ranks_with_other_flags_or_data_are_refused(tmp_path: Path, second: Sequence[str], says: str) -> None:
    flags = [*tiny_data(tmp_path), "--seqpar", "2", "--epochs", "1"]
    other = nnunet(tmp_path / "Dataset002_Other", cases=5, channels=("T2",))
    second = [str(tmp_path / text) if text in (other.name, "other") else text for text in second]
    for more in ([], second):
        prepare([*flags, *more])

    def act(arguments: Sequence[str]) -> int:
        return train.act([*arguments, *(second if os.environ["RANK"] == "1" else ())])

    with Launch(2, flags, tmp_path / "run", act=act) as launch:
        assert launch.wait() == [USAGE if says else 0] * 2, launch.said()
    assert says in launch.said(0)
    assert (tmp_path / "run" / "metrics.jsonl").exists() is not bool(says)
