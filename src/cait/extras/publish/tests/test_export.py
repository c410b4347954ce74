"""A network taken out, read back by the library that it is for, and through the command line."""

import json
import re
import shutil
import stat
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch
from harness import SMALL, call, over_table, parsed, slow
from networks import DIGITS, TINY, needs_a_compiler, needs_cait, random_network
from timm.data import create_transform, resolve_model_data_config

import cait
from cait.cli import main
from cait.data import dataset
from cait.data.reading import UnreadableImageError, load_image
from cait.data.transforms import Preprocessing
from cait.errors import UserError
from cait.extras.publish import eight_bits, exporting, formats
from cait.extras.publish.exporting import export
from cait.model import network
from cait.run.program import Program
from cait.train.metrics import OneClass


def read_timm(path):
    network = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    config = resolve_model_data_config(network)
    metadata = {name: config[name] for name in ("mean", "std", "crop_pct", "interpolation")}
    metadata["class_names"] = network.pretrained_cfg["label_names"]
    metadata["img_size"] = config["input_size"][-1]
    return network, json.loads(json.dumps(metadata))


def read_torch_export(path):
    files = {"metadata.json": ""}
    network = torch.export.load(path, extra_files=files).module()
    return network, json.loads(files["metadata.json"])


def read_onnx(path):
    import onnxruntime

    texts = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    return formats.read_onnx(path), values_of(texts)


def read_openvino(path):
    import openvino

    texts = openvino.Core().read_model(path).get_rt_info("metadata").value
    return formats.read_openvino(path), values_of(texts)


def values_of(texts):
    return {
        key: text if key == "interpolation" else json.loads(text) for key, text in texts.items()
    }


READ = {
    "timm": read_timm,
    "torch_export": read_torch_export,
    "onnx": read_onnx,
    "openvino": read_openvino,
}


@needs_cait
@over_table(__file__, "exports", package="torch", config=None, pretrained_cfg=None)
def test_the_reading_library_gives_the_networks_logits(
    format, package, fields, prepared, files, config, pretrained_cfg, tmp_path
):
    pytest.importorskip(package)
    model = random_network(**fields)
    names = [f"class {index}" for index in range(model.config.num_classes)]
    path = tmp_path / "sub" / exporting.FILES[format]
    written, _ = export(model, path, format, prepared, class_names=names)
    assert model.training  # it is as it was
    assert written == [path.parent / file for file in files]
    # and nothing beside them
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == written
    assert len({stat.S_IMODE(file.stat().st_mode) for file in written}) == 1  # for the same readers
    if format == "timm":
        content = json.loads(written[0].read_text())
        pretrained = content["pretrained_cfg"]
        assert content.items() >= config.items()
        assert pretrained.items() >= pretrained_cfg.items()
        # the weights are not those that timm has
        assert pretrained.keys().isdisjoint({"tag", "license", "url", "hf_hub_id"})
    theirs, metadata = READ[format](path)
    assert metadata == prepared | {"class_names": names, "img_size": model.config.img_size}
    images = torch.randn(5, *model.input_shape)
    with torch.no_grad():
        logits = model.eval()(images)
        difference = (theirs(images) - logits).abs().max()
    assert difference <= 1e-4 * max(1, logits.abs().max())
    assert logits.std() > 1e-2


def test_an_export_that_fails_leaves_what_was_there(tmp_path):
    model = random_network(**TINY)
    path = tmp_path / "timm"
    path.mkdir()
    for name in ("config.json", "notes.md"):
        (path / name).write_text("theirs")
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(UserError, match="nan"):
        export(model, path, "timm")
    assert [*tmp_path.iterdir()] == [path]
    texts = {file.name: file.read_text() for file in path.iterdir()}
    assert texts == {"config.json": "theirs", "notes.md": "theirs"}

    files, _ = export(random_network(**TINY), path, "timm")
    assert {*path.iterdir()} == {*files, path / "notes.md"}
    assert (path / "config.json").read_text() != "theirs"


@pytest.fixture(scope="module")
def run(place, trained):
    """A run without its last checkpoint, and its best one alone."""
    shutil.copytree(trained, place / "logs/a")
    shutil.copy(place / "logs/a/checkpoints/best.ckpt", place / "alone.ckpt")
    (place / "logs/a/checkpoints/last.ckpt").unlink()


