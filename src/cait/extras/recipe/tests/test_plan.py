"""The epochs of a run are planned anew after its first validation, and a resumed run keeps the plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import SMALL, checkpoint, rows
from runs import assert_same

from cait.cli import main
from cait.extras.recipe import plan
from cait.loops import Position
from cait.train.module import CaiTModule

SETTINGS = ["--data.num_workers=0", "--trainer.devices=1", "--trainer.limit_train_batches=5"]
SETTINGS += [
    "--trainer.log_every_n_steps=1",
    "--trainer.check_val_every_n_epoch=2",
    "--trainer.limit_val_batches=1",
]


class OwnSchedule(CaiTModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }


def fit(name: str, *words: str, module: Any = None) -> Path:
    main(
        ["fit", *SMALL, *SETTINGS, "--trainer.max_epochs=12", f"--run_name={name}", *words],
        module=module,
    )
    return Path("logs", name)


def epochs(run: Path) -> int:
    return Position.saved(checkpoint(run)).epoch


def test_what_does_not_fit_is_not_begun_and_what_fits_is_added(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    short = fit("short", "--plan_minutes=1e-3")
    assert epochs(short) == 2  # those up to the first validation
    assert "planned anew: 2 epochs, because one takes" in caplog.text
    monkeypatch.setattr(plan, "most_epochs", lambda *_: 7)
    caplog.clear()
    long = fit("long", "--plan_minutes=1000", "--trainer.max_epochs=4")
    assert epochs(long) == 6  # the last one is validated
    assert "planned anew: 6 epochs, no more, whatever the time" in caplog.text
    rates = [float(row["lr"]) for row in rows(long) if row["lr"]]
    assert rates[-1] < 0.05 * max(rates)  # the cosine ends with the run
    assert epochs(fit("own", "--plan_minutes=1e-3", module=OwnSchedule)) == 2
    Path("planned.yaml").write_text("plan_minutes: 0.001\n")
    assert epochs(fit("typed", "--config=planned.yaml", "--trainer.max_epochs=4")) == 4
    # more than the most
    assert epochs(fit("asked", "--plan_minutes=1000", "--trainer.max_epochs=8")) == 8
    with pytest.raises(SystemExit):
        fit("wrong", "--plan_minutes=-1")
    assert "plan_minutes must be above 0 or null, got -1" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_given_later_wins(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    short = fit("later", "--plan_minutes=1e-3", "--trainer.max_epochs=4")
    main(["resume", "later"])
    assert epochs(short) == 2
    for given, end in (
        ("--trainer.max_epochs=4", 4),
        ("--trainer.max_epochs=8", 8),
        ("--plan_minutes=1e-3", 10),
    ):
        # what is given wins, also if it is the number from before the plan
        main(["resume", "later", given])
        assert epochs(short) == end
    main(["resume", "later"])
    assert epochs(short) == 10


def test_a_run_that_is_killed_after_the_plan_ends_with_the_same_bits(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(plan, "most_epochs", lambda *_: 4)
    words = [
        "--plan_minutes=1000",
        "--trainer.max_epochs=2",
        "--ema.decay=0.9",
        "--save_every_n_steps=1",
    ]
    whole = fit("whole", *words)
    assert epochs(whole) == 4
    with pytest.raises(SystemExit):
        fit(
            "killed",
            *words,
            "--trainer.callbacks+=recorder.LeavesOnce",
            "--trainer.callbacks.step=13",
        )
    monkeypatch.setattr(plan, "most_epochs", lambda *_: 9)  # it is not measured again
    main(["resume", "killed"])
    assert_same(Path("logs/killed"), whole)
    assert yaml.safe_load(Path("logs/killed/config.yaml").read_text())["plan_minutes"] == 1000
