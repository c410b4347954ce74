"""Training and evaluation transforms: the same pixels as timm's, and drawn from the same distributions."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from harness import REPO
from PIL import Image
from scipy.stats import chi2_contingency, ks_2samp
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.auto_augment import RandAugment, rand_augment_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision import transforms

from cait import seeds
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import TrainImages, seed_generators
from cait.data.listing import Files
from cait.data.reading import UnreadableImages, load_rgb
from cait.data.sampler import Key
from cait.data.transforms import Augmentation, Preprocessing, ShapedCrop
from cait.errors import UserError

SHIPPED = yaml.safe_load((REPO / "configs/imagenet/xxs24_224.yaml").read_text())["data"]
SIZE = 48
RECIPE = dict(auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)


def module(root: Path, **settings: object) -> ImageNetDataModule:
    defaults: dict = dict(img_size=SIZE, batch_size=4, num_workers=0)
    return ImageNetDataModule(root=str(root), **(defaults | settings))


def train_set(root: Path, **settings: object) -> ImageNetDataModule:
    data = module(root, **settings)
    data.setup("fit")
    return data


def finished(data: ImageNetDataModule, item: Any) -> Tensor:
    """An augmented image as the network sees it, whatever the backend."""
    if isinstance(item, Tensor):
        return item
    pixels, erased = item
    return data.normalize_and_erase(pixels[None], [(0, erased)] if erased else [])[0]


def trained_on(data: ImageNetDataModule, key: Key) -> Tensor:
    return finished(data, data.train_images[key][0])


KEYS = [(0, index, repeat) for index in range(12) for repeat in range(2)]


# Settings of ours beside what they are called in timm, where they are left out they are the recipe's.
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, RECIPE),
        (dict(auto_augment="3a"), RECIPE | dict(auto_augment="3a")),
        (dict(auto_augment="3a", color_jitter=0.3), RECIPE | dict(auto_augment="3a", color_jitter=0.3)),
        (dict(auto_augment=None), dict(re_prob=0.25)),
        (dict(auto_augment=None, color_jitter=0.4), dict(re_prob=0.25, color_jitter=0.4)),
        (
            dict(auto_augment=None, color_jitter=[0.4, 0.2, 0.1, 0.5]),
            dict(re_prob=0.25, color_jitter=(0.4, 0.2, 0.1, 0.5)),
        ),
        (dict(auto_augment="original-mstd0.5"), RECIPE | dict(auto_augment="original-mstd0.5")),
        (dict(auto_augment="augmix-m5-w4"), RECIPE | dict(auto_augment="augmix-m5-w4")),
        (dict(erase_prob=1.0), RECIPE | dict(re_prob=1.0)),
        (dict(interpolation="bilinear"), RECIPE | dict(interpolation="bilinear")),
        (dict(scale=[0.5, 0.6], ratio=[1.0, 2.0]), RECIPE | dict(scale=(0.5, 0.6), ratio=(1.0, 2.0))),
        (dict(hflip=1.0), RECIPE | dict(hflip=1.0)),
        (dict(mean=[0.5, 0.4, 0.3], std=[0.1, 0.2, 0.3]), RECIPE | dict(mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))),
    ],
)
def test_training_pixels_are_timms(two_classes: Path, settings: dict, theirs: dict) -> None:
    common: dict = dict(input_size=SIZE, is_training=True, interpolation="bicubic", re_mode="pixel", color_jitter=None)
    assert_pixels(two_classes, settings, create_transform(**(common | theirs)))


def assert_pixels(two_classes: Path, settings: dict, transform: Callable[[Image.Image], Tensor]) -> None:
    """With these settings timm's backend has the pixels of `transform`, and ours nearly."""
    exact, plain = train_set(two_classes, backend="timm", **settings), train_set(two_classes, backend="timm")
    fast = train_set(two_classes, **settings)
    std = torch.tensor(settings.get("std", IMAGENET_DEFAULT_STD)).view(3, 1, 1)
    levels, moved = [], False
    for key in KEYS:
        index = key[1]
        source, _ = exact.train_images.samples[index]
        seed_generators(seeds.image(0, *key))
        reference = transform(load_rgb(source))
        image = trained_on(exact, key)
        assert torch.equal(image, reference)
        moved = moved or not torch.equal(image, trained_on(plain, key))
        item, _ = fast.train_images[key]
        pixels, erased = item if fast.pipeline else (item, None)
        difference = (finished(fast, (pixels, None) if fast.pipeline else pixels) - reference).abs() * std * 255
        if erased is not None:  # whose noise is another
            _, top, left, height, width = erased
            difference[:, top : top + height, left : left + width] = 0
        levels.append(difference.mean().item())
    assert moved or not settings  # else this would show nothing
    assert np.mean(levels) < 0.1
    assert max(levels) < 1


