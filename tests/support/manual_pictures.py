"""Draws the manual's pictures from the code and the pages; ``reference_pages`` writes them."""

import re
from collections.abc import Callable, Iterator, Sequence

from seqpar.parallel.layout import Layout
from seqpar.pipeline.schedule import SCHEDULES, Act, StageSeconds, make_timetable
from seqpar.pipeline.stages import StageMap
from tests.support.drawing import COLOURS, Drawing
from tests.support.growth_picture import growth
from tests.support.pages import page


def owners(layout: Layout) -> list[int]:
    """Returns the rank that holds each token, in raster order."""
    return list(map(int, layout.owner.flatten()))


def tokens_of_ranks(drawing: Drawing, left: float, top: float, layout: Layout, cell: int = 20) -> None:
    """Draws a flat tile, each token in the colour of the rank that holds it."""
    width, depth = layout.grid
    for number, rank in enumerate(owners(layout)):
        drawing.rect(left + number % depth * cell, top + number // depth * cell, cell - 2, cell - 2, COLOURS[rank])


def split() -> Drawing:
    """Which tokens of a tile each of four ranks holds, split into boxes or in order."""
    drawing = Drawing(600, 225, "Tokens of a tile on four ranks: boxes (split spatial), or in order (split ordered)")
    for left, name, words in ((20, "spatial", "boxes: --split spatial"), (210, "ordered", "in order: --split ordered")):
        drawing.text(left, 24, words)
        tokens_of_ranks(drawing, left, 40, Layout.of((60, 64), (10, 8), 4, name))
    for rank, colour in enumerate(COLOURS):
        drawing.rect(400, 44 + 28 * rank, 16, 16, colour)
        drawing.text(422, 57 + 28 * rank, f"rank {rank}")
    drawing.text(
        20, 190, "One square is a token, such as 8 × 8 × 8 voxels. A tile has three directions; two are drawn.", "small"
    )
    drawing.text(
        20, 210, "Boxes have short borders. Convolutions exchange the voxels next to these borders, the halo.", "small"
    )
    return drawing


def halo() -> Drawing:
    """A rank's box, and the voxels that a convolution of 3 × 3 × 3 fetches from neighbours."""
    drawing = Drawing(
        560, 245, "The box of one rank and its halo: one voxel from each neighbour, for a convolution of 3 × 3 × 3"
    )
    layout = Layout.of((12, 12), (1, 1), 4)
    (low, high), (left, right) = layout.box(0)
    cell = 16
    for number, rank in enumerate(owners(layout)):
        row, column = divmod(number, 12)
        near = row <= high and column <= right
        own = low <= row < high and left <= column < right
        shade = 'opacity="1"' if own else f'opacity="{0.75 if near else 0.22}"'
        drawing.rect(20 + column * cell, 40 + row * cell, cell - 2, cell - 2, COLOURS[rank], shade)
    drawing.text(20, 24, "What rank 0 needs to convolve its box")
    for at, (opacity, words) in enumerate(
        (
            (1.0, "its own voxels"),
            (0.75, "the halo, fetched from ranks 1, 2 and 3"),
            (0.22, "voxels that it does not need"),
        )
    ):
        fill = COLOURS[0] if at == 0 else COLOURS[1]
        drawing.rect(236, 60 + 30 * at, 16, 16, fill, f'opacity="{opacity}"')
        drawing.text(260, 73 + 30 * at, words)
    drawing.text(236, 180, "In backward, the gradients of the halo", "small")
    drawing.text(236, 196, "go back and are added where they came from.", "small")
    return drawing


def groups() -> Drawing:
    """Eight ranks as two sequence groups of four."""
    drawing = Drawing(640, 240, "Eight ranks with seqpar 4: two sequence groups, each with a tile of its own")
    layout = Layout.of((16, 16), (8, 8), 4)
    for group in range(2):
        left = 40 + 280 * group
        drawing.text(left, 24, f"sequence group {group}: one tile")
        for place, rank in enumerate(owners(layout)):
            x, y = left + place % 2 * 110, 40 + place // 2 * 70
            drawing.rect(x, y, 106, 66, COLOURS[rank])
            drawing.text(x + 53, y + 38, f"rank {4 * group + rank}", "on", "middle")
    drawing.arrow(262, 108, 314, 108)
    drawing.arrow(314, 120, 262, 120)
    drawing.text(20, 206, "Within a group, ranks exchange keys, values and halos in every layer.", "small")
    drawing.text(
        20,
        226,
        "Between groups, gradients are averaged once per step. Ranks of the same colour form a data group.",
        "small",
    )
    return drawing


def modes() -> Drawing:
    """What each of two ranks decodes of a batch of two tiles, by mode."""
    drawing = Drawing(
        640, 240, "What each of two ranks decodes of two tiles in the modes gather, halo, swap and nogather"
    )
    for at, (mode, words) in enumerate(
        (
            ("gather", "all of both"),
            ("halo", "its box, with a halo"),
            ("swap", "one whole tile"),
            ("nogather", "its box alone"),
        )
    ):
        left = 90 + 138 * at
        drawing.text(left, 24, mode)
        drawing.text(left, 42, words, "small")
        for rank in range(2):
            for tile in range(2):
                x, y = left + 58 * tile, 60 + 74 * rank
                drawing.rect(x, y, 50, 50)
                if mode == "gather" or (mode == "swap" and tile == rank):
                    drawing.rect(x, y, 50, 50, COLOURS[rank])
                elif mode != "swap":
                    drawing.rect(x + 25 * rank, y, 25, 50, COLOURS[rank])
                    if mode == "halo":
                        drawing.rect(x + (25 if rank == 0 else 19), y, 6, 50, COLOURS[1 - rank], 'opacity="0.75"')
    for rank in range(2):
        drawing.text(20, 90 + 74 * rank, f"rank {rank}")
    drawing.text(
        20, 226, "Squares are the tiles of a batch. gather, halo and swap give the result of one process.", "small"
    )
    return drawing


def memory() -> Drawing:
    """Memory on each rank against the number of ranks that share a tile, from the plan on the page about plans."""
    text = page("how-to/read-a-plan").read_text()
    rows = [(int(ranks), float(total)) for ranks, total in re.findall(r"^ +(\d+) \S+ +\|.*?([\d.]+)  \|", text, re.M)]
    drawing = Drawing(
        520, 40 + 34 * len(rows) + 40, "Planned memory on each rank, by the number of ranks that share a tile"
    )
    drawing.text(20, 24, "GiB on each rank, ViT-B on a whole volume of 240 × 240 × 155")
    for at, (ranks, total) in enumerate(rows):
        y = 40 + 34 * at
        drawing.text(84, y + 19, f"{ranks} rank{'s' * (ranks > 1)}", anchor="end")
        drawing.rect(94, y, 5 * total, 26, COLOURS[0])
        drawing.text(100 + 5 * total, y + 19, f"{total:g}")
    drawing.text(20, 40 + 34 * len(rows) + 22, "Planned for dies of an MI250X, which have 64 GiB.", "small")
    return drawing


def timed(schedule: str, stages: int, micros: int) -> Iterator[tuple[int, Act, float, float]]:
    """Yields the place, act, begin and length of each act of a step of equal stages."""
    seconds = StageSeconds.equal(stages)
    chain = StageMap.of_cuts([(cell - 1,) for cell in range(stages)], [stages - 1], range(1, stages))
    table = make_timetable(chain, micros, schedule, seconds)
    left = [[event for event in events if isinstance(event, Act)] for events in table.events]
    free, ends = [0.0] * stages, dict[Act, float]()
    while any(left):
        for place, acts in enumerate(left):
            act = acts[0] if acts else None
            if act is None:
                continue
            needs = [Act(True, act.stage - 1, act.micro)] if act.is_forward and act.stage else []
            if not act.is_forward:
                needs = [Act(True, act.stage, act.micro)]
                needs += [Act(False, act.stage + 1, act.micro)] if act.stage + 1 < stages else []
            if all(need in ends for need in needs):
                begin, length = max([free[place], *(ends[need] for need in needs)]), seconds.of(act)
                free[place] = ends[act] = begin + length
                acts.pop(0)
                yield place, act, begin, length


def pipe() -> Drawing:
    """The timetables of a step on a pipe of four stages and eight micro-batches."""
    drawing = Drawing(800, 340, "A step of eight micro-batches on four stages, in the order of gpipe and of 1f1b")
    for at, schedule in enumerate(SCHEDULES):
        top = 40 + 150 * at
        drawing.text(20, top - 14, f"--pipe-schedule {schedule}")
        for place in range(4):
            drawing.text(20, top + 17 + 28 * place, f"stage {place}", "small")
        for place, act, begin, length in timed(schedule, 4, 8):
            x, y = 70 + 21 * begin, top + 28 * place
            drawing.rect(x, y, 21 * length - 1, 24, COLOURS[0] if act.is_forward else COLOURS[1])
            drawing.text(x + 10.5 * length, y + 16, f"{act.micro}", "small on", "middle")
    drawing.rect(70, 320, 12, 12, COLOURS[0])
    drawing.text(88, 330, "forward", "small")
    drawing.rect(150, 320, 12, 12, COLOURS[1])
    drawing.text(168, 330, "backward, twice as long; numbers are micro-batches; gaps are waiting", "small")
    return drawing


def flow() -> Drawing:
    """The way of a tile from a file to the loss, on two ranks."""
    drawing = Drawing(800, 170, "A tile on two ranks: parts, tokens, decoder, one loss")
    columns = ("its part", "tokens, blocks", "decoder")
    for words, x in (("files", 20), ("a tile", 130), ("loss of the tile", 680)):
        drawing.rect(x, 60, 112 if x > 600 else 72, 32)
        drawing.text(x + (56 if x > 600 else 36), 81, words, anchor="middle")
    drawing.arrow(92, 76, 128, 76)
    for rank in range(2):
        y = 20 + 80 * rank
        drawing.arrow(204, 76, 248, y + 18)
        for at, words in enumerate(columns):
            x = 250 + 140 * at
            drawing.rect(x, y, 116, 32, COLOURS[rank])
            drawing.text(x + 58, y + 21, f"rank {rank}: {words}" if at == 0 else words, "on", "middle")
            drawing.arrow(x + 118, y + 16, *((x + 138, y + 16) if at < 2 else (678, 76)))
    for x, words in ((448, "keys, values or heads"), (588, "halos and sums")):
        drawing.arrow(x - 4, 54, x - 4, 98)
        drawing.arrow(x + 4, 98, x + 4, 54)
        drawing.text(x, 156, words, "small", "middle")
    return drawing


DRAWINGS: Sequence[Callable[[], Drawing]] = (split, halo, groups, modes, memory, pipe, flow, growth)


def pictures() -> dict[str, str]:
    """Returns each picture by the name of its file."""
    return {f"{draw.__name__}.svg": str(draw()) for draw in DRAWINGS}
