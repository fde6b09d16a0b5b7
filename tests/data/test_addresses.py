"""Files by address: downloaded once and checked at each use; what goes wrong is one error, and leaves no file."""

import errno
import fcntl
import hashlib
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from seqpar.cluster.exit_codes import DATA, USAGE, code_of
from seqpar.data import addresses
from seqpar.data.addresses import is_address, is_missing, local_file
from seqpar.data.errors import DataError
from seqpar.data.files import user_cache
from seqpar.parallel.mesh import Mesh
from tests.support.https import FileServer, serving
from tests.support.ranks import run_ranks

BODY = bytes(range(256)) * 3000  # several blocks of TLS


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "cache"))
    with serving(monkeypatch) as served:
        yield served


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_file_is_downloaded_once_and_found_again(server: FileServer, tmp_path, capsys) -> None:
    address = server.address("some%20net.pth", BODY)
    assert is_missing(address) and not is_missing("a.pth") and server.asked == []
    path = local_file(address)
    assert path.read_bytes() == BODY and path.name == "some_net.pth" and path.is_relative_to(tmp_path / "cache/weights")
    said = capsys.readouterr().err
    assert said == f"downloading {server.root}/some%20net.pth (0.8 MB) to {path}\n"
    assert local_file(Path(address)) == local_file(address) == path
    assert not is_missing(address) and server.asked == ["some%20net.pth"] and files(tmp_path) == ["some_net.pth"]
    assert local_file("a.pth") == Path("a.pth") and capsys.readouterr().err == ""
    server.redirects["moved"] = f"{server.root}/some%20net.pth"
    moved = local_file(f"{server.root}/moved#{address.partition('#')[2].upper().replace('SHA', 'sha')}")
    assert moved.read_bytes() == BODY and moved.name == "moved"


def test_a_copy_that_changed_is_refused(server: FileServer) -> None:
    address = server.address("net.pth", BODY)
    path = local_file(address)
    path.write_bytes(BODY[:-1] + b"x")
    with pytest.raises(DataError, match=rf"^{path}: is damaged: it has sha256 [0-9a-f]{{64}}, and its address says"):
        local_file(address)
    path.unlink()
    assert local_file(address).read_bytes() == BODY and len(server.asked) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.bin", r"the server answers 404 \(Not Found\); check the address"),
        ("other.bin", rf"what came \({len(BODY)} bytes\) has sha256 {hashlib.sha256(BODY).hexdigest()}, and the"),
        ("cut.bin", rf"the download broke off \(after {len(BODY)} of {len(BODY) + 7} bytes\); start it again"),
        ("chunks.bin", r"the download broke off \(IncompleteRead"),
        ("plain.bin", "the server leads on to http://127.0.0.1/a.bin, which is not https"),
        ("circle.bin", "the server answers 302"),
    ],
)
def test_what_a_server_does_wrong_is_said(name: str, words: str, server: FileServer, tmp_path) -> None:
    address = server.address(name, BODY)
    server.redirects |= {"plain.bin": "http://127.0.0.1/a.bin", "circle.bin": f"{server.root}/circle.bin"}
    if name == "missing.bin":
        del server.files[name]
    if name == "other.bin":
        address = address[:-64] + "0" * 64
    with pytest.raises(DataError, match=f"^{server.root}/{name}: {words}") as caught:
        local_file(address)
    assert code_of(caught.value) == DATA and files(tmp_path) == []
    assert str(caught.value).isprintable(), "one line, and nothing that a terminal obeys"


def test_a_server_that_is_not_there_or_not_trusted(server: FileServer, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(DataError, match=r"cannot be reached \(.*CERTIFICATE_VERIFY_FAILED.*put it at .*/net\.pth$"):
        local_file(server.address("net.pth", BODY))
    nowhere = f"https://127.0.0.1:9/net.pth#sha256={'0' * 64}"
    with pytest.raises(DataError, match=r"cannot be reached \(.*refused\); check the network and the address, or"):
        local_file(nowhere)
    assert files(tmp_path) == []


def test_a_full_disk_and_a_folder_that_cannot_be_written(server: FileServer, tmp_path, monkeypatch) -> None:
    address = server.address("net.pth", BODY)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=len(BODY) - 1))
        with pytest.raises(DataError, match=r"has 1 MB free, and .*/net.pth needs 1: free space, or name"):
            local_file(address)

    def full(self, file) -> None:
        file.write(BODY[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(addresses._Https, "_receive", full)
        with pytest.raises(DataError, match=r"/net\.pth: cannot be written \(No space left on device\); make room or"):
            local_file(address)
    assert files(tmp_path) == []
    (tmp_path / "cache").rename(tmp_path / "other")
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match=r"cannot be written \(Not a directory\)|cannot be written \(File exists\)"):
        local_file(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://host/a.pth", r"write https://host/a\.pth#sha256=DIGITS, with the 64 hexadecimal digits"),
        ("https://host/a.pth#sha256=12", r"write https://host/a\.pth#sha256=DIGITS"),
        (f"https://host/a.pth#md5={'0' * 64}", "a file of a server needs its checksum"),
        (f"https://me:secret@host/a.pth#sha256={'0' * 64}", "without a user name"),
        ("https://[::1/a.pth", r"^https://\[::1/a.pth: is no address \(Invalid IPv6 URL\)"),
        ("http://host/a.pth", "files are downloaded by https:// and hf:// only"),
        ("s3://bucket/a.pth", "files are downloaded by https:// and hf:// only"),
        ("hf://owner/name", "write hf://OWNER/NAME/FILE, or hf://OWNER/NAME@REVISION/FILE"),
        ("hf://owner/name/a.pth", r"hf:// needs huggingface_hub: pip install .*\[hub\]"),
    ],
)
def test_an_address_that_cannot_be_taken_says_how_to_write_one(address: str, words: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=words) as caught:
        local_file(address)
    assert code_of(caught.value) == USAGE and is_address(address) and is_address(Path(address))


