"""A network taken out, read back by the library that it is for, and through the command line."""

import json
import re
import shutil
import stat
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from harness import SMALL, call
from networks import DIGITS, TINY, needs_a_compiler, needs_ablations, needs_cait, random_network
from timm.data import CustomDatasetInfo, create_transform, resolve_model_data_config
from torch import Tensor

import cait
from cait.cli import main
from cait.data import dataset
from cait.data.reading import UnreadableImageError, load_image
from cait.data.transforms import Preprocessing
from cait.errors import UserError
from cait.extras.publish import eight_bits, exporting
from cait.extras.publish.exporting import export
from cait.model import network
from cait.run.program import Program
from cait.train.metrics import OneClass

needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="OpenVINO is a package of its own"
)
needs_onnx = pytest.mark.skipif(
    find_spec("onnxruntime") is None, reason="ONNX needs packages of its own"
)
MARKS = {
    "slow": pytest.mark.slow,
    "onnx": needs_onnx,
    "openvino": needs_openvino,
    "ablations": needs_ablations,
}
PREPARED = dict(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7], crop_pct=0.9, interpolation="bilinear")
Read = tuple[Callable[[Tensor], Tensor], dict[str, Any]]
"""A network as a function, and the metadata that travel with its weights."""


def read_timm(path):
    network = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    names = network.pretrained_cfg["label_names"]
    assert CustomDatasetInfo(names).index_to_label_name(1) == "class 1"
    config = resolve_model_data_config(network)
    metadata = {name: config[name] for name in PREPARED}
    metadata |= {"class_names": names, "img_size": config["input_size"][-1]}
    return network, json.loads(json.dumps(metadata))


def read_torch_export(path):
    files = {"metadata.json": ""}
    network = torch.export.load(path, extra_files=files).module()
    return network, json.loads(files["metadata.json"])


def read_onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    metadata = session.get_modelmeta().custom_metadata_map
    return lambda images: torch.from_numpy(
        session.run(None, {"images": images.numpy()})[0]
    ), values_of(metadata)


def read_openvino(path):
    import openvino

    network = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    metadata = openvino.Core().read_model(path).get_rt_info("metadata").value
    return lambda images: torch.from_numpy(
        network({"images": images.numpy()})["logits"]
    ), values_of(metadata)


def values_of(texts):
    return {
        key: text if key == "interpolation" else json.loads(text) for key, text in texts.items()
    }


READ: dict[str, Callable[[Path], Read]] = {
    "timm": read_timm,
    "torch_export": read_torch_export,
    "onnx": read_onnx,
    "openvino": read_openvino,
}
FILES = {
    "timm": ["timm/config.json", "timm/model.safetensors"],
    "torch_export": ["model.pt2"],
    "onnx": ["model.onnx"],
    "openvino": ["model.bin", "model.xml"],
}


def exports():
    file = Path(__file__).with_name("exports.yaml")
    for case in yaml.safe_load(file.read_text()):
        marks = [MARKS[name] for name in case.pop("marks", [])]
        yield pytest.param(case, marks=marks, id=f"{case['format']} {case['network']}")


@needs_cait
@pytest.mark.parametrize("case", exports())
def test_the_reading_library_gives_the_networks_logits(case, tmp_path):
    format = case["format"]
    model = random_network(**case["network"])
    channels = model.config.in_chans
    names = [f"class {index}" for index in range(model.config.num_classes)]
    prepared = PREPARED | {name: PREPARED[name][:channels] for name in ("mean", "std")}
    path = tmp_path / "sub" / exporting.FILES[format]
    files, _ = export(model, path, format, prepared, class_names=names)
    assert model.training  # it is as it was
    assert files == [path.parent / file for file in FILES[format]]
    # and nothing beside them
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == files
    assert len({stat.S_IMODE(file.stat().st_mode) for file in files}) == 1  # for the same readers
    if format == "timm":
        check_config(json.loads(files[0].read_text()), case["timm"])
    theirs, metadata = READ[format](path)
    assert metadata == prepared | {"class_names": names, "img_size": model.config.img_size}
    model.eval()
    bound = 1e-5 if format == "timm" else 1e-4
    for batch in (1, 5):
        images = torch.randn(batch, *model.input_shape)
        with torch.no_grad():
            logits = model(images)
            difference = (theirs(images) - logits).abs().max()
        assert difference <= bound * max(1, logits.abs().max())
    assert logits.shape == (5, len(names))
    assert logits.std() > 1e-2


