"""Attention maps against timm's, where they land on the photograph, the page, and what is refused."""

from __future__ import annotations

import base64
import csv
import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import chromium
import matplotlib.text
import numpy as np
import pytest
import timm
import torch
from harness import NO_TEXT, REPO, SMALL, python, save_mixed, slow
from matplotlib.axes import Axes
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from sklearn.metrics import confusion_matrix
from timm.data import ImageNetInfo, create_transform
from torch.utils.data import DataLoader, TensorDataset

import cait as package
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.folder import FolderSource, Splits
from cait.data.transforms import CROP_MODES
from cait.errors import UserError
from cait.extras import curves, page, plots
from cait.extras.plots import grid
from cait.extras.visualize import attention, labels, mistakes
from cait.extras.visualize.sections import _about_training, crop_box

SMALL_CAIT = dict(depth=2, embed_dim=48, patch_size=8, num_heads=4)
EVIL = "<b>&\"cat'$_{$"
"""A class that is called like HTML, and like mathematics to matplotlib."""


def test_maps_are_timms() -> None:
    torch.manual_seed(0)
    ours = package.create_model("xxs24", 32, 7, layer_scale_init=0.5, **SMALL_CAIT).eval()
    theirs = timm.create_model("cait_xxs24_224", img_size=32, num_classes=7, **SMALL_CAIT).eval()
    theirs.load_state_dict(ours.state_dict())
    mixed, unmixed, of_class = [], [], []
    for block in theirs.blocks:
        block.attn.proj_w.register_forward_pre_hook(lambda _, given: unmixed.append(given[0]))  # [B, N, N, h]
        block.attn.attn_drop.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    for block in theirs.blocks_token_only:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _, given: of_class.append(given[0]))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs(images)
    maps = ours.maps(images)
    for ours_, theirs_ in zip(maps.self_attention, mixed, strict=True):
        assert (ours_ - theirs_).abs().max() <= 1e-6
    for ours_, theirs_ in zip(maps.class_attention, of_class, strict=True):
        assert (ours_ - theirs_).abs().max() <= 1e-6
        assert (ours_.sum(dim=-1) - 1).abs().max() <= 1e-6
    assert len(unmixed) == len(of_class) == 2
    for before, after in zip(unmixed, mixed, strict=True):
        assert (before.sum(dim=2) - 1).abs().max() <= 1e-6
        assert not torch.allclose(after.sum(dim=-1), torch.ones(()), atol=1e-3)


def views(**fields: object) -> attention.View:
    torch.manual_seed(0)
    network = package.create_model("xxs24", 32, 7, **SMALL_CAIT | fields).eval()
    return attention.look(network, torch.randn(3, 32, 32), [1], (1, 2))


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 1),
        (dict(distillation_token=True), 2),
        (dict(cls_in_keys=False), 1),
        (dict(class_token_at=1, distillation_token=True), 2),
    ],
    ids=str,
)
def test_the_patches_weights_are_cut_out_of_maps_of_every_kind(fields: dict, tokens: int) -> None:
    view = views(**fields)
    torch.manual_seed(0)
    network = package.create_model("xxs24", 32, 7, **SMALL_CAIT | fields).eval()
    maps = network.maps(torch.randn(1, 3, 32, 32))
    for ours, whole in zip(view.class_attention, maps.class_attention, strict=True):
        assert ours.shape == (4, tokens, 4, 4)
        torch.testing.assert_close(ours.flatten(2), whole[0, :, :, whole.shape[-1] - 16 :])
    whole = maps.self_attention[1][0]  # with the class tokens in it where they join before block 1
    first = whole.shape[-1] - 16
    assert first == (2 if "class_token_at" in fields else 0)
    torch.testing.assert_close(view.self_attention[1].flatten(1), whole[:, first + 1 * 4 + 2, first:])
    torch.testing.assert_close(view.probabilities.sum(), torch.ones(()))

    photograph, pixels = Image.new("RGB", (40, 32)), np.zeros((32, 32, 3), np.uint8)
    picture = attention.Picture(view, photograph, pixels, (4, 0, 36, 32), [f"class {i}" for i in range(7)])
    rows = ["class attention 0", "class attention 1"]
    if tokens == 2:
        rows = [f"{row}\n{token} token" for row in rows for token in ("class", "distillation")]
    rows = {"saliency", *rows, "self-attention 1"}
    for figure in (picture.figure(), picture.halves()[1]):
        heads = {f"head {head}" for head in range(4)}
        across, down = (heads, rows) if len(rows) <= 4 else (rows, heads)  # the longer side: no corner is blank
        below = [
            axes
            for axes in figure.findobj(Axes)
            if axes.get_subplotspec().get_geometry()[:2] == (len(down), len(across))
        ]
        assert len(below) == len(rows) * 4
        assert {axes.get_ylabel() for axes in below} - {""} == down
        assert {axes.get_title() for axes in below} - {""} == across
        numbers = {axes.get_xlabel() for axes in below} - {""}
        assert all(re.match(r"×-?[\d.e-]+ … ×-?[\d.e-]+$", number) for number in numbers)
        texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
        assert "Below a map: its least and largest weight;\n×1 is an even share over the 16 patches" in texts
    least, largest = (16 * bound for bound in view.class_attention[0][0, 0].aminmax())
    assert f"×{round(float(least), 2):.2g} … ×{round(float(largest), 2):.2g}" in numbers
    assert [*map(attention.short, (0.0294, -0.003, -0.5, 4.72, 10.6, 196.2))] == [
        "0.03",
        "0",
        "-0.5",
        "4.7",
        "11",
        "196",
    ]


