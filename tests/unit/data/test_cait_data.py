"""Data that CaiT is trained on: gray images, the same batches again, and the classes and channels of a teacher."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, images_in, module, trainer
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torchvision.transforms import Normalize

import cait
from cait.data.reading import load_image
from cait.train.teacher import Teacher, load_teacher

MEAN, STD = [0.458971], [0.225609]
"""ImageNet's, in gray."""
GRAY = dict(img_size=32, num_classes=2, fields=FIELDS | dict(in_chans=1))


def test_overfitting_sees_the_same_batches_each_epoch(mixed_root):
    seen = []
    watch = LambdaCallback(on_train_batch_start=lambda *hook: seen.append(hook[2][0]))
    fit = trainer(overfit_batches=2, callbacks=[watch], num_sanity_val_steps=0)
    fit.fit(module(img_size=32, num_classes=3), datamodule=images_in(mixed_root))
    first, second, again, _ = seen
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_gray_run_is_saved_and_used_as_it_was_trained(two_classes, tmp_path):
    data = images_in(two_classes, in_chans=1, repeats=1, fit="pad", crop_pct=0.9)
    run = trainer(max_steps=1)
    run.fit(module(**GRAY), data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    loaded = cait.load(tmp_path / "x.ckpt")
    assert (loaded.settings.mean, loaded.settings.std) == (MEAN, STD)
    path, _ = data.val_images.samples[1]
    transform = create_transform(
        (1, 32, 32),
        interpolation="bicubic",
        mean=MEAN,
        std=STD,
        crop_pct=0.9,
        crop_mode="border",
    )
    image = transform(load_image(path).convert("L"))
    assert torch.equal(loaded.transform(path), image)
    [[best, *_]] = loaded.predict([path])
    probabilities = loaded.eval()(image[None]).softmax(dim=1)
    assert best["probability"] == pytest.approx(probabilities.max().item())


# A teacher


def test_a_teacher_of_colors_sees_gray_in_all_channels():
    imagenets = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    teacher = Teacher(torch.nn.Identity(), imagenets, None, (MEAN, STD))
    pixels = torch.rand(2, 1, 8, 8)
    seen = teacher(Normalize(MEAN, STD)(pixels))
    assert torch.allclose(seen, Normalize(*imagenets)(pixels.expand(-1, 3, -1, -1)), atol=1e-5)
    # as a student's in 64-true, and the teacher is not
    assert teacher(pixels.double()).dtype == torch.float32


def test_a_teacher_of_the_same_classes_in_another_order_judges(trained):
    path = str(trained / "checkpoints/last.ckpt")
    settings = cait.CaiTModule(teacher=path, num_classes=10).settings
    normalization = [0.5] * 3, [0.5] * 3
    classes = [*"0123456789"]
    images = torch.randn(2, 3, 16, 16)
    logits = load_teacher(settings, settings, normalization, classes)(images)
    turned = classes[1:] + classes[:1]
    of_another_order = load_teacher(settings, settings, normalization, turned)(images)
    torch.testing.assert_close(of_another_order, logits.roll(-1, dims=1))
