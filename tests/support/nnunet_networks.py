"""nnU-Net's two networks as plain torch modules, written from a description of their layers and of their keys alone.

Nothing of ours is imported: what is under test cannot agree with itself. Also results folders that hold them.
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class ConvNorm(nn.Module):
    """A convolution, its norm and its activation, each under two names."""

    def __init__(self, i: int, o: int, kernel: list[int], stride: list[int], bias: bool = True, active: bool = True):
        super().__init__()
        self.conv = nn.Conv3d(i, o, kernel, stride, [(k - 1) // 2 for k in kernel], bias=bias)
        self.norm = nn.InstanceNorm3d(o, eps=1e-5, affine=True)
        steps: list[nn.Module] = [self.conv, self.norm]
        if active:
            steps.append(nn.LeakyReLU())
        self.all_modules = nn.Sequential(*steps)

    def forward(self, x: Tensor) -> Tensor:
        return self.all_modules(x)  # type: ignore[no-any-return]


def stack(i: int, o: int, kernel: list[int], stride: list[int], count: int) -> nn.Module:
    """Returns convolutions one after the other under the name ``convs``."""
    ones = [1, 1, 1]
    convs = [ConvNorm(i, o, kernel, stride), *(ConvNorm(o, o, kernel, ones) for _ in range(count - 1))]
    return nn.Sequential(OrderedDict(convs=nn.Sequential(*convs)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut of pooling and a 1x1x1 convolution, where these are needed."""

    def __init__(self, i: int, o: int, kernel: list[int], stride: list[int]):
        super().__init__()
        self.conv1 = ConvNorm(i, o, kernel, stride)
        self.conv2 = ConvNorm(o, o, kernel, [1, 1, 1], active=False)
        steps: list[nn.Module] = [nn.AvgPool3d(stride, stride)] if max(stride) > 1 else []
        if i != o:
            steps.append(ConvNorm(i, o, [1, 1, 1], [1, 1, 1], bias=False, active=False))
        self.skip = nn.Sequential(*steps)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.conv2(self.conv1(x)) + self.skip(x), 0.01)


class Encoder(nn.Module):
    def __init__(self, channels: int, arguments: dict[str, Any], residual: bool):
        super().__init__()
        features, kernels, strides = (arguments[key] for key in ("features_per_stage", "kernel_sizes", "strides"))
        self.stem = stack(channels, features[0], kernels[0], [1, 1, 1], 1) if residual else nn.Identity()
        i = features[0] if residual else channels
        stages: list[nn.Module] = []
        for s, o in enumerate(features):
            if residual:
                ones = [1, 1, 1]
                blocks = [Residual(i, o, kernels[s], strides[s])]
                blocks += [Residual(o, o, kernels[s], ones) for _ in range(arguments["n_blocks_per_stage"][s] - 1)]
                stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks))))
            else:
                stages.append(nn.Sequential(stack(i, o, kernels[s], strides[s], arguments["n_conv_per_stage"][s])))
            i = o
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, skips = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            skips.append(x)
        return skips


class Decoder(nn.Module):
    def __init__(self, encoder: Encoder, arguments: dict[str, Any], outputs: int):
        super().__init__()
        self.encoder = encoder
        features, kernels, strides = (arguments[key] for key in ("features_per_stage", "kernel_sizes", "strides"))
        stages, ups, heads = list[nn.Module](), list[nn.Module](), list[nn.Module]()
        for s in range(1, len(features)):
            o = features[-s - 1]
            ups.append(nn.ConvTranspose3d(features[-s], o, strides[-s], strides[-s]))
            count = arguments["n_conv_per_stage_decoder"][s - 1]
            stages.append(stack(2 * o, o, kernels[-s - 1], [1, 1, 1], count))
            heads.append(nn.Conv3d(o, outputs, 1))
        self.stages, self.transpconvs = nn.ModuleList(stages), nn.ModuleList(ups)
        self.seg_layers = nn.ModuleList(heads)

    def forward(self, skips: list[Tensor]) -> list[Tensor]:
        x, logits = skips[-1], []
        for up, stage, head, skip in zip(self.transpconvs, self.stages, self.seg_layers, skips[-2::-1]):
            x = stage(torch.cat([up(x), skip], 1))
            logits.append(head(x))
        return logits[::-1]


class Reference(nn.Module):
    """Either network; returns the logits of all levels, the finest first."""

    def __init__(self, channels: int, outputs: int, arguments: dict[str, Any]):
        super().__init__()
        self.encoder = Encoder(channels, arguments, "n_blocks_per_stage" in arguments)
        self.decoder = Decoder(self.encoder, arguments, outputs)

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


