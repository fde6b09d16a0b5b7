"""Training on cases whose labels show some classes only: on any ranks what one process computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqpar.runs.journal import read_metrics
from seqpar.tasks.segment.data import open_data, summary_of_data
from seqpar.tasks.training_data import outputs_shown
from tests.support.configs import config_of, trainer_of
from tests.support.folders import label_array, nnunet, save, several_readers
from tests.support.training_runs import TINY, farthest, losses, trained

LABELS = {"background": 0, "liver": 1, "spleen": 2}
SHOWN = {"c_000": ["spleen"], "c_001": ["liver"], "c_002": ["spleen"], "c_003": []}
SPREADS = {
    "1 x 2, halo": (2, "--seqpar 2 --mode halo --batch 4"),
    "1 x 2, swap": (2, "--seqpar 2 --mode swap --batch 4"),
    "2 x 1": (2, "--batch 2"),
    "2 x 2": (4, "--seqpar 2 --mode halo --batch 2"),
}


def write(root: Path, annotated: dict[str, list[str]]) -> Path:
    nnunet(root, cases=5, labels=LABELS, annotated=annotated)
    for n in range(5):
        values = tuple(LABELS[name] for name in SHOWN.get(f"c_{n:03d}", ["liver", "spleen"]))
        save(root / "labelsTr" / f"c_{n:03d}.nii.gz", label_array(values))
    return root


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("organs")
    data = ["--data", str(write(root / "Dataset003_Organs", SHOWN)), "--cache", str(root / "cache")]
    return [*TINY.split(), *data, "--precision", "fp64", "--epochs", "1", "--iterations", "3", "--loss", "dice-focal"]


def test_ranks_compute_what_one_process_does(flags: list[str], tmp_path: Path) -> None:
    run = [*flags, "--class-weights", "1", "2", "3"]
    trained(1, [*run, "--batch", "4"], tmp_path / "alone")
    for name, (world, more) in SPREADS.items():
        trained(world, [*run, *more.split()], tmp_path / name)
        assert farthest(losses(tmp_path / name), losses(tmp_path / "alone")) < 1e-12, name
    (row,) = (row for row in read_metrics(tmp_path / "2 x 2" / "metrics.jsonl") if row["kind"] == "val")
    (alone,) = (row for row in read_metrics(tmp_path / "alone" / "metrics.jsonl") if row["kind"] == "val")
    assert row["dice"]["liver"] is None and row["dice"]["spleen"] is not None, "the held-out case shows no liver"
    assert row["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    summary = json.loads((tmp_path / "alone" / "validation" / "summary.json").read_text())
    assert summary["num_values"]["1"]["Dice"] == 0 and summary["num_values"]["2"]["Dice"] == 1


def test_what_is_listed_changes_the_loss(flags: list[str], tmp_path: Path) -> None:
    """The control: the same labels, of which every case is said to show all."""
    data = ["--data", str(write(tmp_path / "Dataset003_Organs", {})), "--cache", str(tmp_path / "cache")]
    trained(1, flags, tmp_path / "lists")
    trained(1, [*flags, *data], tmp_path / "none")
    assert farthest(losses(tmp_path / "lists"), losses(tmp_path / "none")) > 1e-2


def test_organs_that_no_case_shows_learn_nothing(flags: list[str], tmp_path: Path, alone) -> None:
    """Of a batch that shows no liver, neither its output's weights nor the background's get any gradient."""
    trainer = trainer_of(config_of(flags), alone, tmp_path)
    layout, classes = trainer.net.encoder.layout, trainer.net.decoder.classes
    image = torch.randn(2, layout.num_tokens, 1, *layout.patch, dtype=torch.float64)
    label = torch.randint(0, 2, (2, layout.num_tokens, *layout.patch)) * 2
    shown = outputs_shown(trainer.data, ["c_000", "c_002"], trainer.net.mode, alone.device)
    assert shown.tolist() == [[False, False, True]] * 2
    trainer.loss(trainer.net(image), trainer.net.arrange(label), trainer.gradients.loss_groups, shown).backward()
    for gradient in (classes.weight.grad, classes.bias.grad):
        assert not gradient[:2].any() and gradient[2].abs().max() > 1e-6


def test_regions_are_shown_where_all_their_labels_are(tmp_path: Path) -> None:
    labels = {"background": 0, "both": [1, 2], "spleen": [2]}
    root = write(tmp_path / "D", {})
    content = json.loads((root / "dataset.json").read_text())
    content |= {"labels": labels, "regions_class_order": [1, 2], "annotated": {"c_000": ["spleen"]}}
    (root / "dataset.json").write_text(json.dumps(content))
    data = open_data(config_of([*TINY.split(), "--data", str(root), "--cache", str(tmp_path / "cache")]), True)
    assert data.annotated(["c_000", "c_004"]).tolist() == [[False, True], [True, True]]
    assert data.hidden_classes("c_000") == ("both",) and data.hidden_classes("c_004") == ()


def test_classes_that_no_case_to_train_on_has_are_told(tmp_path: Path) -> None:
    root = tmp_path / "D"
    nnunet(root, cases=5, labels=LABELS)

    def told(more: str = "--fold 0", annotated: dict[str, list[str]] | None = None, **shown: tuple[int, ...]) -> str:
        """``shown``: the labels in each case, "both" if it is not named."""
        for n in range(5):
            save(root / "labelsTr" / f"c_{n:03d}.nii.gz", label_array(shown.get(f"c_{n:03d}", (1, 2))))
        content = json.loads((root / "dataset.json").read_text()) | {"annotated": annotated or {}}
        (root / "dataset.json").write_text(json.dumps(content))
        cache = str(tmp_path / f"cache{len(list(tmp_path.iterdir()))}")
        config = config_of([*TINY.split(), "--data", str(root), "--cache", cache, *more.split()])
        data = open_data(config, True)
        assert data.about_untaught(config) == [
            line for line in summary_of_data(data, config).split("\n") if line.startswith("warning")
        ]
        assert data.describe_cases(config).get("in_no_case", []) == data.untaught(config)
        return " ".join(data.about_untaught(config))

    liver = dict.fromkeys([f"c_{n:03d}" for n in range(5)], (1,))
    held_out = open_data(
        config_of([*TINY.split(), "--data", str(root), "--cache", str(tmp_path / "c")]), True
    ).held_out_ids
    in_one = liver | {held_out[0]: (1, 2)}
    has_none = "warning: no case to train on has spleen: the network cannot learn it from these cases"
    assert told() == told("--fold all", **in_one) == ""
    assert told(**in_one) == f"{has_none}; choose another --fold"
    assert (
        told("--fold 0 --train-cases 2", **in_one)
        == f"{has_none}; raise --train-cases (now 2) or choose another --fold"
    )
    assert told(**liver) == told("--fold all", **liver) == has_none, "nor has any other"
    assert told("--join-labels organs=1,2", **liver) == "", "a label of the data, and no class"
    others = {case: ["liver"] for case in liver if case not in held_out}
    assert told(annotated=others, **in_one) == f"{has_none}; choose another --fold", "annotated for the liver alone"
    assert told(annotated={"c_004": ["liver"]}, c_004=(1,)) == "", "others show it"


def test_of_regions_and_labels_with_doubt_what_may_be_there_counts(tmp_path: Path) -> None:
    labels = {"background": 0, "both": [1, 2], "spleen": [2]}
    root = nnunet(tmp_path / "D", cases=5, labels=labels, regions_class_order=[1, 2])  # all have label 1 alone
    config = config_of([*TINY.split(), "--data", str(root), "--cache", str(tmp_path / "cache")])
    assert "spleen" in open_data(config, True).untaught(config) and "both" not in open_data(config, True).untaught(
        config
    )
    doubted = several_readers(tmp_path / "R", cases=5)
    config = config_of([*TINY.split(), "--data", str(doubted), "--cache", str(tmp_path / "doubted")])
    assert open_data(config, True).untaught(config) == []
    for task, synthesis in (("pretrain", 0.0), ("segment", 0.5)):
        assert open_data(config, True).untaught(replace(config, task=task, synthesis=synthesis)) == []


def test_class_weights_of_another_number_are_refused(flags: list[str], tmp_path: Path) -> None:
    from tests.support.training_runs import Launch

    with Launch(1, [*flags, "--class-weights", "1", "2"], tmp_path / "run") as launch:
        assert launch.wait() == [2]
    assert "--class-weights 1 2: 3 are needed, for background, liver, spleen" in launch.said()
