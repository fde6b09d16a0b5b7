"""Attacks on what a disk holds: folders that are not ours to write, full disks, runs that cannot be read."""

from pathlib import Path

from tests.attacks.attack import Attack
from tests.support.folders import image_array, nnunet, save, write_json
from tests.support.predictions import make_run


def _data_and_run(here: Path, *files: str) -> None:
    """Makes a data set, a run, another image, and files that only look as if predict had been there."""
    nnunet(here / "D")
    make_run(here / "run")
    save(here / "images" / "new_0000.nii.gz", image_array(0))
    for name in files:
        write_json(here / name, {"run": "run", "weights": {}})


ATTACKS = [
    Attack(
        "predict over true label maps",
        types="predict run -i D -o D/labelsTr",
        make=_data_and_run,
        code=3,
        says="D/labelsTr: belongs to a data set",
        keeps="D",
    ),
    Attack(
        "predict over true label maps next to a prediction.json",
        types="predict run -i D -o D/labelsTr",
        make=lambda here: _data_and_run(here, "D/labelsTr/prediction.json"),
        code=3,
        says="D/labelsTr: belongs to a data set",
        keeps="D",
    ),
    Attack(
        "predict over label maps of another folder next to a prediction.json",
        types="predict run -i D -o truth",
        make=lambda here: (
            _data_and_run(here),
            (here / "D" / "labelsTr").rename(here / "truth"),
            write_json(here / "truth" / "prediction.json", {"run": "run"}),
        ),
        code=3,
        says=("truth/c_000.nii.gz: would be overwritten", "choose another --output"),
        keeps="truth D",
    ),
    Attack(
        "predict another image into imagesTr",
        types="predict run -i images -o D/imagesTr",
        make=_data_and_run,
        code=3,
        says="D/imagesTr: belongs to a data set",
        keeps="D",
    ),
    Attack(
        "predict next to the images through a link",
        types="predict run -i images -o link",
        make=lambda here: (_data_and_run(here), (here / "link").symlink_to("images")),
        code=3,
        says="link: holds new_0000.nii.gz",
        keeps="images",
    ),
]
