"""The published rows beside ours: what the paper's text says of 34 layers are the speed-ups of its rows of 18."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.benches import hybrid
from seqpar.planner.feasibility import check_feasible
from seqpar.settings.config import Config

# as the text has them, for 1 to 8 devices
SAID = {
    "34 layers, sMCI and pMCI": [1, 2.27, 2.62, 3.09, 3.40, 3.78, 4.86, 5.67],
    "34 layers, AD and NC": [1, 2.38, 2.95, 3.44, 3.65, 4.13, 5.17, 5.64],
}
PUBLISHED = {  # accuracies of table 3, on 1 to 8 devices
    "34 layers, sMCI and pMCI": [0.83, 0.84, 0.84, 0.83, 0.84, 0.82, 0.84, 0.84],
    "34 layers, AD and NC": [0.96, 0.96, 0.97, 0.96, 0.97, 0.96, 0.96, 0.96],
}


@pytest.mark.parametrize("case", SAID)
def test_the_speedups_of_the_text_are_those_of_another_row_of_the_table(case: str) -> None:
    said = " ".join(f"{speedup:.2f}" for speedup in SAID[case])
    assert hybrid.speedups(hybrid.MISLABELLED[case]) == said != hybrid.speedups(case)
    (series,) = [one for one in hybrid.series() if case in one.cases]
    row = series.row(case, {case: [hybrid.MINUTES[case]]})
    assert row["what"] == "published, V100" and f"the paper's text says {said}, which are those of 18" in row["remark"]
    assert row["S = T1/Tn"] == hybrid.MINUTES[case][0] / hybrid.MINUTES[case][-1]
    accuracies = " ".join(f"{one:.2f}" for one in PUBLISHED[case])
    assert f"accuracy {accuracies};" in row["remark"] and row["accuracy"] == PUBLISHED[case][-1]


def test_each_published_row_has_minutes_and_an_accuracy_for_1_to_8_devices() -> None:
    assert hybrid.ACCURACIES.keys() == hybrid.MINUTES.keys() and len(hybrid.MINUTES) == 4
    for case, minutes in hybrid.MINUTES.items():
        assert len(minutes) == len(hybrid.ACCURACIES[case]) == 8


def test_runs_are_measured_on_what_is_there() -> None:
    """Each with as many volumes a step."""
    assert list(hybrid.ways_to_measure(1)) == ["one process"]
    assert list(hybrid.ways_to_measure(3)) == ["one process", "data 2", "pipe 2", "seq 2, halo"]
    eight = hybrid.ways_to_measure(11)
    assert {"data 4 x pipe 2", "data 2 x pipe 2 x seq 2, halo", "seq 8, halo", "data 8"} <= eight.keys()
    for case, (ranks, flags) in eight.items():
        own = dict(zip(*[iter(flags.removesuffix(" --mode halo").split())] * 2))
        sizes = [int(own.get(name, 1)) for name in ("--pipe", "--seqpar", "--batch", "--accumulate")]
        pipe, seq, batch, accumulate = sizes
        assert ranks // (pipe * seq) * batch * accumulate == 8, case
        config = Config(task="classify", network="resattnet18", tile=(48, 56, 48), batch=batch, mode="halo")
        check_feasible(replace(config, pipe=pipe, seqpar=seq, accumulate=accumulate, loss="ce"))
    for devices, on_gpu in ((2, False), (4, True)):
        series = hybrid.of_runs(hybrid.Job("resattnet18", 8, 6, (40, 48, 40)), 1, devices, on_gpu)
        row = series.row("data 2", {case: [(1.0 / n, 0.5)] for n, case in enumerate(series.cases, 1)})
        assert row["what"] == f"measured, {'4 GPUs' if on_gpu else '2 cores'}"
        assert (row["S = T1/Tn"], row["S / devices"], row["accuracy"]) == (2, 1, 0.5)


def test_gpus_are_not_told_to_be_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_gpu in (False, True):
        lines = list[str]()

        def start_ranks(ranks: int, act: str, flags: str) -> None:
            lines.append(flags)
            out = Path(flags.split("--out ")[1].split()[0])
            out.mkdir()
            rows = [{"kind": "train", "step": at, "seconds": n} for at, n in enumerate((9, 9, 1, 2, 3))]
            rows.append({"kind": "val", "step": 5, "scores": {"accuracy": 0.75}})
            (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        monkeypatch.setattr(hybrid, "start_ranks", start_ranks)
        series = hybrid.of_runs(hybrid.Job("resattnet18", 8, 5, (16, 16, 16)), 1, 2, on_gpu)
        assert dict(series.measure(1)) == dict.fromkeys(series.cases, (2, 0.75))
        assert all(("--device cpu" in line) != on_gpu for line in lines) and len(lines) == 4


def test_data_and_pipe_are_planned_beside_boxes() -> None:
    """A pipe of two takes less than twice as long for as many volumes, and more than half as long."""
    (one, held), (piped, of_piped) = (hybrid.planned_step("H100", 2 * pipe, pipe, 1) for pipe in (1, 2))
    assert one / 2 < piped < one and 0 < of_piped < held
    ways = {hybrid.in_words(count // (pipe * size), pipe, size) for count, pipe, size in hybrid.PLANNED}
    assert {"data 2 x pipe 2", "data 4 x pipe 2", "data 2 x pipe 4", "data 2 x pipe 2 x seq 2, halo"} <= ways
