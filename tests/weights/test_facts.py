"""What shapes do not tell of a network its file of weights does: heads, positions, the grid of positions."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from seqpar.cli.export import act as export
from seqpar.data.errors import DataError
from seqpar.models.build import build_network
from seqpar.models.network import Network
from seqpar.parallel.mesh import Group
from seqpar.runs.trained_run import load_run
from seqpar.settings.config import Config
from seqpar.training.setup import refuse_other_outputs
from seqpar.weights import checkpoint
from seqpar.weights.facts import (
    about_cases_learned,
    cases_learned_before,
    cases_of_other_fold,
    cases_that_differ,
    changed_between,
    not_one_split,
    other_scans,
    read_dataset,
    reordered_names,
    sets_learned,
    sets_of_earlier_data,
    several_data,
)
from seqpar.weights.pretrained import load_pretrained
from seqpar.weights.weight_files import write_weights
from tests.support.predictions import SMALL, make_run

UNETR = replace(SMALL, tile=(16, 16, 32), decoder="unetr", depth=12)


def made(config: Config, seed: int = 0) -> Network:
    return build_network(replace(config, seed=seed), 1, 2, Group("seq"))


@pytest.mark.parametrize(
    ("other", "flags"),
    [
        (dict(heads=3), ("--heads 3", "--heads 2")),
        (
            dict(positions="learned+rope", heads=1),
            ("--heads 1 --positions learned+rope", "--heads 2 --positions learned"),
        ),
        (dict(skips="paper"), ("--skips paper", "--skips monai")),
    ],
)
def test_weights_of_the_same_shapes_are_refused_where_their_network_computes_otherwise(tmp_path, other, flags):
    file = tmp_path / "weights"
    write_weights(file, made(replace(UNETR, **other), 1))
    config = replace(UNETR, weights=str(file))
    net, (theirs, ours) = made(config), flags
    before = net.encoder.state_dict()["patch_embed.proj.weight"].clone()
    with pytest.raises(
        ValueError, match=f"were trained with {theirs}, and this run has {ours}: use {theirs}".replace("+", r"\+")
    ):
        load_pretrained(net, config)
    assert torch.equal(net.encoder.state_dict()["patch_embed.proj.weight"], before)
    assert "tensors" in load_pretrained(made(replace(config, **other)), replace(config, **other))
    write_weights(file, made(replace(UNETR, **other), 1).state_dict())
    assert "does not tell its attention heads, --heads 2 are taken" in load_pretrained(net, config)


def test_what_checkpoints_runs_and_exported_runs_tell(tmp_path):
    run = make_run(tmp_path / "run", config=SMALL)
    four = replace(SMALL, heads=4)
    net = made(four)
    optimizer, described = torch.optim.Adam(net.parameters()), json.dumps({"config": asdict(four)})
    saved = checkpoint.save(tmp_path / "c", net, optimizer, checkpoint.Progress(), Group("world"), described)
    (saved / "config.json").unlink()
    other = make_run(tmp_path / "other", config=four)
    write_weights(other / "model.safetensors", net.state_dict())  # as earlier versions did: config.json beside it tells
    assert export([str(other), str(tmp_path / "other.zip"), "--licence", "none"]) == 0
    for file in (saved / "model.safetensors", other / "model.safetensors", tmp_path / "other.zip"):
        with pytest.raises(DataError, match=f"{file}: holds weights .* --heads 4, and {run} has --heads 2"):
            load_run(run, str(file))
        with pytest.raises(ValueError, match="use --heads 4"):
            load_pretrained(made(SMALL), replace(SMALL, weights=str(file)))
    again = tmp_path / "again.safetensors"
    write_weights(again, load_run(other))
    with pytest.raises(DataError, match="--heads 4"):
        load_run(run, str(again))


def test_positions_of_another_tile_with_as_many_tokens_are_resized(tmp_path):
    flat, upright = (replace(SMALL, tile=tile) for tile in ((16, 8, 8), (8, 8, 16)))
    for name, source in (("weights", made(flat, 1)), ("silent", made(flat, 1).state_dict())):
        write_weights(tmp_path / name, source)
        config = replace(upright, weights=str(tmp_path / name))
        net = made(config)
        load_pretrained(net, config)
        table = net.encoder.state_dict()["pos_embed"]
        assert torch.equal(table, made(flat, 1).encoder.state_dict()["pos_embed"]) == (name == "silent")


def test_weights_of_another_kind_of_network_are_refused_by_its_name(tmp_path):
    write_weights(tmp_path / "weights", made(SMALL))
    config = Config(network="unet-lamp", tile=(32, 32, 32), features=2, weights=str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="trained with --network vit, and this run has --network unet-lamp"):
        load_pretrained(made(config), config)


def test_weights_of_windows_are_refused_where_others_are_and_may_begin_them(tmp_path):
    two, four, plain = (replace(SMALL, tile=(16, 16, 16), window=window) for window in (2, 4, 0))
    file = tmp_path / "weights"
    for config in (two, four, plain):
        write_weights(file, made(two, 1))
        start = replace(config, weights=str(file))
        if config is two:
            assert "tokens see windows" not in load_pretrained(made(start), start)
        else:
            with pytest.raises(ValueError, match=f"trained with --window 2, .* has --window {config.window}: use --w"):
                load_pretrained(made(start), start)
        write_weights(file, made(plain, 1))
        line = load_pretrained(made(start), start)
        assert (f"; tokens see windows of {config.window}, and saw all" in line) == (config is not plain)
        write_weights(file, made(two, 1).state_dict())  # says nothing, as files of earlier versions do
        assert "tokens see windows" not in load_pretrained(made(start), start)
    write_weights(file, made(two, 1))
    hiding = replace(plain, task="pretrain", weights=str(file))
    with pytest.raises(ValueError, match="--task pretrain knows no windows, take other weights"):
        load_pretrained(made(hiding), hiding)


def test_prediction_refuses_weights_of_other_windows(tmp_path):
    whole, windows = (replace(SMALL, tile=(16, 16, 16), window=window) for window in (0, 2))
    runs = [make_run(tmp_path / name, config=config) for name, config in (("whole", whole), ("windows", windows))]
    for run, other, flags in ((runs[0], runs[1], (2, 0)), (runs[1], runs[0], (0, 2))):
        file = other / "model.safetensors"
        with pytest.raises(DataError, match=f"trained with --window {flags[0]}, and {run} has --window {flags[1]}"):
            load_run(run, str(file))
        assert load_run(run, str(run / "model.safetensors"))


def test_channels_and_labels_in_another_order_are_told(tmp_path):
    before = {"modalities": ["T1", "FLAIR"], "labels": {"background": 0, "edema": 1, "core": 2}}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"dataset": before}))
    saved = run / "checkpoints" / "step-1"
    saved.mkdir(parents=True)
    for file in (run / "model.safetensors", saved / "model.safetensors"):
        assert read_dataset(file) == before
    assert read_dataset(tmp_path / "elsewhere" / "model.safetensors") == {}
    others = {"labels": {"background": 0, "necrosis": 1}}
    assert reordered_names(before, before) == reordered_names(before, {**before, **others}) == []
    now = {"modalities": ["FLAIR", "T1"], "labels": {"background": 0, "core": 1, "edema": 2}}
    assert reordered_names(before, now) == [
        "caution: their channels are T1, FLAIR, and here FLAIR, T1, so that some begin with the weights of others",
        "caution: their labels are background, edema, core, and here background, core, edema, so that some begin with "
        "the weights of others",
    ]
    classes = [{"volume_classes": {"names": names}} for names in (["healthy", "ill"], ["ill", "healthy"])]
    assert "their classes are healthy, ill, and here ill, healthy" in reordered_names(*classes)[0]


def test_cases_that_the_weights_have_learned_and_the_run_does_not_train_on_are_found() -> None:
    before = {"labels": {"tumour": 1}, "train": ["a", "b"], "held_out": ["c"], "name": "D"}
    now = {**before, "train": ["b", "c"], "held_out": ["a"]}
    assert cases_learned_before(before, now) == {"a"} and cases_learned_before(before, before) == set()
    assert cases_learned_before({**before, "labels": {}}, now) == cases_learned_before({}, now) == set()
    assert cases_learned_before({**before, "name": "E"}, now) == set()
    assert cases_learned_before({**before, "learned_before": ["x"]}, now) == {"a", "x"}
    old, new = {"a": "1", "b": "2", "c": "3"}, {"a": "4", "b": "2", "c": "3"}
    assert cases_learned_before({**before, "digests": old}, {**now, "digests": new}) == set()  # another scan
    assert cases_learned_before({**before, "digests": old, "name": "E"}, {**now, "digests": old}) == {"a"}
    as_in_memory = {**now, "digests": old, "name": "E", "recipe": {"spacing": (1, 1)}}
    as_read = {**before, "digests": old, "recipe": {"spacing": [1, 1]}}
    assert cases_learned_before(as_read, as_in_memory) == {"a"}, "a recipe has tuples until it is read"
    between = {"name": "F", "labels": {"tumour": 1}, "train": ["x"], "weights_learned_from": sets_learned(before)}
    pretrained = {**between, "labels": {}}  # by labels once, and not since
    for weights in (between, pretrained):
        assert cases_learned_before(weights, now) == {"a"}, "weights do not forget"
    assert [own["train"] for own in sets_learned(between)] == [["x"], ["a", "b"]] and sets_learned({}) == []
    other_recipe = {**now, "digests": new, "recipe": {"spacing": [2, 2, 2]}}
    assert cases_learned_before({**before, "digests": old}, other_recipe) == {"a"}
    scans, elsewhere = {"a": "1 2", "b": "3 4", "c": "5"}, {**other_recipe, "name": "E"}
    known = {**before, "digests": old, "voxels": scans}
    assert cases_learned_before(known, {**elsewhere, "voxels": scans}) == {"a"}, "however they were prepared"
    assert cases_learned_before(known, {**elsewhere, "voxels": {"c": "2", "a": "1 9"}, "train": []}) == {"c"}
    assert cases_learned_before(known, {**other_recipe, "voxels": {"a": "8"}}) == set(), "another scan of this name"
    assert cases_learned_before(known, {**other_recipe, "voxels": {"b": "3 4"}}) == {"a"}, "nothing is known of it"
    assert other_scans(known, {"voxels": {**scans, "a": "8", "x": "9"}}) == {"a"}
    assert other_scans({**known, "voxels": {}}, {"voxels": scans}) == set()
    assert other_scans({"weights_learned_from": sets_learned(known)}, {"voxels": {"a": "8", "c": "9"}}) == {"a", "c"}
    (behind,) = sets_learned({**known, "validated": ["c"]})
    assert (behind["validated"], behind["voxels"]) == (["c"], scans), "what chose the weights is no new case later"
    first, second = ({**known, "name": name, "digests": {"a": name, "b": name}} for name in "DE")
    run = sets_of_earlier_data(first, second)
    for before, now_on in ((second, first), (first, second), (second, first)):
        run = sets_of_earlier_data({**before, "weights_learned_from": run}, now_on)
    assert [own["name"] for own in run] == ["E", "D"], "each once, however often the data change"
    assert cases_of_other_fold("1", "0", now) == cases_of_other_fold("all", "0", now) == {"a"}
    assert not any(cases_of_other_fold(*folds, now) for folds in (("0", "0"), ("", "0"), ("1", "all"), ("1", "90:10")))
    says = "caution: they have learned from 1 held-out case, such as a, whose scores therefore say nothing of new cases"
    assert about_cases_learned({"a", "x"}, now) == [says] and about_cases_learned({"x"}, now) == []


def test_cases_whose_files_changed_between_runs_are_found_however_these_were_prepared() -> None:
    """A changed label may change how all cases are prepared."""
    before = {"name": "A", "recipe": {"mean": 1}, "digests": {"a": "1", "b": "2"}, "files": {"a": "f", "b": "g"}}
    alike = {**before, "digests": {"a": "1", "b": "3"}, "files": {"a": "rewritten", "b": "h"}}
    assert cases_that_differ(before, alike) == ["b"], "where they were prepared alike, arrays count"
    anew = {**before, "recipe": {"mean": 2}, "digests": {"a": "4", "b": "5"}, "files": {"a": "f", "b": "h"}}
    assert cases_that_differ(before, anew) == cases_that_differ(anew, before, before) == ["b"]
    finer = {**anew, "files": before["files"]}
    assert cases_that_differ(before, finer) == [] and changed_between(before, finer) == ""
    assert cases_that_differ({**before, "files": {}}, anew) == [], "earlier versions recorded none"


def test_folds_that_are_not_of_one_split_are_told() -> None:
    folds = [{"dataset": {"train": [*"abcx".replace(case, "")], "held_out": [case]}} for case in "abc"]
    assert not_one_split(folds) == not_one_split(folds[:2]) == not_one_split([]) == "", "x is trained on in all"
    twice = "several of these folds hold out 1 case, such as a"
    assert not_one_split([*folds[:2], {"dataset": {"train": [*"bcx"], "held_out": ["a"]}}]) == twice
    gone = [*folds[:2], {"dataset": {"train": ["b", "d", "x"], "held_out": ["a"]}}]
    assert not_one_split(gone) == f"{twice}; no fold holds out 2 cases, such as c, which only some train on"
    few = [{"dataset": {"train": [one], "held_out": [held]}} for one, held in ("xa", "yb")]
    assert not_one_split(few).startswith("no fold holds out 2 cases, such as x")
    few = [{**own, "config": {"train_cases": 1}} for own in few]
    assert not_one_split(few) == "", "as --train-cases draws them"


def test_two_data_sets_of_one_name_are_no_changed_cases() -> None:
    here = {"name": "A", "prepared": "/x/A", "digests": {"a": "1"}, "voxels": {"a": "s"}}
    there = {**here, "prepared": "/y/A", "digests": {"a": "2"}, "voxels": {"a": "t"}}
    told = "these runs were trained on several data sets: A (prepared in /x/A), A (prepared in /y/A)"
    assert several_data(here, there, here) == told and changed_between(here, there) == ""
    for other in ({"voxels": {"a": "s"}}, {"voxels": {}}, {"prepared": "/x/A"}):  # moved, not known, changed in place
        assert several_data(here, {**there, **other}) == ""
        assert changed_between(here, {**there, **other}).startswith("1 case, such as a, changed between")
    other = {**there, "name": "B"}
    assert several_data(here, other).endswith("several data sets: A, B") and changed_between(here, other) == ""


def test_a_pretraining_has_learned_no_labels(tmp_path) -> None:
    for task, expected in (("segment", {"tumour": 1}), ("pretrain", {})):
        content = {"config": {"task": task}, "dataset": {"labels": {"tumour": 1}}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert read_dataset(tmp_path / "model.safetensors")["labels"] == expected


def test_a_run_is_not_resumed_where_labels_mean_something_else() -> None:
    began = {"labels": {"a": 1}, "values": [0, 1], "regions_class_order": [1, 2], "ignore_label": None}
    refuse_other_outputs(began, began, "D", Path("run"))
    changes = {"values": [0, 2], "regions_class_order": [2, 1], "ignore_label": 3}
    for name, value in changes.items():
        with pytest.raises(DataError, match="but the run in run learned"):
            refuse_other_outputs(began, began | {name: value}, "D", Path("run"))
