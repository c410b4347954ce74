"""Runs that an earlier commit began: today's code scores, exports and resumes them to the same figures.

e128188/ has three runs that commit e128188 stopped before their end, and what it then made of them itself:

    config.yaml, metrics.csv, last.ckpt   the run: with a moving average; distilled from the first by a token; of two
                                          processes. All have embed_dim 16 and depth 1, on the digits.
    scores.json    `cait eval` of last.ckpt, when stopped and after `cait resume`
    logits.npy     of `cait export --format onnx`, for the images below
    resumed.csv    metrics.csv after `cait resume`
    settings.txt   names of all settings of `cait fit`
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from harness import Cait, slow

from cait.cli import main, saved

EARLIER = Path(__file__).parent / "e128188"
LAST_STEP = {"ema": 200, "distilled": 150, "ddp": 80}
IMAGES = np.linspace(-2, 2, 3 * 3 * 16 * 16, dtype=np.float32).reshape(3, 3, 16, 16)
ONE_IMAGE = 100 / 360
"""Accuracy that one image of the validation set is worth, in per cent."""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """logs/ with the three runs."""
    for run in LAST_STEP:
        folder = tmp_path / "logs" / run
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copy(EARLIER / run / "last.ckpt", folder / "checkpoints")
        for name in ("config.yaml", "metrics.csv"):
            shutil.copy(EARLIER / run / name, folder)
    return tmp_path / "logs"


def compare_scores(run: Path, when: str, rel: float, images: int) -> None:
    """evaluation.json beside the earlier commit's: the loss within `rel`, accuracies within so many `images`."""
    scores: dict[str, Any] = json.loads((EARLIER / run.name / "scores.json").read_text())[when]
    ours = json.loads((run / "evaluation.json").read_text())
    assert {"raw", "ema"} & ours.keys() == scores.keys()
    for weights, expected in scores.items():
        assert ours[weights]["images"] == expected["images"] == 360
        assert ours[weights]["loss"] == pytest.approx(expected["loss"], rel=rel)
        for name in ("acc1", "acc5"):
            assert ours[weights][name] == pytest.approx(expected[name], abs=images * ONE_IMAGE + 1e-4)


@pytest.mark.parametrize("run", slow("ema", "distilled", "ddp"))
def test_they_are_scored_and_exported(run: str, cait: Cait, logs: Path) -> None:
    scored = cait("eval", run, "--trainer.devices=1")
    assert scored.returncode == 0, scored.stderr
    # To the last bit where the numbers were written; another processor adds up in another order.
    compare_scores(logs / run, "stopped", rel=1e-6, images=0)
    onnxruntime = pytest.importorskip("onnxruntime")
    exported = cait("export", run, "--format=onnx", "--output=model.onnx")
    assert exported.returncode == 0, exported.stderr
    [logits] = onnxruntime.InferenceSession(logs.parent / "model.onnx").run(None, {"images": IMAGES})
    np.testing.assert_allclose(logits, np.load(EARLIER / run / "logits.npy"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", ["ema", *slow("distilled", "ddp")])
def test_they_go_on_as_they_would_have(run: str, cait: Cait, logs: Path) -> None:
    resumed = cait("resume", run, f"--trainer.max_steps={LAST_STEP[run]}")
    assert resumed.returncode == 0, resumed.stderr
    rows, expected = (
        list(csv.DictReader(path.read_text().splitlines()))
        for path in (logs / run / "metrics.csv", EARLIER / run / "resumed.csv")
    )
    assert len(rows) == len(expected)
    # Since then attention takes its scale before it rounds: the last bits of the gradients differ.
    for row, earlier in zip(rows, expected, strict=True):
        for name, value in earlier.items():
            if run == "ddp" and name in ("train/loss", "train/acc1"):
                continue  # were of process 0 alone, are the mean over both
            figure = row[name]
            assert (figure == "") == (value == ""), name
            if value:
                one = 0 if "acc" not in name else 100 / 32 if name == "train/acc1" else ONE_IMAGE
                assert float(figure) == pytest.approx(float(value), rel=1e-3, abs=one + 1e-4), name
    scored = cait("eval", run, f"--ckpt_path=logs/{run}/checkpoints/last.ckpt", "--trainer.devices=1")
    assert scored.returncode == 0, scored.stderr
    compare_scores(logs / run, "resumed", rel=1e-4, images=1)


def test_each_setting_is_known_or_the_error_names_the_new_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["cait"])
    with pytest.raises(SystemExit) as shown:
        main(["fit", "--print_config"])
    assert shown.value.code == 0
    today = flat_names(yaml.safe_load(capfd.readouterr().out))
    names = (EARLIER / "settings.txt").read_text().split()
    assert len(names) == 111
    for name in set(names) - today - {"config"}:
        with pytest.raises(SystemExit):
            main(["fit", f"--{name}=1"])
        assert "did you mean --" in capfd.readouterr().err, name


def flat_names(settings: dict[str, Any], prefix: str = "") -> set[str]:
    """Names of the settings as on the command line."""
    names = set()
    for name, value in settings.items():
        names |= flat_names(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return names


def test_they_keep_their_pixels_and_are_scored_whole(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their config.yaml does not say how alpha channels and EXIF data are read: both were ignored."""
    monkeypatch.chdir(logs.parent)
    monkeypatch.setattr("sys.argv", ["cait"])
    config = logs / "ema/config.yaml"
    settings = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(settings | {"trainer": settings["trainer"] | {"limit_val_batches": 2}}))
    by_file = ["eval", "--config", "logs/ema/config.yaml", "--ckpt_path", "logs/ema/checkpoints/last.ckpt"]
    for verb, arguments in (("eval", ["eval", "ema"]), ("resume", ["resume", "ema"]), ("eval by file", by_file)):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--print_config"])
        told = capsys.readouterr()
        assert stop.value.code in (0, None), told.err
        shown = yaml.safe_load(told.out)
        assert (shown["data"]["exif_orientation"], shown["data"]["background"]) == (False, None), verb
        assert shown["trainer"]["limit_val_batches"] == (None if verb == "eval" else 2)
    assert saved.data_settings(logs / "ema").items() >= {"exif_orientation": False, "background": None}.items()
    config.write_text(yaml.safe_dump(settings | {"data": settings["data"] | {"background": "white"}}))
    assert saved.data_settings(logs / "ema")["background"] == "white"