def check_config(config, expected):
    """timm's config.json says which of timm's networks this is, and what differs from it."""
    pretrained = config["pretrained_cfg"]
    for name in ("architecture", "model_args"):
        assert config[name] == expected[name]
    for name, value in expected["pretrained_cfg"].items():
        assert pretrained[name] == value
    # the weights are not those that timm has
    assert pretrained.keys().isdisjoint({"tag", "license", "url", "hf_hub_id"})


def test_an_export_that_fails_leaves_what_was_there(tmp_path):
    model = random_network(**TINY)
    path = tmp_path / "timm"
    path.mkdir()
    for name in ("config.json", "model.safetensors", "notes.md"):
        (path / name).write_text("theirs")
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(UserError, match="nan"):
        export(model, path, "timm")
    assert [*tmp_path.iterdir()] == [path]
    assert [file.read_text() for file in path.iterdir()] == ["theirs"] * 3

    export(random_network(**TINY), path, "timm")
    assert [file.name for file in path.iterdir() if file.read_bytes() == b"theirs"] == ["notes.md"]
    assert len([*path.iterdir()]) == 3


@pytest.fixture(scope="module")
def run(place, trained):
    """A run without its last checkpoint, and its best one alone."""
    shutil.copytree(trained, place / "logs/a")
    shutil.copy(place / "logs/a/checkpoints/best.ckpt", place / "alone.ckpt")
    (place / "logs/a/checkpoints/last.ckpt").unlink()


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("a", "logs/a/export/timm"),
        ("a --ema", "logs/a/export/ema/timm"),
        ("a --raw", "logs/a/export/raw/timm"),
        ("a --output=out/mine", "out/mine"),
        ("alone.ckpt", "export/timm"),  # which says itself how images are prepared
    ],
)
def test_a_run_is_taken_out_raw_and_averaged(here, words, folder):
    done = call(here, "export", *words.split())
    *files, line = done.stdout.splitlines()
    assert files == [f"{folder}/config.json", f"{folder}/model.safetensors"]
    difference = re.fullmatch(r"read back, the logits differ by (\S+) at most", line)[1]
    assert 0 <= float(difference) <= 1e-5
    assert done.stderr == ""
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert resolve_model_data_config(loaded)["input_size"] == (3, 16, 16)
    content = torch.load("alone.ckpt", weights_only=True)
    averaged = content["callbacks"]["EMA"]
    assert not torch.equal(averaged["head.weight"], content["state_dict"]["model.head.weight"])
    for name, tensor in loaded.state_dict().items():
        raw = content["state_dict"][f"model.{name}"]
        assert torch.equal(tensor, raw if "--raw" in words else averaged[name])


@pytest.mark.usefixtures("run")
def test_a_run_is_taken_out_for_torch(here):
    done = call(here, "export", "a", "--format=torch_export")
    path, _ = done.stdout.splitlines()
    assert path == "logs/a/export/model.pt2"
    network, _ = read_torch_export(Path(path))
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = cait.load("a").model(images)
        torch.testing.assert_close(network(images), expected, rtol=0, atol=1e-4)


def unreadable(*_):
    raise UnreadableImageError("no image")


@pytest.mark.usefixtures("run", "here")
def test_eight_bits_take_images_as_they_are_scored(monkeypatch):
    loaded, _ = exporting.opened("a", Namespace(ema=None, trusted=False), Program())
    monkeypatch.setattr(Preprocessing, "train_transform", None)  # they are not augmented
    scored, calibrating = eight_bits.images_of(loaded)
    assert sum(len(labels) for _, labels in scored) == 360
    assert sum(len(labels) for _, labels in calibrating) == 128
    monkeypatch.setattr(dataset, "load_image", unreadable)
    scored, _ = eight_bits.images_of(loaded)
    assert all((labels == dataset.NO_LABEL).all() for _, labels in scored)
    monkeypatch.setattr(OneClass, "several", True)
    with pytest.raises(UserError, match="--int8"):
        eight_bits.images_of(loaded)
    monkeypatch.setattr(exporting, "NEEDS", {"onnx": []})
    with pytest.raises(UserError, match="--int8 takes the images of a run"):
        exporting.export_run(["alone.ckpt", "--format=onnx", "--int8"], Program())


