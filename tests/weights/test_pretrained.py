"""A run starts from what was trained before: other channels, a run folder, rates by layer."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from seqpar import SeqParViT
from seqpar.data.errors import DataError
from seqpar.models.build import build_network
from seqpar.models.network import Network
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import set_learning_rate
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from seqpar.weights import checkpoint
from seqpar.weights.pretrained import load_pretrained
from seqpar.weights.weight_files import write_weights
from tests.support.predictions import SMALL
from tests.support.ranks import relative

STEM = "resattnet.cells.stem.conv.weight"


def made(config: Config, channels: int = 1, seed: int = 0) -> Network:
    return build_network(replace(config, seed=seed), channels, 2, Group("seq"))


def encoder_of(net: Network) -> SeqParViT:
    encoder = net.encoder
    assert isinstance(encoder, SeqParViT)
    return encoder


def test_weights_of_one_channel_are_repeated_over_the_datas(tmp_path) -> None:
    source, file = made(SMALL, seed=9), tmp_path / "weights"
    write_weights(file, source)
    config = replace(SMALL, weights=str(file))
    net, plain = made(config, channels=3), made(config)
    line = load_pretrained(net, config)
    assert "of 1 channel, repeated over 3 and divided by 3" in line and "repeated" not in load_pretrained(plain, config)
    image = torch.randn(1, 1, 8, 8, 8)
    assert relative(encoder_of(net)(image.expand(-1, 3, -1, -1, -1)), encoder_of(source)(image)) < 1e-5
    write_weights(file, made(SMALL, channels=2))
    with pytest.raises(ValueError, match=r"do not fit the encoder: encoder\.patch_embed\.proj\.weight; they need"):
        load_pretrained(net, config)


@pytest.mark.parametrize("change", [torch.Tensor.int, lambda tensor: tensor / 0, None])
def test_a_run_does_not_start_from_what_is_no_weights(tmp_path, change) -> None:
    file, name = tmp_path / "weights", "encoder.norm.weight"
    state = made(SMALL).state_dict()
    write_weights(file, {**state, name: change(state[name])} if change else {})
    config = replace(SMALL, weights=str(file))
    with pytest.raises(DataError, match=f"^{file}: its tensor {name}" if change else f"^{file}: holds no tensors"):
        load_pretrained(made(config), config)


def test_a_run_folder_stands_for_its_last_weights(tmp_path) -> None:
    source, folder = made(SMALL, seed=9), tmp_path / "run"
    config = replace(SMALL, weights=str(folder), tile=(8, 8, 16))
    (folder / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="the folder holds neither model.safetensors nor a checkpoint"):
        load_pretrained(made(config), config)
    progress = checkpoint.Progress(step=3)
    checkpoint.save(folder / "checkpoints", source, torch.optim.SGD(source.parameters()), progress, Group("world"))
    for _ in range(2):  # of a resumed run, and of one that has finished
        net = made(config)
        assert "positions resized from 8 tokens to 2x2x4" in load_pretrained(net, config)
        own, theirs = (encoder_of(each).state_dict() for each in (net, source))
        assert all(torch.equal(own[name], theirs[name]) for name in own if name != "pos_embed")
        write_weights(folder / "model.safetensors", source)


def test_the_line_names_what_is_fresh_and_what_was_left(tmp_path) -> None:
    write_weights(tmp_path / "weights", {**made(SMALL).state_dict(), "rebuilder.a": torch.ones(1)})
    config = replace(SMALL, weights=str(tmp_path / "weights"), decoder="primus")
    line = load_pretrained(made(config), config)
    assert "; new: decoder (" in line and "decoder." not in line, "more than four are counted"
    assert "; left out: decoder (" in line and line.endswith(", rebuilder (1)")


def test_classifiers_start_from_encoders_of_other_tasks_and_from_others_classes(tmp_path) -> None:
    source, file = made(SMALL, seed=9), tmp_path / "weights"
    write_weights(file, source)
    config = replace(SMALL, task="classify", pooling="token", weights=str(file))
    net = made(config)
    line = load_pretrained(net, config)
    assert "new: class_token, classes.bias, classes.weight; left out: decoder (" in line
    own, theirs = (encoder_of(each).state_dict() for each in (net, source))
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    residual = Config(task="classify", network="resattnet18", features=8, tile=(16, 16, 16), weights=str(file))
    three = build_network(replace(residual, seed=9), 1, 3, Group("seq"))
    write_weights(file, three)
    net = made(residual)
    assert "new: resattnet.cells.classes.linear" in load_pretrained(net, residual)
    assert torch.equal(net.state_dict()[STEM], three.state_dict()[STEM])
    write_weights(file, three.state_dict())  # which does not tell of the network
    for other, what in ((replace(residual, features=16), "network"), (config, "encoder")):
        with pytest.raises(ValueError, match=f"do not fit the {what}: .*they need the --network, --features"):
            load_pretrained(made(other), other)


def test_distmis_weights_of_another_length_are_those_of_another_network(tmp_path) -> None:
    """Its norm has weights for each position along the last side; the variant without takes any tile."""
    file = tmp_path / "weights"
    for network, refused in (("unet-distmis", True), ("unet-distmis-text", False)):
        source = Config(network=network, features=2, tile=(16, 16, 16), weights=str(file))
        write_weights(file, made(source))
        longer, wider = (replace(source, tile=tile) for tile in ((16, 16, 24), (24, 16, 16)))
        assert load_pretrained(made(wider), wider)
        words = r"do not fit the U-Net: unet\.cells\..* they need .* a --tile whose last side is 16"
        with pytest.raises(ValueError, match=words) if refused else nullcontext():
            load_pretrained(made(longer), longer)


def test_layers_nearer_to_the_image_learn_at_lower_rates() -> None:
    config = Config(**{**vars(SMALL), "depth": 3, "layer_decay": 0.5, "optimizer": "sgd", "betas": (0.0,)})
    net = made(config)
    optimizer = make_optimizer(net, config.optimizer_options)
    set_learning_rate(optimizer, 0.1)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = {name: float((before[name] - p.detach()).max()) for name, p in net.named_parameters()}
    wanted = {"encoder.patch_embed.proj.weight": 1 / 16, "encoder.pos_embed": 1 / 16, "encoder.norm.weight": 1.0}
    wanted |= {f"encoder.blocks.{at}.mlp.fc1.weight": 2.0 ** (at - 3) for at in range(3)}
    wanted |= {name: 1.0 for name in moved if name.startswith("decoder.")}
    assert {name: moved[name] for name in wanted} == pytest.approx({n: 0.1 * scale for n, scale in wanted.items()})
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def test_an_order_of_tokens_is_refused_where_weights_are_not_of_primus(tmp_path) -> None:
    write_weights(tmp_path / "weights", made(SMALL))
    config = replace(SMALL, weights=str(tmp_path / "weights"), token_order="hwd")
    with pytest.raises(ValueError, match="--token-order hwd would do nothing: .*weights are seqpar's"):
        load_pretrained(made(config), config)
