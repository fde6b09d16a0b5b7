"""Fixtures of the training tests: a tiny data set, prepared once, and runs that nothing happens to."""

from pathlib import Path

import pytest

from tests.support.training_runs import prepare, tiny_data, trained


@pytest.fixture(scope="session")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("training")
    arguments = tiny_data(root)
    prepare(arguments)
    return arguments


@pytest.fixture(scope="session")
def undisturbed(flags, tmp_path_factory):
    """Returns the folder of a run that nothing happened to, made once for each set of flags."""
    made: dict[tuple, Path] = {}

    def find(world: int, *more: str) -> Path:
        if (world, more) not in made:
            made[world, more] = tmp_path_factory.mktemp("undisturbed") / "run"
            trained(world, [*flags, *more], made[world, more])
        return made[world, more]

    return find
