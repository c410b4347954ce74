"""Situations of a run that cover all pairs of settings: situations.yaml says what varies, and how, this makes one."""

import csv
import functools
import itertools
import random
import shutil
from pathlib import Path

import numpy as np
import tifffile
import yaml
from allpairspy import AllPairs
from harness import parsed
from PIL import Image

from cait import create_model

HERE = Path(__file__).parent
TABLE = parsed(HERE / "situations.yaml")
FACTORS = TABLE["factors"]


def makes_sense(values):
    """Whether the first factors may have these values together."""
    known = dict(zip(FACTORS, values, strict=False))
    for rule in TABLE["senseless"]:
        if all(known.get(name) in excluded for name, excluded in rule["not"].items()):
            return False
    return True


def pairs(situation):
    """Every two of its factors with their values."""
    return {*map(frozenset, itertools.combinations(situation.items(), 2))}


def all_pairs():
    """Those that make sense."""
    found = set()
    for first, second in itertools.combinations(FACTORS, 2):
        for value, other in itertools.product(FACTORS[first], FACTORS[second]):
            pair = {first: value, second: other}
            if makes_sense([pair.get(name, "") for name in FACTORS]):
                found.add(frozenset(pair.items()))
    return found


def situations(seed=0):
    """Situations in which each pair of values occurs that makes sense; another seed combines them otherwise."""
    draw = random.Random(seed)
    missing = all_pairs()
    while missing:  # a draw of AllPairs leaves some out where values are not combined
        shuffled = [draw.sample([*values], len(values)) for values in FACTORS.values()]
        for values in AllPairs(shuffled, filter_func=makes_sense):
            situation = dict(zip(FACTORS, values, strict=True))
            new = missing & pairs(situation)
            missing -= new
            if new:
                yield situation


# Images

CLASSES = ["1e3", "no", "ö b", "null"]
"""Names that YAML or a table could take for something else; the digits 0 to 3."""
TRAIN = (18, 10, 12, 8)
VAL = (6, 4, 5, 3)
"""Images of each class."""
PLACES = {"dot": ".", "spaces": "my images (1)", "accents": "фото é"}
NO_PICTURE = b"no picture"


@functools.cache
def noisy_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    draw = np.random.default_rng(0)
    noise = draw.normal(0, 60, digits.images.shape)
    pixels = np.clip(digits.images * 11 + noise, 0, 255).astype(np.uint8)
    return {label: pixels[digits.target == label] for label in range(len(CLASSES))}


def save_picture(path, label, number, mode):
    """A noisy digit of 12 × 12 pixels. A transparent one is black everywhere: only on white can it be seen."""
    digit = Image.fromarray(noisy_digits()[label][number])
    gray = np.asarray(digit.resize((12, 12), Image.Resampling.BICUBIC))
    black = np.zeros_like(gray)
    deep = gray.astype(np.uint16) * 257
    pixels = {
        "gray": gray,
        "color": np.dstack([gray, gray // 2, gray[::-1, ::-1]]),
        "transparent": np.dstack([black, black, black, gray]),
        "16 bit": deep,
        "planes": np.dstack([deep, deep // 2, deep[::-1, ::-1], np.full_like(deep, 7)]),
    }[mode]
    if mode == "planes":
        tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig")
    else:
        Image.fromarray(pixels).save(path)


class Made:
    """A situation as it lies on the disk, in the folder in which `cait` is called."""

    def __init__(self, situation, folder):
        images = situation["images"]
        self.situation = situation
        self.folder = folder
        self.is_divided = images in ("folders", "own")
        """Whether the user divides the images."""
        self.has_table = images in ("table", "groups", "several")
        self.suffix = ".tif" if situation["mode"] == "planes" else ".png"
        self.root = Path(PLACES.get(situation["place"], folder / "images"))
        """The folder of the images, from there."""
        if images == "own":
            self.root = Path("pictures")

    def place(self, part, name):
        """The folder of a class's images."""
        root = self.folder / self.root
        if self.is_divided:
            return root / part / name
        return root / "all" if self.has_table else root / name

    def pictures(self, label):
        return sorted((self.folder / self.root).rglob(f"{label}-*{self.suffix}"))

    def group(self, path):
        """What an image must not be parted from: of the first class one scene is small and one large."""
        label, _, number = Path(path).stem.partition("-")
        if self.situation["images"] == "named":
            return Path(path).name[:4]
        if self.situation["images"] != "groups" or not number.isdecimal():
            return path
        scene = int(number) // 2 if label != "0" else min(int(number) // 3, 1)
        return f"{label}/{scene}"

    def arguments(self):
        """Of `cait fit`, without the run's name and the way it ends."""
        words = [*TABLE["words"]]
        for name, value in self.situation.items():
            words += [word.replace("ROOT", str(self.root)) for word in FACTORS[name][value]]
        # a folder says by itself what it holds
        if self.situation["images"] == "own" and self.situation["mode"] == "planes":
            words.append("--data.reader=cait.extras.channels.planes:read")
        return words


def write_table(made):
    """Write labels.csv for the images that are there."""
    images = made.situation["images"]
    with (made.folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "group"] if images == "groups" else ["path", "label"])
        for label, name in enumerate(CLASSES):
            several = f"{name};always" if label % 2 else "always"
            row = [several if images == "several" else name]
            for path in made.pictures(label):
                group = [made.group(path.name)] if images == "groups" else []
                table.writerow([f"all/{path.name}", *row, *group])


def write_images(made, counts, first=0):
    """Images of each class for the parts "train" and "val", numbered from `first` on."""
    for label, name in enumerate(CLASSES):
        numbers = itertools.count(first)
        for part, count in counts.items():
            folder = made.place(part, name)
            folder.mkdir(parents=True, exist_ok=True)
            for number in itertools.islice(numbers, count[label]):
                path = folder / f"{label}-{number:03d}{made.suffix}"
                save_picture(path, label, number, made.situation["mode"])
    if made.has_table:
        write_table(made)


def grow(made):
    """Put three more images of each class into the folder, to train on where there is a choice."""
    write_images(made, {"train": (3, 3, 3, 3)}, first=60)


def copy_some(made):
    """Copy an image of each class under another name; where the user divides the images, from one part to the other."""
    for label, name in enumerate(CLASSES):
        shutil.copy(made.pictures(label)[2], made.place("val", name) / f"{label}-copy{made.suffix}")
    if made.has_table:
        write_table(made)


def make(folder, situation):
    """Write the images of a situation and what it starts from, below an empty folder."""
    made = Made(situation, folder)
    shutil.copy(HERE / "own_things.py", folder)
    write_images(made, {"train": TRAIN, "val": VAL})
    if situation["copies"] == "yes":
        copy_some(made)
    if situation["unreadable"] == "yes":  # one of each part
        for path in (made.pictures(2)[0], made.pictures(2)[-1]):
            path.write_bytes(NO_PICTURE)
    if situation["weights"] == "file":
        save_weights(made)
    return made


def save_weights(made):
    """A file of weights of the network, with a head for other classes."""
    import torch

    words = dict(word.split("=", 1) for word in made.arguments())
    fields = yaml.safe_load(words["--model.fields"]) or {}
    fields.pop("intermediates", None)
    torch.manual_seed(1)
    network = create_model(words["--model.name"], 16, 7, **fields)
    torch.save(network.state_dict(), made.folder / "start.pth")