def test_what_cannot_be_shown_is_refused() -> None:
    for fields, words in [
        (dict(depth_token_only=0, class_token_at=0), "no class-attention block"),
        (dict(depth=1), "no self-attention block 1: the network has 1"),
        (dict(patch_size=32), "no patch 1,2: the grid is 1 × 1"),
    ]:
        with pytest.raises(UserError, match=words):
            views(**fields)


def test_a_flat_map_is_no_division_by_zero() -> None:
    assert attention.saliency(torch.full((4, 4), 0.25), 8).eq(0).all()


SIZES = [(8, 8), (9, 8), (13, 31), (640, 427), (427, 640), (97, 41), (500, 500)]


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.8])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_crop_box_is_where_timms_pixels_come_from(size: tuple[int, int], crop_pct: float, fit: str) -> None:
    """The image holds its own coordinates: red grows to the right, green downwards."""
    width, height = size
    x, y = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
    image = Image.fromarray((np.stack((x, y, 0 * x), axis=2) * 255).round().astype(np.uint8))
    how: dict = dict(crop_pct=crop_pct, crop_mode=CROP_MODES[fit], interpolation="bilinear", normalize=False)
    seen = create_transform(48, is_training=False, **how)(image)
    left, top, right, bottom = crop_box(ImageNetDataModule(img_size=48, crop_pct=crop_pct, fit=fit), width, height)
    centres = (torch.arange(48) + 0.5) / 48
    inside = slice(18, 30) if fit == "pad" else slice(12, 36)  # the filter has nothing to read beyond the edges
    for channel, (start, end, side) in enumerate([(left, right, width), (top, bottom, height)]):
        line = seen[channel].narrow(channel, 22, 4).float().mean(dim=channel) / 255  # over the other axis
        expected = (start + centres * (end - start)) / side
        assert (line - expected)[inside].abs().max() <= 1.5 / 255, (start, end)


def bright_seeker(img_size: int) -> torch.nn.Module:
    """A CaiT whose class token reads bright patches: the first channel is brightness, and the query asks for it."""
    network = package.create_model(
        "xxs24", img_size, 2, depth=1, depth_token_only=1, embed_dim=8, num_heads=2, patch_size=4, layer_scale_init=1e-9
    )
    with torch.no_grad():
        for parameter in (network.patch_embed.proj.weight, network.patch_embed.proj.bias, network.pos_embed):
            parameter.zero_()
        network.patch_embed.proj.weight[0] = 1 / 48
        attn = network.blocks_token_only[0].attn
        for parameter in (attn.q.weight, attn.q.bias, attn.k.weight, attn.k.bias):
            parameter.zero_()
        for head in range(2):
            attn.q.bias[4 * head] = 4.0
            attn.k.weight[4 * head, 0] = 1.0
    return network.eval()


