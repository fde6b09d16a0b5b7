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
    "Layout": "seqpar.parallel.layout",
    "LossGroups": "seqpar.losses",
    "PlainDecoder": "seqpar.decoders.plain",
    "Predictor": "seqpar.prediction.predictor",
    "PrimusDecoder": "seqpar.decoders.primus",
    "SegmentationNet": "seqpar.models.segmentation_network",
    "SeqParViT": "seqpar.vit.encoder",
    "UnetrDecoder": "seqpar.decoders.unetr",
    "as_group": "seqpar.parallel.mesh",
    "choose_mode": "seqpar.decoders.modes.named_modes",
    "convert": "seqpar.conversion.converted",
    "export_monai": "seqpar.weights.monai_weights",
    "export_nnunet": "seqpar.weights.nnunet_weights",
    "export_primus": "seqpar.weights.primus_weights",
    "init_mesh": "seqpar.parallel.rendezvous",
    "load_monai": "seqpar.weights.monai_weights",
    "load_nnunet": "seqpar.weights.nnunet_weights",
    "load_primus": "seqpar.weights.primus_weights",
    "load_run": "seqpar.runs.trained_run",
    "read_weights": "seqpar.weights.weight_files",
    "start": "seqpar.parallel.rendezvous",
    "write_weights": "seqpar.weights.weight_files",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'seqpar' has no attribute '{name}'; it has {', '.join(_NAMES)}")


def __dir__() -> list[str]:
    return sorted([*_NAMES, "__version__"])
