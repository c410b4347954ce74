"""`module.predict("photo.jpg")`: classify images with a module that was loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cait import ckpt
from cait.data.dataset import channels_last
from cait.data.reading import RawImage, Reading, load_rgb
from cait.data.transforms import NormalizeAndErase, Preprocessing
from cait.errors import UserError
from cait.settings import group

BATCH = 64

Best = list[dict[str, Any]]
"""The most probable classes of an image, the best first: {"class": name, "index": number, "probability": p}"""


def best_classes(probabilities: Tensor, class_names: Sequence[str], top_k: int) -> list[Best]:
    """The `top_k` most probable classes for each row of probabilities [B, num_classes]."""
    best = probabilities.topk(min(top_k, probabilities.shape[1]))
    return [
        [{"class": class_names[i], "index": i, "probability": p} for p, i in zip(values, indices, strict=True)]
        for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


class Predicts:
    """The part of `cait.train.module.CaiTModule` that classifies images by itself, without a Trainer."""

    class_names: list[str] | None = None
    """Names of the classes in the order of the logits; known once a checkpoint is loaded."""
    eval_transform: Any = None
    """The transform of evaluation: a PIL image in RGB to uint8 [3, S, S], or to normalised float32 [3, S, S]."""
    reading = Reading()
    """How a file becomes RGB."""

    def remember(self, checkpoint: ckpt.Checkpoint) -> None:
        """Take the classes and the preprocessing from a checkpoint, if it has them."""
        self.class_names = ckpt.class_names(checkpoint)
        how = (ckpt.data_state(checkpoint) or {}).get("preprocessing")
        if how:
            self.prepare_as(known := group(Preprocessing, how), known.transform())

    def prepare_as(self, preprocessing: Preprocessing, eval_transform: Any) -> None:
        """Prepare images in this way: `eval_transform` takes what `preprocessing.reading` reads."""
        self.reading, self.eval_transform = preprocessing.reading, eval_transform

    def transform(self, image: RawImage) -> Tensor:
        """The network's input [3, img_size, img_size] for an image, prepared as in evaluation.

        Args:
            image: a path, an open file, or a PIL image.

        Raises:
            UserError: the image cannot be read, or the checkpoint does not say how images are prepared.
        """
        if self.eval_transform is None:
            raise UserError('nothing says how images are prepared: load the run with cait.load("logs/NAME")')
        pixels = self.eval_transform(load_rgb(image, reading=self.reading))
        if pixels.dtype != torch.uint8:
            return pixels
        normalize = NormalizeAndErase(self.hparams["mean"], self.hparams["std"])  # type: ignore[attr-defined]
        return normalize(channels_last(pixels)[None])[0]

    @torch.no_grad()
    def predict(self, images: RawImage | Sequence[RawImage], top_k: int = 5) -> Best | list[Best]:
        """The most probable classes of an image, or of each of several.

        Args:
            images: a path, an open file or a PIL image; or a list of them.
            top_k: how many classes to return, the best first.

        Returns:
            [{"class": "cat", "index": 3, "probability": 0.91}, ...], or a list of such lists for a list of images.

        Raises:
            UserError: an image cannot be read, or the checkpoint does not say how images are prepared.
        """
        module: Any = self
        several: Any = images if isinstance(images, list | tuple) else [images]
        names = self.class_names or [f"class {index}" for index in range(module.num_classes)]
        found: list[Best] = []
        was_training = module.training
        module.eval()
        try:
            for start in range(0, len(several), BATCH):
                batch = torch.stack([self.transform(image) for image in several[start : start + BATCH]])
                found += best_classes(module(batch.to(module.device)).float().softmax(dim=1), names, top_k)
        finally:
            module.train(was_training)
        return found if several is images else found[0]
