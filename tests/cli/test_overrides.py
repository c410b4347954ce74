"""What a subclass may override: each verb uses it, or a line says that it does not."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import REPO, SMALL, call, ended, rows
from PIL import Image, ImageOps
from runs import assert_same

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


class Forgetful(cait.CaiTModule):
    def configure_optimizers(self):
        torch.optim.SGD(self.parameters(), lr=0.1)


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
BATCH = 64
STEPS = 3
RECIPE = [
    *SMALL,
    f"--data.batch_size={BATCH}",
    "--data.num_workers=0",
    "--data.mixup=0",
    "--data.cutmix=0",
    "--model.drop_path_rate=0",
    "--model.warmup_epochs=0",
    "--model.schedule=constant",
    "--trainer.max_epochs=1",
    f"--trainer.limit_train_batches={STEPS}",
    "--trainer.log_every_n_steps=1",
]
STILL = [*RECIPE, "--model.lr=0"]
"""All such runs keep the weights that they begin with, so their figures can be compared."""
VAL = "data/digits/val"
IMAGE = f"{VAL}/7/0081.png"
overrides = pytest.mark.parametrize("name", MODULE + DATA)


def test_the_page_lists_what_is_tried_here() -> None:
    text = (REPO / "docs/extending.md").read_text()
    _, table = text.split("| method | gets | returns | used by |\n")
    listed = re.findall(r"^\| `(\w+)\(.*?\)` \|", table, re.MULTILINE)
    assert listed == [*MODULE, *DATA, "make_source"]


def named(name: str) -> list[str]:
    """The class that overrides a method, as a setting."""
    if name == PLAIN:
        return []
    setting = "module" if name in MODULE else "data_module"
    return [f"--{setting}=overriding:{name}"]


@pytest.fixture(scope="module")
def desk(place: Path) -> Path:
    """The digits, the same mirrored, and the classes."""
    (place / "overriding.py").write_text(PARTS)
    for path in (place / VAL).rglob("*.png"):
        copy = place / "mirrored" / path.relative_to(place / VAL)
        copy.parent.mkdir(parents=True, exist_ok=True)
        ImageOps.mirror(Image.open(path)).save(copy)
    return place


@pytest.fixture(scope="module")
def run(desk: Path) -> Callable[[str], Path]:
    """The folder of a run that overrides a method."""
    return functools.cache(lambda name: ended(desk, name, [*STILL, *named(name)]))


@pytest.fixture(scope="module")
def predicted(desk: Path, run: Callable[[str], Path]) -> Callable[..., np.ndarray]:
    """What `cait predict` says of a folder's images: probabilities [N, 10]."""

    def predict(name: str, images: str = VAL) -> np.ndarray:
        run(name)
        done = call(desk, "predict", name, images, "--top_k=10", "--format=jsonl")
        assert done.returncode == 0, done.stderr
        probabilities = np.zeros((len(done.stdout.splitlines()), 10))
        for row, line in zip(probabilities, done.stdout.splitlines(), strict=True):
            for answer in json.loads(line)["predictions"]:
                row[answer["index"]] = answer["probability"]
        return probabilities

    return functools.cache(predict)


def figures(run: Path) -> dict[str, np.ndarray]:
    """What a run has logged, by name."""
    logged: dict[str, list[float]] = {}
    for row in rows(run):
        for name, value in row.items():
            if value:
                logged.setdefault(name, []).append(float(value))
    return {name: np.array(values) for name, values in logged.items()}


def expected(name: str, predicted: Callable[..., np.ndarray]) -> np.ndarray:
    """The probabilities that a run has to give, from those of a run that overrides nothing."""
    if name in ("forward", "predict_step"):
        return np.roll(predicted(PLAIN), 1, axis=1)
    return predicted(PLAIN, "mirrored" if name == "make_eval_transform" else VAL)


@overrides
def test_fit(name: str, desk: Path, run: Any, predicted: Any) -> None:
    plain = figures(run(PLAIN))
    (desk / "counted").unlink(missing_ok=True)
    ours = figures(run(name))
    if name == "training_step":
        assert ours.keys() == plain.keys() - {"train/loss", "train/acc1", "lr"}
    else:
        assert ours.keys() == plain.keys()
    if name in ("loss_of", "training_step"):
        plain["train/grad_norm"] *= 4
        plain["train/loss"] *= 4
    if name == "make_train_transform":
        assert len((desk / "counted").read_text()) == STEPS * BATCH
    if name == "configure_optimizers":
        optimizer = torch.load(run(name) / "checkpoints/last.ckpt")["optimizer_states"][0]
        assert optimizer["param_groups"][0]["momentum"] == 0.5
    changes_steps = name in ("forward", "make_train_transform")
    for figure, values in ours.items():
        if figure in ("train/loss", "train/grad_norm") and changes_steps:
            assert not np.allclose(values, plain[figure]), figure
        elif not figure.startswith("val") and not changes_steps:
            np.testing.assert_allclose(values, plain[figure], rtol=1e-5, err_msg=figure)
    # a predict_step does not validate
    probabilities = predicted(PLAIN) if name == "predict_step" else expected(name, predicted)
    labels = np.repeat(np.arange(10), [len([*path.iterdir()]) for path in classes(desk)])
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    assert ours["val/loss"] == pytest.approx([loss], rel=1e-4)
    assert ours["val/acc1"] == pytest.approx([100 * (probabilities.argmax(1) == labels).mean()])


def classes(desk: Path) -> list[Path]:
    return sorted((desk / VAL).iterdir())


