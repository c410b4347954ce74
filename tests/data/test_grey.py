"""Networks of one channel: gray images, learned with and used as timm prepares images of Pillow's mode L."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from modules import FIELDS, images_in, trainer
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.models._manipulate import adapt_input_conv

import cait
from cait.data.dataset import seed_generators
from cait.data.reading import load_image
from cait.data.transforms import GREY
from cait.errors import UserError
from cait.model.weights import load_weights
from cait.train.module import CaiTModule
from cait.train.teacher import Teacher

module = partial(images_in, repeats=1, in_chans=1)
MEAN, STD = (0.458971,), (0.225609,)
ONE = dict(
    fields=FIELDS | dict(in_chans=1),
    lr=5e-3,
    lr_base_size=None,
    warmup_epochs=0,
    drop_path_rate=0.1,
)


def timms(**settings: object) -> object:
    return create_transform((1, 32, 32), interpolation="bicubic", mean=MEAN, std=STD, **settings)


def seen(path: str) -> Image.Image:
    """An image as viewers show it, in Pillow's mode L."""
    return load_image(path).convert("L")


def test_imagenets_mean_and_deviation_are_weighted_as_pillow_weights_colours() -> None:
    for colors, (gray,) in GREY.items():
        in_bytes = (
            Image.new("RGB", (1, 1), tuple(round(255 * value) for value in colors))
            .convert("L")
            .getpixel((0, 0))
        )
        assert 255 * gray == pytest.approx(in_bytes, abs=0.6)
        assert gray == pytest.approx(np.dot(colors, (0.299, 0.587, 0.114)), abs=1e-6)
    assert [*GREY] == [IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD]


def test_evaluation_pixels_are_timms_of_grey_images(two_classes: Path) -> None:
    data = module(two_classes, crop_pct=0.9)
    assert (data.settings.mean, data.settings.std) == ([*MEAN], [*STD])
    data.setup("validate")
    transform = timms(crop_pct=0.9)
    for index, (path, _) in enumerate(data.val_images.samples):
        assert torch.equal(
            data.normalize_and_erase(data.val_images[index][0][None])[0], transform(seen(path))
        )


def test_training_pixels_are_timms_of_grey_images(two_classes: Path) -> None:
    policy: dict = dict(auto_augment=None, color_jitter=[0.4, 0.4, 0.4, 0.5])
    data = module(two_classes, backend="timm", erase_prob=0.5, **policy)
    data.setup("fit")
    transform = timms(is_training=True, re_prob=0.5, re_mode="pixel", **policy)
    for index, (path, _) in enumerate(data.train_images.samples):
        for repeat in range(3):
            pixels, _ = data.train_images[(0, index, repeat)]
            seed_generators(cait.seeds.image(0, 0, index, repeat))
            assert torch.equal(pixels, transform(seen(path)))


def test_a_run_is_saved_and_used_as_it_was_trained(two_classes: Path, tmp_path: Path) -> None:
    data, net = module(two_classes, erase_prob=1.0, fit="pad", crop_pct=0.9), CaiTModule(**ONE)
    run = trainer(max_steps=1)
    run.fit(net, data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    hparams = torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]
    assert (hparams["mean"], hparams["std"]) == ([*MEAN], [*STD])
    path = data.val_images.samples[1][0]
    expected = timms(crop_pct=0.9, crop_mode="border")(seen(path))
    loaded = cait.load(tmp_path / "x.ckpt")
    assert torch.equal(loaded.transform(path), expected)
    (best, *_), *_ = loaded.predict([path])
    assert best["probability"] == pytest.approx(
        loaded.eval()(expected[None]).softmax(dim=1).max().item()
    )


def test_a_module_and_a_data_module_of_other_channels_are_refused(two_classes: Path) -> None:
    with pytest.raises(
        UserError, match="the network has in_chans 1, the data module 3: give both the same"
    ):
        trainer(max_steps=1).fit(CaiTModule(**ONE), module(two_classes, in_chans=3))


@pytest.mark.parametrize(
    ("channels", "how"), [(1, "added up for gray images"), (5, "repeated for 5")]
)
def test_weights_of_three_channels_are_fitted_as_timm_fits_them(
    channels: int, how: str, tmp_path: Path
) -> None:
    color = cait.create_model("xxs24", img_size=8, num_classes=7, **FIELDS)
    torch.save(color.state_dict(), tmp_path / "x.pth")
    other = cait.create_model("xxs24", img_size=8, num_classes=7, **FIELDS, in_chans=channels)
    assert load_weights(other, tmp_path / "x.pth") == [
        f"the three channels of patch_embed.proj.weight {how}"
    ]
    assert torch.equal(
        other.patch_embed.proj.weight, adapt_input_conv(channels, color.patch_embed.proj.weight)
    )
    images = torch.randn(2, 1, 8, 8)
    if channels == 1:
        with torch.no_grad():
            assert torch.allclose(
                other.eval()(images), color.eval()(images.expand(-1, 3, -1, -1)), atol=1e-5
            )
    torch.save(other.state_dict(), tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"another network: patch_embed\.proj\.weight is"):
        load_weights(color, tmp_path / "other.pth")


def test_a_teacher_of_colours_sees_grey_in_all_channels() -> None:
    teacher = Teacher(
        torch.nn.Identity(), (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD), None, (MEAN, STD)
    )
    pixels = torch.rand(2, 1, 8, 8)
    normal = create_transform(8).transforms[-1]
    got = teacher((pixels - torch.tensor(MEAN)) / torch.tensor(STD))
    assert torch.allclose(got, normal(pixels.expand(-1, 3, -1, -1)), atol=1e-5)
    # as a student's in 64-true, and the teacher is not
    assert teacher(pixels.double()).dtype == torch.float32
