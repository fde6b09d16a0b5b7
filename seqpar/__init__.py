"""Sequence-parallel Vision Transformers for 3D images that are too large for one GPU."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Handed on lazily, so that `import seqpar` costs nothing and pulls in no room that is not used.
_NAMES = {
    "AttentionOptions": "seqpar.attention.strategies",
    "BoxGrid": "seqpar.spatial.box_grid",
    "DiceCE": "seqpar.losses",
    "DropoutKey": "seqpar.vit.dropout",
    "Layout": "seqpar.layout",
    "LossGroups": "seqpar.losses",
    "PlainDecoder": "seqpar.decoders.plain",
    "Predictor": "seqpar.launch.inference.predictor",
    "PrimusDecoder": "seqpar.decoders.primus",
    "SegmentationNet": "seqpar.launch.models.segmentation",
    "SeqParViT": "seqpar.vit.encoder",
    "UnetrDecoder": "seqpar.decoders.unetr",
    "as_group": "seqpar.mesh",
    "choose_mode": "seqpar.decoders.modes.choose",
    "export_monai": "seqpar.launch.weights.monai",
    "export_nnunet": "seqpar.launch.weights.nnunet",
    "export_primus": "seqpar.launch.weights.primus",
    "load_monai": "seqpar.launch.weights.monai",
    "load_nnunet": "seqpar.launch.weights.nnunet",
    "load_primus": "seqpar.launch.weights.primus",
    "load_run": "seqpar.launch.runs.trained_run",
    "read_weights": "seqpar.launch.weights.files",
    "start": "seqpar.rendezvous",
    "write_weights": "seqpar.launch.weights.files",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'seqpar' has no attribute '{name}'; it has {', '.join(_NAMES)}")


def __dir__() -> list[str]:
    return sorted([*_NAMES, "__version__"])
