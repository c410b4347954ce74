"""Where a run stands: one saved tuple, and Lightning's counters for it."""

import pytest
import torch
from harness import table
from lightning.pytorch.callbacks import LambdaCallback
from modules import loader, module, trainer

from cait.loops import POSITION, Position, loops_state

BATCHES = 6
"""Of an epoch."""
COUNTERS = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
"""The parts of the fit loop's state that a position gives."""


def saved(row, path):
    """The checkpoint that a plain Trainer saves in a hook once so many batches are done."""

    def save(fit, *_):
        done = fit.fit_loop.epoch_loop.batch_progress.total.processed
        if done == row["batches"] and not path.exists():
            fit.save_checkpoint(path)

    callback = LambdaCallback(**{row["hook"]: save})
    settings = dict(max_epochs=2) | row.get("settings", {})
    trainer(callbacks=[callback], **settings).fit(module(), loader(4 * BATCHES))
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("row", table(__file__, "rows"))
def test_a_position_is_the_same_in_every_hook_and_in_checkpoints_without_it(row, tmp_path):
    """Version 0.1.0 saved Lightning's counters alone."""
    checkpoint = saved(row, tmp_path / "x.ckpt")
    assert checkpoint[POSITION] == row["position"]
    position = Position.saved(checkpoint)
    assert position == tuple(row["position"])
    assert checkpoint["epoch"] == max(0, row["batches"] - 1) // BATCHES
    if row.get("counters"):
        loop = checkpoint["loops"]["fit_loop"]
        counters = {name: loop[name] for name in COUNTERS}
        if row["hook"] == "on_train_end":
            current = counters["epoch_loop.batch_progress"]["current"]
            assert {*current.values()} == {BATCHES}
            current.update(dict.fromkeys(current, 0))  # as Lightning does when an epoch begins
        assert loops_state(position, row["batches"]) == counters
    if row["hook"] != "on_train_start":
        del checkpoint[POSITION]
        assert Position.saved(checkpoint) == position
