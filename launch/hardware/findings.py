"""What stands in a job's way, sorted and printed."""

import sys
from collections.abc import Sequence
from typing import Any

from seqpar.launch.hardware.cluster_traps import Trap
from seqpar.launch.hardware.rank_facts import ROOM_BYTES, SKEW_S, SLOW_SHARE, RankFacts, memory_of
from seqpar.mesh import Mesh
from seqpar.watchdog import these


def print_ranks(mesh: Mesh, ranks: Sequence[RankFacts]) -> None:
    print(", ".join(f"{name} {version}" for name, version in ranks[0].versions.items()))
    size, world = mesh.seq.size, mesh.world.size
    print(
        f"{world} rank(s) on {len(set(mesh.hosts))} node(s) = data {world // size} x seq {size}, by {mesh.launcher.by}"
    )
    rows = [
        (
            "rank",
            "host",
            "local",
            "device",
            "cores",
            "seq group",
            "data group",
            *(f"{name} TFLOP/s" for name in ranks[0].flops_per_s),
        )
    ]
    for rank, one in enumerate(ranks):
        places = (
            str(rank),
            one.host,
            str(one.local_rank),
            one.device,
            str(one.cores),
            str(rank // size),
            str(rank % size),
        )
        rows.append((*places, *(f"{rate / 1e12:.3g}" for rate in one.flops_per_s.values())))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    sys.stdout.flush()


def print_groups(groups: dict[str, dict[str, Any]]) -> None:
    for name, found in groups.items():
        for kind, figures in found.items():
            if isinstance(figures, dict):
                speed = f"{figures['latency_s'] * 1e6:,.0f} us, {figures['bytes_per_s'] / 1e9:.3g} GB/s"
                largest = f"up to {figures['seconds'][-1][0]:,} B"
                print(f"{name} groups of {found['size']}: {kind} {speed} sent per rank, {largest}")


def folder_line(room: dict[str, Any]) -> str:
    if not room["out"] or room["fault"]:
        return ""
    return f"{room['out']}: {room['free'] / 2**30:,.0f} GiB free, {room['bytes_per_s'] / 1e6:,.0f} MB/s written; "


def described(mesh: Mesh, ranks: Sequence[RankFacts], groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns what the planner reads; every speed is the slowest rank's."""
    return {
        "device": ranks[0].device.partition(" ")[2],
        "memory_bytes": memory_of(mesh),  # of one rank
        "world": mesh.world.size,
        "seqpar": mesh.seq.size,
        "nodes": len(set(mesh.hosts)),
        "seq_crosses_nodes": bool(crossing(mesh.seq.size, ranks)),
        "matmul_flops_per_s": {name: min(one.flops_per_s[name] for one in ranks) for name in ranks[0].flops_per_s},
        "groups": groups,
        "versions": ranks[0].versions,
    }


def judge(num_seq: int, ranks: Sequence[RankFacts], offsets: Sequence[float], room: dict[str, Any]) -> list[Trap]:
    """Returns everything that is wrong or doubtful, errors first."""
    found = [*_folder(ranks, room), *_unequal(ranks)]
    skewed = [rank for rank, offset in enumerate(offsets) if abs(offset) > SKEW_S]
    if skewed:
        text = f"clocks of {these(skewed)} are up to {max(map(abs, offsets)):.1f} s off the first one's: tell the admin"
        found.append(Trap(text))
    by_text: dict[tuple[bool, str], list[int]] = {}
    for rank, one in enumerate(ranks):
        for error, text in one.traps:
            by_text.setdefault((error, text), []).append(rank)
    for (error, text), those in by_text.items():
        found.append(Trap(text if len(those) == len(ranks) else f"{these(those)}: {text}", error))
    across = crossing(num_seq, ranks)
    if across:
        told = "; ".join(f"{these(range(at, at + num_seq))} over {', '.join(hosts)}" for at, hosts in across[:3])
        more = f" and {len(across) - 3} more" if len(across) > 3 else ""
        found.append(
            Trap(
                f"sequence groups cross nodes ({told}{more}): every attention layer uses the network. Let --seqpar "
                "divide the ranks of a node, and place ranks in blocks (srun -m block)"
            )
        )
    return sorted(found, key=lambda trap: not trap.error)


def _folder(ranks: Sequence[RankFacts], room: dict[str, Any]) -> list[Trap]:
    if room["fault"]:
        return [Trap(room["fault"], error=True)]
    found = []
    if room["out"] and room["free"] < ROOM_BYTES:
        found.append(Trap(f"--out {room['out']} has {room['free'] / 2**30:.1f} GiB left: checkpoints may need more"))
    blind = [rank for rank, one in enumerate(ranks) if not one.seen]
    if blind:
        hosts = ", ".join(dict.fromkeys(ranks[rank].host for rank in blind))
        text = f"--out {room['out']} is another folder for {these(blind)} on {hosts}: name one on a shared file system"
        found.append(Trap(text, error=True))
    return found


def _unequal(ranks: Sequence[RankFacts]) -> list[Trap]:
    """Returns what tells ranks apart that should be alike: versions and speed."""
    found = []
    for name in ranks[0].versions:
        by_version: dict[str, list[int]] = {}
        for rank, one in enumerate(ranks):
            by_version.setdefault(one.versions.get(name, "none"), []).append(rank)
        if len(by_version) > 1:
            told = "; ".join(f"{version} on {these(those)}" for version, those in by_version.items())
            found.append(Trap(f"ranks differ in their {name} ({told}): start all from one environment", error=True))
    for dtype in ranks[0].flops_per_s:
        usual = sorted(one.flops_per_s[dtype] for one in ranks)[len(ranks) // 2]
        for rank, one in enumerate(ranks):
            share = one.flops_per_s[dtype] / usual
            if share < SLOW_SHARE:
                text = f"rank {rank} on {one.host} computes at {share:.2f} of the usual speed in {dtype}"
                found.append(Trap(f"{text}: all wait for it"))
    return found


def crossing(num_seq: int, ranks: Sequence[RankFacts]) -> list[tuple[int, list[str]]]:
    """Returns the first rank and the nodes of each sequence group that lies on several."""
    groups = [
        (at, list(dict.fromkeys(one.host for one in ranks[at : at + num_seq]))) for at in range(0, len(ranks), num_seq)
    ]
    return [(at, hosts) for at, hosts in groups if len(hosts) > 1]
