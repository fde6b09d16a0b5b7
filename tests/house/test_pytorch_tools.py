"""The pages on tools of PyTorch, MONAI and others: their scripts train on two ranks what one process trains."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.support.pages import blocks, page
from tests.support.ranks import relative
from tests.support.scripts import run_script

PAGE, TOOLS = page("how-to/pytorch-tools"), page("how-to/lightning-fabric-accelerate")
EXACT = "import torch\ntorch.set_default_dtype(torch.float64)\n"
ONE, FSDP = blocks(PAGE, "python")
LIGHTNING, FABRIC, ACCELERATE = blocks(TOOLS, "python")


def trained(world: int, code: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses that a script prints, and the weights that it trains."""
    kept = "import builtins, os\nlines = []\n"
    kept += "builtins.print = lambda *words, **how: lines.append(' '.join(map(str, words)))\n"
    save = (
        "from seqpar.parallel.collectives import full_tensor\n"
        "state = {name: full_tensor(tensor) for name, tensor in net.state_dict().items()}\n"
        "if os.environ['RANK'] == '0':\n    torch.save((lines, state), 'trained.pt')\n"
    )
    ends = "with seqpar.init_mesh"  # weights in shards are joined while the groups exist
    body = re.sub(r"\Z", "".join(f"    {line}\n" for line in save.splitlines()), code) if ends in code else code + save
    run_script(world, EXACT + kept + body, folder)
    lines, state = torch.load(folder / "trained.pt", weights_only=True)
    return [float(line.rpartition(" ")[2]) for line in lines if "loss" in line], state


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(1, ONE.replace("seq=2", "seq=1"), tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        pytest.param("torch", ONE, id="ParallelModel"),
        pytest.param("lightning", LIGHTNING, id="Lightning", marks=pytest.mark.started),
        pytest.param("lightning", FABRIC, id="Fabric", marks=pytest.mark.started),
        pytest.param("accelerate", ACCELERATE, id="Accelerate", marks=pytest.mark.started),
        pytest.param("torch", FSDP, id="FSDP2"),
    ],
)
def test_each_tool_trains_on_two_ranks_what_one_process_trains(
    tool: str, code: str, tmp_path: Path, alone: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    losses, state = trained(2, code, tmp_path)
    assert losses == pytest.approx(alone[0], rel=1e-5) and len(set(losses)) == 3
    assert state.keys() == alone[1].keys() and len(state) > 40
    assert max(relative(state[name], weight) for name, weight in alone[1].items()) < 1e-9


@pytest.mark.started
@pytest.mark.parametrize("name", ["convert-your-network", "two-dimensions"])
def test_a_converted_network_trains_on_two_ranks_what_one_process_trains(name: str, tmp_path: Path) -> None:
    pytest.importorskip("monai.networks.nets")  # here, not in every rank
    code = blocks(page(f"how-to/{name}"), "python")[0].replace("32, 32, 48", "16, 16, 16")
    alone = code.replace("seq=2", "seq=1").replace(
        "DistributedDataParallel(net, process_group=mesh.world.handle)", "net"
    )
    assert "seq=2" in code
    _, one = trained(1, alone, tmp_path)
    losses, two = trained(2, code, tmp_path)
    assert len(losses) == len(set(losses)) == 3 and len(one) > 10
    # norms cancel the biases before them, whose gradients are noise
    assert max(relative(two[key], weight) for key, weight in one.items() if weight.ndim > 1) < 1e-9


@pytest.mark.started
def test_a_monai_script_becomes_one_of_two_ranks_by_few_lines(tmp_path: Path) -> None:
    """The plain script is what the diff starts from; both print the same, and save what MONAI loads."""
    nets = pytest.importorskip("monai.networks.nets")  # here, not in every rank
    (diff,) = blocks(PAGE, "diff")
    lines = diff.splitlines()
    assert sum(line[0] == "+" for line in lines) <= 10 and sum(line[0] == "-" for line in lines) <= 10
    record = "import builtins, os\nbuiltins.print = lambda line: open('said.txt', 'a').write(line + chr(10)) "
    record += "if os.environ['RANK'] == '0' else None\n"
    said, weights = [], []
    for world, marks in ((1, " -"), (2, " +")):
        folder = tmp_path / str(world)
        folder.mkdir()
        script = "\n".join(line[1:] for line in lines if line[0] in marks) + "\n"
        run_script(world, record + script, folder)
        said.append(re.findall(r"(loss|Dice) ([\d.]+)", (folder / "said.txt").read_text()))
        weights.append(torch.load(folder / "average.pt", weights_only=True))
    assert [kind for kind, _ in said[0]] == ["loss", "loss", "Dice"] * 2
    for (_, one), (_, two) in zip(*said):
        assert float(two) == pytest.approx(float(one), rel=1e-3)
    assert len({value for kind, value in said[0] if kind == "loss"}) == 4, "it trains"
    nets.SegResNet(3, 8, 1, 2).load_state_dict(weights[1])
    assert max(relative(weights[1][name], weight) for name, weight in weights[0].items() if weight.ndim > 1) < 1e-2
