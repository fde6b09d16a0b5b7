"""Small facts that all ranks of a group agree on: flags, texts, and the error that one of them raised.

Everything here travels on the CPU, independently of the device's work, and is not counted as the groups' traffic.
"""

import hashlib
import json
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.parallel.collectives import gather_rows
from seqpar.parallel.meeting import START_S, Meeting
from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import check_collective, shape_and_dtype
from seqpar.parallel.watchdog import CollectiveMismatch, format_ranks


def max_over_ranks(flag: int, group: Group) -> int:
    """Returns the maximum of all ranks' flags."""
    return max_of_each_over_ranks((flag,), group)[0]


def max_of_each_over_ranks(flags: Sequence[int], group: Group) -> tuple[int, ...]:
    """Returns the element-wise maximum of all ranks' flags."""
    if group.size == 1:
        return tuple(flags)
    numbers = torch.tensor(flags, dtype=torch.int64)
    check_collective("agreement", group, shape_and_dtype(numbers))
    return tuple(torch.stack(gather_rows(numbers, group)).amax(0).tolist())


def require_peers(call: str, group: Group) -> None:
    """Raises CollectiveMismatch unless every rank of ``group`` makes this call too, such as "eval() with gradients".

    The ranks ask each other once for each kind of call. Without it, a rank that calls the network alone, as to validate
    on the first rank only, would wait for the time limit, or take the messages of a training step for its own.
    """
    watch, name = group.watch, f"{group} {call}"
    if watch.store is None or name in watch.calls:
        return
    watch.calls.add(name)
    watch.enter(f"the first call of the network in {call}", group)
    watch.look()
    ranks, own = group.ranks, group.ranks[group.index]
    number = watch.store.add(f"calls/{group}/{own}", 1)
    keys = [f"calls/{group}/{number}/{rank}" for rank in ranks]
    watch.store.set(keys[group.index], call)
    with watch.waiting(False):
        problem = _await_peers(call, keys, group)
    if not problem:
        made = [watch.store.get(key).decode() for key in keys]
        kinds = [
            (format_ranks([r for r, one in zip(ranks, made) if one == kind]), kind) for kind in dict.fromkeys(made)
        ]
        if len(kinds) == 1:
            return
        listed = "; ".join(f"{who}: {kind}" for who, kind in kinds)
        problem = f"the ranks of the {group} call the network differently ({listed}): call it alike on all of them"
    watch.store.set(f"why/{group}", problem)
    raise CollectiveMismatch(problem)


def _await_peers(call: str, keys: Sequence[str], group: Group) -> str:
    """Returns "" once all ranks have announced their calls, or why some never will."""
    watch, began, pause_s, elsewhere = group.watch, time.monotonic(), 0.001, list[str]()
    limit_s, warned = watch.limit_s or watch.start_limit_s or START_S, False
    while not watch.store.check(list(keys)):
        time.sleep(pause_s)
        pause_s, waited_s = min(0.1, 2 * pause_s), time.monotonic() - began
        if waited_s < watch.notice_s:
            continue
        missing = [rank for rank, key in zip(group.ranks, keys) if not watch.store.check([key])]
        must = "every rank of a sequence group must call it, also to validate"
        before, elsewhere = elsewhere, _waiting_elsewhere(missing, group)
        if elsewhere and elsewhere == before:  # twice, since a rank may just have moved on
            return f"rank {watch.rank} called the network in {call}, but {'; '.join(elsewhere)}: {must}"
        if waited_s > limit_s:
            who = format_ranks(missing)
            return f"rank {watch.rank} called the network in {call}, but {who} did not within {limit_s:.0f} s: {must}"
        if missing and not warned:
            warned = True
            waits = f"rank {watch.rank} called the network in {call}, and waits for {format_ranks(missing)}"
            print(f"warning: {waits}: {must}", file=sys.stderr, flush=True)
        pause_s = max(pause_s, 0.5 * watch.notice_s)
    return ""


def _waiting_elsewhere(ranks: Sequence[int], group: Group) -> list[str]:
    """Returns which of the ranks wait in another collective of the group, or at the end, and where."""
    store, found = group.watch.store, []
    for rank in ranks:
        if store.check([f"waits/{rank}"]):
            place = store.get(f"waits/{rank}").decode()
            if place.endswith(f" of the {group}") or place.startswith("the end"):
                found.append(f"rank {rank} waits in {place}")
    return found


def refuse_different_tiles(fingerprint: Tensor | None, group: Group, device: torch.device) -> None:
    """Raises ValueError on all ranks of ``group`` if they have cut their parts from different tiles.

    - ``fingerprint``: of this rank's image and label, or None if it did not cut any itself; see ``fingerprint_of``
    - ``device``: of the group's messages
    """
    if group.handle is None or group.places is not None:
        return
    own = torch.zeros(3, dtype=torch.float64) if fingerprint is None else fingerprint
    row = own.to(device)
    check_collective("tiles", group, shape_and_dtype(row))
    rows = gather_rows(row, group)
    firsts, others, sizes = dict[float, tuple[int, float, float]](), list[int](), False
    for rank, (total, count, size) in zip(group.ranks, torch.stack(rows).tolist()):
        _, same, as_large = firsts.setdefault(count, (rank, total, size))  # of the ranks that cut as many tensors
        if count and max(abs(total - same), abs(size - as_large)) > 1e-4:
            others.append(rank)
            sizes = sizes or abs(size - as_large) > 1e-4
    if others:
        raise ValueError(
            f"the {group} shares one tile, but {format_ranks(others)} cut another than rank {min(firsts.values())[0]}"
            f"{', of another size' if sizes else ''}: load and augment the same image and label on all of them in "
            "every step, as with a random generator that only this uses, seeded alike"
        )


