"""Each figure of the tables in README and docs/explanation/measured.md is a bench's, or in LOG with its machine."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.growth_picture import newest_rows
from tests.support.pages import ROOT, Row, table_rows

RESULTS = ROOT / "launch" / "lab" / "benches" / "results"


def of(subject: str, column: str, **where: object) -> float:
    """Returns a figure of the newest row of a bench in which the columns have these values."""
    every = table_rows((RESULTS / f"{subject}.md").read_text())
    wanted = {name.replace("_", " "): str(value) for name, value in where.items()}
    fitting = [
        row
        for row in every
        if column in row and all(row.get(name, row.get(name.replace(" ", "_"))) == v for name, v in wanted.items())
    ]
    assert fitting, f"{subject} has no row {wanted}"
    return float(fitting[-1][column].split()[0].rstrip("%"))


def step(column: str, batch: int, mode: str, whose: str = "ours") -> float:
    return of("step", column, net=f"UNETR, {whose}", batch=batch, mode=mode)


def to_best(subject: str, ours: dict[str, object], peers: list[str], key: str = "net", **where: object) -> float:
    """Returns the ratio to the quickest of some peers, which are compared in the same turns."""
    rows = [{key: name, **where} for name in peers]
    return of(subject, "ratio", **ours, **where) / min(of(subject, "ratio", **row) for row in rows)


def tuned(name: str) -> list[str]:
    """Returns a peer's rows with freed memory kept: not compiled, and compiled."""
    return [name, f"{name}, compiled"]


def step_to_best(batch: int, mode: str) -> float:
    """Returns the ratio to MONAI's at its best."""
    ours = {"net": "UNETR, ours", "mode": mode}
    return to_best("step", ours, tuned("UNETR, monai, memory kept"), batch=batch)


def encoder(net: str, ranks: str) -> float:
    """Returns the ratio to MONAI's with its fused attention at its best."""
    ours = {"net": f"{net}, ours", "ranks x threads": ranks}
    return to_best("encoder", ours, tuned(f"{net}, monai, flash, memory kept"))


def plain(ranks: str) -> float:
    """Returns the ratio to the quickest other program of nnU-Net's plain network."""
    others = ("dynamic-network-architectures", "torch's own modules", "MONAI DynUNet")
    return to_best("unets", {"net": f"nnunet-plain, {ranks}"}, [row for name in others for row in tuned(name)])


def small(what: str) -> str:
    """Returns the ratios to nnU-Net at its best on one thread and on two."""
    peers = tuned("nnU-Net")
    return two(*(to_best("nnunet", {"by": "ours"}, peers, "by", what=what, threads=n) for n in (1, 2)))


def attention(ranks: int, tokens: int, *strategies: str) -> float:
    """Returns how long ours takes in the time of the quickest of these."""
    rows = [{"ranks": ranks, "tokens": tokens, "strategy": name} for name in strategies]
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


def published(column: str) -> str:
    """Returns by how much plans differ from what nnU-Net published of its networks."""
    table = (RESULTS / "plan.md").read_text().rpartition("## plan (published),")[2].split("\n## ")[0]
    return span(sorted(float(row[column].rstrip("%")) for row in table_rows(table)))


def in_log(*words: str) -> bool:
    """Returns whether an entry of LOG has all of these words."""
    entries = re.split(r"\n(?=- |#)", (ROOT / "LOG.md").read_text())
    return any(all(word in " ".join(entry.split()) for word in words) for entry in entries)


def two(*numbers: float) -> str:
    return "; ".join(f"{number:.2f}" for number in numbers)


def tiles(peer: str) -> str:
    return f"{of('data', 'ratio', pipeline='full') / of('data', 'ratio', pipeline=peer):.1f}"


def span(errors: list[float]) -> str:
    return f"{errors[0]:+.0f} to {errors[-1]:+.0f} %"


