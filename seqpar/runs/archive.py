"""A run as one file to hand on: a zip with weights, settings and preparation, which is read as a run folder is.

config.json                   of the run, without paths, commands and names of cases
model.safetensors             the weights
about.json                    licence, checkpoint, version, digest of the weights, a caution if there is one
"""

import json
import lzma
import re
import shlex
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import save

import seqpar
from seqpar.data.errors import DataError, unreadable, unwritable
from seqpar.data.files import refuse_existing, whole_file
from seqpar.settings.rules import FILES
from seqpar.weights.facts import ANCESTORS, IS_UNKNOWN
from seqpar.weights.weight_files import ABOUT, ARCHIVED, digest_of_bytes, read_weights

CONFIG = "config.json"
CAUTION = "caution"  # of about.json
MOST_JSON = 16 * 2**20  # bytes of a JSON file, unpacked: a few packed ones may become any number
_PRIVATE = ("out", *FILES)  # settings that name places on this machine
_SHARED = ("preset", "versions", "commit")
_DATASET = (
    "name", "layout", "modalities", "labels", "regions", "regions_class_order", "ignore_label", "values", "recipe",
)  # fmt: skip


def is_archive(path: str | Path) -> bool:
    """Returns whether a path is a file, as an exported run is."""
    return Path(path).is_file()


def write_archive(
    out: Path,
    content: Mapping[str, Any],
    weights: Path,
    licence: str,
    windows: Mapping[str, Any] = MappingProxyType({}),
    caution: str = "",
    *,
    use: Sequence[str],
) -> dict[str, Any]:
    """Writes the archive, whole or not at all, and returns what about.json says; the same run gives the same bytes.

    - ``content``: the run's config.json
    - ``weights``: a file of weights
    - ``licence``: of the weights
    - ``windows``: what the run's validation measured, as in its window.json
    - ``caution``: why not to trust the run, if there is a reason
    - ``use``: the program that takes the archive, and its arguments
    """
    refuse_existing(out)
    act, *arguments = use
    body = _packed(weights)
    is_own = weights.name == ARCHIVED  # another file's name, as a run folder's, may tell what is nobody's business
    step = f"{weights.parent.name}/" if re.fullmatch(r"step-\d+", weights.parent.name) else ""
    about: dict[str, Any] = {
        "format": "seqpar run", "licence": licence, "checkpoint": f"{step}{ARCHIVED}" if is_own else "another file",
        "seqpar": seqpar.__version__, "digest": digest_of_bytes(body),
        "use": f"seqpar-{act} {shlex.join(arguments)}",
    }  # fmt: skip
    about |= {**windows, **({CAUTION: caution} if caution else {})}
    try:
        with (
            whole_file(out, replaces=False) as temporary,
            zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
        ):
            for name, part in ((ABOUT, _text(about)), (CONFIG, _text(_shared(content))), (ARCHIVED, body)):
                entry = zipfile.ZipInfo(name)  # no date: the same content is the same file
                entry.create_system, entry.external_attr = 3, 0o644 << 16  # unzipped, all may read it
                archive.writestr(entry, part)
    except OSError as error:
        raise unwritable(out, error) from error
    return about


def digest_of(weights: Path) -> str:
    """Returns what tells weights from others, in a file or an archive: exported ones have the digest that they had."""
    return digest_of_bytes(_packed(weights))


def _packed(weights: Path) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in read_weights(weights).items()})


def read_archived(path: str | Path, name: str) -> dict[str, Any]:
    """Returns a JSON file of an archive; raises DataError for what is none."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            text = file.read(MOST_JSON + 1)
        if len(text) > MOST_JSON:
            raise ValueError(f"{name} has more than {MOST_JSON >> 20} MiB")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"{name} holds a {type(content).__name__}, not an object")
        return content
    except KeyError:
        raise DataError(path, f"holds no {name}, so it is no exported run; make one with seqpar-export") from None
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, ValueError, EOFError) as error:
        raise DataError(
            path, f"is no exported run, or damaged ({str(error) or type(error).__name__}); copy it again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def read_caution(path: str | Path) -> str:
    """Returns why not to trust the run that an archive holds, "" if it does not say."""
    return str(read_archived(path, ABOUT).get(CAUTION, ""))


def _shared(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of config.json that another machine needs and may see."""
    config = {name: "" if name in _PRIVATE else value for name, value in content["config"].items()}
    dataset = {name: content["dataset"][name] for name in _DATASET if name in content["dataset"]}
    began = [content["dataset"].get(name) for name in (ANCESTORS, IS_UNKNOWN)]
    dataset |= {IS_UNKNOWN: True} if any(began) else {}  # a pretraining would seem to have learned from no case
    if classes := content["dataset"].get("volume_classes"):
        dataset["volume_classes"] = {"names": classes["names"]}  # and no names of cases
    return {"config": config, "dataset": dataset, **{name: content[name] for name in _SHARED if name in content}}


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