SIZES: dict[str, Any] = {
    "n_stages": 4,
    "features_per_stage": [4, 6, 6, 6],
    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2], [1, 2, 2]],
    "n_conv_per_stage_decoder": [2, 1, 2],
}
LAYERS = {
    "conv_op": "torch.nn.modules.conv.Conv3d",
    "conv_bias": True,
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "dropout_op": None,
    "dropout_op_kwargs": None,
    "nonlin": "torch.nn.LeakyReLU",
    "nonlin_kwargs": {"inplace": True},
}
KINDS = {
    "PlainConvUNet": {**SIZES, **LAYERS, "n_conv_per_stage": [2, 1, 2, 1]},
    "ResidualEncoderUNet": {**SIZES, **LAYERS, "n_blocks_per_stage": [1, 2, 1, 2]},
}
CHANNELS, PATCH = 2, (4, 8, 16)
DATASET = {
    "channel_names": {"0": "CT", "1": "T1"},
    "labels": {"background": 0, "edge": 1, "core": 2},
    "file_ending": ".nii.gz",
}


def reference(kind: str, seed: int = 0) -> Reference:
    """Returns a small network in float64 whose weights are far from any start's."""
    torch.manual_seed(seed)
    net = Reference(CHANNELS, len(DATASET["labels"]), KINDS[kind]).double()
    with torch.no_grad():
        for p in net.parameters():
            p += 0.2 * torch.randn_like(p)
    return net


def configuration(kind: str) -> dict[str, Any]:
    """Returns a 3d configuration as newer plans have it."""
    resampling = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None}
    return {
        "patch_size": list(PATCH), "spacing": [2.0, 1.0, 1.0], "batch_size": 2, "batch_dice": False,
        "normalization_schemes": ["CTNormalization", "ZScoreNormalization"], "use_mask_for_norm": [False, True],
        "resampling_fn_data": "resample_data_or_seg_to_shape", "resampling_fn_data_kwargs": resampling,
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": {**resampling, "order": 1},
        "architecture": {
            "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
            "arch_kwargs": KINDS[kind], "_kw_requires_import": ["conv_op", "norm_op"],
        },
    }  # fmt: skip


def old_configuration(kind: str) -> dict[str, Any]:
    """Returns the same as plans had it before they had an architecture: the network's sizes are keys."""
    sizes, own = KINDS[kind], configuration(kind)
    del own["architecture"]
    count = sizes.get("n_conv_per_stage") or sizes.get("n_blocks_per_stage")
    return {
        **own, "UNet_class_name": kind, "UNet_base_num_features": 4, "unet_max_num_features": 6,
        "conv_kernel_sizes": sizes["kernel_sizes"], "pool_op_kernel_sizes": sizes["strides"],
        "n_conv_per_stage_encoder": count, "n_conv_per_stage_decoder": sizes["n_conv_per_stage_decoder"],
    }  # fmt: skip


def plans_of(own: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns plans with ``own`` as its 3d_fullres, inherited by 3d_lowres."""
    intensity = {"mean": 120.0, "std": 45.0, "percentile_00_5": 15.0, "percentile_99_5": 400.0}
    return {
        "dataset_name": "Dataset001_Small", "plans_name": "nnUNetPlans", "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2],
        "configurations": {"3d_fullres": own, "3d_lowres": {"inherits_from": "3d_fullres", "batch_size": 3}},
        "foreground_intensity_properties_per_channel": {"0": intensity, "1": intensity},
        **more,
    }  # fmt: skip


def write_results(
    folder: Path, nets: list[Reference], plans: dict[str, Any], name: str = "3d_fullres",
    dataset: dict[str, Any] = DATASET, **changed: Any,
) -> Path:  # fmt: skip
    """Writes a results folder with a fold for each network; ``changed``: other entries of the checkpoints."""
    folder.mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(plans))
    (folder / "dataset.json").write_text(json.dumps(dataset))
    for number, net in enumerate(nets):
        (folder / f"fold_{number}").mkdir()
        checkpoint = {
            "network_weights": net.state_dict(), "optimizer_state": {}, "grad_scaler_state": None,
            "logging": {"ema_fg_dice": [np.float64(0.5), np.float32(0.25)]}, "_best_ema": np.float64(0.5),
            "current_epoch": 2, "trainer_name": "nnUNetTrainer", "inference_allowed_mirroring_axes": (0, 2),
            "init_args": {"plans": plans, "configuration": name, "fold": number, "dataset_json": dataset},
            **changed,
        }  # fmt: skip
        torch.save(checkpoint, folder / f"fold_{number}" / "checkpoint_final.pth")
    return folder