@pytest.mark.parametrize("crop_pct", [1.0, 0.8])
@pytest.mark.parametrize(("width", "height"), [(90, 40), (13, 9), *slow((40, 90), (8, 8), (640, 427))])
def test_saliency_lands_on_the_object(width: int, height: int, crop_pct: float) -> None:
    short = min(width, height)
    centre = width / 2 + 0.18 * short, height / 2 - 0.12 * short
    corners = [side + sign * 0.15 * short for sign in (-1, 1) for side in centre]
    left, top, right, bottom = (round(corner) for corner in corners)
    photograph = Image.new("RGB", (width, height))
    ImageDraw.Draw(photograph).rectangle((left, top, right - 1, bottom - 1), fill="white")

    data = ImageNetDataModule(img_size=64, crop_pct=crop_pct)
    pixels = data.eval_transform(photograph).permute(1, 2, 0)
    (image,), _ = data.on_after_batch_transfer((pixels[None], None), 0)
    assert (plots.pixels(image, data.preprocessing) == pixels.numpy()).all()
    grey = ImageNetDataModule(img_size=64, in_chans=1)
    seen = pixels[..., :1].expand(-1, -1, 3)
    assert (plots.pixels(grey.normalize_and_erase(seen[None])[0], grey.preprocessing) == seen.numpy()).all()
    box = crop_box(data, width, height)
    view = attention.look(bright_seeker(64), image)
    figure = attention.Picture(view, photograph, pixels.numpy(), box, ["a", "b"]).figure()
    figure.draw_without_rendering()

    # The image is drawn as it is, and the frame is on what the network sees of it.
    axes = next(axes for axes in figure.findobj(matches("image\n")))
    (drawn,) = axes.images
    assert drawn.get_extent() == [0, width, height, 0]
    assert np.array_equal(drawn.get_array(), np.asarray(photograph))
    (frame,) = axes.patches
    assert frame.get_bbox().extents == pytest.approx(box)

    # matplotlib itself says which value is drawn over which pixel of the crop; the frame says where that is.
    axes = next(axes for axes in figure.findobj(matches("saliency\n")))
    at = np.linspace(0.5, 63.5, 64)
    values = np.array([[value_at(axes, axes.images[1], x, y) for x in at] for y in at])
    assert not np.isnan(values).any()
    patch = (box[2] - box[0]) / 16
    x, y = np.meshgrid(box[0] + at * (box[2] - box[0]) / 64, box[1] + at * (box[3] - box[1]) / 64)
    salient = values > 0.5
    assert abs(x[salient].mean() - (left + right) / 2) <= patch / 2
    assert abs(y[salient].mean() - (top + bottom) / 2) <= patch / 2
    near = (x > left - patch) & (x < right + patch) & (y > top - patch) & (y < bottom + patch)
    assert not (salient & ~near).any()
    within = (x > left + patch) & (x < right - patch) & (y > top + patch) & (y < bottom - patch)
    assert within.any()
    assert salient[within].all()

    # And over the pixels that the network sees.
    axes = next(axes for axes in figure.findobj(matches("head 1")))
    bright = pixels.float().mean(dim=2).numpy() > 127
    drawn = axes.images[1].get_array() > 0.5
    assert axes.images[1].get_extent() == axes.images[0].get_extent() == [0, 64, 64, 0]
    for axis in (0, 1):
        assert abs(np.nonzero(bright)[axis].mean() - np.nonzero(drawn)[axis].mean()) <= 2


def matches(title: str) -> Callable[[object], bool]:
    return lambda part: hasattr(part, "get_title") and part.get_title().startswith(title)


def value_at(axes, image, x: float, y: float) -> float:
    """What is drawn at a place given in data coordinates; NaN where nothing is."""
    at = axes.transData.transform((x, y))
    value = image.get_cursor_data(SimpleNamespace(x=at[0], y=at[1]))
    return np.nan if value is None else float(value)


