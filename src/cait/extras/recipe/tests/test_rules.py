"""What the recipe chooses by a survey of the images, the machine, a trial of a few steps, and what is given."""

import numpy as np
import pytest
import timm
import torch
from class_folders import fill
from harness import beside, over_table, table
from PIL import Image

from cait.data.reading import AS_SEEN, Reading
from cait.data.source import open_source
from cait.extras.recipe import figures
from cait.extras.recipe.figures import Machine, Survey, Trial, survey, this_machine
from cait.extras.recipe.rules import choose
from cait.extras.recipe.weights import Weights
from cait.run.program import Program

TABLES = beside(__file__)


class Typical(Trial):
    """Measures of a machine that takes so long for an image of 64 pixels, whatever the network."""

    def __init__(self, case):
        super().__init__(Program())
        self.case = case

    def begun(self):
        return 9.0

    def takes_head(self, held, classes):
        return self.case.get("has_head", False)

    def step(self, held, size):
        if "no_such" in held.get("model.name", ""):
            return None
        return self.case.get("seconds", 4e-3) * (size / 64) ** 2


@pytest.mark.parametrize("case", table(__file__, "cases"))
def test_the_rules_go_by_the_images_the_machine_and_what_is_given(case):
    folder = TABLES["folders"][case.get("images", "photographs")] | case.get("but", {})
    machine = {"cores": 2} | case.get("machine", {})
    weights = Weights(**TABLES["weights"][case["weights"]]) if "weights" in case else None
    chosen = choose(
        Survey(**folder),
        Machine(**machine),
        case.get("given", {}),
        Typical(case),
        weights,
        case.get("minutes", 3),
    )
    assert chosen.settings.items() >= case.get("chosen", {}).items()
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
    root = fill(tmp_path, {"a": 6, "b": 3})
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
    assert 0 < trial.step(quick, 32) < trial.step(quick, 128)
    assert trial.step(quick | {"model.freeze": 0.33}, 32) > 0
    assert trial.step(quick | {"model.name": "timm/no_such_network"}, 64) is None


@pytest.mark.parametrize("classes", [3, 4])
def test_a_trial_knows_whose_head_the_weights_have(classes, tmp_path):
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "w.pth")
    weights = {"model.name": "timm/test_resnet", "model.weights": str(tmp_path / "w.pth")}
    assert Trial(Program()).takes_head(weights, classes) == (classes == 3)


@over_table(__file__, "processors")
def test_a_processor_with_units_for_bfloat16_trains_in_it(flags, fast, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
    monkeypatch.setattr(figures, "Path", lambda _: tmp_path / "cpuinfo")
    assert this_machine({"trainer.accelerator": "cpu"}).fast_bf16 == fast


@pytest.mark.parametrize("fast", [False, True])
def test_a_gpu_that_emulates_bfloat16_is_not_fast_at_it(fast, monkeypatch):
    def supports(including_emulation=True):
        return including_emulation or fast

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supports)
    machine = this_machine({})
    assert (machine.gpus, machine.fast_bf16) == (1, fast)
