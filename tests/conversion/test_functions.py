"""Functions in somebody's own ``forward`` on boxes equal one process, and what cannot be exact is refused by name."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.conversion.converted import convert
from seqpar.parallel.mesh import Mesh
from tests.support.converted import Answers, answers, gaps
from tests.support.pages import page
from tests.support.ranks import RanksFailed


class Own(nn.Module):
    """A convolution, what a test gives, and another convolution."""

    def __init__(self, inside: Callable[["Own", Tensor], Tensor], dims: int = 3, last: int = 8) -> None:
        super().__init__()
        conv = nn.Conv3d if dims == 3 else nn.Conv2d
        self.first, self.down = conv(2, 8, 3, padding=1), conv(8, 8, 3, stride=2, padding=1)
        self.last, self.inside = conv(last, 3, 3, padding=1), inside
        self.norm, self.slopes = nn.BatchNorm3d(8) if dims == 3 else nn.BatchNorm2d(8), nn.PReLU(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.squeeze, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside(self, torch.tanh(self.first(x))))  # type: ignore[no-any-return]


def joined(net: Own, x: Tensor) -> Tensor:
    """Somebody's own U: an odd scale, a padding that depends on shapes, and a residual."""
    y = net.slopes(net.norm(net.down(x)))
    y = F.interpolate(y, scale_factor=2, mode="trilinear" if x.ndim == 5 else "bilinear", align_corners=False)
    short = [a - b for a, b in zip(x.shape[2:], y.shape[2:])]
    if max(short) > 0 or min(short) < 0:
        y = F.pad(y, [n for s in reversed(short) for n in (0, s)], mode="replicate")
    return torch.cat([x, 1 - y], 1) + 2 * torch.cat((y, x), dim=1)


def squeezed(net: Own, x: Tensor) -> Tensor:
    """Squeeze and excitation, by modules, means and views, and a learnt scale."""
    b, c = x.shape[:2]
    ones = (1,) * (x.ndim - 2)
    weights = torch.sigmoid(net.squeeze(F.adaptive_avg_pool3d(x, 1).view(b, c))).view(b, c, *ones)
    largest = F.adaptive_max_pool3d(x, 1)
    mean = x.mean(dim=(2, 3, 4), keepdim=True) + x.sum((2, 3, 4), True) / x.numel()
    return x * weights.expand_as(x) * net.scale + largest - mean


def channels_last(net: Own, x: Tensor) -> Tensor:
    """A block of ConvNeXt: channels behind space, where layers are linear."""
    y = x.permute(0, 2, 3, 4, 1)
    y = F.gelu(net.squeeze(F.layer_norm(y, (8,))))
    return x + y.movedim(-1, 1).contiguous()


def attended(net: Own, x: Tensor) -> Tensor:
    """Attention over channels and over places, of pooled channels."""
    largest, _ = x.max(1, keepdim=True)
    gate = torch.sigmoid(torch.cat([x.mean(axis=1, keepdim=True), largest], axis=1)).mean(1, keepdim=True)
    gate = gate + x.sum(axis=1).mean()
    first, second = x.chunk(2, 1)
    return torch.stack([first * gate, second.softmax(1)], 1).flatten(1, 2)


def resized(net: Own, x: Tensor) -> Tensor:
    """Sizes that no factor gives, and corners that are aligned."""
    y = F.interpolate(net.down(x), size=x.shape[2:], mode="trilinear", align_corners=True)
    z = F.interpolate(x, size=(9, 21, 5), mode="nearest")
    z = F.interpolate(z, scale_factor=1.6, mode="trilinear")
    return y + F.interpolate(z, size=x.shape[2:], mode="nearest-exact")


def padded(net: Own, x: Tensor) -> Tensor:
    """Paddings of every mode, crops and slices, and windows without padding."""
    y = F.pad(x, (1, 2, 0, 3, 2, 1), value=0.5)
    y = F.avg_pool3d(F.pad(y, (2, 1, 1, 1, 1, 2), mode="reflect"), 3, 1)
    y = F.max_pool3d(F.pad(y, (1, 1, 2, 1, 1, 1), mode="circular"), 3, 1)
    y = F.pad(y, (-1, 0, -2, -1, -1, 0))[:, :, : x.shape[2], 1:, ::2]
    return y * y.new_ones(1)


