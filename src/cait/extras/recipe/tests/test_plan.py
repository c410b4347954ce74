"""The epochs of a run are planned anew after its first validation, and a resumed run keeps the plan."""

from pathlib import Path

import pytest
import torch
from harness import SMALL, checkpoint, parsed, rows
from runs import assert_same

from cait.cli import main
from cait.extras.recipe import plan
from cait.loops import Position
from cait.train.module import CaiTModule

SETTINGS = """
    --data.num_workers=0 --data.batch_size=16 --trainer.devices=1
    --trainer.limit_train_batches=5 --trainer.limit_val_batches=1
    --trainer.log_every_n_steps=1 --trainer.check_val_every_n_epoch=2 --trainer.max_epochs=12
"""
NO_TIME, MUCH_TIME = "--plan_minutes=1e-3", "--plan_minutes=1000"


class OwnSchedule(CaiTModule):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()["optimizer"]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def fit(name, *words, module=None):
    main(["fit", *SMALL, *SETTINGS.split(), f"--run_name={name}", *words], module=module)
    return Path("logs", name)


def epochs(run):
    return Position.saved(checkpoint(run)).epoch


@pytest.mark.parametrize("module", [None, OwnSchedule])
def test_what_does_not_fit_is_not_begun(module, here, caplog):
    short = fit(f"short-{module is None}", NO_TIME, module=module)
    assert epochs(short) == 2  # those up to the first validation
    assert "planned anew: 2 epochs, because one takes" in caplog.text


def test_what_fits_is_added(here, monkeypatch, caplog):
    monkeypatch.setattr(plan, "most_epochs", lambda *_: 7)
    long = fit("long", MUCH_TIME, "--trainer.max_epochs=4")
    assert epochs(long) == 6  # the last one is validated
    assert "planned anew: 6 epochs, no more, whatever the time" in caplog.text
    rates = [float(row["lr"]) for row in rows(long) if row["lr"]]
    assert rates[-1] < 0.05 * max(rates)  # the cosine ends with the run
    # more than the most
    assert epochs(fit("asked", MUCH_TIME, "--trainer.max_epochs=8")) == 8


def test_epochs_that_are_typed_win_over_minutes_of_a_file(here):
    Path("planned.yaml").write_text("plan_minutes: 0.001\n")
    assert epochs(fit("typed", "--config=planned.yaml", "--trainer.max_epochs=4")) == 4


@pytest.mark.slow
def test_what_is_given_later_wins(here):
    short = fit("later", NO_TIME, "--trainer.max_epochs=4")
    # also if it is the number from before the plan
    for word, end in (
        ("", 2),
        ("--trainer.max_epochs=4", 4),
        ("--trainer.max_epochs=8", 8),
        (NO_TIME, 10),
        ("", 10),
    ):
        main(["resume", "later", *word.split()])
        assert epochs(short) == end


@pytest.mark.slow
def test_a_run_that_is_killed_after_the_plan_ends_with_the_same_bits(here, monkeypatch):
    monkeypatch.setattr(plan, "most_epochs", lambda *_: 4)
    words = [MUCH_TIME, "--trainer.max_epochs=2", "--ema.decay=0.9", "--save_every_n_steps=1"]
    whole = fit("whole", *words)
    assert epochs(whole) == 4
    kill = ["--trainer.callbacks+=recorder.LeavesOnce", "--trainer.callbacks.step=13"]
    with pytest.raises(SystemExit):
        fit("killed", *words, *kill)
    monkeypatch.setattr(plan, "most_epochs", lambda *_: 9)  # it is not measured again
    main(["resume", "killed"])
    assert_same(Path("logs/killed"), whole)
    config = parsed(Path("logs/killed/config.yaml"))
    assert config["plan_minutes"] == 1000
