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
from harness import LIMIT, SMALL, ended, rows, start
from runs import wait_for_steps
from torch.utils._pytree import tree_flatten_with_path

from cait import ckpt
from cait.ckpt import read_checkpoint
from cait.run import rundir

RECIPE = [
    *SMALL,
    "--trainer.devices=2",
    "--trainer.strategy.class_path=contrib.fsdp.strategy.FullyShardedStrategy",
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--save_every_n_steps=3",
    "--model.drop_path_rate=0.2",
    "--data.num_workers=0",
    "--ema.decay=0.9",
]


def run_pair(folder, settings=None, trainers=None):
    (folder / "settings.json").write_text(json.dumps([settings or {}, trainers or {}]))
    situations = str(Path(__file__).with_name("fsdp_pair.py"))
    return gloo.answers(situations, "SITUATIONS", folder, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def both(folder):
    return run_pair(folder)


def assert_same(ours, theirs, tolerance=0.0):
    """Checkpoints have the same keys, shapes, types and order, and values within the tolerance."""
    sides = [read_checkpoint(path) for path in (ours, theirs)]
    assert list(sides[0]) == list(sides[1])
    parts = ("state_dict", "optimizer_states", "loops", "lr_schedulers")
    leaves = [
        tree_flatten_with_path([ckpt.average(side), *(side[part] for part in parts)])[0]
        for side in sides
    ]
    assert len(leaves[0]) > 100
    for (place, one), (other_place, other) in zip(*leaves, strict=True):
        assert place == other_place
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
        else:
            assert one == other or one != one, place


def assert_losses(ours, theirs, tolerance=1e-5):
    """A run has the losses of the other, or of its end."""
    assert ours == pytest.approx(theirs[-len(ours) :], abs=tolerance, nan_ok=True)


def test_two_processes_train_as_with_ddp(folder, both):
    for ours, theirs, unfinite in zip(both["fsdp"], both["ddp"], (0, 2), strict=True):
        assert len(ours["losses"]) == 50
        assert sum(loss != loss for loss in ours["losses"]) == unfinite
        assert_losses(ours["losses"], theirs["losses"])
        assert ours["decay"] == theirs["decay"]
    decay = both["fsdp"][0]["decay"]
    assert decay["blocks.0.attn.qkv.weight"] > decay["blocks.0.gamma_1"] == 0
    last = folder / "fsdp/last.ckpt"
    steps = read_checkpoint(last)["optimizer_states"][0]["state"][0]["step"]
    assert steps == 48  # both steps that were not finite were skipped
    assert_same(last, folder / "ddp/last.ckpt", 1e-6)  # the moving average among them


@pytest.mark.parametrize(("resumed", "first"), [("ddp-to-fsdp", "ddp"), ("fsdp-to-ddp", "fsdp")])
def test_checkpoints_load_both_ways(resumed, first, folder, both):
    for ours, theirs in zip(both[resumed], both[first], strict=True):
        assert len(ours["losses"]) == 25
        assert_losses(ours["losses"], theirs["losses"])
    assert_same(folder / resumed / "last.ckpt", folder / first / "last.ckpt", 1e-6)


def test_a_resumed_run_ends_with_the_same_bits(folder, both):
    for ours, theirs in zip(both["fsdp-again"], both["fsdp"], strict=True):
        assert str(ours["losses"]) == str(theirs["losses"][25:])
    assert_same(folder / "fsdp-again/last.ckpt", folder / "fsdp/last.ckpt")


@pytest.mark.parametrize(
    ("situation", "line"),
    [
        ("tied", "Tied fails on images of .3, 8, 8."),
        ("scaled", "the network cannot be sharded"),
        ("adafactor", "take another --model.optimizer"),
        ("adamuon", "fsdp2 cannot run this step: .*; take another --model.optimizer"),
        ("uneven", "they have 3 to 4 batches"),
    ],
)
def test_what_shows_only_in_training_is_refused(situation, line, both):
    first, second = both[situation]
    assert first == second
    assert re.match(f"UserError: .*{line}[^\n]*$", first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "trainers", "tolerance"),
    [
        (dict(grad_checkpointing=True), dict(accumulate_grad_batches=5), 1e-5),
        (dict(compile=True), dict(gradient_clip_algorithm="value", gradient_clip_val=1e-3), 1e-5),
        (dict(optimizer="lamb", layer_decay=0.7, fields=dict(norm="batchnorm")), {}, 1e-4),
        (dict(grad_checkpointing=True), dict(precision="bf16-mixed"), 0.05),
        # rows that no two share evenly
        (dict(optimizer="muon", fields=dict(embed_dim=15, num_heads=3)), {}, 1e-3),
    ],
    ids=["accumulated", "compiled and clipped by value", "lamb and batch norms", "bf16", "muon"],
)
def test_other_settings_train_as_with_ddp(settings, trainers, tolerance, tmp_path):
    answers = run_pair(tmp_path, settings, trainers)
    for rank, theirs in enumerate(answers["ddp"]):
        ours = answers["fsdp"][rank]
        assert ours["decay"] == theirs["decay"]
        for name in ("ddp-to-fsdp", "fsdp-to-ddp", "fsdp"):
            assert_losses(answers[name][rank]["losses"], theirs["losses"], tolerance)
        again = answers["fsdp-again"][rank]["losses"]
        assert str(again) == str(ours["losses"][-len(again) :])
    sharded, plain = (
        ckpt.weights(read_checkpoint(tmp_path / name / "last.ckpt")) for name in ("fsdp", "ddp")
    )
    assert {name: weight.dtype for name, weight in sharded.items()} == {
        name: weight.dtype for name, weight in plain.items()
    }


