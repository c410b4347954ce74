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


def saver(row, path):
    """A callback that saves in a row's hook once so many batches are done."""

    def save(fit, *_):
        done = fit.fit_loop.epoch_loop.batch_progress.total.processed
        if done == row["batches"] and not path.exists():
            fit.save_checkpoint(path)

    return LambdaCallback(**{row["hook"]: save})


@pytest.mark.parametrize("run", table(__file__, "runs"))
def test_a_position_is_the_same_in_every_hook_and_in_checkpoints_without_it(run, tmp_path):
    """Version 0.1.0 saved Lightning's counters alone."""
    rows = run["rows"]
    callbacks = [saver(row, tmp_path / row["case"]) for row in rows]
    trainer(callbacks=callbacks, **run["settings"]).fit(module(), loader(4 * BATCHES))
    for row in rows:
        checkpoint = torch.load(tmp_path / row["case"], weights_only=True)
        position = Position.saved(checkpoint)
        assert [*position] == checkpoint[POSITION] == row["position"], row
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
