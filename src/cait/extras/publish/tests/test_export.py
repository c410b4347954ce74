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
from harness import SMALL, slow
from networks import DIGITS, TINY, needs_a_compiler, needs_ablations, needs_cait, random_network
from PIL import Image
from safetensors.torch import load_file
from timm.data import CustomDatasetInfo, create_transform, resolve_model_data_config

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

UNLIKE_TIMM = dict(TINY, norm="batchnorm", class_token_at=0, attention="cosine")
PREPARED = dict(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7], crop_pct=0.9, interpolation="bilinear")
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="OpenVINO is a package of its own"
)
needs_onnx = pytest.mark.skipif(
    find_spec("onnxruntime") is None, reason="ONNX needs packages of its own"
)


def read(path: Path, format: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What was written, as a function, through the library that it is for."""
    if format == "timm":
        return timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    if format == "torch_export":
        return torch.export.load(path).module()
    if format == "openvino":
        import openvino

        network = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda images: torch.from_numpy(network({"images": images.numpy()})["logits"])
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def told(path: Path, format: str) -> dict[str, Any]:
    """What travels with the weights, through the library that they are for."""
    if format == "timm":
        cfg = timm.create_model(f"local-dir:{path}").pretrained_cfg
        assert CustomDatasetInfo(cfg["label_names"]).index_to_label_name(1) == "class 1"
        data = resolve_model_data_config(timm.create_model(f"local-dir:{path}"))
        prepared = {
            key: list(data[key]) if key in ("mean", "std") else data[key] for key in PREPARED
        }
        return {"class_names": cfg["label_names"], "img_size": data["input_size"][-1], **prepared}
    if format == "torch_export":
        files = {"metadata.json": ""}
        torch.export.load(path, extra_files=files)
        return json.loads(files["metadata.json"])
    if format == "openvino":
        import openvino

        info = openvino.Core().read_model(path).get_rt_info("metadata").value
        return {
            key: value if key == "interpolation" else json.loads(value)
            for key, value in info.items()
        }
    import onnxruntime

    props = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    return {
        key: value if key == "interpolation" else json.loads(value) for key, value in props.items()
    }


@needs_cait
@pytest.mark.parametrize(
    ("format", "fields"),
    [
        ("timm", DIGITS),
        pytest.param("torch_export", UNLIKE_TIMM, marks=[needs_ablations, pytest.mark.slow]),
        pytest.param("onnx", UNLIKE_TIMM, marks=[needs_onnx, needs_ablations]),
        pytest.param("openvino", DIGITS, marks=[needs_openvino, pytest.mark.slow]),
        pytest.param(
            "openvino", UNLIKE_TIMM, marks=[needs_openvino, needs_ablations, pytest.mark.slow]
        ),
        *slow(("timm", {}), ("torch_export", {})),
        pytest.param("onnx", {}, marks=[needs_onnx, pytest.mark.slow]),
    ],
)
def test_the_reading_library_gives_the_networks_logits(
    format: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = random_network(**fields)
    path = tmp_path / "sub" / exporting.FILES[format]
    names = [f"class {index}" for index in range(model.config.num_classes)]
    files, _ = export(model, path, format, PREPARED, class_names=names)
    assert told(path, format) == {
        "class_names": names,
        "img_size": model.config.img_size,
        **PREPARED,
    }
    assert model.training
    expected = {
        "timm": ["timm/config.json", "timm/model.safetensors"],
        "openvino": ["model.bin", "model.xml"],
    }
    assert files == [path.parent / file for file in expected.get(format, [path.name])]
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == files  # and nothing beside them
    theirs = read(path, format)
    model.eval()
    for batch in (1, 5):
        images = torch.randn(batch, 3, *[model.config.img_size] * 2)
        with torch.no_grad():
            expected, found = model(images), theirs(images)
        assert found.shape == expected.shape
        bound = 1e-5 if format == "timm" else 1e-4
        assert (found - expected).abs().max() <= bound * max(1, expected.abs().max())
    assert expected.std() > 1e-2


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    model, path = random_network(**TINY), tmp_path / "timm"
    path.mkdir()
    for name in ("config.json", "model.safetensors", "notes.md"):
        (path / name).write_text("theirs")
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(UserError, match=r"net\.onnx: OpenVINO reads files that end with \.xml"):
        export(model, tmp_path / "net.onnx", "openvino", {}, (3, 8, 8))
    with pytest.raises(UserError, match="a logit differs by nan"):
        export(model, path, "timm", {}, (3, 8, 8))
    assert [*tmp_path.iterdir()] == [path]
    assert [file.read_text() for file in path.iterdir()] == ["theirs"] * 3

    export(random_network(**TINY), path, "timm", {}, (3, 8, 8))
    assert [file.name for file in path.iterdir() if file.read_bytes() == b"theirs"] == ["notes.md"]
    assert len([*path.iterdir()]) == 3


def test_a_run_is_taken_out_raw_and_averaged(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = ["--data.mean=[0.5,0.5,0.4]", "--data.std=[0.3,0.2,0.2]", "--data.crop_pct=0.9"]
    # 22 steps an epoch: the best checkpoint is of the first, the last of 25 steps.
    run = [
        "--trainer.max_steps=25",
        "--ema.decay=0.9",
        "--run_name=a",
        "--model.drop_path_rate=0.2",
    ]
    main(["fit", *SMALL, *pictures, *run, "--data.interpolation=bilinear"])
    best = torch.load("logs/a/checkpoints/best.ckpt", weights_only=True)
    raw = {
        key.removeprefix("model."): value
        for key, value in best["state_dict"].items()
        if key.startswith("model.")
    }
    averaged = best["callbacks"]["EMA"]
    assert best["global_step"] == 22

    capfd.readouterr()
    main(["export", "a"])
    *files, line = capfd.readouterr().out.splitlines()
    assert files == ["logs/a/export/timm/config.json", "logs/a/export/timm/model.safetensors"]
    assert line.startswith("read back, the logits differ by ")
    assert 0 <= float(line.split()[6]) <= 1e-5

    # which says itself how images are prepared
    shutil.copy("logs/a/checkpoints/best.ckpt", "alone.ckpt")
    for arguments, file in [
        (["a", "--raw"], "logs/a/export/raw/timm/model.safetensors"),
        (["a", "--ema"], "logs/a/export/ema/timm/model.safetensors"),
        (["a", "--format=torch_export", "--output", "out/x.pt2"], "out/x.pt2"),
        (["alone.ckpt"], "export/timm/model.safetensors"),
    ]:
        main(["export", *arguments])
        out, err = capfd.readouterr()
        assert out.splitlines()[-2] == file
        assert err == ""
    plain, alone, ema, of_raw = (
        timm.create_model(f"local-dir:{path}/timm", pretrained=True)
        for path in ("logs/a/export", "export", "logs/a/export/ema", "logs/a/export/raw")
    )
    for model, expected in ((plain, averaged), (alone, averaged), (ema, averaged), (of_raw, raw)):
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert not torch.equal(raw["head.weight"], averaged["head.weight"])
    data = resolve_model_data_config(plain)
    assert [*data["mean"], *data["std"]] == [0.5, 0.5, 0.4, 0.3, 0.2, 0.2]
    assert (data["crop_pct"], data["interpolation"], data["input_size"]) == (
        0.9,
        "bilinear",
        (3, 16, 16),
    )
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = plain.eval()(images)
        assert (read(Path("out/x.pt2"), "torch_export")(images) - expected).abs().max() <= 1e-4

    loaded, _ = exporting.opened("a", Namespace(ema=None, trusted=False), Program())
    # images that calibrate are not augmented
    monkeypatch.setattr(Preprocessing, "train_transform", None)
    assert [sum(len(labels) for _, labels in part) for part in eight_bits.images_of(loaded)] == [
        360,
        128,
    ]
    with monkeypatch.context() as patch:
        patch.setattr(
            dataset,
            "load_image",
            lambda *_: (_ for _ in ()).throw(UnreadableImageError("no image")),
        )
        assert all(
            (labels == dataset.NO_LABEL).all() for _, labels in eight_bits.images_of(loaded)[0]
        )
    monkeypatch.setattr(exporting, "NEEDS", {"onnx": []})
    for run, several, why in (
        ("alone.ckpt", False, "takes the images of a run"),
        ("a", True, "one class per image"),
    ):
        monkeypatch.setattr(OneClass, "several", several)
        with pytest.raises(SystemExit):
            main(["export", run, "--format=onnx", "--int8"])
        assert why in capfd.readouterr().err
    assert not [*here.rglob("*.onnx")]  # it is refused before anything is written


@needs_cait
@pytest.mark.parametrize(
    ("name", "fields", "entry", "differing"),
    [
        *slow(
            ("xs36", dict(img_size=64), "cait_xs24_384", dict(depth=36)),
            ("xxs36", dict(img_size=64), "cait_xxs36_224", {}),
            ("s48", dict(img_size=32, num_classes=5), "cait_s24_224", dict(depth=48)),
        ),
        ("xxs24", DIGITS, "cait_xxs24_224", dict(embed_dim=96, depth=6, num_heads=2, patch_size=4)),
        (
            "xxs24",
            dict(TINY, qkv_bias=False, mlp_ratio=2.5, depth_token_only=3, in_chans=1),
            "cait_xxs24_224",
            dict(
                embed_dim=16, depth=1, num_heads=2, patch_size=4, qkv_bias=False, depth_token_only=3
            )
            | dict(mlp_ratio=2.5, mlp_ratio_token_only=2.5),
        ),
    ],
)
def test_timm_builds_every_variant_from_its_config(
    name: str, fields: dict, entry: str, differing: dict, tmp_path: Path
) -> None:
    model = random_network(name, **fields)
    export(model, tmp_path / "out", "timm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    size, channels = model.config.img_size, model.config.in_chans
    always = dict(
        img_size=[size, size],
        in_chans=channels,
        num_classes=model.config.num_classes,
        global_pool="token",
    )
    assert config["architecture"] == entry
    assert config["model_args"] == always | differing
    told = config["pretrained_cfg"]
    assert told["input_size"] == [channels, size, size]
    assert (told["fixed_input_size"], told["first_conv"], told["classifier"]) == (
        True,
        "patch_embed.proj",
        "head",
    )
    # the weights are not those that timm has
    assert told.keys().isdisjoint({"tag", "license", "url", "hf_hub_id"})
    with torch.device("meta"):
        theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    theirs.load_state_dict(
        load_file(tmp_path / "out" / "model.safetensors"), strict=True, assign=True
    )
    images = torch.randn(2, channels, size, size)
    with torch.no_grad():
        expected = model.eval()(images)
        assert (theirs(images) - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
    assert expected.shape == (2, config["num_classes"])


def test_padding_travels_and_the_files_are_for_the_same_readers(tmp_path: Path) -> None:
    export(random_network(**TINY), tmp_path / "out", "timm", dict(fit="pad"), (3, 8, 8))
    assert (
        resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))["crop_mode"]
        == "border"
    )
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


def test_timm_prepares_grey_images_as_the_run_did(
    tmp_path: Path, photographs: list[Image.Image]
) -> None:
    data = cait.ImageNetDataModule(img_size=8, crop_pct=0.9, in_chans=1)
    export(
        random_network(**TINY, in_chans=1), tmp_path / "out", "timm", data.preprocessing, (1, 8, 8)
    )
    told = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))
    assert told["input_size"] == (1, 8, 8)
    theirs = create_transform(**told)(photographs[0].convert("L"))
    ours = data.eval_transform(load_image(photographs[0], reading=data.settings))
    assert torch.equal(data.normalize_and_erase(ours.permute(1, 2, 0)[None])[0], theirs)


def test_the_file_says_nothing_of_a_transform_of_ones_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Own(cait.ImageNetDataModule):
        make_eval_transform = None  # type: ignore[assignment]

    data, network = Own(img_size=8, in_chans=4), random_network(**TINY, in_chans=4)
    module = Namespace(hparams=dict(img_size=8, fields=dict(in_chans=4)), class_names=None)
    loaded: Any = Namespace(data=data, module=module, task=OneClass(5), network=network)
    exporting.write(loaded, "timm", tmp_path / "out")
    assert (
        "the file does not say how images are prepared: Own has a transform of its own"
        in capfd.readouterr().err
    )
    assert resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))[
        "input_size"
    ] == (4, 8, 8)
    state = {"preprocessing": None, "depends_on": {"class of the data module": "Own"}}
    data.check_prepares(state)
    with pytest.raises(
        UserError, match="prepares images by its own Own: take the script that has it"
    ):
        cait.ImageNetDataModule().check_prepares(state)


PARTS, LOGITS = (
    "this network has other parts than timm's CaiT",
    "read back from timm, a logit differs by",
)


@needs_ablations
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(residual="rezero"), PARTS),
        (dict(norm="batchnorm"), PARTS),
        (dict(class_token_at=0), PARTS),
        (dict(global_pool="avg", depth_token_only=0), PARTS),
        (dict(cls_in_keys=False), LOGITS),
        (dict(act="leaky_relu"), LOGITS),
    ],
    ids=str,
)
def test_what_timm_cannot_be_is_refused(fields: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{words}.*timm takes CaiT as published"):
        export(random_network(**TINY, **fields), tmp_path / "out", "timm")
    assert not list(tmp_path.iterdir())


@needs_onnx
@pytest.mark.slow
def test_the_file_does_not_depend_on_the_memory_format(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network.create_model("timm/test_efficientnet", 32, 7)
    usual = network.create_model("timm/test_efficientnet", 32, 7).to(
        memory_format=torch.contiguous_format
    )
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


@needs_onnx
def test_a_network_may_have_further_outputs(tmp_path: Path) -> None:
    export(Twice(random_network(**TINY)), tmp_path / "x.onnx", "onnx", input_shape=(3, 8, 8))
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "x.onnx")
    images = torch.randn(2, 3, 8, 8).numpy()
    logits, doubled = session.run(["logits", "doubled"], {"images": images})
    assert (doubled == 2 * logits).all()


@pytest.mark.parametrize(("format", "group"), [("onnx", "export"), ("openvino", "openvino")])
def test_a_missing_package_is_named(
    format: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    hint = rf"\.venv/bin/pip install --editable '\.\[{group}\]'"
    with pytest.raises(UserError, match=f"{format} needs more packages: {hint}"):
        exporting.export_run(["mine", "--format", format], Program())


def test_eight_bits_are_for_two_formats() -> None:
    with pytest.raises(UserError, match="--int8 is for --format onnx and openvino"):
        exporting.export_run(["mine", "--int8"], Program())


@pytest.mark.parametrize(
    "format",
    [
        pytest.param("onnx", marks=needs_onnx),
        pytest.param("openvino", marks=[needs_openvino, pytest.mark.slow]),
    ],
)
def test_eight_bits_are_near_the_network(format: str, tmp_path: Path) -> None:
    model = random_network(**TINY).eval()
    images = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    path, output = (
        tmp_path / exporting.FILES[format],
        tmp_path / f"small{Path(exporting.FILES[format]).suffix}",
    )
    export(model, path, format, input_shape=(3, 8, 8))
    quantize, reader = eight_bits.FORMATS[format]
    quantize(path, output, images)
    with torch.no_grad():
        expected, found = model(images[0]), reader(output)(images[0])
    assert not torch.equal(found, expected)
    assert torch.stack((found.flatten(), expected.flatten())).corrcoef()[0, 1] > 0.8


@needs_onnx
@needs_a_compiler
@pytest.mark.slow
def test_what_eight_bits_lose_is_measured_and_refused(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["fit", *SMALL, "--trainer.max_epochs=2", "--run_name=bits"])
    main(["export", "bits", "--format=onnx", "--int8"])
    *_, file, line = capfd.readouterr().out.splitlines()
    assert file == "logs/bits/export/model-int8.onnx"
    assert re.fullmatch(
        r"[\d.]+ % of 360 validation images right in 8 bits, [\d.]+ % before; "
        r"images a second: int8 [\d,]+, onnx [\d,]+, compiled [\d,]+, eager [\d,]+",
        line,
    )
    Path(file).unlink()

    def other(path: Path, output: Path, images: Any) -> None:
        export(random_network(**DIGITS), output, "onnx", input_shape=(3, 16, 16))

    monkeypatch.setitem(eight_bits.FORMATS, "onnx", (other, eight_bits.read_onnx))
    with pytest.raises(SystemExit):
        main(["export", "bits", "--format=onnx", "--int8"])
    assert "validation images right in 8 bits" in capfd.readouterr().err
    assert not Path(file).exists()
    main(["export", "bits", "--format=onnx", "--int8", "--yes"])
    assert Path(file).exists()
