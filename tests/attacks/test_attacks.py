"""Every attack of every table ends as its row says."""

import importlib
from pathlib import Path

import pytest

from tests.attacks.attack import Attack
from tests.support.folders import nnunet
from tests.support.predictions import make_run

TABLES = [path.stem for path in sorted(Path(__file__).parent.glob("attacks_*.py"))]
ROWS = [attack for table in TABLES for attack in importlib.import_module(f"tests.attacks.{table}").ATTACKS]


@pytest.mark.parametrize(
    "attack",
    [pytest.param(row, id=row.name, marks=[pytest.mark.started] * (row.started or row.slow)) for row in ROWS],
)
def test_attack(attack: Attack) -> None:
    attack.carry_out()


def test_names_of_attacks_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"code": 2},
        {"says": "a word that nobody says"},
        {"keeps": "out"},
        {"within_s": 0.0},
        {"within_mb": -1.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_row_that_expects_something_else_fails(wrong: dict[str, object]) -> None:
    row = {"name": "", "types": "predict run -i D -o out", "code": 0, "says": "", "make": _make}
    Attack(**row).carry_out()
    with pytest.raises(AssertionError):
        Attack(**{**row, **wrong}).carry_out()


def _make(here: Path) -> None:
    nnunet(here / "D")
    make_run(here / "run")
    (here / "out").mkdir(mode=0o777)
