"""Attention maps and Grad-CAM against closed forms, and the page. What is refused is in golden.yaml."""

import base64
import io
import os
import re
import shutil
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from harness import NO_TEXT, REPO, SMALL, call, ended, save_mixed
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch import nn

import cait as package
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
    seen: list[torch.Tensor] = []
    hook = attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(image[None])
    hook.remove()
    q, k, _ = attn.qkv(seen[0]).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
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


def test_the_four_channels_of_a_transform_of_ones_own_are_shown():
    shown = plots.pixels(torch.tensor([0.0, 2.0, -2.0, 9.0])[:, None, None], Preprocessing())
    assert shown.tolist() == [[[127, 255, 0]]]


def test_scores_are_scikit_learns_and_the_worst_come_first():
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 4)
    labels = torch.randint(0, 4, (50,))
    labels[7] = -1  # unreadable
    probabilities = logits.softmax(dim=1)
    scored = sections.score([*zip(probabilities.split(16), labels.split(16), strict=True)])
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    order = [int(place) for place in losses.argsort(descending=True) if place != 7]
    assert [image.place for image in scored] == order
    assert [image.loss for image in scored] == pytest.approx(losses[order].tolist(), abs=1e-5)
    (axes,) = sections.draw_confusion(scored, list("abcd")).axes
    expected = confusion_matrix(labels[order], logits[order].argmax(dim=1), normalize="true")
    assert np.allclose(axes.images[0].get_array(), expected)


def test_answers_that_are_not_finite_have_no_figures():
    batch = torch.full((4, 2), torch.nan), torch.arange(4) % 2
    loaded: Any = SimpleNamespace(
        task=SimpleNamespace(several=False),
        class_names=["a", "b"],
        validation=lambda: SimpleNamespace(samples=[]),
        judge=lambda samples: [batch],
    )
    ((_, text),) = sections._mistakes(loaded)
    assert "not finite" in text


def texts_of(html):
    """What stands between the tags of a page."""
    return [unescape(text) for text in re.split(r"<[^<>]*>", html)]


def check_page(path):
    """The text and the number of images of a page that a browser can show without a request."""
    html = Path(path).read_text()
    assert not re.search(r"https?:|url\(|@import|<script|<link|<iframe|<b>&", html)
    sources = re.findall(r'\bsrc="([^"]*)"', html)
    for source in sources:
        image = re.fullmatch(r"data:image/(?:png|jpeg);base64,(.*)", source)[1]
        Image.open(io.BytesIO(base64.b64decode(image, validate=True))).load()
    return "\n".join(texts_of(html)), len(sources)


def test_what_users_named_is_text(tmp_path):
    figure, _ = plots.grid(1, 1, 2, 2)
    tiles = page.tiles([(np.zeros((4, 4, 3), np.uint8), EVIL, EVIL)])
    content = page.paragraph(EVIL) + page.table([EVIL], [[EVIL]]) + tiles + page.embed(figure, EVIL)
    page.write(tmp_path / "page.html", EVIL, [(EVIL, EVIL)], [(EVIL, content)])
    html = (tmp_path / "page.html").read_text()
    assert texts_of(html).count(EVIL) == 10
    assert [unescape(alt) for alt in re.findall(r'\balt="([^"]*)"', html)] == [EVIL, EVIL]


FAST = ["--data.batch_size=12", "--data.img_size=32", "--data.num_workers=0"]
FAST += ["--trainer.max_steps=2", "--trainer.devices=1"]


@pytest.fixture
def photographed(tmp_path, photographs, monkeypatch):
    """A run of two classes of photographs, not square and of every mode; its folder is the current one's logs/a."""
    for seed, name in enumerate((EVIL, "owl")):
        save_mixed(photographs, tmp_path / "mixed/train" / name, 6, seed)
        save_mixed(photographs, tmp_path / "mixed/val" / name, 5, 10 + seed)
    monkeypatch.chdir(tmp_path)
    return ended(tmp_path, "a", [*SMALL, *FAST, "--data.root=mixed", "--ema.decay=0.9"])


