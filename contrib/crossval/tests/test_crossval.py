"""Cross-validation: its interval, the labels that it doubts, held against cleanlab, and what it leaves and resumes."""

from __future__ import annotations

import base64
import csv
import io
import math
import os
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import Timeout
from harness import SMALL
from PIL import Image

from cait import disk
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.source import open_source
from cait.errors import UserError
from contrib.crossval import doubt, doubtful_page, verb

pytest.importorskip("cait.extras.annotations")
SHORT = [
    *SMALL,
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--data.num_workers=0",
]


def images(root: Path) -> list[str]:
    """Every image of the digits, below their folder."""
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*/*.png"))


def test_the_best_score_of_a_fold_is_that_of_its_best_checkpoint(tmp_path: Path) -> None:
    best = {"monitor": "val/mine", "best_model_score": torch.tensor(3.0), "other_score": None}
    states = {"EarlyStopping": {"best_score": torch.tensor(1.0)}, "BestCheckpoint": best}
    runs = [tmp_path / f"fold-{fold}" for fold in range(2)]
    for run in runs:
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text(
            "{best_metric: val/mine, model: {name: xxs24}, data: {root: data}}\n"
        )
        (run / "metrics.csv").write_text("epoch,step,val/mine\n0,1,3\n1,2,1\n2,3,nan\n3,4,2\n")
        torch.save(
            {"state_dict": {}, "global_step": 4, "callbacks": states}, run / "checkpoints/last.ckpt"
        )
    verb._report(tmp_path, runs)
    with (tmp_path / "crossval.csv").open(newline="") as lines:
        assert [[*row.values()] for row in csv.DictReader(lines)] == [
            ["0", "2.0", "3.0"],
            ["1", "2.0", "3.0"],
        ]


def test_images_that_change_between_the_folds_are_noticed(tmp_path: Path) -> None:
    runs = [tmp_path / f"fold-{fold}" for fold in range(3)]
    for run, held in zip(runs, ("ab", "cd", "eb"), strict=True):
        run.mkdir()
        (run / "validation.csv").write_text(
            "path,class\n" + "".join(f"{name}.png,x\n" for name in held)
        )
    verb._check_apart(runs[:2])
    with pytest.raises(
        UserError, match=r"the images or labels have changed since .*fold-0 was trained"
    ):
        verb._check_apart(runs)


def test_the_interval_is_nadeau_and_bengios() -> None:
    scores = [91.0, 93.0, 92.5, 90.0, 94.0]
    error = math.sqrt((1 / 5 + 1 / 4) * statistics.variance(scores))
    low, high = verb.interval(scores)
    assert (low + high) / 2 == pytest.approx(statistics.mean(scores))
    # Student's t at .975 with four degrees of freedom
    assert (high - low) / 2 == pytest.approx(2.7764451 * error)


def test_doubtful_labels_come_first_in_a_table_that_can_be_given_back(here: Path) -> None:
    paths = images(Path("data/digits"))[:60:2] + images(Path("data/digits"))[-30:]
    labels = [int(Path(path).parent.name) for path in paths]
    draw = np.random.default_rng(0)
    probabilities = draw.dirichlet(np.ones(10), len(paths)).astype(np.float32)
    probabilities[np.arange(len(paths)), labels] += 1
    # the network is sure of another class
    probabilities[[3, 40]] = np.eye(10, dtype=np.float32)[[9, 0]]
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    doubtful, seems = doubt.suspects(probabilities, np.array(labels))
    assert sorted(doubtful) == [3, 40]
    assert dict(zip(doubtful, seems, strict=True)) == {3: 9, 40: 0}

    halves = [
        (paths[part], labels[part], probabilities[part]) for part in (slice(0, 35), slice(35, None))
    ]
    groups = {path: path[-5] for path in paths}
    rows = doubt.write(here, [str(digit) for digit in range(10)], halves, groups)
    assert [(row[0], row[3]) for row in rows] == [
        (paths[index], str(seems[place])) for place, index in enumerate(doubtful)
    ]
    with (here / doubt.DOUBTFUL).open(newline="") as lines:
        table = list(csv.DictReader(lines))
    assert {row["path"]: row["suggestion"] for row in table[:2]} == {paths[3]: "9", paths[40]: "0"}
    assert [row["suggestion"] for row in table[2:]] == [""] * 58
    listed = open_source("data/digits", labels=str(here / doubt.DOUBTFUL)).images
    assert {
        os.path.relpath(path, "data/digits"): listed.group(i) for i, (path, _) in enumerate(listed)
    } == groups

    apart = [path for path in images(Path("data/digits")) if path not in paths][:5]
    tests = [(path, Path(path).parent.name) for path in apart]
    doubt.write(here, [str(digit) for digit in range(10)], halves, {}, tests)
    source = open_source("data/digits", labels=str(here / doubt.DOUBTFUL))
    assert {os.path.relpath(path, "data/digits") for path, _ in source.test} == {*apart}
    assert len(source.train) + len(source.val) == len(paths)


def test_the_page_shows_the_most_doubtful_images_whole_and_small(tmp_path: Path) -> None:
    data = ImageNetDataModule(root=str(tmp_path), background="#ff0000")
    rows = []
    for number in range(doubtful_page.MOST + 3):
        Image.new("RGBA", (400 + number, 200), (0, 0, 255, 0 if number == 1 else 255)).save(
            tmp_path / f"{number}.png"
        )
        rows.append((f"{number}.png", "<owl>", f"{number / 1000:.4f}", "cat", "0.7500"))
    doubtful_page.write(tmp_path, rows, 5000, data)
    html = (tmp_path / doubtful_page.PAGE).read_text()
    contents = [
        base64.b64decode(text) for text in re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    ]
    shown = [Image.open(io.BytesIO(content)) for content in contents]
    assert [image.size for image in shown[:2]] == [(192, 96), (192, 96)]
    # read as the run reads them
    assert [np.asarray(image).mean((0, 1)).argmax() for image in shown[:2]] == [
        2,
        0,
    ]
    assert len(shown) == html.count("<figure>") == doubtful_page.MOST
    words = [
        "203 of 5,000 labels, the 200 most doubtful below",
        "labeled &lt;owl&gt;: 0.1%",
        "seems cat: 75.0%; 1.png",
    ]
    places = [html.index(word) for word in words]
    assert places == sorted(places)
    assert "<owl>" not in html
    assert not re.search(r"https?:|url\(|<script", html)
    doubtful_page.write(tmp_path, [], 5000, data)
    none = (tmp_path / doubtful_page.PAGE).read_text()
    assert "0 of 5,000 labels<" in none
    assert "<img" not in none


def test_planes_are_shown_too(tmp_path: Path) -> None:
    pytest.importorskip("cait.extras.channels")
    np.save(tmp_path / "0.npy", np.random.default_rng(0).random((20, 10, 5)))
    how = dict(reader="cait.extras.channels.planes:read", in_chans=5, mean=[0.5] * 5, std=[0.3] * 5)
    data = ImageNetDataModule(root=str(tmp_path), auto_augment=None, **how)
    doubtful_page.write(tmp_path, [("0.npy", "owl", "0.1", "cat", "0.9")], 1, data)
    assert "data:image/jpeg;base64," in (tmp_path / doubtful_page.PAGE).read_text()


def test_folds_train_as_many_epochs_as_the_first_has_planned(here: Path) -> None:
    pytest.importorskip("cait.extras.recipe")
    words = [
        "--trainer.max_epochs=9",
        "--trainer.limit_train_batches=5",
        "--plan_minutes=1e-3",
        "--data.num_workers=0",
    ]
    main(["fit", *SMALL, *words, "--run_name=planned"])
    assert verb._decided(Path("logs/planned")) == ["--plan_minutes=null", "--trainer.max_epochs=1"]


def test_what_is_doubtful_is_what_cleanlab_says() -> None:
    cleanlab = pytest.importorskip("cleanlab.filter")
    draw = np.random.default_rng(0)
    labels = draw.integers(6, size=400)
    probabilities = draw.dirichlet(np.ones(6), 400)
    probabilities[np.arange(400), labels] += draw.random(400)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    expected = cleanlab.find_label_issues(labels, probabilities, filter_by="confident_learning")
    assert sorted(doubt.suspects(probabilities, labels)[0]) == np.flatnonzero(expected).tolist()


def test_a_cross_validation_that_cannot_begin_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["crossval", "none", *SHORT, "--data.root=nowhere"])
    told = "the data folder nowhere does not exist; name yours with --data.root"
    assert (stop.value.code, capsys.readouterr().err) == (2, f"cait: error: {told}\n")
    assert not (here / "logs/none").exists()
    (here / "one.yaml").write_text("data: {folds: 1}")
    with pytest.raises(SystemExit):
        main(["crossval", "none", *SHORT, "--config=one.yaml"])
    assert capsys.readouterr().err == "cait: error: --data.folds must be at least 2, got 1\n"


def test_a_second_process_waits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(program: object, run: Path, *_: object) -> None:
        with pytest.raises(Timeout):
            disk.acquire_lock(run.parent / verb.LOCK, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "_train", train)
    with pytest.raises(SystemExit):
        main(["crossval", "two", "--data.root=data/digits"])


@pytest.mark.slow
def test_a_cross_validation_goes_on_where_it_stopped(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, asked = verb._train, []

    def stop_before_the_second(runner: object, run: Path, fold: int, settings: list[str]) -> None:
        asked.append(fold)
        if asked == [0, 1]:
            raise KeyboardInterrupt
        train(runner, run, fold, settings)  # type: ignore[arg-type]

    monkeypatch.setattr(verb, "_train", stop_before_the_second)
    command = ["crossval", "cv", *SHORT, "--data.folds=2", "--data.root=data/digits"]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(command)
    first = (here / "logs/cv/fold-0/checkpoints/last.ckpt").stat().st_mtime_ns
    main(command)
    assert (here / "logs/cv/fold-0/checkpoints/last.ckpt").stat().st_mtime_ns == first
    shown = capsys.readouterr().out
    assert "95% interval of the mean" in shown
    listed = int(re.search(r"(\d+) doubtful labels", shown)[1])  # type: ignore[index]
    assert (here / "logs/cv/doubtful.html").read_text().count("<figure>") == min(
        listed, doubtful_page.MOST
    )
    with (here / "logs/cv/crossval.csv").open(newline="") as lines:
        table = list(csv.DictReader(lines))
    assert [row["fold"] for row in table] == ["0", "1"]
    sets = []
    for fold, row in enumerate(table):
        with (here / f"logs/cv/fold-{fold}/metrics.csv").open(newline="") as lines:
            last = [line["val/acc1"] for line in csv.DictReader(lines) if line.get("val/acc1")][-1]
        assert float(row["last"]) == float(last)
        with (here / f"logs/cv/fold-{fold}/validation.csv").open(newline="") as lines:
            sets.append({line["path"] for line in csv.DictReader(lines)})
    assert not sets[0] & sets[1]
    assert sorted(sets[0] | sets[1]) == images(here / "data/digits")
    with pytest.raises(SystemExit):
        main([*command, "--model.lr=1e-3"])
    assert "has folds with other settings" in capsys.readouterr().err
