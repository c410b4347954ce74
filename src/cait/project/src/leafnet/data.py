"""The LightningDataModule: cait's with another augmentation."""

from typing import Any

import cait
from torchvision import transforms


class Data(cait.ImageNetDataModule):
    """Turn and crop an image at random."""

    def make_train_transform(self) -> Any:
        """From an RGB image of Pillow's to uint8 [3, img_size, img_size]."""
        return transforms.Compose(
            [
                transforms.RandomRotation(10),
                transforms.RandomResizedCrop(self.img_size, (0.7, 1.0)),
                transforms.PILToTensor(),
            ]
        )
