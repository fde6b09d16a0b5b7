"""Draws the pictures of docs/explanation as SVG, from the layouts that the library computes."""

from collections.abc import Iterator

from seqpar.parallel.layout import Layout
from seqpar.spatial.receptive_field import sliding_reach

COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7")  # of ranks 0 to 3; distinct to colour-blind readers
INK, PAPER, PALE = "#1f2328", "#ffffff", "#d0d7de"
RANKS, TOKEN, TOKENS, GAP = 4, 8, 6, 24  # ranks of the group; voxels of a token; tokens a side; between panels


def svg(width: float, height: float, content: Iterator[str], title: str) -> str:
    """Returns a picture on white paper, so that it can be read on dark pages too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    style = f'font-family="sans-serif" font-size="13" fill="{INK}" role="img"'
    lines = [f"{head} {style}>", f"<title>{title}</title>", rect(0, 0, width, height, PAPER), *content, "</svg>", ""]
    return "\n".join(lines)


def rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", more: str = "") -> str:
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} fill="{fill}" stroke="{stroke}"{more}/>'


def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{words}</text>'


BOLD = ' font-weight="bold"'


def owners(layout: Layout) -> dict[tuple[int, ...], int]:
    """Returns which rank holds the token at each place of the grid."""
    ranks = range(layout.num_ranks)
    return {tuple(place): rank for rank in ranks for place in layout.coordinates(rank).tolist()}


def splits_picture() -> str:
    """Returns which rank holds which token of a tile of 6 x 6 x 1, split in both ways."""
    cell, side = 30, 30 * TOKENS
    width, height = 2 * side + 3 * GAP, side + 36 + GAP

    def content() -> Iterator[str]:
        for panel, split in enumerate(("spatial", "ordered")):
            left = GAP + panel * (side + GAP)
            yield text(left + side / 2, 24, f"--split {split}", more=BOLD)
            layout = Layout.of((TOKENS * TOKEN, TOKENS * TOKEN, TOKEN), TOKEN, RANKS, split)
            for (row, column, _), rank in sorted(owners(layout).items()):
                x, y = left + column * cell, 36 + row * cell
                yield rect(x, y, cell, cell, COLOURS[rank], PAPER)
                yield text(x + cell / 2, y + cell / 2 + 5, str(rank))

    return svg(width, height, content(), "Tokens of a tile by rank: boxes, and runs in raster order")


def halo_picture() -> str:
    """Returns the box of rank 0 and the voxels that a convolution of 3 x 3 x 3 fetches for it."""
    cell, side = 18, 18 * 12
    width, height = side + 370, side + 2 * GAP
    layout = Layout.of((12, 12, 2), 2, RANKS)
    edges = layout.voxel_cuts(2)[:2]
    (own, needed), (_, _) = [
        [(cut[0], cut[1]), sliding_reach(cut, 3, 1, (1, 1), "a convolution").needed[0]] for cut in edges
    ]
    places = {place[:2]: rank for place, rank in owners(layout).items()}

    def content() -> Iterator[str]:
        for row in range(12):
            for column in range(12):
                rank = places[row // 2, column // 2]
                inside = own[0] <= row < own[1] and own[0] <= column < own[1]
                fetched = not inside and max(row, column) < needed[1]
                shade = "" if inside or fetched else ' fill-opacity="0.25"'
                yield rect(GAP + column * cell, GAP + row * cell, cell, cell, COLOURS[rank], PAPER, shade)
        reach = (needed[1] - max(needed[0], 0)) * cell
        dashes = ' stroke-width="2" stroke-dasharray="6 4"'
        yield rect(GAP, GAP, reach, reach, "none", INK, dashes)
        yield rect(GAP, GAP, (own[1] - own[0]) * cell, (own[1] - own[0]) * cell, "none", INK, ' stroke-width="2"')
        for rank, x, y in ((0, 3, 3), (1, 9, 3), (2, 3, 9), (3, 9, 9)):
            yield text(GAP + x * cell, GAP + y * cell + 5, f"rank {rank}", more=BOLD)
        lines = (
            "Solid: the box of rank 0, 6 x 6 voxels.",
            "Dashed: what a convolution of 3 x 3 reads",
            "to compute that box.",
            "Between them: the halo. Its voxels come from",
            "the ranks of their colours; in backward, their",
            "gradients go back there and are added.",
        )
        for number, line in enumerate(lines):
            yield text(side + 2 * GAP, GAP + 40 + 22 * number, line, "start")

    return svg(width, height, content(), "The box of one rank and its halo")


def modes_picture() -> str:
    """Returns what each of four ranks decodes in each mode, of a batch of four tiles."""
    tile, space, left = 32, 6, 200
    cell = 2 * tile + space
    modes = {
        "gather": ("b c W D H", "all tiles, on every rank"),
        "halo": ("b c W/s D/s H/s", "a box of all tiles"),
        "swap": ("b/s c W D H", "some of the tiles, whole"),
        "nogather": ("b c W/s D/s H/s", "the same, without a halo"),
    }
    width, height = left + RANKS * (cell + 2 * GAP), 44 + len(modes) * (cell + GAP)
    boxes = owners(Layout.of((2, 2, 1), 1, RANKS))

    def content() -> Iterator[str]:
        for rank in range(RANKS):
            yield text(left + rank * (cell + 2 * GAP) + cell / 2, 26, f"rank {rank}", more=BOLD)
        for number, (mode, (shape, note)) in enumerate(modes.items()):
            top = 44 + number * (cell + GAP)
            yield text(14, top + 18, f"--mode {mode}", "start", BOLD)
            yield text(14, top + 38, shape, "start", ' font-family="monospace"')
            yield text(14, top + 58, note, "start")
            for rank in range(RANKS):
                for sample in range(RANKS):
                    x = left + rank * (cell + 2 * GAP) + sample % 2 * (tile + space)
                    yield from one_tile(x, top + sample // 2 * (tile + space), mode, rank, sample)

    def one_tile(x: float, y: float, mode: str, rank: int, sample: int) -> Iterator[str]:
        is_whole = mode == "gather" or mode == "swap" and sample == rank
        yield rect(x, y, tile, tile, COLOURS[rank] if is_whole else PAPER, INK if is_whole else PALE)
        if mode in ("halo", "nogather"):
            ((row, column),) = [place[:2] for place, owner in boxes.items() if owner == rank]
            half, margin = tile / 2, 4 if mode == "halo" else 0
            dashes = ' stroke-dasharray="2 2"'
            yield rect(x + column * half, y + row * half, half, half, COLOURS[rank], INK)
            if margin:
                yield rect(
                    x + column * (half - margin),
                    y + row * (half - margin),
                    half + margin,
                    half + margin,
                    "none",
                    INK,
                    dashes,
                )

    return svg(width, height, content(), "What each rank decodes in each mode, of a batch of four tiles")


def pictures() -> dict[str, str]:
    """Returns the pictures by the names of their files."""
    return {"splits.svg": splits_picture(), "halo.svg": halo_picture(), "modes.svg": modes_picture()}
