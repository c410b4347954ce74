"""Fine-tuning a run's weights at another resolution and on other classes, from one command each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import SMALL, rows

from cait.cli import main
from cait.model.network import create_model
from cait.model.weights import load_weights

PLACE = ["--data.num_workers=0", "--trainer.accelerator=cpu", "--data.mix_prob=0", "--data.scale=[0.9,1.0]"]


def test_a_run_starts_from_another_runs_weights_on_other_classes(
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
    brief = ["--trainer.max_epochs=3", "--trainer.log_every_n_steps=1", "--data.batch_size=32", "--model.lr=1e-3"]
    brief += ["--model.weights=logs/a/checkpoints/best.ckpt"]
    main(["fit", *SMALL, *PLACE, *brief, f"--data.root={root}", "--run_name=some"])
    assert "best.ckpt; the head starts anew" in caplog.text
    assert float(rows(here / "logs/some")[-1]["val/acc1"]) > 45  # of five classes


CLASSES = ["ant", "bee", "cat", "dog"]
NETWORK: dict = dict(name="xxs24", img_size=8, embed_dim=16, depth=1, num_heads=2, patch_size=4)


@pytest.mark.parametrize(
    ("classes", "is_kept"),
    [(CLASSES, True), (None, True), (["dog", "cat", "bee", "ant"], False), (["eel", "fox"], False)],
)
def test_the_head_is_kept_for_the_same_classes_alone(classes: list[str] | None, is_kept: bool, tmp_path: Path) -> None:
    raw, ema = (create_model(num_classes=4, **NETWORK).state_dict() for _ in range(2))
    checkpoint = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{key}": value for key, value in raw.items()},
        "callbacks": {"EMA": ema},
        "ImageNetDataModule": {"class_names": CLASSES, "depends_on": {}},
    }
    torch.save(checkpoint, path := tmp_path / "known.ckpt")
    for theirs, is_average in ((raw, False), (ema, True)):
        model = create_model(num_classes=len(classes or CLASSES), **NETWORK)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        assert load_weights(model, path, is_average, classes) == ([] if is_kept else ["the head starts anew"])
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key] if key.startswith("head") and not is_kept else theirs[key]), key
