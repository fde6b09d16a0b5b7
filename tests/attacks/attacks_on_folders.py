"""Attacks on what a disk holds: folders that are not ours to write, full disks, runs that cannot be read."""

from tests.attacks.attack import Attack
from tests.support.folders import nnunet
from tests.support.predictions import make_run

ATTACKS = [
    Attack(
        "predict over true label maps",
        types="predict run -i D -o D/labelsTr",
        make=lambda here: (nnunet(here / "D"), make_run(here / "run")),
        code=3,
        says="D/labelsTr",
        keeps="D",
    ),
]