ENCODER = "time of the encoder, relative to MONAI's ViT at its best"
ATTENTION = "time of attention, relative to"
TILES, BY_FIRST = "tiles a second with augmentation `full`, relative to", "batchgenerators, nnU-Net default, order"
PEER = "batchgeneratorsv2, nnU-Net default, linear"
WHOLE_PASS = "speed of a whole pass over 240 × 240 × 155, relative to sliding windows"
TO_PEERS = "speed of a whole pass over 240 × 240 × 155, relative to"
PEERS = {
    "nnU-Net's windows of 96, default but not mirrored": "sliding 96, overlap 0.5, nnU-Net",
    "nnU-Net's windows of 96, default (mirrored)": "sliding 96, overlap 0.5, nnU-Net, mirrored",
    "MONAI's windows of 96, default": "sliding 96, overlap 0.25, MONAI",
}
ULYSSES = ("DeepSpeed Ulysses",)
STEP = "time of a UNETR step, relative to MONAI's"
BEST = f"{STEP} at its best"
PLAIN = "time of a step of nnU-Net's plain network, relative to the quickest other program"
SMALL = "nnU-Net's small network, relative to nnU-Net at its best"
SPLITS = {"1 rank": (1, "gather"), "2 ranks in `halo`": (1, "halo"), "2 ranks in `swap`": (2, "swap")}
RING = ("torch ring, all-gather", "torch ring, all-to-all")
# how a row of the tables begins → its figures, from where they were measured; None: LOG or a test has them
FIGURES: dict[str, Callable[[], Any] | None] = {
    "logits, loss and every gradient": None,
    "weights after 10": None,
    "loss of each of 50 steps": None,
    **{f"{STEP}: {name}": (lambda split=split: two(step("ratio", *split))) for name, split in SPLITS.items()},
    **{f"{BEST}: {name}": (lambda split=split: two(step_to_best(*split))) for name, split in SPLITS.items()},
    "memory that a UNETR holds for backward": lambda: two(
        step("saved MB a rank", 1, "halo") / of("step", "saved MB a rank", net="UNETR, monai", batch=1)
    ),
    f"{PLAIN}: 1 rank": lambda: two(plain("1 rank")),
    f"{PLAIN}: 2 ranks": lambda: two(plain("2 ranks")),
    f"time of a training step of {SMALL}": lambda: small("training step"),
    f"time of a prediction of {SMALL}": lambda: small("prediction of 128x128x64"),
    f"{ENCODER}: 4,096 tokens, width 192, 1 rank": lambda: two(encoder("ViT 192 x 4", "1 x 2")),
    f"{ENCODER}: 4,096 tokens, width 192, 2 ranks": lambda: two(encoder("ViT 192 x 4", "2 x 1")),
    f"{ENCODER}: 216 tokens, ViT-B, 1 rank": lambda: two(encoder("ViT 768 x 12", "1 x 2")),
    f"{ENCODER}: 216 tokens, ViT-B, 2 ranks": lambda: two(encoder("ViT 768 x 12", "2 x 1")),
    f"{ATTENTION} DeepSpeed's Ulysses: 1,024 tokens, 2": lambda: two(attention(2, 1024, *ULYSSES)),
    f"{ATTENTION} DeepSpeed's Ulysses: 1,024 tokens, 4": lambda: two(attention(4, 1024, *ULYSSES)),
    f"{ATTENTION} DeepSpeed's Ulysses: 4,096": lambda: attention_of_longer(*ULYSSES),
    f"{ATTENTION} torch's ring: 1,024 tokens, 2": lambda: two(attention(2, 1024, *RING)),
    f"{ATTENTION} torch's ring: 1,024 tokens, 4": lambda: two(attention(4, 1024, *RING)),
    f"{ATTENTION} torch's ring: 4,096": lambda: attention_of_longer(*RING),
    f"{TILES} batchgeneratorsv2": lambda: tiles(PEER),
    f"{TILES} its predecessor batchgenerators with nnU-Net's": lambda: tiles(f"{BY_FIRST} 3/1"),
    f"{TILES} its predecessor batchgenerators with linear": lambda: tiles(f"{BY_FIRST} 1/0"),
    f"{WHOLE_PASS} of 96": lambda: f"{of('predict', 'times_whole', name='sliding 96, overlap 0.5'):.1f}",
    **{
        f"{TO_PEERS} {name}": (lambda row=row: f"{of('predict', 'times_whole', name=row):.1f}")
        for name, row in PEERS.items()
    },
    f"{WHOLE_PASS} of 64": lambda: f"{of('predict', 'times_whole', name='sliding 64, overlap 0.5'):.1f}",
    "error of the planned bytes": lambda: span(planned_bytes()),
    "error of the planned seconds: 1": lambda: span(plan_errors(1)),
    "error of the planned seconds: 2": lambda: span(plan_errors(2)),
    "error of the planned seconds: 4": lambda: span(plan_errors(4)),
    "error of the planned memory of nnU-Net's four networks": lambda: published("error"),
    "error of the planned hours of nnU-Net's four networks": lambda: published("error of hours"),
    "a training step on a whole volume": lambda: (
        f"{of('memory', 'peak MiB, all ranks', case='a whole volume of 240 x 240 x 155') / 1024:.1f} GiB"
    ),
}
README, MEASURED_PAGE = (ROOT / "README.md").read_text(), (ROOT / "docs/explanation/measured.md").read_text()
MEASURED = [
    row for page in (README, MEASURED_PAGE) for row in table_rows(page.split("\n## Measured")[1].split("\n## ")[0])
]


def test_each_row_of_the_tables_has_a_source() -> None:
    assert all(list(row)[:2] == ["what", "figure"] for row in MEASURED)
    starts = [next((start for start in FIGURES if row["what"].startswith(start)), row["what"]) for row in MEASURED]
    assert sorted(starts) == sorted(FIGURES)


