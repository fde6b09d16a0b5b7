"""A start refuses a GPU that ranks have together, names the group that cannot be made, and sends what NCCL knows."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.parallel import collectives, messages, rendezvous
from seqpar.parallel.launcher import Launcher, gpu_settings, shared_gpu_settings
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import _eager_device, _places_of, start
from seqpar.parallel.roll_call import RankLocation, StartLimit, locate_rank, refuse_shared_gpus, roll_call
from seqpar.parallel.shared_memory import link_groups
from tests.support.folders import child, exit_code
from tests.support.ranks import run_ranks

GPU = torch.device("cuda", 0)


def test_ranks_that_have_one_gpu_together_are_refused_by_name() -> None:
    first, second = "GPU-1 0 7 0", "GPU-1 0 8 0"  # two dies of a card
    refuse_shared_gpus(
        [
            RankLocation("a", first),
            RankLocation("a", second),
            RankLocation("b", first),
            RankLocation("c"),
            RankLocation("c"),
        ]
    )
    with pytest.raises(ValueError, match="ranks 1, 3 have one GPU of b.*GPU-1.*at most 2 ranks there.*device='cpu'"):
        refuse_shared_gpus(
            [RankLocation("a", first), RankLocation("b", first), RankLocation("b", second), RankLocation("b", first)]
        )


def test_a_rank_says_which_gpu_it_has_unless_it_may_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(uuid="GPU-1", pci_bus_id=7)  # of a torch that knows no domain
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    launcher = Launcher("slurm", host="node1")
    assert locate_rank(launcher, GPU, {}) == RankLocation("node1", "GPU-1 7")
    assert locate_rank(launcher, GPU, {"SEQPAR_SHARE_GPU": "1"}) == RankLocation("node1")
    assert locate_rank(launcher, torch.device("cpu"), {}) == RankLocation("node1")


def test_ranks_that_ask_for_groups_of_other_sizes_are_refused() -> None:
    store = dist.HashStore()  # type: ignore[no-untyped-call]
    store.set("host/1", json.dumps(RankLocation("a", sizes=(2, 1))))
    with pytest.raises(ValueError, match="seqpar=2 with pipe=1 on rank 1, but seqpar=1 with pipe=1 on rank 0: give"):
        roll_call(Launcher("test", 0, 2, 0, 2), store, RankLocation("a"), 5.0)


def test_a_store_that_went_with_its_rank_is_not_called_late() -> None:
    def gone(*_: object) -> None:
        raise dist.DistNetworkError("connection reset")

    store = SimpleNamespace(set=lambda *_: None, wait=gone, check=gone)
    with pytest.raises(ConnectionError, match="rank 0 has ended before all ranks had started: see its log"):
        roll_call(Launcher("test", 1, 2, 1, 2), store, RankLocation("a"), 900.0)


def start_inside(mesh: Mesh) -> str:
    env = {"RANK": str(mesh.world.index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ValueError, match="initialised already: start the ranks once") as caught:
        start(2, env=env)
    return str(caught.value)


def test_a_start_inside_a_mesh_is_refused() -> None:
    assert len(set(run_ranks(2, start_inside))) == 1


def test_a_rank_starts_though_the_first_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])

    def begin(rank: int) -> None:
        slow = link_groups
        if rank:
            monkeypatch.setattr(rendezvous, "link_groups", lambda *of: (time.sleep(2), slow(*of)))
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        start(2, env=env, device="cpu", timeout_s=10)  # the first rank, which hosts the store, ends at once

    pids = [child(lambda rank=rank: begin(rank)) for rank in (0, 1)]
    assert [exit_code(pid) for pid in pids] == [0, 0]


def test_ranks_that_share_a_gpu_look_to_nccl_like_hosts_of_their_own() -> None:
    settings = [shared_gpu_settings({"NCCL_NET": "IB"}, rank) for rank in range(2)]
    assert [each["NCCL_HOSTID"] for each in settings] == ["0", "1"] and "NCCL_NET" not in settings[0]
    assert settings[0]["NCCL_P2P_DISABLE"] == settings[0]["NCCL_SHM_DISABLE"] == "1"
    assert shared_gpu_settings({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 0) == {}


def test_what_torch_reads_once_is_set_unless_the_user_has() -> None:
    assert gpu_settings({}, "2.8.0+cu128", rocm=False) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert gpu_settings({}, "2.13.0", rocm=False) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert gpu_settings({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "2.13.0", rocm=False) == {}
    assert gpu_settings({}, "2.13.0", rocm=True) == {"PYTORCH_MIOPEN_SUGGEST_NHWC": "1"}
    assert gpu_settings({"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"}, "2.13.0", rocm=True) == {}
    assert gpu_settings({"PYTORCH_MIOPEN_SUGGEST_NHWC": "yes"}, "2.13.0", rocm=True)  # torch does not know the word


def test_groups_of_gpus_connect_as_they_are_made_or_at_their_first_message() -> None:
    assert _eager_device(GPU, {}) == GPU and _eager_device(GPU, {"SEQPAR_LAZY_GROUPS": "1"}) is None
    assert _eager_device(torch.device("cpu"), {}) is None
    assert _places_of(GPU) == (torch.device("cpu"), GPU) and len(_places_of(torch.device("cpu"))) == 1


def limits(world: int, limit_s: float = 0.3) -> Iterator[tuple[StartLimit, threading.Event]]:
    store = dist.HashStore()
    for rank in range(world):
        ended = threading.Event()
        yield StartLimit(store, rank, world, lambda: limit_s, ended.set), ended


def test_a_group_that_is_not_made_in_time_is_named_with_the_ranks_that_never_came(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (first, first_ended), (second, _), (third, third_ended) = limits(3)
    missing = [f"error: the {group} was not made within 0 s: rank 1 never came" for group in (
        "world group of ranks 0, 1, 2", "seq group of ranks 0, 2"
    )]  # fmt: skip
    said = ""
    with first.making("world", (0, 1, 2)), first.making("seq", (0, 2)), third.making("world", (0, 1, 2)):
        with third.making("seq", (0, 2)):
            assert first_ended.wait(10) and third_ended.wait(10)
            until = time.monotonic() + 10
            while sorted(said.splitlines()) != sorted(missing) and time.monotonic() < until:  # a timer a group
                time.sleep(0.01)
                said += capsys.readouterr().err
    assert sorted(said.splitlines()) == sorted(missing)
    with first.making("data", (0, 1)), second.making("world", (0, 1, 2)):
        pass


def test_where_all_ranks_came_the_network_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (alone, ended), (other, _) = limits(2)
    with other.making("world", (0, 1)), alone.making("world", (0, 1)):
        assert ended.wait(10)
    assert "all ranks came, but do not reach each other: check NCCL_SOCKET_IFNAME" in capsys.readouterr().err


def test_a_group_that_is_made_in_time_ends_nothing() -> None:
    (limit, ended), *_ = limits(1, limit_s=0.05)
    with limit.making("world", (0,)):
        pass
    assert not ended.wait(0.2)


# What ProcessGroupNCCL can send.
NCCL = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8}
NCCL |= {torch.uint8, torch.bool}


class NcclOp(dist.P2POp):
    """A message as NCCL takes it."""

    def __new__(cls, op: object, tensor: torch.Tensor, *args: object, **options: object) -> "NcclOp":
        assert tensor.dtype in NCCL, f"NCCL does not know {tensor.dtype}"
        return super().__new__(cls, op, tensor, *args, **options)  # type: ignore[arg-type]


def labels_in_every_mode(mesh: Mesh) -> dict[str, torch.Tensor]:
    """Returns labels of many classes as each mode decodes them, and gathered by the library's own gather."""
    dist.P2POp = NcclOp  # type: ignore[misc]
    group, layout = mesh.seq, Layout.of((8, 8, 8), (4, 4, 4), mesh.seq.size)
    label = torch.arange(2 * 512, dtype=torch.int16).view(2, 8, 8, 8)
    part = layout.cut(label, group.index)
    result = {name: choose_mode(name, group).voxels(part, layout) for name in ("gather", "halo", "swap")}
    native = messages._SUPPORTED
    collectives._has_native = lambda rows, group, sizes: True
    library = collectives._gather_single

    def gather(whole: torch.Tensor, mine: torch.Tensor, **options: object) -> object:
        assert {whole.dtype, mine.dtype} <= NCCL == set(native)
        return library(whole, mine, **options)

    collectives._gather_single = gather
    result["library"] = collectives.all_gather(label[group.index], group, 0, [8, 8])
    return result


