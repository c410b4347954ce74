"""The network."""

from torch import Tensor, nn


def stage(in_channels: int, out_channels: int) -> nn.Sequential:
    """[B, in_channels, H, W] to [B, out_channels, H / 2, W / 2]."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.GELU())


class Net(nn.Module):
    """Three convolutions, the mean over the positions, a linear layer.

    `model.fields` of the configuration holds its arguments, but `num_classes` comes from the data.
    """

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            stage(3, width), stage(width, 2 * width), stage(2 * width, 4 * width)
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] to logits [B, num_classes]."""
        features = self.stages(images).mean(dim=(2, 3))
        return self.head(features)
