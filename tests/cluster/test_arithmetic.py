"""One policy of precision: products and convolutions alike, the same bits where that is asked for."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from seqpar.attention import kernels
from seqpar.cluster.devices import DEVICES, DTYPES, measured
from seqpar.cluster.known_traps import Facts
from seqpar.cluster.torch_setup import arithmetic_now, check_precision, set_arithmetic
from seqpar.parallel.launcher import Launcher
from seqpar.settings.config import Config
from seqpar.settings.field import Circumstances
from seqpar.settings.optimizer_settings import PRECISIONS
from seqpar.settings.rules import describe_settings_without_effect
from seqpar.spatial.pooling import max_pool_by_place, upsample_trilinear
from seqpar.training.run_request import read_request
from tests.support.ranks import relative

NVIDIA = Facts(on_gpu=True, num_gpus=1, torch=(2, 8, 0), cudnn=91002)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    set_arithmetic("fp32", env={})


def test_each_precision_is_one_arithmetic_of_products_and_convolutions() -> None:
    expected = {"fp32": "float32", "tf32": "tf32", "bf16": "float32", "fp64": "float32"}
    for precision, word in expected.items():
        set_arithmetic(precision, env={})
        now = arithmetic_now(precision)
        assert (now["float32_products"], now["float32_convolutions"]) == (word, word)
        assert now["autocast"] == ("bfloat16" if precision == "bf16" else "none") and not now["deterministic"]
    assert list(expected) == list(PRECISIONS) == list(DTYPES)
    env = dict[str, str]()
    set_arithmetic("fp32", deterministic=True, env=env)
    assert arithmetic_now("fp32")["deterministic"] and torch.backends.cudnn.deterministic
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and not torch.utils.deterministic.fill_uninitialized_memory


def test_attention_is_strict_where_torch_would_only_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(*of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(torch.is_deterministic_algorithms_warn_only_enabled())
        return of[1:4]

    kernel = kernels.Kernel("looks", lambda q, k, v: (q, ()), look)  # type: ignore[arg-type, return-value]
    x = torch.zeros(1, 1, 2, 4)
    for deterministic in (False, True):
        set_arithmetic("fp32", deterministic, env={})
        kernel.backward(x, x, x, x, x, ())
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.is_deterministic_algorithms_warn_only_enabled() == deterministic
    assert seen == [False, False]


@pytest.mark.parametrize("factors", [(2, 2, 2), (1, 3, 2), (4, 1, 1)])
def test_upsampling_in_one_order_is_torchs(factors: tuple[int, int, int]) -> None:
    x = torch.randn(2, 3, 4, 1, 5, dtype=torch.float64, requires_grad=True)
    scale = [float(factor) for factor in factors]
    theirs = F.interpolate(x, scale_factor=scale, mode="trilinear", align_corners=False)
    ours = upsample_trilinear(x, factors)
    weight = torch.randn_like(theirs)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, theirs)]
    assert relative(ours, theirs) < 1e-14 and relative(*gradients) < 1e-14


@pytest.mark.parametrize("options", [(3, 2, 1, 1, False), (2, 2, 0, 1, True), (3, 1, 1, 2, False)])
@pytest.mark.parametrize("sides", [(9, 8), (9, 8, 7)])
def test_max_pooling_in_one_order_is_torchs_also_at_ties(sides: tuple[int, ...], options: tuple[Any, ...]) -> None:
    x = torch.randint(4, (2, 3, *sides)).double().requires_grad_()
    theirs = (F.max_pool2d if len(sides) == 2 else F.max_pool3d)(x, *options)
    ours = max_pool_by_place(x, *options)
    weight = torch.randn_like(theirs)
    gradients = [torch.autograd.grad(y, x, weight)[0] for y in (ours, theirs)]
    assert torch.equal(ours, theirs) and relative(*gradients) < 1e-14


def test_cudnns_attention_is_left_out_where_bits_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses it, but not where it only warns, as runs let it."""

    def as_torch(params: Any) -> bool:
        refuses = torch.are_deterministic_algorithms_enabled()
        return not (refuses and not torch.is_deterministic_algorithms_warn_only_enabled())

    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", as_torch)
    like = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    set_arithmetic("bf16", False, env={})
    assert "cudnn" in kernels._allowed(like, 64)
    set_arithmetic("bf16", True, env={})
    assert "cudnn" not in kernels._allowed(like, 64)


