"""Whatever takes a file of weights takes its address: the library, train, predict and export."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqpar import load_monai, load_nnunet, load_run, read_weights
from seqpar.cli import plan, train
from seqpar.cli.export import act as export
from seqpar.data.errors import DataError
from seqpar.models.build import build_network
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Group
from seqpar.sweeps.space import name_of_point, parse_space
from seqpar.training.run_request import read_request
from seqpar.weights.weight_files import write_weights
from tests.support.configs import config_of
from tests.support.folders import tree
from tests.support.foreign_weights import HEADS, TILE, tiny_unetr
from tests.support.https import FileServer, serving
from tests.support.nnunet_networks import configuration, plans_of, reference, write_results
from tests.support.predictions import act, make_run, write_images
from tests.support.training_runs import prepare, tiny_data, trained


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "downloads"))
    with serving(monkeypatch) as served:
        yield served


def test_the_library_reads_by_address(server: FileServer) -> None:
    file = io.BytesIO()
    torch.save({"state_dict": tiny_unetr()}, file)
    address = server.address("unetr.pt", file.getvalue())
    assert read_weights(address).keys() == tiny_unetr().keys()
    assert (
        load_monai(address, TILE, HEADS).state_dict().keys()
        == load_monai(tiny_unetr(), TILE, HEADS).state_dict().keys()
    )
    with pytest.raises(DataError, match="it is no file of weights"):
        read_weights(server.address("page.html", b"<html>please log in</html>"))
    assert server.asked == ["unetr.pt", "page.html"]


def test_a_run_by_address_predicts_as_its_archive(server: FileServer, tmp_path, capsys) -> None:
    run, archive = make_run(tmp_path / "run"), tmp_path / "run.zip"
    assert export([str(run), str(archive)]) == 0
    write_images(tmp_path / "images")
    address = server.address("run.zip", archive.read_bytes())
    weights = server.address("other.safetensors", (run / "model.safetensors").read_bytes())
    assert load_run(address).state_dict().keys() == load_run(run, weights).state_dict().keys()
    assert act(tmp_path, archive, out="a") == act(tmp_path, address, out="b") == 0
    assert act(tmp_path, run, "--checkpoint", weights, out="c") == 0
    one, *others = (tree(tmp_path / name) for name in "abc")
    for other in others:
        assert other.pop("prediction.json") != one["prediction.json"]
        assert other == {name: file for name, file in one.items() if name != "prediction.json"}
    assert sorted(set(server.asked)) == sorted(server.asked)


def test_training_begins_from_an_address(server: FileServer, tmp_path, capsys) -> None:
    flags, file, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "model.safetensors", tmp_path / "run"
    prepare(flags)
    config = config_of(flags)
    write_weights(file, build_network(config, 1, 2, Group("seq")))
    address = server.address(file.name, file.read_bytes())
    assert train.act([*flags, "--weights", address, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"weights: {address} would be downloaded to {tmp_path}/downloads/weights/" in said.out
    assert "downloading" not in said.err and server.asked == []
    launch = trained(2, [*flags, "--seqpar", "2", "--weights", address], run)
    assert f"weights from {address} (seqpar): " in launch.said(0) and server.asked == [file.name]
    assert json.loads((run / "config.json").read_text())["config"]["weights"] == address
    again = [*flags, "--seqpar", "2", "--resume", "--out", str(run), "--weights", address, "--dry-run"]
    assert read_request(again, read_launcher({})).config.weights == address
    del server.files[file.name]
    gone = trained(1, [*flags, "--weights", f"{server.root}/{file.name}#sha256={'0' * 64}"], tmp_path / "no", expect=3)
    assert "model.safetensors: the server answers 404" in gone.said() and not (tmp_path / "no").exists()


def test_a_plan_downloads_nothing(server: FileServer, capsys) -> None:
    address = server.address("model.safetensors", b"")
    assert plan.act(["--device", "mi250x", "--tile", "32", "--depth", "1", "--weights", address]) == 0
    assert f"weights: {address} would be downloaded" in capsys.readouterr().out and server.asked == []


def test_nnunets_settings_come_with_the_file(server: FileServer, tmp_path) -> None:
    flags, kind = tiny_data(tmp_path), "PlainConvUNet"
    write_results(tmp_path / kind, [reference(kind).float()], plans_of(configuration(kind)))
    file = tmp_path / kind / "fold_0" / "checkpoint_final.pth"
    address, launcher = server.address(file.name, file.read_bytes()), read_launcher({})
    own = ["--data", flags[flags.index("--data") + 1], "--device", "cpu", "--dry-run"]
    assert read_request([*own, "--weights", address], launcher).config.network != "nnunet-plain"  # a dry run
    assert server.asked == []
    assert load_nnunet(address).state_dict().keys() == load_nnunet(file).state_dict().keys()
    configs = [read_request([*own, "--weights", source], launcher).config for source in (address, str(file))]
    assert configs[0] == replace(configs[1], weights=address) and configs[0].network == "nnunet-plain"
    bare = server.address("download", file.read_bytes())  # as of a server that names no file
    load_nnunet(bare)
    assert read_request([*own, "--weights", bare], launcher).config == replace(configs[1], weights=bare)


def test_a_sweep_compares_addresses() -> None:
    address = f"https://host/a.pth#sha256={'0' * 64}"
    (point,) = parse_space([f"weights={address}"]).points()
    assert point["weights"] == address and Path(name_of_point(point)).name.startswith("weights-a.pth-sha256-0")