FITTED = {
    "squash": [transforms.Resize((SIZE, SIZE), interpolation=transforms.InterpolationMode.BICUBIC)],
    "pad": create_transform(SIZE, crop_mode="border", crop_pct=1.0, interpolation="bicubic").transforms[:2],
}
WHOLE = dict(scale=[1.0, 1.0], ratio=[1.0, 1.0])


@pytest.mark.parametrize("fit", FITTED)
@pytest.mark.parametrize("train_crop", ["resized", "simple"])
def test_a_crop_of_the_whole_image_is_what_evaluation_sees(two_classes: Path, train_crop: str, fit: str) -> None:
    moved = transforms.RandomCrop(SIZE, padding=4, padding_mode="reflect")
    rest = [transforms.ToTensor(), transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)]
    theirs = [*FITTED[fit], *([moved] if train_crop == "simple" else []), transforms.RandomHorizontalFlip(), *rest]
    settings = WHOLE | dict(fit=fit, train_crop=train_crop, auto_augment=None, erase_prob=0.0)
    assert_pixels(two_classes, settings, transforms.Compose(theirs))


@pytest.mark.parametrize("fit", FITTED)
def test_a_fitted_crop_has_nearly_the_same_pixels_by_both_backends(two_classes: Path, fit: str) -> None:
    settings: dict = dict(fit=fit, auto_augment=None, erase_prob=0.0, hflip=0.0)
    rest = [transforms.ToTensor(), transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)]
    crop = ShapedCrop((0.08, 1.0), (3 / 4, 4 / 3))
    assert_pixels(two_classes, settings, transforms.Compose([crop, *FITTED[fit], *rest]))


def test_a_fitted_crop_has_the_shape_of_the_image() -> None:
    crop = ShapedCrop((0.08, 0.5), (3 / 4, 4 / 3))
    shares, ratios = [], []
    for draw in range(300):
        seed_generators(draw)
        top, left, height, width = crop.box(1600, 400)
        assert 0 <= top <= 400 - height
        assert 0 <= left <= 1600 - width
        shares.append(height * width / (1600 * 400))
        ratios.append(width / height / 4)
        seed_generators(draw)
        square = torch.empty(300, 300, device="meta")
        timms = RandomResizedCropAndInterpolation.get_params(square, crop.scale, crop.ratio)
        seed_generators(draw)
        assert crop.box(300, 300) == timms
    assert (min(shares), max(shares)) == pytest.approx((0.08, 0.5), abs=0.01)
    assert (min(ratios), max(ratios)) == pytest.approx((3 / 4, 4 / 3), abs=0.02)


@pytest.mark.parametrize("fit", FITTED)
@pytest.mark.parametrize("size", [(1, 1000), (1000, 1), (1, 1), (3, 2)])
def test_the_thinnest_image_is_fitted(size: tuple[int, int], fit: str) -> None:
    preprocessing, image = Preprocessing(32, fit=fit), Image.new("RGB", size, "white")
    pixels = preprocessing.transform()(image)
    assert pixels.shape == (3, 32, 32)
    assert (pixels == 255).all(dim=0).any()  # something is left of it
    for train_crop in ("resized", "simple"):
        for pipeline in (False, True):
            augmentation = Augmentation(train_crop=train_crop, auto_augment=None)
            data = ImageNetDataModule(img_size=32, fit=fit, train_crop=train_crop, auto_augment=None)
            if not pipeline:
                assert augmentation.transform(preprocessing)(image).shape == (3, 32, 32)
            elif data.pipeline:
                assert data.pipeline(data.pipeline.open(image, "", False))[0].shape == (32, 32, 3)


