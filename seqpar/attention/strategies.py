"""The strategies of attention over a spread sequence: their names, which of them ranks allow, heads per chunk."""

from dataclasses import dataclass

CHUNK_BYTES = 4 << 20  # of keys and values of a chunk: below it, latency costs more than overlap gains


CHUNK_ROWS = 1 << 15  # queries times batch times heads of a chunk that fill a GPU


NAMES = ("gather-kv", "gather-x", "ulysses", "hybrid")


@dataclass(frozen=True)
class Strategy:
    """How attention crosses ranks; ``inner`` ranks exchange heads: 1 for gathers, all for ulysses."""

    name: str
    inner: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.inner}" if self.name == "hybrid" else self.name


def check_strategy(name: str, ranks: int, heads: int, keep: bool) -> Strategy:
    """Returns the strategy of a name, ``hybrid`` also as ``hybrid:U``; refuses what these ranks cannot do."""
    kind, colon, number = name.partition(":")
    if kind not in NAMES or (colon and (kind != "hybrid" or not number.isdecimal())):
        raise ValueError(f"--attention {name}: choose auto, {', '.join(NAMES)} or hybrid:U (U ranks exchange heads)")
    if ranks == 1:
        return Strategy(kind)
    if kind == "ulysses" and keep:
        raise ValueError("--keep-kv has no effect with --attention ulysses, which gathers nothing: leave one of them")
    if kind != "hybrid":
        return Strategy(kind, ranks if kind == "ulysses" else 1)
    divisors = inner_sizes(ranks)
    inner = int(number) if colon else max(divisors, key=lambda u: (heads % u == 0, u), default=0)
    if inner not in divisors:
        choices = ", ".join(f"hybrid:{u}" for u in divisors) or "none: use auto, gather-x, gather-kv or ulysses"
        raise ValueError(f"--attention {name}: {ranks} ranks allow {choices}")
    return Strategy("hybrid", inner)


def inner_sizes(ranks: int) -> list[int]:
    return [u for u in range(2, ranks) if ranks % u == 0]


def heads_per_chunk(heads: int, head_bytes: int, rows: int, on_gpu: bool) -> int:
    """Returns how many of the heads that a rank holds go together: the fewest that are worth a message.

    ``head_bytes`` are one head's whole keys and values, ``rows`` its queries times batch.
    """
    fewest = -(-CHUNK_BYTES // max(head_bytes, 1))
    if on_gpu:
        fewest = max(fewest, -(-CHUNK_ROWS // max(rows, 1)))
    chunks = -(-heads // min(fewest, heads))
    return -(-heads // chunks)
