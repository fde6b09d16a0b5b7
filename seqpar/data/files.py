"""Files that are there whole or not at all, whenever the process ends and whoever else writes the same one."""

import os
import socket
from pathlib import Path


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
