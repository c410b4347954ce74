"""Networks as ONNX, read back by ONNX Runtime, and through the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from harness import SMALL
from networks import TINY, UNLIKE_TIMM, random_network

from cait.cli import main
from cait.errors import UserError
from cait.extras.formats.exporting import export
from cait.model import network

onnxruntime = pytest.importorskip("onnxruntime")
PREPARED = dict(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7], crop_pct=0.9, interpolation="bilinear")


@pytest.mark.parametrize("fields", [UNLIKE_TIMM, pytest.param({}, marks=pytest.mark.slow)])
def test_the_runtime_gives_the_networks_logits(fields: dict, tmp_path: Path) -> None:
    model, size = random_network(**fields), fields.get("img_size", 224)
    path = tmp_path / "sub" / "model.onnx"
    names = [f"class {index}" for index in range(len(model.head.bias))]
    exported = export(model, path, "onnx", PREPARED, class_names=names)
    assert exported.files == [path]
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    session = onnxruntime.InferenceSession(path)
    props = session.get_modelmeta().custom_metadata_map
    told = {key: value if key == "interpolation" else json.loads(value) for key, value in props.items()}
    assert told == {"class_names": names, "img_size": size, **PREPARED}
    model.eval()
    for batch in (1, 5):
        images = torch.randn(batch, 3, size, size)
        with torch.no_grad():
            expected = model(images)
        (logits,) = session.run(None, {"images": images.numpy()})
        assert (torch.from_numpy(logits) - expected).abs().max() <= 1e-4 * max(1, expected.abs().max())
    assert expected.std() > 1e-2


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


def test_a_run_is_exported(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["fit", *SMALL, "--trainer.max_steps=2", "--run_name=a"])
    capfd.readouterr()
    main(["export", "a", "--format", "onnx"])
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == "logs/a/export/model.onnx"
    assert err == ""
