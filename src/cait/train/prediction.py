"""`module.predict("photo.jpg")`: classify images with a module that was loaded from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cait.data.dataset import channels_last
from cait.data.reading import AS_SEEN, RawImage, check_raw, load_rgb
from cait.data.transforms import NormalizeAndErase, Preprocessing
from cait.errors import UserError
from cait.model.network import for_inference
from cait.settings import group
from cait.train.metrics import Best

BATCH = 64
USED = ("forward", "predict_step", "predict")
"""The methods of a module that a prediction runs through."""


class Twin:
    """A module's twin for inference: all is shared but the network, which is a copy, made anew for other weights.

    A subclass with a `forward` or `predict_step` of its own, which may use parts of the network, gets a plain copy.
    """

    def __init__(self) -> None:
        self._made: Any = None
        self._of: Any = None

    def __reduce__(self) -> Any:
        return Twin, ()  # a copied or pickled module makes its own

    def of(self, module: Any) -> Any:
        tensors = [*module.model.parameters(), *module.model.buffers()]
        state = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        if self._of != state:
            twin, network = copy.copy(module), copy.deepcopy(module.model).eval()
            kinds = [next(kind for kind in type(module).__mro__ if name in vars(kind)) for name in USED]
            if len({*kinds}) == 1:
                network = for_inference(network)
            twin._modules = module._modules | {"model": network}
            twin.training = False
            self._made, self._of = twin, state
        return self._made


def transform(module: Any, image: RawImage) -> Tensor:
    """The network's input [3, img_size, img_size] for a path, an open file or a PIL image, prepared as in evaluation.

    Raises:
        UserError: the image cannot be read, or the checkpoint does not say how images are prepared.
    """
    check_raw(image, "the image")
    if module.eval_transform is None:
        if not module.preprocessing:
            raise UserError('nothing says how images are prepared: load the run with cait.load("logs/NAME")')
        known = group(Preprocessing, module.preprocessing)
        module.reading, module.eval_transform = module.reading or known.reading, known.transform()
    pixels = module.eval_transform(load_rgb(image, reading=module.reading or AS_SEEN))
    if pixels.dtype != torch.uint8:
        return pixels
    return NormalizeAndErase(module.hparams["mean"], module.hparams["std"])(channels_last(pixels)[None])[0]


@torch.no_grad()
def predict(module: Any, images: RawImage | Sequence[RawImage], top_k: int | None = None) -> Best | list[Best]:
    """The most probable classes of an image, or of each of several; with several labels an image all it seems to have.

    Args:
        module: a `cait.train.module.CaiTModule`.
        images: a path, an open file or a PIL image; or a list of them.
        top_k: how many classes to return at most; None means 5, or with several labels an image no limit.

    Returns:
        [{"class": "cat", "index": 3, "probability": 0.91}, ...], or a list of such lists for a list of images.

    Raises:
        UserError: an image cannot be read or is none, or nothing says how images are prepared.
    """
    several: Any = images if isinstance(images, list | tuple) else [images]
    names = module.class_names or [f"class {index}" for index in range(module.num_classes)]
    found: list[Best] = []
    module.twin = module.twin or Twin()
    quick = module.twin.of(module)
    for start in range(0, len(several), BATCH):
        batch = torch.stack([module.transform(image) for image in several[start : start + BATCH]])
        found += module.task.best(quick.predict_step((batch.to(module.device),), 0), names, top_k)
    return found if several is images else found[0]
