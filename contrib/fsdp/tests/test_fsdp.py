"""FSDP2 on two processes does what DDP does, and its checkpoints are as safe and as portable."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import LIMIT, SMALL, Cait, ended, environment, free_port, rows, start
from runs import wait_for_steps
from torch.utils._pytree import tree_flatten_with_path

from cait import ckpt
from cait.errors import UserError
from cait.run import rundir
from contrib.fsdp.strategy import FullyShardedStrategy

FSDP = [
    "--trainer.devices=2",
    "--trainer.strategy.class_path=contrib.fsdp.strategy.FullyShardedStrategy",
]
RECIPE = [
    *SMALL,
    *FSDP,
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--save_every_n_steps=3",
    "--model.drop_path_rate=0.2",
    "--data.num_workers=0",
    "--ema.decay=0.9",
]


def pair(folder: Path, settings: dict | None = None, trainers: dict | None = None) -> list[dict]:
    """What both processes of fsdp_pair.py found."""
    port = free_port()
    jobs = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("fsdp_pair.py")),
                json.dumps(settings or {}),
                json.dumps(trainers or {}),
            ],
            cwd=folder,
            env=environment()
            | {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [job.communicate(timeout=LIMIT)[0] for job in jobs]
    finally:
        for job in jobs:
            job.poll() is None and job.kill()
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A folder with the checkpoints of the runs of fsdp_pair.py, and what its processes found."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, pair(folder)


def checkpoint(folder: Path, name: str, generation: str = rundir.LAST) -> dict:
    return ckpt.read_checkpoint(folder / name / generation)


def differences(ours: dict, theirs: dict) -> dict[str, float]:
    """The largest difference of each tensor of two checkpoints, whose keys, shapes, types and order are the same.

    A key's bias moves all scores of a row alike, so the softmax cancels it. Its gradient is nothing but rounding,
    which AdamW scales up: there is nothing to compare.
    """
    found = {}
    parts = ("state_dict", "optimizer_states", "loops", "lr_schedulers")
    sides = [
        tree_flatten_with_path({part: side[part] for part in parts} | {"EMA": ckpt.average(side)})[
            0
        ]
        for side in (ours, theirs)
    ]
    biases = {i for i, name in enumerate(_trained(theirs)) if name.endswith("attn.k.bias")}
    assert list(ours) == list(theirs)
    for (place, one), (other_place, other) in zip(*sides, strict=True):
        assert place == other_place
        if isinstance(one, torch.Tensor):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), place
            name = "".join(map(str, place))
            if "attn.k.bias" not in name and not any(f"['state'][{i}]" in name for i in biases):
                found[name] = float((one - other).abs().max()) if one.numel() else 0.0
        else:
            assert one == other or one != one, place
    assert len(found) > 100
    return found


def _trained(checkpoint: dict) -> list[str]:
    """The names of the parameters in the order of the optimizer's: those without weight decay come first."""
    state = ckpt.weights(checkpoint)
    plain = {
        name
        for name, weight in state.items()
        if weight.ndim <= 1 or name in ("pos_embed", "cls_token")
    }
    return [name for name in state if name in plain] + [name for name in state if name not in plain]


def test_two_processes_train_as_with_ddp(both: tuple[Path, list[dict]]) -> None:
    folder, found = both
    for each in found:
        assert len(each["fsdp"]["losses"]) == 50
        assert each["fsdp"]["losses"] == pytest.approx(each["ddp"]["losses"], abs=1e-5, nan_ok=True)
        assert each["fsdp"]["decay"] == each["ddp"]["decay"]
    # both were skipped
    assert [sum(loss != loss for loss in each["fsdp"]["losses"]) for each in found] == [
        0,
        2,
    ]
    assert found[0]["fsdp"]["decay"]["blocks.0.gamma_1"] == 0
    assert found[0]["fsdp"]["decay"]["blocks.0.attn.qkv.weight"] > 0
    ours, theirs = checkpoint(folder, "fsdp"), checkpoint(folder, "ddp")
    assert ours["optimizer_states"][0]["state"][0]["step"] == 48
    assert max(differences(ours, theirs).values()) <= 1e-6  # the moving average among them


def test_checkpoints_load_both_ways(both: tuple[Path, list[dict]]) -> None:
    folder, found = both
    for name, first in (("ddp-to-fsdp", "ddp"), ("fsdp-to-ddp", "fsdp")):
        for each in found:
            assert each[name]["losses"] == pytest.approx(
                each[first]["losses"][25:], abs=1e-5, nan_ok=True
            )
        assert (
            max(differences(checkpoint(folder, name), checkpoint(folder, first)).values()) <= 1e-6
        )


def test_a_resumed_run_ends_with_the_same_bits(both: tuple[Path, list[dict]]) -> None:
    folder, found = both
    assert (
        max(differences(checkpoint(folder, "fsdp-again"), checkpoint(folder, "fsdp")).values()) == 0
    )
    for each in found:
        assert str(each["fsdp-again"]["losses"]) == str(each["fsdp"]["losses"][25:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("16-mixed", False), "--trainer.precision 16-mixed: fsdp2 takes 32-true or bf16-mixed"),
        (("32-true", True), "--trainer.sync_batchnorm true"),
    ],
)
def test_what_cannot_be_sharded_is_refused(settings: tuple[str, bool], message: str) -> None:
    strategy = FullyShardedStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.check("bf16-mixed", False)
    with pytest.raises(UserError, match=message):
        strategy.check(*settings)


