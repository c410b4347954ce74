"""`cait features`: the file against the network's own forward pass, and its errors in one line."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from harness import CLASSES, SMALL, ended, save_classes, save_mixed
from networks import ConvHead
from PIL import Image
from timm.data import create_transform
from torch import nn

import cait
from cait.cli import main
from cait.data.reading import load_image
from cait.extras.features import inputs
from cait.model.weights import classifiers, load_weights

OWN = """
    --data.root=photos --data.crop_pct=0.8 --data.interpolation=bilinear --data.batch_size=4 --data.num_workers=0
    --trainer.max_steps=2 --ema.decay=0.5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, photographs):
    """A folder with photographs in several layouts, a run on them, and a file of timm's weights."""
    place = tmp_path_factory.mktemp("features")
    save_classes(photographs, place / "photos", 6, 2)
    save_mixed(photographs, place / "flat/more", 3, 20)
    (place / "flat/broken.jpg").write_bytes(b"no image")
    torch.manual_seed(0)
    torch.save(timm.create_model("test_vit", num_classes=7).state_dict(), place / "vit.pth")
    ended(place, "good", [*SMALL, *OWN.split()])
    return place


def features(output, *words):
    """What `cait features` writes."""
    main(["features", f"--output={output}", *words])
    with np.load(output) as file:  # without pickles, numpy's default
        return dict(file)


def assert_near(features, expected, tolerance=1e-3):
    np.testing.assert_allclose(features, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_the_file_has_what_the_head_of_a_run_sees(raw, here):
    saved = features(f"own{raw}.npz", "good", "--images=photos", *raw)
    assert saved.keys() == {"features", "names", "labels", "class_names"}
    assert (saved["features"].dtype, saved["labels"].dtype) == (np.float32, np.int64)
    assert saved["class_names"].tolist() == CLASSES
    assert saved["names"][0] == "train/cat/0.jpg"
    classes = [Path(name).parent.name for name in saved["names"]]
    assert classes == [CLASSES[label] for label in saved["labels"]]

    module = cait.load("logs/good", raw=bool(raw))
    batch = torch.stack([module.transform(Path("photos", name)) for name in saved["names"]])
    with torch.no_grad():
        assert_near(saved["features"], module.model.forward_features(batch)[:, 0], 1e-4)
        logits = module.model.head(torch.from_numpy(saved["features"]))
        torch.testing.assert_close(logits, module.model(batch), rtol=1e-4, atol=1e-5)


def test_a_run_sees_images_at_another_size(here):
    saved = features("larger.npz", "good", "--images=photos", "--img_size=32")
    trained = cait.load("logs/good").model
    larger = type(trained)(dataclasses.replace(trained.config, img_size=32)).eval()
    load_weights(larger, Path("logs/good/checkpoints/last.ckpt"), ema=True)
    of_timm = create_transform((3, 32, 32), crop_pct=0.8, interpolation="bilinear")
    batch = torch.stack([of_timm(load_image(Path("photos", name))) for name in saved["names"]])
    with torch.no_grad():
        assert_near(saved["features"], larger.forward_features(batch)[:, 0])


def test_weights_of_timm_see_images_as_timm_prepares_them(here, capsys):
    Path("photos/train/cat/notes.jfif").touch()
    weights = ["--name=timm/test_vit", "--weights=vit.pth"]
    saved = features("new/vit.npz", *weights, "--images=photos/train")
    assert "cat/notes.jfif" in capsys.readouterr().err
    assert saved["class_names"].tolist() == CLASSES

    network = timm.create_model("test_vit", num_classes=7).eval()
    network.load_state_dict(torch.load("vit.pth"))
    of_timm = create_transform(**timm.data.resolve_model_data_config(network), is_training=False)
    jpegs = [index for index, name in enumerate(saved["names"]) if name.endswith("0.jpg")]
    images = [Image.open(Path("photos/train", saved["names"][index])) for index in jpegs]
    batch = torch.stack([of_timm(image.convert("RGB")) for image in images])
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(batch), pre_logits=True)
    assert_near(saved["features"][jpegs], expected)


def test_a_folder_without_classes_has_labels_of_minus_one(here, capsys):
    saved = features("flat.npz", "good", "--images=flat")
    assert saved["labels"].tolist() == [-1] * 3
    assert saved["class_names"].tolist() == []
    assert saved["names"].tolist() == ["more/0.jpg", "more/1.jpeg", "more/2.png"]
    assert "left out, because it cannot be read: broken.jpg" in capsys.readouterr().err


@torch.no_grad()
def test_heads_of_other_kinds_have_features_too():
    pixels = torch.rand(2, 3, 8, 8)
    conv = ConvHead(8, 5)
    assert_near(inputs(conv, *classifiers(conv), pixels), conv.body(pixels).mean((2, 3)), 1e-5)
    headless = timm.create_model("test_resnet", num_classes=0).eval()
    assert_near(inputs(headless, *classifiers(headless), pixels), headless(pixels), 1e-5)
    assert classifiers(nn.Sequential(nn.Conv2d(3, 4, 1))) == []
