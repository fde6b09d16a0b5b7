"""Trains Vision Transformers and U-Nets on 3D images that are too large for one GPU: several ranks share a tile.

A MONAI network on two ranks, started by ``torchrun --nproc-per-node 2``::

    with seqpar.init_mesh(seq=2) as mesh:
        model = seqpar.ParallelModel(seqpar.convert(SegResNet(), mesh.seq), mesh)
        ...  # as on one rank; all ranks of mesh.seq load the same whole tiles, for example by the same seed
        loss = model.loss(DiceFocalLoss(to_onehot_y=True, softmax=True), image, label)
        ...
        logits = sliding_window_inference(volume, (96, 96, 96), 1, model.eval())  # or seqpar.predict

``help(seqpar.NAME)`` explains each name:

Start ranks
    - ``init_mesh``: the mesh of the ranks that torchrun, Slurm or MPI started; ``start`` has more options
    - ``as_group``: a group of ours from torch's ``ProcessGroup`` or ``DeviceMesh``
    - ``Layout``, ``BoxGrid``: which tokens, and which box, of a tile each rank has

Networks
    - ``UNETR``, ``UNet``: networks that share a tile among the ranks of ``group``
    - ``convert``: makes a convolutional network of torch's modules, such as MONAI's, compute on boxes
    - ``SegmentationNet``: a network of an encoder and a decoder
    - ``compile_blocks``: compiles the MLPs of a transformer's blocks

Parts of a network
    - ``SeqParViT``, ``ParallelAttention``, ``AttentionOptions``, ``DropoutKey``: the encoder
    - ``choose_mode``: what each rank decodes
    - ``PlainDecoder``, ``UnetrDecoder``, ``PrimusDecoder``: decoders

Train
    - ``ParallelModel``: a network and the ranks that train it, as one object
    - ``DiceCE``, ``make_loss``: losses that sum over ranks; ``LossGroups``: over which

Predict
    - ``predict``: slides windows over a volume
    - ``Predictor``, ``load_run``: predict with a finished run, or return its network

Weights
    - ``load_mednext``, ``load_monai``, ``load_nnunet``, ``load_primus``: networks with the weights of others
    - ``export_mednext``, ``export_monai``, ``export_nnunet``, ``export_primus``: weights for others to load
    - ``read_weights``, ``write_weights``: files of weights

Building blocks: ``attention``, ``decoders``, ``losses``, ``spatial``, ``vit``, each with a list in its ``help``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; a test compares it with the names below
    from seqpar import attention as attention
    from seqpar import decoders as decoders
    from seqpar import losses as losses
    from seqpar import spatial as spatial
    from seqpar import vit as vit
    from seqpar.attention.self_attention import ParallelAttention as ParallelAttention
    from seqpar.attention.strategies import AttentionOptions as AttentionOptions
    from seqpar.conversion.converted import convert as convert
    from seqpar.decoders.modes.named_modes import choose_mode as choose_mode
    from seqpar.decoders.plain import PlainDecoder as PlainDecoder
    from seqpar.decoders.primus import PrimusDecoder as PrimusDecoder
    from seqpar.decoders.unetr import UnetrDecoder as UnetrDecoder
    from seqpar.decoders.unets import UNet as UNet
    from seqpar.losses import DiceCE as DiceCE
    from seqpar.losses import LossGroups as LossGroups
    from seqpar.losses import make_loss as make_loss
    from seqpar.models.segmentation_network import UNETR as UNETR
    from seqpar.models.segmentation_network import SegmentationNet as SegmentationNet
    from seqpar.parallel.layout import Layout as Layout
    from seqpar.parallel.mesh import as_group as as_group
    from seqpar.parallel.rendezvous import init_mesh as init_mesh
    from seqpar.parallel.rendezvous import start as start
    from seqpar.prediction.predictor import Predictor as Predictor
    from seqpar.prediction.sliding_window import predict as predict
    from seqpar.runs.trained_run import load_run as load_run
    from seqpar.spatial.box_grid import BoxGrid as BoxGrid
    from seqpar.training.data_parallel import ParallelModel as ParallelModel
    from seqpar.vit.blocks import compile_blocks as compile_blocks
    from seqpar.vit.dropout import DropoutKey as DropoutKey
    from seqpar.vit.encoder import SeqParViT as SeqParViT
    from seqpar.weights.monai_weights import export_monai as export_monai
    from seqpar.weights.monai_weights import load_monai as load_monai
    from seqpar.weights.nnunet_weights import export_mednext as export_mednext
    from seqpar.weights.nnunet_weights import export_nnunet as export_nnunet
    from seqpar.weights.nnunet_weights import load_mednext as load_mednext
    from seqpar.weights.nnunet_weights import load_nnunet as load_nnunet
    from seqpar.weights.primus_weights import export_primus as export_primus
    from seqpar.weights.primus_weights import load_primus as load_primus
    from seqpar.weights.weight_files import read_weights as read_weights
    from seqpar.weights.weight_files import write_weights as write_weights

__version__ = "0.1.0"
# Imported when first used, so that `import seqpar` is fast and loads nothing that is not needed.
_FOLDERS = ("attention", "decoders", "losses", "spatial", "vit")
_NAMES = {
    "AttentionOptions": "seqpar.attention.strategies",
    "BoxGrid": "seqpar.spatial.box_grid",
    "DiceCE": "seqpar.losses",
    "DropoutKey": "seqpar.vit.dropout",
    "Layout": "seqpar.parallel.layout",
    "LossGroups": "seqpar.losses",
    "ParallelAttention": "seqpar.attention.self_attention",
    "ParallelModel": "seqpar.training.data_parallel",
    "PlainDecoder": "seqpar.decoders.plain",
    "Predictor": "seqpar.prediction.predictor",
    "PrimusDecoder": "seqpar.decoders.primus",
    "SegmentationNet": "seqpar.models.segmentation_network",
    "SeqParViT": "seqpar.vit.encoder",
    "UNETR": "seqpar.models.segmentation_network",
    "UNet": "seqpar.decoders.unets",
    "UnetrDecoder": "seqpar.decoders.unetr",
    "as_group": "seqpar.parallel.mesh",
    "choose_mode": "seqpar.decoders.modes.named_modes",
    "compile_blocks": "seqpar.vit.blocks",
    "convert": "seqpar.conversion.converted",
    "export_mednext": "seqpar.weights.nnunet_weights",
    "export_monai": "seqpar.weights.monai_weights",
    "export_nnunet": "seqpar.weights.nnunet_weights",
    "export_primus": "seqpar.weights.primus_weights",
    "init_mesh": "seqpar.parallel.rendezvous",
    "load_mednext": "seqpar.weights.nnunet_weights",
    "load_monai": "seqpar.weights.monai_weights",
    "load_nnunet": "seqpar.weights.nnunet_weights",
    "load_primus": "seqpar.weights.primus_weights",
    "load_run": "seqpar.runs.trained_run",
    "make_loss": "seqpar.losses",
    "predict": "seqpar.prediction.sliding_window",
    "read_weights": "seqpar.weights.weight_files",
    "start": "seqpar.parallel.rendezvous",
    "write_weights": "seqpar.weights.weight_files",
}
__all__ = [*_NAMES, *_FOLDERS]  # type: ignore[misc]  # noqa: PLE0604  checkers read the imports above


if not TYPE_CHECKING:  # or checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"seqpar.{name}")
        if name in _NAMES:
            return getattr(importlib.import_module(_NAMES[name]), name)
        raise AttributeError(f"module 'seqpar' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
