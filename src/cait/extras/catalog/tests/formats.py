"""Small data sets in the very files of the published ones.

Only the MD5 sums that torchvision compares them with are put in the place of the published files'.
"""

import hashlib
import pickle
import shutil

import numpy as np
from harness import beside
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
    left = 7 * number
    photographs[0].crop((left, left, left + 96, left + 80)).save(path, format="JPEG")


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


def write_flowers(folder, patch, photographs):
    base = folder / "flowers-102"
    for number in range(1, 19):
        save(photographs, base / "jpg" / f"image_{number:05d}.jpg", number)
    # from 1, up to 102
    savemat(base / "imagelabels.mat", {"labels": np.arange(1, 19, dtype=np.uint8)[None] * 5})
    trnid, valid, tstid = np.arange(1, 19).reshape(3, 1, 6)
    savemat(base / "setid.mat", {"trnid": trnid, "valid": valid, "tstid": tstid})
    files = datasets.Flowers102._file_dict
    sums = {key: (name, md5(base / name)) for key, (name, _) in files.items() if key != "image"}
    patch.setattr(datasets.Flowers102, "_file_dict", files | sums)


WNIDS = ["n01440764", "n01443537", "n02084071"]


def write_imagenet(root, patch, photographs):
    """The three archives of ILSVRC2012 for three classes: six pictures of each to train on, six to validate on."""
    work = root.parent / "work"
    for wnid in WNIDS:
        for number in range(6):
            save(photographs, work / wnid / f"{wnid}_{number}.JPEG", number)
        shutil.make_archive(str(work / "train" / wnid), "tar", work / wnid)
    for number in range(1, 7):
        save(photographs, work / f"val/ILSVRC2012_val_{number:08d}.JPEG", number)
    devkit = work / "ILSVRC2012_devkit_t12/data"
    devkit.mkdir(parents=True)
    synsets = beside(__file__)
    for synset in synsets:
        synset["children"] = np.array(synset["children"])
    rows = [tuple(synset.values()) for synset in synsets]
    table = np.array(rows, dtype=[(name, object) for name in synsets[0]])
    savemat(devkit / "meta.mat", {"synsets": table[:, None]})
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("3\n1\n2\n2\n1\n3\n")
    shutil.make_archive(str(root / "ILSVRC2012_img_train"), "tar", work / "train")
    shutil.make_archive(str(root / "ILSVRC2012_img_val"), "tar", work / "val")
    shutil.make_archive(str(root / devkit.parent.name), "gztar", work, devkit.parent.name)
    for part, (name, _) in list(ARCHIVE_META.items()):
        patch.setitem(ARCHIVE_META, part, (name, md5(root / name)))
