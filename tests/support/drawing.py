"""An SVG picture of rectangles, lines and words."""

from collections.abc import Sequence

COLOURS = ("#4c8eda", "#e08a3c", "#4fa66a", "#b678c4")  # of ranks; readable on white and on black
STYLE = """
text { font: 13px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #24292f; }
.small { font-size: 11px; }
.on { fill: #ffffff; }
.line { stroke: #57606a; fill: none; }
.empty { fill: none; stroke: #8c959f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .line { stroke: #9198a1; }
}
"""


class Drawing:
    """An SVG picture; lengths are pixels from the top left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str = "", more: str = "") -> None:
        paint = f'fill="{fill}"' if fill else 'class="empty"'
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {paint} {more}/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{words}</text>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        ends = f'x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"'
        self._parts.append(f'<line {ends} class="line" stroke-width="1.5" marker-end="url(#head)"/>')

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        is_dashed: bool = False,
        dots: bool = False,
        thin: bool = False,
    ) -> None:
        """Draws a line through points; ``dots``: marks each of them."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = ' stroke-dasharray="5 3"' if is_dashed else ""
        width = 0.5 if thin else 2
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{more}/>')
        for x, y in points if dots else ():
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')

    def __str__(self) -> str:
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        head += '<path d="M0 0 L8 4 L0 8" class="line"/></marker>'
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{self.title}">\n'
            f"<title>{self.title}</title>\n<style>{STYLE}</style>\n<defs>{head}</defs>\n{body}\n</svg>\n"
        )
