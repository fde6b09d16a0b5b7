"""A report's page read back: elements, cells, scripts, and the volumes in its PNG sheets."""

import base64
import math
import zlib
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from seqpar.cli import report
from seqpar.cluster.exit_codes import run
from seqpar.report.planes import FileSlices

NAMES = ["case-a", "case-b", 'case-<b>&"c"']
VOID = {"meta", "input", "link", "br", "img"}


class Page(HTMLParser):
    """Checks that elements are closed in order; gathers attributes, cells and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.attributes, self.scripts = list[str](), list[tuple[str, str, str]](), dict[str, str]()
        self.cells: dict[tuple[str, str], list[float]] = {}
        self.script, self.row, self.cases = "", ("", ""), list[str]()
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list) -> None:
        attributes = dict(attrs)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "table":
            self.table = attributes.get("id", "")
        if tag == "tr":
            self.row = (self.table, attributes.get("data-class") or attributes.get("data-case") or "")
        if tag == "td" and "data-value" in attributes:
            value = attributes["data-value"]
            self.cells.setdefault(self.row, []).append(float(value) if value else math.nan)
        if tag == "article":
            self.cases.append(attributes["data-case"])
        if tag == "script":
            self.script = attributes.get("id", "code")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self.script] = data
        else:
            self.text += data


def written(out: Path, *arguments: object) -> Page:
    target = out / "report.html"
    assert run(report.act, [str(out), *map(str, arguments)]) == 0
    return Page(target.read_text())


def own_slices(shape: Sequence[int]) -> list[FileSlices]:
    """Returns the slices of a volume that is its own file."""
    return [FileSlices(range(1, side + 1), side) for side in shape]


def decode(data: bytes) -> np.ndarray:
    """Returns a grey PNG's pixels, by the format's rules and not by ours."""
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert data[24:29] == bytes([8, 0, 0, 0, 0])
    start = data.index(b"IDAT") + 4
    body = zlib.decompress(data[start : start + int.from_bytes(data[start - 8 : start - 4], "big")])
    rows = np.frombuffer(body, np.uint8).reshape(height, width + 1).astype(int)
    pixels = np.zeros((height, width), int)
    for y, (kind, *values) in enumerate(rows.tolist()):
        for x, value in enumerate(values):
            before = {0: 0, 1: pixels[y, x - 1] if x else 0, 2: pixels[y - 1, x] if y else 0}[kind]
            pixels[y, x] = (value + before) % 256
    return pixels.astype(np.uint8)


def unroll(text: str, shape: list[int], columns: int) -> np.ndarray:
    """Returns the volume of a sheet."""
    w, d, h = shape
    pixels = decode(base64.b64decode(text))
    made = np.zeros(shape, np.uint8)
    for n in range(h):
        top, left = n // columns * d, n % columns * w
        made[..., n] = pixels[top : top + d, left : left + w].T
    return made
