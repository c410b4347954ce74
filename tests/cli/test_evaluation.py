"""`cait eval`: what it counts, held against the network alone; what it prints and writes."""

import re
import shutil

import processes
import pytest
import scored
import torch
import yaml
from harness import call, parsed, works
from scored import NAMES, TWO, logits_of
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score
from sklearn.metrics import top_k_accuracy_score as top_k

from cait import plugins
from cait.run import rundir

BEST = "logs/mine/checkpoints/best.ckpt"
CONFIG = "--config=logs/mine/config.yaml"
ABOUT = yaml.safe_load("""
weights: logs/mine/checkpoints/best.ckpt
model: xxs24
img_size: 16
crop_pct: 1.0
root: data
class_names: [n00, n01, n02, n03, n04, n05, n06, n07, n08, n09, n10, n11]
fit: crop
interpolation: bicubic
exif_orientation: true
background: white
""")
COUNTS = ("acc1", "acc5", "images", "per_class")
"""Scores that are the same to the last digit, whatever the batches are."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run that has seen the digits."""
    place = scored.copied(tmp_path_factory)
    assert not (place / "logs/mine/evaluation.json").exists()  # training does not count this
    return place


@pytest.fixture(scope="module")
def evaluated(place):
    """What two processes print and write."""
    done = works(processes.run(place, "eval", "mine", *TWO, processes=2))
    return {"shown": done.stdout, **parsed(place / "logs/mine/evaluation.json")}


def score(place, *words):
    """What one process prints and writes."""
    done = works(call(place, "eval", *words, "--data.num_workers=0", "--output=found/scores.json"))
    return {"shown": done.stdout, **parsed(place / "found/scores.json")}


def counts(scores):
    return [scores[name] for name in COUNTS]


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_the_scores_are_the_networks_over_two_processes(place, evaluated, weights):
    scores = evaluated[weights]
    paths, labels = scored.validation(place)
    logits = logits_of(place, weights, paths)
    best = logits.argmax(dim=1)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert scores["images"] == len(paths) == 300
    assert scores["loss"] == pytest.approx(loss, rel=1e-4)
    assert scores["acc1"] == pytest.approx(100 * accuracy_score(labels, best), rel=1e-5)
    assert scores["acc5"] == pytest.approx(100 * top_k(labels, logits, k=5), rel=1e-5)
    assert scores["acc1_macro"] == pytest.approx(100 * balanced_accuracy_score(labels, best))
    assert [*scores["per_class"]] == NAMES
    by_class = 100 * recall_score(labels, best, average=None)
    assert [*scores["per_class"].values()] == pytest.approx([*by_class])


def test_what_is_printed_and_written(evaluated):
    """How it looks is in a golden file."""
    shown = evaluated["shown"]
    assert shown.count("by class: logs/mine/evaluation.json") == 1  # one process speaks
    assert "val/acc1" not in shown  # Lightning's table has the same figures
    for title, name in {"top-1": "acc1", "top-5": "acc5", "classes": "acc1_macro"}.items():
        raw, average = evaluated["raw"][name], evaluated["ema"][name]
        assert re.search(rf"{title} +│ +{raw:.2f} % │ +{average:.2f} % ", shown)
    assert ABOUT.items() <= evaluated.items()
    assert evaluated["step"] == (evaluated["epoch"] + 1) * ((1797 + 360 - 500) // 64)


def test_a_checkpoint_is_scored_without_its_run(place, evaluated):
    scores = score(place, CONFIG, "--trainer.limit_val_batches=null", f"--ckpt_path={BEST}")
    assert scores["step"] == evaluated["step"]
    assert counts(scores["ema"]) == counts(evaluated["ema"])


def test_of_weights_those_that_chose_the_checkpoint_are_scored(place, evaluated):
    scores = score(place, CONFIG, "--trainer.limit_val_batches=null", f"--model.weights={BEST}")
    assert counts(scores["raw"]) == counts(evaluated["ema"])
    assert (scores["weights"], scores["step"]) == (BEST, None)
    assert "ema" not in scores


@pytest.mark.parametrize(
    "words",
    [["mine"], [CONFIG, f"--ckpt_path={BEST}"], [CONFIG, f"--model.weights={BEST}"]],
)
def test_all_images_of_another_folder_are_scored(words, place):
    """Also where a run would hold out a tenth."""
    images = len([*(place / "v2").glob("*/*.jpeg")])
    assert score(place, *words, "--data.root=named")["raw"]["images"] == images


def test_the_runs_own_folder_has_more_than_one_name(place):
    assert score(place, "mine", f"--data.root={place / 'data'}")["raw"]["images"] == 300


@pytest.mark.parametrize("content", ["gone", "the same", "another"])
def test_a_copy_of_a_runs_folder_is_scored_on_what_is_held_out(content, place):
    """However it has grown and its names are composed; but not another folder with the same names."""
    folder = place / f"copy, {content}"
    run = place / "logs" / content
    shutil.copytree(place / "named", folder)
    shutil.copytree(place / "logs/mine", run)
    images = sorted(folder.glob("*/*.jpeg"))
    images[0] = images[0].rename(images[0].with_name("e\u0301.jpeg"))
    listed = [images[0].with_name("\u00e9.jpeg"), images[1]]
    names = [str(path.relative_to(folder)) for path in listed]
    (run / rundir.VALIDATION).write_text("\n".join(["path", *names]))
    if content != "gone":
        for path in images[:2]:
            original = place / "data" / path.relative_to(folder)
            original.parent.mkdir(exist_ok=True)
            original.write_bytes(path.read_bytes() if content == "the same" else b"another")
    scores = score(place, str(run), f"--data.root={folder}")
    assert scores["raw"]["images"] == (len(images) if content == "another" else 2)


def test_without_extras_loss_and_accuracy_are_scored(place, evaluated, monkeypatch):
    monkeypatch.setattr(plugins, "extras", dict)
    scores = score(place, "mine")
    assert scores["raw"].keys() == {"loss", *COUNTS, "acc1_macro"}
    for weights in ("raw", "ema"):
        assert counts(scores[weights]) == counts(evaluated[weights])
    assert re.search(rf" top-1 +│ +{scores['raw']['acc1']:.2f} % ", scores["shown"])
    assert "by class: found/scores.json" in scores["shown"]
    assert "--trust-config" in call(place, "eval", "--help").stdout
