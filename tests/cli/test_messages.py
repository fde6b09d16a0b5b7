"""An error of the library names the caller's argument, and the same error at the command line the flag."""

import importlib
import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys

import pytest

from seqpar import Layout, SeqParViT, choose_mode
from seqpar import text as words
from seqpar.cli import predict, train
from seqpar.cluster.exit_codes import SafeStream, run
from seqpar.settings.config import Config
from seqpar.sweeps.sweep_request import require_ray
from seqpar.text import _FLAGS, in_flags

TINY = ["--preset", "debug", "--tile", "16", "--patch", "8", "--device", "cpu", "--workers", "0", "--batch", "2"]


def test_a_wrong_argument_is_named_by_whoever_passed_it(capsys) -> None:
    with pytest.raises(ValueError, match=r"tile=\(30, 30, 30\) is not a multiple of .*: use tile=\(32, 32, 32\)"):
        Layout.of(30, 8)
    assert run(train.act, [*TINY, "--tile", "30"]) == 2
    assert "--tile 30 30 30 is not a multiple of --patch 8 8 8: use --tile 32 32 32" in capsys.readouterr().err

    with pytest.raises(ValueError, match="mlp_chunks=99: a rank holds 8 tokens; choose 1 to 8"):
        SeqParViT(1, 16, 8, 24, 2, 2, mlp_chunks=99)
    assert run(train.act, [*TINY, "--mlp-chunks", "99"]) == 2
    assert "--mlp-chunks 99: a rank holds 8 tokens; choose 1 to 8" in capsys.readouterr().err


def test_a_line_that_a_terminal_cannot_show_is_not_lost() -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    SafeStream(shown).write("predictions of Jürgen\n")
    shown.flush()
    assert shown.buffer.getvalue() == b"predictions of J\\xfcrgen\n"


def test_what_is_printed_to_a_terminal_that_was_closed_is_dropped() -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:  # closing it flushes, as the end of Python does, which then exits with 120
        os.close(ours)
        shown = SafeStream(stream)
        shown.write("left at step 3\n")
        shown.flush()


def test_arguments_and_names_in_backticks_become_flags() -> None:
    with pytest.raises(ValueError, match="mode='broadcast'") as caught:
        choose_mode("broadcast", None)
    assert in_flags(str(caught.value)).startswith("--mode broadcast: choose one of gather")
    assert in_flags("depth=(2, 2, 6): a smaller `num_ranks`, or keep_kv=True") == (
        "--stage-depths 2 2 6: a smaller --seqpar, or --keep-kv"
    )
    assert in_flags("window='whole' with RUN: remove it, or add force=True") == (
        "--window whole with RUN: remove it, or add --force"
    )
    assert in_flags("rank 1: dropout=0.5 and drop_path=1.5") == "rank 1: --dropout 0.5 and --drop-path 1.5"


def test_what_is_no_argument_stays() -> None:
    for text in (
        "/data/tile=3/case.nii.gz: no file",
        "give group=: mesh.seq",
        "RANK=3",
        "`nothing`",
        "key=DropoutKey(1)",
    ):
        assert in_flags(text) == text


def test_every_flag_of_a_message_is_there() -> None:
    predicts = set(predict._parser()._option_string_actions)
    trains = {f"--{name.replace('_', '-')}" for name in Config.__dataclass_fields__}
    assert {f"--{flag}" for flag in _FLAGS.values()} <= trains | predicts


def test_a_checkout_that_is_not_installed_gets_the_command_that_asks_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(words, "version", lambda name: "1.0")
    with pytest.raises(ValueError, match=r"not installed: pip install 'seqpar\[tune\]'; without it, train each point"):
        require_ray()

    def lacking(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(words, "version", lacking)
    with pytest.raises(ValueError, match=r"not installed: pip install -e '\.\[tune\]' in the checkout; without it"):
        require_ray()


def test_ray_without_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise ImportError(f"Can't import {name} as some dependencies are missing.\nMore")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lacking)
    with pytest.raises(ValueError, match=r"all of Ray Tune \(Can't import ray.tune as .* missing\.\): pip install"):
        require_ray()


def test_output_that_is_lost_is_told_and_is_an_error_where_it_is_the_result() -> None:
    """As with a full disk. A training's files hold what its output says."""
    code = (
        "import sys; from seqpar.cluster.exit_codes import run; sys.exit(run(lambda _: print('a plan') or 0, [], {}))"
    )
    for prints_result, expected, kind in ((True, 3, "error"), (False, 0, "warning")):
        with open("/dev/full", "w") as full:
            line = [sys.executable, "-c", code.format(prints_result)]
            ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert ended.returncode == expected, ended.stderr
        told = f"{kind}: what was printed may be incomplete (No space left on device): make room on its disk"
        assert ended.stderr.startswith(told), ended.stderr
