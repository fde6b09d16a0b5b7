"""A backward in another thread, as that of GPUs is, gives the same gradients: nothing rests on its thread."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from seqpar.cluster.acceptance.networks import SmallNetwork, small_networks
from seqpar.parallel.mesh import Mesh
from seqpar.settings.config import Config
from seqpar.vit.dropout import DropoutKey
from tests.support.ranks import run_ranks

SMALL = Config(tile=(16, 16, 16), patch=(4, 4, 4), embed_dim=24, depth=2, heads=2, decoder_width=4, positions="rope")
VIT = replace(SMALL, dropout=0.1, drop_path=0.2, mlp_chunks=2, seqpar=2)
CASES: dict[str, tuple[Config, torch.dtype | None]] = {  # and the type of autocast
    "blocks again, halos": (replace(VIT, decoder="unetr", mode="halo", grad_checkpoint="full"), None),
    "attention again, heads exchanged": (
        replace(VIT, decoder="plain", mode="swap", attention="ulysses", grad_checkpoint="attention"),
        torch.bfloat16,
    ),
    "a U-Net's cells again": (
        replace(small_networks()["nnunet-plain"], mode="halo", grad_checkpoint="full", seqpar=2),
        None,
    ),
}


def gradients(case: str, mesh: Mesh, elsewhere: bool) -> dict[str, Tensor]:
    config, half = CASES[case]
    network = SmallNetwork(config, mesh.seq, torch.device("cpu"), torch.float32)
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        logits = network.net(network.part, None, DropoutKey(0, 0, (0, 1)))
    loss = network.loss(logits, network.target, network.loss_groups)
    if elsewhere:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(loss.backward).result()
    else:
        loss.backward()
    return {name: p.grad for name, p in network.net.named_parameters() if p.grad is not None}


def both(mesh: Mesh) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return {case: (gradients(case, mesh, False), gradients(case, mesh, True)) for case in CASES}


def test_a_backward_in_another_thread_gives_the_same_bits() -> None:
    for of_rank in run_ranks(2, both):
        for case, (here, elsewhere) in of_rank.items():
            assert len(here) > 20 and here.keys() == elsewhere.keys(), case
            assert all(torch.equal(here[name], elsewhere[name]) for name in here), case
