"""The LightningDataModule: builds the loaders and mixes the training batches."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from cait import disk, seeds
from cait.data import augment, cores, folder
from cait.data.augment import Augment, NormalizeAndErase
from cait.data.dataset import EvalImages, Samples, TrainImages, Unlabelled, collate
from cait.data.global_batch import batches_a_step
from cait.data.mixing import Mixing, MixMode
from cait.data.sampler import POWERS, Balance, Loader, Order, ShardSampler, TrainBatchSampler, TrainLoader
from cait.data.shared import HELD, SharedBatches
from cait.data.source import DataSource, FolderSource, open_source
from cait.data.transforms import Augmentation, Backend, Preprocessing, TrainCrop, choose_backend
from cait.data.unreadable import UnreadableImages
from cait.errors import UserError
from cait.extras.recipe import copies
from cait.extras.recipe.copies import Copies
from cait.extras.shards.source import ShardSamples, ShardSource

HOW_READ = {
    "nvimgcodec": "nvImageCodec decodes only the crop of JPEG files",
    "torchvision": "torchvision decodes JPEG files (nvidia-nvimgcodec-cu13 would be faster)",
    "pillow": "Pillow decodes",
    "timm": "timm's own transform",
}
ORDER = "order of the images"
"""Earlier checkpoints lack this key: their order is "published"."""
CHECKED_IMAGES = 20_000
"""In data sets up to this size every file's header is checked before training, which takes about a second, and copies
are made. In larger ones a copy is made when its image is first read."""


class ImageNetDataModule(LightningDataModule):
    """ImageNet, a folder of class folders, a built-in data set or your own, under the paper's augmentation.

    Training batches are images [B, 3, img_size, img_size] in float32, normalised, and labels: class indices
    [B] in int64, or after Mixup or CutMix class probabilities [B, num_classes]. Order, augmentation and
    mixing depend only on (seed, epoch, step). With the Trainer's `overfit_batches` every epoch repeats the
    first: the same images, augmented and mixed alike. Workers send uint8; Lightning's hook after the transfer
    to the device normalises, erases and mixes. `setup("fit")` and the loaders also work without a Trainer:
    then the loaders normalise and erase, and the caller may mix.

    A subclass changes the transforms or the source by overriding `make_train_transform`,
    `make_eval_transform` or `make_source`.

    Args:
        root: `root/train/<class>/*` and `root/val/<class>/*`, or `root/<class>/*`, where `val_fraction` of each
            class is held out. At "data/digits" scikit-learn's digits are written first. ImageNet's downloaded
            archives in the folder are unpacked first. Or shards that `cait shards` has made: their folder,
            "s3://bucket/folder" or "gs://bucket/folder". Or the name of a built-in data set: torchvision's
            "torch/cifar10" or Hugging Face's "hfds/uoft-cs/cifar10". Or a data set of your own,
            "package.module:factory": the factory is called with split=<train_split or val_split> and returns a
            map-style data set with `classes`, the names of the classes. Its items are pairs of an image (PIL image,
            path or open file) and a class index, or -1 for an image that validation does not count. Every process
            calls the factory.
        train_split: name of the training folder in `root`, or of the data set's split; "train+val" joins two.
        val_split: the same for validation. A data set without a validation split, such as CIFAR, has "test":
            then the best checkpoint is chosen on the images that score it, so report the last one.
        data_dir: where a built-in data set is; None means data/<set>, Hugging Face's own cache for theirs. For
            shards in a bucket it is the folder of their cache; None means data/cache.
        download: fetch a built-in data set that is missing.
        input_key: column of the images in a Hugging Face set.
        target_key: column of the classes in a Hugging Face set.
        cache_gb: largest size of the shards' cache, in 10⁹ bytes; the processes of a machine share it.
        val_fraction: share of each class that is held out if `root` has no training folder.
        val_list: CSV file whose column `path` names the images to hold out of such a `root`, such as a run's
            validation.csv. Then `val_fraction` is not used.
        img_size: side of the square images in pixels.
        batch_size: images in a batch of one process; even with Mixup or CutMix.
        global_batch: make `batch_size` the images of one optimizer step, over all processes and accumulated
            batches, so that a run does not depend on the number of processes. A number is the images of one
            optimizer step instead: `batch_size` stays the batch of one process, and the Trainer accumulates as
            many batches as it takes. An epoch then has only whole steps.
        eval_batch_size: the same for validation, test and prediction; None means `batch_size`.
        backend: what reads the training images. "nvimgcodec" decodes only the crop of JPEG files,
            "torchvision" and "pillow" decode all of it. These three give the same pixels, and "auto" takes the
            first that is installed. They make timm's random draws and nearly its pixels: see
            `cait.data.augment.Augment`. "timm" is timm's own transform, to the last bit. Evaluation always uses
            timm's pixels.
        decode_once: keep the repeats of an image in one process, which decodes it once. Not as published: see
            `cait.data.sampler.TrainBatchSampler`. It changes nothing with one process.
        order: "published" draws images from the whole set. "windowed" is for shards in a bucket that is larger than
            the cache: it draws from `window` chunks at a time, see `cait.data.sampler.TrainBatchSampler`.
        window: chunks that the "windowed" order draws from.
        num_workers: loader processes for each training process, each on one core; None means its share of
            the cores, see `cait.data.cores.share`, at most 16.
        prefetch: batches that each worker has ready.
        balance: draw the images of small classes more often, and those of large ones less: "full" gives all classes
            the same share of an epoch, "sqrt" shares in the ratio of the square roots of their numbers of images.
        repeats: repeated augmentation: how often each sampled image occurs in an epoch, each time
            augmented anew; the epoch stays as long as without it.
        train_crop: "resized" is a random crop resized to the image size. "simple" is DeiT III's simple random crop:
            the shorter side resized, 4 pixels of reflection added around, a random square cut out.
        scale: range of the area of the "resized" crop, as a share of the image.
        ratio: range of the aspect ratio (width / height) of the "resized" crop.
        hflip: probability of a horizontal flip.
        auto_augment: timm's policy string, such as "rand-m9-mstd0.5-inc1" (RandAugment) or "3a" (DeiT III's
            ThreeAugment: grey, solarised or blurred; there with color_jitter 0.3); None turns it off.
        augment_ops: augmentation operations of your own, as "package.module:function". Each takes and returns a
            PIL image of the crop's size, after auto_augment. A run stays exact if they draw only from the global
            generators of `random`, numpy and torch, which are seeded for each image.
        color_jitter: strength of brightness, contrast and saturation jitter, or three numbers, one for each,
            and a fourth of at most 0.5 for the hue. As in timm it is used only after "3a" or without auto_augment.
        erase_prob: probability of erasing a box of pixels.
        exif_orientation: turn an image upright as its EXIF data say, as all viewers do. torchvision's ImageFolder and
            timm's loaders do not, and the published recipes do not: configs/imagenet turns it off.
        background: colour behind transparent pixels, as "white" or "#8090a0". None drops the alpha channel, as
            those loaders do, and shows whatever colour the file holds there.
        shrink: halve an image as it is read for as long as its shorter side keeps this many pixels, in training and
            evaluation. None leaves it as it is.
        copies_dir: folder for copies of the images that `shrink` has halved, so that each is read from its file only
            once. None keeps none. The pixels are the same, and the folder may be removed at any time. It is for
            folders of images; those of other sources are read anew.
        interpolation: timm's name of the resampling filter, for training and evaluation.
        mixup: alpha of Mixup's beta distribution; 0 turns it off.
        cutmix: alpha of CutMix's beta distribution; 0 turns it off.
        mix_prob: probability that a batch (a pair, an image) is mixed at all.
        mix_switch_prob: probability of CutMix if both are on.
        mix_mode: one draw for the whole "batch", for each "pair" of images, or for each image ("elem"). Image i of
            a batch of B is always mixed with image B - 1 - i.
        crop_pct: evaluation resizes the shorter side to img_size / crop_pct, then crops the centre.
        mean: mean for the normalisation, for each channel, of pixels in [0, 1].
        std: standard deviation for the normalisation, likewise.
        predict_root: folder of the images to predict, with its subfolders; None means the validation set.
        max_bad_share: share of the images that may be unreadable. In training others stand in for them, validation
            leaves them out, and `unreadable_path` lists them. If there are more, the run fails.
        check_resume: refuse a checkpoint of a run with other data, seed or global batch.
        class_names: names of the classes, in order, if there is no `root` to list them from: `cait predict`
            takes the checkpoint's.
        seed: seed of order, augmentation and mixing.

    Raises:
        UserError: settings that do not fit together, an unknown data set, or (in `num_classes`, `setup`)
            folders or data sets that are missing or cannot be used.
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
        cache_gb: float = 20.0,
        val_fraction: float = 0.1,
        val_list: str | None = None,
        img_size: int = 224,
        batch_size: int = 128,
        global_batch: bool | int = False,
        eval_batch_size: int | None = None,
        backend: Backend = "auto",
        decode_once: bool = False,
        order: Order = "published",
        window: int = 8,
        num_workers: int | None = None,
        prefetch: int = 2,
        balance: Balance | None = None,
        repeats: int = 3,
        train_crop: TrainCrop = "resized",
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        auto_augment: str | None = "rand-m9-mstd0.5-inc1",
        augment_ops: list[str] | None = None,
        color_jitter: float | Sequence[float] | None = None,
        erase_prob: float = 0.25,
        exif_orientation: bool = True,
        background: str | None = "white",
        shrink: int | None = None,
        copies_dir: str | None = None,
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
        if not root:
            raise UserError("root is empty; name a folder or a data set with --data.root")
        self.root, self.img_size, self.seed = root.rstrip("/") if "://" in root else Path(root), img_size, seed
        sets = (train_split, val_split, val_fraction, val_list, data_dir, download, input_key, target_key)
        self._open_source = partial(open_source, root, *sets, cache_gb, order == "windowed")
        self.order, self.window, self.balance = order, window, balance
        self.preprocessing = Preprocessing(
            img_size, interpolation, crop_pct, mean, std, folder.Reading(exif_orientation, background, shrink)
        )
        self.augmentation = Augmentation(
            train_crop, scale, ratio, hflip, auto_augment, augment_ops, color_jitter, erase_prob
        )
        self.mixing = Mixing(mixup, cutmix, mix_prob, mix_switch_prob, mix_mode)
        self.normalize_and_erase = NormalizeAndErase(mean, std)
        self.backend = choose_backend(backend)
        self.batch_size, self.eval_batch_size = batch_size, batch_size if eval_batch_size is None else eval_batch_size
        self._step_images = None if isinstance(global_batch, bool) else global_batch
        self._global_batch = batch_size if global_batch is True else None
        self._given_eval_batch, self._accumulated = eval_batch_size, 0
        self._shared_with: Trainer | None = None
        self.decode_once, self.num_workers, self.prefetch, self.repeats = decode_once, num_workers, prefetch, repeats
        self.max_bad_share, self.check_resume = max_bad_share, check_resume
        self.copies_dir = Path(copies_dir) if copies_dir else None
        self.predict_root = Path(predict_root) if predict_root else None
        self._class_names = class_names
        self.unreadable_path: Path | None = None
        """CSV file of the images that cannot be read; the command line puts it into the run's folder."""
        self.validation_path: Path | None = None
        """CSV file of the images that the run holds out, if it does; likewise in the run's folder."""
        self.announces = True
        """Whether `setup` prints what it has found; the command line does so itself."""
        self._check_settings(val_fraction)
        self._own_epoch = -1

    def _check_settings(self, val_fraction: float) -> None:
        for name in ("batch_size", "eval_batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self._step_images is not None and self._step_images < 1:
            raise UserError(f"global_batch must be true, false or at least 1, got {self._step_images}")
        if self.num_workers is not None and self.num_workers < 0:
            raise UserError(f"num_workers must be at least 0, got {self.num_workers}")
        if self.balance is not None and (self.balance not in POWERS or self.order != "published"):
            raise UserError(f"balance is sqrt, full or null, for the published order; got {self.balance!r}")
        if self.window < 1:
            raise UserError(f"window must be at least 1, got {self.window}")
        if self.prefetch < 1:
            raise UserError(f"prefetch must be at least 1, got {self.prefetch}")
        if not 0 <= self.max_bad_share < 1:
            raise UserError(f"max_bad_share must be in [0, 1), got {self.max_bad_share}")
        if not 0 < val_fraction < 1:
            raise UserError(f"val_fraction must be above 0 and below 1, got {val_fraction}")
        if self.mixing.is_on and self.batch_size % 2:
            raise UserError(
                f"Mixup and CutMix pair the images of a batch: batch_size must be even, got {self.batch_size}"
            )

    def make_source(self) -> DataSource:
        """Return the data source; override it in a subclass. Called once, on first use."""
        return self._open_source()

    def make_train_transform(self) -> Callable[[Any], Any]:
        """Return the training transform; override it in a subclass. Called once, on first use.

        A transform of your own takes a PIL image in RGB, which Pillow decodes. It returns float32
        [3, img_size, img_size] that is normalised, or uint8 of the same shape, which the data module normalises on
        the device. To stay exact on resume, it draws only from the global generators of `random`, numpy and
        torch: they are seeded for each image.
        """
        return self.augmentation.transform(self.preprocessing, self.backend)

    def make_eval_transform(self) -> Callable[[Image.Image], Tensor]:
        """Return the evaluation transform; override it in a subclass. Called once, on first use.

        It takes and returns what a training transform of your own does, without randomness.
        """
        return self.preprocessing.transform()

    @property
    def has_own_eval_transform(self) -> bool:
        """Whether a subclass changes the evaluation transform, so that `preprocessing` does not describe it."""
        return type(self).make_eval_transform is not ImageNetDataModule.make_eval_transform

    @cached_property
    def source(self) -> DataSource:
        return self.make_source()

    @cached_property
    def train_transform(self) -> Callable[[Any], Any]:
        return self.make_train_transform()

    @cached_property
    def eval_transform(self) -> Callable[[Image.Image], Tensor]:
        return self.make_eval_transform()

    @property
    def num_classes(self) -> int:
        """Number of classes, read from the folder or the data set; it needs no `setup`."""
        return len(self.class_names)

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their indices; listed once, because the model's head is made once."""
        return self._class_names if self._class_names is not None else self.source.class_names

    def prepare_data(self) -> None:
        """Write the embedded data set, or unpack ImageNet's archives; any number of processes may call it."""
        self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """List the images. Raises UserError if they cannot be used."""
        if self.trainer is None:
            self.prepare_data()
        if stage == "fit" and self.trainer is not None:
            self.share_batch(self.trainer)
        if stage == "predict" and self.predict_root is not None:
            self.predict_samples: Samples = folder.scan_flat(self.predict_root)
            return
        train, val = self.source.train, self.source.val
        if self.num_classes != len(self.source.class_names):
            there = len(self.source.class_names)
            raise UserError(f"class_names has {self.num_classes} names, {self.root} has {there} classes; leave it out")
        self.unreadable = UnreadableImages(self.unreadable_path, int(self.max_bad_share * (len(train) + len(val))))
        small_train, small_val = self._copied(train), self._copied(val)
        self.val_images = EvalImages(small_val, self.eval_transform, self.unreadable, self.preprocessing.reading)
        self.predict_samples = small_val
        if stage in ("fit", None):
            transform = self.train_transform
            open_image = transform.open if isinstance(transform, Augment) else self._open_rgb
            self.train_images = TrainImages(small_train, open_image, transform, self.seed, self.unreadable)
        if stage == "fit":
            for samples in (train, val):
                if isinstance(samples, folder.Files) and len(train) + len(val) <= CHECKED_IMAGES:
                    folder.check_headers(samples, self.unreadable)
            if self.announces:
                rank_zero_info(f"{self.summary()}; {self.how_read()}")
            self._check_order()
            kept = [samples for samples in (small_train, small_val) if isinstance(samples, Copies)]
            if len(train) + len(val) <= CHECKED_IMAGES:
                copies.make(kept, *self._rank_and_world(), self._processes())

    def _copied(self, samples: Samples) -> Samples:
        """The images, the large ones as their small copies if copies are kept."""
        reading = self.preprocessing.reading
        if self.copies_dir is None or reading.shrink is None or not isinstance(samples, folder.Files):
            return samples
        return Copies(samples, reading, self.copies_dir)

    def _check_order(self) -> None:
        """Refuse an order that the source does not have, and tell what the published one costs over a network."""
        chunks, source = self._chunks, self.source
        if not isinstance(source, ShardSource):
            return
        if chunks is not None:
            source.check_room(self.window + 1)
        elif not source.all_fit:
            rank_zero_info(
                f"{self.root} does not fit into the cache, so each training image is a request of its own; "
                "see --data.order windowed and --data.cache_gb"
            )

    def _write_held_out(self) -> None:
        """List the images that the run has held out of its folder, so that others can hold out the same."""
        source = self.source
        if self.validation_path is None or (self.trainer is not None and not self.trainer.is_global_zero):
            return
        if isinstance(source, FolderSource) and source.holds_out:
            start = len(str(self.root)) + 1
            rows = [(path[start:], self.class_names[label]) for path, label in source.val]
            disk.write_csv(self.validation_path, ["path", "class"], rows)
        else:
            self.validation_path.unlink(missing_ok=True)  # from before the run was resumed with other data

    def summary(self) -> str:
        """The data set in a line."""
        train, val = len(self.source.train), len(self.source.val)
        return f"{self.root}: {train:,} training and {val:,} validation images, {self.num_classes} classes"

    def how_read(self) -> str:
        """What decodes the training images."""
        own = type(self).make_train_transform is not ImageNetDataModule.make_train_transform
        if own:
            return "a training transform of your own"
        how = HOW_READ[self.backend if self.backend == "timm" or self._may_be_jpeg() else "pillow"]
        shrink = self.preprocessing.reading.shrink
        return how if shrink is None else f"Pillow halves large images down to {shrink} pixels; of others {how}"

    def _may_be_jpeg(self) -> bool:
        """Whether any of up to a thousand training images has a name that ends as JPEG files do, or no suffix."""
        samples = self.source.train
        kinds = {Path(samples.name(i)).suffix.lower() for i in range(0, len(samples), 1 + len(samples) // 1000)}
        return bool(kinds & {".jpg", ".jpeg", ""})

    def check_channels(self, channels: int) -> None:
        """Raise UserError if our transforms cannot give a network images of so many channels."""
        if channels != 3 and not self.has_own_eval_transform:
            raise UserError(
                f"--model.fields.in_chans {channels}: images are read as RGB, so a network takes 3 channels, for grey "
                "images too; others need a data module with transforms of your own"
            )

    def share_batch(self, trainer: Trainer) -> None:
        """Divide a global batch: make `batch_size` this process's part of it, or have the Trainer accumulate.

        It does nothing where `global_batch` is false.

        Raises:
            UserError: the parts are not even.
        """
        if self._step_images is not None and self._shared_with is not trainer:  # it may be called twice
            self._shared_with = trainer
            self._accumulated = batches_a_step(self._step_images, self.batch_size, self.mixing.is_on, trainer)
            trainer.accumulate_grad_batches = self._accumulated
        if self._global_batch is None:
            return
        parts = trainer.world_size * trainer.accumulate_grad_batches
        self.batch_size, left = divmod(self._global_batch, parts)
        if left or self.batch_size < 1 or (self.mixing.is_on and self.batch_size % 2):
            raise UserError(
                f"--data.batch_size {self._global_batch} cannot be shared out over {parts} batches (processes × "
                f"accumulation){', each of an even number for Mixup and CutMix' if self.mixing.is_on else ''}; "
                "change it or the number of devices, or set --data.global_batch false"
            )
        self.eval_batch_size = self._given_eval_batch or self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """The classes, and what a run's order and pixels depend on; checkpoints hold them.

        `load_state_dict` compares by these names, so they must stay as they are.
        """
        trainer = self.trainer
        accumulated = trainer.accumulate_grad_batches if trainer else 1
        whole_steps = self._accumulated or 1  # that many batches count as one
        depends = {
            "class of the data module": type(self).__qualname__,
            "seed": self.seed,
            "repeats": self.repeats,
            "decode_once": self.decode_once,
            "pixels by": "timm" if self.backend == "timm" else "cait",
            "images a batch, over all processes": self.batch_size
            * (trainer.world_size if trainer else 1)
            * whole_steps,
            "batches accumulated": accumulated // whole_steps,
            "training pictures": len(self.source.train),
            "digest of the training pictures' names": self._digest,
            ORDER: self._order,
        }
        return {
            "class_names": self.class_names,
            "depends_on": depends,
            "accumulated": accumulated,
            "preprocessing": None if self.has_own_eval_transform else self.preprocessing.settings(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint of other classes, and refuse to resume a run that was different.

        Raises:
            UserError: the classes differ; in training also data, seed or batch, unless `check_resume` is off.
        """
        theirs, ours = state_dict["class_names"], self.class_names
        if theirs != ours:
            odd = folder.abbreviate(sorted(set(theirs) ^ set(ours)))
            raise UserError(f"the checkpoint's {len(theirs)} classes are not the {len(ours)} of {self.root}: {odd}")
        if not self.check_resume or self.trainer is None or not self.trainer.training:
            return
        for name, value in self.state_dict()["depends_on"].items():
            theirs = state_dict["depends_on"].get(name, "published" if name == ORDER else value)
            if theirs != value:
                raise UserError(
                    f"the checkpoint is of a run with other data or settings: {name} was {theirs}, is {value}; "
                    "to continue anyway add --data.check_resume false"
                )

    @cached_property
    def _order(self) -> str:
        """The order of the images, and what it depends on besides seed and repeats."""
        chunks = self._chunks
        if chunks is None:
            return f"balanced {self.balance}" if self.balance else "published"
        layout = hashlib.sha256(chunks.numpy().tobytes()).hexdigest()[:16]
        return f"windowed over {self.window} of the chunks {layout}"

    @cached_property
    def _chunks(self) -> Tensor | None:
        """The chunk of each training image, if the order goes by chunks. Raises UserError if there are none."""
        samples = self.source.train
        if self.order == "published":
            return None
        if not isinstance(samples, ShardSamples):
            raise UserError(f"--data.order windowed is for shards, {self.root} is none; `cait shards` makes them")
        return torch.from_numpy(samples.chunk_of).long()

    @cached_property
    def _digest(self) -> str:
        """Digest of the training images' names below `root`; it takes a second for ImageNet."""
        start = len(str(self.root)) + 1
        digest = hashlib.sha256()
        samples = self.source.train
        for index in range(len(samples)):
            digest.update(f"{samples.name(index)[start:]}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]

    def train_dataloader(self) -> TrainLoader:
        self._write_held_out()  # not earlier: by now a checkpoint of other data has been refused
        rank, world_size = self._rank_and_world()
        how = (self.batch_size, self.seed, self.repeats, rank, world_size, self.decode_once)
        labels = self._labels() if self.balance else None
        sampler = TrainBatchSampler(len(self.train_images), *how, self._chunks, self.window, labels, self.balance)
        sampler.accumulated = self._accumulated or 1
        if len(sampler) == 0:
            raise UserError(
                f"{len(self.train_images)} training images do not fill one batch of "
                f"{self.batch_size} on {world_size} process(es); lower --data.batch_size"
            )
        ours = isinstance(self.train_transform, Augment)
        # Other transforms may give float32.
        settings = (
            self._loading(augment.collate, self.batch_size) if ours else self._loading(collate, self.batch_size, 4)
        )
        return TrainLoader(self.train_images, batch_sampler=sampler, position=self._position, **settings)

    def _labels(self) -> Tensor:
        """The class of each training image. Raises UserError if the source knows them only by opening the images."""
        labels = getattr(self.source.train, "labels", None)
        if labels is None:
            raise UserError(f"the classes of {self.root} cannot be counted without opening every image; use a folder")
        return torch.tensor(labels)

    def class_counts(self) -> list[int]:
        """Training images of each class. Raises UserError as `_labels` does."""
        return torch.bincount(self._labels(), minlength=self.num_classes).tolist()

    def val_dataloader(self) -> Loader:
        return self._eval_loader(self.val_images, "validation")

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> Loader:
        """Loader of the images to predict. The label is 0, or NO_LABEL for an image that cannot be read."""
        samples = Unlabelled(self.predict_samples)
        unreadable = UnreadableImages(None, len(samples))
        images = EvalImages(samples, self.eval_transform, unreadable, self.preprocessing.reading)
        return self._eval_loader(images, "prediction")

    def extra_val_dataloader(self, samples: Samples) -> Loader:
        """Loader of another evaluation set of the same classes, under the same transform.

        It normalises its batches itself, because the Trainer gets it without the data module and its hooks.
        """
        unreadable = UnreadableImages(None, int(self.max_bad_share * len(samples)))
        images = EvalImages(samples, self.eval_transform, unreadable, self.preprocessing.reading)
        loader = self._eval_loader(images, "extra validation")
        loader.finish = self._normalized
        return loader

    def _eval_loader(self, images: EvalImages, purpose: str) -> Loader:
        rank, world_size = self._rank_and_world()
        if len(images) < world_size:  # a process without a batch would not join in adding up the metrics
            raise UserError(f"{len(images)} {purpose} images cannot be shared out over {world_size} processes")
        settings = self._loading(collate, self.eval_batch_size)
        sampler = ShardSampler(len(images), rank, world_size)
        return Loader(images, batch_size=self.eval_batch_size, sampler=sampler, **settings)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise and erase a batch on its device, and mix it if it is a training batch."""
        images, labels = self._normalized(batch)
        trainer = self.trainer
        if trainer is None or not trainer.training or not self.mixing.is_on:
            return images, labels
        epoch, step = self._position()  # Lightning has not counted this batch yet
        return self.mixing(
            images, labels, self.num_classes, seeds.batch_mixing(self.seed, epoch, step, trainer.global_rank)
        )

    def _normalized(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels, *erased = batch
        return (self.normalize_and_erase(images, *erased) if images.dtype == torch.uint8 else images), labels

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _open_rgb(self, raw: folder.RawImage, name: str, whole: bool) -> Image.Image:
        return folder.load_rgb(raw, name, self.preprocessing.reading)

    def _position(self) -> tuple[int, int]:
        """(epoch, next batch) of training; under `overfit_batches` each epoch is the first again."""
        if self.trainer is not None:
            overfits = self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
            epoch = 0 if overfits else self.trainer.current_epoch
            return epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._own_epoch += 1
        return self._own_epoch, 0

    def workers(self, processes: int) -> int:
        """Loader processes for each of the `processes` that train on this node."""
        return self.num_workers if self.num_workers is not None else min(16, cores.share(processes))

    def _loading(self, collate_fn: Callable[..., Any], batch_size: int, itemsize: int = 1) -> dict[str, Any]:
        """Settings of a loader; `itemsize` is the bytes of a value in its images."""
        processes, batches = self._processes(), None
        workers = processes["num_workers"]
        if workers and SharedBatches.possible():
            batches = SharedBatches(workers, self.prefetch + HELD, batch_size * 3 * self.img_size**2 * itemsize)
        return processes | dict(
            collate_fn=partial(collate_fn, batches=batches),
            prefetch_factor=self.prefetch if workers else None,
            finish=None if self.trainer is not None else self._normalized,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def _processes(self) -> dict[str, Any]:
        """A loader's settings of its processes."""
        workers = self.workers(self.trainer.num_devices if self.trainer is not None else 1)
        return dict(
            num_workers=workers,
            # Workers inherit the memory for batches by a fork, which is no longer Python's default.
            multiprocessing_context="fork" if workers and SharedBatches.possible() else None,
            worker_init_fn=partial(_init_worker, under_trainer=self.trainer is not None),
        )


def _init_worker(worker_id: int, under_trainer: bool) -> None:
    # A scheduler signals the whole group of processes. Under the Trainer workers ignore that, because the current
    # step still needs them, and the Trainer ends them. Without a Trainer, SIGTERM ends them when the script ends.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if under_trainer else ():
        signal.signal(signum, signal.SIG_IGN)
    # Workers share the cores among themselves; threads of their own would only get in each other's way.
    torch.set_num_threads(1)
