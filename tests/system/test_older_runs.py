"""A run that an older version saved goes on as that version would have gone on."""

import shutil

import pytest
import torch
from harness import REPO, call, checkpoint, rows, works
from safetensors.torch import load_file

SAVED = REPO / "tests/system/saved_by_0_1_0"
"""CaiT of 16 channels on the digits in two epochs of 11 steps, two batches each, with a moving average.

Version 0.1.0 was killed in batch 15, within an accumulation. `ended.safetensors` has the weights of the same run, and
their average, at its end when it was left alone.
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cait")
def test_a_run_of_0_1_0_ends_as_it_would_have_ended(tmp_path):
    run = tmp_path / "logs" / "older"
    shutil.copytree(SAVED, run)
    (run / "ended.safetensors").unlink()
    assert checkpoint(run)["global_step"] == 7
    works(call(tmp_path, "resume", "older"))
    state = checkpoint(run)
    assert state["global_step"] == 22
    ended = load_file(SAVED / "ended.safetensors")
    for name, tensor in ended.items():
        part, _, key = name.partition(".")
        weights = state["callbacks"]["EMA"] if part == "average" else state["state_dict"]
        now = weights[key] if part == "average" else weights[f"model.{key}"]
        # Other processors add in another order. A step with other images moves weights by a thousand times as much.
        torch.testing.assert_close(now, tensor, rtol=0, atol=2e-6)
    steps = [row["step"] for row in rows(run) if row["train/loss"]]
    assert steps == [str(step) for step in range(22)]
