"""One's own parts from YAML and a file of one's own, without a changed line of the template, through a whole run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from harness import DEVICES, REPO, Cait, ended, rows
from runs import kill_and_resume

pytestmark = pytest.mark.slow

RUN = [
    f"--config={REPO / 'configs/digits.yaml'}",
    "--config=mine.yaml",
    *DEVICES,
    "--trainer.max_epochs=2",
    "--trainer.log_every_n_steps=1",
    "--save_every_n_steps=3",
    "--ema.decay=0.9",
    "--model.warmup_epochs=0",
]
OWN = dict(
    model=dict(
        name="own_parts:Net",
        fields=dict(width=8),
        optimizer="sgd",
        optimizer_args=dict(momentum=0.9, nesterov=True),
        metrics=dict(f1="own_parts:macro_f1"),
        lr=0.05,
    ),
    data=dict(
        root="own_parts:Digits", augment_ops=["own_parts:noisy"], batch_size=64, num_workers=1
    ),
    best_metric="val/f1",
)


@pytest.fixture
def own(cait: Cait, tmp_path: Path) -> Path:
    """A folder with the digits and the user's own file."""
    shutil.copy(REPO / "tests/support/own_parts.py", tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(OWN))
    return tmp_path


def test_it_trains_survives_a_kill_is_scored_and_predicts(own: Path, cait: Cait) -> None:
    kill_and_resume(own, RUN, ended(own, "whole", RUN))
    logged = rows(own / "logs/killed")
    losses = [float(row["train/loss"]) for row in logged if row["train/loss"]]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
    assert cait("eval", "killed").returncode == 0
    scores = json.loads((own / "logs/killed/evaluation.json").read_text())
    for name, error in (("acc1", 1e-3), ("f1", 1e-5)):
        best = max(float(row[f"val/{name}"]) for row in logged if row["val/acc1"])
        assert scores["raw"][name] == pytest.approx(best, abs=error)
    assert (scores["ema"]["images"], scores["class_names"][:2]) == (597, ["zero", "one"])
    predicted = cait("predict", "killed", str(own / "data/digits/val/3"), "--format=csv")
    assert predicted.returncode == 0, predicted.stderr
