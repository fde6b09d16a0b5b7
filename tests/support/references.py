"""MONAI's UNETR and ViT and Primus as plain functions of a state dict, written from their tables of keys alone.

Nothing of ours is imported: what is under test cannot agree with itself.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
Patch = int | tuple[int, int, int]


def _sides(patch: Patch, dims: int = 3) -> tuple[int, ...]:
    return (patch,) * dims if isinstance(patch, int) else patch


def kernels(patch: Patch, short_first: bool) -> list[tuple[int, ...]]:
    """Returns each stage's kernel of the transposed convolutions, the coarsest first; its stride is the same.

    ``short_first``: a short side of the patch is doubled in the first stages (UNETR's here), else in the last (Primus).
    """
    sides = _sides(patch)
    count = max(sides).bit_length() - 1
    done = [[stage if short_first else count - 1 - stage for _ in sides] for stage in range(count)]
    return [tuple(2 if at < side.bit_length() - 1 else 1 for at, side in zip(stage, sides)) for stage in done]


def draw(shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float64) -> State:
    """Returns random weights; norms' scales lie around one."""
    dice = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        std = 0.3 if len(shape) == 1 else (math.prod(shape[1:])) ** -0.5
        center = 1.0 if "norm" in name and name.endswith("weight") or ".1.weight" in name and len(shape) == 1 else 0.0
        state[name] = (torch.randn(shape, generator=dice, dtype=torch.float64) * std + center).to(dtype)
    return state


def vit_shapes(
    prefix: str, c: int, patch: Patch, grid: tuple[int, ...], e: int, hidden: int, depth: int, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Those of MONAI's ViT."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}patch_embedding.position_embeddings": (1, math.prod(grid), e),
        f"{prefix}patch_embedding.patch_embeddings.weight": (e, c, *_sides(patch, len(grid))),
        f"{prefix}patch_embedding.patch_embeddings.bias": (e,),
        f"{prefix}norm.weight": (e,),
        f"{prefix}norm.bias": (e,),
    }
    for i in range(depth):
        b = f"{prefix}blocks.{i}."
        shapes |= {f"{b}{norm}.{kind}": (e,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        shapes |= {f"{b}mlp.linear1.weight": (hidden, e), f"{b}mlp.linear1.bias": (hidden,)}
        shapes |= {f"{b}mlp.linear2.weight": (e, hidden), f"{b}mlp.linear2.bias": (e,)}
        shapes |= {f"{b}attn.out_proj.weight": (e, e), f"{b}attn.out_proj.bias": (e,)}
        shapes[f"{b}attn.qkv.weight"] = (3 * e, e)
        if bias:
            shapes[f"{b}attn.qkv.bias"] = (3 * e,)
    return shapes


def unetr_shapes(
    c: int,
    k: int,
    patch: Patch,
    grid: tuple[int, ...],
    f: int,
    e: int,
    hidden: int,
    depth: int = 12,
    bias: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Those of MONAI's UNETR, and for another patch than 16 the same with fewer levels."""
    ups = kernels(patch, short_first=True)
    levels = len(ups)
    shapes = vit_shapes("vit.", c, patch, grid, e, hidden, depth, bias)

    def block(name: str, i: int, o: int) -> None:
        shapes[f"{name}.conv1.conv.weight"] = (o, i, 3, 3, 3)
        shapes[f"{name}.conv2.conv.weight"] = (o, o, 3, 3, 3)
        if i != o:
            shapes[f"{name}.conv3.conv.weight"] = (o, i, 1, 1, 1)

    block("encoder1.layer", c, f)
    for at in range(2, levels + 1):
        width = f * 2 ** (at - 1)
        shapes[f"encoder{at}.transp_conv_init.conv.weight"] = (e, width, *ups[0])
        for j in range(levels - at):
            shapes[f"encoder{at}.blocks.{j}.0.conv.weight"] = (width, width, *ups[j + 1])
            block(f"encoder{at}.blocks.{j}.1", width, width)
    for at in range(2, levels + 2):
        width = f * 2 ** (at - 2)
        channels = e if at == levels + 1 else 2 * width
        shapes[f"decoder{at}.transp_conv.conv.weight"] = (channels, width, *ups[levels + 1 - at])
        block(f"decoder{at}.conv_block", 2 * width, width)
    return shapes | {"out.conv.conv.weight": (k, f, 1, 1, 1), "out.conv.conv.bias": (k,)}


def vit(state: State, x: Tensor, heads: int, prefix: str = "") -> tuple[Tensor, list[Tensor]]:
    """Returns the normed tokens and all blocks' outputs."""
    s = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    weight = s["patch_embedding.patch_embeddings.weight"]
    conv = F.conv3d if weight.ndim == 5 else F.conv2d
    x = conv(x, weight, s["patch_embedding.patch_embeddings.bias"], stride=tuple(weight.shape[2:]))
    x = x.flatten(2).transpose(1, 2) + s["patch_embedding.position_embeddings"]
    e, outputs = x.shape[2], []
    for i in range(sum(name.endswith("attn.qkv.weight") for name in s)):
        w = {name.removeprefix(f"blocks.{i}."): tensor for name, tensor in s.items()}
        y = F.layer_norm(x, (e,), w["norm1.weight"], w["norm1.bias"])
        y = F.linear(y, w["attn.qkv.weight"], w.get("attn.qkv.bias"))
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in y.chunk(3, 2))
        y = (torch.einsum("baxf,bayf->baxy", q, k) * (e // heads) ** -0.5).softmax(-1) @ v
        x = x + F.linear(y.transpose(1, 2).flatten(2), w["attn.out_proj.weight"], w["attn.out_proj.bias"])
        y = F.layer_norm(x, (e,), w["norm2.weight"], w["norm2.bias"])
        y = F.gelu(F.linear(y, w["mlp.linear1.weight"], w["mlp.linear1.bias"]))
        x = x + F.linear(y, w["mlp.linear2.weight"], w["mlp.linear2.bias"])
        outputs.append(x)
    return F.layer_norm(x, (e,), s["norm.weight"], s["norm.bias"]), outputs


def unetr(state: State, image: Tensor, heads: int, skips: tuple[int, ...] = (3, 6, 9)) -> Tensor:
    """Returns logits; ``skips`` are the blocks, from 0, whose outputs encoder2, encoder3, … take."""

    def norm(x: Tensor) -> Tensor:
        mean, var = x.mean((2, 3, 4), keepdim=True), x.var((2, 3, 4), unbiased=False, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt()

    def block(name: str, x: Tensor) -> Tensor:
        y = F.leaky_relu(norm(F.conv3d(x, state[f"{name}.conv1.conv.weight"], padding=1)), 0.01)
        y = norm(F.conv3d(y, state[f"{name}.conv2.conv.weight"], padding=1))
        if (shortcut := state.get(f"{name}.conv3.conv.weight")) is not None and shortcut.shape[0] != shortcut.shape[1]:
            x = norm(F.conv3d(x, shortcut))
        return F.leaky_relu(y + x, 0.01)

    def up(name: str, x: Tensor) -> Tensor:
        weight = state[f"{name}.conv.weight"]
        return F.conv_transpose3d(x, weight, stride=tuple(weight.shape[2:]))

    weight = state["vit.patch_embedding.patch_embeddings.weight"]
    levels = max(weight.shape[2:]).bit_length() - 1
    grid = [side // p for side, p in zip(image.shape[2:], weight.shape[2:])]
    tokens = {name: tensor for name, tensor in state.items() if name.startswith("vit.")}
    last, hidden = vit(tokens, image, heads, "vit.")
    fold = [z.transpose(1, 2).reshape(z.shape[0], -1, *grid) for z in (*(hidden[at] for at in skips), last)]
    skip_at = {1: block("encoder1.layer", image)}
    for at in range(2, levels + 1):
        x = up(f"encoder{at}.transp_conv_init", fold[at - 2])
        for j in range(levels - at):
            x = block(f"encoder{at}.blocks.{j}.1", up(f"encoder{at}.blocks.{j}.0", x))
        skip_at[at] = x
    x = fold[-1]
    for at in range(levels + 1, 1, -1):
        x = torch.cat([up(f"decoder{at}.transp_conv", x), skip_at[at - 1]], 1)
        x = block(f"decoder{at}.conv_block", x)
    return F.conv3d(x, state["out.conv.conv.weight"], state["out.conv.conv.bias"])


def primus_shapes(
    c: int, k: int, patch: Patch, grid: tuple[int, ...], e: int, depth: int, widths: list[int]
) -> dict[str, tuple[int, ...]]:
    """Those of Primus; ``widths`` are the decoder's channels between its stages."""
    shapes: dict[str, tuple[int, ...]] = {
        "mask_token": (1, 1, e),
        "down_projection.proj.weight": (e, c, *_sides(patch)),
        "down_projection.proj.bias": (e,),
        "eva.pos_embed": (1, math.prod(grid), e),
        "eva.norm.weight": (e,),
        "eva.norm.bias": (e,),
    }
    hidden = int(e * 8 / 3)
    for i in range(depth):
        b = f"eva.blocks.{i}."
        shapes |= {f"{b}{norm}.{kind}": (e,) for norm in ("norm1", "norm2", "attn.norm") for kind in ("weight", "bias")}
        shapes |= {f"{b}mlp.norm.weight": (hidden,), f"{b}mlp.norm.bias": (hidden,)}
        shapes |= {f"{b}gamma_1": (e,), f"{b}gamma_2": (e,), f"{b}attn.k_proj.weight": (e, e)}
        for name in ("attn.q_proj", "attn.v_proj", "attn.proj"):
            shapes |= {f"{b}{name}.weight": (e, e), f"{b}{name}.bias": (e,)}
        for name in ("mlp.fc1_g", "mlp.fc1_x"):
            shapes |= {f"{b}{name}.weight": (hidden, e), f"{b}{name}.bias": (hidden,)}
        shapes |= {f"{b}mlp.fc2.weight": (e, hidden), f"{b}mlp.fc2.bias": (e,)}
    channels, (*ups, last) = [e, *widths], kernels(patch, short_first=False)
    for s, (i, o) in enumerate(zip(channels, widths)):
        shapes |= {f"up_projection.decode.{s}.0.weight": (i, o, *ups[s]), f"up_projection.decode.{s}.0.bias": (o,)}
        shapes |= {f"up_projection.decode.{s}.1.{kind}": (o,) for kind in ("weight", "bias")}
    final = f"up_projection.decode.{len(widths)}"
    return shapes | {f"{final}.weight": (channels[-1], k, *last), f"{final}.bias": (k,)}


def primus_stem_shapes(c: int, e: int, widths: tuple[int, ...], skips: bool) -> dict[str, tuple[int, ...]]:
    """Those of the residual convolutions that embed patches in PrimusV2 and, with ``skips``, V3."""
    shapes: dict[str, tuple[int, ...]] = {}
    last = len(widths) - 1
    for at, (i, o) in enumerate(zip((c, *widths), widths)):
        block = f"down_projection.{f'stages.{at - 1}' if at else 'stem'}.blocks.0."
        convs = {"conv1.": (o, i, 3, 3, 3), "conv2.": (o, o, 3, 3, 3)}
        if i != o:
            convs[f"skip.{min(at, 1)}."] = (o, i, 1, 1, 1)
        for name, shape in convs.items():
            shapes |= {f"{block}{name}conv.weight": shape, f"{block}{name}norm.weight": (o,)}
            shapes[f"{block}{name}norm.bias"] = (o,)
            if not at and "skip" not in name:
                shapes[f"{block}{name}conv.bias"] = (o,)
    shapes |= {"down_projection.final_proj.weight": (e, widths[-1], 1, 1, 1), "down_projection.final_proj.bias": (e,)}
    for at in range(last if skips else 0):
        side = 2 ** (last - at)
        name = f"down_projection.proj_to_tokens.{at}"
        shapes |= {f"{name}.weight": (e, widths[at], side, side, side), f"{name}.bias": (e,)}
        shapes[f"down_projection.scale_proj_to_tokens.{at}"] = ()
    return shapes


def with_second_names(state: State) -> State:
    """Returns the state in which convolutions and norms of residual blocks also have their second names."""
    second = {
        name.replace(f".{kind}.", f".all_modules.{number}."): tensor
        for name, tensor in state.items()
        for number, kind in enumerate(("conv", "norm"))
        if ".blocks.0." in name and f".{kind}." in name and name.startswith("down_projection.")
    }
    return state | second


def _embedded(state: State, x: Tensor) -> Tensor:
    """Returns the tokens ``b e w d h``: by one convolution, or by residual blocks, as the names say."""
    d = "down_projection."
    if f"{d}proj.weight" in state:
        weight = state[f"{d}proj.weight"]
        return F.conv3d(x, weight, state[f"{d}proj.bias"], stride=tuple(weight.shape[2:]))
    count = sum(name.startswith(f"{d}proj_to_tokens") and name.endswith("weight") for name in state)
    slope = 0.01 if count else 0.0
    total = torch.zeros(())

    def normed(name: str, y: Tensor, **options: int) -> Tensor:
        y = F.conv3d(y, state[f"{name}.conv.weight"], state.get(f"{name}.conv.bias"), **options)
        return F.instance_norm(y, weight=state[f"{name}.norm.weight"], bias=state[f"{name}.norm.bias"], eps=1e-5)

    for at in range(1 + sum(f"{d}stages.{n}.blocks.0.conv1.conv.weight" in state for n in range(9))):
        block = f"{d}{f'stages.{at - 1}' if at else 'stem'}.blocks.0."
        y = F.leaky_relu(normed(f"{block}conv1", x, stride=1 + min(at, 1), padding=1), slope)
        y = normed(f"{block}conv2", y, padding=1)
        shortcut = F.avg_pool3d(x, 2) if at else x
        if f"{block}skip.{min(at, 1)}.conv.weight" in state:
            shortcut = normed(f"{block}skip.{min(at, 1)}", shortcut)
        x = F.leaky_relu(y + shortcut, slope)
        if at < count:
            weight, bias = (state[f"{d}proj_to_tokens.{at}.{kind}"] for kind in ("weight", "bias"))
            skip = F.conv3d(x, weight, bias, stride=weight.shape[-1])
            total = total + state[f"{d}scale_proj_to_tokens.{at}"] * skip
    return F.conv3d(x, state[f"{d}final_proj.weight"], state[f"{d}final_proj.bias"]) + total


def primus(state: State, x: Tensor, heads: int, exchanged: bool = False) -> Tensor:
    """Returns logits of Primus with everything that its training switches on.

    ``exchanged``: tokens lie in a row with the second axis slowest, which positions know nothing of.
    """
    x = _embedded(state, x)
    grid, e = x.shape[2:], x.shape[1]
    x = (x.transpose(2, 3) if exchanged else x).flatten(2).transpose(1, 2) + state["eva.pos_embed"]
    angles = _axial_angles(grid, e // heads).to(x)

    def up(name: str, y: Tensor) -> Tensor:
        weight = state[f"{name}.weight"]
        return F.conv_transpose3d(y, weight, state[f"{name}.bias"], stride=tuple(weight.shape[2:]))

    def turn(t: Tensor) -> Tensor:
        pair = torch.stack([-t[..., 1::2], t[..., ::2]], -1).reshape(t.shape)
        return t * angles.cos() + pair * angles.sin()

    for i in range(sum(name.endswith("gamma_1") for name in state)):
        w = {name.removeprefix(f"eva.blocks.{i}."): tensor for name, tensor in state.items()}

        def linear(name: str, y: Tensor, w: State = w) -> Tensor:
            return F.linear(y, w[f"{name}.weight"], w.get(f"{name}.bias"))

        def norm(name: str, y: Tensor, w: State = w) -> Tensor:
            return F.layer_norm(y, y.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

        y = norm("norm1", x)
        q, k, v = (linear(f"attn.{name}_proj", y).unflatten(2, (heads, -1)).transpose(1, 2) for name in "qkv")
        y = (turn(q) @ turn(k).transpose(2, 3) * (e // heads) ** -0.5).softmax(-1) @ v
        x = x + w["gamma_1"] * linear("attn.proj", norm("attn.norm", y.transpose(1, 2).flatten(2)))
        y = norm("norm2", x)
        y = F.silu(linear("mlp.fc1_g", y)) * linear("mlp.fc1_x", y)
        x = x + w["gamma_2"] * linear("mlp.fc2", norm("mlp.norm", y))
    x = F.layer_norm(x, (e,), state["eva.norm.weight"], state["eva.norm.bias"], 1e-5)
    x = x.transpose(1, 2).reshape(x.shape[0], e, *grid)
    x = x.transpose(2, 3) if exchanged else x
    s = 0
    while f"up_projection.decode.{s}.0.weight" in state:
        x = up(f"up_projection.decode.{s}.0", x)
        scale, shift = (state[f"up_projection.decode.{s}.1.{kind}"][:, None, None, None] for kind in ("weight", "bias"))
        mean, var = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
        x, s = F.gelu((x - mean) / (var + 1e-6).sqrt() * scale + shift), s + 1
    return up(f"up_projection.decode.{s}", x)


def _axial_angles(grid: tuple[int, ...], head_dim: int) -> Tensor:
    """Returns ``n f``: for each axis in turn its bands, each twice."""
    bands = round(head_dim / 1.5) // 4
    frequencies = [10000 ** (-band / bands) for band in range(bands)]
    rows = []
    for w in range(grid[0]):
        for d in range(grid[1]):
            for h in range(grid[2]):
                rows.append([at * f for at in (w, d, h) for f in frequencies for _ in range(2)])
    return torch.tensor(rows, dtype=torch.float64)
