"""Small facts that all ranks of a group agree on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from seqpar.mesh import Group
from seqpar.messages import described, expect


def agree(flag: int, group: Group) -> int:
    """Returns the largest of all ranks' flags, the same on each; travels on the CPU, beside the device's work."""
    return agree_all((flag,), group)[0]


def agree_all(flags: Sequence[int], group: Group) -> tuple[int, ...]:
    """Returns the largest of all ranks' first flags, of their second and so on, as ``agree`` does for one."""
    if group.size == 1:
        return tuple(flags)
    numbers = torch.tensor(flags, dtype=torch.int64)
    expect("agreement", group, described(numbers))
    with group.watch.waiting(False):
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group.handle)
    return tuple(numbers.tolist())


def tell(text: str, source: int, group: Group) -> str:
    """Returns the text of place ``source``, the same on each rank; travels on the CPU."""
    if group.size == 1:
        return text
    letters = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(letters)])
    expect("text", group, f"from rank {group.ranks[source]}")
    dist.broadcast(length, group.ranks[source], group=group.handle)
    if group.index != source:
        letters = letters.new_empty(int(length))
    dist.broadcast(letters, group.ranks[source], group=group.handle)
    return bytes(letters.tolist()).decode()


def gather_texts(text: str, group: Group) -> list[str]:
    """Returns every rank's text, in rank order, the same on each; travels on the CPU."""
    if group.size == 1:
        return [text]
    letters = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in group.ranks]
    expect("texts", group, "from all")
    dist.all_gather(lengths, torch.tensor([len(text.encode())]), group=group.handle)
    longest = max(1, *(int(n) for n in lengths))
    page = torch.zeros(longest, dtype=torch.uint8)
    page[: len(letters)] = letters
    pages = [torch.empty_like(page) for _ in group.ranks]
    dist.all_gather(pages, page, group=group.handle)
    return [bytes(page[: int(n)].tolist()).decode() for page, n in zip(pages, lengths)]
