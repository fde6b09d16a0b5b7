"""The tasks: programs know them by one list, and a stage is imported when it is called."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from seqpar.models import build
from seqpar.settings import data_settings
from seqpar.tasks.lookup import TASKS, task_of_predictions


def test_flags_networks_and_folders_know_the_same_tasks() -> None:
    assert list(TASKS) == list(data_settings.TASKS) == list(build._OF_TASKS)
    folders = {type(task).__module__.split(".")[2] for task in TASKS.values()}
    assert folders == set(TASKS)


def test_looking_a_task_up_imports_none_of_its_stages() -> None:
    code = (
        "import sys; from seqpar.tasks.lookup import TASKS; "
        "print(*(name for name in sys.modules if name.startswith('seqpar.tasks') or name in ('torch', 'matplotlib')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert "seqpar.tasks.segment.segmentation" in loaded, "a control"
    own = {type(task).__module__ for task in TASKS.values()} | {f"seqpar.tasks.{name}" for name in TASKS}
    assert loaded - own == {"seqpar.tasks", "seqpar.tasks.lookup", "seqpar.tasks.task"}


def test_predictions_of_two_tasks_are_not_evaluated_together(tmp_path: Path) -> None:
    for name in ("maps", "classes"):
        (tmp_path / name).mkdir()
    (tmp_path / "classes" / "predictions.csv").touch()
    maps, classes = tmp_path / "maps", tmp_path / "classes"
    assert task_of_predictions([maps]) is TASKS["segment"] and task_of_predictions([classes]) is TASKS["classify"]
    with pytest.raises(ValueError, match="maps holds label maps, .*classes classes of cases: evaluate each"):
        task_of_predictions([maps, classes])


def test_a_pretraining_neither_predicts_nor_is_compared_by_cases() -> None:
    with pytest.raises(ValueError, match="--task pretrain rebuilds hidden parts"):
        TASKS["pretrain"].predict(None, [], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to evaluate"):
        TASKS["pretrain"].evaluate(Namespace())
    gaps = list[str]()
    assert TASKS["pretrain"].compare({"a": None, "b": None}, gaps).count == 0  # type: ignore[dict-item]
    assert [gap.partition(":")[0] for gap in gaps] == ["a", "b"]


def test_flags_without_effect_are_named_and_those_left_at_their_default_are_not() -> None:
    task, given = TASKS["segment"], Namespace(explain=True, explain_by="")
    with pytest.raises(ValueError, match="--explain would do nothing: why: remove it"):
        task.refuse_idle_flags("predict", given, "why")
    task.refuse_idle_flags("predict", Namespace(explain=False, explain_by=""), "why")
    task.refuse_idle_flags("report", given, "why")
