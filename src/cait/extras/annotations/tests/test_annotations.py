"""Tables of labels, splits, groups, folds, several labels per image: held against scikit-learn, torch and timm."""

import csv
import json
import os
import shutil
import unicodedata
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import NO_TEXT, SMALL
from modules import loader, module, trainer
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.preprocessing import MultiLabelBinarizer
from timm.data import Mixup
from torch import Tensor

from cait.cli import main
from cait.cli.loading import load as cait_load
from cait.cli.predict import _csv
from cait.data.datamodule import ImageNetDataModule
from cait.data.source import open_source
from cait.data.table import write_held_out
from cait.data.transforms import Mixing
from cait.errors import UserError
from cait.extras.annotations.folds import GroupFolds
from cait.extras.annotations.multi_label import MultiLabel, MultiLabelLoss
from cait.train.losses import LossSettings

SHORT = [
    *SMALL,
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--data.num_workers=0",
]
SHORT += ["--trainer.devices=1"]  # the tests' own process could not start others


def images(root: Path = Path("data/digits")) -> list[str]:
    """Every image of the digits, below their folder."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))


def write(file: str, header: str, rows: Sequence[Sequence[str]]) -> str:
    with Path(file).open("w", newline="") as lines:
        csv.writer(lines).writerows([header.split(","), *rows])
    return file


def write_table(several: bool = False) -> str:
    """Write a table of the digits as odd and even ones; every fifth is a test image, every fourth validates.

    With several labels, the multiples of three are another class.
    """
    rows = []
    for number, path in enumerate(images()):
        split = "Test" if number % 5 == 0 else "valid" if number % 4 == 0 else "train"
        digit = int(Path(path).parent.name)
        more = ";three" if several and digit % 3 == 0 else ""
        rows.append((path, ("odd" if digit % 2 else "even") + more, split))
    return write("labels.csv", "path,label,split", rows)


def below(files: object, root: str = "data/digits") -> list[str]:
    return [os.path.relpath(path, root) for path, _ in files]  # type: ignore[attr-defined]


def test_a_table_says_labels_and_splits(here: Path) -> None:
    source = open_source("data/digits", labels=write_table())
    with open("labels.csv", newline="") as lines:
        listed = list(csv.DictReader(lines))
    assert source.class_names == ["even", "odd"]
    for split, files in (("train", source.train), ("valid", source.val), ("Test", source.test)):
        rows = [row for row in listed if row["split"] == split]
        assert below(files) == [row["path"] for row in rows]
        assert [source.class_names[label] for _, label in files] == [row["label"] for row in rows]
    root = Path("data/digits").absolute()
    turned = [(str(root / row["path"]), row["label"], row["split"]) for row in reversed(listed)]
    again = open_source("data/digits", labels=write("turned.csv", "path,label,split", turned))
    assert ([*again.train], again.digest) == ([*source.train], source.digest)
    folds = [
        open_source("data/digits", labels="labels.csv", folds=3, fold=fold) for fold in range(3)
    ]
    held = [path for fold in folds for path in below(fold.val)]
    # test images are in no fold
    assert sorted(held) == sorted(below(source.train) + below(source.val))
    assert all(below(fold.test) == below(source.test) for fold in folds)


@pytest.mark.parametrize("several", [False, True])
def test_folds_are_scikit_learns(here: Path, several: bool) -> None:
    paths = np.array(images())
    labels = np.array([int(Path(path).parent.name) for path in paths])
    settings: dict = {}
    if several:  # stratified by the set of labels; rare ones count as one
        labels[0] = -1
        names = ["rare" if label < 0 else f"{label};digit;rare" for label in labels]
        table = write("sets.csv", "path,label", [*zip(paths, names, strict=True)])
        settings = {"labels": table, "multi_label": True}
    source = open_source("data/digits", folds=4, fold=3, **settings)
    train, val = [*StratifiedKFold(4, shuffle=True, random_state=0).split(paths, labels)][3]
    assert (below(source.train), below(source.val)) == ([*paths[train]], [*paths[val]])


def test_groups_stay_together_as_in_scikit_learn(here: Path) -> None:
    paths = np.array(images())
    labels = [Path(path).parent.name for path in paths]
    groups = [f"writer {int(Path(path).stem) // 30}" for path in paths]
    table = write("groups.csv", "path,class,group", [*zip(paths, labels, groups, strict=True)])
    source = open_source("data/digits", labels=table, folds=5, fold=2)
    train, val = [
        *StratifiedGroupKFold(5, shuffle=True, random_state=0).split(paths, labels, groups)
    ][2]
    assert (below(source.train), below(source.val)) == ([*paths[train]], [*paths[val]])


@pytest.mark.parametrize("divided", [{"folds": 5, "fold": 2}, {}])
def test_groups_of_names_are_divided_as_those_of_a_column(divided: dict, here: Path) -> None:
    root = Path("data/digits/train")
    table = write(
        "last.csv", "path,label,group", [(path, path[0], path[-5]) for path in images(root)]
    )
    source = open_source(str(root), labels=table, **divided)
    by_name = open_source(str(root), group_by=r"x|(\d)\.png", **divided)
    assert [below(by_name.train), below(by_name.val)] == [below(source.train), below(source.val)]


def test_an_image_of_a_group_that_validates_is_not_trained_on(tmp_path: Path) -> None:
    for path in ("train/a/s1_0", "train/a/s2_0", "train/b/s3_0", "val/a/s1_1", "val/b/s4_0"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{path}.png").write_text(path)
    source = open_source(str(tmp_path), group_by="(s.)_")
    assert below(source.train, str(tmp_path)) == ["train/a/s2_0.png", "train/b/s3_0.png"]
    assert below(source.val, str(tmp_path)) == ["val/a/s1_1.png", "val/b/s4_0.png"]
    for regex, told in (
        ("s(.", "no regular expression"),
        ("s", "in parentheses"),
        ("(s[12])", r"b/s3_0.png, .*/b/s4_0"),
    ):
        with pytest.raises(UserError, match=told):
            _ = open_source(str(tmp_path), group_by=regex).train


@pytest.mark.parametrize("groups", [2, 4, 30])
def test_as_many_groups_are_held_out_as_there_are(
    groups: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though a tenth cannot be had; each class keeps training images, and a run is scored on what it held out."""
    paths = [path for path in images() if path.startswith("train/")][::9]
    rows = [
        (path, Path(path).parent.name, f"patient {number % groups}")
        for number, path in enumerate(paths)
    ]
    table = write("few.csv", "path,label,group", rows)
    source = open_source("data/digits", labels=table)
    of = {path: group for path, _, group in rows}
    _ = source.val
    told = (
        f"because groups stay whole, {1 / groups:.1%} of the images validate, 10.0% were asked for"
    )
    assert (told in capsys.readouterr().err) is (groups < 10)
    learn, held = ({of[path] for path in below(samples)} for samples in (source.train, source.val))
    assert not learn & held
    assert len(held) == max(1, groups // 10)
    assert {*source.train.labels} == {*range(10)}
    listed = write("validation.csv", "path", [(path,) for path in below(source.val)])
    again = open_source("data/digits", labels=table, val_list=listed)
    assert [below(again.train), below(again.val)] == [below(source.train), below(source.val)]


def test_a_class_of_few_groups_is_validated_too(here: Path) -> None:
    """Though no fold has all classes: the images of 0 are one and the rest, those of 1 five groups, others 20."""
    rows = []
    for path in (path for path in images() if path.startswith("train/")):
        label, number = Path(path).parent.name, int(Path(path).stem)
        rows.append(
            (
                path,
                label,
                f"{label} {number > 0 if label == '0' else number % (5 if label == '1' else 20)}",
            )
        )
    source = open_source("data/digits", labels=write("uneven.csv", "path,label,group", rows))
    train, val = (
        np.bincount(samples.labels, minlength=10) for samples in (source.train, source.val)
    )
    assert val[0] == 1
    assert (val > 0).all()
    assert (val < train).all()
    assert len(source.val) / len(rows) < 0.15


@pytest.mark.parametrize(("several", "each"), [(False, 6), (True, 1)])
def test_some_are_held_out_of_few_images(several: bool, each: int, here: Path) -> None:
    """Where each class has fewer images than the folds of a tenth, or the whole table has."""
    digits = {
        digit: [path for path in images() if Path(path).parent.name == digit][:each]
        for digit in "01234"
    }
    rows = [(path, digit, path) for digit, paths in digits.items() for path in paths]
    rows += [(path, "0;1;2;3;4", path) for path in images()[-3:]] if several else []
    source = open_source(
        "data/digits", labels=write("t.csv", "path,label,group", rows), multi_label=several
    )
    assert 0 < len(source.val) < len(source.train)


def test_names_composed_otherwise_are_found(tmp_path: Path) -> None:
    """A table that was written on Linux, of files that a Mac has packed."""
    rows = []
    for number, name in enumerate(["cre\u0300me", "sucre"] * 3):
        (tmp_path / name).mkdir(exist_ok=True)
        path = f"{name}/e\u0301te\u0301 {number}.png"
        Image.new("RGB", (8, 8)).save(tmp_path / path)
        label = unicodedata.normalize(("NFC", "NFD")[number % 4 == 0], name)
        rows.append((unicodedata.normalize("NFC", path), label))
    source = open_source(str(tmp_path), labels=write(str(tmp_path / "t.csv"), "path,label", rows))
    assert source.class_names == ["cr\u00e8me", "sucre"]
    assert all(Path(path).exists() for samples in (source.train, source.val) for path, _ in samples)


def test_a_table_may_name_files_that_are_no_text(tmp_path: Path) -> None:
    names = [f"{os.fsdecode(NO_TEXT)}{number}.png" for number in range(4)]
    for name in names:
        (tmp_path / name).write_text(name, errors="surrogateescape")
    rows = "\n".join(f"{name},{'ab'[number % 2]}" for number, name in enumerate(names))
    (tmp_path / "t.csv").write_text(f"path,label\n{rows}", errors="surrogateescape")
    source = open_source(str(tmp_path), labels=str(tmp_path / "t.csv"))
    assert sorted(below([*source.train, *source.val], str(tmp_path))) == names
    assert len(source.digest) == 32


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "typed", ["data/digits", "./data/../data/digits", "{here}/data/digits", "{real}", "link", ""]
)
def test_what_predict_writes_is_a_table_of_labels(
    typed: str, several: bool, here: Path, digits_root: Path
) -> None:
    """Whatever the images were called; with some beside the root, and one that could not be read."""
    root = Path("data/digits")
    if not Path("link").exists():
        Path("link").symlink_to(root.resolve(), target_is_directory=True)
        shutil.copytree(root / "val/0", "new/zero")
    folder = typed.format(here=here, real=digits_root.resolve())
    others = sorted(str(path) for path in Path("new").rglob("*.png"))
    paths = [os.path.join(folder, path) for path in images()[:400:40]] + others[:3]
    rows: list[dict] = [
        {"path": path, "predictions": [{"class": name, "probability": 0.75} for name in names]}
        for path, names in zip(
            paths, cycle([["even"], ["odd", "three"][: 1 + several]]), strict=False
        )
    ]
    rows.append({"path": f"{folder}/none.png", "error": "it is no image"})
    task = SimpleNamespace(several=several)
    with open("corrected.csv", "w", newline="") as file:
        loaded = SimpleNamespace(task=task, class_names=["even", "odd", "three"])
        _csv(file, iter(rows), paths, loaded, None)  # type: ignore[arg-type]
    source = open_source(str(root), labels="corrected.csv", multi_label=several)
    assert source.class_names == ["even", "odd", "three"][: 2 + several]
    used = [path for path, _ in (*source.train, *source.val)]
    assert sorted(map(os.path.realpath, used)) == sorted(
        os.path.realpath(path if path.startswith("new") else root / path[len(folder) :].lstrip("/"))
        for path in paths
    )


