"""The training batches of any step, as the network sees them: read again from (seed, epoch, batch, process)."""

import math
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Trainer
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.ops import masks_to_boxes

from cait import loops, seeds
from cait.ckpt import State
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import TrainImages
from cait.data.loader import Key, Loader
from cait.errors import UserError

Box = tuple[int, int, int, int]
"""top, left, height, width, in pixels"""


@dataclass
class SeenImage:
    """One image of a batch, and what was done to it.

    `share` is its own part of the label; the rest is that of `partner`, the place of another image in the batch.
    `mixed` is "mixup", "cutmix" or "". `box` is what CutMix pasted from the partner, `erased` what was erased.
    `index` counts the training images. `repeat` counts the times that the epoch has had this one before. `instead_of`
    is the unreadable image that this one replaces, or "".
    """

    epoch: int
    batch: int
    process: int
    place: int
    index: int
    repeat: int
    label: int
    class_name: str
    file: str
    instead_of: str
    share: float = 1.0
    mixed: str = ""
    partner: int | None = None
    box: Box | None = None
    erased: Box | None = None


@dataclass
class Batch:
    """images float32 [B, 3, S, S], normalized, erased and mixed; targets [B] or [B, num_classes]; and B `seen`."""

    images: Tensor
    targets: Tensor
    seen: list[SeenImage]


class TrainerAt:
    """A Trainer as the data module sees it before one training batch of one process."""

    training = True

    def __init__(self, trainer: Trainer, epoch: int, batch: int, process: int) -> None:
        self._trainer = trainer
        self.current_epoch = epoch
        self.global_rank = process
        current = SimpleNamespace(ready=batch)
        self.fit_loop = SimpleNamespace(
            epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=current))
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class TrainingBatches:
    """The batches of a run by (epoch, batch), both counted from 0, without a model.

    On the same kind of device, the pixels are those of the training, bit for bit: the device draws the noise of erased
    boxes. Raises UserError if the data cannot be used, or is not what the checkpoint was trained on.

    Args:
        data: the data module; its loader is then read in this process.
        trainer: with the run's settings; it need not train.
        state: the data module's part of a checkpoint, None if there is none.
    """

    def __init__(
        self, data: ImageNetDataModule, trainer: Trainer, state: State | None = None
    ) -> None:
        self.data = data
        self.trainer = trainer
        self._move_to(0, 0, 0)
        data.share_batch(trainer)
        data.prepare_data()
        data.setup()
        if state is not None:
            data.load_state_dict(state)
        whole = len(self._loader())
        limit = trainer.limit_train_batches  # a number, or a share
        self.batches_per_epoch = min(limit, whole) if isinstance(limit, int) else int(limit * whole)
        self.steps = math.inf
        """Optimizer steps of the whole run; infinity if nothing ends it."""
        if trainer.max_epochs not in (None, -1):
            self.steps = sum(map(self._steps_of, range(trainer.max_epochs)))
        if trainer.max_steps != -1:
            self.steps = min(self.steps, trainer.max_steps)

    def _move_to(self, epoch: int, batch: int, process: int) -> None:
        self.data.trainer = TrainerAt(self.trainer, epoch, batch, process)  # type: ignore[assignment]

    def _loader(self) -> Loader:
        loader = self.data.train_dataloader()
        if not isinstance(loader, Loader):
            raise UserError(
                f"replay reads cait's own loader, not the {type(loader).__name__} of your data module"
            )
        return loader

    def check(self, wanted: range) -> None:
        """Raises UserError if the run does not have these steps."""
        if wanted[-1] >= self.steps:
            step = wanted[0] if wanted[0] >= self.steps else wanted[-1]
            raise UserError(
                f"there is no step {step:,}: the run has {self.steps:,}, from 0 to {self.steps - 1:,}"
            )

    def _steps_of(self, epoch: int) -> int:
        return math.ceil(self.batches_per_epoch / loops.accumulated(self.trainer, epoch))

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """(epoch, batch) of the batches of an optimizer step, several if gradients accumulate."""
        epoch = 0
        while step >= (steps := self._steps_of(epoch)):
            epoch += 1
            step -= steps
        count = loops.accumulated(self.trainer, epoch)
        return [
            (epoch, batch)
            for batch in range(self.batches_per_epoch)[step * count : (step + 1) * count]
        ]

    def read(self, epoch: int, batch: int, process: int) -> Batch:
        """The batch of one process, on its device."""
        self._move_to(epoch, batch, process)
        data = self.data
        data.num_workers = 0
        loader: Any = self._loader()
        raw = next(iter(loader))
        keys = next(iter(loader.batch_sampler))  # of this batch, as the loader left it
        erased = self._erased(keys, raw)
        name = data.train_images.samples.name
        seen = []
        for place, (key, label) in enumerate(zip(keys, raw[1].tolist(), strict=True)):
            _, wanted, repeat = key
            index = _index(data.train_images, key)
            seen.append(
                SeenImage(
                    *data._position(),
                    process,
                    place,
                    index,
                    repeat,
                    label,
                    data.label_names[label],
                    name(index),
                    name(wanted) if index != wanted else "",
                    erased=erased.get(place),
                )
            )
        raw = loader.finish(raw)  # what came between has drawn numbers
        moved = data.on_before_batch_transfer(self.trainer.precision_plugin.convert_input(raw), 0)
        moved = data.transfer_batch_to_device(moved, self.trainer.strategy.root_device, 0)
        images, targets = data.on_after_batch_transfer(moved, 0)
        if data.settings.mixes:
            self._note_mixing(seen, images.shape[-1], process)
        return Batch(images, targets, seen)

    def _erased(self, keys: list[Key], raw: Any) -> dict[int, Box]:
        """The erased box by place in the batch."""
        transform = self.data.train_transform
        if transform is self.data.pipeline:
            return {place: tuple(box) for place, (_, *box) in raw[2]}
        erasing = getattr(transform, "transforms", [None])[-1]
        if not isinstance(erasing, RandomErasing):
            return {}
        probability = erasing.probability
        erasing.probability = 0.0  # the last draws of all: nothing else changes
        intact = self.data.train_images.__getitems__(keys)
        erasing.probability = probability
        boxes = {}
        for place, (after, (before, _)) in enumerate(zip(raw[0], intact, strict=True)):
            box = _bounds((after != before).any(dim=0))
            if box:
                boxes[place] = box
        return boxes

    def _note_mixing(self, seen: list[SeenImage], size: int, process: int) -> None:
        """Mix a probe as the batch was mixed: the first half black, the other white, image i with the label i."""
        data = self.data
        number = len(seen)
        before = torch.zeros(number, 1, size, size)
        before[number // 2 :] = 1
        seed = seeds.batch_mixing(data.seed, *data._position(), process)
        after, shares = data.settings.mix(before.clone(), torch.arange(number), number, seed)
        for place, image in enumerate(seen):
            change = (after[place, 0] - before[place, 0]).abs()
            if change.any():
                image.mixed = "mixup"
                image.partner = number - 1 - place
                image.share = shares[place, place].item()
                if (change.round() == change).all():  # pasted whole
                    image.mixed = "cutmix"
                    image.box = _bounds(change > 0)


def _index(images: TrainImages, key: Key) -> int:
    """Index of the image that was read for a key; call it after reading."""
    tried = (images.index(key, attempt) for attempt in count())
    return next(
        index for index in tried if images.samples.name(index) not in images.unreadable.seen
    )


def _bounds(mask: Tensor) -> Box | None:
    """The box around the true values of a mask [S, S]; None if there are none."""
    if not mask.any():
        return None
    left, top, right, bottom = map(int, masks_to_boxes(mask[None])[0])
    return top, left, bottom + 1 - top, right + 1 - left