@pytest.fixture(scope="module")
def whole(place):
    """The run of RECIPE that nothing happened to."""
    return ended(place, "whole", RECIPE)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on(signum, cait, tmp_path, whole):
    run = tmp_path / "logs/cut"
    job = start(tmp_path, "fit", *RECIPE, "--run_name=cut")
    wait_for_steps(run, 30, job)
    os.killpg(job.pid, signum)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode in (-signum, 128 + signum), output
    resumed = cait("resume", "cut")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(run / "checkpoints/last.ckpt", whole / "checkpoints/last.ckpt")
    assert rows(run) == rows(whole)


@pytest.mark.slow
def test_the_verbs_take_a_sharded_run(cait, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "logs/sharded")
    one = ["--trainer.devices=1", "--trainer.strategy=auto"]
    accuracy = max(float(row["val/acc1"]) for row in rows(run) if row["val/acc1"])
    scores = []
    for devices in ([], one):
        scored = cait("eval", "sharded", *devices)
        assert scored.returncode == 0, scored.stderr
        scores.append(json.loads((run / rundir.EVALUATION).read_text()))
    assert scores[0]["raw"]["acc1"] == pytest.approx(accuracy, abs=1e-4)
    for weights in ("raw", "ema"):
        assert scores[0][weights]["acc1"] == scores[1][weights]["acc1"]
    for words in (
        ["export", "sharded", "--ema"],
        ["visualize", "sharded"],
        ["replay", "sharded", "--step=65"],
        ["resume", "sharded", *one, "--trainer.max_epochs=4"],
        ["resume", "sharded", "--trainer.max_epochs=5"],
        ["resume", "sharded", "--trainer.strategy=ddp", "--trainer.max_epochs=6"],
        ["resume", "sharded", "--trainer.devices=1", "--trainer.max_epochs=7"],
    ):
        done = cait(*words)
        assert done.returncode == 0, (words, done.stderr)
    weights = "logs/sharded/checkpoints/last.ckpt"
    done = cait("fit", *SMALL, "--trainer.max_steps=1", f"--model.weights={weights}")
    assert done.returncode == 0, done.stderr
    assert f"weights from {weights}" in done.stdout + done.stderr
