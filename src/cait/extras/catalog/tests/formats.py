"""Small data sets in the very files of the published ones.

Only the MD5 sums that torchvision compares them with are put in the place of the published files'.
"""

import hashlib
import pickle
import tarfile

import numpy as np
from scipy.io import savemat
from torchvision import datasets
from torchvision.datasets.imagenet import ARCHIVE_META


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def pixels(count, seed):
    """Pictures [count, 3, 32, 32] that differ."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def save(photographs, path, number):
    """A photograph cut out at a place of its own, as a JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = 7 * number % 400
    photographs[number % 2].crop((left, left % 200, left + 96, left % 200 + 80)).save(
        path, format="JPEG"
    )


def write_cifar10(folder, patch, photographs):
    """Batches as Python 2 pickled them: rows of 3,072 bytes, all of red, then green, then blue."""
    base = folder / datasets.CIFAR10.base_folder
    base.mkdir(parents=True)

    def dump(file, content):
        (base / file).write_bytes(pickle.dumps(content, protocol=2))
        return md5(base / file)

    for part, count in (("train_list", 8), ("test_list", 6)):
        sums = []
        for number, (file, _) in enumerate(getattr(datasets.CIFAR10, part)):
            data = pixels(count, number).reshape(count, -1)
            sums.append([file, dump(file, {"labels": [*range(count)], "data": data})])
        patch.setattr(datasets.CIFAR10, part, sums)
    meta = datasets.CIFAR10.meta
    names = {"label_names": [f"class {number}" for number in range(10)]}
    patch.setattr(datasets.CIFAR10, "meta", meta | {"md5": dump(meta["filename"], names)})


FLOWERS = (("trnid", 1), ("valid", 7), ("tstid", 13))


def write_flowers(folder, patch, photographs):
    base = folder / "flowers-102"
    for number in range(1, 19):
        save(photographs, base / "jpg" / f"image_{number:05d}.jpg", number)
    # from 1, up to 102
    savemat(base / "imagelabels.mat", {"labels": np.arange(1, 19, dtype=np.uint8)[None] * 5})
    savemat(base / "setid.mat", {name: np.arange(i, i + 6)[None] for name, i in FLOWERS})
    files = datasets.Flowers102._file_dict
    sums = {key: (name, md5(base / name)) for key, (name, _) in files.items() if key != "image"}
    patch.setattr(datasets.Flowers102, "_file_dict", files | sums)


SYNSET = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"]
WNIDS = ("n01440764", "n01443537", "n02084071")


def write_imagenet(root, patch, photographs):
    """The three archives of ILSVRC2012 for three classes; the bytes of each validation picture by `<wnid>/<file>`."""
    work = root.parent / "work"
    root.mkdir()
    with tarfile.open(root / "ILSVRC2012_img_train.tar", "w") as outer:
        for label, wnid in enumerate(WNIDS):
            with tarfile.open(root.parent / f"{wnid}.tar", "w") as inner:
                for number in range(6):
                    save(photographs, work / f"{wnid}_{number}.JPEG", 6 * label + number)
                    inner.add(work / f"{wnid}_{number}.JPEG", f"{wnid}_{number}.JPEG")
            outer.add(root.parent / f"{wnid}.tar", f"{wnid}.tar")
    places = [2, 0, 1, 1, 0, 2]  # the classes of the validation pictures, in their order
    val = {}
    with tarfile.open(root / "ILSVRC2012_img_val.tar", "w") as tar:
        for number, label in enumerate(places):
            path = work / f"ILSVRC2012_val_{number + 1:08d}.JPEG"
            save(photographs, path, 30 + number)
            tar.add(path, path.name)
            val[f"{WNIDS[label]}/{path.name}"] = path.read_bytes()
    dtype = [(name, object) for name in SYNSET]
    synsets = [
        (label + 1, wnid, f"name {label}, other name", "", 0, np.zeros(0), 0)
        for label, wnid in enumerate(WNIDS)
    ]
    # not a leaf, so no class
    synsets.append((4, "n00001740", "entity", "", 3, np.array([1, 2, 3]), 1))
    devkit = work / "ILSVRC2012_devkit_t12"
    (devkit / "data").mkdir(parents=True)
    table = np.array(synsets, dtype=dtype).reshape(-1, 1)
    savemat(devkit / "data" / "meta.mat", {"synsets": table})
    lines = "".join(f"{label + 1}\n" for label in places)
    (devkit / "data" / "ILSVRC2012_validation_ground_truth.txt").write_text(lines)
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        tar.add(devkit, devkit.name)
    for part, (name, _) in list(ARCHIVE_META.items()):
        patch.setitem(ARCHIVE_META, part, (name, md5(root / name)))
    return val
