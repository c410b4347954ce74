"""Transforms and augmentation of one's own, thin images, and Lightning's overfitting."""

import pytest
import torch
from modules import images_in
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import transforms
from torchvision.transforms.functional import normalize, to_tensor

from cait import seeds
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import seed_generators
from cait.data.reading import load_image

SIZE = 48
IMAGENET = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
BACKGROUND = torch.tensor([round(255 * value) for value in IMAGENET_DEFAULT_MEAN])
WHOLE = dict(scale=[1.0, 1.0], ratio=[1.0, 1.0], erase_prob=0.0)


@pytest.mark.parametrize("backend", ["auto", "timm"])
def test_a_padded_image_keeps_at_least_a_pixel(backend, tmp_path):
    """timm would resize a side of less than half a pixel to none."""
    for label, size in {"wide": (900, 1), "high": (1, 900)}.items():
        (tmp_path / label).mkdir()
        for number in range(2):
            image = Image.new("RGB", size, (255, number, 0))
            image.save(tmp_path / label / f"{number}.png")
    data = images_in(tmp_path, img_size=SIZE, fit="pad", backend=backend, **WHOLE)
    data.setup("fit")
    for label in range(2):
        _ = data.train_images[0, label, 0]
        pixels, _ = data.val_images[label]
        assert (pixels != BACKGROUND).any(dim=2).sum() == SIZE  # a row or a column


def test_an_error_in_an_operation_of_ones_own_keeps_its_traceback(digits_root):
    data = images_in(digits_root, augment_ops=["operator:add"])
    data.setup("fit")
    with pytest.raises(TypeError, match="add"):  # no UserError: its traceback names the line
        _ = data.train_images[0, 0, 0]


class Own(ImageNetDataModule):
    """Transforms of one's own, as a user writes them."""

    def __init__(self, *, as_float, **settings):
        super().__init__(**settings)
        self.as_float = as_float

    def make_train_transform(self):
        crop = transforms.RandomCrop(SIZE, pad_if_needed=True)
        if self.as_float:
            return transforms.Compose([crop, to_tensor, transforms.Normalize(*IMAGENET)])
        return transforms.Compose([crop, transforms.PILToTensor()])

    make_eval_transform = make_train_transform


@pytest.mark.parametrize("as_float", [False, True])
def test_a_subclass_brings_its_own_transforms(two_classes, as_float):
    settings = dict(root=str(two_classes), img_size=SIZE, batch_size=4, num_workers=1)
    data = Own(as_float=as_float, **settings)
    data.setup("fit")
    loader = data.train_dataloader()
    batches = [images for images, _ in loader]
    keys = [key for batch in loader.batch_sampler for key in batch]
    assert len(keys) == 12
    crop = transforms.RandomCrop(SIZE, pad_if_needed=True)
    for image, key in zip(torch.cat(batches), keys, strict=True):
        path, _ = data.train_images.samples[key[1]]
        seed_generators(seeds.image(0, *key))
        expected = normalize(to_tensor(crop(load_image(path))), *IMAGENET)
        assert torch.allclose(image, expected, rtol=0, atol=1e-5)