def test_a_pair_of_libraries_that_is_wrong_in_half_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="--precision bf16: torch 2.8.0 with cuDNN 9.10.*use --precision fp32"):
        check_precision("bf16", NVIDIA)
    check_precision("fp32", NVIDIA)
    check_precision("bf16", replace(NVIDIA, torch=(2, 9, 0)))  # slow only
    check_precision("bf16", replace(NVIDIA, on_gpu=False))


def test_the_device_of_the_command_line_decides_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("seqpar.training.run_request.choose_open_settings", lambda config, *of: (config, {}, None))
    presets = [read_request(line.split(), Launcher("alone")).preset for line in ("--batch 1", "--device cpu")]
    assert presets == ["paper", "laptop"]
    reason = read_request(["--device=cpu"], Launcher("alone")).preset_reason
    assert reason == "the default without a GPU"
    make = open(os.path.join(os.path.dirname(__file__), "../../Makefile")).read()
    assert "launch/train.py --preset laptop" in make


def test_what_only_a_gpu_does_is_said_on_a_cpu() -> None:
    config = Config(precision="tf32", deterministic=True)
    line = "--precision tf32, --deterministic: no effect without a GPU"
    cpu, gpu, typed = Circumstances(has_gpu=False), Circumstances(has_gpu=True), {"precision", "deterministic"}
    assert describe_settings_without_effect(config, typed, cpu) == line
    assert describe_settings_without_effect(config, typed, gpu) == ""
    assert describe_settings_without_effect(config, {"seed"}, cpu) == ""


def test_each_group_of_ranks_takes_memory_of_a_gpu() -> None:
    h100 = DEVICES["h100"]
    taken = [h100.in_groups(sizes).reserved_bytes - h100.reserved_bytes for sizes in ((1, 1, 1), (4, 4, 1), (8, 4, 2))]
    assert taken == pytest.approx([0, 2 * h100.group_bytes, 3 * h100.group_bytes]) and h100.group_bytes > 2**28
    assert h100.in_groups((8, 4, 2)).in_groups((8, 4, 2)).reserved_bytes == h100.in_groups((8, 4, 2)).reserved_bytes


def test_tf32_has_a_speed_of_its_own(tmp_path: object) -> None:
    h100 = DEVICES["h100"]
    assert h100.peak["fp32"] < h100.peak["tf32"] < h100.peak["bf16"]
    with open(f"{tmp_path}/links.json", "w") as file:
        file.write('{"matmul_flops_per_s": {"float32": 5e13, "tf32": 3e14}}')
    shares = {name: measured(file.name, h100, name).shares["matmul"] for name in ("fp32", "tf32")}
    assert shares["tf32"] == pytest.approx(3e14 / h100.peak["tf32"])
    assert shares["fp32"] == pytest.approx(5e13 / h100.peak["fp32"])


@pytest.mark.parametrize(
    "odd", ['"nodes": 0', '"nodes": 99, "world": 8', '"world": -8', '"memory_bytes": 1e300', '"memory_bytes": -1']
)
def test_measured_figures_that_nothing_has_are_refused(odd: str, tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(f'{{"matmul_flops_per_s": {{"float32": 5e13}}, {odd}}}')
    with pytest.raises(ValueError, match="is not what launch/doctor.py writes as JSON"):
        measured(str(tmp_path / "links.json"), DEVICES["h100"], "fp32")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="put a file in its place"):  # to read it would never end
        measured(str(tmp_path / "pipe"), DEVICES["h100"], "fp32")
