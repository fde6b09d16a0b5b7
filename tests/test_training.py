"""Training as processes do it: equal losses on any ranks, exact resume, and every way in which a run can be ended."""

import pytest
import torch
from runs import Launch, at, die, losses, moments, signalled, status, tiny_data, trained, weights


@pytest.fixture(scope="session")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("training")
    given = tiny_data(root)
    trained(1, [*given, "--iterations", "1", "--epochs", "1"], root / "first")  # prepares the cache
    return given


def test_it_runs(flags, tmp_path):
    import time
    t=time.time()
    trained(1, flags, tmp_path / "a"); print(time.time()-t); t=time.time()
    trained(4, [*flags, "--seqpar", "4"], tmp_path / "b"); print(time.time()-t)
    print(trained(2, [*flags, "--seqpar", "2"], tmp_path / "c").said())
    print(losses(tmp_path/"a"), losses(tmp_path/"b"))
