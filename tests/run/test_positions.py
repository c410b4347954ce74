"""Where a run stands: one saved tuple, and Lightning's counters for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from modules import loader, module, trainer

from cait.loops import POSITION, Position, loops_state

BATCHES = 6
"""Of an epoch."""
WRITTEN = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
"""The parts of the fit loop's state that a position gives."""


def saved(hook: str, batches: int, path: Path, **settings: Any) -> dict[str, Any]:
    """The checkpoint that a plain Trainer saves in a hook once so many batches are done."""

    def save(fit: Trainer, *_: Any) -> None:
        if fit.fit_loop.epoch_loop.batch_progress.total.processed == batches and not path.exists():
            fit.save_checkpoint(path)

    trainer(callbacks=[LambdaCallback(**{hook: save})], **settings).fit(
        module(), loader(4 * BATCHES)
    )
    return torch.load(path, weights_only=True)


def counters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {name: checkpoint["loops"]["fit_loop"][name] for name in WRITTEN}


@pytest.mark.parametrize(
    ("batches", "accumulated", "position"),
    [
        (1, 1, (0, 1, 1)),
        (5, 1, (0, 5, 5)),
        (2, 2, (0, 2, 1)),
        (4, 2, (0, 4, 2)),
        (3, 3, (0, 3, 1)),
        (7, 1, (1, 1, 7)),
        (10, 2, (1, 4, 5)),
        (9, 3, (1, 3, 3)),
    ],
)
@pytest.mark.parametrize("limits", [dict(max_epochs=3), dict(max_epochs=-1, max_steps=11)])
def test_amid_an_epoch_the_counters_are_those_that_lightning_saves_after_the_batch(
    batches: int, accumulated: int, position: tuple[int, int, int], limits: dict, tmp_path: Path
) -> None:
    common: dict = dict(accumulate_grad_batches=accumulated, **limits)
    checkpoint = saved("on_train_batch_end", batches, tmp_path / "x.ckpt", **common)
    assert checkpoint[POSITION] == [*position]
    assert loops_state(Position.saved(checkpoint), batches) == counters(checkpoint)


@pytest.mark.parametrize("accumulated", [1, 2, 3, 4])
@pytest.mark.parametrize("epochs", [1, 2])
def test_between_epochs_they_are_those_of_a_run_that_has_ended_there(
    epochs: int, accumulated: int, tmp_path: Path
) -> None:
    common: dict = dict(accumulate_grad_batches=accumulated, max_epochs=epochs)
    checkpoint = saved("on_train_end", BATCHES * epochs, tmp_path / "x.ckpt", **common)
    steps = epochs * -(-BATCHES // accumulated)
    assert checkpoint[POSITION] == [epochs, 0, steps]
    expected = counters(checkpoint)
    batches = expected["epoch_loop.batch_progress"]
    # Lightning sets them to 0 when the next epoch begins
    assert {*batches["current"].values()} == {BATCHES}
    batches["current"] = dict.fromkeys(batches["current"], 0)
    assert loops_state(Position.saved(checkpoint), BATCHES * epochs) == expected


def test_before_the_first_batch_all_counts_are_0(tmp_path: Path) -> None:
    checkpoint = saved("on_train_start", 0, tmp_path / "x.ckpt", max_epochs=1)
    assert checkpoint[POSITION] == [0, 0, 0]
    assert loops_state(Position(0, 0, 0), 0) == counters(checkpoint)


@pytest.mark.parametrize(
    ("hook", "batches", "position"),
    [
        ("on_train_batch_start", 3, (0, 3, 3)),
        ("on_train_batch_start", 5, (0, 5, 5)),  # before the last of the epoch
        ("on_train_batch_end", 3, (0, 3, 3)),
        ("on_train_batch_end", 6, (1, 0, 6)),
        ("on_train_epoch_end", 6, (1, 0, 6)),
        ("on_train_epoch_start", 6, (1, 0, 6)),
        ("on_train_batch_start", 6, (1, 0, 6)),
        ("on_train_end", 12, (2, 0, 12)),
    ],
)
def test_a_position_is_the_same_in_every_hook_and_in_checkpoints_without_it(
    hook: str, batches: int, position: tuple[int, int, int], tmp_path: Path
) -> None:
    """Version 0.1.0 saved Lightning's counters alone."""
    checkpoint = saved(hook, batches, tmp_path / "x.ckpt", max_epochs=2)
    assert Position.saved(checkpoint) == position
    assert checkpoint["epoch"] == (batches - 1) // BATCHES
    del checkpoint[POSITION]
    assert Position.saved(checkpoint) == position
