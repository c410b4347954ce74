"""Cross-validation: its interval, the labels that it doubts, held against cleanlab, and what it leaves and resumes."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from class_folders import fill
from filelock import Timeout
from harness import SMALL, parsed, rows
from PIL import Image

from cait import disk
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.source import open_source
from contrib.crossval import doubt, doubtful_page, verb

pytest.importorskip("cait.extras.annotations")
SHORT = [
    *SMALL,
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--data.num_workers=0",
]


def images(root):
    """Every image, below the folder."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.png"))


def test_what_is_doubtful_is_what_cleanlab_says():
    cleanlab = pytest.importorskip("cleanlab.filter")
    draw = np.random.default_rng(0)
    labels = draw.integers(6, size=400)
    probabilities = draw.dirichlet(np.ones(6), 400)
    probabilities[np.arange(400), labels] += draw.random(400)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    expected = cleanlab.find_label_issues(labels, probabilities, filter_by="confident_learning")
    doubtful, _ = doubt.suspects(probabilities, labels)
    assert sorted(doubtful) == np.flatnonzero(expected).tolist()


def test_doubtful_labels_come_first_in_a_table_that_can_be_given_back(tmp_path):
    root = fill(tmp_path / "images", {"a": 6, "b": 7})
    paths = images(root)
    probabilities = np.repeat([[0.8, 0.2], [0.2, 0.8]], 6, axis=0)
    probabilities[2] = 0.1, 0.9  # the networks are sure of the other class
    probabilities[7] = 0.7, 0.3
    first = (paths[:6], [0] * 6, probabilities[:6])
    second = (paths[6:12], [1] * 6, probabilities[6:])
    groups = {path: path[-5] for path in paths}
    doubt.write(tmp_path, ["a", "b"], [first, second], groups, [(paths[12], "b")])
    written = parsed(tmp_path / doubt.DOUBTFUL)
    assert [row["path"] for row in written[:2]] == [paths[2], paths[7]]
    assert [row["suggestion"] for row in written] == ["b", "a", *[""] * 11]
    assert all(row["label"] == row["path"][0] for row in written)
    source = open_source(str(root), labels=str(tmp_path / doubt.DOUBTFUL))
    assert [path for path, _ in source.test] == [str(root / paths[12])]
    assert len(source.train) + len(source.val) == 12
    for number, (path, _) in enumerate(source.images):
        assert source.images.group(number) == path[-5]


def shown(page):
    """The pictures of a page."""
    contents = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(content))) for content in contents]


def test_the_page_shows_the_most_doubtful_images_whole_and_small(tmp_path):
    data = ImageNetDataModule(root=str(tmp_path), background="#ff0000")
    Image.new("RGB", (400, 200), "blue").save(tmp_path / "0.png")
    Image.new("RGBA", (400, 200), (0, 0, 255, 0)).save(tmp_path / "1.png")
    row = ("<owl>", "0.0010", "cat", "0.7500")
    suspects = [("1.png", *row), *[("0.png", *row)] * 202]
    doubtful_page.write(tmp_path, suspects, 5000, data)
    page = (tmp_path / doubtful_page.PAGE).read_text()
    first, second, *others = shown(page)
    assert first.size == (192, 96)
    # read as the run reads them: what is clear is red
    assert np.asarray(first).mean((0, 1)).argmax() == 0
    assert np.asarray(second).mean((0, 1)).argmax() == 2
    assert 2 + len(others) == doubtful_page.MOST
    assert "203 of 5,000 labels, the 200 most doubtful below" in page
    assert re.search("labeled &lt;owl&gt;: 0.1%.*seems cat: 75.0%; 1.png", page, re.DOTALL)
    assert not re.search(r"<owl>|https?:|url\(|<script", page)
    doubtful_page.write(tmp_path, [], 5000, data)
    empty = (tmp_path / doubtful_page.PAGE).read_text()
    assert "0 of 5,000 labels<" in empty
    assert "<img" not in empty


def test_planes_are_shown_too(tmp_path):
    pytest.importorskip("cait.extras.channels")
    np.save(tmp_path / "0.npy", np.full((20, 10, 5), 0.5))
    how = dict(reader="cait.extras.channels.planes:read", in_chans=5, mean=[0.5] * 5, std=[0.3] * 5)
    data = ImageNetDataModule(root=str(tmp_path), auto_augment=None, **how)
    doubtful_page.write(tmp_path, [("0.npy", "owl", "0.1", "cat", "0.9")], 1, data)
    assert len(shown((tmp_path / doubtful_page.PAGE).read_text())) == 1


def test_folds_train_as_many_epochs_as_the_first_has_planned(here):
    pytest.importorskip("cait.extras.recipe")
    longer = ["--trainer.max_epochs=9", "--trainer.limit_train_batches=5"]
    main(["fit", *SHORT, *longer, "--plan_minutes=1e-3", "--run_name=planned"])
    assert verb._decided(Path("logs/planned")) == ["--plan_minutes=null", "--trainer.max_epochs=1"]


def test_a_second_process_waits(here, monkeypatch):
    def train(program, run, *_):
        with pytest.raises(Timeout):
            disk.acquire_lock(run.parent / verb.LOCK, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "_train", train)
    with pytest.raises(SystemExit):
        main(["crossval", "two", "--data.root=data/digits"])


@pytest.mark.slow
def test_a_cross_validation_goes_on_where_it_stopped(cait, tmp_path, monkeypatch):
    command = ["crossval", "cv", *SHORT, "--data.folds=2", "--data.root=data/digits"]
    train = verb._train

    def stop_before_the_second(program, run, fold, settings):
        if fold == 1:
            raise KeyboardInterrupt
        train(program, run, fold, settings)

    with monkeypatch.context() as patch:
        patch.setattr(verb, "_train", stop_before_the_second)
        assert cait(*command).returncode == 130
    folder = tmp_path / "logs/cv"
    last = folder / "fold-0/checkpoints/last.ckpt"
    before = last.stat().st_mtime_ns
    done = cait(*command)
    assert "95% interval of the mean" in done.stdout, done.stderr
    assert last.stat().st_mtime_ns == before
    [doubtful] = re.findall(r"(\d+) doubtful labels", done.stdout)
    pictures = (folder / "doubtful.html").read_text().count("<figure>")
    assert pictures == min(int(doubtful), doubtful_page.MOST)
    validated = []
    for row in parsed(folder / "crossval.csv"):
        run = folder / f"fold-{row['fold']}"
        accuracies = [line["val/acc1"] for line in rows(run) if line["val/acc1"]]
        assert float(row["last"]) == float(accuracies[-1])
        validated += [line["path"] for line in parsed(run / "validation.csv")]
    assert sorted(validated) == images(tmp_path / "data/digits")
