"""Each figure of the tables in README and launch/README is one of a bench, or in LOG with command and machine."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pages import ROOT

RESULTS = ROOT / "launch" / "lab" / "benches" / "results"
Row = dict[str, str]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table_rows(text: str) -> list[Row]:
    """Returns the rows of all Markdown tables of a text, in order."""
    rows, columns = [], list[str]()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells(line)
            assert set(lines[number + 1]) <= set("|- "), "a table has a line below its head"
        elif set(line) - set("|- "):
            rows.append(dict(zip(columns, cells(line))))
    return rows


def of(subject: str, column: str, **where: object) -> float:
    """Returns a figure of the newest row of a bench in which the columns have these values."""
    every = table_rows((RESULTS / f"{subject}.md").read_text())
    wanted = {name.replace("_", " "): str(value) for name, value in where.items()}
    fitting = [
        row for row in every if all(row.get(name, row.get(name.replace(" ", "_"))) == v for name, v in wanted.items())
    ]
    assert fitting, f"{subject} has no row {wanted}"
    return float(fitting[-1][column].split()[0].rstrip("%"))


def step(column: str, batch: int, mode: str, whose: str = "ours") -> float:
    return of("step", column, net=f"UNETR, {whose}", batch=batch, mode=mode)


def encoder(net: str, ranks: str) -> float:
    return of("encoder", "ratio", net=net, **{"ranks x threads": ranks})


def attention(ranks: int, tokens: int, *strategies: str) -> float:
    """Returns how long ours takes in the time of the quickest of these."""
    rows = [{"measure": "time", "ranks": ranks, "tokens": tokens, "strategy": name} for name in strategies]
    return 1 / min(of("attention", "ratio", **row) for row in rows)


def attention_of_longer(*strategies: str) -> str:
    """Returns the best and worst of the same at 4,096 and 8,192 tokens."""
    every = [attention(ranks, tokens, *strategies) for ranks in (2, 4) for tokens in (4096, 8192)]
    return f"{min(every):.2f} to {max(every):.2f}"


def newest_plans() -> list[Row]:
    return table_rows((RESULTS / "plan.md").read_text().rpartition("## plan (plan),")[2].split("\n## ")[0])


def plan_errors(ranks: int) -> list[float]:
    return sorted(float(row["error to the clock"].rstrip("%")) for row in newest_plans() if row["ranks"] == str(ranks))


def planned_bytes() -> list[float]:
    return sorted(100 * (float(row["planned MB"]) / float(row["alive MB"]) - 1) for row in newest_plans())


def in_log(*words: str) -> bool:
    """Returns whether an entry of LOG has all of these words."""
    entries = re.split(r"\n(?=- |#)", (ROOT / "LOG.md").read_text())
    return any(all(word in " ".join(entry.split()) for word in words) for entry in entries)


def two(*numbers: float) -> str:
    return "; ".join(f"{number:.2f}" for number in numbers)


ULYSSES = ("DeepSpeed Ulysses",)
SPLITS = ((1, "gather"), (1, "halo"), (2, "swap"))
PEER = "batchgenerators, nnU-Net default"
RING = ("torch ring, all-gather", "torch ring, all-to-all")
# how a row of the tables begins → its figures, from where they were measured; None: LOG or a test has them
FIGURES: dict[str, Callable[[], Any] | None] = {
    "loss of each step": None,
    "weights after 10": None,
    "time of forward, loss and backward of UNETR": lambda: two(
        *(step("ratio", *split) for split in SPLITS),
        *(step("ratio", *split) / step("ratio", split[0], "", "monai, memory kept") for split in SPLITS),
    ),
    "what it holds for backward on each of 2 ranks": lambda: two(
        step("saved MB a rank", 1, "halo") / of("step", "saved MB a rank", net="UNETR, monai", batch=1)
    ),
    "time of forward, loss and backward of nnU-Net's plain": lambda: two(
        *(of("unets", "ratio", net=f"nnunet-plain, {ranks}") for ranks in ("1 rank", "2 ranks"))
    ),
    "time of the encoder": lambda: two(
        encoder("ViT 192 x 4, ours", "1 x 2"),
        encoder("ViT 768 x 12, ours", "1 x 2"),
        encoder("ViT 768 x 12, ours", "2 x 1"),
    ),
    "time of attention, 1,024 tokens": lambda: two(
        *(attention(ranks, 1024, *names) for names in (ULYSSES, RING) for ranks in (2, 4))
    ),
    "the same, 4,096 and 8,192 tokens": lambda: "; ".join(attention_of_longer(*names) for names in (ULYSSES, RING)),
    "tiles a second": lambda: "; ".join(
        f"{of('data', 'ratio', pipeline='full') / of('data', 'ratio', pipeline=f'{PEER}, order {order}'):.1f}"
        for order in ("3/1", "1/0")
    ),
    "speed of a whole pass": lambda: "; ".join(
        f"{of('predict', 'times_whole', name=f'sliding {tile}, overlap 0.5'):.1f}" for tile in (96, 64)
    ),
    "a training step on a whole volume": lambda: (
        f"{of('memory', 'peak MiB, all ranks', case='a whole volume of 240 x 240 x 155') / 1024:.1f} GiB"
    ),
    "the planner's bytes": lambda: "; ".join(
        f"{errors[0]:+.0f} to {errors[-1]:+.0f} %" for errors in (planned_bytes(), *map(plan_errors, (1, 2, 4)))
    ),
}
README, PROGRAMS = (ROOT / "README.md").read_text(), (ROOT / "launch" / "README.md").read_text()
MEASURED = [row for page in (README, PROGRAMS) for row in table_rows(page.split("\n## Measured")[1].split("\n## ")[0])]


def test_each_row_of_the_tables_has_a_source() -> None:
    assert all(list(row) == ["what", "figure"] for row in MEASURED)
    starts = [next((start for start in FIGURES if row["what"].startswith(start)), row["what"]) for row in MEASURED]
    assert sorted(starts) == sorted(FIGURES)


@pytest.mark.parametrize("start", [start for start, figures in FIGURES.items() if figures])
def test_each_figure_of_the_tables_is_the_benchs(start: str) -> None:
    (row,) = [row for row in MEASURED if row["what"].startswith(start)]
    figures = FIGURES[start]
    assert figures and row["figure"] == figures(), start


def test_the_figures_elsewhere_are_the_benchs_or_logs() -> None:
    text = " ".join(README.split())
    (minutes,) = re.findall(r"about (\d+) minutes on 2 cores", text)
    (dice,) = re.findall(r"whole tumour: ([\d.]+) in the end", text)
    assert in_log("`make train`", f"{minutes} min", f"whole-tumour Dice {dice}", "2 cores")
    (drift,) = re.findall(r"\| within 1e-9; ([\d.e-]+) \|", README)
    assert in_log("float32, 50 steps", f"{drift} on 4")


def test_a_figure_that_differs_is_seen() -> None:
    assert not in_log("`make train`", "1 min", "2 cores") and two(1 / 3) == "0.33"
    with pytest.raises(AssertionError, match="has no row"):
        of("step", "ratio", net="another net")
