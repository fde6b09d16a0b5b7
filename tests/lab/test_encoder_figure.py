"""Figure 17 compares encoders of equal size on the same tiles; its words are those of journals that are made up."""

from pathlib import Path

import pytest

import figures
from lab.figures import encoder_figure
from lab.figures.encoder_figure import ENCODER_FIGURE, PLAIN, STAGES, WINDOWS
from lab.figures.equal_parameters import count_parameters
from lab.figures.figure import FigureRequest, runs_of
from lab.figures.paper_figures import SCALES
from seqpar.sweeps.planned_run import config_of
from tests.lab.test_question_figures import made_up


@pytest.mark.parametrize("scale", ["debug", "laptop", "paper"])
def test_encoders_have_equal_parameters_tiles_and_steps(scale: str) -> None:
    """As nearly as a width of the decoder allows, by which that is about as wide as the plain encoder's."""
    runs = runs_of(ENCODER_FIGURE, FigureRequest(scale), SCALES)
    configs = {label: config_of(one) for label, (one,) in runs.items()}
    plain, stages, windows = (configs[label] for label in (PLAIN, STAGES, WINDOWS))
    assert 0.95 < count_parameters(stages) / count_parameters(plain) < 1.05
    assert count_parameters(windows) == count_parameters(stages)
    assert 0.5 <= stages.decoder_width / plain.decoder_width <= 1.5 and windows.decoder_width == stages.decoder_width
    assert (stages.window, windows.window > 0, plain.window) == (0, True, 0)
    same = ("tile", "patch", "steps", "batch", "seqpar", "decoder", "positions", "augment")
    for name in same:
        assert getattr(plain, name) == getattr(stages, name) == getattr(windows, name), name
    assert (plain.encoder, stages.encoder, windows.encoder) == ("plain", "hierarchical", "hierarchical")
    assert runs[WINDOWS][0].settings.get("attention", "none") == "none"  # windows have one way alone
    with pytest.raises(ValueError, match="--embed-dim is what figure 17 compares"):
        runs_of(ENCODER_FIGURE, FigureRequest(scale, {"embed_dim": 96}), SCALES)


def test_verdicts_rank_encoders_by_steps_time_and_memory(tmp_path: Path) -> None:
    """Of arms whose n-th has Dice 0.3 + 0.1 n, memory 100 n and steps of n seconds."""
    results = made_up(17, tmp_path)
    lines = figures.FIGURES[17].judge(results)
    assert lines[0] == "Encoders: parameters: plain 1, hierarchical 2, hierarchical, windows 3"
    assert "hierarchical, windows 0.600; hierarchical, windows is highest, by 0.1" in lines[1]
    assert "to Dice 0.4: plain 4 s (step 4), hierarchical 8 s (step 4), hierarchical, windows 12 s (step 4)" in lines[4]
    assert lines[5].startswith("Encoders: hierarchical, windows differs from hierarchical: largest difference of the D")
    assert lines[6] == "Encoders: hierarchical is the same as plain: largest difference of the training loss 0"
    assert lines[8:] == [
        "Encoders: hierarchical takes of the 1 s and 100 MiB of a plain one's step 2.00 and 2.00",
        "Encoders: hierarchical, windows takes of the 1 s and 100 MiB of a plain one's step 3.00 and 3.00",
    ]
    drawn = encoder_figure.draw(results)
    assert [one.over for one in drawn] == ["step"] * 3 + ["seconds of training"] * 3 and drawn[5].quantity == "Dice"
    assert list(drawn[5].lines[2].places) == [6.0, 12.0]