@pytest.mark.usefixtures("photographed")
def test_a_run_is_visualized(tmp_path):
    done = call(tmp_path, "visualize", "a")
    first, second, result, last = done.stdout.splitlines()
    assert re.match(r"logs/a/visualize/b-cat-_-[\w-]+\.png  .*%.*; true class ", first)
    assert first.endswith(EVIL)
    assert re.match(r"logs/a/visualize/owl-[\w-]+\.png  .*%.*; true class owl$", second)
    accuracy = re.fullmatch(r"top-1 (\d+\.\d\d) % of 10 validation images", result)[1]
    assert last == "logs/a/visualize/index.html"
    text, images = check_page(last)
    wrong = 10 - round(float(accuracy) / 10)
    assert images == wrong + 1 + 2 + 1  # mistakes, confusion matrix, maps of the two, curves
    assert text.index("Worst mistakes") < text.index("Maps") < text.index("Curves")
    best = "logs/a/checkpoints/best.ckpt, moving average, step "
    # CaiT may have been deleted
    caption = "first class-attention block" if VARIANTS else "what all patches read"
    for words in (best, EVIL, "cait visualize a", result, caption):
        assert words in text
    for line in (first, second):
        assert Image.open(line.partition("  ")[0]).width > 500
    # the same weights give the same accuracy
    assert f"{accuracy} %" in call(tmp_path, "eval", "a").stdout


def test_images_weights_and_places_are_chosen(photographed, tmp_path):
    odd = os.fsdecode(b"mixed/val/owl/" + NO_TEXT + b".png")
    shutil.copy(next(Path("mixed/val/owl").iterdir()), odd)
    Path("mixed/val/owl/-.jpg").write_bytes(b"no image")
    images = ["--images", "mixed/val/owl", "mixed/train", odd, "--num_images=3"]
    done = call(tmp_path, "visualize", "a", "--raw", "--no_validation", *images)
    assert len(done.stdout.splitlines()) == 4
    assert "mixed/val/owl/-.jpg: not an image; it is left out" in done.stderr
    text, count = check_page("logs/a/visualize/index.html")
    assert (count, "Confusion" in text, "moving average" in text) == (3 + 1, False, False)

    shutil.rmtree("mixed/val")  # of a run that was fetched from another machine
    assert "mixed/val" in call(tmp_path, "visualize", "a").stderr
    shutil.copy("mixed/train/owl/0.jpg", "x.jpg")
    (photographed / "metrics.csv").unlink()
    twin = f"{shutil.copytree('mixed/train/owl', 'other/owl')}/0.jpg"
    images = ["--images", "x.jpg", "mixed/train/owl/0.jpg", twin]
    words = ["logs/a/checkpoints/last.ckpt", "--output=out/here", "--ema"]
    done = call(tmp_path, "visualize", *words, *images)
    *drawn, unscored, _ = done.stdout.splitlines()
    files = [line.partition("  ")[0] for line in drawn]
    assert files == [f"out/here/{name}.png" for name in ("x", "owl-0", "owl-0+2")]
    assert Path(files[1]).read_bytes() == Path(files[2]).read_bytes()
    assert unscored.startswith("the validation set is not scored: ")
    text, count = check_page("out/here/index.html")
    assert count == 3
    for words in ("last.ckpt, moving average, step ", ", 32 × 32 pixels", "metrics.csv is "):
        assert words in text


def test_published_weights_need_no_run(tmp_path, monkeypatch):
    """As the paper's pictures are made: the release's file, at the model's own resolution."""
    network = package.create_model("xxs24", 224, 1000, depth=1)
    monkeypatch.setattr("cait.model.network.create_model", lambda name, size, classes: network)
    weights = {f"module.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"model": weights}, tmp_path / "XXS24_224.pth")
    Image.new("RGB", (300, 200), "red").save(tmp_path / "photo.png")
    words = "--name xxs24 --weights XXS24_224.pth --images photo.png --output=out"
    done = call(tmp_path, "visualize", *words.split())
    assert done.stdout.splitlines()[-1] == "out/index.html"
    text, images = check_page(tmp_path / "out/index.html")
    assert "XXS24_224.pth" in text
    assert images == 1


TIMMS = ["--config", str(REPO / "configs/base.yaml"), "--data.root=data/digits", *FAST]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "caption"),
    [("timm/test_resnet", "Grad-CAM"), ("timm/test_vit", "what all patches read")],
)
def test_the_page_shows_where_another_network_looks(network, caption, place):
    name = network.replace("/", "-")
    ended(place, name, [*TIMMS, f"--model.name={network}"])
    done = call(place, "visualize", name, "--num_images=1", "--no_validation")
    text, images = check_page(place / done.stdout.splitlines()[-1])
    assert caption in text
    assert images == 2  # the digit and the curves