@pytest.mark.slow
@overrides
def test_eval(name: str, desk: Path, run: Any) -> None:
    logged = figures(run(name))
    done = call(desk, "eval", name, "--data.num_workers=0")
    assert done.returncode == 0, done.stderr
    scores = json.loads((run(name) / "evaluation.json").read_text())["raw"]
    for figure in ("loss", "acc1", "acc5"):
        assert scores[figure] == pytest.approx(logged[f"val/{figure}"][-1], rel=1e-5)
    assert ("predict_step is for `predict`" in done.stderr + done.stdout) is (
        name == "predict_step"
    )


@overrides
def test_predict_and_load(
    name: str, desk: Path, run: Any, predicted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probabilities = expected(name, predicted)
    np.testing.assert_allclose(predicted(name), probabilities, atol=1e-6)
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    (best, *_) = cait.load(run(name)).predict(
        f"{VAL}/0/{sorted(classes(desk)[0].iterdir())[0].name}"
    )
    assert best["index"] == probabilities[0].argmax()
    assert best["probability"] == pytest.approx(probabilities[0].max(), abs=1e-6)


def test_no_optimizer_is_a_line(desk: Path) -> None:
    done = call(desk, "fit", *STILL, "--module=overriding:Forgetful", "--run_name=forgetful")
    assert done.returncode == 2
    assert "configure_optimizers of Forgetful gives no optimizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_screen_names_ones_own_optimizer(desk: Path) -> None:
    words = [*named("configure_optimizers"), "--model.lr_base_size=512", "--run_name=screen"]
    done = call(desk, "fit", *RECIPE, *words, "--model.warmup_epochs=3")
    assert done.returncode == 0, done.stderr
    assert "optimizer SGD of configure_optimizers, weight decay 0\n" in done.stdout
    assert "length    1 epochs, 3 steps; peak learning rate 0\n" in done.stdout
    assert "warm-up" not in done.stdout


@pytest.mark.slow
@overrides
def test_resume(name: str, desk: Path) -> None:
    """As `kill_and_resume`, in epochs."""
    recipe = [*RECIPE, *named(name), "--model.lr=1e-3"]
    whole = ended(desk, f"{name}-whole", [*recipe, "--trainer.max_epochs=2"])
    ended(desk, f"{name}-cut", recipe)
    done = call(desk, "resume", f"{name}-cut", "--trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert_same(desk / f"logs/{name}-cut", whole)


def ask(desk: Path, verb: str, *words: str) -> str:
    """What an extra's verb prints."""
    if verb not in verbs():
        pytest.skip("the verb of an extra that was removed")
    done = call(desk, verb, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def left_out(name: str) -> str:
    """The line of a verb that takes the network alone; empty if it takes all of the run."""
    is_left_out = name in ("forward", "predict_step")
    return f"this is the network alone, without {name} of {name}" if is_left_out else "\0"


@pytest.mark.slow
@overrides
def test_features(name: str, desk: Path, run: Any) -> None:
    def taken(name: str, images: str) -> tuple[str, np.ndarray]:
        run(name)
        file = f"{name}-{images.replace('/', '-')}.npz"
        words = (name, f"--images={images}", f"--output={file}")
        (desk / file).unlink(missing_ok=True)
        return ask(desk, "features", *words), np.load(desk / file)["features"]

    printed, features = taken(name, VAL)
    _, plain = taken(PLAIN, "mirrored" if name == "make_eval_transform" else VAL)
    np.testing.assert_allclose(features, plain, atol=1e-5)
    assert (left_out(name) in printed) is (name in ("forward", "predict_step"))


@pytest.mark.slow
@overrides
def test_export(name: str, desk: Path, run: Any) -> None:
    run(PLAIN)
    ask(desk, "export", PLAIN)
    printed = ask(desk, "export", run(name).name)
    weights = "export/timm/model.safetensors"
    assert (run(name) / weights).read_bytes()[-1000:] == (run(PLAIN) / weights).read_bytes()[-1000:]
    assert (left_out(name) in printed) is (name in ("forward", "predict_step"))
    says_transform = "the file does not say how images are prepared" in printed
    assert says_transform is (name == "make_eval_transform")


@pytest.mark.slow
@overrides
def test_visualize(name: str, desk: Path, run: Any, predicted: Any) -> None:
    run(name)
    printed = ask(desk, "visualize", name, f"--images={IMAGE}", "--no_validation")
    row = [*(path for folder in classes(desk) for path in sorted(folder.iterdir()))].index(
        desk / IMAGE
    )
    best = predicted(name)[row]
    assert f"7-0081.png  {best.argmax()} {best.max():.1%}" in printed
    assert (left_out(name) in printed) is (name in ("forward", "predict_step"))


@pytest.mark.slow
@overrides
def test_card(name: str, desk: Path, run: Any) -> None:
    call(desk, "eval", run(name).name, "--data.num_workers=0")
    ask(desk, "card", name)
    card = (run(name) / "card/README.md").read_text()
    answers_otherwise = name in ("forward", "predict_step")
    assert ("cait.load" in card) is answers_otherwise
    assert ("In place of `transform` take that of" in card) is (name == "make_eval_transform")


@pytest.mark.slow
@overrides
def test_replay(name: str, desk: Path, run: Any) -> None:
    run(name)
    printed = ask(desk, "replay", name, "--step=1")
    assert "not logged" not in printed
    assert printed.count("same") == (1 if name == "training_step" else 4)