def broadcast_text(text: str, source: int, group: Group) -> str:
    """Broadcasts the text of the rank at index ``source``; the other ranks' texts are ignored."""
    if group.size == 1:
        return text
    return gather_texts(text if group.index == source else "", group)[source]


def gather_texts(text: str, group: Group) -> list[str]:
    """Returns every rank's text, in rank order, the same on each rank."""
    if group.size == 1:
        return [text]
    letters = _letters(text)
    check_collective("texts", group, "from all")
    lengths = gather_rows(torch.tensor([len(letters)]), group)
    page = torch.zeros(max(1, *(int(length) for length in lengths)), dtype=torch.uint8)
    page[: len(letters)] = letters
    pages = gather_rows(page, group)
    return [bytes(page[: int(length)].tolist()).decode() for page, length in zip(pages, lengths)]


def refuse_unequal(settings: Mapping[str, Any], content: Mapping[str, Any], group: Group) -> None:
    """Raises ValueError on every rank if some were started with other settings than the first, or work on other files.

    - ``settings``: by name, as the error shows them
    - ``content``: what is compared only, by what the error says of a rank where it differs
    """
    own = {**settings, **{told: _digest(json.dumps(value, default=str)) for told, value in content.items()}}
    text = json.dumps(own, default=str)
    if group.size == 1 or len({*gather_texts(_digest(text), group)}) == 1:
        return
    first, *others = map(json.loads, gather_texts(text, group))
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    names = [name for name in {**first, **other} if name not in content and first.get(name) != other.get(name)]
    theirs, ours = (", ".join(f"{name} {each.get(name)}" for name in names) for each in (other, first))
    differing = next((told for told in content if first[told] != other[told]), "")
    told = f"has {theirs}, and rank 0 has {ours}" if names else differing
    raise ValueError(f"rank {rank} {told}: start all ranks with the same command, on the same files")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _letters(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def raise_on_all_ranks(error: Exception | None, group: Group, name_rank: bool = True) -> None:
    """Raises on every rank the error that one of them caught; returns if there is none.

    Every rank calls it with the error it caught, or None. If several ranks have one, all raise that of the first, with
    its type, so that they end with the same exit code; that rank raises the original object.

    - ``name_rank``: whether the message names that rank on the others. Set it to False if only one rank does this work,
      or if the message already says where it happened
    """
    for index, text in enumerate(gather_texts("" if error is None else _packed(error), group)):
        if text and index == group.index:
            assert error is not None
            raise error
        if text:
            problem: Exception = pickle.loads(bytes.fromhex(text))
            if name_rank and problem.args == (str(problem),) and not str(problem).startswith("rank "):
                problem.args = (f"rank {group.ranks[index]}: {problem}",)
            raise problem from error


def raise_over_groups(error: Exception | None, groups: Sequence[Group]) -> None:
    """Like ``raise_on_all_ranks``, for all ranks of several groups that cross each other."""
    failed = int(error is not None)
    for group in groups:
        failed = max_over_ranks(failed, group)
    for group in groups if failed else ():
        try:
            raise_on_all_ranks(error, group)
        except Exception as problem:
            error = problem
    if error is not None:
        raise error


def _packed(error: Exception) -> str:
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # some exceptions cannot be pickled or unpickled
        packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed.hex()


def run_on_rank0(act: Callable[[], Any], group: Group) -> Any:
    """Calls ``act`` on the first rank and returns its result, as JSON has it, on all; its error is raised on all."""
    text, error = "", None
    if group.index == 0:
        try:
            text = json.dumps(act())
        except Exception as problem:
            error = problem
    raise_on_all_ranks(error, group, name_rank=False)
    return json.loads(broadcast_text(text, 0, group))


def run_on_rank0_before_mesh(act: Callable[[], Any], meeting: Meeting, name: str, timeout_s: float = START_S) -> Any:
    """Like ``run_on_rank0``, for processes that have no mesh yet.

    - ``name``: identifies this exchange; each name can be used once per meeting
    """
    text, error = "", None
    if meeting.launcher.rank == 0:
        try:
            text = f"={json.dumps(act())}"
        except Exception as problem:
            text, error = f"!{_packed(problem)}", problem
    text = meeting.of_first(name, text, timeout_s)
    if error is not None:
        raise error
    if text.startswith("!"):
        raise pickle.loads(bytes.fromhex(text[1:]))
    return json.loads(text[1:])