@pytest.mark.parametrize(("fit", "mode"), [("crop", "center"), ("pad", "border")])
def test_timm_prepares_grey_images_as_the_run_did(fit, mode, tmp_path, photographs):
    data = cait.ImageNetDataModule(img_size=8, crop_pct=0.9, in_chans=1, fit=fit)
    write(data, tmp_path / "out")
    config = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))
    assert (config["input_size"], config["crop_mode"]) == ((1, 8, 8), mode)
    theirs = create_transform(**config)(photographs[0].convert("L"))
    pixels = data.eval_transform(load_image(photographs[0], reading=data.settings))
    ours = data.normalize_and_erase(pixels.permute(1, 2, 0)[None])
    torch.testing.assert_close(ours[0], theirs, rtol=0, atol=0)


def write(data, path):
    """Export for timm a network of as many channels as the data have."""
    fields = dict(in_chans=data.settings.in_chans)
    module = Namespace(hparams=dict(img_size=8, fields=fields), class_names=None)
    model = random_network(**TINY, **fields)
    run: Any = Namespace(data=data, module=module, task=OneClass(7), network=model)
    exporting.write(run, "timm", path)


def test_the_file_says_nothing_of_a_transform_of_ones_own(tmp_path, capfd):
    class Own(cait.ImageNetDataModule):
        make_eval_transform = None  # type: ignore[assignment]

    data = Own(img_size=8, in_chans=4)
    write(data, tmp_path / "out")
    assert "Own has a transform of its own" in capfd.readouterr().err
    config = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))
    assert config["input_size"] == (4, 8, 8)
    data.check_prepares({"preprocessing": None})


@needs_onnx
@pytest.mark.slow
def test_the_file_does_not_depend_on_the_memory_format(tmp_path):
    model = network.create_model("timm/test_efficientnet", 32, 7)
    for name, format in (("a", torch.channels_last), ("b", torch.contiguous_format)):
        export(model.to(memory_format=format), tmp_path / name, "onnx", input_shape=(3, 32, 32))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(("format", "group"), [("onnx", "export"), ("openvino", "openvino")])
def test_a_missing_package_is_named(format, group, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"pip install .*\[{group}\]"):
        exporting.export_run(["mine", "--format", format], Program())


@pytest.mark.parametrize(
    "format",
    [
        pytest.param("onnx", marks=needs_onnx),
        pytest.param("openvino", marks=[needs_openvino, pytest.mark.slow]),
    ],
)
def test_eight_bits_are_near_the_network(format, tmp_path):
    model = random_network(**TINY).eval()
    images = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    path = tmp_path / exporting.FILES[format]
    output = path.with_stem("small")
    export(model, path, format)
    quantize, reader = eight_bits.FORMATS[format]
    quantize(path, output, images)
    with torch.no_grad():
        expected = model(images[0])
    logits = reader(output)(images[0])
    assert not torch.equal(logits, expected)
    assert torch.stack((logits.flatten(), expected.flatten())).corrcoef()[0, 1] > 0.8


def write_another(path, output, images):
    export(random_network(**DIGITS), output, "onnx")


@needs_onnx
@needs_a_compiler
@pytest.mark.slow
def test_what_eight_bits_lose_is_measured_and_refused(here, capfd, monkeypatch):
    main(["fit", *SMALL, "--trainer.max_epochs=2", "--run_name=bits"])
    words = ["export", "bits", "--format=onnx", "--int8"]
    main(words)
    *_, file, line = capfd.readouterr().out.splitlines()
    assert file == "logs/bits/export/model-int8.onnx"
    assert re.fullmatch(
        r"[\d.]+ % of 360 validation images right in 8 bits, [\d.]+ % before; "
        r"images a second: int8 [\d,]+, onnx [\d,]+, compiled [\d,]+, eager [\d,]+",
        line,
    )
    Path(file).unlink()
    monkeypatch.setitem(eight_bits.FORMATS, "onnx", (write_another, eight_bits.read_onnx))
    with pytest.raises(SystemExit):
        main(words)
    assert "--yes" in capfd.readouterr().err
    assert not Path(file).exists()
    main([*words, "--yes"])
    assert Path(file).exists()