def test_the_simple_crop_is_deit_iiis(two_classes: Path) -> None:
    # facebookresearch/deit, augment.py: new_data_aug_generator with --src.
    theirs = transforms.Compose(
        [
            transforms.Resize(SIZE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomCrop(SIZE, padding=4, padding_mode="reflect"),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        ]
    )
    assert_pixels(two_classes, dict(train_crop="simple", auto_augment=None, erase_prob=0.0), theirs)


OWN = """
import random
import numpy as np, torch
from PIL import Image, ImageOps

number = 3

def square(image):
    place = random.randint(0, 20), np.random.randint(0, 20)
    image = image.copy()
    image.paste((int(torch.randint(256, ())), 0, 0), (*place, place[0] + 9, place[1] + 9))
    return image

def grey(image):
    return ImageOps.grayscale(image)

def smaller(image):
    return image.resize((8, 8))

def array(image):
    return np.asarray(image)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside the user's runs."""
    (tmp_path / "own_operations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_operations", raising=False)
    return "own_operations"


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4", None])
def test_operations_of_ones_own_follow_the_policy(two_classes: Path, own: str, policy: str | None) -> None:
    settings = dict(auto_augment=policy, augment_ops=[f"{own}:square", f"{own}:grey"])
    first, second, final = create_transform(
        SIZE,
        is_training=True,
        separate=True,
        interpolation="bicubic",
        re_mode="pixel",
        **(RECIPE | dict(auto_augment=policy, color_jitter=None)),
    )
    found = importlib.import_module(own)
    grey = transforms.Grayscale(3)  # as `grey` is once the pipeline has it in RGB again
    assert_pixels(two_classes, settings, lambda image: final(grey(found.square(second(first(image))))))


def test_operations_of_ones_own_draw_the_same_in_every_process(two_classes: Path, own: str) -> None:
    batches = []
    for workers, decode_once in ((0, False), (2, False), (0, True)):
        data = train_set(
            two_classes, augment_ops=[f"{own}:square"], num_workers=workers, decode_once=decode_once, mixup=0, cutmix=0
        )
        batches.append([image for image, _ in data.train_dataloader()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*batches, strict=True))
    assert not torch.equal(batches[0][0][0], batches[0][0][1])  # the repeats of one image


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("smaller", r"own_operations:smaller must return a PIL image of \(48, 48\), it returned Image of \(8, 8\)"),
        ("array", r"own_operations:array must return a PIL image of \(48, 48\), it returned ndarray"),
        ("nothing", "cannot import own_operations:nothing: own_operations has no 'nothing'"),
        ("number", "own_operations:number is not a function"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "timm"])
