"""The weights of stages: norms, whole networks and whole files are those of one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.stage_weights import (
    average_gradients,
    cells_of_names,
    clip_gradients,
    gather_tensors,
    keep_local_weights,
    places_of_names,
    tensor_specs,
    whole_network,
)

OWNS = (("0.",), ("1.",), ("2.",))
PLACES = (0, 1, 0)


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.float32))
    for p in made.parameters():
        p.grad = torch.randn_like(p)
    made[0].bias.grad = None
    return made


def on_places(mesh: Mesh, limit: float) -> dict[str, object]:
    part = net()
    places = places_of_names(list(part.state_dict()), OWNS, PLACES)
    entries, names = tensor_specs(part, places), [name for name, _ in part.named_parameters()]
    keep_local_weights(part, places, mesh.pipe.index)
    own = set(part.state_dict())
    norm = clip_gradients(part, names, limit, mesh.pipe)
    grads = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
    with whole_network(part, entries, mesh.pipe, mesh.device):
        inside = {name: x.clone() for name, x in part.state_dict().items()}
        output = part.eval()(torch.ones(4, 3)).detach()
    whole = gather_tensors(part.state_dict(), mesh.pipe)
    after = set(part.state_dict()) == own
    return {"own": own, "norm": norm, "grads": grads, "inside": inside, "out": output, "whole": whole, "after": after}


@pytest.mark.parametrize("limit", [0.5, float("inf")])
def test_norms_whole_networks_and_files_are_those_of_one_process(ranks: Callable[..., list], limit: float) -> None:
    alone = net()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), limit)
    want, first = alone.state_dict(), None
    for place, found in enumerate(ranks(2, on_places, limit, pipe=2)):
        assert found["own"] == {name for name in want if PLACES[int(name[0])] == place} and found["after"]
        assert torch.equal(found["norm"], norm)
        assert all(torch.equal(g, alone.get_parameter(name).grad) for name, g in found["grads"].items())
        assert alike(found["inside"], want)
        assert torch.equal(found["out"], alone.eval()(torch.ones(4, 3)))
        first = first or found["whole"]
    assert first is not None and alike(first, want)


def without_gradients(mesh: Mesh) -> str:
    part = net().requires_grad_(False)
    names = [name for name, _ in part.named_parameters()]
    part.zero_grad()
    with pytest.raises(ValueError) as caught:
        clip_gradients(part, names, 1.0, mesh.pipe)
    return str(caught.value)


def test_weights_without_any_gradient_are_refused(ranks: Callable[..., list]) -> None:
    assert ranks(2, without_gradients, pipe=2) == 2 * [
        "no weight of the network has a gradient: at least one needs requires_grad=True"
    ]


def alike(tensors: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return tensors.keys() == want.keys() and all(torch.equal(x, want[name]) for name, x in tensors.items())


def test_a_name_of_no_cell_or_of_two_is_a_mistake() -> None:
    assert cells_of_names(["blocks.1.a", "blocks.10.a"], [("blocks.1.",), ("blocks.10.",)]) == {
        "blocks.1.a": 0,
        "blocks.10.a": 1,
    }
    for owns in ([("x.",)], [("blocks",), ("blocks.1.",)]):
        with pytest.raises(AssertionError):
            cells_of_names(["blocks.1.a"], owns)


def average(mesh: Mesh) -> list[Tensor]:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 1, 4, 3)]
    for number, p in enumerate(parameters[:3]):
        p.grad = torch.arange(p.numel(), dtype=torch.float32) + 10 * number + mesh.stage.index
    average_gradients(parameters, mesh.stage, bucket_bytes=24)
    assert parameters[3].grad is None
    return [p.grad for p in parameters[:3] if p.grad is not None]


def test_gradients_are_averaged_in_buckets_of_any_size(ranks: Callable[..., list]) -> None:
    for grads in ranks(3, average, seqpar=1):
        for number, grad in enumerate(grads):
            assert torch.equal(grad, torch.arange(grad.numel()) + 10.0 * number + 1)