def test_scores_are_scikit_learns_and_the_worst_come_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(50, 4), torch.randint(0, 4, (50,))
    labels[7] = -1  # unreadable
    scored = mistakes.score(torch.nn.Linear(4, 4).apply(identity), DataLoader(TensorDataset(logits, labels), 16))
    counted = labels >= 0
    expected = confusion_matrix(labels[counted], logits.argmax(dim=1)[counted])
    right = np.trace(expected)
    assert scored.acc1 == pytest.approx(100 * right / 49)
    pairs = scored.confusions(100)
    assert {(true, taken): count for true, taken, count in pairs} == {
        (true, taken): count for (true, taken), count in np.ndenumerate(expected) if true != taken and count
    }
    assert [count for *_, count in pairs] == sorted((count for *_, count in pairs), reverse=True)
    losses = torch.nn.functional.cross_entropy(logits[counted], labels[counted], reduction="none")
    wrong = (logits.argmax(dim=1) != labels)[counted]
    worst = scored.worst(5)
    assert scored.losses[worst] == pytest.approx(losses[wrong].sort(descending=True).values[:5].tolist(), rel=1e-5)
    assert 7 not in scored.worst(50)
    assert len(scored.worst(50)) == 49 - right

    axis = mistakes.confusion(scored, list("abcd")).axes[0]
    shares = axis.images[0].get_array()
    assert np.allclose(shares.filled(0), expected / expected.sum(axis=1, keepdims=True))
    assert {text.get_text() for text in axis.texts} == {str(count) for count in expected.flat if count}


def test_the_table_of_the_labels_begins_with_those_of_the_highest_loss(digits_root: Path, tmp_path: Path) -> None:
    source = FolderSource(Splits(str(digits_root)))
    torch.manual_seed(0)
    truth = torch.tensor([label for _, label in source.val])
    known = truth.clone()
    known[7] = -1  # unreadable
    logits = torch.randn(len(truth), 10)
    scored = mistakes.score(torch.nn.Linear(10, 10).apply(identity), DataLoader(TensorDataset(logits, known), 64))
    labels.write(tmp_path / "labels.csv", source, scored)
    with (tmp_path / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    probabilities = logits.softmax(dim=1)
    order = [index for index in probabilities[range(len(truth)), truth].argsort().tolist() if index != 7]
    for row, index in zip(rows, order, strict=False):
        best = int(probabilities[index].argmax())
        assert digits_root / row["path"] == Path(source.val.name(index))
        assert (row["label"], row["split"]) == (str(int(truth[index])), "val")
        assert float(row["probability"]) == pytest.approx(probabilities[index, truth[index]].item(), abs=6e-5)
        assert row["suggestion"] == ("" if best == truth[index] else str(best))
        assert not row["suggestion"] or float(row["its probability"]) > float(row["probability"])
    others = [(str(digits_root / row["path"]), int(row["label"])) for row in rows[len(order) :]]
    assert others == [*source.train]
    assert {(row["split"], row["probability"], row["suggestion"]) for row in rows[len(order) :]} == {("train", "", "")}


def test_without_a_label_there_is_no_accuracy() -> None:
    images = DataLoader(TensorDataset(torch.randn(3, 4), torch.full((3,), -1)), 2)
    assert np.isnan(mistakes.score(torch.nn.Linear(4, 4), images).acc1)


def identity(layer: torch.nn.Module) -> None:
    torch.nn.init.eye_(layer.weight)
    torch.nn.init.zeros_(layer.bias)


def test_a_thousand_classes_are_an_image_of_cells() -> None:
    labels = np.arange(1000)
    scored = mistakes.Scored(labels, labels[::-1].copy(), np.ones(1000), np.ones(1000))
    figure = mistakes.confusion(scored, [f"class {i}" for i in range(1000)])
    shares = figure.axes[0].images[0].get_array()
    assert shares.shape == (200, 200)
    assert not figure.axes[0].texts
    assert np.array_equal(shares.filled(0), np.eye(200)[::-1])


class Tags(HTMLParser):
    """The attributes of a page's tags, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_page(path: Path) -> tuple[str, list[Image.Image]]:
    """The text and the images of a page that a browser can show without a request."""
    html = path.read_text()
    tags = Tags(html)
    assert not tags.open
    assert not {tag for tag, *_ in tags.attributes} & {"script", "link", "iframe", "object", "embed", "base", "b"}
    images = []
    for tag, name, value in tags.attributes:
        if name in ("src", "srcset", "data", "poster", "action", "background", "style"):
            assert (tag, name) == ("img", "src")
            kind, _, content = value.partition(";base64,")
            assert kind in ("data:image/png", "data:image/jpeg")
            images.append(Image.open(io.BytesIO(base64.b64decode(content, validate=True))).convert("RGB"))
        if name == "href":
            assert value.startswith("#")
            assert ("h2", "id", value[1:]) in tags.attributes
    assert not re.search(r"https?:|url\(|@import", html)
    return "\n".join(tags.texts), images


def test_what_users_named_is_text() -> None:
    facts = [(EVIL, EVIL)]
    html = page.page(
        EVIL, facts, [("A part", page.heading(EVIL) + page.paragraph(EVIL) + page.table([EVIL], [[EVIL]]))]
    )
    html += page.tiles([(np.zeros((4, 4, 3), np.uint8), EVIL, EVIL)])
    tags = Tags(html)
    assert tags.texts.count(EVIL) == 10
    assert ("img", "alt", EVIL) in tags.attributes


@pytest.mark.parametrize("width", [390, 1440])
def test_on_a_screen_a_figure_keeps_its_size_and_a_line_says_what_scrolls(width: int, tmp_path: Path) -> None:
    figures = {f"{inches} inches": grid(1, 1, inches, 1.0)[0] for inches in (3.0, 3.65, 5.0, 14.0)}
    html = page.page("many", [], [("A part", page.beside(*(page.embed(*pair[::-1]) for pair in figures.items())))])
    (tmp_path / "index.html").write_text(html)
    with chromium.started(tmp_path / "browser", width) as browser:
        browser.get((tmp_path / "index.html").as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        all_shown = browser.execute_script(SHOWN)
    for inches, (shown, room, image, hint) in zip((3.0, 3.65, 5.0, 14.0), all_shown, strict=True):
        assert image >= round(96 * inches) - 1  # its text stays as large as it was drawn
        assert hint == (shown > room) == (96 * inches > min(width, 1120) - 32)


SHOWN = """return [...document.querySelectorAll(".figure")].map((figure) => {
  const [scroll, hint] = [figure.querySelector(".scroll"), figure.querySelector(".hint")];
  return [scroll.scrollWidth, scroll.clientWidth, scroll.firstChild.clientWidth, hint.offsetHeight > 0];
});"""


def test_the_curves_say_how_training_images_are_mixed() -> None:
    mixed = _about_training({"mixup": 0.2, "cutmix": 1.0, "mix_prob": 0.5})
    assert "mixed by Mixup 0.2 and CutMix 1 in 50% of the batches; so train accuracy can be below" in mixed
    for plain in ({}, {"mixup": 0.0, "cutmix": 0.0, "mix_prob": 1.0}, {"mixup": 0.8, "mix_prob": 0.0}):
        assert "mixed" not in _about_training(plain)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """A run of two classes of photographs, not square and of every mode."""
    place = tmp_path_factory.mktemp("visualize")
    for label, name in enumerate((EVIL, "owl")):
        save_mixed(photographs, place / "mixed" / "train" / name, 12, label)
        save_mixed(photographs, place / "mixed" / "val" / name, 5, 10 + label)
    settings = ["--data.root=mixed", "--data.batch_size=12", "--data.crop_pct=0.9", "--data.img_size=32"]
    settings += ["--data.num_workers=0", "--trainer.devices=1"]  # the tests' own process could not start others
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        main(["fit", *SMALL, *settings, "--trainer.max_epochs=2", "--ema.decay=0.9", "--run_name=a"])
    return place / "logs" / "a"


@pytest.fixture
def trained(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run; its folder is the current one's logs/a."""
    shutil.copytree(run_folder.parent.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    return tmp_path / "logs" / "a"


Capture = pytest.CaptureFixture[str]


def refused(arguments: list[str], capfd: Capture) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["visualize", *arguments])
    assert stop.value.code == 2
    err = capfd.readouterr().err
    assert err.startswith("cait: error: ")
    assert err.count("\n") == 1
    return err


class OwnTransform(ImageNetDataModule):
    """Normalises by itself."""

    def make_eval_transform(self) -> Callable[[Image.Image], torch.Tensor]:
        return create_transform(self.img_size, is_training=False)


def test_a_run_is_visualized(trained: Path, capfd: Capture) -> None:
    main(["visualize", "a"])
    first, second, result, table, last = capfd.readouterr().out.splitlines()
    assert re.match(r"logs/a/visualize/b-cat-_-[\w-]+\.png  .*%.*; true class <b>&\"cat'\$_{\$$", first)
    assert re.match(r"logs/a/visualize/owl-[\w-]+\.png  .*%.*; true class owl$", second)
    assert re.match(r"top-1 \d+\.\d\d % of 10 validation images$", result)
    assert (table, last) == ("logs/a/visualize/labels.csv", "logs/a/visualize/index.html")
    text, images = check_page(Path(last))
    wrong = 10 - round(float(result.split()[1]) / 10)
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["path"] for row in rows} == {str(path.relative_to("mixed")) for path in Path("mixed").glob("*/*/*")}
    assert [row["split"] for row in rows] == ["val"] * 10 + ["train"] * 24
    assert sum(row["suggestion"] != "" for row in rows) == wrong
    panels = len(curves.panels([curves.read(trained)]))
    assert len(images) == wrong + 1 + 2 * 2 + panels  # mistakes, confusion matrix, halves of the two, curves
    assert text.index("Worst mistakes") < text.index("Attention maps") < text.index("Curves")
    for words in (
        "logs/a/checkpoints/best.ckpt, moving average, step ",
        EVIL,
        "cait visualize a",
        result,
        "Curves",
        "Worst mistakes",
    ):
        assert words in text
    for line in (first, second):
        assert Image.open(line.partition("  ")[0]).width > 500
    # The class that the page names is the one that `cait predict` gives.
    main(["eval", "a"])
    assert f"{float(result.split()[1]):.2f} %" in capfd.readouterr().out

    main(["visualize", "logs/a", "--images", "mixed/val/owl", "mixed/train", "--num_images", "3", "--no_validation"])
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "the first 3 of 29 images; --num_images 29 draws all"
    assert len(out) == 5
    text, images = check_page(trained / "visualize" / "index.html")
    assert len(images) == 2 * 3 + panels
    assert "Confusion" not in text

    shutil.rmtree("mixed/val")  # of a run that was fetched from another machine
    shutil.move("mixed/train/owl/0.jpg", "x.jpg")
    (trained / "metrics.csv").unlink()
    size = ["--img_size=64", "--self_attention=1", "--query=15,0", "--output=out/here", "--ema"]
    main(["visualize", str(trained / "checkpoints" / "last.ckpt"), "--images", "x.jpg", *size])
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("out/here/x.png  ")
    assert out[1].startswith("the validation set is not scored: ")
    text, images = check_page(Path("out/here/index.html"))
    assert len(images) == 2
    for words in (
        "last.ckpt, moving average, step ",
        "CaiT 2×32, 64 × 64 pixels",
        "The validation set is not scored: ",
        "metrics.csv is ",
    ):
        assert words in text

    with mock.patch.object(attention, "Picture", wraps=attention.Picture) as drawn:
        main(["visualize", "a", "--images", "x.jpg", "--output=own"], data=OwnTransform)
    assert capfd.readouterr().out.startswith("own/x.png  ")
    assert drawn.call_args.args[3] is None  # nobody knows what it cut out

    Path("text.jpg").write_text("no image")
    Path("torn.jpg").write_bytes(Path("x.jpg").read_bytes()[:400])
    Path("empty").mkdir()
    best = str(trained / "checkpoints" / "best.ckpt")
    shutil.copy(best, "moved.ckpt")
    content = torch.load(best, weights_only=True)
    content["hyper_parameters"] |= dict(name="timm/test_vit", fields=None, img_size=160)
    content["state_dict"] = {
        f"model.{key}": value for key, value in timm.create_model("test_vit", num_classes=2).state_dict().items()
    }
    torch.save(content, "other.ckpt")  # whose average is still that of the run
    del content["callbacks"]
    torch.save(content, "timm.ckpt")
    for arguments, words in [
        ([], "which run?"),
        (["ghost"], "there is no run logs/ghost"),
        (["ghost.ckpt"], "the weights ghost.ckpt do not exist"),
        (["a", "--images", "ghost.jpg"], "there is no image ghost.jpg"),
        (["a", "--images", "empty"], "no images below empty"),
        (["a", "--images", "text.jpg"], "cannot read the image text.jpg: not an image"),
        (["a", "--images", "torn.jpg"], "cannot read the image torn.jpg: "),
        (["a"], "mixed/val"),
        (["a", "--images", "x.jpg", "--img_size=30"], "img_size 30 is not a multiple of patch_size 4"),
        (["a", "--images", "x.jpg", "--img_size=0"], "img_size must be a whole number of at least 1"),
        (["a", "--images", "x.jpg", "--self_attention=0,2"], "no self-attention block 2: the network has 2"),
        (
            ["a", "--images", "x.jpg", "--self_attention=last"],
            "--self_attention: invalid whole_numbers value: 'last'",
        ),
        (["a", "--images", "x.jpg", "--self_attention=0", "--query=8,0"], "no patch 8,0: the grid is 8 × 8"),
        (["a", "--images", "x.jpg", "--query=8"], "--query takes the row and the column"),
        (["a", "--images", "x.jpg", "--num_images=0"], "--num_images must be at least 1"),
        (["a", "--images", "x.jpg", "--output=x.jpg"], "x.jpg is a file; name a folder"),
        (["a", "--images", "x.jpg", "--name=xxs25"], "invalid choice: 'xxs25'"),
        (["moved.ckpt"], "which images?"),
        (
            ["x.jpg", "--images", "x.jpg"],
            "x.jpg is not a whole checkpoint of a run; of a file of weights say the model",
        ),
        (["other.ckpt", "--images", "x.jpg"], "other.ckpt cannot be loaded: "),
        (["timm.ckpt", "--images", "x.jpg"], "timm/test_vit has no maps(), which visualize needs"),
        (["timm/test_vit", "--pretrained", "--images", "x.jpg"], "timm/test_vit has no maps(), which visualize needs"),
        (["xs36", "--pretrained", "--images", "x.jpg"], "timm has no weights of xs36"),
        (["xxs24", "--pretrained", "--ema", "--images", "x.jpg"], "--pretrained takes neither"),
    ]:
        assert words in refused(arguments, capfd), arguments

    content = torch.load("moved.ckpt", weights_only=True)
    content["hyper_parameters"]["fields"]["attention_backend"] = "fused"  # trained on a GPU
    torch.save(content, "moved.ckpt")
    main(["visualize", "moved.ckpt", "--images", "x.jpg"])
    assert capfd.readouterr().out.splitlines()[-1] == "visualize/index.html"
    text, _ = check_page(Path("visualize/index.html"))
    assert "Curves" not in text


def test_the_images_held_out_stay_the_same_when_the_folder_grows(trained: Path, capfd: Capture) -> None:
    shutil.move("mixed/train", "flat")
    train = ["fit", *SMALL, "--data.root=flat", "--data.img_size=32", "--data.num_workers=0", "--data.batch_size=4"]
    main([*train, "--trainer.devices=1", "--trainer.max_epochs=1", "--run_name=flat"])
    with Path("logs/flat/validation.csv").open(newline="") as file:
        held = len([*csv.DictReader(file)])
    for place, name in enumerate(("owl", EVIL)):
        for number in range(20):
            shutil.copy(next(Path("flat", name).iterdir()), f"flat/{name}/0{place}{number}.png")
    capfd.readouterr()
    main(["visualize", "flat"])
    assert f" % of {held} validation images\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    "network",
    [
        ["--config", str(REPO / "configs/base.yaml"), "--model.name=timm/test_resnet"],
        [*SMALL, "--model.fields.depth_token_only=0", "--model.fields.class_token_at=0"],
    ],
)
def test_a_network_without_maps_has_a_page_of_mistakes(network: list[str], trained: Path, capfd: Capture) -> None:
    train = ["fit", *network, "--data.root=mixed", "--data.img_size=32", "--data.num_workers=0", "--data.batch_size=4"]
    main([*train, "--trainer.devices=1", "--trainer.max_epochs=1", "--run_name=plain"])
    assert "see its mistakes" in capfd.readouterr().out
    main(["visualize", "plain"])
    first, result, table, last = capfd.readouterr().out.splitlines()
    assert first.startswith("no attention maps: ")
    assert re.match(r"top-1 \d+\.\d\d % of 10 validation images$", result)
    assert (table, last) == ("logs/plain/visualize/labels.csv", "logs/plain/visualize/index.html")
    text, _ = check_page(Path(last))
    assert text.index("Worst mistakes") < text.index("Curves")
    assert "Attention maps" not in text
    assert re.search("has no (maps|class-attention block)", refused(["plain", "--images", "mixed/val/owl"], capfd))


def test_a_name_that_is_no_text_is_drawn(trained: Path, capfd: Capture) -> None:
    name = b"mixed/val/owl/" + NO_TEXT + b".png"
    shutil.copy(os.fsencode(next(Path("mixed/val/owl").iterdir())), name)
    main(["visualize", "a", "--images", os.fsdecode(name), "--no_validation"])
    assert Path("logs/a/visualize/index.html").read_text(encoding="utf-8")


def test_help_waits_for_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from cait.cli import main; main(['visualize', '--help'])"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "--self_attention BLOCK[,BLOCK]" in done.stdout


def test_a_strangers_run_names_no_code(trained: Path, capfd: Capture) -> None:
    config = trained / "config.yaml"
    (trained.parent.parent / "stranger.py").write_text("print('code ran')\nset = None\n")
    config.write_text(config.read_text().replace("root: mixed", "root: stranger:set"))
    err = refused(["a"], capfd)
    assert "names stranger:set, code that may do anything" in err
    assert "stranger" not in sys.modules


@pytest.mark.slow
def test_weights_of_a_file_see_as_timms_network_does(
    tmp_path: Path, photographs: list[Image.Image], monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("cait_xxs24_224", img_size=64, num_classes=1000).eval()
    torch.nn.init.normal_(theirs.head.weight)  # so that the classes differ
    monkeypatch.chdir(tmp_path)
    save_file(theirs.state_dict(), "timm.safetensors")
    torch.save({"model": {f"module.{key}": value for key, value in theirs.state_dict().items()}}, "release.pth")
    photographs[0].save("china.png")
    transform = create_transform(64, is_training=False, crop_pct=1.0, interpolation="bicubic")
    with torch.no_grad():
        best = theirs(transform(photographs[0])[None]).softmax(dim=1)[0].topk(5)
    names = [ImageNetInfo().index_to_description(index).split(",")[0] for index in best.indices.tolist()]
    expected = ", ".join(f"{name} {value:.1%}" for name, value in zip(names, best.values.tolist(), strict=True))
    for file in ("timm.safetensors", "release.pth"):
        main(["visualize", file, "--name", "xxs24", "--images", "china.png"])
        assert capfd.readouterr().out.splitlines()[0] == f"visualize/china.png  {expected}"
    text, images = check_page(Path("visualize/index.html"))
    assert "xxs24, 64 × 64 pixels" in text
    assert len(images) == 2
    main(["visualize", "release.pth", "--name=xxs24", "--img_size=96", "--images", "china.png"])
    text, _ = check_page(Path("visualize/index.html"))
    assert "positions resized from 16 to 36 patches" in text
    for arguments, words in [
        (["release.pth"], "of a file of weights say the model: --name"),
        (["release.pth", "--name=xs24"], "release.pth is of another network"),
        (["release.pth", "--name=xxs24", "--ema"], "holds no moving average"),
        (["release.pth", "--name=xxs24", "--img_size=90"], "img_size 90 is not a multiple of patch_size 16"),
        (["china.png", "--name=xxs24"], "china.png cannot be read as weights"),
    ]:
        assert words in refused([*arguments, "--images", "china.png"], capfd)


def test_published_weights_come_through_timm(
    tmp_path: Path, photographs: list[Image.Image], monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("cait_xxs24_224").eval()
    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda entry, pretrained, **_: theirs if pretrained else real(entry))
    photographs[0].save(tmp_path / "china.png")
    monkeypatch.chdir(tmp_path)
    main(["visualize", "xxs24", "--pretrained", "--images", "china.png"])
    capfd.readouterr()
    text, _ = check_page(Path("visualize/index.html"))
    assert "timm's cait_xxs24_224.fb_dist_in1k" in text
    assert "xxs24, 224 × 224 pixels" in text
