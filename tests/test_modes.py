"""The paper's decoder in every mode, split and number of ranks equals one process: logits, loss, every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import relative
from torch import Tensor, nn

from seqpar.collectives import all_gather, all_reduce
from seqpar.decoders.modes import MODES, Auto, Mode, choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.encoder import SeqParViT
from seqpar.launch.model import SegmentationNet
from seqpar.layout import Layout
from seqpar.losses import DiceCE
from seqpar.mesh import Group, Mesh

WORLDS = [1, 2, 3, 4, 8]
EXACT = ["gather", "halo", "swap"]
PATCH = 4
