"""Freed memory is kept and taken again: counted by the pages that the kernel gives."""

import multiprocessing
import resource
from types import SimpleNamespace

import pytest
import torch

from seqpar.cluster.torch_setup import keep_memory
from seqpar.prediction import case_stream

PAGES = 64 * 2**20 // resource.getpagesize()


def pages_given(keeps: bool) -> tuple[bool, int]:
    """Returns whether memory is kept, and the pages that the kernel gives to the last of many tensors of 64 MiB."""
    kept = keeps and keep_memory({})
    for _ in range(12):  # until holes between small pieces are large enough
        torch.zeros(2**24).add_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24).add_(1)
    return kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def in_child(keeps: bool) -> tuple[bool, int]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # other tests may have kept this process's
        return pool.apply(pages_given, (keeps,))


@pytest.mark.started
def test_memory_that_is_freed_serves_the_next_tensor() -> None:
    kept, given = in_child(True)
    if not kept:
        pytest.skip("not glibc")
    assert given < PAGES // 100
    assert in_child(False)[1] > PAGES // 2, "a control"


@pytest.mark.parametrize("device, kept", [("cpu", 1), ("cuda", 0)])
def test_predictions_on_a_cpu_keep_memory(device: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(case_stream, "keep_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(case_stream, "Predictor", lambda *_: None)
    run = SimpleNamespace(load_nets=lambda *_: calls.append("loaded"))
    members = [SimpleNamespace(run=run, weights=(), settings=None)]
    monkeypatch.setattr(case_stream.CasePrediction, "__abstractmethods__", frozenset())
    case_stream.CasePrediction(SimpleNamespace(mode=""), members, SimpleNamespace(device=torch.device(device)))  # type: ignore
    assert calls == ["kept"] * kept + ["loaded"]


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_settings_of_an_allocator_stay(name: str) -> None:
    assert not keep_memory({name: "1"})
