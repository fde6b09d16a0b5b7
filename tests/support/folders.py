"""Small data sets in the formats that people have, written for the tests."""

import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

OBLIQUE = np.array([[-1.1 * np.cos(0.2), np.sin(0.2), 0, 20], [1.1 * np.sin(0.2), np.cos(0.2), 0, -30],
                    [0, 0, 1.3, 5], [0, 0, 0, 1]])  # fmt: skip


def image_array(seed: int, shape: tuple[int, ...] = (14, 12, 10)) -> np.ndarray:
    """Returns a noisy block of about 300 in a margin of zeros."""
    image = np.random.default_rng(seed).normal(300, 30, shape)
    margin = np.pad(np.ones([n - 4 for n in shape[:3]]), 2)
    return (image * margin[(...,) + (None,) * (len(shape) - 3)]).round().astype(np.int16)


def label_array(values: tuple[int, ...] = (1,), shape: tuple[int, int, int] = (14, 12, 10)) -> np.ndarray:
    """Returns a label with a block for each value, one beside the other."""
    label = np.zeros(shape, np.uint8)
    for n, value in enumerate(values):
        label[3 + 2 * n : 5 + 2 * n, 4:8, 3:7] = value
    return label


def save(path: Path, array: np.ndarray, affine: np.ndarray = OBLIQUE) -> Path:
    """Writes a NIfTI file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, affine, dtype=array.dtype), path)
    return path


def write_json(path: Path, content: Any) -> Path:
    """Writes a JSON file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def nnunet(root: Path, cases: int = 3, channels: tuple[str, ...] = ("T1",), **more: Any) -> Path:
    """Writes an nnU-Net raw folder with cases c_000, c_001, …; `more` replaces keys of dataset.json."""
    content = {
        "channel_names": {str(n): name for n, name in enumerate(channels)},
        "labels": {"background": 0, "tumour": 1},
        "numTraining": cases,
        "file_ending": ".nii.gz",
        **more,
    }
    for n in range(cases):
        for channel in range(len(channels)):
            save(root / "imagesTr" / f"c_{n:03d}_{channel:04d}.nii.gz", image_array(10 * n + channel))
        save(root / "labelsTr" / f"c_{n:03d}.nii.gz", label_array())
    write_json(root / "dataset.json", content)
    return root


def decathlon(root: Path, cases: int = 2) -> Path:
    """Writes an MSD folder of the brain tumour task, four modalities in one file."""
    entries = []
    for n in range(cases):
        save(root / "imagesTr" / f"BRATS_{n:03d}.nii.gz", image_array(n, (14, 12, 10, 4)))
        save(root / "labelsTr" / f"BRATS_{n:03d}.nii.gz", label_array((1, 2, 3)))
        entries.append({"image": f"./imagesTr/BRATS_{n:03d}.nii.gz", "label": f"./labelsTr/BRATS_{n:03d}.nii.gz"})
    labels = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}
    modality = {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
    content = {"name": "BRATS", "modality": modality, "labels": labels, "training": entries, "test": []}
    write_json(root / "dataset.json", content)
    return root


def brats(root: Path, names: list[str], kinds: tuple[str, ...], separator: str, values: tuple[int, ...],
          suffix: str = ".nii.gz", flat: bool = False) -> Path:  # fmt: skip
    """Writes BraTS cases: NAME/NAME{separator}{kind}{suffix}, the last kind being the label."""
    for n, name in enumerate(names):
        folder = root if flat else root / name
        for m, kind in enumerate(kinds):
            array = label_array(values) if kind == "seg" else image_array(10 * n + m)
            save(folder / f"{Path(name).name}{separator}{kind}{suffix}", array)
    return root


OLD = ("flair", "t1", "t1ce", "t2", "seg")
NEW = ("t1c", "t1n", "t2f", "t2w", "seg")


def several_readers(root: Path, readers: tuple[str, ...] = ("ann", "ben", "cy"), cases: int = 3, **more: Any) -> Path:
    """Writes an nnU-Net raw folder with a folder of labels per reader, who differ on some voxels."""
    nnunet(root, cases, labels={"background": 0, "organ": 1, "tumour": 2}, readers=list(readers), **more)
    shutil.rmtree(root / "labelsTr")
    for n in range(cases):
        for number, reader in enumerate(readers):
            label = label_array((1, 2))
            label[3:5, 4 + number, 3:7] = 0
            label[9, 4:8, 3 : 4 + number] = 2
            save(root / f"labelsTr_{reader}" / f"c_{n:03d}.nii.gz", label)
    return root


def tree(root: Path) -> dict[str, bytes]:
    """Returns every file in a folder, hidden ones too."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def child(work: Callable[[], object]) -> int:
    """Returns the id of a forked process, leader of its own group, that does the work; it exits 1 where that raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):  # whichever of both comes first
        os.setpgid(pid, pid)
    return pid


def exit_code(pid: int) -> int:
    """Returns a child's exit code, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
