"""`cait features`: the file against the network's own forward pass, and its errors in one line."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from harness import CLASSES, SMALL, save_classes, save_mixed
from networks import ConvHead
from PIL import Image
from timm.data import create_transform
from torch import nn

import cait
from cait.cli import main
from cait.data.reading import load_image
from cait.extras.features import inputs
from cait.model.weights import classifiers

VIT = "timm/test_vit"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """A folder with photographs in several layouts, the run `own` on them, and a file of timm's weights."""
    place = tmp_path_factory.mktemp("features")
    save_classes(photographs, place / "photos", 6, 2)
    save_mixed(photographs, place / "flat/more", 3, 20)
    (place / "flat/broken.jpg").write_bytes(b"no image")
    (place / "empty").mkdir()
    torch.manual_seed(0)
    torch.save(timm.create_model("test_vit", num_classes=7).state_dict(), place / "vit.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        how = [
            "--data.crop_pct=0.8",
            "--data.interpolation=bilinear",
            "--data.batch_size=4",
            "--data.num_workers=0",
        ]
        main(
            [
                "fit",
                *SMALL,
                "--data.root=photos",
                "--run_name=own",
                *how,
                "--trainer.max_steps=2",
                "--ema.decay=0.5",
            ]
        )
    return place


def arrays(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as file:  # without pickles, numpy's default
        return dict(file)


@pytest.mark.parametrize("raw", [False, True])
def test_the_file_has_what_the_head_of_a_run_sees(
    raw: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"own-{raw}.npz"
    main(["features", "own", "--images", "photos", "--output", output, *["--raw"] * raw])
    found = arrays(output)
    assert found.keys() == {"features", "names", "labels", "class_names"}
    assert (found["features"].dtype, found["labels"].dtype) == (np.float32, np.int64)
    assert found["class_names"].tolist() == CLASSES
    assert found["names"].tolist()[:6] == sorted(
        f"train/cat/{path.name}" for path in Path("photos/train/cat").iterdir()
    )
    folders = [Path(name).parent.name for name in found["names"]]
    assert found["labels"].tolist() == [CLASSES.index(folder) for folder in folders]
    module = cait.load("logs/own", raw=raw)
    batch = torch.stack([module.transform(Path("photos", name)) for name in found["names"]])
    with torch.no_grad():
        expected = module.model.forward_features(batch)[:, 0]
        logits = module.model.head(torch.from_numpy(found["features"]))
        torch.testing.assert_close(logits, module.model(batch), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["features"], expected, rtol=1e-4, atol=1e-5)
    assert "24 × 32 features of xxs24" in capsys.readouterr().out


def test_a_run_sees_images_at_another_size_with_positions_as_timm_resizes_them(here: Path) -> None:
    size = 32
    main(["features", "own", "--images=photos", "--output=larger.npz", f"--img_size={size}"])
    saved = arrays("larger.npz")
    trained = cait.load("logs/own").model
    assert trained.config.img_size == 16
    larger = type(trained)(dataclasses.replace(trained.config, img_size=size)).eval()
    grid = [size // larger.config.patch_size] * 2
    positions = timm.layers.resample_abs_pos_embed(trained.pos_embed, grid, num_prefix_tokens=0)
    larger.load_state_dict(trained.state_dict() | {"pos_embed": positions})
    timms = create_transform((3, size, size), crop_pct=0.8, interpolation="bilinear")
    batch = torch.stack([timms(load_image(Path("photos", name))) for name in saved["names"]])
    with torch.no_grad():
        expected = larger.forward_features(batch)[:, 0]
    np.testing.assert_allclose(saved["features"], expected, rtol=1e-3, atol=1e-4)


def test_weights_of_timm_see_images_as_timm_prepares_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("photos/train/cat/notes.jfif").touch()
    main(
        [
            "features",
            "--name",
            VIT,
            "--weights",
            "vit.pth",
            "--images",
            "photos/train",
            "--output",
            "new/vit.npz",
        ]
    )
    assert "cat/notes.jfif" in capsys.readouterr().err
    found = arrays("new/vit.npz")
    network = timm.create_model("test_vit", num_classes=7).eval()
    network.load_state_dict(torch.load("vit.pth"))
    timms = create_transform(**timm.data.resolve_model_data_config(network), is_training=False)
    rows = [index for index, name in enumerate(found["names"]) if name.endswith((".png", ".JPEG"))]
    opaque = [
        index
        for index in rows
        if Image.open(Path("photos/train", found["names"][index])).mode == "RGB"
    ]
    assert len(opaque) == 3
    batch = torch.stack(
        [timms(Image.open(Path("photos/train", found["names"][index]))) for index in opaque]
    )
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(batch), pre_logits=True)
    np.testing.assert_allclose(found["features"][opaque], expected, rtol=1e-3, atol=1e-4)
    assert found["class_names"].tolist() == CLASSES
    assert found["names"][0] == "cat/0.jpg"


def test_a_folder_without_classes_has_labels_of_minus_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["features", "own", "--images", "flat", "--output", "flat.npz"])
    found = arrays("flat.npz")
    assert found["labels"].tolist() == [-1] * 3
    assert found["class_names"].tolist() == []
    assert found["names"].tolist() == ["more/0.jpg", "more/1.jpeg", "more/2.png"]
    assert "left out, because it cannot be read: broken.jpg" in capsys.readouterr().err


def test_heads_of_other_kinds_have_features_too() -> None:
    pixels, conv = torch.rand(2, 3, 8, 8), ConvHead(8, 5)
    with torch.no_grad():
        expected = conv.body(pixels).mean((2, 3))
    np.testing.assert_allclose(inputs(conv, *classifiers(conv), pixels), expected, atol=1e-6)
    headless = timm.create_model("test_resnet", num_classes=0).eval()
    with torch.no_grad():
        expected = headless(pixels)
    np.testing.assert_allclose(
        inputs(headless, *classifiers(headless), pixels), expected, atol=1e-6
    )
    assert classifiers(nn.Sequential(nn.Conv2d(3, 4, 1))) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own", "--images=missing", "--output=a.npz"], "the folder missing does not exist"),
        (["own", "--images=flat", "--output=vit.npz"], "vit.npz exists"),
        (["nobody", "--images=flat", "--output=a.npz"], "nobody"),
        (
            ["own", "--weights=vit.pth", "--images=flat", "--output=a.npz"],
            "--weights FILE needs the name",
        ),
        (
            ["--name=timm/resnet18", "--weights=vit.pth", "--images=flat", "--output=a.npz"],
            "is of another network",
        ),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("vit.npz").touch()
    with pytest.raises(SystemExit) as stop:
        main(["features", *arguments])
    told = capfd.readouterr().err.splitlines()
    assert (stop.value.code, len(told)) == (2, 1)
    assert message in told[0]
    assert not list(Path().glob("*a.npz*"))
