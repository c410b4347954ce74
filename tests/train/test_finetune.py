"""Fine-tuning a run's weights at another resolution and on other classes, from one command each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness import SMALL, rows

from cait.cli import main
from cait.cli.lightning import RUN_VARIABLE
from cait.errors import UserError
from cait.model.network import create_model
from cait.model.weights import load_weights, read_weights

PLACE = ["--data.num_workers=0", "--trainer.accelerator=cpu", "--data.mix_prob=0", "--data.scale=[0.9,1.0]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with the run `a`, a small CaiT of the digits."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["cait"])
        recipe = [
            "--trainer.max_epochs=6",
            "--data.batch_size=32",
            "--model.lr=4e-3",
            "--model.warmup_epochs=1",
            "--ema.decay=0.9",
        ]
        main(["fit", *SMALL, *PLACE, *recipe, f"--data.root={digits_root}", "--run_name=a"])
    return folder


def tuned(trained: Path, name: str, patch: pytest.MonkeyPatch, *settings: str) -> tuple[float, list[dict[str, str]]]:
    """(per cent right of the first 256 pictures, before anything is learnt; the rows of metrics.csv)"""
    patch.chdir(trained)
    patch.setattr(sys, "argv", ["cait"])
    patch.delenv(RUN_VARIABLE, raising=False)
    brief = [
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=4",
        "--trainer.log_every_n_steps=1",
        "--data.batch_size=256",
        "--model.lr=1e-3",
    ]
    main(
        ["fit", *SMALL, *PLACE, *brief, "--model.weights=logs/a/checkpoints/best.ckpt", f"--run_name={name}", *settings]
    )
    figures = rows(trained / "logs" / name)
    return float(figures[0]["train/acc1"]), figures


def test_at_twice_the_resolution_it_starts_above_chance(
    trained: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    start, figures = tuned(trained, "larger", monkeypatch, f"--data.root={digits_root}", "--data.img_size=32")
    assert "weights from logs/a/checkpoints/best.ckpt; positions resized from 16 to 64 patches" in caplog.text
    assert start > 20  # of ten classes
    assert float(figures[-1]["val/acc1"]) > 25


def digits_of(root: Path, digits_root: Path, folders: dict[str, str]) -> Path:
    """An image folder of some of the digits, under names of its own."""
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for name, digit in folders.items():
            (root / split / name).symlink_to(digits_root / split / digit)
    return root


def test_on_some_of_the_classes_it_starts_above_chance(
    trained: Path,
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Another order than in the checkpoint, and a class that it does not know under this name.
    root = digits_of(tmp_path / "some", digits_root, {"0": "0", "4": "4", "7": "7", "6": "6", "2 and a tail": "2"})
    caplog.set_level("INFO")
    start, figures = tuned(trained, "some", monkeypatch, f"--data.root={root}")
    assert "best.ckpt; the head's rows of 4 classes kept by name, 1 new" in caplog.text
    assert start > 45  # of five classes
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


@pytest.mark.parametrize("class_token_at", [None, 0])
def test_a_distillation_token_starts_anew_or_is_left_out(class_token_at: int | None, tmp_path: Path) -> None:
    one, two = (dict(NETWORK, class_token_at=class_token_at, distillation_token=token) for token in (False, True))
    extra = {"dist_token", "head_dist.weight", "head_dist.bias"}
    for source, target, note in (
        (one, two, "the distillation token and its head start anew"),
        (two, one, "the distillation token and its head left out"),
    ):
        state = create_model(num_classes=4, **source).state_dict()
        torch.save(state, tmp_path / "x.pth")
        model = create_model(num_classes=4, **target)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        assert load_weights(model, tmp_path / "x.pth") == [note]
        after = model.state_dict()
        if class_token_at == 0:  # positions of the class, the distillation token, the patches
            theirs, ours, old = (side.pop("pos_embed")[0] for side in (state, after, before))
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[-4:], theirs[-4:])
            assert torch.equal(ours[1:-4], old[1:-4])
        for key, value in after.items():
            assert torch.equal(value, (before if key in extra else state)[key]), key
        assert load_weights(create_model(num_classes=3, **target), tmp_path / "x.pth") == [
            note,
            "the head's 4 classes left out; it starts anew",
        ]
        with pytest.raises(UserError, match="is of another network"):
            load_weights(create_model(num_classes=4, **target | dict(embed_dim=32)), tmp_path / "x.pth")


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
    notes = load_weights(plain, known, own_classes=["dog", "bee"])
    assert notes[0] == "the distillation token and its head left out"
    assert torch.equal(plain.state_dict()["head.weight"], two["head.weight"][[3, 1]])


def test_another_network_is_told_as_ever(known: Path) -> None:
    with pytest.raises(UserError, match="is of another network: cls_token"):
        load_weights(create_model(num_classes=2, **NETWORK | dict(embed_dim=32)), known, own_classes=["dog", "bee"])
    # Names that are not of this head are no help.
    model = create_model(num_classes=3, **NETWORK)
    assert load_weights(model, known, own_classes=["dog", "bee"]) == ["the head's 4 classes left out; it starts anew"]
