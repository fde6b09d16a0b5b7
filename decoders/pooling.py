"""Pooling and upsampling of volumes that are spread over a group; without a spread they are torch's own."""

from torch import Tensor, nn

from seqpar.decoders.spread import Spread


class MaxPool3d(nn.MaxPool3d):
    """Max-pooling of boxes with halos."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the maxima and their spread."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError


class AvgPool3d(nn.AvgPool3d):
    """Average-pooling of boxes with halos."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the means and their spread."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError


class Upsample(nn.Upsample):
    """Nearest or trilinear upsampling by whole factors."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the enlarged volume and its spread."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError


class GlobalMean(nn.AdaptiveAvgPool3d):
    """The mean over the whole volume, ``b c 1 1 1``, the same on all ranks: no longer spread."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        """Returns the means, and None: they are whole on every rank."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError
