"""Attention maps against timm's, where they land on the image, the page, and what is refused."""

import base64
import io
import os
import re
import shutil
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from harness import NO_TEXT, REPO, SMALL, call, ended, save_mixed, slow
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch import nn

import cait as package
from cait.cli import main
from cait.data.transforms import Preprocessing
from cait.errors import UserError
from cait.extras import page, plots
from cait.extras.visualize import maps, sections
from cait.model.config import VARIANTS

EVIL = "<b>&\"cat'$_{$"
"""A class that is called like HTML, and like mathematics to matplotlib."""


@pytest.mark.parametrize(("pool", "reads"), [("token", slice(0, 1)), ("avg", slice(1, None))])
def test_attention_is_the_softmax_of_the_last_block(pool: str, reads: slice) -> None:
    torch.manual_seed(0)
    network = timm.create_model(
        "deit_tiny_patch16_224", img_size=64, depth=2, num_classes=5, global_pool=pool
    ).eval()
    image = torch.randn(3, 64, 64)
    seen: list[torch.Tensor] = []
    hook = network.blocks[-1].attn.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    network(image[None])
    hook.remove()
    q, k, _ = network.blocks[-1].attn.qkv(seen[0]).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(dim=-1)
    assert maps.kind(network) == "attention"
    (found,) = maps.look(network, image)
    torch.testing.assert_close(found, weights[0, :, reads, 1:].mean(dim=1).unflatten(-1, (4, 4)))
    assert all(block.attn.fused_attn for block in network.blocks)  # the network itself is as it was


def test_grad_cam_of_pooled_maps_is_cam() -> None:
    """With a linear head on the mean of the maps, Grad-CAM is their weighted sum (CAM, arXiv 1512.04150)."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU())
    network = (
        nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
        .eval()
        .requires_grad_(False)
    )
    image = torch.randn(3, 17, 17)
    made = body(image[None])
    row = network[-1].weight[network(image[None]).argmax()]
    expected = torch.einsum("k,bkst->bst", row, made).relu()
    assert maps.kind(network) == "Grad-CAM"
    (found,) = maps.look(network, image)
    torch.testing.assert_close(found, expected / expected.sum())


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "mixer_s32_224"])
def test_networks_without_such_maps_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="no maps"):
        maps.look(timm.create_model(name).eval(), torch.randn(3, 224, 224))


def test_the_four_channels_of_a_transform_of_ones_own_are_shown() -> None:
    shown = plots.pixels(torch.tensor([0.0, 2.0, -2.0, 9.0])[:, None, None], Preprocessing())
    assert shown.tolist() == [[[127, 255, 0]]]


def test_scores_are_scikit_learns_and_the_worst_come_first() -> None:
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(50, 4), torch.randint(0, 4, (50,))
    labels[7] = -1  # unreadable
    batches = zip(logits.softmax(dim=1).split(16), labels.split(16), strict=True)
    scored, counted = sections.score(batches), labels >= 0
    expected = confusion_matrix(labels[counted], logits.argmax(dim=1)[counted])
    losses = torch.nn.functional.cross_entropy(logits[counted], labels[counted], reduction="none")
    assert [each.loss for each in scored] == pytest.approx(
        losses.sort(descending=True).values.tolist(), abs=1e-5
    )
    assert sorted(each.place for each in scored) == [*range(7), *range(8, 50)]
    (axes,) = sections.draw_confusion(scored, list("abcd")).axes
    assert np.allclose(axes.images[0].get_array(), expected / expected.sum(axis=1, keepdims=True))


def test_answers_that_are_not_finite_have_no_figures() -> None:
    judged = [(torch.full((4, 2), torch.nan), torch.arange(4) % 2)]
    task, images = SimpleNamespace(several=False), SimpleNamespace(samples=[])
    loaded: Any = SimpleNamespace(
        task=task, class_names=[*"ab"], validation=lambda: images, judge=lambda samples: judged
    )
    ((_, text),) = sections._mistakes(loaded)
    assert "not finite" in text


def texts_of(html: str) -> list[str]:
    """What stands between the tags of a page."""
    return [unescape(text) for text in re.split(r"<[^<>]*>", html)]


def check_page(path: Path) -> tuple[str, int]:
    """The text and the number of images of a page that a browser can show without a request."""
    html = path.read_text()
    assert not re.search(r"https?:|url\(|@import|<script|<link|<iframe|<b>&", html)
    sources = re.findall(r'\bsrc="([^"]*)"', html)
    for source in sources:
        kind, _, content = source.partition(";base64,")
        assert kind in ("data:image/png", "data:image/jpeg")
        Image.open(io.BytesIO(base64.b64decode(content, validate=True))).load()
    return "\n".join(texts_of(html)), len(sources)


def test_what_users_named_is_text(tmp_path: Path) -> None:
    figure, _ = plots.grid(1, 1, 2, 2)
    tiles = page.tiles([(np.zeros((4, 4, 3), np.uint8), EVIL, EVIL)])
    content = page.paragraph(EVIL) + page.table([EVIL], [[EVIL]]) + tiles + page.embed(figure, EVIL)
    page.write(tmp_path / "page.html", EVIL, [(EVIL, EVIL)], [(EVIL, content)])
    html = (tmp_path / "page.html").read_text()
    assert texts_of(html).count(EVIL) == 10
    assert [unescape(alt) for alt in re.findall(r'\balt="([^"]*)"', html)] == [EVIL, EVIL]


FAST = ["--data.root=mixed", "--data.batch_size=12", "--data.img_size=32", "--trainer.max_epochs=1"]
# the tests' own process could not start others
FAST += [
    "--data.num_workers=0",
    "--trainer.devices=1",
]
BASE = ["--config", str(REPO / "configs/base.yaml")]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """A run of two classes of photographs, not square and of every mode."""
    place = tmp_path_factory.mktemp("visualize")
    for label, name in enumerate((EVIL, "owl")):
        save_mixed(photographs, place / "mixed" / "train" / name, 12, label)
        save_mixed(photographs, place / "mixed" / "val" / name, 5, 10 + label)
    return ended(place, "a", [*SMALL, *FAST, "--data.crop_pct=0.9", "--ema.decay=0.9"])


@pytest.fixture
def trained(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run; its folder is the current one's logs/a."""
    shutil.copytree(run_folder.parent.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    return tmp_path / "logs" / "a"


Capture = pytest.CaptureFixture[str]


def test_a_run_is_visualized(trained: Path, capfd: Capture) -> None:
    main(["visualize", "a"])
    first, second, result, last = capfd.readouterr().out.splitlines()
    assert re.match(
        r"logs/a/visualize/b-cat-_-[\w-]+\.png  .*%.*; true class <b>&\"cat'\$_{\$$", first
    )
    assert re.match(r"logs/a/visualize/owl-[\w-]+\.png  .*%.*; true class owl$", second)
    assert re.match(r"top-1 \d+\.\d\d % of 10 validation images$", result)
    assert last == "logs/a/visualize/index.html"
    text, images = check_page(Path(last))
    wrong = 10 - round(float(result.split()[1]) / 10)
    assert images == wrong + 1 + 2 + 1  # mistakes, confusion matrix, maps of the two, curves
    assert text.index("Worst mistakes") < text.index("Maps") < text.index("Curves")
    for words in (
        "logs/a/checkpoints/best.ckpt, moving average, step ",
        EVIL,
        "cait visualize a",
        result,
    ):
        assert words in text
    for line in (first, second):
        assert Image.open(line.partition("  ")[0]).width > 500
    main(["eval", "a"])  # the same weights give the same accuracy
    assert f"{float(result.split()[1]):.2f} %" in capfd.readouterr().out


def test_images_weights_and_places_are_chosen(trained: Path, capfd: Capture) -> None:
    name = b"mixed/val/owl/" + NO_TEXT + b".png"
    shutil.copy(os.fsencode(next(Path("mixed/val/owl").iterdir())), name)
    Path("mixed/val/owl/-.jpg").write_bytes(b"no image")
    images = ["mixed/val/owl", "mixed/train", os.fsdecode(name), "--num_images=3"]
    main(["visualize", "a", "--raw", "--no_validation", "--images", *images])
    told = capfd.readouterr()
    assert len(told.out.splitlines()) == 4
    assert "cannot read the image mixed/val/owl/-.jpg: not an image; it is left out" in told.err
    text, images = check_page(trained / "visualize" / "index.html")
    assert (images, "Confusion" in text, "moving average" in text) == (3 + 1, False, False)

    shutil.rmtree("mixed/val")  # of a run that was fetched from another machine
    shutil.move("mixed/train/owl/0.jpg", "x.jpg")
    (trained / "metrics.csv").unlink()
    main(
        [
            "visualize",
            str(trained / "checkpoints/last.ckpt"),
            "--images",
            "x.jpg",
            "--output=out/here",
            "--ema",
        ]
    )
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("out/here/x.png  ")
    assert out[1].startswith("the validation set is not scored: ")
    text, images = check_page(Path("out/here/index.html"))
    assert images == 1
    for words in ("last.ckpt, moving average, step ", ", 32 × 32 pixels", "metrics.csv is "):
        assert words in text


def test_what_cannot_be_shown_is_refused_in_one_line(trained: Path) -> None:
    shutil.rmtree("mixed/val")
    Path("text.jpg").write_text("no image")
    shutil.copy(trained / "checkpoints" / "best.ckpt", "moved.ckpt")
    for arguments, words in [
        (["ghost"], "there is no run logs/ghost"),
        (["a", "--images", "ghost.jpg"], "there is no image ghost.jpg"),
        (["a", "--images", "text.jpg"], "cannot read the image text.jpg: not an image"),
        (["a"], "mixed/val"),
        (["moved.ckpt"], "which images?"),
        (["text.jpg", "--images", "text.jpg"], "text.jpg is not a whole checkpoint of a run"),
    ]:
        done = call(Path.cwd(), "visualize", *arguments)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert words in line, arguments


def test_published_weights_need_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    """As the paper's pictures are made: the release's file, at the model's own resolution."""
    monkeypatch.chdir(tmp_path)
    fields: dict = dict(depth=1)
    network = package.create_model("xxs24", 224, 1000, **fields)
    monkeypatch.setattr("cait.model.network.create_model", lambda name, size, classes: network)
    torch.save(
        {"model": {f"module.{key}": value for key, value in network.state_dict().items()}},
        "XXS24_224.pth",
    )
    Image.new("RGB", (300, 200), "red").save("photo.png")
    main(
        [
            "visualize",
            "--name",
            "xxs24",
            "--weights",
            "XXS24_224.pth",
            "--images",
            "photo.png",
            "--output=out",
        ]
    )
    assert capfd.readouterr().out.splitlines()[-1] == "out/index.html"
    text, images = check_page(Path("out/index.html"))
    assert "XXS24_224.pth" in text
    assert images == 1


@pytest.mark.parametrize(
    ("network", "caption"),
    [
        # CaiT may have been deleted
        (
            SMALL,
            "first class-attention block" if VARIANTS else "what all patches read",
        ),
        *slow(
            ([*BASE, "--model.name=timm/test_resnet"], "Grad-CAM"),
            ([*BASE, "--model.name=timm/test_vit"], "what all patches read"),
        ),
    ],
    ids=["own", "resnet", "vit"],
)
def test_the_page_shows_where_each_kind_of_network_looks(
    network: list[str],
    caption: str,
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    main(
        [
            "fit",
            *network,
            *FAST,
            f"--data.root={digits_root}",
            "--trainer.max_steps=2",
            "--run_name=a",
        ]
    )
    digit = min((digits_root / "val" / "3").iterdir())
    twin = Path(shutil.copytree(digit.parent, "other/3"), digit.name)
    main(["visualize", "a", "--no_validation", "--images", str(digit), str(twin)])
    drawn = sorted(Path("logs/a/visualize").glob("*.png"))
    assert [path.name for path in drawn] == [f"3-{digit.stem}+2.png", f"3-{digit.stem}.png"]
    assert drawn[0].read_bytes() == drawn[1].read_bytes()
    text, images = check_page(Path("logs/a/visualize/index.html"))
    assert caption in text
    assert images == 3  # the two digits and the curves
