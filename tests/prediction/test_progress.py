"""How far a case is can be seen while it is predicted, validated or prepared."""

import re

import pytest

from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation.prepare_dataset import prepare
from seqpar.prediction.sliding_window import sliding_window, whole_volume
from seqpar.prediction.window_grid import Sliding, WindowGrid
from seqpar.terminal import Display
from tests.support.folders import nnunet
from tests.support.predictions import act, make_run
from tests.support.volumes import TILE, build, joined, volume


def test_each_window_and_each_flip_counts(alone) -> None:
    image, net = volume(13, 14, 9), build(alone)
    for sliding in (Sliding(TILE), Sliding(TILE, mirror=(0,)), Sliding(TILE, batch=3)):
        shares, count = list[float](), len(WindowGrid.of(image.shape[1:], sliding).corners)
        joined(sliding_window([net], image, sliding, alone, shares.append), alone)
        times = -(-count // sliding.batch) * 2 ** len(sliding.mirror)
        assert len(shares) == times > 2 and shares == sorted(set(shares)) and shares[-1] == 1
        assert max(b - a for a, b in zip([0.0, *shares], shares)) <= sliding.batch / count + 1e-9


def test_each_block_of_a_whole_pass_counts(alone) -> None:
    shares, net = list[float](), build(alone)
    blocks = len(net.encoder.blocks)
    for mirror in ((), (1,)):
        shares.clear()
        joined(whole_volume([net], volume(11, 9, 8), alone, mirror, shares.append), alone)
        total = (blocks + 1) * 2 ** len(mirror)
        assert shares[:blocks] == [(n + 1) / total for n in range(blocks)] and shares[-1] == 1
        assert shares == sorted(shares)
    assert not any(block._forward_hooks for block in net.encoder.blocks), "nothing stays behind"


def test_prediction_shows_each_case_and_what_comes_next(images, tmp_path, monkeypatch, capsys) -> None:
    shown = list[str]()
    monkeypatch.setattr(Display, "show", lambda self, fields, milestone=False: shown.append("  ".join(fields)))
    assert act(tmp_path, make_run(tmp_path / "run")) == 0
    for number in range(3):
        own = [line for line in shown if line.startswith(f"case {number + 1}/3 ")]
        shares = [int(re.search(r" (\d+)%", line)[1]) for line in own]  # type: ignore[index]
        assert shares[0] == 0 and shares[-1] == 100 and len(shares) > 2 and shares == sorted(shares)
        assert all(line.endswith(f"  c_{number:03d}") for line in own)
    assert all(re.search(r"(\d+:\d\d|\?) left", line) for line in shown) and "0:00 left" in shown[-1]
    *_, of_evaluate, of_report = capsys.readouterr().out.splitlines()
    assert of_evaluate.startswith("next: python ") and f"evaluate.py TRUTH {tmp_path / 'out'}" in of_evaluate
    assert f"report.py {tmp_path / 'run'} --prediction {tmp_path / 'out'} --images {images}" in of_report


@pytest.mark.parametrize("workers", [0, 2])
def test_preparation_counts_each_file_and_stage_of_a_case(tmp_path, workers: int) -> None:
    in_fifths = {n / 5 for n in range(1, 11)}  # one image, one label, three stages
    after_survey = {0.5, 1.0} | {1 + share / 2 for share in in_fifths}  # which counts half
    for kind, wanted in (("noNorm", in_fifths), ("T1", after_survey), ("CT", after_survey)):
        data, shares = read_dataset(nnunet(tmp_path / kind, 2, channels=(kind,))), list[float]()
        prepare(data, tmp_path / f"{kind}.cache", workers=workers, progress=lambda done, total: shares.append(done))
        assert shares == sorted(shares) and shares[-1] == 2
        if workers == 0:
            assert wanted <= {round(done, 9) for done in shares}
        else:
            assert any(done % 1 for done in shares), "parts of cases count there too"