def test_operations_that_cannot_be_used_are_told_in_one_line(
    two_classes: Path, own: str, path: str, words: str, backend: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train_set(two_classes, augment_ops=[f"{own}:{path}"], backend=backend, max_bad_share=0.9).train_images[0, 0, 0]
    assert "\n" not in str(caught.value)


def test_to_score_needs_no_operation_of_ones_own(two_classes: Path) -> None:
    data = module(two_classes, augment_ops=["nowhere:at_all"])
    data.setup("validate")
    assert len(list(data.val_dataloader())) == 3
    with pytest.raises(UserError, match="cannot import nowhere:at_all"):
        data.setup("fit")


class Own(ImageNetDataModule):
    """Transforms of one's own, as a user writes them."""

    def __init__(self, *, as_float: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.as_float = as_float

    def make_train_transform(self) -> Any:
        steps = [transforms.RandomCrop(SIZE, pad_if_needed=True), transforms.PILToTensor()]
        if self.as_float:
            steps += [
                transforms.ConvertImageDtype(torch.float32),
                transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
            ]
        return transforms.Compose(steps)

    make_eval_transform = make_train_transform


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_brings_its_own_transforms(
    two_classes: Path, workers: int, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = []
    for as_float in (False, True):
        data = Own(as_float=as_float, root=str(two_classes), img_size=SIZE, batch_size=4, num_workers=workers)
        data.setup("fit")
        found.append([image for image, _ in data.train_dataloader()])
        assert all(image.shape == (4, 3, SIZE, SIZE) and image.dtype == torch.float32 for image in found[-1])
        torch.manual_seed(0)
        found[-1] += [image for image, _ in data.val_dataloader()] if workers == 0 else []
    assert len(found[0]) == 3 + 3 * (workers == 0)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(*found, strict=True))
    data = Own(as_float=True, root=str(two_classes), img_size=SIZE)
    data.setup("fit")
    crop = transforms.RandomCrop(SIZE, pad_if_needed=True)
    seed_generators(seeds.image(0, 0, 7, 1))
    expected = transforms.functional.to_tensor(crop(load_rgb(data.train_images.samples[7][0])))
    expected = transforms.functional.normalize(expected, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    assert torch.equal(data.train_images[0, 7, 1][0], expected)
    assert "a training transform of your own" in caplog.text


def test_colour_jitter_is_left_out_beside_randaugment_aloud(
    two_classes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ours, plain = train_set(two_classes, color_jitter=0.4), train_set(two_classes)
    assert all(torch.equal(trained_on(ours, key), trained_on(plain, key)) for key in KEYS)
    (line,) = [record.message for record in caplog.records if "color_jitter" in record.message]
    assert line == "color_jitter 0.4 is left out beside auto_augment rand-m9-mstd0.5-inc1, as in timm"


@pytest.mark.parametrize(("fit", "crop_mode"), [("crop", None), ("pad", "border"), ("squash", "squash")])
@pytest.mark.parametrize("img_size", [32, 50, 96])
@pytest.mark.parametrize("crop_pct", [1.0, 0.95, 0.875, 0.5])
def test_evaluation_pixels_are_timms(
    two_classes: Path, img_size: int, crop_pct: float, fit: str, crop_mode: str | None
) -> None:
    data = module(two_classes, img_size=img_size, crop_pct=crop_pct, fit=fit)
    data.setup("validate")
    theirs = create_transform(img_size, interpolation="bicubic", crop_pct=crop_pct, crop_mode=crop_mode)
    for index, (path, _) in enumerate(data.val_images.samples):
        assert torch.equal(data.normalize_and_erase(data.val_images[index][0][None])[0], theirs(load_rgb(path)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(scale=[0.9, 0.1]), r"scale must be two shares .*got \[0.9, 0.1\]"),
        (dict(scale=[0.0, 1.0]), "scale must be"),
        (dict(scale=[0.5, 1.5]), "scale must be"),
        (dict(ratio=[0.0, 1.0]), "ratio must be"),
        (dict(ratio=[2.0, 1.0]), "ratio must be"),
        (dict(color_jitter=-0.1), "color_jitter must be a number of at least 0.*got -0.1"),
        (dict(color_jitter=-0.1, auto_augment="3a"), "color_jitter must be"),
        (dict(color_jitter=[0.1, 0.2]), "color_jitter must be"),
        (dict(color_jitter=[0.1, 0.2, -0.3]), "color_jitter must be"),
        (dict(color_jitter=[0.1, 0.2, 0.3, 0.6]), "color_jitter must be"),
        (dict(erase_prob=1.1), "erase_prob must be"),
        (dict(fit="stretch"), "fit must be one of crop, pad, squash, got 'stretch'"),
        (dict(train_crop="center"), "train_crop must be one of resized, simple, got 'center'"),
        (dict(auto_augment="4a"), "auto_augment '4a'"),
        (dict(auto_augment="rand-q9"), "auto_augment 'rand-q9'"),
        (dict(mix_mode="pairs"), "mix_mode must be one of batch, pair, elem, got 'pairs'"),
        (dict(cutmix=-1.0), "cutmix must be at least 0, got -1.0"),
        (dict(mix_prob=1.5), "mix_prob must be"),
        (dict(mix_switch_prob=-0.5), "mix_switch_prob must be"),
    ],
)
def test_settings_out_of_range_are_told_in_one_line(tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        module(tmp_path, **settings)
    assert "\n" not in str(caught.value)


# What follows holds a pipeline against timm's by what it draws, not by how: another one has only to yield its
# images of an image of ramps, and its RandAugment's operations.

DRAWS = 10_000
BACKENDS = ["timm", "auto"]
OWN_OR_TIMMS = [pytest.param("timm", marks=pytest.mark.slow), "auto"]
WIDTH, HEIGHT, SIDE = 256, 192, 32
RAMPS = Image.fromarray(
    np.stack(np.broadcast_arrays(np.arange(WIDTH)[None], np.arange(HEIGHT)[:, None], 0), axis=2).astype(np.uint8)
)
"""Red is the column, green the row, so that an image cut out of it shows where it lay."""


def boxes(images: Iterable[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """(left, top, width, height) [N, 4] in pixels, and whether mirrored [N], of images of RAMPS in [0, 1]."""
    inside = np.arange(4, SIDE - 4)  # the resampling filter reaches over the borders
    found = []
    for image in images:
        columns, rows = 255 * image[0].mean(dim=0)[inside].numpy(), 255 * image[1].mean(dim=1)[inside].numpy()
        # Pixel u of the image lies at left + (u + 1/2) · width / SIDE - 1/2 of the image.
        (slope, first), (down, top) = (np.polyfit(inside + 0.5, values + 0.5, 1) for values in (columns, rows))
        found.append((min(first, first + slope * SIDE), top, abs(slope) * SIDE, down * SIDE, slope < 0))
    array = np.array(found)
    return array[:, :4].round(), array[:, 4]


def timms_boxes(count: int) -> np.ndarray:
    drawn = [RandomResizedCropAndInterpolation.get_params(RAMPS, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(count)]
    return np.array([(left, top, width, height) for top, left, height, width in drawn])


def images_of(image: Image.Image, data: ImageNetDataModule, count: int, seed: int) -> Iterator[Tensor]:
    """The image as it comes in each of `count` epochs."""
    opened = data.pipeline.open(image, "", True) if data.pipeline else image
    source = TrainImages(Files([("", 0)]), lambda *_: opened, data.train_transform, seed, UnreadableImages(None, 0))
    return (finished(data, source[epoch, 0, 0][0]) for epoch in range(count))


def box_settings(**settings: object) -> ImageNetDataModule:
    plain: dict = dict(auto_augment=None, erase_prob=0.0, mean=[0.0] * 3, std=[1.0] * 3, img_size=SIDE)
    return ImageNetDataModule(**(SHIPPED | plain | settings))


def box_p_values(found: np.ndarray, expected: np.ndarray) -> list[float]:
    """Of the left and upper border, the area, and width / height, by Kolmogorov-Smirnov."""
    figures = [(b[:, 0], b[:, 1], b[:, 2] * b[:, 3], b[:, 2] / b[:, 3]) for b in (found, expected)]
    return [ks_2samp(ours, theirs).pvalue for ours, theirs in zip(*figures, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_boxes_are_read_off_the_pixels(backend: str) -> None:
    data = box_settings(backend=backend)
    for epoch, image in enumerate(images_of(RAMPS, data, 50, seed=3)):
        random.seed(seeds.image(3, epoch, 0, 0))
        assert np.abs(boxes([image])[0] - timms_boxes(1)).max() <= 1


@pytest.mark.parametrize("backend", OWN_OR_TIMMS)
def test_crop_boxes_and_flips_are_distributed_as_timms(backend: str) -> None:
    random.seed(0)
    expected = timms_boxes(DRAWS)
    found, mirrored = boxes(images_of(RAMPS, box_settings(backend=backend), DRAWS, seed=1))
    assert min(box_p_values(found, expected)) > 1e-3
    assert mirrored.mean() == pytest.approx(0.5, abs=4 * 0.5 / DRAWS**0.5)
    # Other crops would have been noticed, with a fifth of the draws.
    for other in (dict(scale=[0.12, 1.0]), dict(ratio=[0.8, 1.25])):
        narrower, _ = boxes(images_of(RAMPS, box_settings(backend=backend, **other), DRAWS // 5, seed=1))
        assert min(box_p_values(narrower, expected)) < 1e-4


Operation = tuple[str, tuple[float, ...], str]
"""Name, arguments, and the settings that all draws share."""


def operations(augment: RandAugment, draws: Iterable[Any]) -> list[list[Operation]]:
    """What `augment` would apply in each of the draws; nothing is carried out."""
    applied: list[Operation] = []

    def note(name: str, image: Any, *arguments: float, **settings: Any) -> Any:
        applied.append((name, arguments, str(sorted(settings.items()))))
        return image

    for op in augment.ops:
        op.aug_fn = partial(note, op.name)
    found = []
    for _ in draws:
        found.append(applied.copy())
        applied.clear()
    return found


def our_operations(count: int, seed: int, **settings: object) -> list[list[Operation]]:
    data = ImageNetDataModule(**(SHIPPED | dict(img_size=SIDE, erase_prob=0.0) | settings))
    parts: Any = data.train_transform.array_ops if data.pipeline else data.train_transform.transforms
    (augment,) = (part for part in parts if isinstance(part, RandAugment))
    return operations(augment, images_of(Image.new("RGB", (8, 8)), data, count, seed))


def operation_p_values(found: list[list[Operation]], expected: list[list[Operation]]) -> dict[str, float]:
    """For the number of operations an image, for which they are, and for the argument of each."""
    both = [[operation for image in side for operation in image] for side in (found, expected)]
    names = sorted({name for name, _, _ in both[1]})
    assert {name for name, _, _ in both[0]} == set(names)
    assert {settings for _, _, settings in both[0]} == {settings for _, _, settings in both[1]}
    many = [[sum(len(image) == number for image in side) for number in range(3)] for side in (found, expected)]
    counts = [[sum(name == other for other, _, _ in side) for name in names] for side in both]
    values = {"number": chi2_contingency(many).pvalue, "operations": chi2_contingency(counts).pvalue}
    for name in names:
        arguments = [[arguments for other, arguments, _ in side if other == name] for side in both]
        assert {len(one) for one in arguments[0]} == {len(one) for one in arguments[1]}
        if arguments[1][0]:
            values[name] = ks_2samp(*([first for first, *_ in side] for side in arguments)).pvalue
    return values


@pytest.mark.parametrize("backend", OWN_OR_TIMMS)
def test_randaugments_operations_are_distributed_as_timms(backend: str) -> None:
    shared = dict(
        translate_const=int(SIDE * 0.45), img_mean=(124, 116, 104), interpolation=Image.Resampling.BICUBIC
    )  # as timm's own create_transform hands them over
    augment = rand_augment_transform("rand-m9-mstd0.5-inc1", shared)
    random.seed(0)
    np.random.seed(0)
    image = Image.new("RGB", (8, 8))
    expected = operations(augment, (augment(image) for _ in range(DRAWS)))
    values = operation_p_values(our_operations(DRAWS, seed=1, backend=backend), expected)
    assert len(values) == 2 + 12  # three of the fifteen have no argument
    assert min(values.values()) > 1e-3, values
    # Other policies would have been noticed, with a fifth of the draws.
    for other in ("rand-m8-mstd0.5-inc1", "rand-m9-mstd1-inc1", "rand-m9-mstd0.5-inc1-p0.6"):
        assert (
            min(
                operation_p_values(
                    our_operations(DRAWS // 5, 1, backend=backend, auto_augment=other), expected
                ).values()
            )
            < 1e-4
        )
