"""The attention strategies: their names, those that a group allows, and the heads per chunk."""

from dataclasses import dataclass

NAMES = ("gather-kv", "gather-x", "ulysses", "hybrid")
CHUNK_BYTES = 4 << 20  # keys and values of a chunk: for smaller ones, latency costs more than overlap gains
# per device type, the queries x batch x heads of a chunk: fewer do not fill a GPU
CHUNK_ROWS = {"cpu": 1, "cuda": 1 << 15}


@dataclass(frozen=True)
class Strategy:
    """How attention crosses ranks.

    - ``name``: one of ``NAMES``
    - ``inner``: number of ranks that exchange heads: 1 for the gathers, the whole group for ulysses
    """

    name: str
    inner: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.inner}" if self.name == "hybrid" else self.name


@dataclass(frozen=True)
class AttentionOptions:
    """How an encoder attends over its sequence group. All choices are exact; they differ in speed and memory.

    Args:
        ``strategy``: ``"gather-kv"``, ``"gather-x"``, ``"ulysses"``, ``"hybrid"`` (or ``"hybrid:U"``, in which U ranks
            exchange heads), a ``Strategy``, or ``"auto"``: the fastest on this device according to the cost model.
        ``keep_kv``: keep the gathered keys and values until backward instead of gathering them again.
        ``heads_per_chunk``: number of heads that are attended at a time; None: by size.
    """

    strategy: Strategy | str = "auto"
    keep_kv: bool = False
    heads_per_chunk: int | None = None


def check_strategy(name: str, ranks: int, heads: int, keep_kv: bool, argument: str = "attention") -> Strategy:
    """Returns the strategy of a name, such as ``hybrid:2``; raises ValueError if ``ranks`` ranks do not allow it.

    - ``argument``: what the caller calls the strategy; only ``attention`` may be ``"auto"``
    """
    kind, colon, number = name.partition(":")
    auto = "auto, " * (argument == "attention")
    if kind not in NAMES or (colon and (kind != "hybrid" or not number.isdecimal())):
        raise ValueError(f"{argument}={name!r}: choose {auto}{', '.join(NAMES)} or hybrid:U (U ranks exchange heads)")
    if ranks == 1:
        return Strategy(kind)
    if kind == "ulysses" and keep_kv:
        raise ValueError(
            f"keep_kv=True has no effect with {argument}='ulysses', which gathers nothing: remove one of them"
        )
    if kind != "hybrid":
        return Strategy(kind, ranks if kind == "ulysses" else 1)
    divisors = inner_sizes(ranks)
    inner = int(number) if colon else max(divisors, key=lambda u: (heads % u == 0, u), default=0)
    if inner not in divisors:
        choices = ", ".join(f"hybrid:{u}" for u in divisors) or f"no hybrid: use {auto}gather-x, gather-kv or ulysses"
        raise ValueError(f"{argument}={name!r}: {ranks} ranks allow {choices}")
    return Strategy("hybrid", inner)


def inner_sizes(ranks: int) -> list[int]:
    """Returns how many ranks may exchange heads in a hybrid: the divisors strictly between 1 and ``ranks``."""
    return [u for u in range(2, ranks) if ranks % u == 0]


def choose_heads_per_chunk(heads: int, head_bytes: int, rows: int, device_type: str) -> int:
    """Returns the number of a rank's heads per chunk: the fewest that are worth a message, in chunks of equal size.

    - ``heads``: number of heads that the rank attends
    - ``head_bytes``: keys and values of one head over the whole sequence
    - ``rows``: the rank's queries x batch
    - ``device_type``: a key of ``CHUNK_ROWS``
    """
    fewest = max(-(-CHUNK_BYTES // max(head_bytes, 1)), -(-CHUNK_ROWS.get(device_type, 1) // max(rows, 1)))
    chunks = -(-heads // min(fewest, heads))
    return -(-heads // chunks)
