"""What the recipe chooses by a survey of the images, the machine, a trial of a few steps, and what is given."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from class_folders import fill
from golden import is_there
from PIL import Image

from cait.data.reading import AS_SEEN, Reading
from cait.data.source import open_source
from cait.extras.recipe import figures
from cait.extras.recipe.figures import Machine, Settings, Survey, Trial, survey, this_machine
from cait.extras.recipe.rules import choose
from cait.extras.recipe.weights import Weights
from cait.run.program import Program

FOLDERS = {
    "photographs": Survey({"cat": 300, "dog": 280}, 60, side=480, gray=False),
    "digits": Survey({str(digit): 600 for digit in range(10)}, 600, side=28, gray=True),
}
RUN = {"model.name": "timm/resnet10t", "model.weights": "x.ckpt", "data.img_size": 64}
WEIGHTS = {
    "published": Weights("timm's", {"model.pretrained": True}),
    "a run's": Weights("a run's", RUN),
}
CASES = [
    pytest.param(case, id=case["case"])
    for case in yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text())
    if is_there(case.get("needs", ""))
]


@dataclass(frozen=True)
class Typical(Trial):
    """Measures of a machine that takes so long for an image of 64 pixels, whatever the network."""

    image: float
    has_head: bool = False

    def begun(self) -> float:
        return 9.0

    def takes_head(self, held: Settings, classes: int) -> bool:
        return self.has_head

    def step(self, held: Settings, size: int) -> float | None:
        return None if "no_such" in held.get("model.name", "") else self.image * (size / 64) ** 2


def recipe(case):
    """The recipe of a case of rules.yaml."""
    return choose(
        replace(FOLDERS[case.get("images", "photographs")], **case.get("but", {})),
        Machine(**({"cores": 2} | case.get("machine", {}))),
        case.get("given", {}),
        Typical(case.get("seconds", 4e-3), case.get("has_head", False)),
        WEIGHTS.get(case.get("weights", "")),
        case.get("minutes", 3),
    )


@pytest.mark.parametrize("case", CASES)
def test_the_rules_go_by_the_images_the_machine_and_what_is_given(case):
    chosen = recipe(case)
    expected = case.get("chosen", {})
    assert {name: chosen.settings.get(name) for name in expected} == expected
    assert chosen.settings.keys() >= expected.keys()
    assert not chosen.settings.keys() & {*case.get("leaves", [])}
    lines = dict(chosen.lines)
    for topic, text in case.get("says", {}).items():
        assert topic not in lines if text is None else text in lines[topic]


def surveyed(root, reading=AS_SEEN):
    return survey(open_source(str(root)), reading)


@pytest.mark.parametrize("gray", [True, False])
def test_the_survey_counts_the_images_and_measures_their_colors(gray, tmp_path):
    folder = surveyed(fill(tmp_path, {"a": 6, "b": 3}, gray=gray))
    assert folder.counts == {"a": 5, "b": 2}
    assert (folder.val, folder.side, folder.gray) == (2, 24, gray)
    images = [Image.open(path).convert("RGB") for path in tmp_path.rglob("*.png")]
    assert np.allclose(folder.mean, np.mean(images, axis=(0, 1, 2)) / 255, atol=0.1)


def test_the_survey_reads_the_images_as_the_run_will(tmp_path):
    root = fill(tmp_path / "color", {"a": 6, "b": 3})
    luma = np.dot(surveyed(root).mean, (0.299, 0.587, 0.114))
    as_gray = surveyed(root, Reading(in_chans=1))
    assert as_gray.gray
    assert as_gray.mean[0] == pytest.approx(luma, abs=0.005)
    for path in root.rglob("*.png"):
        Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(path)  # black where nobody sees it
    assert surveyed(root, Reading(background="white")).mean == (1, 1, 1)
    assert surveyed(root, Reading(background=None)).mean == (0, 0, 0)


def test_a_trial_measures_a_network_at_a_size():
    trial = Trial(Program())
    quick = {"trainer.accelerator": "cpu", "model.name": "timm/resnet10t"}
    small = trial.step(quick, 32)
    large = trial.step(quick, 128)
    assert small is not None
    assert large is not None
    assert 0 < small < large
    assert trial.step(quick | {"model.freeze": 0.33}, 32) is not None
    assert trial.step(quick | {"model.name": "timm/no_such_network"}, 64) is None
    assert trial.begun() > 0


def test_a_trial_knows_whose_head_the_weights_have(tmp_path):
    torch.save(timm.create_model("resnet10t", num_classes=3).state_dict(), tmp_path / "w.pth")
    weights = {"model.name": "timm/resnet10t", "model.weights": str(tmp_path / "w.pth")}
    trial = Trial(Program())
    assert trial.takes_head(weights, 3)
    assert not trial.takes_head(weights, 4)


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", False), ("amx_bf16 amx_tile", True)])
def test_a_processor_with_units_for_bfloat16_trains_in_it(flags, fast, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
    monkeypatch.setattr(figures, "Path", lambda _: tmp_path / "cpuinfo")
    assert this_machine({"trainer.accelerator": "cpu"}).fast_bf16 == fast


# T4, V100 and RTX 20; A100
@pytest.mark.parametrize(("capability", "fast"), [(7, False), (8, True)])
def test_a_gpu_that_emulates_bfloat16_is_not_fast_at_it(capability, fast, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    gpu = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": SimpleNamespace(major=capability),
        "_check_bf16_tensor_supported": True,  # the emulation
    }
    for name, answer in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    machine = this_machine({})
    assert (machine.gpus, machine.fast_bf16) == (1, fast)
