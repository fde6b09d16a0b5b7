"""Curves for TensorBoard, where it is asked for."""

from pathlib import Path
from typing import Any


class Board:
    """Writes numbers of a journal's rows as scalars, under ``train/`` and ``val/``."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)  # type: ignore[no-untyped-call]

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                self.record(f"{kind}/{name}", step, value)
            elif isinstance(value, (int, float)) and name != "epoch":
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
