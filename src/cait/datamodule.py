"""The LightningDataModule: builds the loaders and mixes the training batches."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform
from torch import Tensor

from cait import seeds
from cait.data import augment, cores, decode, digits, folder, imagenet, named
from cait.data.dataset import EvalPictures, Samples, TrainPictures, collate
from cait.data.faults import Faults
from cait.data.sampler import Loader, ShardSampler, TrainBatchSampler, TrainLoader
from cait.data.shared import HELD, SharedBatches
from cait.errors import UserError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
MixMode = Literal["batch", "pair", "elem"]
Backend = Literal["auto", "nvimgcodec", "torchvision", "pillow", "timm"]
HOW_READ = {
    "nvimgcodec": "of JPEG files nvImageCodec decodes the crop",
    "torchvision": "torchvision decodes JPEG files (nvidia-nvimgcodec-cu13 would be faster)",
    "pillow": "Pillow decodes",
    None: "timm's own transform",
}
CHECKED_PICTURES = 20_000
"""Data sets up to this size have every file's header looked at before training, a matter of a second."""


class ImageNetDataModule(LightningDataModule):
    """ImageNet, any folder of class folders, or a data set with a name, under the paper's augmentation.

    Training batches are images [B, 3, img_size, img_size] in float32, normalised, and labels: class
    indices [B] in int64, or after Mixup or CutMix class probabilities [B, num_classes]. Order,
    augmentation and mixing depend on (seed, epoch, step) alone. With the Trainer's `overfit_batches` every
    epoch is the first again: the same images, augmented and mixed alike. The workers hand on uint8; batches are
    normalised, erased and mixed in Lightning's hook after the transfer to the device. `setup("fit")` and
    the loaders work without a Trainer too, and then finish the batches but for Mixup and CutMix, which
    are up to the caller.

    Args:
        root: `root/train/<class>/*` and `root/val/<class>/*`, or `root/<class>/*`, of which
            `val_fraction` is then held out. At "data/digits" scikit-learn's digits are written first. A
            folder with ImageNet's archives as they are downloaded is unpacked first. Or the name of a
            data set: "torch/cifar10", torchvision's, or "hfds/uoft-cs/cifar10", Hugging Face's.
        train_split: name of the training folder in `root`, or of the data set's split, of several "train+val".
        val_split: the same for validation. A data set without a split of its own for it, as CIFAR, has
            "test": the best checkpoint is then chosen by what it is scored on, so report the last.
        data_dir: where a data set with a name lies; None means data/<set>, Hugging Face's own cache for theirs.
        download: fetch a data set with a name that is not there.
        input_key: column of the pictures in a Hugging Face set.
        target_key: column of the classes in a Hugging Face set.
        val_fraction: share of each class that is held out where `root` has no training folder.
        img_size: side of the square images in pixels.
        batch_size: images in a batch of one process; even with Mixup or CutMix.
        global_batch: make `batch_size` the images of one optimiser step instead, over all processes and accumulated
            batches, so that a run does not depend on the number of processes.
        eval_batch_size: the same for validation, test and prediction; None means `batch_size`.
        backend: what reads the training pictures. "nvimgcodec" decodes of a JPEG file the crop alone,
            "torchvision" and "pillow" decode all of it; these three give the same pixels, and "auto" takes the
            first that is installed. Their draws are timm's, their pixels nearly: see `cait.data.augment.Augment`.
            "timm" is timm's own transform, to the last bit. Evaluation has timm's pixels in any case.
        decode_once: have the repeats of a picture in one process, which then decodes it once. Not as published: see
            `cait.data.sampler.TrainBatchSampler`. On one process that is so anyway.
        num_workers: loader processes for each training process, each on one core; None means its share of
            the cores, see `cait.data.cores.share`, at most 16.
        prefetch: batches that each of them has ready ahead.
        repeats: repeated augmentation: how often each sampled picture stands in an epoch, each time
            augmented anew; the epoch is as long as without.
        scale: range of the area of the random crop, as a share of the picture.
        ratio: range of the aspect ratio (width / height) of the random crop.
        hflip: probability of a horizontal flip.
        auto_augment: timm's policy string, as "rand-m9-mstd0.5-inc1" (RandAugment) or "3a" (ThreeAugment of
            DeiT III: grey, solarised or blurred; with color_jitter 0.3 there); None turns it off.
        color_jitter: strength of brightness, contrast and saturation jitter, or three numbers for the three of
            them, and a fourth of at most 0.5 for the hue. As in timm it comes after "3a", or without
            auto_augment, and is left out beside any other policy.
        erase_prob: probability of erasing a box of pixels.
        interpolation: timm's name of the resampling filter, for training and evaluation.
        mixup: alpha of Mixup's beta distribution; 0 turns it off.
        cutmix: alpha of CutMix's beta distribution; 0 turns it off.
        mix_prob: probability that a batch (a pair, an image) is mixed at all.
        mix_switch_prob: probability of CutMix where both are on.
        mix_mode: one draw for the whole "batch", for each "pair" of images, or for each image ("elem"). Image i of
            a batch of B is always mixed with image B - 1 - i.
        crop_pct: evaluation resizes the shorter side to img_size / crop_pct, then crops the centre.
        mean: of the normalisation, for each channel, of pixels in [0, 1].
        std: of the normalisation.
        predict_root: folder with the pictures to predict, however deep; None means the validation set.
        max_bad_share: share of the pictures that may be unreadable. Up to it others stand in for them in
            training, they are left out of validation, and `faults_path` lists them; past it the run fails.
        check_resume: refuse a checkpoint of a run with other data, seed or global batch.
        class_names: names of the classes, in order, where there is no `root` to read them off: `cait predict`
            takes the checkpoint's.
        seed: of order, augmentation and mixing.

    Raises:
        UserError: settings that do not fit together, an unknown data set, or (in `num_classes`, `setup`)
            unusable folders and sets that are not there.
    """

    def __init__(
        self,
        root: str = "data/imagenet",
        train_split: str = "train",
        val_split: str = "val",
        data_dir: str | None = None,
        download: bool = False,
        input_key: str = "image",
        target_key: str = "label",
        val_fraction: float = 0.1,
        img_size: int = 224,
        batch_size: int = 128,
        global_batch: bool = False,
        eval_batch_size: int | None = None,
        backend: Backend = "auto",
        decode_once: bool = False,
        num_workers: int | None = None,
        prefetch: int = 2,
        repeats: int = 3,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        auto_augment: str | None = "rand-m9-mstd0.5-inc1",
        color_jitter: float | Sequence[float] | None = None,
        erase_prob: float = 0.25,
        interpolation: str = "bicubic",
        mixup: float = 0.8,
        cutmix: float = 1.0,
        mix_prob: float = 1.0,
        mix_switch_prob: float = 0.5,
        mix_mode: MixMode = "batch",
        crop_pct: float = 1.0,
        mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
        predict_root: str | None = None,
        max_bad_share: float = 0.01,
        check_resume: bool = True,
        class_names: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self._named = named.is_named(root)
        self._open_settings: dict[str, Any] = dict(
            folder=Path(data_dir) if data_dir else None, download=download, input_key=input_key, target_key=target_key
        )
        self.train_split, self.val_split, self.val_fraction = train_split, val_split, val_fraction
        self.img_size = img_size
        self.batch_size = batch_size
        self._global_batch = batch_size if global_batch else None
        self._given_eval_batch = eval_batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.decode_once, self.num_workers, self.prefetch = decode_once, num_workers, prefetch
        self.repeats = repeats
        self.predict_root = Path(predict_root) if predict_root else None
        self._class_names = class_names
        self.seed = seed
        self.max_bad_share, self.check_resume = max_bad_share, check_resume
        self.faults_path: Path | None = None
        """CSV file for the pictures that cannot be read; the command line puts it into the run's folder."""
        if batch_size < 1 or self.eval_batch_size < 1 or repeats < 1:
            raise UserError("batch_size, eval_batch_size and repeats must be at least 1")
        if num_workers is not None and num_workers < 0:
            raise UserError(f"num_workers must be at least 0, got {num_workers}")
        if prefetch < 1:
            raise UserError(f"prefetch must be at least 1, got {prefetch}")
        if backend not in get_args(Backend):
            raise UserError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
        if not 0 <= max_bad_share < 1:
            raise UserError(f"max_bad_share must be in [0, 1), got {max_bad_share}")
        if not 0 < val_fraction < 1:
            raise UserError(f"val_fraction must be above 0 and below 1, got {val_fraction}")
        if not 0 < crop_pct <= 1:
            raise UserError(f"crop_pct must be above 0 and at most 1, got {crop_pct}")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise UserError(f"mean and std take three numbers each, std above 0; got {list(mean)} and {list(std)}")
        if interpolation not in INTERPOLATIONS:
            raise UserError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {interpolation!r}")
        for name, probability in (
            ("hflip", hflip),
            ("erase_prob", erase_prob),
            ("mix_prob", mix_prob),
            ("mix_switch_prob", mix_switch_prob),
        ):
            if not 0 <= probability <= 1:
                raise UserError(f"{name} must be in [0, 1], got {probability}")
        if not 0 < scale[0] <= scale[1] <= 1:
            raise UserError(f"scale must be two shares above 0 and at most 1, the smaller first, got {list(scale)}")
        if not 0 < ratio[0] <= ratio[1]:
            raise UserError(f"ratio must be two numbers above 0, the smaller first, got {list(ratio)}")
        if isinstance(color_jitter, Sequence):
            in_range = (
                len(color_jitter) in (3, 4) and min(color_jitter) >= 0 and max(color_jitter[3:], default=0) <= 0.5
            )
        else:
            in_range = color_jitter is None or color_jitter >= 0
        if not in_range:
            raise UserError(
                "color_jitter must be a number of at least 0, or three, or four of which the last, "
                f"for the hue, is at most 0.5; got {color_jitter}"
            )
        if color_jitter is not None and auto_augment and "3a" not in auto_augment:
            rank_zero_info(f"color_jitter {color_jitter} is left out beside auto_augment {auto_augment}, as in timm")
        if mixup < 0 or cutmix < 0:
            raise UserError("mixup and cutmix must be at least 0")
        if mix_mode not in get_args(MixMode):
            raise UserError(f"mix_mode must be one of {', '.join(get_args(MixMode))}, got {mix_mode!r}")
        self.mixes = mixup > 0 or cutmix > 0
        if self.mixes and batch_size % 2:
            raise UserError(f"Mixup and CutMix pair the images of a batch: batch_size must be even, got {batch_size}")
        self._mixing = dict(
            mixup_alpha=mixup, cutmix_alpha=cutmix, prob=mix_prob, switch_prob=mix_switch_prob, mode=mix_mode
        )
        common: dict[str, Any] = dict(input_size=(3, img_size, img_size), interpolation=interpolation)
        common.update(mean=tuple(mean), std=tuple(std))
        training: dict[str, Any] = dict(
            scale=scale, ratio=ratio, hflip=hflip, auto_augment=auto_augment, color_jitter=color_jitter
        )
        training.update(re_prob=erase_prob, re_mode="pixel", **common)
        self.decoder: decode.Decoder | None = None
        try:
            if backend == "timm":
                self.train_transform: Any = create_transform(is_training=True, **training)
            else:
                self.decoder = decode.choose(None if backend == "auto" else backend)
                self.train_transform = augment.Augment(**training)
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(f"bad augmentation settings (auto_augment {auto_augment!r}): {error}") from error
        self.eval_transform = create_transform(is_training=False, crop_pct=crop_pct, normalize=False, **common)
        self.finish = augment.Finish(mean, std)
        self._own_epoch = -1
        self._digested: str | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes, read off the folder or the data set; it needs no `setup`."""
        return len(self.class_names)

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their indices; listed once, as the model's head is made once."""
        if self._class_names is not None:
            return self._class_names
        if self.root == digits.ROOT and not digits.is_written(self.root):  # before prepare_data
            return digits.CLASS_NAMES
        if self._named:
            return self._sets[0].class_names
        return self._class_folders

    @cached_property
    def _class_folders(self) -> list[str]:
        self.prepare_data()  # now, for the model's head wants their number before Lightning calls it
        return folder.class_names(self.root, self.train_split)

    def prepare_data(self) -> None:
        """Write the embedded data set, or unpack ImageNet's archives; any number of processes may call it."""
        if self.root == digits.ROOT:
            digits.write_digits(self.root)
        elif not self._named:  # those are fetched when they are opened, which `cait predict` can do without
            imagenet.unpack(self.root, self.train_split, self.val_split)

    @cached_property
    def _sets(self) -> tuple[named.NamedSet, named.NamedSet]:
        """The training and the validation set of a data set with a name."""
        splits = (self.train_split, self.val_split)
        train, val = (named.open_set(str(self.root), split, **self._open_settings) for split in splits)
        if train.class_names != val.class_names:
            raise UserError(f"{self.root}: {train.split} and {val.split} do not have the same classes")
        return train, val

    def setup(self, stage: str | None = None) -> None:
        """List the pictures. Raises UserError where they cannot be used."""
        if self.trainer is None:
            self.prepare_data()
        if stage == "fit" and self.trainer is not None:
            self.share_batch(self.trainer)
        if stage == "predict" and self.predict_root is not None:
            self.predict_samples: Samples = folder.scan_flat(self.predict_root)
            return
        train: Samples
        val: Samples
        if self._named:
            train, val = self._sets
        else:
            train, val = folder.scan(
                self.root, self._class_folders, self.train_split, self.val_split, self.val_fraction
            )
        self.faults = Faults(self.faults_path, int(self.max_bad_share * (len(train) + len(val))))
        opened = partial(decode.open_picture, decoder=self.decoder) if self.decoder else _open_whole
        self.train_pictures = TrainPictures(train, opened, self.train_transform, self.seed, self.faults)
        self.val_pictures = EvalPictures(val, self.eval_transform, self.faults)
        self.predict_samples = val
        self.batch_mixer = Mixup(num_classes=self.num_classes, label_smoothing=0.0, **self._mixing)
        if stage == "fit":
            for samples in (train, val):
                if isinstance(samples, folder.Files) and len(train) + len(val) <= CHECKED_PICTURES:
                    folder.check_headers(samples, self.faults)
            rank_zero_info(
                f"{self.root}: {len(train):,} training and {len(val):,} validation pictures, "
                f"{self.num_classes} classes; {HOW_READ[self.decoder]}"
            )

    def share_batch(self, trainer: Trainer) -> None:
        """Make `batch_size` this process's part of a global batch; for any other it stays.

        Raises:
            UserError: the parts are not even.
        """
        if self._global_batch is None:
            return
        parts = trainer.world_size * trainer.accumulate_grad_batches
        self.batch_size, left = divmod(self._global_batch, parts)
        if left or self.batch_size < 1 or (self.mixes and self.batch_size % 2):
            raise UserError(
                f"--data.batch_size {self._global_batch} cannot be shared out over {parts} batches (processes × "
                f"accumulation){', each of an even number for Mixup and CutMix' if self.mixes else ''}; "
                "change it or the number of devices, or set --data.global_batch false"
            )
        self.eval_batch_size = self._given_eval_batch or self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """The classes, and what the order and the pixels of a run depend on; kept in its checkpoints."""
        trainer = self.trainer
        depends = {
            "seed": self.seed,
            "repeats": self.repeats,
            "decode_once": self.decode_once,
            "pixels by": "cait" if self.decoder else "timm",
            "images a batch, over all processes": self.batch_size * (trainer.world_size if trainer else 1),
            "batches accumulated": trainer.accumulate_grad_batches if trainer else 1,
            "training pictures": len(self.train_pictures),
            "digest of the training pictures' names": self._digest(),
        }
        return {"class_names": self.class_names, "depends_on": depends}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint of other classes, and to go on with a run that was another.

        Raises:
            UserError: the classes differ; or in training, unless `check_resume` is off, data, seed or batch.
        """
        theirs, ours = state_dict["class_names"], self.class_names
        if theirs != ours:
            odd = folder.some(sorted(set(theirs) ^ set(ours)))
            raise UserError(f"the checkpoint's {len(theirs)} classes are not the {len(ours)} of {self.root}: {odd}")
        if not self.check_resume or self.trainer is None or not self.trainer.training:
            return
        for name, value in self.state_dict()["depends_on"].items():
            theirs = state_dict["depends_on"].get(name, value)
            if theirs != value:
                raise UserError(
                    f"the checkpoint is of a run with other data or settings: {name} was {theirs}, is {value}; "
                    "to go on all the same add --data.check_resume false"
                )

    def _digest(self) -> str:
        if self._digested is None:  # once; ImageNet's takes a second
            start = len(str(self.root)) + 1
            digest = hashlib.sha256()
            samples = self.train_pictures.samples
            for index in range(len(samples)):
                digest.update(f"{samples.name(index)[start:]}\n".encode())
            self._digested = digest.hexdigest()[:16]
        return self._digested

    def train_dataloader(self) -> TrainLoader:
        rank, world_size = self._place()
        sampler = TrainBatchSampler(
            len(self.train_pictures), self.batch_size, self.seed, self.repeats, rank, world_size, self.decode_once
        )
        if len(sampler) == 0:
            raise UserError(
                f"{len(self.train_pictures)} training pictures do not fill one batch of "
                f"{self.batch_size} on {world_size} process(es); lower --data.batch_size"
            )
        collate_fn, itemsize = (augment.collate, 1) if self.decoder else (collate, 4)  # timm's transform gives float32
        settings = self._loading(collate_fn, self.batch_size, itemsize)
        return TrainLoader(self.train_pictures, batch_sampler=sampler, position=self._position, **settings)

    def val_dataloader(self) -> Loader:
        return self._eval_loader(self.val_pictures, "validation")

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> Loader:
        return self._eval_loader(EvalPictures(self.predict_samples, self.eval_transform), "prediction")

    def further_dataloader(self, samples: Samples) -> Loader:
        """Loader of another evaluation set of the same classes, under the same transform.

        It finishes its batches itself: given to the Trainer beside the data module, it comes without its hooks.
        """
        faults = Faults(None, int(self.max_bad_share * len(samples)))
        loader = self._eval_loader(EvalPictures(samples, self.eval_transform, faults), "further")
        loader.finish = self._finished
        return loader

    def _eval_loader(self, pictures: EvalPictures, purpose: str) -> Loader:
        rank, world_size = self._place()
        if len(pictures) < world_size:  # a process without a batch would not join in adding up the figures
            raise UserError(f"{len(pictures)} {purpose} pictures cannot be shared out over {world_size} processes")
        settings = self._loading(collate, self.eval_batch_size)
        sampler = ShardSampler(len(pictures), rank, world_size)
        return Loader(pictures, batch_size=self.eval_batch_size, sampler=sampler, **settings)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Finish a batch on its device, and mix it if it is a training one, with timm's Mixup and CutMix.

        Label smoothing is left to the loss: it is linear, so smoothing the mixed labels is what timm
        does in smoothing before it mixes.
        """
        images, labels = self._finished(batch)
        trainer = self.trainer
        if trainer is None or not trainer.training or not self.mixes:
            return images, labels
        # timm draws from numpy's global generator. `ready` counts this epoch's batches before this one.
        epoch, step = self._position()
        np.random.seed(seeds.batch_mixing(self.seed, epoch, step, trainer.global_rank))
        return self.batch_mixer(images, labels)

    def _finished(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels, *erased = batch
        return (self.finish(images, *erased) if images.dtype == torch.uint8 else images), labels

    def _place(self) -> tuple[int, int]:
        """(rank, world size)"""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _position(self) -> tuple[int, int]:
        """(epoch, next batch) of training; to overfit on some batches each epoch is the first again."""
        if self.trainer is not None:
            overfits = self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
            epoch = 0 if overfits else self.trainer.current_epoch
            return epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._own_epoch += 1
        return self._own_epoch, 0

    def workers(self, processes: int) -> int:
        """Loader processes for each of the training processes on this node."""
        return self.num_workers if self.num_workers is not None else min(16, cores.share(processes))

    def _loading(self, collate_fn: Callable[..., Any], batch_size: int, itemsize: int = 1) -> dict[str, Any]:
        workers = self.workers(self.trainer.num_devices if self.trainer is not None else 1)
        batches = None
        if workers and SharedBatches.possible():
            batches = SharedBatches(workers, self.prefetch + HELD, batch_size * 3 * self.img_size**2 * itemsize)
        return dict(
            num_workers=workers,
            collate_fn=partial(collate_fn, batches=batches),
            # Workers inherit the shared memory; Python's own default is no longer a fork.
            multiprocessing_context="fork" if batches else None,
            prefetch_factor=self.prefetch if workers else None,
            finish=None if self.trainer is not None else self._finished,
            persistent_workers=workers > 0,
            worker_init_fn=partial(_init_worker, under_trainer=self.trainer is not None),
            pin_memory=torch.cuda.is_available(),
        )


def _open_whole(source: folder.Source, name: str, whole: bool) -> Image.Image:
    return folder.load_rgb(source, name)


def _init_worker(worker_id: int, under_trainer: bool) -> None:
    # A scheduler signals the whole group of processes; workers are needed until the step is finished, and the
    # Trainer ends them. A script of one's own ends them with SIGTERM, when it comes to its end.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if under_trainer else ():
        signal.signal(signum, signal.SIG_IGN)
    # Workers share the cores among themselves; threads of their own would only get in each other's way.
    torch.set_num_threads(1)
