"""One run, one number: every verb gives the same answers for the same images, to the image, and the same accuracy."""

import itertools
import json
import math
import shutil

import pytest
import torch
from answers import VERBS, check_agreement, chosen_by
from harness import SMALL, call, save_mixed, works
from lightning.pytorch.callbacks import LambdaCallback
from modules import module, trainer
from torchvision.transforms.functional import normalize, pil_to_tensor

from cait import plugins
from cait.data.datamodule import ImageNetDataModule

QUICK = ("predict", "load", "page", "card")
"""The verbs that need no export to ONNX, which takes seconds."""
SHOWN_BY = {"screen": "summary", "publish": "card", "visualize": "page"}
RECIPE = """
--data.root=images --data.num_workers=0 --data.batch_size=16 --data.eval_batch_size=13
--trainer.max_epochs=3 --trainer.limit_train_batches=20 --model.lr=0.01 --model.warmup_epochs=0
--trainer.callbacks+=own_things.Seen
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits_root, photographs):
    """A folder of four classes of digits, with photographs in files of all kinds, and a broken one, to validate on."""
    place = tmp_path_factory.mktemp("number")
    for part, name in itertools.product(["train", "val"], "0123"):
        shutil.copytree(digits_root / part / name, place / "images" / part / name)
    save_mixed(photographs, place / "images/val/0/photographs", 12, 0)
    (place / "images/val/1/broken.png").write_bytes(b"no image")
    return place


class NormalizesItself(ImageNetDataModule):
    """Its images are normalized by its own transform, as planes are."""

    def make_eval_transform(self):
        return lambda image: normalize(pil_to_tensor(image) / 255, [0.1] * 3, [0.3] * 3)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true", "bf16-mixed"])
def test_images_are_scored_as_they_are_whatever_precision_trains(precision, digits_root):
    images = []
    see = LambdaCallback(on_validation_batch_start=lambda *args: images.append(args[2][0]))
    data = NormalizesItself(str(digits_root), img_size=8, batch_size=4, num_workers=0)
    run = trainer(precision=precision, callbacks=[see], limit_val_batches=1)
    run.validate(module(num_classes=10), data, verbose=False)
    data.trainer = None
    assert torch.equal(images[0], next(iter(data.val_dataloader()))[0])


@pytest.mark.parametrize("number", range(2))
def test_an_image_is_scored_as_it_is_predicted(number, trained, tmp_path):
    """The loss over one image is that of the probability which `predict` gives its class."""
    folder = trained.parents[1]
    root = folder / "data/digits/val"
    image = sorted(root.glob("7/*"))[number]
    (tmp_path / "one.csv").write_text(f"path\n7/{image.name}\n")
    scores, answers = tmp_path / "scores.json", tmp_path / "answers.jsonl"
    one = [f"--data.root={root}", f"--data.val_list={tmp_path / 'one.csv'}"]
    works(call(folder, "eval", "good", *one, f"--output={scores}"))
    works(call(folder, "predict", "good", str(image), "--top_k=10", f"--output={answers}"))
    predictions = json.loads(answers.read_text())["predictions"]
    [share] = [each["probability"] for each in predictions if each["class"] == "7"]
    assert json.loads(scores.read_text())["ema"]["loss"] == pytest.approx(
        -math.log(share), rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "verbs"),
    [
        ("--ema.decay=.9999 --trainer.precision=bf16-mixed --best_metric=val/acc1", QUICK),
        ("--ema.decay=.5 --trainer.precision=bf16-true", QUICK),
        ("--ema.decay=.9999 --trainer.precision=32", QUICK),
        ("--ema.decay=null --trainer.precision=bf16-mixed", VERBS),
        ("--ema.decay=.5 --trainer.precision=bf16-mixed", VERBS),
    ],
)
def test_every_verb_answers_alike(words, verbs, place):
    shutil.rmtree(place / "logs", ignore_errors=True)
    done = works(call(place, "fit", *SMALL, *RECIPE.split(), *words.split(), "--run_name=one"))
    assert ("far behind" in done.stdout + done.stderr) == (".9999" in words)
    run = place / "logs/one"
    is_raw = "null" in words or "val/acc1" in words
    assert chosen_by(run)[0] == ("val" if is_raw else "val_ema")
    works(call(place, "eval", "one"))
    shown = check_agreement(run, done.stdout, verbs)
    assert {"metrics.csv"} | {SHOWN_BY.get(extra, "load") for extra in plugins.extras()} <= shown
