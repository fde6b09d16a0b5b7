"""An exported run: one file that predicts as its folder does, and says nothing of the machine it came from."""

import json
import re
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from seqpar import load_run, read_weights
from seqpar.cli.export import act as export
from seqpar.cli.predict import act as predict
from seqpar.cli.report import act as report
from seqpar.cli.train import act as train
from seqpar.cluster.exit_codes import DATA, USAGE
from seqpar.cluster.exit_codes import run as run_act
from seqpar.data.errors import DataError
from seqpar.runs.archive import MOST_JSON, digest_of
from seqpar.runs.trained_run import read_run
from seqpar.weights.facts import read_dataset
from tests.support.checkpoints import write_window
from tests.support.folders import tree
from tests.support.predictions import ROOT, act, make_run, write_images


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose config.json holds what a training leaves in one."""
    secrets = {"prepared": "/home/jane/cache", "train": ["DOE_JANE"], "held_out": ["ROE_RICHARD"]}
    folder = make_run(tmp_path / "jane-run", name="Dataset001_A", modalities=["T1"], **secrets)
    content = json.loads((folder / "config.json").read_text())
    content["config"] |= {"data": "/home/jane/data", "out": "/home/jane/run", "weights": "/home/jane/w.pt"}
    content |= {
        "layout": {"hosts": ["jane-pc"]},
        "command": ["/home/jane/train.py"],
        "commit": "abc",
        "preset": "debug",
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_an_exported_run_predicts_what_its_folder_does(run, tmp_path, capsys) -> None:
    write_images(tmp_path / "images")
    archive = tmp_path / "a.zip"
    write_window(run, {"whole": 0.9, "sliding": 0.8}, 2, [4, 5, 6])  # predict follows it, out of an archive too
    assert export([str(run), str(archive), "--licence", "CC-BY-4.0"]) == 0
    printed = capsys.readouterr().out
    assert (
        "licence: CC-BY-4.0" in printed and f"predict.py {archive} -i IMAGES -o PREDICTIONS" in printed.splitlines()[-1]
    )
    assert act(tmp_path, run, out="folder") == act(tmp_path, archive, out="archive") == 0
    folder, archived = (tree(tmp_path / name) for name in ("folder", "archive"))
    windows = [json.loads((tmp_path / name / "prediction.json").read_text()) for name in ("folder", "archive")]
    assert [record["settings"]["window"] for record in windows] == ["whole", "whole"]
    assert folder.pop("prediction.json") != archived.pop("prediction.json")
    assert folder == archived and len(folder) == 3
    first, second = load_run(run).state_dict(), load_run(archive).state_dict()
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items()) and len(first) == len(second)
    assert read_weights(archive).keys() == first.keys() and read_run(archive).whole_grid == (4, 5, 6)


def test_a_report_says_that_it_needs_the_run_folder(run, tmp_path, capsys) -> None:
    assert export([str(run), str(tmp_path / "a.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path / "unpacked")
    for given in (tmp_path / "a.zip", tmp_path / "unpacked"):
        assert run_act(report, [str(given)]) == DATA
        assert f"{given}: is an exported run, without the curves" in capsys.readouterr().err


def test_an_archive_that_is_not_there_is_said_to_be_missing(tmp_path, capsys) -> None:
    for act_of, more in ((predict, ["-i", "x", "-o", "y"]), (export, ["a.zip"])):
        assert run_act(act_of, [str(tmp_path / "missing.zip"), *more]) == USAGE
        said = capsys.readouterr().err
        assert f"{tmp_path}/missing.zip does not exist" in said and "archive that export wrote" in said
    assert run_act(export, [str(tmp_path), "a.zip"]) == USAGE
    assert f"config.json is missing, so {tmp_path} is no run folder" in capsys.readouterr().err, "a folder is there"


def test_it_holds_nothing_of_the_machine_or_the_patients(run, tmp_path) -> None:
    assert export([str(run), str(tmp_path / "a.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert sorted(archive.namelist()) == ["about.json", "config.json", "model.safetensors"]
        assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o644}
        texts = [archive.read(name).decode() for name in ("about.json", "config.json")]
    assert not re.search("jane|DOE|ROE", "".join(texts))
    about = json.loads(texts[0])
    assert about["licence"] == "not stated" and about["checkpoint"] == "model.safetensors"
    content = json.loads(texts[1])
    assert content["commit"] == "abc" and content["dataset"]["name"] == "Dataset001_A"


def test_an_archive_says_that_it_does_not_tell_what_its_first_weights_learned(run, tmp_path) -> None:
    """Without labels of its own, as of a pretraining, it would seem to have learned from no case."""
    plain, begun = tmp_path / "plain.zip", tmp_path / "begun.zip"
    assert export([str(run), str(plain)]) == 0 and "weights_learned_unknown" not in read_dataset(plain)
    content = json.loads((run / "config.json").read_text())
    content["dataset"]["weights_learned_from"] = [{"name": "D", "recipe": None, "train": ["POE_JOHN"], "digests": {}}]
    (run / "config.json").write_text(json.dumps(content))
    assert export([str(run), str(begun)]) == 0 and read_dataset(begun)["weights_learned_unknown"] is True
    assert b"POE_JOHN" not in begun.read_bytes()


def test_the_same_run_gives_the_same_bytes_and_nothing_is_overwritten(run, tmp_path, capsys) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        assert export([str(run), str(tmp_path / folder / "a.zip")]) == 0
    first, second = (tmp_path / folder / "a.zip" for folder in ("x", "y"))
    assert first.read_bytes() == second.read_bytes()
    assert run_act(export, [str(run), str(first), "--licence", "other"]) == 3
    assert "is there already" in capsys.readouterr().err and first.read_bytes() == second.read_bytes()


def test_weights_of_torch_are_packed_too_and_those_of_another_network_refused(run, tmp_path, capsys) -> None:
    weights = {name: tensor + 1 for name, tensor in read_weights(run / "model.safetensors").items()}
    torch.save(weights, tmp_path / "w.pt")
    assert export([str(run), str(tmp_path / "a.zip"), "--checkpoint", str(tmp_path / "w.pt")]) == 0
    assert "weights another file" in capsys.readouterr().out, "whose name is nobody's business"
    packed = read_weights(tmp_path / "a.zip")
    assert all(torch.equal(packed[name], tensor) for name, tensor in weights.items())
    torch.save({"x": torch.ones(1)}, tmp_path / "w.pt")
    assert run_act(export, [str(run), str(tmp_path / "b.zip"), "--checkpoint", str(tmp_path / "w.pt")]) == 3
    assert "another network" in capsys.readouterr().err and not (tmp_path / "b.zip").exists()


def test_what_is_no_exported_run_is_named_with_what_to_do(run, tmp_path) -> None:
    write_images(tmp_path / "images")
    archive = tmp_path / "a.zip"
    with pytest.raises(ValueError, match=r"name it a\.tar\.zip"):
        export([str(run), str(tmp_path / "a.tar")])
    assert export([str(run), str(archive)]) == 0
    with pytest.raises(ValueError, match="checkpoint='latest': .* one set of weights"):
        act(tmp_path, archive, "--checkpoint", "latest")
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.zip: is no exported run, or damaged"):
        act(tmp_path, archive)
    middle = len(whole) // 2
    archive.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
    with pytest.raises(DataError, match=r"a\.zip: "):
        act(tmp_path, archive)
    with zipfile.ZipFile(archive, "w") as other:
        other.writestr("x", "y")
    with pytest.raises(DataError, match="holds no config.json"):
        act(tmp_path, archive)


def harmed(archive: Path, name: str, harm) -> None:
    """Writes the archive again with another content of one of its files, packed."""
    with zipfile.ZipFile(archive) as old:
        parts = {entry: old.read(entry) for entry in old.namelist()}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as new:
        for entry, part in parts.items():
            new.writestr(entry, harm(part) if entry == name else part)


def with_setting(part: bytes, name: str, value: object) -> bytes:
    content = json.loads(part)
    content["config"][name] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "name,harm,words",
    [
        ("config.json", lambda _: b"[]", "config.json holds a list"),
        ("config.json", lambda _: b"[" * 100_000, "recursion"),
        ("config.json", lambda part: part + b" " * MOST_JSON, "config.json has more than 16 MiB"),
        ("config.json", lambda part: with_setting(part, "depth", "2"), "depth is '2'"),
        ("config.json", lambda part: with_setting(part, "deep", 2), "unknown settings deep"),
        ("about.json", lambda _: b"5", "about.json holds a int"),
        ("about.json", lambda _: b'{"dice": {"whole": []}}', "its about.json is damaged"),
    ],
)
def test_what_its_files_must_not_hold_is_one_error_of_the_archive(name, harm, words, run, tmp_path) -> None:
    assert export([str(run), str(archive := tmp_path / "a.zip")]) == 0
    harmed(archive, name, harm)
    with pytest.raises(DataError, match=words) as caught:
        read_run(archive)
    assert caught.value.path == str(archive)


@pytest.mark.parametrize(
    "setting, value, words",
    [
        ("embed_dim", 60_000, "its weights are not those of the network in its config.json: "),
        ("depth", 1000, "its config.json has 1000 blocks"),
        ("depth", 10**7, r"cannot be used \(depth 10000000: it must be in"),
    ],
)
def test_a_config_of_another_size_is_refused_before_anything_is_built(setting, value, words, run, tmp_path) -> None:
    assert export([str(run), str(archive := tmp_path / "a.zip")]) == 0
    harmed(archive, "config.json", lambda part: with_setting(part, setting, value))
    with pytest.raises(DataError, match=words) as caught:
        read_run(archive)
    assert caught.value.path == str(archive)


def test_weights_that_unpack_to_more_than_their_header_announces_are_not_unpacked(run, tmp_path) -> None:
    assert export([str(run), str(archive := tmp_path / "a.zip")]) == 0
    harmed(archive, "model.safetensors", lambda part: part + bytes(1 << 28))
    tracemalloc.start()
    with pytest.raises(DataError, match="model.safetensors has more bytes than its header announces"):
        read_weights(archive)
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()


def test_weights_whose_header_announces_more_than_their_network_has_are_not_unpacked(run, tmp_path) -> None:
    assert export([str(run), str(archive := tmp_path / "a.zip")]) == 0
    harmed(archive, "model.safetensors", lambda part: save({"encoder.norm.weight": torch.zeros(1 << 20)}))
    with pytest.raises(DataError, match="its weights are not those of the network"):
        read_run(archive)
    harmed(archive, "model.safetensors", lambda part: (1 << 40).to_bytes(8, "little") + part[8:])
    with pytest.raises(DataError, match="announces a header of 1099511627776 bytes"):
        read_run(archive)


def test_weights_that_were_put_into_an_archive_are_refused_and_packing_changes_none(run, tmp_path, capsys) -> None:
    write_images(tmp_path / "images")
    archive, before = tmp_path / "a.zip", read_weights(run / "model.safetensors")
    assert export([str(run), str(archive)]) == 0
    copy = Path(shutil.copy(archive, tmp_path / "b.zip"))
    harmed(copy, "", bytes)  # packed otherwise, so that its own bytes differ
    assert copy.read_bytes() != archive.read_bytes()
    assert act(tmp_path, copy, out="packed") == 0
    assert digest_of(copy) == digest_of(archive) == digest_of(run / "model.safetensors")
    others = ["-i", str(tmp_path / "images"), "-o", str(tmp_path / "o")]
    with pytest.raises(ValueError, match="hold the same weights"):
        predict([str(archive), str(copy), *others])
    harmed(copy, "model.safetensors", lambda _: save({name: tensor + 1 for name, tensor in before.items()}))
    told = (
        f"{copy}: its model.safetensors is not the file that about.json says was exported: copy the archive again, or"
    )
    for runs in ([copy], [archive, copy]):
        assert run_act(predict, [*map(str, runs), *others]) == DATA and told in capsys.readouterr().err
    with pytest.raises(DataError, match="is not the file that about.json says"):
        read_weights(copy)  # as train --weights does
    harmed(copy, "about.json", lambda part: json.dumps({**json.loads(part), "digest": None}).encode())
    assert predict([str(archive), str(copy), *others]) == 0, "an older version wrote no digest"


@pytest.mark.parametrize("reader", [read_run, read_weights])
def test_an_archive_that_zip_cannot_unpack_is_one_error_of_the_archive(reader, run, tmp_path) -> None:
    assert export([str(run), str(archive := tmp_path / "a.zip")]) == 0
    harmed(archive, "", bytes)
    whole = archive.read_bytes()
    entries = [found.start() for found in re.finditer(b"PK\x01\x02", whole)]
    heads = [found.start() for found in re.finditer(b"PK\x03\x04", whole)]

    def changed(places: list[int], value: int) -> bytes:
        return bytes(value if n in places else byte for n, byte in enumerate(whole))

    encrypted = changed([n + 8 for n in entries] + [n + 6 for n in heads], 1)
    unknown = changed([n + 10 for n in entries] + [n + 8 for n in heads], 97)
    broken = changed([n + 30 + whole[n + 26] for n in heads], 0xFF)  # where deflate begins
    for body, words in ((encrypted, "encrypted"), (unknown, "compression"), (broken, "decompressing")):
        archive.write_bytes(body)
        with pytest.raises(DataError, match=words) as caught:
            reader(archive)
        assert caught.value.path == str(archive)


def test_training_does_not_go_on_in_an_archive(run, tmp_path, capsys) -> None:
    assert export([str(run), str(archive := tmp_path / "a.zip")]) == 0
    before = archive.read_bytes()
    assert run_act(train, ["--resume", "--out", str(archive)]) == 2
    assert f"--resume --out {archive}: that is a file" in capsys.readouterr().err and archive.read_bytes() == before


def test_the_citation_is_that_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([\w-]+): (.+)$", text, re.M))
    project = dict(re.findall(r'^(\w+) = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M))
    assert fields["cff-version"] == "1.2.0" and fields["title"] == project["name"]
    assert fields["version"] == project["version"] and fields["license"] == project["license"]
    assert fields["message"] and re.search(r"^authors:\n  - ", text, re.M)
    titles = re.findall(r'^    title: "?([^"\n]+)', text, re.M)
    assert [title.split()[0] for title in titles] == ["Efficient", "High", "LAMP:", "Distributing", "A"]
