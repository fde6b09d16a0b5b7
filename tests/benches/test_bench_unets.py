"""The benches of U-Nets and of labels: peers are the same function, and rows say what they measured."""

import pytest
import torch

from seqpar.decoders.unets import UNet
from seqpar.decoders.unets.nnunet import planned, topology
from seqpar.launch.benches import halo_share, labels, unets
from seqpar.launch.benches.series import Progress, run_series
from seqpar.launch.benches.unet_peers import PEERS, copy_weights, peers_here

ARCHITECTURE = planned(1, 3, *topology((32, 32, 32)), features=4)


@pytest.mark.parametrize("name", [name for name in list(PEERS)[:2] if name in peers_here()])
def test_a_peer_of_the_same_layers_is_the_same_function(name: str) -> None:
    torch.manual_seed(0)
    theirs, ours = PEERS[name][1](ARCHITECTURE).double(), UNet(ARCHITECTURE).double()
    image = torch.randn(1, 1, 32, 32, 32, dtype=torch.float64)
    assert unets.logits_apart(ours, theirs, image) > 1e-3
    copy_weights(theirs, ours)
    assert unets.logits_apart(ours, theirs, image) < 1e-12


@pytest.mark.parametrize("name", peers_here())
def test_each_peer_takes_an_image_of_the_tile(name: str) -> None:
    assert PEERS[name][1](ARCHITECTURE)(torch.randn(1, 1, 32, 32, 32)).shape == (1, 3, 32, 32, 32)


def rows_of(series) -> list[dict]:
    rows: list[dict] = []
    assert run_series(series, 1, rows.append, Progress())
    return rows


def test_rows_of_unets_have_ratios_to_the_first_peer() -> None:
    rows = rows_of(unets.of_tile(16, 1, features=2, peers=["torch's own modules"]))
    assert [row["net"] for row in rows] == ["torch's own modules", *unets.OURS]
    assert rows[0]["ratio"] == 1 and rows[-2]["logits apart"] < 1e-4
    assert rows[-1]["saved MB a rank"] < rows[-2]["saved MB a rank"] and rows[-1]["ranks x threads"] == "2 x 1"


def test_rows_of_halos_are_measured_and_planned() -> None:
    measured, planned = rows_of(halo_share.of_cases(halo_share.QUICK, 1))
    assert measured["how"] == "measured, 2 CPU cores" and planned["ranks"] == 128
    for row in (measured, planned):
        assert 0 < float(row["halos"].rstrip("%")) < 100 and row["MB of halos a rank"] > 0 and row["s a step"] > 0


def test_rows_of_labels_compare_bytes_with_all_that_is_held() -> None:
    held, slabs = rows_of(labels.of_shapes((32, 32, 32), (40, 40, 40), 20, (2,), 1))
    assert (held["labels"], slabs["labels"]) == labels.WAYS
    assert held["alive MB"] > 20 * 32**3 * 4 / 1e6 and slabs["to all held"] < 0.6
