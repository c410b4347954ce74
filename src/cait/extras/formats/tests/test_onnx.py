"""What only a network as ONNX has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from networks import TINY, random_network

from cait.errors import UserError
from cait.extras.formats.exporting import export
from cait.model import network

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.slow
def test_the_file_does_not_depend_on_the_memory_format(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network.build("timm/test_efficientnet", 32, 7)
    usual = network.build("timm/test_efficientnet", 32, 7).to(memory_format=torch.contiguous_format)
    usual.load_state_dict(model.state_dict())
    for net, name in ((model, "a.onnx"), (usual, "b.onnx")):
        export(net, tmp_path / name, "onnx", input_shape=(3, 32, 32))
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


class Twice(torch.nn.Module):
    """A network with a second output."""

    output_names = ("logits", "doubled")

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.network(images)
        return logits, 2 * logits


def test_a_network_may_have_further_outputs(tmp_path: Path) -> None:
    export(Twice(random_network(**TINY)), tmp_path / "x.onnx", "onnx", input_shape=(3, 8, 8))
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx")
    images = torch.randn(2, 3, 8, 8).numpy()
    logits, doubled = session.run(["logits", "doubled"], {"images": images})
    assert (doubled == 2 * logits).all()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    hint = r"\.venv/bin/pip install --editable '\.\[export\]'"
    with pytest.raises(UserError, match=f"needs the package onnxscript: {hint}"):
        export(random_network(**TINY), tmp_path / "x.onnx", "onnx")
    assert not list(tmp_path.iterdir())