ONE, TWO, THREE = "train/0/0000.png", "train/1/0001.png", "train/2/0002.png"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,name\na,b\n", "has no column `label`, it has path, name"),
        ("path,label\n", "has no rows"),
        (f"path,label\n{ONE},\n", "line 2: no label"),
        (f"path,label,split\n{ONE},a,dev\n", "line 2: split is train, val or test, not 'dev'"),
        (
            "path,label\ntrain/0/none.png,a\n",
            "names 1 images that are not in data/digits: train/0/none.png",
        ),
        (f"path,label\n{ONE},a\ntrain/0/../0/0000.png,b\n", f"names images twice: {ONE} (2 times)"),
        (f"path,label\n{ONE},a\n", "has the one label a, at least 2 are needed"),
        (
            f"path,label,split\n{ONE},a,train\n{TWO},a,val\n{THREE},b,test\n",
            "training images are left of the class b",
        ),
        (f"path,label,Label\n{ONE},a,b\n", "wrong.csv has two columns `label`: remove one"),
        (f"path,label,\n{ONE},terrier, brown\n", "line 2: more cells than the header has"),
        (
            f"path,label,group\n{ONE},a,x\n{TWO},b,x\n",
            "2 folds need as many groups, wrong.csv has 1",
        ),
    ],
)
def test_a_wrong_table_is_refused_in_a_line(here: Path, text: str, words: str) -> None:
    Path("wrong.csv").write_text(text, errors="surrogateescape")
    source = open_source("data/digits", labels="wrong.csv")
    with pytest.raises(UserError) as refused:
        _ = source.class_names, source.train
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_may_have_other_separators(
    separator: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(path, '"a;b"' if number % 2 else "a") for number, path in enumerate(images()[:20])]
    Path("t.csv").write_text("\n".join(separator.join(row) for row in [("path", "label"), *rows]))
    assert open_source("data/digits", labels="t.csv").class_names == ["a", "a;b"]
    assert (
        "1 labels are parted by ';' (a;b), and each is one class" in capsys.readouterr().err
        or separator != ","
    )
    several = open_source("data/digits", labels="t.csv", multi_label=True)
    assert several.class_names == ["a", "b"]
    Path("bar.csv").write_text(Path("t.csv").read_text().replace("a;b", "a|b"))
    assert open_source("data/digits", labels="bar.csv", multi_label=True).class_names == [
        "a",
        "a|b",
    ]
    assert (
        "no image has several labels; if one has, part them by ';'" in capsys.readouterr().err
        or separator != ","
    )
    data = ImageNetDataModule(root="data/digits", labels="t.csv", multi_label=True)
    loss = MultiLabel(2).loss(LossSettings(class_weights="balanced"), data)
    count = data.class_counts()
    # "a" is on every image
    assert loss.weights.tolist() == [
        1,
        pytest.approx((count[0] - count[1]) / count[1]),
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(root="data/digits", labels="none.csv"), "--data.labels none.csv: No such file"),
        (dict(root="none", labels="none.csv"), "the data folder none does not exist"),
        (
            dict(root="torch/cifar10", labels="none.csv"),
            "are for folders of images, and torch/cifar10 is none",
        ),
        (
            dict(root="data/digits", folds=3, fold=3),
            "data.fold must be from 0 to data.folds - 1, got 3 of 3 folds",
        ),
        (dict(root="data/digits", folds=5000), "cannot be divided into 5000 folds"),
        (dict(root="data/digits", multi_label=True), "name it with data.labels"),
    ],
)
def test_wrong_settings_are_refused_in_a_line(here: Path, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        assert open_source(settings.pop("root"), **settings).train


def test_one_setting_says_what_is_held_out(here: Path) -> None:
    table = dict(labels=write_table())  # its column says it, where nothing else is given
    for settings, used in (
        (dict(folds=3), {"folds", "fold"}),
        (table, set()),
        (table | dict(folds=3), {"folds", "fold"}),
        (table | dict(folds=3, val_list="labels.csv"), {"val_list"}),
    ):
        unused = {*open_source("data/digits", **settings).without_use}
        assert {"val_fraction", "val_list", "folds", "fold"} - unused == used
        assert ("train_split" in unused) == ("labels" in settings)


def test_a_run_of_two_folders_is_scored_on_a_whole_table(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part, count in (("train", 20), ("val", 8)):
        for label in "01":
            Path("photos", part, label).mkdir(parents=True)
            for path in sorted(Path("data/digits", part, label).iterdir())[:count]:
                shutil.copy(path, Path("photos", part, label))
    names = sorted(str(path.relative_to("photos")) for path in Path("photos/val").rglob("*.png"))
    main(["fit", *SHORT, "--data.root=photos", "--run_name=two", "--data.batch_size=8"])
    Path("t.csv").write_text(
        "\n".join(["path,label", *(f"{name},{name.split('/')[1]}" for name in names)])
    )
    main(["eval", "two", "--data.labels=t.csv", "--data.num_workers=0"])
    assert json.loads(Path("logs/two/evaluation.json").read_text())["raw"]["images"] == len(names)
    Path("photos", names[3]).write_bytes(b"")
    capsys.readouterr()
    main(["eval", "two", "--data.num_workers=0", "--data.max_bad_share=0.5"])
    told = "1 of 16 images cannot be read, and are not scored: `cait check photos` names them"
    assert told in capsys.readouterr().err


def test_an_image_that_is_marked_to_validate_never_trains(here: Path) -> None:
    """Although a run goes on with the list of those that it has validated on."""
    table = Path(write_table()).read_text()
    source = open_source("data/digits", labels="labels.csv")
    Path("held.csv").write_text("\n".join(["path", *below(source.val)]))
    more = next(line for line in table.splitlines() if line.endswith("train"))
    Path("labels.csv").write_text(table.replace(more, f"{more.rpartition(',')[0]},valid"))
    again = open_source("data/digits", labels="labels.csv", val_list="held.csv")
    assert below(again.val) == below(source.val)
    assert {*below(source.train)} - {*below(again.train)} == {more.split(",")[0]}


def test_a_table_of_no_labels_is_refused(here: Path) -> None:
    Path("none.csv").write_text(f"path,label\n{ONE},;\n")
    with pytest.raises(
        UserError, match=r"--data.labels none.csv has no label, at least 2 are needed"
    ):
        _ = open_source("data/digits", labels="none.csv", multi_label=True).class_names


def test_a_run_with_several_labels_is_resumed_and_scored(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Path(write_table(several=True)).read_text()
    settings = [
        "--data.labels=labels.csv",
        "--data.multi_label=true",
        "--data.root=data/digits",
        "--ema.decay=0.9",
    ]
    main(["fit", *SHORT, *settings, "--run_name=several"])
    Path("labels.csv").write_text(table.replace("0010.png,even", "0010.png,odd", 1))
    with pytest.raises(SystemExit):
        main(["resume", "several", "--trainer.max_epochs=2"])
    assert "digest of the training pictures" in capsys.readouterr().err
    Path("labels.csv").write_text(table)
    main(["eval", "several", "--data.num_workers=0"])
    assert "test images" in capsys.readouterr().out
    for split in ("train", "test"):  # a table of other images than were held out
        lines = [line for line in table.splitlines() if line.lower().endswith(split)][::30]
        Path("other.csv").write_text("\n".join(["path,label,split", *lines]))
        main(
            [
                "eval",
                "several",
                "--data.labels=other.csv",
                "--data.num_workers=0",
                "--output=other.json",
            ]
        )
        assert json.loads(Path("other.json").read_text())["raw"]["images"] == len(lines)
    held = next(line for line in table.splitlines() if line.endswith("valid"))
    Path("other.csv").write_text(table.replace(f"{held}\n", ""))
    with pytest.raises(SystemExit):  # the others of the table have trained
        main(["eval", "several", "--data.labels=other.csv"])
    capsys.readouterr()
    found = json.loads(Path("logs/several/evaluation.json").read_text())
    source = open_source("data/digits", labels="labels.csv", multi_label=True)
    assert found["raw"]["images"] == len(source.val)
    assert found["raw"]["extra"]["test"]["images"] == len(source.test)

    scores, run = found["ema"], cait_load(Path("logs/several"))
    logits = torch.cat([run(run.transform(path)[None]) for path, _ in source.val]).detach()
    names = [source.label_names[label].split(";") for _, label in source.val]
    truth = np.array([[name in labels for name in ("even", "odd", "three")] for labels in names])
    probabilities = logits.sigmoid().numpy()
    hits = probabilities > 0.5
    assert scores["mAP"] == pytest.approx(average_precision_score(truth, probabilities), abs=1e-4)
    assert scores["f1"] == pytest.approx(
        f1_score(truth, hits, average="macro", zero_division=0), abs=5e-3
    )
    main(["predict", "several", source.val.name(0), "--format=csv"])
    listed = next(csv.DictReader(capsys.readouterr().out.splitlines()))["class"]
    assert {*listed.split(";")} - {""} == {
        source.class_names[index] for index in np.flatnonzero(hits[0])
    }


def test_a_run_keeps_its_fold(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", *SHORT, "--data.root=data/digits", "--data.folds=3", "--run_name=fold"]
    main(fit)
    with pytest.raises(SystemExit):
        main([*fit, "--run_name=other", "--data.val_fraction=0.2"])
    assert (
        "--data.val_fraction 0.2 does nothing without images that it divides"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["resume", "fold", "--trainer.max_epochs=2", "--data.fold=1"])
    assert "leave out --data.fold, which was 0, or start a new run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [{"folds": 3}, {"group_by": r"(\d\d)\.png", "labels": None, "folds": 4}, {}, {"marks": False}],
)
def test_a_run_that_goes_on_divides_nothing_and_has_the_same_images(
    settings: dict, here: Path
) -> None:
    """In the same order, with the list of what it held out alone."""
    table = write_table()
    if not settings.pop("marks", True):  # a share of each class validates
        Path(table).write_text(
            "\n".join(line.rpartition(",")[0] for line in Path(table).read_text().splitlines())
        )
    first, again = (open_source("data/digits", **{"labels": table} | settings) for _ in range(2))
    write_held_out(Path("held.csv"), first.val, "data/digits", first.label_names)
    again.choose = None
    again.keep(Path("held.csv"))
    assert ([*again.train], [*again.val]) == ([*first.train], [*first.val])


def test_a_folder_of_three_splits_is_scored_as_three(here: Path, digits_root: Path) -> None:
    three = Path("three")
    for split, source in (("train", "train"), ("val", "val"), ("test", "val")):
        (three / split).mkdir(parents=True)
        for digit in range(2 if split == "test" else 3):
            (three / split / str(digit)).symlink_to(digits_root / source / str(digit))
    main(["fit", *SHORT, "--data.root=three", "--data.batch_size=16", "--run_name=three"])
    main(["eval", "three"])
    found = json.loads(Path("logs/three/evaluation.json").read_text())["raw"]
    assert found["extra"]["test"]["images"] == len([*three.glob("test/*/*")]) < found["images"]
    (three / "test/unlabeled").mkdir()  # as Kaggle's folders of images without labels
    main(["eval", "three"])
    assert "extra" not in json.loads(Path("logs/three/evaluation.json").read_text())["raw"]


OF_DIGITS = {"even": "02468", "prime": "2357", "round": "03689", "big": "789"}
"""Four classes, none of them for a 1."""


def test_the_labels_of_images_are_scikit_learns(here: Path) -> None:
    rows = []
    for path in images():
        found = [name for name, digits in OF_DIGITS.items() if Path(path).parent.name in digits]
        rows.append((path, " ; ".join(found) or ";"))
    write("several.csv", "path,label", rows)
    data = ImageNetDataModule(
        root="data/digits", labels="several.csv", multi_label=True, img_size=16, num_workers=0
    )
    binarizer = MultiLabelBinarizer()
    truth = binarizer.fit_transform(
        [{*label.replace(" ", "").split(";")} - {""} for _, label in rows]
    )
    expected = {f"data/digits/{path}": row for (path, _), row in zip(rows, truth, strict=True)}
    assert data.class_names == [*binarizer.classes_]
    data.setup("fit")
    of_val = [expected[path].tolist() for path, _ in data.source.val]
    assert torch.cat([labels for _, labels in data.val_dataloader()]).tolist() == of_val
    assert data.class_counts() == sum(expected[path] for path, _ in data.source.train).tolist()
    _, labels = next(iter(data.train_dataloader()))
    assert labels.shape == (128, 4)
    assert labels.dtype == torch.float32


def answers(images: int = 200, classes: int = 6) -> tuple[Tensor, Tensor]:
    """Logits, with ties, and targets; no image has the last class."""
    generator = torch.Generator().manual_seed(1)
    targets = (torch.rand(images, classes, generator=generator) < 0.3).float()
    targets[:, -1] = 0
    return (2 * targets + torch.randn(images, classes, generator=generator) - 1).mul(
        8
    ).round() / 8, targets


def test_the_metrics_are_scikit_learns(recwarn: pytest.WarningsRecorder) -> None:
    logits, targets = answers()
    metrics = MultiLabel(6).metrics(
        {"lrap": "torchmetrics.classification:MultilabelRankingAveragePrecision"}, True
    )
    unread = torch.full((1, 6), -1.0)
    for start in range(0, 200, 64):
        batch = targets[start : start + 64]
        metrics.update(torch.cat([logits[start : start + 64], unread]), torch.cat([batch, unread]))
    found = metrics.compute("val")
    assert not recwarn.list  # a class without an image is nothing to warn of
    truth, probabilities = targets.numpy(), logits.sigmoid().numpy()
    hits = probabilities > 0.5
    assert found["val/mAP"] == pytest.approx(
        average_precision_score(truth[:, :5], probabilities[:, :5]), abs=1e-6
    )
    assert found["val/f1"] == pytest.approx(
        f1_score(truth, hits, average="macro", zero_division=0), abs=1e-6
    )
    assert found["val/loss"] == pytest.approx(
        F.binary_cross_entropy_with_logits(logits, targets).item(), abs=1e-6
    )
    assert 0 < found["val/lrap"] < 1  # a metric of the user's own
    scores = metrics.by_class(list("abcdef"))
    assert scores["images"] == 200
    assert scores["per_class"]["f"] is None
    assert scores["per_class"]["a"] == pytest.approx(100 * hits[truth[:, 0] == 1, 0].mean())


def test_predictions_are_all_classes_above_a_half() -> None:
    task, probabilities = MultiLabel(3), torch.tensor([[0.6, 0.7, 0.4], [0.1, 0.5, 0.1]])
    assert [
        [one["class"] for one in image] for image in task.best(probabilities, ["a", "b", "c"])
    ] == [["b", "a"], []]
    assert [len(image) for image in task.best(probabilities, ["a", "b", "c"], 1)] == [1, 0]
    with pytest.raises(UserError, match="not finite"):  # which is not an image without a class
        task.best(probabilities * torch.nan, ["a", "b", "c"])


def test_the_loss_is_torchs_with_smoothing_and_weights() -> None:
    logits, targets = answers()
    counts = targets.sum(dim=0)
    smoothed = 0.9 * targets + 0.05
    plain = F.binary_cross_entropy(logits.double().sigmoid(), smoothed.double()).item()
    assert MultiLabelLoss(0.1)(logits, targets).item() == pytest.approx(plain, abs=1e-6)
    # one class has no image
    weights = torch.where(counts > 0, (200 - counts) / counts.clamp(min=1), 1)
    log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)
    expected = -(weights * smoothed * log_p + (1 - smoothed) * log_q).mean().item()

    class Data:
        source = type("Source", (), {"train": range(200)})

        def class_counts(self) -> list[int]:
            return counts.long().tolist()

    task = MultiLabel(6)
    loss = task.loss(LossSettings(class_weights="balanced"), Data())
    assert loss(logits, targets).item() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="distillation is for images of one class each"):
        trainer().fit(module(task="multi_label", distillation="hard"), loader())


@pytest.mark.parametrize(
    ("mode", "switch"), [("batch", 0.0), ("pair", 1.0), ("elem", 0.0), ("elem", 1.0)]
)
def test_labels_are_mixed_in_timms_shares(mode: str, switch: float) -> None:
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, 1, 2, 3, 3, 1, 0, 2])
    rows = F.one_hot(classes, 4).float()
    mixing = Mixing(mix_mode=mode, mix_switch_prob=switch)  # type: ignore[arg-type]
    mixed, shares = mixing.mix(images.clone(), rows, 4, seed=3)
    np.random.seed(3)
    timms = Mixup(0.8, 1.0, switch_prob=switch, mode=mode, label_smoothing=0.0, num_classes=4)
    expected, timms_shares = timms(images.clone(), classes)
    assert torch.equal(mixed, expected)
    assert torch.allclose(shares, timms_shares, atol=1e-6)
    both = rows + F.one_hot((classes + 1) % 4, 4)  # two labels per image: the shares of each add up
    summed = mixing.mix(images.clone(), both, 4, seed=3)[1]
    assert torch.allclose(summed, shares + shares.roll(1, dims=1), atol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_folds_of_groups_weighed_at_once_are_scikit_learns(seed: int) -> None:
    draw = np.random.default_rng(seed)
    groups = draw.integers(0, 12 + 5 * seed, 300)
    labels = groups % (1 + seed) if seed % 2 else draw.integers(0, 1 + seed, 300)
    folds, other = (
        kind(2 + seed % 9, shuffle=True, random_state=0).split(labels, labels, groups)
        for kind in (GroupFolds, StratifiedGroupKFold)
    )
    for (_, rows), (_, expected) in zip(folds, other, strict=True):
        assert np.array_equal(rows, expected)
