"""Fine-tuning a run's weights at another resolution and on other classes, from one command each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import SMALL, rows

from cait.cli import main
from cait.errors import UserError
from cait.model.network import create_model
from cait.model.weights import load_weights, read_weights

PLACE = ["--data.num_workers=0", "--trainer.accelerator=cpu", "--data.mix_prob=0", "--data.scale=[0.9,1.0]"]


def test_on_some_of_the_classes_it_starts_above_chance(
    digits_root: Path, here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = ["--trainer.max_epochs=6", "--data.batch_size=32", "--model.lr=4e-3", "--model.warmup_epochs=1"]
    main(["fit", *SMALL, *PLACE, *recipe, f"--data.root={digits_root}", "--run_name=a"])
    # Another order than in the checkpoint, and a class that it does not know under this name.
    root = tmp_path / "some"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for name, digit in {"0": "0", "4": "4", "7": "7", "6": "6", "2 and a tail": "2"}.items():
            (root / split / name).symlink_to(digits_root / split / digit)
    caplog.set_level("INFO")
    brief = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.log_every_n_steps=1"]
    brief += ["--data.batch_size=256", "--model.lr=1e-3", "--model.weights=logs/a/checkpoints/best.ckpt"]
    main(["fit", *SMALL, *PLACE, *brief, f"--data.root={root}", "--run_name=some"])
    assert "best.ckpt; the head's rows of 4 classes kept by name, 1 new" in caplog.text
    figures = rows(here / "logs/some")
    assert float(figures[0]["train/acc1"]) > 45  # of five classes, before anything is learnt
    assert float(figures[-1]["val/acc1"]) > 45


CLASSES = ["ant", "bee", "cat", "dog"]
NETWORK: dict = dict(name="xxs24", img_size=8, embed_dim=16, depth=1, num_heads=2, patch_size=4)


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A checkpoint of a run of CLASSES."""
    raw, ema = (create_model(num_classes=4, **NETWORK).state_dict() for _ in range(2))
    for state in (raw, ema):
        state["head.bias"] = torch.rand(4)
    checkpoint = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{key}": value for key, value in raw.items()},
        "callbacks": {"EMA": ema},
        "ImageNetDataModule": {"class_names": CLASSES, "depends_on": {}},
    }
    torch.save(checkpoint, tmp_path / "known.ckpt")
    return tmp_path / "known.ckpt"


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize(
    ("classes", "note"),
    [
        (["dog", "bee"], "the head's rows of 2 classes kept by name"),
        (["dog", "cat", "bee", "ant"], "the head's rows of 4 classes kept by name"),  # as many, in another order
        (["ant", "eel", "cat", "fox"], "the head's rows of 2 classes kept by name, 2 new"),
        (["eel", "fox", "gnu"], "the head's 4 classes left out; it starts anew"),
        (CLASSES, None),
        (["eel", "fox", "gnu", "hen"], None),  # other names of the same classes, for all one can tell
        (None, None),
    ],
)
def test_rows_of_the_head_follow_their_classes(known: Path, classes: list[str] | None, note: str | None, ema) -> None:
    model = create_model(num_classes=len(classes or CLASSES), **NETWORK)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert load_weights(model, known, ema, classes) == ([note] if note else [])
    theirs, _ = read_weights(known, ema)
    for key, value in model.state_dict().items():
        for row, name in enumerate(classes or CLASSES) if key.startswith("head.") else ():
            if note is None:
                expected = theirs[key][row]
            else:
                expected = theirs[key][CLASSES.index(name)] if name in CLASSES else before[key][row]
            assert torch.equal(value[row], expected), (key, name)
        if not key.startswith("head."):
            assert torch.equal(value, theirs[key])


def test_both_heads_follow_their_classes(known: Path) -> None:
    content = torch.load(known, weights_only=True)
    two = create_model(num_classes=4, **NETWORK, distillation_token=True).state_dict()
    content["state_dict"] = {f"model.{key}": value for key, value in two.items()}
    torch.save(content, known)
    model = create_model(num_classes=2, **NETWORK, distillation_token=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert load_weights(model, known, own_classes=["dog", "eel"]) == [
        "the head's rows of 1 classes kept by name, 1 new"
    ]
    for key in ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias"):
        assert torch.equal(model.state_dict()[key], torch.stack((two[key][3], before[key][1])))
    other = create_model(num_classes=3, **NETWORK, distillation_token=True)  # of no class that it knows
    assert load_weights(other, known, own_classes=["eel", "fox", "gnu"]) == [
        "the head's 4 classes left out; it starts anew"
    ]
    assert torch.equal(other.state_dict()["dist_token"], two["dist_token"])
    plain = create_model(num_classes=2, **NETWORK)
    with pytest.raises(UserError, match="is of another network: dist_token"):
        load_weights(plain, known, own_classes=["dog", "bee"])
