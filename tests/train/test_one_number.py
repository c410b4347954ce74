"""One run, one number: every verb gives the same answers for the same images, to the image, and the same accuracy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answers import answers, chosen_by, figures
from harness import SMALL, call, slow
from lightning.pytorch.callbacks import LambdaCallback
from modules import module, trainer
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.transforms.functional import normalize, pil_to_tensor

from cait import plugins
from cait.data.datamodule import ImageNetDataModule

QUICK = ("predict", "load", "eval", "page", "card")
"""The verbs that need no export to ONNX, which takes seconds."""
SHOWN_BY = {"screen": "summary", "publish": "card's table", "visualize": "page's line"}


def save(pixels: np.ndarray, path: Path, kind: int) -> None:
    """A digit in one of the modes that files have, with other colors below what is transparent."""
    gray = Image.fromarray(np.kron(pixels * 255 / 16, np.ones((3, 3))).round().astype(np.uint8))
    if kind == 0:
        Image.fromarray(np.asarray(gray).astype(np.uint16) * 257).save(path)  # 16 bits
    elif kind == 1:
        hidden = np.dstack([np.asarray(gray)] * 3 + [np.asarray(gray)]).copy()
        hidden[..., :3] = (40, 200, 90)
        Image.fromarray(hidden, "RGBA").save(path)
    elif kind == 2:
        Image.merge("LA", (gray.point(lambda value: 255 - value), gray)).save(path)
    elif kind == 3:
        gray.convert("P").save(path, transparency=0)
    elif kind == 4:
        gray.convert("RGB").convert("CMYK").save(path.with_suffix(".jpg"))
    else:
        gray.save(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four classes of digits in files of all kinds, one of them broken."""
    place, digits = tmp_path_factory.mktemp("number"), load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if label < 4 and index < 400:
            folder = place / "images" / ("val" if index < 80 else "train") / "abcd"[label]
            folder.mkdir(parents=True, exist_ok=True)
            save(pixels, folder / f"{index}.png", index % 6)
    (place / "images/val/a/broken.png").write_bytes(b"no image")
    return place


class NormalizesItself(ImageNetDataModule):
    """Its images are normalized by its own transform, as planes are."""

    def make_eval_transform(self) -> Any:
        return lambda image: normalize(pil_to_tensor(image) / 255, [0.1] * 3, [0.3] * 3)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true", "bf16-mixed"])
def test_images_are_scored_as_they_are_whatever_precision_trains(
    precision: str, digits_root: Path
) -> None:
    images: list[torch.Tensor] = []
    see = LambdaCallback(on_validation_batch_start=lambda *args: images.append(args[2][0]))
    data = NormalizesItself(str(digits_root), img_size=8, batch_size=4, num_workers=0)
    run = trainer(precision=precision, callbacks=[see], limit_val_batches=1)
    run.validate(module(num_classes=10), data, verbose=False)
    data.trainer = None
    assert torch.equal(images[0], next(iter(data.val_dataloader()))[0])


@pytest.mark.parametrize(
    ("decay", "precision", "metric", "verbs"),
    [
        (".9999", "bf16-mixed", "val/acc1", QUICK),
        *slow((".5", "bf16-true", None, QUICK), (".9999", "32", None, QUICK)),
        *slow(("null", "bf16-mixed", None, None), (".5", "bf16-mixed", None, None)),
    ],
)
def test_every_verb_answers_alike(
    decay: str, precision: str, metric: str | None, verbs: tuple[str, ...] | None, place: Path
) -> None:
    name = f"ema{decay}-{precision}-{metric}".replace("/", "-")
    settings = [
        "--data.root=images",
        "--data.num_workers=0",
        "--data.batch_size=16",
        "--data.eval_batch_size=13",
    ]
    settings += ["--trainer.max_epochs=3", "--model.lr=0.01", "--model.warmup_epochs=0"]
    settings += [f"--ema.decay={decay}"]
    settings += [
        f"--trainer.precision={precision}",
        f"--run_name={name}",
        *[f"--best_metric={metric}"] * bool(metric),
    ]
    done = call(place, "fit", *SMALL, *settings)
    assert done.returncode == 0, done.stderr
    run = place / "logs" / name
    found = answers(run, only=verbs)
    assert chosen_by(run)[0] == ("val" if decay == "null" or metric else "val_ema")
    assert ("far behind" in done.stdout + done.stderr) == (decay == ".9999")
    reference = found["load"]
    for verb, of_verb in found.items():
        assert of_verb == reference, verb
    given = figures(run, done.stdout, found)
    shown = {place for extra, place in SHOWN_BY.items() if extra in plugins.extras()}
    assert {"metrics.csv", "evaluation.json", *shown} <= {*given}
    assert max(given.values()) - min(given.values()) < 0.006, given
