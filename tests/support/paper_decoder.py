"""The paper's decoder as its text describes it, made of torch's own modules; nothing of ours is imported.

The text: the tokens are projected back into image space; log2 P convolutions of 3 x 3 x 3 follow, each with
upsampling by 2, the first from E_m channels to 128; a linear projection to the classes comes last. The text names
neither norm nor activation nor the kind of upsampling: instance norm, leaky ReLU and trilinear are ours.
"""

from collections.abc import Sequence

from torch import Tensor, nn


class PaperDecoder(nn.Module):
    """Logits ``b k W D H`` of tokens ``b n e``, which are ordered by height first, then depth, then width.

    - ``patch``: P, the voxels of a patch along a direction
    - ``upsample_first``: the control: before norm and activation instead of after them
    """

    def __init__(
        self, embed_dim: int, num_classes: int, patch: int, width: int = 128, upsample_first: bool = False
    ) -> None:
        super().__init__()
        self.convs, self.norms, sides = nn.ModuleList(), nn.ModuleList(), patch
        while sides > 1:
            self.convs.append(nn.Conv3d(width if len(self.convs) else embed_dim, width, 3, padding=1, bias=False))
            self.norms.append(nn.InstanceNorm3d(width, affine=True))
            sides //= 2
        self.activation, self.upsample = nn.LeakyReLU(0.01), nn.Upsample(scale_factor=2, mode="trilinear")
        self.classes = nn.Linear(width, num_classes)
        self.upsample_first = upsample_first

    def forward(self, tokens: Tensor, grid: Sequence[int]) -> Tensor:
        """``grid``: the tokens along width, depth and height."""
        x = tokens.transpose(1, 2).reshape(len(tokens), -1, *grid)
        for conv, norm in zip(self.convs, self.norms):
            x = conv(x)
            if self.upsample_first:
                x = self.activation(norm(self.upsample(x)))
            else:
                x = self.upsample(self.activation(norm(x)))
        return self.classes(x.movedim(1, -1)).movedim(-1, 1)
