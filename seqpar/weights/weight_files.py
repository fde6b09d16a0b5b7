"""Reads and writes files of weights without running anything in them; renames and loads state dicts."""

import hashlib
import io
import json
import logging
import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn

from seqpar.data.addresses import local_file
from seqpar.data.errors import DataError
from seqpar.data.files import whole_file
from seqpar.vit.tokens import resize_positions
from seqpar.weights.facts import ORIGIN, WEIGHTS, as_metadata, origin_of

_SCALARS = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")  # of numpy 2; of numpy 1


class _NumberType:
    """Stands for a number type of numpy's."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _no_scalar(*arguments: Any) -> None:
    """Stands for the function that makes a scalar of numpy's."""


def load_torch(path: str | Path, mapped: bool = False) -> Any:
    """Returns what ``torch.save`` wrote: tensors, containers, numbers and text; anything else is refused.

    - ``mapped``: tensors are read from the file when they are used, where it is an archive, as all newer ones are
    """
    stubs = [(_NumberType, "numpy.dtype"), *((_no_scalar, name) for name in _SCALARS)]
    with torch.serialization.safe_globals(stubs):  # type: ignore[arg-type]
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))


log = logging.getLogger(__name__)
State = dict[str, Tensor]
ARCHIVED, ABOUT = "model.safetensors", "about.json"  # the weights in an exported run, and what it says of them
MOST_ABOUT = 1 << 20  # bytes of the latter that are read
MOST_HEADER = 100_000_000  # bytes of the header of safetensors, as it limits itself
WIDEST = 8  # bytes of a number
_OF_TORCH = b"PK", b"\x80"  # its files begin so: archives, and older ones
NESTS = ("state_dict", "model_state_dict", "network_weights", "model", "net")
_COMPILED = r"_orig_mod|_fsdp_wrapped_module"
_WRAPPERS = re.compile(rf"^((module|backbone|model|net|network|{_COMPILED})\.)+|\b({_COMPILED})\.")


def read_weights(path: str | Path) -> State:
    """Returns the state dict in a safetensors or torch file, or an exported run; never runs code in the file.

    - ``path``: also an address, ``https://HOST/FILE#sha256=DIGITS`` or ``hf://OWNER/NAME/FILE``
    """
    path = local_file(path)
    state = unwrap(_read(path), path)
    refuse_unusable(state, path)
    return state


def checkpoint_of(source: Mapping[str, Any] | str | Path, mapped: bool = False) -> Mapping[str, Any]:
    """Returns a checkpoint, given itself or as the path or address of its file; for ``mapped`` see ``load_torch``."""
    if isinstance(source, (str, Path)):
        return _read(local_file(source), mapped)
    if not isinstance(source, Mapping):
        kind = type(source).__name__
        hint = "its state_dict()" if isinstance(source, nn.Module) else "one of these"
        raise ValueError(
            f"weights are a state dict or the path of a file, and what came is of type {kind}: give {hint}"
        )
    return source


def recorded_heads(checkpoint: Mapping[str, Any]) -> int | None:
    """Returns the number of attention heads among a checkpoint's hyperparameters, None where they do not tell."""
    hyper_parameters = checkpoint.get("hyper_parameters")  # where Lightning keeps them
    heads = hyper_parameters.get("num_heads") if isinstance(hyper_parameters, Mapping) else None
    return heads if isinstance(heads, int) else None


def refuse_unreadable(path: Path) -> None:
    """Raises DataError for what is no file of weights, or a damaged one, as far as its header tells."""
    try:
        if _is_safetensors(path) and not shapes_in(path):
            raise DataError(path, "holds no tensors; give another file of weights")
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _is_safetensors(path: Path) -> bool:
    """Returns whether a file of weights is one of safetensors, and not of torch; raises DataError for any other."""
    if not path.is_file():
        raise DataError(path, "no such file; give a safetensors or torch file of weights")
    with path.open("rb") as file:
        head = file.read(9)
    if not head:
        raise DataError(path, "is empty (0 bytes); copy it again")
    if not (head[8:] == b"{" or head.startswith(_OF_TORCH)):
        raise DataError(path, "it is no file of weights; give a safetensors or torch file of weights")
    return head[8:] == b"{" and not head.startswith(b"PK")


def is_exported(path: Path) -> bool:
    """Returns whether a file is an exported run: an archive with weights, whatever its name."""
    try:
        with zipfile.ZipFile(path) as archive:
            return ARCHIVED in archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def is_of_torch(path: Path) -> bool:
    """Returns whether a file begins as those of ``torch.save`` do, whatever its name, and is no exported run."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2).startswith(_OF_TORCH) and not is_exported(path)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(path, f"it cannot be read as weights ({_first_line(error)}); it may be cut off")


def _read(path: Path, mapped: bool = False) -> Mapping[str, Any]:
    """Returns what a file of weights holds."""
    is_safetensors = _is_safetensors(path)
    try:
        if is_safetensors:
            _refuse_changed(path)
            return load_file(path)
        if zipfile.is_zipfile(path):  # torch's own files are archives too
            with zipfile.ZipFile(path) as archive:
                if ARCHIVED in archive.namelist():
                    return _read_archived(archive, path)
        content = load_torch(path, mapped)
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch's own advice is to run what the file holds
        others = named[1] if named else "objects of other kinds"
        raise DataError(
            path, f"it holds more than tensors ({others}); save only its state_dict, and read that file"
        ) from None
    except MemoryError as error:
        raise MemoryError(f"{path}: its tensors need more memory than there is: free some") from error
    except Exception as error:  # a damaged file is read as far as it makes sense
        raise _damaged(path, error) from error
    if not isinstance(content, Mapping):
        raise DataError(path, f"it holds a {type(content).__name__}; a state dict is needed")
    return content


def _refuse_changed(path: Path) -> None:
    """Raises DataError for a run's weights that are not those whose digest it recorded next to them."""
    for name, entry in (("status.json", "weights"), ("manifest.json", WEIGHTS)) if path.name == WEIGHTS else ():
        recorded = None
        with suppress(OSError, ValueError, LookupError, TypeError):
            recorded = json.loads(path.with_name(name).read_text())[entry]
        if recorded and digest(path) != recorded:
            raise DataError(
                path,
                f"is damaged, or the file of another run: {name} next to it has another digest; copy both again from "
                "the run that wrote them",
            )
    wrote = own = ""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        own = origin_of(json.loads(path.with_name("config.json").read_text()))
        wrote = json.loads(path.with_name("status.json").read_text())[ORIGIN]
    if path.name == WEIGHTS and own and wrote and wrote != own:
        whose = "is of another run than config.json next to it, and so are the weights"
        raise DataError(path.with_name("status.json"), f"{whose}: copy this run's own files back")


def _read_archived(archive: zipfile.ZipFile, path: Path) -> State:
    """Returns the weights in an archive; reads no more of them than their header announces, and raises DataError for
    others than were exported. Packed otherwise, they are the same.

    A few packed bytes may unpack to any number.
    """
    with archive.open(ARCHIVED) as file:
        head, _, size = _header(file)
        body = file.read(size + 1)
    if len(body) != size:
        raise ValueError(f"{ARCHIVED} has {'more' if len(body) > size else 'fewer'} bytes than its header announces")
    whole, exported = head + body, None
    with suppress(LookupError, ValueError, TypeError, AttributeError), archive.open(ABOUT) as file:
        exported = json.loads(file.read(MOST_ABOUT)).get("digest")
    if exported and digest_of_bytes(whole) != exported:
        told = f"its {ARCHIVED} is not the file that {ABOUT} says was exported"
        raise DataError(path, f"{told}: copy the archive again, or export it again")
    return load(whole)


def archived_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of an archive from their header alone; raises DataError for a damaged one."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(ARCHIVED) as file:
            return _header(file)[1]
    except Exception as error:  # as above
        raise DataError(path, f"its {ARCHIVED} cannot be read ({_first_line(error)}); copy it again") from error


def _header(file: IO[bytes]) -> tuple[bytes, dict[str, tuple[int, ...]], int]:
    """Reads the header of safetensors; returns it, the shape of each tensor, and the bytes of all tensors."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > MOST_HEADER:
        raise ValueError(f"{ARCHIVED} announces a header of {size} bytes")
    text = file.read(size)
    tensors = {name: tensor for name, tensor in json.loads(text).items() if name != "__metadata__"}
    shapes = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        low, high = tensor["data_offsets"]
        if high - low > WIDEST * math.prod(shapes[name]):
            raise ValueError(f"{name} of shape {shapes[name]} announces {high - low} bytes")
    return length + text, shapes, max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def write_weights(path: str | Path, net: nn.Module | State, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Writes weights as safetensors, or raises ``OSError`` and leaves an older file as it was.

    - ``net``: a network or a state dict
    - ``settings``: those that the network was built with, which a network of a run knows; the file keeps those that
      shapes do not show
    """
    path = Path(path)
    state = net.state_dict() if isinstance(net, nn.Module) else net
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    with whole_file(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=as_metadata(settings or getattr(net, "settings", {})))
        except SafetensorError as error:  # of a full disk, too
            raise OSError(str(error)) from error