@pytest.mark.parametrize("start", [start for start, figures in FIGURES.items() if figures])
def test_each_figure_of_the_tables_is_the_benchs(start: str) -> None:
    (row,) = [row for row in MEASURED if row["what"].startswith(start)]
    figures = FIGURES[start]
    assert figures and row["figure"] == figures(), start


def growth(rows: list[Row], **where: str) -> Row:
    """Returns the one row of the bench of growth with these values; ``of``: how it begins."""
    start = where.pop("of")
    (row,) = [row for row in rows if row["of"].startswith(start) and all(row[k] == v for k, v in where.items())]
    return row


def rounded(*numbers: float) -> list[str]:
    """Returns numbers as the page writes them: two or three digits, no more than needed."""
    return [
        f"{number:.3f}" if number < 0.1 else f"{number:.2g}" if number < 10 else f"{number:.0f}" for number in numbers
    ]


def test_the_tables_of_growth_are_the_benchs() -> None:
    section = MEASURED_PAGE.split("\n## How it grows")[1].split("\n## ")[0]
    rows, told = newest_rows(), table_rows(section)
    names = {"gather-x": "gather-x, projected", "DeepSpeed's Ulysses": "DeepSpeed Ulysses"}
    names |= {f"torch's ring with {way}": f"torch ring, {way}" for way in ("all-gather", "all-to-all")}
    strategies, steps = ([row for row in told if first in row] for first in ("strategy", "voxels a side"))
    for row in strategies:
        name = row["strategy"].replace("`", "").removesuffix(", projections included")
        bench = growth(rows, of=names.get(name, name), ranks="8", grows="ranks")
        expected = f"{float(bench['TFLOP']):.3f}", *(f"{float(bench[c]):.0f}" for c in ("sent MiB", "peak MiB"))
        assert (row["TFLOP a rank"], row["MiB sent"], row["peak MiB"]) == expected, name
    of_8 = [row for row in rows if row["ranks"] == "8" and row["grows"] == "ranks"]
    assert len(strategies) == len(of_8) and len(steps) == 4
    for row in steps:
        side = row["voxels a side"].replace(",", "")
        of = {device: f"step of {side} voxels a side, {device}" for device in ("h100", "mi250x")}
        devices = [
            next(one for one in rows if one["of"].startswith(start) and one["ranks"] == row["ranks"])
            for start in of.values()
        ]
        assert row["tokens"] == f"{int(devices[0]['tokens']):,}"
        assert row["GiB a rank"] == f"{float(devices[0]['peak MiB']) / 1024:.1f}"
        assert [row["s, H100"], row["s, MI250X die"]] == rounded(*(float(one["s"]) for one in devices))
        assert {one["limited by"].split(", ")[0] for one in devices} == {row["what takes most of the time"]}
    prose = " ".join(section.split())
    alone, short, long = (
        growth(rows, of="step of 1024 voxels a side, h100, auto", ranks="64"),
        growth(rows, of="encoder", tokens="1024"),
        growth(rows, of="encoder", tokens="65536"),
    )
    assert f"from {float(short['TFLOP']):.3f} to {float(long['TFLOP']):.0f} TFLOP" in prose
    assert f"from {float(short['peak MiB']):.0f} to {float(long['peak MiB']):,.0f} MiB" in prose
    assert f"on 64 it needs {float(alone['peak MiB']) / 1024:.0f} GiB and {float(alone['s']):.0f} s" in prose
    for name, share in (("gather-kv", "46%"), ("ulysses", "heads: 12 for 512 ranks")):
        bench = growth(rows, of=f"step of 1024 voxels a side, h100, {name}")
        assert f"`{name}` " in prose and f" {rounded(float(bench['s']))[0]} s" in prose and share in bench["limited by"]
    assert growth(rows, of="step of 1024 voxels a side, h100", ranks="8")["limited by"] == "memory: 160 of 75 GiB"


def test_augmentation_is_compared_with_what_nnunet_uses_now() -> None:
    assert of("data", "ratio", pipeline=PEER) == 1


def test_the_figures_elsewhere_are_the_benchs_or_logs() -> None:
    text = " ".join(README.split())
    (minutes,) = re.findall(r"about (\d+) minutes on 2 cores", text)
    (dice,) = re.findall(r"Whole-tumour Dice reaches ([\d.]+\d)", text)
    assert in_log("`make train`", f"{minutes} min", f"whole-tumour Dice {dice}", "2 cores")
    (drift,) = re.findall(r"50 steps on 4 ranks against 1, float32 \| ([\d.e-]+) \|", README)
    assert in_log("float32, 50 steps", f"{drift} on 4")


def test_a_figure_that_differs_is_seen() -> None:
    assert not in_log("`make train`", "1 min", "2 cores") and two(1 / 3) == "0.33"
    with pytest.raises(AssertionError, match="has no row"):
        of("step", "ratio", net="another net")
