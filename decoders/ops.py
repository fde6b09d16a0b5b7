"""Convolutions of volumes that are spread over a group; without a spread they are torch's own.

Each takes ``(x, spread)`` and returns ``(y, spread of y)``; parameters have torch's names.
"""

from typing import Any

from torch import Tensor, nn

from seqpar.decoders.spread import Spread


class Conv3d(nn.Conv3d):
    """A convolution that fetches its halos; any kernel, stride, zero padding, dilation and groups.

    ``keep_window``: keep the box with its halos for backward (the only copy of the input that is kept); if not,
    the input is kept and its halos are fetched again, which holds no second copy where the input is kept anyway.
    """

    def __init__(self, *sizes: Any, keep_window: bool = True, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.keep_window = keep_window

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the convolution's output and its spread."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError


class ConvTranspose3d(nn.ConvTranspose3d):
    """A transposed convolution that fetches its halos; none are needed where kernel and stride are equal."""

    def __init__(self, *sizes: Any, keep_window: bool = True, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.keep_window = keep_window

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the transposed convolution's output and its spread."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError
