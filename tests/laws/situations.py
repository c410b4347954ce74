"""Situations of a run that cover all pairs of settings: what varies, what makes no sense together, how to make one."""

import csv
import functools
import itertools
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
from allpairspy import AllPairs
from PIL import Image

HERE = Path(__file__).parent


class Situation(NamedTuple):
    """A value of each factor; see `FACTORS`."""

    images: str
    network: str
    weights: str
    resumed: str
    mode: str
    place: str
    devices: str
    average: str
    precision: str
    weighting: str
    batch: str
    eval_batch: str
    workers: str
    mixing: str
    metric: str
    unreadable: str
    copies: str
    teacher: str
    verb: str


FACTORS: dict[str, Sequence[str]] = {
    "images": ("folders", "held out", "named", "table", "groups", "several", "own"),
    "network": ("cait", "batchnorm", "own", "solved", "frozen", "lower"),
    "weights": ("none", "file", "run"),
    "resumed": ("no", "amid", "extended", "grown"),
    "mode": ("color", "gray", "16 bit", "transparent", "planes"),
    "place": ("absolute", "dot", "spaces", "accents"),
    "devices": ("1", "2", "3", "launcher"),  # which starts two, whatever the settings say
    "average": ("none", "0.9", "0.9999"),
    "precision": ("32", "bf16-mixed"),
    "weighting": ("none", "balance", "class_weights"),
    "batch": ("4", "10"),  # of 48 images to train on: one divides them, the other does not
    "eval_batch": ("same", "5"),
    "workers": ("0", "2"),
    "mixing": ("off", "on"),
    "metric": ("none", "own"),
    "unreadable": ("no", "yes"),
    "copies": ("no", "yes"),
    "teacher": ("none", "run", "renamed"),
    "verb": ("predict", "page", "onnx", "card", "demo"),  # asked for the classes of the images too
}
SENSELESS: list[tuple[str, dict[str, set[str]]]] = [
    (
        "a data set of one's own is a module, not a folder",
        {"images": {"own"}, "place": {"dot", "spaces", "accents"}},
    ),
    ("its images do not grow", {"images": {"own"}, "resumed": {"grown"}}),
    ("images are drawn by their one class", {"images": {"several"}, "weighting": {"balance"}}),
    (
        "class_weights is for several classes per image",
        {"images": {*FACTORS["images"]} - {"several"}, "weighting": {"class_weights"}},
    ),
    (
        "its classes are counted only by opening its images",
        {"images": {"own"}, "weighting": {"balance"}},
    ),
    (
        "a teacher judges one class per image",
        {"images": {"several"}, "teacher": {"run", "renamed"}},
    ),
    (
        "so there is none with class_weights",
        {"weighting": {"class_weights"}, "teacher": {"run", "renamed"}},
    ),
    ("a head is solved on the features of weights", {"network": {"solved"}, "weights": {"none"}}),
    ("what is frozen came from weights", {"network": {"frozen", "lower"}, "weights": {"none"}}),
]
"""Values that are not combined, and why."""


def makes_sense(values: Sequence[str]) -> bool:
    """Whether the first factors may have these values together."""
    known = dict(zip(FACTORS, values, strict=False))
    return not any(
        all(known.get(name) in given for name, given in rule.items()) for _, rule in SENSELESS
    )


def pairs(situation: Sequence[str]) -> set[frozenset[tuple[str, str]]]:
    """Every two of its factors with their values."""
    return {*map(frozenset, itertools.combinations(zip(FACTORS, situation, strict=True), 2))}


def all_pairs() -> set[frozenset[tuple[str, str]]]:
    """Those that make sense."""
    values = [(name, value) for name, values in FACTORS.items() for value in values]
    two = (
        frozenset(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]
    )
    return {pair for pair in two if makes_sense([dict(pair).get(name, "") for name in FACTORS])}


def situations(seed: int = 0) -> Iterator[Situation]:
    """Situations in which each pair of values occurs that makes sense; another seed combines them otherwise."""
    draw, missing = random.Random(seed), all_pairs()
    while missing:  # a draw of AllPairs leaves some out where values are not combined
        shuffled = [draw.sample(values, len(values)) for values in FACTORS.values()]
        for values in AllPairs(shuffled, filter_func=makes_sense):
            if new := missing & pairs(values):
                missing -= new
                yield Situation(*values)


# Images

CLASSES = ["1e3", "no", "ö b", "null"]
"""Names that YAML or a table could take for something else; the digits 0 to 3."""
TRAIN, VAL = (18, 10, 12, 8), (6, 4, 5, 3)
"""Images of each class."""


@functools.cache
def _digits() -> dict[int, list[np.ndarray]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    noise = np.random.default_rng(0)
    return {
        label: [
            np.clip(image * 11 + noise.normal(0, 60, image.shape), 0, 255).astype(np.uint8)
            for image in digits.images[digits.target == label]
        ]
        for label in range(len(CLASSES))
    }


def picture(label: int, number: int, mode: str) -> Image.Image | np.ndarray:
    """A noisy digit of 12 × 12 pixels. A transparent one is black everywhere: only on white can it be seen.

    Planes are four, [12, 12, 4].
    """
    gray = Image.fromarray(_digits()[label][number]).resize((12, 12), Image.Resampling.BICUBIC)
    if mode == "color":
        return Image.merge(
            "RGB",
            [
                gray,
                gray.point(lambda value: value // 2),
                gray.transpose(Image.Transpose.ROTATE_180),
            ],
        )
    if mode == "planes":
        pixels = np.asarray(gray).astype(np.uint16) * 257
        return np.dstack([pixels, pixels // 2, pixels[::-1, ::-1], np.full_like(pixels, 7)])
    if mode == "16 bit":
        return Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    if mode == "transparent":
        black = Image.new("L", gray.size)
        return Image.merge("RGBA", [black, black, black, gray])
    return gray


@dataclass
class Made:
    """A situation as it lies on the disk."""

    situation: Situation
    folder: Path
    """Where `cait` is called."""
    root: Path
    """Of the images, from there."""
    arguments: list[str] = field(default_factory=list)
    """Of `cait fit`, without the run's name and the way it ends."""
    groups: dict[str, str] = field(default_factory=dict)
    """The group of each image, by its name."""

    @property
    def suffix(self) -> str:
        """Of the images' files."""
        return ".tif" if self.situation.mode == "planes" else ".png"

    @property
    def holds_out(self) -> bool:
        """Whether `cait` divides the images itself."""
        return self.situation.images in ("held out", "named", "table", "groups", "several")


def _save(made: Made, place: Path, label: int, numbers: Iterator[int], count: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for number in (next(numbers) for _ in range(count)):
        path, image = (
            place / f"{label}-{number:03d}{made.suffix}",
            picture(label, number, made.situation.mode),
        )
        if isinstance(image, np.ndarray):
            tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
        else:
            image.save(path)
        if made.situation.images == "named":
            made.groups[path.name] = path.name[:4]


def _group(name: str) -> str:
    """Frames of a scene: the first class has one small scene and a large one, the others many."""
    label, _, number = Path(name).stem.partition("-")
    if not number.isdecimal():
        return name  # a copy's own
    return f"{label}/{min(int(number) // 3, 1) if label == '0' else int(number) // 2}"


def _labels(made: Made) -> None:
    """Write labels.csv for the images that are there."""
    situation, rows = made.situation, []
    for label, name in enumerate(CLASSES):
        for path in sorted((made.folder / made.root / "all").glob(f"{label}-*{made.suffix}")):
            text = f"{name};always" if label % 2 else "always"
            row = [f"all/{path.name}", text if situation.images == "several" else name]
            if situation.images == "groups":
                made.groups[path.name] = _group(path.name)
                row.append(made.groups[path.name])
            rows.append(row)
    head = ["path", "label", *(["group"] if situation.images == "groups" else [])]
    with (made.folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])


def _write_images(made: Made, counts: Mapping[str, Sequence[int]], first: int = 0) -> None:
    """Images of each class for the parts "train" and "val", numbered from `first` on."""
    root, images = made.folder / made.root, made.situation.images
    for label, name in enumerate(CLASSES):
        numbers = iter(range(first, 1000))
        for part, count in counts.items():
            if images in ("folders", "own"):
                place = root / part / name
            elif images in ("held out", "named"):
                place = root / name
            else:
                place = root / "all"
            _save(made, place, label, numbers, count[label])
    if images in ("table", "groups", "several"):
        _labels(made)


def grow(made: Made) -> None:
    """Put three more images of each class into the folder, to train on where there is a choice."""
    _write_images(made, {"train": (3, 3, 3, 3)}, first=60)


def _copy(made: Made) -> None:
    """Copy an image of each class under another name; where the user divides the images, from one part to the other."""
    place = made.folder / made.root
    for label, name in enumerate(CLASSES):
        original = sorted(place.rglob(f"{label}-*{made.suffix}"))[2]
        folder = (
            place / "val" / name if made.situation.images in ("folders", "own") else original.parent
        )
        shutil.copy(original, folder / f"{label}-copy{made.suffix}")
    if made.situation.images in ("table", "groups", "several"):
        _labels(made)


def _spoil(made: Made) -> None:
    """Make an image of each part unreadable."""
    paths = sorted((made.folder / made.root).rglob(f"2-*{made.suffix}"))
    for path in (paths[0], paths[-1]):
        path.write_bytes(b"no picture")


FIELDS = "{embed_dim: 16, depth: 2, num_heads: 2, patch_size: 4}"
TEACHER = "teacher.ckpt"
TIMMS, TIMMS_FIELDS = "test_efficientnet", "{output_stride: 8}"
"""A network with BatchNorm. At its own stride a map has one pixel, at which PyTorch's gradient of a convolution in
bfloat16 reads memory that oneDNN has not written: other bits, and at times NaN, in a plain loop too."""
NETWORKS = {"cait": ("xxs24", FIELDS), "own": ("own_things:Net", "null")}
NETWORKS["solved"] = (f"timm/{TIMMS}", "{output_stride: 8, intermediates: true}")


def make(folder: Path, situation: Situation) -> Made:
    """Write the images of a situation and what it starts from, below an empty folder."""
    roots = {
        "absolute": folder / "images",
        "dot": Path("."),
        "spaces": Path("my images (1)"),
        "accents": Path("фото é"),
    }
    root = Path("pictures") if situation.images == "own" else roots[situation.place]
    made = Made(situation, folder, root)
    shutil.copy(HERE / "own_things.py", folder)
    _write_images(made, {"train": TRAIN, "val": VAL})
    if situation.copies == "yes":
        _copy(made)
    if situation.unreadable == "yes":
        _spoil(made)
    made.arguments = [*_arguments(made)]
    return made


def _arguments(made: Made) -> Iterator[str]:
    given = made.situation
    yield from ("--config", "digits.yaml", "--trainer.accelerator=cpu", "--trainer.strategy=auto")
    if made.holds_out:
        yield "--data.val_fraction=0.25"
    if given.devices != "launcher":
        yield f"--trainer.devices={given.devices}"
    yield from ("--data.global_batch=false", "--data.max_bad_share=0.1", "--data.hflip=0.5")
    yield from (
        "--model.schedule=constant",
        "--model.warmup_epochs=0",
        "--trainer.log_every_n_steps=1",
    )
    yield from ("--trainer.callbacks+=own_things.Seen", "--save_every_n_steps=1")
    yield f"--data.root={'own_things:Pictures' if given.images == 'own' else made.root}"
    if given.images == "own" and given.mode == "planes":  # a folder says by itself what it holds
        yield "--data.reader=cait.extras.channels.planes:read"
    yield f"--data.batch_size={given.batch}"
    yield f"--data.num_workers={given.workers}"
    yield f"--trainer.precision={given.precision}"
    name, fields = NETWORKS.get(given.network, (f"timm/{TIMMS}", TIMMS_FIELDS))
    yield from (f"--model.name={name}", f"--model.fields={fields}")
    if given.images in ("table", "groups", "several"):
        yield "--data.labels=labels.csv"
    if given.images == "named":
        yield "--data.group_by=([0-3]-..)"
    if given.images == "several":
        yield "--data.multi_label=true"
    if given.average != "none":
        yield f"--ema.decay={given.average}"
    if given.weighting == "balance":
        yield "--data.balance=full"
    if given.weighting == "class_weights":
        yield "--model.class_weights=balanced"
    if given.eval_batch != "same":
        yield f"--data.eval_batch_size={given.eval_batch}"
    if given.mixing == "off":
        yield from ("--data.mixup=0", "--data.cutmix=0")
    if given.metric == "own":
        yield "--model.metrics={mine: own_things:recall}"
    if given.network == "solved":
        yield "--model.solve_head=true"
    if given.network == "frozen":
        yield "--model.freeze=true"
    if given.network == "lower":
        yield "--model.freeze=0.33"
    if given.weights == "file":
        yield f"--model.weights={_weights(made)}"
    if given.weights == "run":
        yield "--model.weights=logs/before/checkpoints/best.ckpt"
    if given.teacher != "none":
        yield from ("--model.distillation=hard", f"--model.teacher={TEACHER}")


def _weights(made: Made) -> Path:
    """A file of weights, with a head for other classes."""
    import timm
    import torch
    import yaml

    from cait import create_model

    torch.manual_seed(1)
    network: Any
    if made.situation.network == "cait":
        network = create_model("xxs24", 16, 7, **yaml.safe_load(FIELDS))
    elif made.situation.network == "own":
        sys.path.insert(0, str(HERE))
        from own_things import Net

        network = Net(16, 7)
    else:
        network = timm.create_model(TIMMS, num_classes=7)
    torch.save(network.state_dict(), made.folder / "start.pth")
    return Path("start.pth")
