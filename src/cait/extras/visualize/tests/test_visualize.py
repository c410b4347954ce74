"""Attention maps and Grad-CAM against closed forms, and the page. What is refused is in golden.yaml."""

import base64
import io
import os
import re
import shutil
from html import escape, unescape
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from harness import NO_TEXT, SMALL, call, ended, over_table, save_mixed
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch import nn

from cait.data.datamodule import ImageNetDataModule
from cait.data.transforms import Preprocessing
from cait.extras import page, plots
from cait.extras.visualize import maps, sections
from cait.model.config import VARIANTS

EVIL = "<b>&\"cat'$_{$"
"""A class that is called like HTML, and like mathematics to matplotlib."""


@pytest.mark.parametrize(("pool", "queries"), [("token", slice(0, 1)), ("avg", slice(1, None))])
def test_attention_is_the_softmax_of_the_last_block(pool, queries):
    torch.manual_seed(0)
    sizes = dict(img_size=64, depth=2, num_classes=5, global_pool=pool)
    network = timm.create_model("deit_tiny_patch16_224", **sizes).eval()
    image = torch.randn(3, 64, 64)
    attn = network.blocks[-1].attn
    seen = []
    with attn.qkv.register_forward_hook(lambda *call: seen.append(call[2])):
        network(image[None])
    q, k, _ = seen[0].unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(dim=-1)
    assert maps.kind(network) == "attention"
    expected = weights[0, :, queries, 1:].mean(dim=1).unflatten(-1, (4, 4))
    torch.testing.assert_close(maps.look(network, image), [expected])
    assert all(block.attn.fused_attn for block in network.blocks)  # the network itself is as it was


def test_grad_cam_of_pooled_maps_is_cam():
    """With a linear head on the mean of the maps, Grad-CAM is their weighted sum (CAM, arXiv 1512.04150)."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU())
    head = nn.Linear(6, 4)
    network = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()
    network.requires_grad_(False)
    image = torch.randn(3, 17, 17)
    row = head.weight[network(image[None]).argmax()]
    expected = torch.einsum("k,bkst->bst", row, body(image[None])).relu()
    assert maps.kind(network) == "Grad-CAM"
    torch.testing.assert_close(maps.look(network, image), [expected / expected.sum()])


def test_the_heads_of_each_block_are_drawn_below_the_image_and_its_saliency():
    blocks = torch.rand(2, 4, 3, 3)
    pixels = np.zeros((32, 32, 3), np.uint8)
    figure = maps.draw([*blocks], pixels, "a cat")
    drawn = [image.get_array() for axes in figure.axes for image in axes.images]
    expected = [pixels, pixels, blocks[0].mean(dim=0), *blocks.flatten(0, 1)]
    for image, wanted in zip(drawn, expected, strict=True):
        assert np.array_equal(image, wanted)
    below, above = figure.axes[1].images
    assert below.get_extent() == above.get_extent()  # over the pixels that the network sees
    last = blocks[1, 3]
    title = f"block 1, head 3\n×{9 * last.min():.2f} … ×{9 * last.max():.2f}"
    assert figure.axes[-1].get_title() == title


@pytest.mark.parametrize("channels", [1, 3])
def test_the_pixels_that_the_network_sees_are_shown(channels):
    data = ImageNetDataModule(img_size=64, in_chans=channels)
    pixels = torch.randint(256, (64, 64, channels), dtype=torch.uint8)
    image = data.normalize_and_erase(pixels[None])[0]
    assert np.array_equal(plots.pixels(image, data.settings), pixels.expand(-1, -1, 3))


def test_the_four_channels_of_a_transform_of_ones_own_are_shown():
    shown = plots.pixels(torch.tensor([0.0, 2.0, -2.0, 9.0])[:, None, None], Preprocessing())
    assert shown.tolist() == [[[127, 255, 0]]]


def test_scores_are_scikit_learns_and_the_worst_come_first():
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 4)
    labels = torch.randint(0, 4, (50,))
    labels[7] = -1  # unreadable
    batches = zip(logits.softmax(dim=1).split(16), labels.split(16), strict=True)
    scored = sections.score(batches)
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    order = losses.argsort(descending=True)[:-1]  # that of the unreadable one is 0
    assert [image.place for image in scored] == order.tolist()
    assert [image.loss for image in scored] == pytest.approx(losses[order].tolist(), abs=1e-5)
    (axes,) = sections.draw_confusion(scored, list("abcd")).axes
    expected = confusion_matrix(labels[order], logits[order].argmax(dim=1), normalize="true")
    assert np.allclose(axes.images[0].get_array(), expected)


def test_answers_that_are_not_finite_have_no_figures():
    answers = torch.full((4, 2), torch.nan)
    loaded = Mock(judge=lambda samples: [(answers, torch.arange(4) % 2)])
    loaded.task.several = False
    ((_, text),) = sections._mistakes(loaded)
    assert "not finite" in text


def check_page(path):
    """The text and the number of images of a page that a browser can show without a request."""
    html = Path(path).read_text()
    assert not re.search(r"https?:|url\(|@import|<script|<link|<iframe", html)
    assert EVIL not in html
    sources = re.findall(r'\bsrc="([^"]*)"', html)
    for source in sources:
        image = re.fullmatch(r"data:image/(?:png|jpeg);base64,(.*)", source)[1]
        Image.open(io.BytesIO(base64.b64decode(image, validate=True))).load()
    return unescape(re.sub(r"<[^<>]*>", "\n", html)), len(sources)


def test_what_users_named_is_text(tmp_path):
    figure, _ = plots.grid(1, 1, 2, 2)
    tiles = page.tiles([(np.zeros((4, 4, 3), np.uint8), EVIL, EVIL)])
    content = page.paragraph(EVIL) + page.table([EVIL], [[EVIL]]) + tiles + page.embed(figure, EVIL)
    page.write(tmp_path / "page.html", EVIL, [(EVIL, EVIL)], [(EVIL, content)])
    text, images = check_page(tmp_path / "page.html")
    assert text.count(EVIL) == 10
    assert images == 2
    assert (tmp_path / "page.html").read_text().count(f'alt="{escape(EVIL)}"') == 2


FAST = """
    --data.root=mixed --data.batch_size=12 --data.img_size=32 --data.num_workers=0 --ema.decay=0.9
    --trainer.max_steps=2 --trainer.devices=1
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, photographs):
    """A folder with two classes of photographs, not square and of every mode, and logs/a, a run on them."""
    place = tmp_path_factory.mktemp("run")
    for seed, name in enumerate((EVIL, "owl")):
        save_mixed(photographs, place / "mixed/train" / name, 6, seed)
        save_mixed(photographs, place / "mixed/val" / name, 5, 10 + seed)
    ended(place, "a", [*SMALL, *FAST.split()])
    return place