@pytest.mark.usefixtures("run")
@over_table(__file__, "runs")
def test_a_run_is_taken_out_raw_and_averaged(here, words, folder):
    *files, line = call(here, "export", *words.split()).stdout.splitlines()
    assert files == [f"{folder}/config.json", f"{folder}/model.safetensors"]
    difference = re.fullmatch(r"read back, the logits differ by (\S+) at most", line)[1]
    assert 0 <= float(difference) <= 1e-5
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert resolve_model_data_config(loaded)["input_size"] == (3, 16, 16)
    content = parsed(Path("alone.ckpt"))
    raw = content["state_dict"]["model.head.weight"]
    averaged = content["callbacks"]["EMA"]["head.weight"]
    assert torch.equal(loaded.head.weight, raw) == ("--raw" in words)
    assert torch.equal(loaded.head.weight, averaged) == ("--raw" not in words)


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


@pytest.mark.usefixtures("run", "here")
def test_eight_bits_need_a_run_of_one_class_per_image(monkeypatch):
    monkeypatch.setattr(exporting, "NEEDS", {"onnx": []})
    words = ["--format=onnx", "--int8"]
    with pytest.raises(UserError, match="--int8 takes the images of a run"):
        exporting.export_run(["alone.ckpt", *words], Program())
    monkeypatch.setattr(OneClass, "several", True)
    with pytest.raises(UserError, match="--int8 compares"):
        exporting.export_run(["a", *words], Program())


@over_table(__file__, "modes")
def test_timm_prepares_grey_images_as_the_run_did(fit, mode, tmp_path, photographs):
    data = cait.ImageNetDataModule(img_size=8, crop_pct=0.9, in_chans=1, fit=fit)
    export(random_network(**TINY, in_chans=1), tmp_path / "out", "timm", data.preprocessing)
    config = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))
    assert (config["input_size"], config["crop_mode"]) == ((1, 8, 8), mode)
    theirs = create_transform(**config)(photographs[0].convert("L"))
    pixels = data.eval_transform(load_image(photographs[0], reading=data.settings))
    ours = data.normalize_and_erase(pixels.permute(1, 2, 0)[None])
    torch.testing.assert_close(ours[0], theirs, rtol=0, atol=0)


class OwnTransform(cait.ImageNetDataModule):
    make_eval_transform = None  # type: ignore[assignment]


def test_the_file_says_nothing_of_a_transform_of_ones_own(tmp_path, capfd):
    data = OwnTransform(img_size=8, in_chans=4)
    fields = dict(in_chans=4)
    module = Namespace(hparams=dict(img_size=8, fields=fields), class_names=None)
    model = random_network(**TINY, **fields)
    loaded = Namespace(data=data, module=module, task=OneClass(7), network=model)
    exporting.write(loaded, "timm", tmp_path / "out")
    assert "OwnTransform has a transform of its own" in capfd.readouterr().err
    config = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))
    assert config["input_size"] == (4, 8, 8)
    data.check_prepares({"preprocessing": None})


@pytest.mark.slow
def test_the_file_does_not_depend_on_the_memory_format(tmp_path):
    pytest.importorskip("onnxruntime")
    model = network.create_model("timm/test_efficientnet", 32, 7)
    for name, format in (("a", torch.channels_last), ("b", torch.contiguous_format)):
        export(model.to(memory_format=format), tmp_path / name, "onnx", input_shape=(3, 32, 32))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@over_table(__file__, "groups")
def test_a_missing_package_is_named(format, group, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"pip install .*\[{group}\]"):
        exporting.export_run(["mine", "--format", format], Program())


@pytest.mark.parametrize("format", ["onnx", *slow("openvino")])
def test_eight_bits_are_near_the_network(format, tmp_path):
    pytest.importorskip("openvino" if format == "openvino" else "onnxruntime")
    model = random_network(**TINY).eval()
    images = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    path = tmp_path / exporting.FILES[format]
    output = path.with_stem("small")
    export(model, path, format)
    quantize, reader = eight_bits.FORMATS[format]
    quantize(path, output, images)
    with torch.no_grad():
        expected = model(images[0]).flatten()
    logits = reader(output)(images[0]).flatten()
    assert not torch.equal(logits, expected)
    assert torch.stack([logits, expected]).corrcoef()[0, 1] > 0.8


def write_another(path, output, images):
    export(random_network(**DIGITS), output, "onnx")


@needs_a_compiler
@pytest.mark.slow
def test_what_eight_bits_lose_is_measured_and_refused(here, capfd, monkeypatch):
    pytest.importorskip("onnxruntime")
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