def test_labels_of_many_classes_travel_in_types_that_nccl_knows() -> None:
    label = torch.arange(2 * 512, dtype=torch.int16).view(2, 8, 8, 8)
    first, second = run_ranks(2, labels_in_every_mode)
    for rank, seen in enumerate((first, second)):
        assert all(x.dtype == torch.int16 for x in seen.values())
        assert torch.equal(seen["gather"], label) and torch.equal(seen["swap"], label[rank : rank + 1])
        assert torch.equal(seen["library"], label.flatten(0, 1))
    assert torch.equal(torch.cat([first["halo"], second["halo"]], 1), label)


def half_sums(mesh: Mesh) -> tuple[torch.Tensor, int]:
    """Returns this rank's sum of halves that half precision alone would lose, and how often the library summed."""
    calls: list[int] = []
    collectives._has_native = lambda rows, group, sizes: True
    library = collectives._scatter_single
    collectives._scatter_single = lambda *args, **options: (calls.append(1), library(*args, **options))[1]
    value = 256.0 if mesh.seq.index == 0 else 1.0
    halves = torch.full((3, 4), value, dtype=torch.bfloat16)
    result = collectives.reduce_scatter(halves, mesh.seq, 0, [1, 1, 1])
    collectives.reduce_scatter(halves.float(), mesh.seq, 0, [1, 1, 1])
    return result, len(calls)


def test_gradients_in_half_precision_are_summed_in_float32() -> None:
    for result, calls in run_ranks(3, half_sums):
        assert result.tolist() == [[258.0] * 4] and calls == 1