@pytest.mark.parametrize(
    ("name", "words"), [("slow.bin", "send 66 kB within 0.5 s"), ("mute.bin", "answer within 1 s")]
)
def test_a_server_that_sends_a_byte_now_and_then(name, words, server: FileServer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(addresses, "SILENT_S", 0.5)
    monkeypatch.setattr(addresses, "ANSWER_S", 1.0)
    began = time.monotonic()
    with pytest.raises(DataError, match=rf"{name}: the download broke off \(the server did not {words}\); start it"):
        local_file(server.address(name, BODY))
    assert time.monotonic() - began < 10 and files(tmp_path) == []


def path_on_rank(mesh: Mesh, address: str) -> str:
    return str(local_file(address))


def test_several_ranks_download_once(server: FileServer) -> None:
    address = server.address("net.pth", BODY)
    assert len(set(run_ranks(3, path_on_rank, address))) == 1 and server.asked == ["net.pth"]


def test_waiting_for_a_silent_process_ends(server: FileServer, monkeypatch) -> None:
    address = server.address("net.pth", BODY)
    folder = addresses._parse(address).folder
    folder.mkdir(parents=True)
    monkeypatch.setattr(addresses, "START_S", 0.3)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process downloads it to .*, and nothing has come for 0 s: end"):
            local_file(address)
    assert local_file(address).is_file()


def test_the_cache_is_where_the_user_says(monkeypatch) -> None:
    for name in ("SEQPAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert user_cache() == Path("/home/me/.cache/seqpar")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert user_cache() == Path("/caches/seqpar")
    monkeypatch.setenv("SEQPAR_CACHE", "~/of-seqpar")
    assert user_cache() == Path("/home/me/of-seqpar")


class Hub:
    """Stands for huggingface_hub: lays files out as it does, and finds them again without a network."""

    def __init__(self) -> None:
        self.calls = list[dict]()

    def hf_hub_download(self, repo_id, filename, revision, cache_dir, local_files_only) -> str:
        self.calls.append({"repo": repo_id, "file": filename, "revision": revision, "local": local_files_only})
        folder = Path(cache_dir) / f"models--{repo_id.replace('/', '--')}"
        link = folder / "snapshots" / (revision or "main") / filename
        if link.exists():
            return str(link)
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        if filename == "gone.pth":
            raise RuntimeError("404 Client Error.\nEntry Not Found")
        if filename in ("mute.pth", "slow.pth"):
            folder.mkdir(parents=True, exist_ok=True)
            for _ in range(50):  # 5 s
                with (folder / "incomplete").open("ab") as file:
                    file.write(b"x" if filename == "mute.pth" else BODY[:100_000])
                time.sleep(0.1)
        git = hashlib.sha1(b"blob %d\0" % len(BODY) + BODY).hexdigest()  # of small files
        blob = folder / "blobs" / (git if filename.endswith(".json") else hashlib.sha256(BODY).hexdigest())
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(BODY)
        link.symlink_to(blob)
        return str(link)


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Hub:
    hub, module = Hub(), ModuleType("huggingface_hub")
    module.hf_hub_download = hub.hf_hub_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    return hub


def test_a_hub_that_sends_a_byte_now_and_then(hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr(addresses, "START_S", 2.0)
    with pytest.raises(DataError, match=r"^hf://owner/other/mute.pth: .* broke off \(next to nothing came in 2 s"):
        local_file("hf://owner/other/mute.pth")
    assert local_file("hf://owner/name/slow.pth").read_bytes() == BODY  # which takes longer, and grows


@pytest.mark.parametrize("name", ["net.pth", "some/net.json"])
def test_a_file_of_the_hub_is_asked_for_once(name: str, hub: Hub, tmp_path, capsys) -> None:
    address = f"hf://owner/name@v1/{name}"
    assert is_missing(address)
    path = local_file(address)
    asked = {"repo": "owner/name", "file": name, "revision": "v1", "local": False}
    assert path.read_bytes() == BODY and path.name == Path(name).name and path.is_relative_to(tmp_path / "hub")
    assert [call for call in hub.calls if not call["local"]] == [asked] and not is_missing(address)
    assert f"downloading {address} to" in capsys.readouterr().err
    assert local_file(f"{address}#sha256={hashlib.sha256(BODY).hexdigest()}") == local_file(Path(address)) == path
    with pytest.raises(DataError, match=f"has the checksum .* and {'0' * 64} is needed for {address}"):
        local_file(f"{address}#sha256={'0' * 64}")
    assert len([call for call in hub.calls if not call["local"]]) == 1
    with pytest.raises(DataError, match=r"^hf://owner/name/gone.pth: cannot be downloaded \(404 Client Error"):
        local_file("hf://owner/name/gone.pth")
    path.resolve().write_bytes(BODY[1:])
    with pytest.raises(DataError, match=rf"has the checksum .*remove {path.resolve()}, and it is downloaded again"):
        local_file(address)
