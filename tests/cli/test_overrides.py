"""What a subclass may override: each verb uses it, or a line says that it does not."""

import functools
import json
import re

import numpy as np
import pytest
from harness import REPO, SMALL, call, checkpoint, ended, over_table, parsed, rows, works
from PIL import Image, ImageOps
from sklearn.metrics import accuracy_score, log_loss

import cait
from cait.cli.command import verbs

PARTS = """
from pathlib import Path

import cait
import torch
from PIL import ImageOps
from torchvision import transforms


class loss_of(cait.CaiTModule):
    def loss_of(self, logits, targets):
        return 4 * super().loss_of(logits, targets)


class forward(cait.CaiTModule):
    def forward(self, images):
        return super().forward(images).roll(1, dims=1)


class predict_step(cait.CaiTModule):
    def predict_step(self, batch, batch_idx):
        return super().predict_step(batch, batch_idx).roll(1, dims=1)


class training_step(cait.CaiTModule):
    def training_step(self, batch, batch_idx):
        images, targets = batch
        return 4 * self.loss_of(self(images), targets)


class configure_optimizers(cait.CaiTModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.5)


class make_train_transform(cait.ImageNetDataModule):
    def make_train_transform(self):
        return transforms.Compose([count, transforms.Resize(self.img_size), transforms.PILToTensor()])


class make_eval_transform(cait.ImageNetDataModule):
    def make_eval_transform(self):
        return transforms.Compose([ImageOps.mirror, super().make_eval_transform()])


def count(image):
    with Path("counted").open("a") as file:
        file.write(".")
    return image
"""
"""A class for each row of the table in docs/extending.md, called as its method."""
PLAIN = "nothing"
MODULE = ["loss_of", "forward", "predict_step", "training_step", "configure_optimizers"]
DATA = ["make_train_transform", "make_eval_transform"]
ANSWERS = ["forward", "predict_step"]
"""Those that change what the network answers."""
BATCH = 64
STEPS = 3
WORDS = f"""
    --data.batch_size={BATCH} --data.num_workers=0 --data.mixup=0 --data.cutmix=0
    --model.drop_path_rate=0 --model.schedule=constant
    --trainer.max_epochs=1 --trainer.limit_train_batches={STEPS} --trainer.log_every_n_steps=1
"""
RECIPE = [*SMALL, *WORDS.split()]
STILL = [*RECIPE, "--model.warmup_epochs=0", "--model.lr=0"]
"""All such runs keep the weights that they begin with, so their figures can be compared."""
VAL = "data/digits/val"
overrides = pytest.mark.parametrize("name", MODULE + DATA)


def test_the_page_lists_what_is_tried_here():
    text = (REPO / "docs/extending.md").read_text()
    _, table = text.split("| method | gets | returns | used by |\n")
    listed = re.findall(r"^\| `(\w+)\(.*?\)` \|", table, re.MULTILINE)
    assert listed == [*MODULE, *DATA, "make_source"]


def class_of(name):
    """The class that overrides a method, as a setting."""
    if name == PLAIN:
        return []
    setting = "module" if name in MODULE else "data_module"
    return [f"--{setting}=overriding:{name}"]


@pytest.fixture(scope="module")
def desk(place):
    """The digits, the same mirrored, and the classes."""
    (place / "overriding.py").write_text(PARTS)
    for path in (place / VAL).rglob("*.png"):
        copy = place / "mirrored" / path.relative_to(place / VAL)
        copy.parent.mkdir(parents=True, exist_ok=True)
        ImageOps.mirror(Image.open(path)).save(copy)
    return place


@pytest.fixture(scope="module")
def run(desk):
    """The folder of a run that overrides a method."""
    return functools.cache(lambda name: ended(desk, name, [*STILL, *class_of(name)]))


@pytest.fixture(scope="module")
def predicted(desk, run):
    """What `cait predict` says of a folder's images: probabilities [N, 10]."""

    def predict(name, images=VAL):
        run(name)
        done = works(call(desk, "predict", name, images, "--top_k=10", "--format=jsonl"))
        probabilities = []
        for line in done.stdout.splitlines():
            answers = json.loads(line)["predictions"]
            by_class = {answer["index"]: answer["probability"] for answer in answers}
            probabilities.append([by_class[index] for index in range(10)])
        return np.array(probabilities)

    return functools.cache(predict)


def expected(name, predicted):
    """The probabilities that a run has to give, from those of a run that overrides nothing."""
    if name in ANSWERS:
        return np.roll(predicted(PLAIN), 1, axis=1)
    return predicted(PLAIN, "mirrored" if name == "make_eval_transform" else VAL)


def logged(run, figure):
    return np.array([float(row[figure]) for row in rows(run) if row[figure]])


