"""A run on digits that are laid out as ImageNet and its further sets, and its logits without a loader."""

import json
import shutil

import numpy as np
import torch
from harness import SMALL, ended, shared
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_transform

NAMES = [f"n{index:02d}" for index in range(12)]
BROKEN = "ILSVRC2012_val_00000005.JPEG"
"""The validation picture that cannot be read."""
PART = (2, 5, 11)
"""The classes of a set that lacks the others."""
# the tests' own process could not start others
CPU = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
]
TWO = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.strategy=ddp",
    "--data.batch_size=13",
]
"""Two processes, in batches that the pictures do not fill, and that Mixup could not pair."""


def write_sets(place):
    """The digits in ten classes, and 0 and 1 in negative in two more.

    Below `place`, data/ has 301 validation pictures, one of them unreadable, and real.json their labels by ReaL.
    Further sets: v2/ by the classes' indices, named/ by their names, part/ of some classes by their names.
    """
    digits = load_digits()
    pixels = digits.images * 255 / 16
    is_binary = digits.target < 2
    pictures = np.concatenate([pixels, 255 - pixels[is_binary]]).round().astype(np.uint8)
    labels = [*digits.target, *(digits.target[is_binary] + 10)]
    real = []
    # numbers do not follow the classes
    for number, index in enumerate(np.random.default_rng(0).permutation(len(labels)), 1):
        label = int(labels[index])
        if number <= 301:  # over two processes 151 and 150
            path = place / "data/val" / NAMES[label] / f"ILSVRC2012_val_{number:08d}.JPEG"
            real.append([[], [label], [label, (label + 3) % 12]][number % 3])
        elif number <= 500:
            path = place / "v2" / str(label) / f"{number}.jpeg"
        else:
            path = place / "data/train" / NAMES[label] / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures[index]).save(path, format="JPEG", quality=95)
        if path.name == BROKEN:
            path.write_bytes(b"no picture")
            real[-1] = []  # timm's evaluator knows of none
    (place / "real.json").write_text(json.dumps(real))
    for folder, labels_of_it in {"named": range(12), "part": PART}.items():
        (place / folder).mkdir()
        for label in labels_of_it:
            (place / folder / NAMES[label]).symlink_to(place / "v2" / str(label))


def copied(tmp_path_factory):
    """A folder with the sets and the run logs/mine on them, trained once for all of the tests' processes."""
    whole = shared(tmp_path_factory, "scored", train)
    return shutil.copytree(whole, tmp_path_factory.mktemp("copy") / "scored", symlinks=True)


def train(place):
    """The sets, and a run on them with a moving average."""
    write_sets(place)
    # the limit is one that evaluation does not heed
    words = """
        --data.root=data --data.num_workers=0 --data.eval_batch_size=32 --data.mixup=0 --data.cutmix=0
        --trainer.max_epochs=1 --trainer.limit_val_batches=9 --ema.decay=0.9
    """
    ended(place, "mine", [*SMALL, *CPU, *words.split()])


def logits_of(place, weights, paths):
    """[len(paths), 12], a picture at a time, without a loader."""
    from cait.data.reading import load_image
    from cait.model.weights import load_weights
    from cait.train.module import CaiTModule

    checkpoint = place / "logs/mine/checkpoints/best.ckpt"
    model = CaiTModule.load_from_checkpoint(checkpoint, map_location="cpu").model.eval()
    load_weights(model, checkpoint, ema=weights == "ema")
    transform = create_transform(16, interpolation="bicubic", crop_pct=1.0)
    with torch.no_grad():
        return torch.cat([model(transform(load_image(str(path)))[None]) for path in paths])


def validation(place):
    """The images that can be read, and their labels."""
    paths = [path for path in sorted((place / "data/val").glob("*/*")) if path.name != BROKEN]
    return paths, torch.tensor([int(path.parent.name.removeprefix("n")) for path in paths])