def pooled(net: Own, x: Tensor) -> Tensor:
    """Pooling that overlaps the edges, and in proportion."""
    y = F.max_pool3d(x, 3, 2, padding=1, ceil_mode=True) + F.avg_pool3d(x, 3, 2, 1, True, False)
    return F.adaptive_avg_pool3d(y, (4, 2, 2)) + F.adaptive_max_pool3d(y, (4, 2, 2))


def flat(net: Own, x: Tensor) -> Tensor:
    """Pooling, resizing, padding and norms in two dimensions."""
    y = F.max_pool2d(x, 3, 2, padding=1, ceil_mode=True) + F.avg_pool2d(x, 3, 2, 1, True, False)
    y = F.interpolate(F.instance_norm(y), size=(9, 21), mode="bilinear", align_corners=True)
    y = F.pad(F.pad(y, (1, 2, 0, 3), value=0.5), (2, 1, 1, 1), mode="reflect")[:, :, 1:, ::2]
    y = F.interpolate(F.group_norm(F.dropout2d(y), 4), size=x.shape[2:], mode="nearest")
    return x * torch.sigmoid(F.adaptive_avg_pool2d(y, 1)) + y - F.adaptive_max_pool2d(x, 1)


def shuffled(net: Own, x: Tensor) -> Tensor:
    """Patches to channels and back, whose edges are not those of the boxes."""
    b, c, w, d, h = x.shape
    y = x.reshape(b, c, w // 4, 4, d // 4, 4, h // 4, 4).permute(0, 1, 3, 5, 7, 2, 4, 6)
    y = y.reshape(b, -1, w // 4, d // 4, h // 4)
    y = torch.relu(y).view(b, c, 4, 4, 4, w // 4, d // 4, h // 4).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return y.reshape(b, c, w, d, h) + x


def as_tokens(net: Own, x: Tensor) -> Tensor:
    """Tokens that attend to each other at a small scale, and space again."""
    y = net.down(net.down(x))
    tokens = y.flatten(2).transpose(1, 2)
    tokens = F.scaled_dot_product_attention(net.squeeze(tokens), tokens, tokens)
    signs = x.detach().view({4: torch.int32, 8: torch.int64}[x.element_size()]) >= 0
    return F.interpolate(tokens.transpose(1, 2).reshape(y.shape), size=x.shape[2:]) + x * signs


def dropped(net: Own, x: Tensor) -> Tensor:
    """Voxels, channels and samples that chance chooses."""
    y = F.dropout(x, 0.3) + F.dropout3d(x, 0.5)
    keep = torch.rand(len(x), 1, 1, 1, 1, dtype=x.dtype) > 0.5
    return y * keep


def drawn(net: Own, x: Tensor) -> Tensor:
    """What chance decides of whole tensors: gates, and weights of attention."""
    gates = F.gumbel_softmax(x.mean((2, 3, 4)), dim=1) + torch.empty(8).exponential_().to(x)
    tokens = net.down(net.down(x)).flatten(2).transpose(1, 2)
    tokens = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5)
    tokens = F.rrelu(net.attention(tokens, tokens, tokens)[0], training=True)
    return x * (gates + tokens.mean(1))[..., None, None, None]


class OtherLayers(nn.Module):
    """Layers of torch that the networks of others lack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(2, 8, (5, 3, 1), padding="same", dilation=(2, 1, 1), groups=2),
            nn.InstanceNorm3d(8, affine=True, track_running_stats=True),
            nn.Conv3d(8, 8, 3, padding=1, padding_mode="reflect"),
            nn.GroupNorm(4, 8),
            nn.Conv3d(8, 8, 3, padding=1, padding_mode="circular", stride=2),
            nn.Hardswish(),
            nn.ConvTranspose3d(8, 8, 3, stride=2, padding=1, output_padding=(1, 0, 1)),
            nn.ReplicationPad3d(1),
            nn.AvgPool3d(3, 1),
            nn.ConstantPad3d((1, 0, 0, 0, 0, 0), 0.1),
            nn.Upsample(scale_factor=(1, 2, 1), mode="trilinear"),
            nn.Softplus(),
            nn.Softmax(1),
            nn.Conv3d(8, 8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "joined": (lambda: Own(joined, last=16), (2, 2, 11, 9, 7)),
    "joined in two dimensions": (lambda: Own(joined, 2, last=16), (2, 2, 13, 10)),
    "squeezed": (lambda: Own(squeezed), (2, 2, 9, 8, 6)),
    "channels last": (lambda: Own(channels_last), (1, 2, 9, 8, 6)),
    "attended": (lambda: Own(attended), (1, 2, 9, 8, 6)),
    "resized": (lambda: Own(resized), (1, 2, 17, 14, 9)),
    "padded": (lambda: Own(padded), (1, 2, 13, 9, 8)),
    "pooled": (lambda: Own(pooled), (1, 2, 15, 7, 7)),
    "flat": (lambda: Own(flat, 2), (2, 2, 15, 11)),
    "shuffled": (lambda: Own(shuffled), (1, 2, 20, 12, 8)),
    "tokens": (lambda: Own(as_tokens), (1, 2, 20, 12, 8)),
    "drawn": (lambda: Own(drawn), (2, 2, 9, 8, 6)),
    "dropped": (lambda: Own(dropped), (2, 2, 9, 8, 6)),
    "written": (lambda: Own(written_apart), (1, 2, 9, 8, 6)),
    "other layers": (OtherLayers, (1, 2, 17, 12, 10)),
}


def check(mesh: Mesh, wants: dict[str, Answers]) -> dict[str, dict[str, float]]:
    return {name: gaps(mesh, want) for name, want in wants.items()}


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_functions_in_forward_equal_one_process(world: int, ranks: Callable[..., list]) -> None:
    wants = {name: answers(*case) for name, case in CASES.items()}
    for found in ranks(world, check, wants, timeout=240):
        assert max(max(each.values()) for each in found.values()) < 1e-12, found


def test_a_convolution_of_bare_boxes_differs() -> None:
    """A control: without the other rank's halo the same comparison is far off."""

    def bare(mesh: Mesh, want: Answers) -> float:
        net = convert(copy.deepcopy(want.module), mesh.seq)
        y = want.module(net.shard(want.image)).detach()
        return float((net.unshard(y) - want.outputs[0]).abs().max())

    from tests.support.ranks import run_ranks

    want = answers(lambda: nn.Conv3d(2, 3, 3, padding=1), (1, 2, 9, 8, 6))
    assert min(run_ranks(2, bare, want)) > 1e-2


def written_after(net: Own, x: Tensor) -> Tensor:
    """In one process the rows change with the volume that they are a view of."""
    y = x.clone()
    rows = y[:, :, 2:5]
    y.relu_()
    return rows * 2


def written_apart(net: Own, x: Tensor) -> Tensor:
    """What was written to belongs to the copy in one process too."""
    rows = x[:, :, 1:].clone()
    rows.relu_()
    return F.leaky_relu_(x.flatten(2) * 2).view(x.shape) + F.pad(rows, (0, 0, 0, 0, 1, 0))


def each_voxel(net: Own, x: Tensor) -> Tensor:
    return x.flatten(1)[:, :3]


@torch.jit.script
def gate(x: Tensor) -> Tensor:
    return x.mean((2, 3, 4), keepdim=True).sigmoid()


REFUSED: dict[str, tuple[Callable[[Own, Tensor], Tensor], str]] = {
    "a flatten of channels and space": (each_voxel, "flatten"),
    "a layer norm over space": (lambda net, x: F.layer_norm(x, x.shape[2:]), "layer_norm"),
    "a softmax over space": (lambda net, x: x.softmax(2), "softmax"),
    "a roll": (lambda net, x: x.roll(1, 2), "roll"),
    "a flip": (lambda net, x: x.flip(2), "flip"),
    "an einsum": (lambda net, x: torch.einsum("bcwdh,kc->bkwdh", x, net.squeeze.weight), "einsum"),
    "samples at points": (lambda net, x: F.grid_sample(x, torch.zeros(1, 4, 4, 4, 3)), "grid_sample"),
    "sliding views": (lambda net, x: x.unfold(2, 2, 2), "unfold"),
    "bytes as smaller numbers": (lambda net, x: x.view(torch.int16).sum() + x, "view of torch.float32 as torch.int16"),
    "a shuffle of pixels": (lambda net, x: F.pixel_shuffle(x, 2), "pixel_shuffle"),
    "a maximum over space": (lambda net, x: x - x.amax((2, 3, 4), keepdim=True), "amax"),
    "a deviation over space": (lambda net, x: x / x.std((2, 3, 4), keepdim=True), "std"),
    "a pool by powers": (lambda net, x: F.lp_pool3d(x, 2, 2), "lp_pool3d"),
    "a norm over neighbouring channels": (lambda net, x: F.local_response_norm(x, 3), "local_response_norm"),
    "a sum over a part of space": (lambda net, x: x - x.mean(3, keepdim=True), "mean"),
    "a joint along space": (lambda net, x: torch.cat([x, x], 2), "cat"),
    "one place": (lambda net, x: x - x[:, :, :1].mean() + x[:, :, 0].mean(), "an index"),
    "a cubic resize in two dimensions": (lambda net, x: F.interpolate(x, scale_factor=2, mode="area"), "interpolate"),
    "a kernel from a volume": (lambda net, x: F.conv3d(x, F.interpolate(x[:, :, :4], size=(4, 4, 4))), "conv3d with"),
    "indices of a pool": (lambda net, x: F.max_pool3d(x, 2, return_indices=True)[0], "max_pool3d"),
    "a scripted function": (lambda net, x: x * gate(x * x), "torch.jit.script"),
    "writing to rows": (lambda net, x: x.clone()[:, :, 2:5].mul_(3), "mul_ writes to a view"),
    "writing to a view of rows": (lambda net, x: F.relu(x.clone()[:, :, 3:][..., 1:], True), "relu writes to a view"),
    "writing to tokens": (lambda net, x: x.clone().flatten(2).transpose(1, 2).add_(1), "add_ writes to a view"),
    "rows of what was written since": (written_after, "mul takes what was a view"),
    "a map over samples": (lambda net, x: torch.vmap(lambda each: each / each.mean())(x), "torch.vmap"),
    "a map of a convolution": (lambda net, x: torch.vmap(net.down)(x), "torch.vmap"),
    "a checkpoint": (
        lambda net, x: torch.utils.checkpoint.checkpoint(net.down, x, use_reentrant=False),
        "conv3d inside torch.utils.checkpoint",
    ),
    "a reentrant checkpoint": (
        lambda net, x: torch.utils.checkpoint.checkpoint(net.down, x, use_reentrant=True),
        "conv3d inside torch.utils.checkpoint",
    ),
}


def refusals(mesh: Mesh) -> dict[str, str]:
    """Returns what the first rank's errors say."""
    words = {}
    for name, (inside, _) in REFUSED.items():
        net = convert(nn.Sequential(Own(inside)), mesh.seq)
        box = net.shard(torch.randn(1, 2, 10, 8, 6)).requires_grad_()
        with pytest.raises(ValueError) as error:
            net(box)
        words[name] = str(error.value)
        if name.startswith("writing to") and "view of" not in name:
            with pytest.raises(ValueError, match=r"_ writes to a view"), torch.inference_mode():
                net(box.detach())
    return words


def test_what_cannot_be_exact_is_refused_by_name(ranks: Callable[..., list]) -> None:
    for words in ranks(2, refusals):
        for name, (_, function) in REFUSED.items():
            assert words[name].startswith("0"), "the submodule"
            assert function in words[name] and "cannot be converted as it is" in words[name], words[name]


def test_the_page_names_what_is_refused() -> None:
    """Each name is one of REFUSED, or a layer that calls one."""
    table = page("how-to/convert-your-network").read_text().partition("Refused are")[2].partition("\n## ")[0]
    first = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`(?:F\.|torch\.utils\.)?(\w+)`", first)) - {"forward", "SyncBatchNorm", "SwinUNETR"}
    layers = {"LPPool": "lp_pool3d", "LocalResponseNorm": "local_response_norm", "MaxPool": "max_pool3d"}
    refused = " ".join(words for _, words in REFUSED.values())
    assert {"flip", "einsum", "amax", "LPPool"} <= named
    assert [name for name in named if layers.get(name, name) not in refused] == []


def test_a_failure_on_a_rank_names_it(ranks: Callable[..., list]) -> None:
    def fail(mesh: Mesh) -> None:
        convert(Own(each_voxel), mesh.seq)(torch.zeros(1, 2, 3, 4, 5))

    with pytest.raises(RanksFailed, match="flatten"):
        ranks(2, fail)
