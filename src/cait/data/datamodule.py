"""The LightningDataModule: builds the loaders and mixes the training batches."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from cait import cores, loops, plugins, references, seeds
from cait.ckpt import State
from cait.data.dataset import NO_LABEL, EvalImages, Samples, TrainImages, seed_generators
from cait.data.folder import FolderSource, Splits, not_listed
from cait.data.loader import (
    Loader,
    Loading,
    Order,
    Published,
    ShardSampler,
    TrainBatchSampler,
    worker_start,
)
from cait.data.reading import UnreadableImages
from cait.data.source import DataSource, open_source
from cait.data.table import write_held_out
from cait.data.transforms import Augmentation, Mixing, NormalizeAndErase, Preprocessing
from cait.errors import UserError, abbreviate
from cait.settings import Settings, check_names, values
from cait.signature import ReadsData

BATCH = "images a batch, over all processes"
ACCUMULATED = "batches accumulated, by epoch"
EVAL_BATCH = 128
"""Most images that are scored at once where `batch_size` counts those of all processes."""


@dataclass(frozen=True)
class DataSettings(*plugins.groups("data"), Mixing, Augmentation, Loading, Preprocessing, Splits):  # type: ignore[misc]
    """All settings of the data, those of extras too."""

    check_resume: bool = True
    """Refuse a checkpoint of a run with other data, preparation, seed or global batch."""
    class_names: list[str] | None = None
    """Names of the classes, in order, if no `root` lists them: `cait predict` takes the checkpoint's."""
    seed: int = 0
    """Seed of order, augmentation and mixing."""


PREPARATION = next(
    (kind for kind in plugins.groups("data") if issubclass(kind, Preprocessing)), Preprocessing
)
"""The settings that say how an image is prepared: an extra's that are derived from the core's, or the core's."""


class ImageNetDataModule(ReadsData, LightningDataModule):
    """ImageNet, a folder of class folders, a built-in data set or your own, under the paper's augmentation.

    Training batches are images [B, C, img_size, img_size] in float32, normalized, and labels: class indices [B] in
    int64, or after Mixup or CutMix class probabilities [B, num_classes]. If an image may have several classes, labels
    are 0 or 1 in float32, [B, num_classes], and -1 where an image cannot be read. Order, augmentation and mixing depend
    only on (seed, epoch, step); with the Trainer's `overfit_batches` every epoch repeats the first. Workers send uint8,
    which Lightning's hook after the transfer to the device normalizes, erases and mixes. Without a Trainer, after
    `setup("fit")`, the loaders normalize and erase, and the caller may mix.

    Args:
        first, settings: the fields of `DataSettings`, `root` first.

    Raises:
        UserError: settings that do not fit together, an unknown data set, or (in `num_classes`, `setup`)
            folders or data sets that are missing or cannot be used.
    """

    def __init__(self, *first: Any, **settings: Any) -> None:
        super().__init__()
        check_names(self, DataSettings, settings)
        chosen = DataSettings(*first, **settings)
        self.settings = chosen
        if chosen.in_chans != chosen.channels and not self.has_own_eval_transform:
            raise UserError(
                f"--model.fields.in_chans {chosen.in_chans}: images have 3 channels (RGB) or 1 (gray); "
                "others need data.reader, or transforms of your own"
            )
        self.root = chosen.root.rstrip("/") if "://" in chosen.root else Path(chosen.root)
        self.img_size = chosen.img_size
        self.num_workers = chosen.num_workers
        self.seed = chosen.seed
        self.check_resume = chosen.check_resume
        self.normalize_and_erase = NormalizeAndErase(chosen.mean, chosen.std)
        self.batch_size = chosen.batch_size
        most = EVAL_BATCH if chosen.global_batch else chosen.batch_size
        self.eval_batch_size = chosen.eval_batch_size or min(chosen.batch_size, most)
        self.unreadable_path: Path | None = None
        """CSV file of the images that cannot be read; the command line puts it into the run's folder."""
        self.validation_path: Path | None = None
        """CSV file in the run's folder, of the images that the run holds out."""
        self._own_epoch = -1

    # What a subclass may override

    def make_source(self) -> DataSource:
        """Return the data source; a subclass may override it. Called once, on first use."""
        return open_source(self.settings.root, **values(self.settings))

    def make_train_transform(self) -> Callable[[Any], Any]:
        """Return the training transform; a subclass may override it. Called once, on first use.

        A transform of your own takes a PIL image in RGB. It returns [3, img_size, img_size]: normalized float32, or
        uint8, which is normalized on the device. To stay exact on resume, it draws only from the global generators of
        `random`, numpy and torch: they are seeded for each image.
        """
        return self.pipeline or self.settings.train_transform(self.settings)

    def make_eval_transform(self) -> Callable[[Image.Image], Tensor]:
        """Return the evaluation transform, of the same input and output; a subclass may override it. Called once."""
        return self.settings.transform()

    @property
    def has_own_eval_transform(self) -> bool:
        """Whether a subclass changes the evaluation transform, so that `settings` do not describe it."""
        return bool(references.overridden(type(self), ImageNetDataModule, "make_eval_transform"))

    @property
    def preprocessing(self) -> Settings:
        """The settings that say how an image is prepared, as checkpoints hold them."""
        return values(self.settings, PREPARATION)

    # Classes and images

    @cached_property
    def source(self) -> DataSource:
        return self.make_source()

    @property
    def task(self) -> str | None:
        """What the labels are, see `cait.train.metrics.OneClass`; asked for when a network is built for the data."""
        return getattr(self.source, "task", None)

    @property
    def num_classes(self) -> int:
        """Number of classes, read from the folder or the data set; it needs no `setup`."""
        return len(self.class_names)

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their indices; listed once, because the model's head is made once."""
        return (
            self.source.class_names
            if self.settings.class_names is None
            else self.settings.class_names
        )

    @property
    def label_names(self) -> list[str]:
        """What the labels are called: the classes, or if an image may have several, sets of them."""
        return getattr(self.source, "label_names", self.class_names)

    @cached_property
    def _label_sets(self) -> Tensor | None:
        return getattr(self.source, "label_sets", None)

    def class_counts(self) -> list[int]:
        """Training images of each class. Raises UserError if the source knows them only by opening the images."""
        counts = torch.bincount(self.train_labels, minlength=len(self.label_names))
        if self._label_sets is not None:
            counts = counts.double() @ self._label_sets.cpu().double()
        return counts.long().tolist()

    @cached_property
    def order(self) -> Order:
        """The order of the training images: an extra's, the source's, or all shuffled.

        Raises UserError if an extra's order does not suit the source.
        """
        for group in plugins.groups("data"):
            if hasattr(group, "train_order"):
                order = group.train_order(self.settings, self)
                if order is not None:
                    return order
        return getattr(self.source, "order", None) or Published(len(self.source.train))

    @property
    def train_labels(self) -> Tensor:
        """The label of each training image [N]. Raises UserError if only opening every image tells it."""
        labels = getattr(self.source.train, "labels", None)
        if labels is None:
            raise UserError(
                f"the classes of {self.root} cannot be counted without opening every image; use a folder"
            )
        return torch.as_tensor(np.asarray(labels)).long()

    def summary(self) -> str:
        return (
            f"{self.root}: {len(self.source.train):,} training and {len(self.source.val):,} validation images, "
            f"{self.num_classes} classes{not_listed(getattr(self.source, 'left_out', {}))}"
        )

    # How images are read

    @cached_property
    def pipeline(self) -> Any:
        """What an extra brings to read training images in RGB faster than timm does, or None; `backend` may forbid it.

        It is made of the settings, and has
        - `open(raw, name, whole)`: opens an image for one crop, or decodes it whole for several;
        - a call with what that returns: gives pixels, uint8 [S, S, 3], and the box to erase, `Erased` or None;
        - `collate(workers, size)`: returns what makes a batch of `size` bytes in one of `workers` processes;
        - `name`, which checkpoints hold: a run does not resume with another;
        - `how_read`: what decodes, in a few words.
        """
        if self.settings.backend != "auto" or self.settings.reader:
            return None
        paths = plugins.of_kind("TRAIN_PIPELINE")
        return references.locate(paths[0])(self.settings) if paths else None

    @cached_property
    def train_transform(self) -> Any:
        return self.make_train_transform()

    @cached_property
    def eval_transform(self) -> Callable[[Image.Image], Tensor]:
        return self.make_eval_transform()

    def how_read(self) -> str:
        return getattr(self.train_transform, "how_read", self.settings.reader or "Pillow")

    # Lightning's hooks

    def prepare_data(self) -> None:
        """Write the embedded data set, or unpack ImageNet's archives; any number of processes may call it."""
        self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """List the images. Raises UserError if they cannot be used."""
        if not self.trainer:
            self.prepare_data()
        else:
            loops.keep_scored_images(self.trainer)
            if stage == "fit":
                self.share_batch(self.trainer)
        self._check_names()
        train = self.source.train
        val = self.source.val
        self.unreadable = UnreadableImages(
            self.unreadable_path, self.settings.bad_allowed(len(train) + len(val))
        )
        self.val_images = self._eval_images(val, self.unreadable)
        self.predict_samples = val
        if stage in ("fit", None):
            transform = self.train_transform
            opener = transform if transform is self.pipeline else self.settings
            self.train_images = TrainImages(
                train, opener.open, transform, self.seed, self.unreadable
            )
        if stage == "fit":
            _ = self.order  # refuses one that the source does not have

    def _check_names(self) -> None:
        """Raise UserError if `class_names` are too few, too many or in another order; other names are welcome."""
        names = self.class_names
        listed = self.source.class_names
        if len(names) != len(listed) or (names != listed and {*names} == {*listed}):
            raise UserError(
                f"class_names has {len(names)} names, {self.root} has {abbreviate(listed)}; leave it out"
            )

    def _eval_images(self, samples: Samples, unreadable: UnreadableImages) -> EvalImages:
        return EvalImages(samples, self.eval_transform, unreadable, self.settings)

    def train_dataloader(self) -> Loader:
        self._write_held_out()  # not earlier: by now a checkpoint of other data has been refused
        images = self.train_images
        size = self.batch_size
        rank, world_size = self.rank_and_world()
        sampler = TrainBatchSampler(
            len(images), size, self.seed, self.settings.repeats, rank, world_size, self.order
        )
        if len(sampler) == 0:
            raise UserError(
                f"{len(images)} training images do not fill one batch of {size} on {world_size} process(es); "
                "lower --data.batch_size"
            )
        settings = self._loading(size, 1 if self.train_transform is self.pipeline else 4)
        if self.trainer:
            settings["finish"] = self._with_seed
        return Loader(images, batch_sampler=sampler, position=self._position, **settings)

    def _with_seed(self, batch: Any) -> Any:
        """The training batch that comes next, with the generators seeded for hooks of a user's own on its way."""
        trainer: Any = self.trainer
        batch_idx = loops.next_batch(trainer)
        seed = seeds.batch_transfer(
            self.seed, trainer.current_epoch, batch_idx, trainer.global_rank
        )
        seed_generators(seed, trainer.strategy.root_device.type)
        return batch

    def keep_held_out(self) -> None:
        """Validate on the images that the run has held out so far, even if its folder has grown since."""
        path = self.validation_path
        source = self.source
        if path is None or not isinstance(source, FolderSource):
            return
        if path.is_file():
            source.keep(path)
            self.validation_path = None
        elif source.holds_out:
            rank_zero_info(
                f"{path} is gone: {self.root} is divided anew, and what was trained on may validate"
            )

    def _write_held_out(self) -> None:
        path = self.validation_path
        source = self.source
        rank, _ = self.rank_and_world()
        if path and rank == 0 and isinstance(source, FolderSource) and source.holds_out:
            write_held_out(path, source.val, self.root, self.label_names)

    def val_dataloader(self) -> Loader:
        return self._eval_loader(self.val_images)

    def predict_dataloader(self) -> Loader:
        """Loader of the images to predict. The label is NO_LABEL for an image that cannot be read."""
        images = self._eval_images(self.predict_samples, UnreadableImages())
        processes = self.rank_and_world()[1]
        if len(images) < processes:
            raise UserError(f"{len(images)} images cannot be shared out over {processes} processes")
        loader = self._eval_loader(images)
        loader.finish = loader.finish and self._normalized
        return loader

    def extra_val_dataloader(self, samples: Samples) -> Loader:
        """Loader of another evaluation set of the same classes, under the same transform."""
        unreadable = UnreadableImages(limit=self.settings.bad_allowed(len(samples)))
        loader = self._eval_loader(self._eval_images(samples, unreadable))
        # here, because the Trainer gets the loader without this data module's hooks
        loader.finish = self._labelled
        return loader

    def _eval_loader(self, images: EvalImages) -> Loader:
        if not len(images):
            raise UserError(f"no image of {self.root} is to be evaluated")
        sampler = ShardSampler(len(images), *self.rank_and_world())
        return Loader(
            images,
            sampler=sampler,
            batch_size=self.eval_batch_size,
            **self._loading(self.eval_batch_size),
        )

    def _loading(self, batch_size: int, bytes_a_value: int = 1) -> Settings:
        """Settings of a loader of images in uint8; `bytes_a_value` is 4 for float32."""
        workers = self.workers(self.trainer.num_devices if self.trainer else 1)
        size = batch_size * 3 * self.img_size**2 * bytes_a_value
        under_trainer = self.trainer is not None
        return worker_start(workers, under_trainer) | dict(
            collate_fn=self.pipeline.collate(workers, size) if self.pipeline else default_collate,
            finish=None if under_trainer else self._labelled,
            pin_memory=torch.cuda.is_available(),
        )

    def workers(self, processes: int) -> int:
        """Loader processes for each of the `processes` that train on this node."""
        return min(16, cores.share(processes)) if self.num_workers is None else self.num_workers

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalize and erase a batch on its device, and mix it if it is a training batch."""
        trainer = self.trainer
        if trainer and trainer.predicting:
            return self._normalized(batch)
        images, labels = self._labelled(batch)
        if trainer and trainer.training and self.settings.mixes:
            # Lightning has not counted this batch yet.
            seed = seeds.batch_mixing(self.seed, *self._position(), trainer.global_rank)
            return self.settings.mix(images, labels, self.num_classes, seed)
        return images, labels

    def _normalized(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels, *rest = batch
        if images.dtype == torch.uint8:
            images = self.normalize_and_erase(images, *rest)
        return images, labels

    def _labelled(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = self._normalized(batch)
        return images, self._targets(labels)

    def _targets(self, labels: Tensor) -> Tensor:
        """Labels [B], or the rows [B, num_classes] that they stand for if the source has a table of such rows."""
        if self._label_sets is None or labels is None:
            return labels
        self._label_sets = self._label_sets.to(labels.device)
        return self._label_sets[labels].where(labels[:, None] >= 0, NO_LABEL)

    # Processes and steps

    def rank_and_world(self) -> tuple[int, int]:
        trainer = self.trainer
        return (trainer.global_rank, trainer.world_size) if trainer else (0, 1)

    @property
    def world_batch_size(self) -> int:
        """Images of a batch, over all processes."""
        return self.batch_size * self.rank_and_world()[1]

    def share_batch(self, trainer: Trainer) -> None:
        """Make `batch_size` this process's part of a `global_batch`. Raises UserError if the parts are not even."""
        images = self.batch_size
        batches = 1
        if self.settings.global_batch:
            images = self.settings.batch_size
            batches = trainer.world_size * loops.accumulated(trainer, 0)
            self.batch_size = images // batches
            self.eval_batch_size = self.settings.eval_batch_size or self.batch_size
        is_odd = self.settings.mixes and self.batch_size % 2
        if is_odd and batches == 1:
            raise UserError(
                "Mixup and CutMix pair images: --data.batch_size must be even, or give --data.mixup 0 --data.cutmix 0; "
                f"got {images}"
            )
        if is_odd or images % batches:
            raise UserError(
                f"--data.batch_size {images} cannot be shared out over {batches} batches (processes × accumulation), "
                "of even numbers for Mixup and CutMix; change it, or set --data.global_batch false"
            )

    def _position(self) -> tuple[int, int]:
        """(epoch, next batch) of training; under `overfit_batches` each epoch is the first again."""
        trainer: Any = self.trainer
        if not trainer:
            self._own_epoch += 1
            return self._own_epoch, 0
        epoch = 0 if trainer.overfit_batches else trainer.current_epoch
        return epoch, loops.next_batch(trainer)

    # What checkpoints hold

    def state_dict(self) -> State:
        """The classes, and what a run's order and pixels depend on; checkpoints hold them."""
        depends_on = {
            "class of the data module": type(self).__qualname__,
            "seed": self.seed,
            "repeats": self.settings.repeats,
            "pixels by": self.pipeline.name if self.pipeline else "timm",
            BATCH: self.world_batch_size,
            ACCUMULATED: loops.accumulation(self.trainer) if self.trainer else {0: 1},
            "training pictures": len(self.source.train),
            "digest of the training pictures' names": self._train_digest,
            "validation pictures": len(self.source.val),
            "digest of the validation pictures' names": self._val_digest,
            "order of the images": self.order.name,
        }
        return {
            "class_names": self.class_names,
            "depends_on": depends_on,
            "world_batch_size": self.world_batch_size,
            "preprocessing": None if self.has_own_eval_transform else self.preprocessing,
        }

    def check_prepares(self, state: State) -> None:
        """Raise UserError if a run, by this part of its checkpoint, has an evaluation transform that is not here."""
        if state.get("preprocessing", {}) is None and not self.has_own_eval_transform:
            name = state["depends_on"].get("class of the data module")
            raise UserError(
                f"the run prepares images by its own {name}: take the script that has it in place of `cait`"
            )
        self._check_reader(state)

    def _check_reader(self, state: State) -> None:
        reader = (state.get("preprocessing") or {}).get("reader")
        if reader and "reader" not in self.preprocessing:
            raise UserError(
                f"the run reads images by {reader}, which needs an extra that is not here"
            )

    def load_state_dict(self, state_dict: State) -> None:
        """Refuse a checkpoint of other classes, and refuse to resume a run that was different.

        Raises UserError for other classes; with `check_resume` in training for other data, preparation, seed or batch.
        """
        if not (self.trainer and self.trainer.training):
            self._check_classes(state_dict["class_names"])
            self.check_prepares(state_dict)
            return
        self._check_classes(state_dict["class_names"], "; to train on these take --model.weights")
        self._check_reader(state_dict)
        before = _resume_facts(state_dict)
        for name, value in _resume_facts(self.state_dict()).items():
            saved = before.get(name, value)
            message = f"the checkpoint is of a run with other data or settings: {name} was {saved}, is {value}"
            if saved == value:
                continue
            if name == "pixels by" and value == "timm" and self.settings.backend == "auto":
                rank_zero_info(
                    f"the run's pixels were by {saved}, an extra that is gone; timm's are nearly the same"
                )
            elif self.check_resume:
                raise UserError(f"{message}; to continue anyway add --data.check_resume false")
            else:
                rank_zero_info(f"{message}; the run goes on")

    def _check_classes(self, saved: list[str], remedy: str = "") -> None:
        present = self.class_names
        if saved == present:
            return
        changes = {"missing": {*saved} - {*present}, "unknown": {*present} - {*saved}}
        problems = [
            f"{word}: {abbreviate(sorted(names))}" for word, names in changes.items() if names
        ]
        raise UserError(
            f"the checkpoint's {len(saved)} classes are not the {len(present)} of {self.root}: "
            f"{'; '.join(problems) or 'their order is another'}{remedy}"
        )

    def _digest(self, samples: Samples) -> str:
        """Digest of images' names below `root`; it takes a second for ImageNet."""
        prefix = os.path.join(self.root, "")
        digest = hashlib.sha256(getattr(self.source, "digest", b""))
        for index in range(len(samples)):
            name = samples.name(index).removeprefix(prefix)
            digest.update(f"{name}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]

    @cached_property
    def _train_digest(self) -> str:
        return self._digest(self.source.train)

    @cached_property
    def _val_digest(self) -> str:
        return self._digest(self.source.val)

    def facts(self) -> dict[str, str]:
        """Classes and images in words that differ if the data differ; processes on several machines compare them."""
        return {
            "classes": ", ".join(self.class_names),
            "training images": f"{len(self.source.train):,} ({self._train_digest})",
            "validation images": f"{len(self.source.val):,} ({self._val_digest})",
        }


def _resume_facts(state: State) -> State:
    """What a run that goes on must have as before: the images of a step, however they are divided over batches."""
    facts = state["depends_on"] | (state.get("preprocessing") or {})
    images = facts.pop(BATCH, None)
    accumulated = facts.pop(ACCUMULATED, None)
    if images and accumulated:
        facts["images a step, by epoch"] = {
            epoch: images * batches for epoch, batches in accumulated.items()
        }
    return facts
