"""Data that CaiT is trained on: gray images, the same batches again, and the classes and channels of a teacher."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, images_in, module, trainer
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torchvision.transforms import Normalize

import cait
from cait.data.reading import load_image
from cait.errors import UserError
from cait.model.network import NetworkSettings
from cait.train.losses import DistillationSettings
from cait.train.teacher import Teacher, load_teacher

MEAN, STD = [0.458971], [0.225609]
"""ImageNet's, in gray."""
GRAY = dict(img_size=32, num_classes=2, fields=FIELDS | dict(in_chans=1))


@pytest.mark.parametrize("overfit_batches", [2, 0.0])
def test_overfitting_sees_the_same_batches_each_epoch(mixed_root, overfit_batches):
    seen: list[Tensor] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda fit, net, batch, index: seen.append(batch[0])
    )
    limits = {} if overfit_batches else dict(limit_train_batches=2, limit_val_batches=0)
    fit = trainer(
        overfit_batches=overfit_batches, callbacks=[watch], num_sanity_val_steps=0, **limits
    )
    fit.fit(module(img_size=32, num_classes=3), datamodule=images_in(mixed_root))
    first, second, again, _ = seen
    assert torch.equal(first, again) is bool(overfit_batches)
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


def test_a_module_and_a_data_module_of_other_channels_are_refused(two_classes):
    with pytest.raises(UserError, match="in_chans 1"):
        trainer(max_steps=1).fit(module(**GRAY), images_in(two_classes))


# A teacher


def test_a_teacher_of_colors_sees_gray_in_all_channels():
    imagenets = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    teacher = Teacher(torch.nn.Identity(), imagenets, None, (MEAN, STD))
    pixels = torch.rand(2, 1, 8, 8)
    seen = teacher(Normalize(MEAN, STD)(pixels))
    assert torch.allclose(seen, Normalize(*imagenets)(pixels.expand(-1, 3, -1, -1)), atol=1e-5)
    # as a student's in 64-true, and the teacher is not
    assert teacher(pixels.double()).dtype == torch.float32


SIZES = dict(img_size=8, num_classes=3, fields=FIELDS)
HALVES = [0.5] * 3, [0.5] * 3
"""Mean and deviation of three channels."""


@pytest.fixture
def checkpoint():
    """A teacher of the classes a, b and c."""
    network = NetworkSettings("xxs24", **SIZES).build_network()
    return {
        "pytorch-lightning_version": "2.6.6",
        "global_step": 1,
        "state_dict": {f"model.{key}": value for key, value in network.state_dict().items()},
        "hyper_parameters": dict(name="xxs24", **SIZES, mean=HALVES[0], std=HALVES[1]),
        "ImageNetDataModule": {"class_names": ["a", "b", "c"], "depends_on": {}},
    }


def teacher_of(checkpoint, path, classes="abc", normalization=HALVES):
    torch.save(checkpoint, path)
    settings = DistillationSettings("hard", teacher=str(path))
    network = NetworkSettings("xxs24", **SIZES)
    return load_teacher(settings, network, normalization, [*classes])


def test_a_teacher_of_the_same_classes_in_another_order_judges(checkpoint, tmp_path):
    images = torch.randn(2, 3, 8, 8)
    logits = teacher_of(checkpoint, tmp_path / "x.ckpt")(images)
    of_another_order = teacher_of(checkpoint, tmp_path / "x.ckpt", "bca")(images)
    torch.testing.assert_close(of_another_order, logits[:, [1, 2, 0]])


def test_a_teacher_of_other_classes_channels_or_labels_is_refused(checkpoint, tmp_path):
    path = tmp_path / "x.ckpt"
    with pytest.raises(UserError, match="c, d"):
        teacher_of(checkpoint, path, "abd")
    settings = checkpoint["hyper_parameters"]
    settings["task"] = "several"
    with pytest.raises(UserError, match="several classes"):
        teacher_of(checkpoint, path)
    del settings["task"]
    settings.update(mean=[0.5] * 4, std=[0.5] * 4)
    with pytest.raises(UserError, match="4 channels"):
        teacher_of(checkpoint, path, normalization=([0.5], [0.5]))


def test_a_teacher_that_is_a_folder_is_refused(tmp_path):
    settings = DistillationSettings("hard", teacher=str(tmp_path))
    with pytest.raises(UserError, match="is a folder"):
        load_teacher(settings, NetworkSettings("xxs24", **SIZES), HALVES, ["a", "b"])