def write_pth(path: Path, content: Mapping[str, Any]) -> None:
    """Writes what ``torch.load`` reads; raises OSError, which ``torch.save`` does not on a full disk."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    path.write_bytes(buffer.getbuffer())


def refuse_unusable(state: State, path: str | Path) -> None:
    """Raises DataError for tensors that are no weights: whole numbers, unless they are counters, NaN and infinity."""
    for name, tensor in state.items():
        if not tensor.is_floating_point() and tensor.ndim:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DataError(path, f"its tensor {name} is of type {kind}; weights are floating-point numbers")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DataError(path, f"its tensor {name} has NaN or infinite values; take another checkpoint")


def unwrap(state: Mapping[str, Any], path: str | Path = "the checkpoint") -> State:
    """Returns the tensors of a checkpoint, taken out of its nested dict and without the prefixes of wrappers.

    - ``path``: of its file, for messages
    """
    nest = next((name for name in NESTS if isinstance(state.get(name), Mapping)), None)
    if nest is not None:
        return unwrap(state[nest], path)
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others or not state:
        held = f"{shorten_list(others)} besides tensors" if others else "no tensors"
        raise DataError(path, f"holds {held}; give a state dict, or a checkpoint with one under {', '.join(NESTS)}")
    bare: State = {}
    for name, tensor in state.items():
        short = _WRAPPERS.sub("", name)
        if short in bare:
            raise ValueError(
                f"without prefixes, {name} and another key are both {short}: give the weights of one network"
            )
        bare[short] = tensor
    return bare


def shorten_list(names: Iterable[str], most: int = 12) -> str:
    """Returns at most ``most`` names in a line, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def weight_and_bias(theirs: str, ours: str) -> dict[str, str]:
    """Returns a mapping from their names of a layer's weight and bias to ours."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


def last_number(state: State, prefix: str) -> int:
    """Returns the highest number after ``prefix`` (a regular expression) in the keys, -1 if there is none."""
    matches = (re.match(rf"{prefix}(\d+)\.", name) for name in state)
    return max((int(match[1]) for match in matches if match), default=-1)


def drop_keys(state: State, dead: Iterable[str], why: str) -> State:
    """Returns the state without the keys in ``dead``, and logs which it dropped and why."""
    dead = set(dead)
    if dead:
        log.info("%d keys dropped, %s: %s", len(dead), why, shorten_list(sorted(dead)))
    return {name: tensor for name, tensor in state.items() if name not in dead}


def rename(state: State, names: Mapping[str, str], what: str) -> State:
    """Returns the state under our names; raises unless its keys are exactly those of ``names``.

    - ``names``: their names -> ours
    - ``what``: whose weights these should be, for the message
    """
    unknown = [name for name in state if name not in names]
    missing = [name for name in names if name not in state]
    if unknown or missing:
        faults = [
            f"{word}: {shorten_list(keys)}" for word, keys in (("unknown", unknown), ("missing", missing)) if keys
        ]
        raise ValueError(f"these are not weights of {what}; {'; '.join(faults)}")
    return {names[theirs]: tensor for theirs, tensor in state.items()}


def load_strict(net: nn.Module, state: State) -> None:
    """Loads the state into the network; raises if a key or shape differs.

    The network takes the state's precision, but at least float32.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    faults = [f"{name} is unknown" for name in state if name not in shapes]
    faults += [f"{name} is missing" for name in shapes if name not in state]
    faults += [
        f"{name} is {tuple(state[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if faults:
        raise ValueError(f"the weights do not fit the network: {shorten_list(faults)}")
    net.to(reduce(torch.promote_types, (tensor.dtype for tensor in state.values()), torch.float32))
    net.load_state_dict(state)


def fit_positions(
    table: Tensor, patch: Sequence[int], tile: Sequence[int], trained_tile: Sequence[int] | None
) -> Tensor:
    """Returns learned positions ``1 n e`` for the grid of ``tile``, resized where they were trained on another grid.

    The table tells only their number. Its grid is that of ``trained_tile`` where one is named, else that of ``tile``
    if the number fits, else a cube.
    """
    count = table.shape[1]
    grid = [side // p for side, p in zip(tile, patch)]
    edge = round(count ** (1 / len(grid)))
    trained_grid = grid if trained_tile is None else [side // p for side, p in zip(trained_tile, patch)]
    if trained_tile is None and torch.Size(grid).numel() != count:
        trained_grid = [edge] * len(grid)
    if len(trained_grid) != len(grid) or torch.Size(trained_grid).numel() != count:
        raise ValueError(
            f"the weights have {count} positions: neither those of tile {tuple(tile)} at patch {tuple(patch)} nor of "
            f"{'a cube' if trained_tile is None else f'trained_tile {tuple(trained_tile)}'}; take the `tile` that they "
            "were trained on, or name it to load_monai or load_primus as trained_tile="
        )
    if trained_grid != grid:
        log.info("positions resized from a grid of %s to %s", tuple(trained_grid), tuple(grid))
    return resize_positions(table, trained_grid, grid)


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a file one by one, so that no rank holds all of them."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def digest(path: Path) -> str:
    """Returns a hash of a file's bytes."""
    bytes_hash = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            bytes_hash.update(block)
    return bytes_hash.hexdigest()


def digest_of_bytes(content: bytes) -> str:
    """Returns the hash of a file with this content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