def test_what_shows_only_in_training_is_refused(both: tuple[Path, list[dict]]) -> None:
    said = both[1][0]["refusals"]
    assert both[1][1]["refusals"] == said
    assert "Tied fails on images of [3, 8, 8]" in said["tied"]
    assert "the network cannot be sharded" in said["scaled"]
    assert "take another --model.optimizer" in said["adafactor"]
    assert re.match(
        "fsdp2 cannot run this step: .*; take another --model.optimizer", said["adamuon"]
    )
    assert "\n" not in said["adamuon"]
    assert "they have 3 to 4 batches" in said["uneven"]


CHECKPOINTED = dict(grad_checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "trainers", "tolerance"),
    [
        (CHECKPOINTED, dict(accumulate_grad_batches=5), 1e-5),
        (dict(compile=True), dict(gradient_clip_algorithm="value", gradient_clip_val=1e-3), 1e-5),
        (dict(optimizer="lamb", layer_decay=0.7, fields=dict(norm="batchnorm")), {}, 1e-4),
        (CHECKPOINTED, dict(precision="bf16-mixed"), 0.05),
        # rows that no two share evenly
        (
            dict(optimizer="muon", fields=dict(embed_dim=15, num_heads=3)),
            {},
            1e-3,
        ),
    ],
    ids=[
        "checkpointing and accumulation",
        "compiled and clipped by value",
        "lamb and batch norms",
        "bf16",
        "muon",
    ],
)
def test_other_settings_train_as_with_ddp(
    settings: dict, trainers: dict, tolerance: float, tmp_path: Path
) -> None:
    found = pair(tmp_path, settings, trainers)
    for each in found:
        for name in ("ddp-to-fsdp", "fsdp-to-ddp", "fsdp"):
            losses = each[name]["losses"]
            assert losses == pytest.approx(
                each["ddp"]["losses"][-len(losses) :], abs=tolerance, nan_ok=True
            ), name
        assert str(each["fsdp-again"]["losses"]) == str(each["fsdp"]["losses"][25:])
        assert each["fsdp"]["decay"] == each["ddp"]["decay"]
    ours = checkpoint(tmp_path, "fsdp")
    assert all(
        weight.dtype == torch.float32
        for weight in ckpt.weights(ours).values()
        if weight.is_floating_point()
    )
    assert ours["state_dict"].keys() == checkpoint(tmp_path, "ddp")["state_dict"].keys()


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The run of RECIPE that nothing happened to."""
    return ended(place, "whole", RECIPE)


def assert_same(ours: Path, theirs: Path) -> None:
    found = differences(
        *(ckpt.read_checkpoint(folder / "checkpoints/last.ckpt") for folder in (ours, theirs))
    )
    assert max(found.values()) == 0
    assert rows(ours) == rows(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on(
    signum: int, cait: Cait, tmp_path: Path, whole: Path
) -> None:
    folder = tmp_path / "logs/cut"
    job = start(tmp_path, "fit", *RECIPE, "--run_name=cut")
    wait_for_steps(folder, 30, job)
    os.killpg(job.pid, signum)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode in (-signum, 128 + signum), output
    resumed = cait("resume", "cut")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(folder, whole)


@pytest.mark.slow
def test_the_verbs_take_a_sharded_run(cait: Cait, tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "logs/sharded"
    shutil.copytree(whole, folder)
    accuracy = max(float(row["val/acc1"]) for row in rows(folder) if row["val/acc1"])

    def scored(*arguments: str) -> tuple[float, float]:
        done = cait("eval", "sharded", *arguments)
        assert done.returncode == 0, done.stderr
        figures = json.loads((folder / rundir.EVALUATION).read_text())
        return figures["raw"]["acc1"], figures["ema"]["acc1"]

    one = ("--trainer.devices=1", "--trainer.strategy=auto")
    sharded_scores = scored()
    assert sharded_scores[0] == pytest.approx(accuracy, abs=1e-4)
    assert scored(*one) == sharded_scores
    for verb in (
        ["export", "sharded", "--ema"],
        ["visualize", "sharded"],
        ["replay", "sharded", "--step=65"],
        ["resume", "sharded", *one, "--trainer.max_epochs=4"],
        ["resume", "sharded", "--trainer.max_epochs=5"],
        ["resume", "sharded", "--trainer.strategy=ddp", "--trainer.max_epochs=6"],
        ["resume", "sharded", "--trainer.devices=1", "--trainer.max_epochs=7"],
    ):
        done = cait(*verb)
        assert done.returncode == 0, (verb, done.stderr)
    fresh = [
        "fit",
        *SMALL,
        "--trainer.max_steps=1",
        "--model.weights=logs/sharded/checkpoints/last.ckpt",
    ]
    done = cait(*fresh)
    assert done.returncode == 0, done.stderr
    assert "weights from logs/sharded/checkpoints/last.ckpt" in done.stdout + done.stderr
