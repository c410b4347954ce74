"""FSDP2 on two processes does what DDP does, and its checkpoints are as safe and as portable."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import gloo
import pytest
import torch
from harness import LIMIT, SMALL, ended, over_table, rows, start, works
from runs import RECIPE, wait_for_steps
from torch.utils._pytree import tree_flatten_with_path

from cait import ckpt
from cait.ckpt import read_checkpoint
from cait.run import rundir

SHARDED = """
    --trainer.devices=2 --trainer.strategy.class_path=contrib.fsdp.strategy.FullyShardedStrategy
    --data.num_workers=0
"""


def run_pair(folder, settings, trainers):
    (folder / "settings.json").write_text(json.dumps([settings, trainers]))
    gloo.run(Path(__file__).with_name("fsdp_pair.py"), "SITUATIONS", 2, folder)
    return gloo.answers(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def both(folder):
    return run_pair(folder, {}, {})


def leaves(path):
    """The places and values of all that two runs must have in common."""
    saved = read_checkpoint(path)
    parts = ("state_dict", "optimizer_states", "loops", "lr_schedulers")
    compared = [[*saved], ckpt.average(saved), *(saved[part] for part in parts)]
    return tree_flatten_with_path(compared)[0]


def assert_same(ours, theirs, tolerance=0.0):
    """Checkpoints have the same keys, shapes, types and order, and values within the tolerance."""
    for (place, one), (other_place, other) in zip(leaves(ours), leaves(theirs), strict=True):
        assert place == other_place
        if isinstance(one, torch.Tensor):
            # a key's bias moves all scores of a row alike: its gradient is rounding, which AdamW scales up
            factor = 1e6 if "attn.k.bias" in str(place) else 1
            torch.testing.assert_close(one, other, rtol=0, atol=factor * tolerance)
        else:
            assert one == other or one != one, place


def assert_losses(ours, theirs, tolerance=1e-5):
    """A run has the losses of the other, or of its end."""
    assert ours == pytest.approx(theirs[-len(ours) :], abs=tolerance, nan_ok=True)


def test_two_processes_train_as_with_ddp(folder, both):
    for ours, theirs, unfinite in zip(both["fsdp"], both["ddp"], (0, 2), strict=True):
        assert len(ours) == 50
        assert sum(loss != loss for loss in ours) == unfinite
        assert_losses(ours, theirs)
    last = folder / "fsdp/last.ckpt"
    steps = read_checkpoint(last)["optimizer_states"][0]["state"][0]["step"]
    assert steps == 48  # both steps that were not finite were skipped
    assert_same(last, folder / "ddp/last.ckpt", 1e-6)  # the moving average among them


@pytest.mark.parametrize(("resumed", "first"), [("ddp-to-fsdp", "ddp"), ("fsdp-to-ddp", "fsdp")])
def test_checkpoints_load_both_ways(resumed, first, folder, both):
    for ours, theirs in zip(both[resumed], both[first], strict=True):
        assert len(ours) == 25
        assert_losses(ours, theirs)
    assert_same(folder / resumed / "last.ckpt", folder / first / "last.ckpt", 1e-6)


def test_a_resumed_run_ends_with_the_same_bits(folder, both):
    for ours, theirs in zip(both["fsdp-again"], both["fsdp"], strict=True):
        assert str(ours) == str(theirs[25:])
    assert_same(folder / "fsdp-again/last.ckpt", folder / "fsdp/last.ckpt")


@over_table(__file__, "refused")
def test_what_shows_only_in_training_is_refused(case, line, both):
    first, second = both[case]
    assert first == second
    assert re.match(f"UserError: .*{line}[^\n]*$", first)


@over_table(__file__, "settings")
def test_other_settings_train_as_with_ddp(module, trainer, tolerance, tmp_path):
    answers = run_pair(tmp_path, module, trainer)
    for name in ("ddp-to-fsdp", "fsdp-to-ddp", "fsdp"):
        for ours, theirs in zip(answers[name], answers["ddp"], strict=True):
            assert_losses(ours, theirs, tolerance)
    for again, ours in zip(answers["fsdp-again"], answers["fsdp"], strict=True):
        assert str(again) == str(ours[-len(again) :])
    sharded, plain = (read_checkpoint(tmp_path / name / "last.ckpt") for name in ("fsdp", "ddp"))
    groups = [side["optimizer_states"][0]["param_groups"] for side in (sharded, plain)]
    assert groups[0] == groups[1]
    for name, weight in ckpt.weights(plain).items():
        assert ckpt.weights(sharded)[name].dtype == weight.dtype


@pytest.fixture(scope="module")
def whole(place):
    """A sharded run that nothing happened to."""
    return ended(place, "whole", [*RECIPE, *SHARDED.split()])


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on(signum, cait, tmp_path, whole):
    run = tmp_path / "logs/cut"
    job = start(tmp_path, "fit", *RECIPE, *SHARDED.split(), "--run_name=cut")
    wait_for_steps(run, 30, job)
    os.killpg(job.pid, signum)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode in (-signum, 128 + signum), output
    works(cait("resume", "cut"))
    assert_same(run / "checkpoints/last.ckpt", whole / "checkpoints/last.ckpt")
    assert rows(run) == rows(whole)


VERBS = """
    export sharded --ema
    visualize sharded
    replay sharded --step=65
    resume sharded --trainer.max_epochs=4 --trainer.devices=1 --trainer.strategy=auto
    resume sharded --trainer.max_epochs=5
    resume sharded --trainer.max_epochs=6 --trainer.strategy=ddp
    resume sharded --trainer.max_epochs=7 --trainer.devices=1
"""


@pytest.mark.slow
def test_the_verbs_take_a_sharded_run(cait, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "logs/sharded")
    scores = []
    for devices in ([], ["--trainer.devices=1", "--trainer.strategy=auto"]):
        works(cait("eval", "sharded", *devices))
        scores.append(json.loads((run / rundir.EVALUATION).read_text()))
    accuracy = max(float(row["val/acc1"]) for row in rows(run) if row["val/acc1"])
    assert scores[0]["raw"]["acc1"] == pytest.approx(accuracy, abs=1e-4)
    for weights in ("raw", "ema"):
        assert scores[0][weights]["acc1"] == scores[1][weights]["acc1"]
    weights = "logs/sharded/checkpoints/last.ckpt"
    for line in VERBS.strip().splitlines():
        works(cait(*line.split()))
    done = cait("fit", *SMALL, "--trainer.max_steps=1", f"--model.weights={weights}")
    assert f"weights from {weights}" in done.stderr
