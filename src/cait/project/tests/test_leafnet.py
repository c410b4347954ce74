from pathlib import Path

import cait
import pytest
import torch
from cait.cli import main
from leafnet.module import Module
from leafnet.net import Net
from torch.nn.functional import cross_entropy

CONFIG = Path(__file__).parents[1] / "configs/leafnet.yaml"


def test_the_network_gives_logits() -> None:
    assert Net(num_classes=3, width=8)(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_answers_that_are_less_sure_cost_less() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    module = Module(name="leafnet.net:Net", num_classes=3, label_smoothing=0.0)
    assert module.loss_of(logits, labels) < cross_entropy(logits, labels)


def test_a_run_trains_resumes_scores_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # data/ and logs/ are below the working folder
    short = {"trainer.accelerator": "cpu", "trainer.max_steps": 4, "data.root": "data/digits"}
    cait.fit(config=["base.yaml", CONFIG], settings=short, run_name="short")
    run = cait.fit(resume="short", settings={"trainer.max_steps": 8})
    main(["eval", "short", "--trainer.accelerator=cpu"])
    assert isinstance(run, Module)
    assert len(run.predict("data/digits/val/7/0081.png")) == 5