@overrides
def test_training_uses_it(name, run):
    plain, ours = rows(run(PLAIN))[0], rows(run(name))[0]
    steps = {"train/loss", "train/grad_norm"}
    if name == "training_step":  # which logs what it wants
        assert plain.keys() - ours.keys() == {"train/loss", "train/acc1", "lr"}
        steps = {"train/grad_norm"}
    else:
        assert plain.keys() == ours.keys()
    factor = 4 if name in ("loss_of", "training_step") else 1
    for figure in steps:
        values, plain_values = logged(run(name), figure), logged(run(PLAIN), figure)
        if name in ("forward", "make_train_transform"):
            assert not np.allclose(values, plain_values)
        else:
            np.testing.assert_allclose(values, factor * plain_values, rtol=1e-5)


@overrides
def test_validation_uses_it(name, desk, run, predicted):
    # a predict_step does not validate
    probabilities = predicted(PLAIN) if name == "predict_step" else expected(name, predicted)
    labels = [int(path.parent.name) for path in sorted((desk / VAL).glob("*/*"))]
    accuracy = 100 * accuracy_score(labels, probabilities.argmax(1))
    assert logged(run(name), "val/loss") == pytest.approx(log_loss(labels, probabilities), rel=1e-4)
    assert logged(run(name), "val/acc1") == pytest.approx(accuracy)


@overrides
def test_predict_and_load_use_it(name, desk, run, predicted, monkeypatch):
    probabilities = expected(name, predicted)
    np.testing.assert_allclose(predicted(name), probabilities, atol=1e-6)
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    first = min((desk / VAL).glob("*/*"))
    best = cait.load(run(name)).predict(first)[0]
    assert best["index"] == probabilities[0].argmax()
    assert best["probability"] == pytest.approx(probabilities[0].max(), abs=1e-6)


def test_each_image_passes_through_the_transform(desk, run):
    run("make_train_transform")
    assert len((desk / "counted").read_text()) == STEPS * BATCH


def test_the_optimizer_trains_is_saved_and_stands_on_the_screen(desk):
    words = [*class_of("configure_optimizers"), "--model.lr_base_size=512", "--run_name=screen"]
    done = works(call(desk, "fit", *RECIPE, *words, "--model.warmup_epochs=3"))
    assert "optimizer SGD of configure_optimizers, weight decay 0\n" in done.stdout
    assert "length    1 epochs, 3 steps; peak learning rate 0\n" in done.stdout
    assert "warm-up" not in done.stdout
    [optimizer] = checkpoint(desk / "logs/screen")["optimizer_states"]
    assert optimizer["param_groups"][0]["momentum"] == 0.5


@pytest.mark.slow
@overrides
def test_eval_uses_it(name, desk, run):
    ask(desk, "eval", run(name), "--data.num_workers=0")
    scores = parsed(run(name) / "evaluation.json")["raw"]
    for figure in ("loss", "acc1", "acc5"):
        assert scores[figure] == pytest.approx(logged(run(name), f"val/{figure}")[-1], rel=1e-5)


def ask(desk, verb, run, *words):
    """What a verb prints, maybe an extra's."""
    if verb not in verbs():
        pytest.skip("the verb of an extra that was removed")
    done = works(call(desk, verb, run.name, *words))
    return done.stdout + done.stderr


@pytest.mark.slow
@over_table(__file__, "says")
@overrides
def test_a_verb_says_what_it_leaves_out(verb, line, names, name, desk, run):
    """Of these methods, and of no other."""
    if verb == "card":
        ask(desk, "eval", run(name))
    words = [f"--images={VAL}", f"--output=of-{name}.npz"] if verb == "features" else []
    printed = ask(desk, verb, run(name), *words)
    if verb == "card":
        printed = (run(name) / "card/README.md").read_text()
    assert (line in printed) == (name in names)
    if line.endswith("without") and name in names:
        assert f"{line} {name} of {name}" in printed


@pytest.mark.slow
def test_features_are_those_of_transformed_images(desk, run):
    ask(desk, "features", run(PLAIN), "--images=mirrored", "--output=plain.npz")
    ask(desk, "features", run("make_eval_transform"), f"--images={VAL}", "--output=ours.npz")
    plain, ours = np.load(desk / "plain.npz"), np.load(desk / "ours.npz")
    np.testing.assert_allclose(ours["features"], plain["features"], atol=1e-5)


@pytest.mark.slow
@overrides
def test_visualize_uses_it(name, desk, run, predicted):
    image = min((desk / VAL).glob("*/*"))
    printed = ask(desk, "visualize", run(name), f"--images={image}", "--no_validation")
    best = predicted(name)[0]
    assert f"0-{image.name}  {best.argmax()} {best.max():.1%}" in printed


@pytest.mark.slow
@overrides
def test_replay_uses_it(name, desk, run):
    printed = ask(desk, "replay", run(name), "--step=1")
    assert "not logged" not in printed
    assert printed.count("same") == (1 if name == "training_step" else 4)
