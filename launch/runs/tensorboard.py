"""TensorBoard: the numbers of a run as curves."""

from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes the numbers of a journal's rows as scalars under ``train/`` and ``val/``.

    ``first_step``: what an earlier start of this run wrote from this step on is dropped.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)  # type: ignore[no-untyped-call]

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Writes each number as ``kind/name``, those of nested dicts as ``kind/name/name``."""
        for name, value in values.items():
            if isinstance(value, dict):
                self.record(f"{kind}/{name}", step, value)
            elif isinstance(value, (int, float)) and name != "epoch":
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
