"""What a run's folder and its checkpoint hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from modules import loader, module, trainer

from cait import ckpt
from cait.errors import UserError
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint

WEIGHT = torch.ones(2)
CHECKPOINT: dict[str, Any] = {
    "pytorch-lightning_version": "2.6.6",
    "global_step": 3,
    "state_dict": {"model.head.bias": WEIGHT, "loss.weight": torch.zeros(1)},
    "callbacks": {"EMA": {"head.bias": 2 * WEIGHT}, "StepSeed": {}},
    "hyper_parameters": {"class_names": ["of the module"]},
}
STATE = {"class_names": ["cat", "dog"], "depends_on": {"seed": 0}}


def test_the_data_modules_part_is_found_by_what_it_holds() -> None:
    name = "test_run.<locals>.MyData"
    saved = CHECKPOINT | {name: STATE}
    assert ckpt.data_state(saved) is STATE
    assert ckpt.class_names(saved) == ["cat", "dog"]
    ckpt.rename_data_state(saved, "OtherData")
    assert saved == CHECKPOINT | {"OtherData": STATE}


def test_a_run_is_a_name_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("logs/first", "elsewhere/second"):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.yaml").touch()
    assert rundir.folder_of("first") == rundir.folder_of("logs/first") == Path("logs/first")
    assert rundir.run_argument(Path("logs/first")) == "first"
    assert rundir.run_argument(rundir.folder_of("elsewhere/second")) == "elsewhere/second"
    with pytest.raises(UserError, match="there is no run logs/third; runs: first"):
        rundir.folder_of("third")


def test_the_best_of_a_script_follows_from_the_metric(tmp_path: Path) -> None:
    assert [BestCheckpoint(tmp_path, name).mode for name in ("val/acc1", "val/loss")] == ["max", "min"]
    with pytest.raises(UserError, match="is the largest value best, or the smallest"):
        BestCheckpoint(tmp_path, "val/answer")


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ("nan 1 2", "max", 2.0),
        ("2 nan 1", "min", 1.0),
        ("1 inf 2", "max", 2.0),
        ("-inf 2 3", "min", 2.0),
        ("nan inf nan", "max", None),
    ],
)
def test_what_is_not_finite_is_never_the_best(values: str, mode: str, best: float | None, tmp_path: Path) -> None:
    numbers = list(map(float, values.split()))
    logs = LambdaCallback(on_validation_epoch_end=lambda fit, net: net.log("val/x", numbers[fit.current_epoch]))
    fit = trainer(
        max_epochs=3,
        num_sanity_val_steps=0,
        limit_train_batches=1,
        callbacks=[logs, checkpoint := BestCheckpoint(tmp_path, "val/x", mode)],
        enable_checkpointing=True,
    )
    fit.fit(module(), loader(), loader(4))
    assert checkpoint.best_model_score == best
    assert (tmp_path / "best.ckpt").exists() is (best is not None)