@pytest.fixture
def photographed(run, tmp_path, monkeypatch):
    """The same in the working folder."""
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("photographed")
def test_a_run_is_visualized(tmp_path):
    first, _, result, last = call(tmp_path, "visualize", "a").stdout.splitlines()
    assert re.match(r"logs/a/visualize/b-cat-_-[\w-]+\.png  .*%.*; true class ", first)
    assert first.endswith(EVIL)
    accuracy = re.fullmatch(r"top-1 (\d+\.\d\d) % of 10 validation images", result)[1]
    assert last == "logs/a/visualize/index.html"
    text, images = check_page(last)
    wrong = 10 - round(float(accuracy) / 10)
    assert images == wrong + 1 + 2 + 1  # mistakes, confusion matrix, maps of the two, curves
    assert text.index("Worst mistakes") < text.index("Maps") < text.index("Curves")
    # CaiT may have been deleted
    caption = "first class-attention block" if VARIANTS else "what all patches read"
    best = "logs/a/checkpoints/best.ckpt, moving average, step "
    for words in (best, EVIL, "cait visualize a", result, caption):
        assert words in text
    # the same weights give the same accuracy
    assert f"{accuracy} %" in call(tmp_path, "eval", "a").stdout


@pytest.mark.usefixtures("photographed")
def test_images_and_weights_are_chosen(tmp_path):
    odd = os.fsdecode(b"mixed/val/owl/" + NO_TEXT + b".png")
    shutil.copy("mixed/val/owl/0.jpg", odd)
    Path("mixed/val/owl/-.jpg").write_bytes(b"no image")
    images = ["--images", "mixed/val/owl", "mixed/train", odd, "--num_images=3"]
    done = call(tmp_path, "visualize", "a", "--raw", "--no_validation", *images)
    assert "mixed/val/owl/-.jpg: not an image; it is left out" in done.stderr
    text, count = check_page("logs/a/visualize/index.html")
    assert count == 3 + 1
    assert "Confusion" not in text
    assert "moving average" not in text


@pytest.mark.usefixtures("photographed")
def test_a_run_that_was_fetched_from_another_machine_is_shown(tmp_path):
    shutil.rmtree("mixed/val")
    assert "mixed/val" in call(tmp_path, "visualize", "a").stderr
    Path("logs/a/metrics.csv").unlink()
    shutil.copytree("mixed/train/owl", "other/owl")
    images = ["--images", "mixed/train/owl/0.jpg", "other/owl/0.jpg"]
    words = ["logs/a/checkpoints/last.ckpt", "--output=out/here", "--ema"]
    done = call(tmp_path, "visualize", *words, *images)
    first, second, unscored, _ = done.stdout.splitlines()
    assert first.startswith("out/here/owl-0.png ")
    assert second.startswith("out/here/owl-0+2.png ")
    assert unscored.startswith("the validation set is not scored: ")
    text, count = check_page("out/here/index.html")
    assert count == 2
    for words in ("last.ckpt, moving average, step ", ", 32 × 32 pixels", "metrics.csv is "):
        assert words in text


@over_table(__file__, "networks")
def test_weights_of_another_network_need_no_run(name, caption, tmp_path):
    torch.save(timm.create_model(name.removeprefix("timm/")).state_dict(), tmp_path / "w.pth")
    Image.new("RGB", (300, 200), "red").save(tmp_path / "photo.png")
    words = ["--weights=w.pth", "--images=photo.png", "--output=out"]
    done = call(tmp_path, "visualize", f"--name={name}", *words)
    assert done.stdout.splitlines()[-1] == "out/index.html"
    text, images = check_page(tmp_path / "out/index.html")
    assert "w.pth" in text
    assert caption in text
    assert images == 1
