"""`module.predict("photo.jpg")`: classify images with a module that was loaded from a checkpoint."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cait.data.datamodule import DataSettings
from cait.data.dataset import channels_last
from cait.data.reading import AS_SEEN, RawImage, check_raw, load_image
from cait.data.transforms import NormalizeAndErase
from cait.errors import UserError
from cait.model.network import in_evaluation
from cait.settings import group
from cait.train.metrics import Best

BATCH = 64


def transform(module: Any, image: RawImage) -> Tensor:
    """The network's input [3, img_size, img_size] for a path, an open file or a PIL image, prepared as in evaluation.

    Raises UserError if the image cannot be read, or the checkpoint does not say how images are prepared.
    """
    check_raw(image, "the image")
    if module.eval_transform is None:
        if not module.preprocessing:
            raise UserError(
                'nothing says how images are prepared: load the run with cait.load("logs/NAME")'
            )
        settings = group(DataSettings, module.preprocessing)
        module.eval_transform = settings.transform()
        module.reading = module.reading or settings
    pixels = module.eval_transform(load_image(image, reading=module.reading or AS_SEEN))
    if pixels.dtype != torch.uint8:
        return pixels
    normalize = NormalizeAndErase(module.hparams["mean"], module.hparams["std"])
    return normalize(channels_last(pixels)[None])[0]


def predict(
    module: Any, images: RawImage | Sequence[RawImage], top_k: int | None = None
) -> Best | list[Best]:
    """The most probable classes of an image, or of each of several. With several labels per image: those above 0.5.

    Raises UserError if an image cannot be read or is none, or nothing says how images are prepared.

    Args:
        module: a `cait.train.module.CaiTModule`.
        images: a path, an open file or a PIL image; or a list of them.
        top_k: how many classes to return at most; None means 5, or with several labels per image no limit.

    Returns:
        [{"class": "cat", "index": 3, "probability": 0.91}, ...], or a list of such lists for a list of images.
    """
    is_one = not isinstance(images, list | tuple)
    paths: Any = [images] if is_one else images
    answers = []
    for start in range(0, len(paths), BATCH):
        prepared = [module.transform(image) for image in paths[start : start + BATCH]]
        answers += classify(module, prepared, top_k)
    return answers[0] if is_one else answers


@torch.no_grad()
def classify(module: Any, prepared: Sequence[Tensor], top_k: int | None = None) -> list[Best]:
    """What `predict` returns, for a batch of images as `transform` prepares them, [3, img_size, img_size] each."""
    names = module.class_names or [f"class {index}" for index in range(module.num_classes)]
    with in_evaluation(module):
        batch = torch.stack([*prepared]).to(module.device)
        return module.task.best(module.predict_step((batch,), 0), names, top_k)
