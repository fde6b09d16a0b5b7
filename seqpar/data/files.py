"""Files that are there whole or not at all, whenever the process ends and whoever else writes the same one."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file under a name that no other process takes, and gives it its own when it is safe on disk."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Returns a JSON file's content; what cannot be read, or names a key twice, is a DataError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
        if twice:
            raise DataError(path, f"names {twice[0]!r} twice; keep one of them")
        return dict(pairs)

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise DataError(path, f"is no JSON: {error.msg} in line {error.lineno}; repair it") from error
    except UnicodeDecodeError as error:
        raise DataError(path, f"is no text in UTF-8 ({error.reason}); write it again") from error
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror}); check the path and its rights") from error


def strip_suffix(name: str) -> str:
    """Returns a file's name without .nii or .nii.gz."""
    return name.removesuffix(".gz").removesuffix(".nii")


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(draft, path)
