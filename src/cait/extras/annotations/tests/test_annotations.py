"""Tables of labels, splits, groups and folds, held against scikit-learn; and runs that go on after a kill."""

from __future__ import annotations

import csv
import json
import os
import signal
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from harness import SMALL, Cait, ended, slow, start
from PIL import Image
from runs import RECIPE, TWO, assert_same, wait_for_steps
from sklearn.metrics import average_precision_score, f1_score
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from cait.cli import main
from cait.cli.loading import load as cait_load
from cait.data.source import open_source
from cait.errors import UserError

SHORT = [*SMALL, "--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--data.num_workers=0"]


def images(root: Path) -> list[str]:
    """Every image of the digits, below their folder."""
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*/*.png"))


def write(file: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])
    return file


@pytest.fixture
def write_table(here: Path) -> Callable[..., Path]:
    """Write a table of the digits as odd and even ones; every fifth is a test image, every fourth validates.

    With several labels, the multiples of three are another class.
    """

    def make(name: str = "labels.csv", root: Path = Path("data/digits"), several: bool = False) -> Path:
        rows = []
        for number, path in enumerate(images(root)):
            split = "Test" if number % 5 == 0 else "valid" if number % 4 == 0 else "train"
            digit = int(Path(path).parent.name)
            more = ";three" if several and digit % 3 == 0 else ""
            rows.append((path, ("odd" if digit % 2 else "even") + more, split))
        return write(Path(name), ("path", "label", "split"), rows)

    return make


def below(files: object, root: str = "data/digits") -> list[str]:
    return [os.path.relpath(path, root) for path, _ in files]  # type: ignore[attr-defined]


def test_a_table_says_labels_and_splits(here: Path, write_table: Callable[..., Path]) -> None:
    source = open_source("data/digits", labels=str(write_table()))
    with open("labels.csv", newline="") as lines:
        listed = list(csv.DictReader(lines))
    assert source.class_names == ["even", "odd"]
    for split, files in (("train", source.train), ("valid", source.val), ("Test", source.test)):
        rows = [row for row in listed if row["split"] == split]
        assert below(files) == [row["path"] for row in rows]
        assert [source.class_names[label] for _, label in files] == [row["label"] for row in rows]


def test_the_order_of_the_rows_does_not_count(here: Path, write_table: Callable[..., Path]) -> None:
    head, *rows = write_table().read_text().splitlines()
    Path("turned.csv").write_text("\n".join([head, *reversed(rows)]))
    one, other = (open_source("data/digits", labels=name) for name in ("labels.csv", "turned.csv"))
    assert [*one.train] == [*other.train]
    assert one.digest == other.digest


@pytest.mark.parametrize("fold", range(4))
def test_folds_of_folders_are_scikit_learns(here: Path, fold: int) -> None:
    source = open_source("data/digits", folds=4, fold=fold, fold_seed=3)
    paths = np.array(images(Path("data/digits")))
    labels = [int(Path(path).parent.name) for path in paths]
    train, val = [*StratifiedKFold(4, shuffle=True, random_state=3).split(paths, labels)][fold]
    assert (below(source.train), below(source.val)) == ([*paths[train]], [*paths[val]])
    assert [label for _, label in source.val] == [labels[place] for place in val]


@pytest.mark.parametrize("folds", [5, None])
def test_groups_stay_together_as_in_scikit_learn(here: Path, folds: int | None) -> None:
    paths = np.array(images(Path("data/digits")))
    labels = [Path(path).parent.name for path in paths]
    groups = [f"writer {int(Path(path).stem) // 30}" for path in paths]
    table = write(Path("groups.csv"), ("path", "class", "group"), [*zip(paths, labels, groups, strict=True)])
    fold = 2 if folds else 0  # without folds, one of 1 / val_fraction of them is held out
    source = open_source("data/digits", labels=str(table), folds=folds, fold=fold, val_fraction=0.25)
    kind = StratifiedGroupKFold(folds or 4, shuffle=True, random_state=0)
    train, val = [*kind.split(paths, labels, groups)][fold]
    assert (below(source.train), below(source.val)) == ([*paths[train]], [*paths[val]])
    assert not {groups[place] for place in train} & {groups[place] for place in val}


@pytest.mark.parametrize(("groups", "folds"), [(2, None), (5, None), (30, None), (5, 5), (4, 5)])
def test_as_many_groups_are_held_out_as_there_are(groups: int, folds: int | None, here: Path) -> None:
    """The same folds as a run is scored on, though a tenth cannot be had; each class keeps training images."""
    paths = [path for path in images(Path("data/digits")) if path.startswith("train/")][::9]
    rows = [(path, Path(path).parent.name, f"patient {number % groups}") for number, path in enumerate(paths)]
    table = write(Path("few.csv"), ("path", "label", "group"), rows)
    source = open_source("data/digits", labels=str(table), folds=folds)
    if folds and groups < folds:
        with pytest.raises(UserError, match=r"^4 groups cannot be divided into 5 folds: lower --data\.folds to 4"):
            _ = source.val
        return
    of = {f"data/digits/{path}": group for path, _, group in rows}
    learn, held = ({of[path] for path, _ in samples} for samples in (source.train, source.val))
    assert not learn & held
    assert len(held) == max(1, groups // 10)
    assert {*source.train.labels} == {*range(10)}
    listed = write(Path("validation.csv"), ("path",), [(path,) for path in below(source.val)])
    again = open_source("data/digits", labels=str(table), val_list=str(listed))
    assert [below(again.train), below(again.val)] == [below(source.train), below(source.val)]


def test_names_composed_otherwise_are_found(tmp_path: Path) -> None:
    """A table that was written on Linux, of files that a Mac has packed."""
    rows = []
    for number, name in enumerate(["cre\u0300me", "sucre"] * 3):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / f"\u00e9t\u00e9 {number}.png")
        label = unicodedata.normalize(("NFC", "NFD")[number % 4 == 0], name)
        rows.append((f"{unicodedata.normalize('NFC', name)}/e\u0301te\u0301 {number}.png", label))
    table = write(tmp_path / "t.csv", ("path", "label"), rows)
    source = open_source(str(tmp_path), labels=str(table))
    assert source.class_names == ["cr\u00e8me", "sucre"]
    assert all(Path(path).exists() for samples in (source.train, source.val) for path, _ in samples)
    listed = write(tmp_path / "v.csv", ("path",), [(rows[0][0],), (rows[1][0],)])
    assert len(open_source(str(tmp_path), val_list=str(listed)).val) == 2


def test_test_images_are_in_no_fold(here: Path, write_table: Callable[..., Path]) -> None:
    plain = open_source("data/digits", labels=str(write_table()))
    sources = [open_source("data/digits", labels="labels.csv", folds=3, fold=fold) for fold in range(3)]
    held = [path for source in sources for path in below(source.val)]
    assert sorted(held) == sorted(below(plain.train) + below(plain.val))
    assert all(below(source.test) == below(plain.test) for source in sources)


REFUSED = [
    ("name,label\na,b\n", "has no column `path`, it has name, label"),
    ("path,name\na,b\n", "has no column `label`, it has path, name"),
    ("path,label\n", "has no rows"),
    ("", "has no column `path`, it has none"),
    ("path,label\ntrain/0/0000.png,\n", "line 2: no label"),
    ("path,label,split\ntrain/0/0000.png,a,dev\n", "line 2: split is train, val or test, not 'dev'"),
    ("path,label\ntrain/0/none.png,a\n", "names 1 images that are not in data/digits: train/0/none.png (line 2)"),
    ("path,label\n../x.png,a\n", "../x.png is not below data/digits"),
    ("path,label\ntrain/0/0000.png,a\ntrain/0/../0/0000.png,b\n", "names images twice: train/0/0000.png (line 3)"),
    ("path,label\ntrain/0/0000.png,a\n", "has the one label a, at least 2 are needed"),
    ("path,label\ntrain/0/0000.png,a\ntrain/1/0001.png,b\n", "is the only image of its class"),
    (
        "path,label,split\ntrain/0/0000.png,a,train\ntrain/0/0010.png,a,val\ntrain/1/0001.png,b,val\n",
        "no training images are left of the class b",
    ),
    (
        "path,label,split\ntrain/0/0000.png,a,train\ntrain/0/0010.png,a,train\ntrain/1/0001.png,b,test\n",
        "no training images are left of the class b",
    ),
    ("path,label\ntrain/0/0000.png,terrier, brown\n", "line 2: more cells than the header has"),
    ("path,label,group\ntrain/0/0000.png,a,x\ntrain/1/0001.png,b,x\n", "two groups are needed to hold one out"),
    ("path,label\ntrain/0/0000.png,a\ntrain/1/0001.png,K\udce4se\n", "line 3: the label K�se is not UTF-8"),
    ("path,label\ntrain/K\udce4se.png,a\n", "; save the table as UTF-8, if the names are that"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_a_wrong_table_is_refused_in_a_line(here: Path, text: str, words: str) -> None:
    Path("wrong.csv").write_text(text, errors="surrogateescape")
    source = open_source("data/digits", labels="wrong.csv")
    with pytest.raises(UserError) as refused:
        _ = source.class_names, source.train
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(root="data/digits", labels="none.csv"), "--data.labels none.csv: No such file"),
        (dict(root="none", labels="none.csv"), "the data folder none does not exist"),
        (dict(root="torch/cifar10", labels="none.csv"), "are for folders of images, and torch/cifar10 is none"),
        (dict(root="own_parts:digits", folds=3), "are for folders of images, and own_parts:digits is none"),
        (dict(root="data/digits", folds=1), "folds must be at least 2, got 1"),
        (dict(root="data/digits", folds=3, fold=3), "data.fold must be from 0 to data.folds - 1, got 3 of 3 folds"),
        (dict(root="data/digits", fold=1), "data.fold must be from 0 to data.folds - 1, got 1 of None folds"),
        (dict(root="data/digits", folds=5000), "cannot be divided into 5000 folds"),
    ],
)
def test_wrong_settings_are_refused_in_a_line(here: Path, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        assert open_source(settings.pop("root"), **settings).train


@pytest.mark.parametrize("processes", [[], *slow(TWO)])
@pytest.mark.parametrize("several", slow(True, False))
def test_a_kill_changes_nothing_and_eval_scores_the_test_images_apart(
    several: bool,
    processes: list[str],
    cait: Cait,
    tmp_path: Path,
    here: Path,
    write_table: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_table(str(tmp_path / "labels.csv"), several=several)
    recipe = [
        *RECIPE,
        *processes,
        "--trainer.max_epochs=2",
        "--data.labels=labels.csv",
        "--data.folds=3",
        "--data.fold=1",
        f"--data.multi_label={str(several).lower()}",
    ]
    (here / "labels.csv").write_bytes((tmp_path / "labels.csv").read_bytes())
    whole = ended(here, f"whole{len(processes)}{several}", recipe)
    job = start(tmp_path, "fit", *recipe, "--run_name=cut")
    wait_for_steps(tmp_path / "logs/cut", 8, job)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    changed = (tmp_path / "labels.csv").read_text().replace("0000.png,even", "0000.png,odd", 1)
    kept = (tmp_path / "labels.csv").rename(tmp_path / "kept.csv")
    (tmp_path / "labels.csv").write_text(changed)
    refused = cait("resume", "cut")
    assert refused.returncode != 0
    assert "digest of the training pictures" in refused.stderr
    kept.rename(tmp_path / "labels.csv")
    assert cait("resume", "cut").returncode == 0
    assert_same(tmp_path / "logs/cut", whole)

    scored = cait("eval", "cut", *processes)
    assert scored.returncode == 0, scored.stderr
    found = json.loads((tmp_path / "logs/cut/evaluation.json").read_text())
    source = open_source(str(tmp_path / "data/digits"), labels=str(tmp_path / "labels.csv"), folds=3, fold=1)
    if several:
        monkeypatch.chdir(tmp_path)
        check_figures_and_predictions(Path("logs/cut"), found["ema"], capsys)
    assert found["raw"]["images"] == len(source.val)
    assert found["raw"]["extra"]["test"]["images"] == len(source.test)
    assert "test top-1" in scored.stdout


def check_figures_and_predictions(run: Path, scores: dict, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of several labels against scikit-learn's on what the run predicts; thresholds in all that predicts."""
    rows = {row["path"]: row["class"] for row in csv.DictReader((run / "validation.csv").open(newline=""))}
    module = cait_load(run)
    images = [f"data/digits/{path}" for path in rows]
    logits = torch.cat([module(module.transform(path)[None]) for path in images]).detach()
    truth = np.array([[name in label.split(";") for name in ("even", "odd", "three")] for label in rows.values()])
    probabilities = logits.sigmoid().numpy()
    assert scores["mAP"] == pytest.approx(average_precision_score(truth, probabilities), abs=1e-4)
    thresholds = np.array([*scores["multi_label"]["thresholds"].values()])
    hits = probabilities >= thresholds
    assert scores["f1"] == pytest.approx(f1_score(truth, hits, average="macro"), abs=5e-3)
    assert torch.equal(module.task.thresholds, torch.tensor(thresholds, dtype=torch.float32))
    capsys.readouterr()
    main(["predict", "cut", images[0], "--format=csv"])
    found = [name for name, hit in zip(("even", "odd", "three"), hits[0], strict=True) if hit]
    listed = next(csv.DictReader(capsys.readouterr().out.splitlines()))["class"]
    assert {*listed.split(";")} - {""} == {*found}
    main(["export", "cut", "--ema", "--format=onnx"])
    facts = {each.key: each.value for each in onnx.load(run / "export/ema/model.onnx").metadata_props}
    assert json.loads(facts["thresholds"]) == pytest.approx(thresholds, abs=1e-6)


def test_a_folder_of_three_splits_is_scored_as_three(cait: Cait, tmp_path: Path, digits_root: Path) -> None:
    three = tmp_path / "three"
    for split, source in (("train", "train"), ("val", "val"), ("test", "val")):
        (three / split).mkdir(parents=True)
        for digit in range(2 if split == "test" else 3):
            (three / split / str(digit)).symlink_to(digits_root / source / str(digit))
    trained = cait(
        "fit", *SHORT, "--data.root=three", "--data.batch_size=16", "--run_name=three", "--max_nonfinite_steps=5"
    )
    assert trained.returncode == 0, trained.stderr
    scored = cait("eval", "three")
    assert scored.returncode == 0, scored.stderr
    assert "left out" not in scored.stdout + scored.stderr  # a setting of `fit` alone is not an absent one
    found = json.loads((tmp_path / "logs/three/evaluation.json").read_text())["raw"]
    assert found["extra"]["test"]["images"] == len([*three.glob("test/*/*")]) < found["images"]
    assert list(found["extra"]["test"]["per_class"]) == ["0", "1", "2"]
    (three / "test/unlabelled").mkdir()
    again = cait("eval", "three")
    assert again.returncode == 0
    assert "three/test is not scored" in again.stdout + again.stderr
