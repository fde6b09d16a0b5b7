"""How a run that cannot continue ends: the cause in status.json, in a line on stderr, and in the exit code."""

import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.devices import GIB
from seqpar.cluster.stop_agreement import ShutdownSteps
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.watchdog import CollectiveMismatch, describe_lost_contact, is_lost_contact
from seqpar.planner.batch_size import runs_over_micro_batch
from seqpar.runs.run_folder import read_status
from seqpar.runs.run_status import StatusFile
from seqpar.settings.config import Config
from seqpar.settings.rules import setting_applies
from seqpar.text import in_flags
from seqpar.weights.checkpoint import NotSaved


def end_failed_run(error: BaseException, config: Config, mesh: Mesh, status: StatusFile) -> NoReturn:
    """Writes the cause and ends this process at once.

    Peers may be gone, or wait in a collective for this rank: its end tells them that the run is over.
    """
    rank = mesh.world.index
    code, text, is_own = _judge(error, config, rank, mesh.world.watch.finding)
    text = in_flags(text)
    try:
        last = ShutdownSteps()
        last.take(lambda: status.write_unless_over("failed", text, code, durable=False))
        if code == exit_codes.IN_USE or _says_finished(status):  # status.json is another's
            last.take(lambda: exit_codes.write_verdict(code))
        last.take(lambda: _say(error, code, text, aloud=is_own or mesh.is_first))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, exit_codes.NonFinite):  # raised on all ranks, so the barrier in stop returns
            with suppress(Exception):
                mesh.stop()
        if mesh.is_first and status.lock is not None:
            last.take(status.lock.release)
        last.take(_flush)
    finally:
        os._exit(code)


def _says_finished(status: StatusFile) -> bool:
    """Returns whether the run has finished before, which stays true where a further start fails at once."""
    return bool(read_status(status.path.parent).get("state") == "finished")


def _say(error: BaseException, code: int, text: str, aloud: bool) -> None:
    """Says why this process ends: in its last words, and on stderr where ``aloud``; of a mistake the traceback."""
    if text == "" or (code == 1 and not _is_expected(error)):
        exit_codes.leave_last_words("".join(traceback.format_exception(error)))
        traceback.print_exception(error)
        return
    exit_codes.leave_last_words(f"error: {text}")
    if aloud:
        exit_codes.report(text)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _judge(error: BaseException, config: Config, rank: int, finding: str = "") -> tuple[int, str, bool]:
    """Returns exit code, text, and whether the cause is this rank's own rather than every rank's.

    ``finding``: what the watchdog says about a rank that holds up the others.
    """
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.INTERRUPTED, "interrupted twice: left without saving", False
    if of_a_file := exit_codes.of_a_file(error):
        return exit_codes.DATA, f"rank {rank}: {of_a_file}", True
    lines = str(error).strip().splitlines() or [type(error).__name__]
    code = exit_codes.code_of(error)
    if code == exit_codes.MEMORY and not isinstance(error, exit_codes.TooLittleMemory):
        if isinstance(error, MemoryError) and "workers" in lines[0]:  # the loader's, which knows what to change
            return code, str(error), False
        said = ". ".join(lines[0].split(". ")[:2])  # torch's figures; advice on its allocator follows
        return code, f"out of memory on rank {rank}: {_held_by_others(error)}{save_memory(config)} ({said[:200]})", True
    if code is not None:
        return code, str(error), False
    if isinstance(error, CollectiveMismatch):
        return 1, str(error), True
    if is_lost_contact(error):
        cause = f"; {finding}" if finding else ""
        return 1, f"{describe_lost_contact(error, rank)}{cause}", True
    if isinstance(error, NotSaved):
        return 1, str(error), False
    if isinstance(error, OSError):
        return 1, f"rank {rank}: {error}", True
    return 1, f"rank {rank}: {type(error).__name__}: {lines[0]}", True


def _is_expected(error: BaseException) -> bool:
    return isinstance(error, (OSError, CollectiveMismatch)) or is_lost_contact(error)


def _held_by_others(error: BaseException) -> str:
    """Returns what to do if other processes hold a fourth of the GPU or more, else ""."""
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_initialized():
        return ""
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    if others < total / 4:
        return ""
    return (
        f"other processes hold {others / GIB:.1f} of the GPU's {total / GIB:.1f} GiB; end those that are not of this "
        "run, take another GPU, or "
    )


def save_memory(config: Config) -> str:
    """Returns the flags that need less memory; those that change no result come first."""
    if config.curriculum:
        return "give the lesson a smaller batch or tile in --curriculum, and another --out, or use a larger --seqpar"
    if config.batch > 1 and not runs_over_micro_batch(config):
        batch = max(size for size in range(1, config.batch) if config.batch % size == 0)
        return f"use --batch {batch} --accumulate {config.batch // batch * config.accumulate}"
    if config.grad_checkpoint != "full" and setting_applies(config, "grad_checkpoint"):
        return "use --grad-checkpoint full, or a larger --seqpar"
    shards = "a larger --pipe, " if config.pipe > 1 else "" if config.shard_weights else "--shard-weights, "
    patch = "a larger --patch " if setting_applies(config, "patch") else ""
    return f"use {shards}a larger --seqpar, {patch}or a smaller --tile"
