"""Judges what the ranks report: everything that stands in a job's way."""

from collections.abc import Sequence
from typing import Any

from seqpar.cluster.devices import GIB
from seqpar.cluster.known_traps import Trap
from seqpar.cluster.rank_facts import RankFacts
from seqpar.parallel.watchdog import format_ranks

SKEW_S = 1.0  # clocks that differ by more make time limits and file times wrong
ROOM_BYTES = 10 * GIB
SLOW_SHARE = 0.7  # of the median speed


def find_problems(
    num_seq: int, ranks: Sequence[RankFacts], offsets: Sequence[float], folder: dict[str, Any]
) -> list[Trap]:
    """Returns everything that is wrong or doubtful, errors first.

    - ``num_seq``: ranks of a sequence group
    - ``offsets``: seconds that each rank's clock is ahead of the first one's
    - ``folder``: what the first rank found in the output folder
    """
    findings = [*_folder(ranks, folder), *_unequal_versions(ranks), *_slow(ranks), *_skewed(offsets), *_traps(ranks)]
    findings += _network(num_seq, ranks)
    return sorted(findings, key=lambda trap: not trap.error)


def _folder(ranks: Sequence[RankFacts], folder: dict[str, Any]) -> list[Trap]:
    if folder["fault"]:
        return [Trap(folder["fault"], error=True)]
    findings = []
    if folder["out"] and folder["free"] < ROOM_BYTES:
        text = f"--out {folder['out']} has {folder['free'] / GIB:.1f} GiB left: checkpoints may need more"
        findings.append(Trap(text))
    blind = [rank for rank, facts in enumerate(ranks) if not facts.seen]
    if blind:
        hosts = ", ".join(dict.fromkeys(ranks[rank].host for rank in blind))
        where = f"{format_ranks(blind)} on {hosts}"
        text = f"--out {folder['out']} is another folder for {where}: name one on a shared file system"
        findings.append(Trap(text, error=True))
    return findings


def _unequal_versions(ranks: Sequence[RankFacts]) -> list[Trap]:
    findings = []
    for name in ranks[0].versions:
        by_version: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            by_version.setdefault(facts.versions.get(name, "none"), []).append(rank)
        if len(by_version) > 1:
            list_of = "; ".join(f"{version} on {format_ranks(group)}" for version, group in by_version.items())
            text = f"ranks differ in their {name} ({list_of}): start all from one environment"
            findings.append(Trap(text, error=True))
    return findings


def _slow(ranks: Sequence[RankFacts]) -> list[Trap]:
    findings = []
    for dtype in ranks[0].flops_per_s:
        median = sorted(facts.flops_per_s[dtype] for facts in ranks)[len(ranks) // 2]
        for rank, facts in enumerate(ranks):
            share = facts.flops_per_s[dtype] / median
            if share < SLOW_SHARE:
                text = f"rank {rank} on {facts.host} computes at {share:.2f} of the usual speed in {dtype}"
                findings.append(Trap(f"{text}: all wait for it"))
    return findings


def _skewed(offsets: Sequence[float]) -> list[Trap]:
    skewed = [rank for rank, offset in enumerate(offsets) if abs(offset) > SKEW_S]
    if not skewed:
        return []
    largest = max(map(abs, offsets))
    return [Trap(f"clocks of {format_ranks(skewed)} are up to {largest:.1f} s off the first one's: tell the admin")]


def _traps(ranks: Sequence[RankFacts]) -> list[Trap]:
    """Returns each rank's own traps, equal ones together."""
    by_text: dict[tuple[bool, str], list[int]] = {}
    for rank, facts in enumerate(ranks):
        for error, text in facts.traps:
            by_text.setdefault((error, text), []).append(rank)
    return [
        Trap(text if len(group) == len(ranks) else f"{format_ranks(group)}: {text}", error)
        for (error, text), group in by_text.items()
    ]


def _network(num_seq: int, ranks: Sequence[RankFacts]) -> list[Trap]:
    across = groups_across_nodes(num_seq, ranks)
    if not across:
        return []
    examples = "; ".join(f"{format_ranks(range(at, at + num_seq))} over {', '.join(hosts)}" for at, hosts in across[:3])
    more = f" and {len(across) - 3} more" if len(across) > 3 else ""
    return [
        Trap(
            f"sequence groups cross nodes ({examples}{more}): every attention layer uses the network. Let --seqpar "
            "divide the ranks of a node, and place ranks in blocks (srun -m block)"
        )
    ]


def groups_across_nodes(num_seq: int, ranks: Sequence[RankFacts]) -> list[tuple[int, list[str]]]:
    """Returns the first rank and the nodes of each sequence group that lies on several nodes."""
    groups = [
        (at, list(dict.fromkeys(facts.host for facts in ranks[at : at + num_seq])))
        for at in range(0, len(ranks), num_seq)
    ]
    return [(at, hosts) for at, hosts in groups if len(hosts) > 1]
