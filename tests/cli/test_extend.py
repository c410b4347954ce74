"""One's own parts from YAML and a file of one's own, without a changed line of the template, through a whole run."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from harness import DEVICES, REPO, Cait, checkpoint, rows, start
from runs import assert_same, wait_for_steps

RUN = [
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
    data=dict(root="own_parts:Digits", augment_ops=["own_parts:noisy"], batch_size=64, num_workers=1),
    best_metric="val/f1",
)


@pytest.fixture
def own(cait: Cait, tmp_path: Path) -> Path:
    """A folder with the digits and the user's own file."""
    shutil.copy(REPO / "tests/support/own_parts.py", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_it_trains_survives_a_kill_and_is_scored_used_and_exported(own: Path, cait: Cait) -> None:
    (own / "mine.yaml").write_text(yaml.safe_dump(OWN))
    fit = ["fit", f"--config={REPO / 'configs/digits.yaml'}", "--config=mine.yaml", *RUN]

    whole = cait(*fit, "--run_name=whole")
    assert whole.returncode == 0, whole.stderr
    job = start(own, *fit, "--run_name=cut")
    wait_for_steps(own / "logs/cut", 20, job)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    resumed = cait("resume", "cut")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(own / "logs/cut", own / "logs/whole")

    scored = cait("eval", "cut")
    assert scored.returncode == 0, scored.stderr
    scores = json.loads((own / "logs/cut/evaluation.json").read_text())
    last = [row for row in rows(own / "logs/cut") if row["val/acc1"]]
    assert scores["raw"]["acc1"] == pytest.approx(max(float(row["val/acc1"]) for row in last), abs=1e-3)
    losses = [float(row["train/loss"]) for row in rows(own / "logs/cut") if row["train/loss"]]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
    assert scores["ema"]["images"] == 597
    assert "f1" in whole.stdout
    assert scores["raw"]["f1"] == pytest.approx(max(float(row["val/f1"]) for row in last), abs=1e-5)
    assert scores["class_names"][:2] == ["zero", "one"]

    images = own / "data/digits/val/3"
    predicted = cait("predict", "cut", str(images), "--format=csv", "--output=predictions.csv")
    assert predicted.returncode == 0, predicted.stderr
    with (own / "predictions.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(list(images.iterdir()))

    exported = cait("export", "cut", "--format=onnx")
    assert exported.returncode == 0, exported.stderr
    session = onnxruntime.InferenceSession(own / "logs/cut/export/model.onnx")
    logits = session.run(["logits"], {"images": np.zeros((3, 3, 16, 16), np.float32)})[0]
    assert logits.shape == (3, 10)


@pytest.mark.slow
def test_an_average_of_your_own_is_kept_and_taken_up_by_the_built_in_one(own: Path, cait: Cait) -> None:
    settings = [f"--config={REPO / 'configs/digits.yaml'}", *DEVICES, "--data.num_workers=1", "--run_name=own"]
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=5", "--ema.decay=0.9"]
    begun = cait("fit", *settings, *short, "--trainer.callbacks+=own_parts.HalfEMA")
    assert begun.returncode == 0, begun.stderr
    last = checkpoint(own / "logs/own")
    first = last["callbacks"]["EMA"]  # as the built-in one's
    assert not torch.equal(first["head.weight"], last["state_dict"]["model.head.weight"])
    scored = cait("eval", "own")
    assert scored.returncode == 0, scored.stderr
    assert "ema" in json.loads((own / "logs/own/evaluation.json").read_text())
    # Resumed without it, the built-in average goes on from there.
    resumed = cait("resume", "own", "--trainer.max_epochs=2", "--trainer.callbacks=null", "--ema.decay=0.999999")
    assert resumed.returncode == 0, resumed.stderr
    assert torch.allclose(
        checkpoint(own / "logs/own")["callbacks"]["EMA"]["head.weight"], first["head.weight"], atol=1e-5
    )
