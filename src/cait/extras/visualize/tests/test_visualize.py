"""Attention maps against timm's, where they land on the image, the page, and what is refused."""

from __future__ import annotations

import base64
import csv
import io
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from harness import NO_TEXT, REPO, SMALL, save_mixed
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from sklearn.metrics import confusion_matrix
from timm.data import ImageNetInfo, create_transform
from torch.utils.data import DataLoader, TensorDataset

import cait as package
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.folder import FolderSource, Splits
from cait.errors import UserError
from cait.extras import page, plots
from cait.extras.visualize import attention, mistakes
from cait.train.metrics import OneClass

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


def small(**fields: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return package.create_model("xxs24", 32, 7, **SMALL_CAIT | fields).eval()


@pytest.mark.parametrize("fields", [{}, dict(cls_in_keys=False), dict(class_token_at=1)], ids=str)
def test_the_patches_weights_are_cut_out_of_maps_of_every_kind(fields: dict) -> None:
    network, image = small(**fields), torch.randn(3, 32, 32)
    view, maps = attention.look(network, image, OneClass(7), [1], (1, 2)), network.maps(image[None])
    for ours, whole in zip(view.class_attention, maps.class_attention, strict=True):
        assert ours.shape == (4, 1, 4, 4)
        torch.testing.assert_close(ours.flatten(2), whole[0, :, :, whole.shape[-1] - 16 :])
    whole = maps.self_attention[1][0]  # with the class tokens in it where they join before block 1
    first = whole.shape[-1] - 16
    assert first == (1 if "class_token_at" in fields else 0)
    torch.testing.assert_close(view.self_attention[1].flatten(1), whole[:, first + 1 * 4 + 2, first:])
    torch.testing.assert_close(view.probabilities.sum(), torch.ones(()))

    photograph, pixels = Image.new("RGB", (40, 32)), np.zeros((32, 32, 3), np.uint8)
    figure = attention.draw(view, photograph, pixels, [EVIL, *(f"class {i}" for i in range(6))])
    figure.savefig(io.BytesIO())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "image\n40 × 32 pixels"
    drawn = {axes.get_title().split("\n")[0]: axes for axes in figure.axes}
    assert sum("attention" in title for title in titles) == 4 * 3
    assert np.array_equal(drawn["class attention 1, head 3"].images[0].get_array(), view.class_attention[1][3, -1])
    (frame,) = drawn["self-attention 1, head 0"].patches
    assert frame.get_xy() == (1.5, 0.5)
    least, largest = (16 * float(bound) for bound in view.class_attention[0][0, 0].aminmax())
    assert any(title.endswith(f"×{least:.2f} … ×{largest:.2f}") for title in titles)


def test_a_flat_map_is_no_division_by_zero() -> None:
    assert attention.saliency(torch.full((4, 4), 0.25), 8).eq(0).all()


def test_what_cannot_be_shown_is_refused() -> None:
    for fields, words in [
        (dict(depth_token_only=0, class_token_at=0), "no class-attention block"),
        (dict(depth=1), "no self-attention block 1: the network has 1"),
        (dict(patch_size=32), "no patch 1,2: the grid is 1 × 1"),
    ]:
        with pytest.raises(UserError, match=words):
            attention.look(small(**fields), torch.randn(3, 32, 32), OneClass(7), [1], (1, 2))


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
@pytest.mark.parametrize(("width", "height"), [(90, 40), (13, 9)])
def test_saliency_lands_on_the_object(width: int, height: int, crop_pct: float) -> None:
    side = min(width, height)
    corners = [
        at + sign * 0.15 * side for sign in (-1, 1) for at in (width / 2 + 0.18 * side, height / 2 - 0.12 * side)
    ]
    left, top, right, bottom = map(round, corners)
    photograph = Image.new("RGB", (width, height))
    ImageDraw.Draw(photograph).rectangle((left, top, right - 1, bottom - 1), fill="white")

    data = ImageNetDataModule(img_size=64, crop_pct=crop_pct)
    pixels = data.eval_transform(photograph).permute(1, 2, 0)
    (image,), _ = data.on_after_batch_transfer((pixels[None], None), 0)
    assert (plots.pixels(image, data.preprocessing) == pixels.numpy()).all()
    grey = ImageNetDataModule(img_size=64, in_chans=1)
    seen = pixels[..., :1].expand(-1, -1, 3)
    assert (plots.pixels(grey.normalize_and_erase(seen[None])[0], grey.preprocessing) == seen.numpy()).all()

    view = attention.look(bright_seeker(64), image, OneClass(2), [], None)
    figure = attention.draw(view, photograph, pixels.numpy(), ["a", "b"])
    axes = next(axes for axes in figure.axes if axes.get_title() == "saliency")
    below, above = axes.images
    assert below.get_extent() == above.get_extent()  # over the pixels that the network sees
    assert np.array_equal(below.get_array(), pixels)
    salient, bright = np.asarray(above.get_array()) > 0.5, pixels.float().mean(dim=2).numpy() > 127
    for axis in (0, 1):
        assert abs(np.nonzero(bright)[axis].mean() - np.nonzero(salient)[axis].mean()) <= 2


def scored_logits(logits: torch.Tensor, labels: torch.Tensor) -> mistakes.Scored:
    layer = torch.nn.Linear(logits.shape[1], logits.shape[1])
    torch.nn.init.eye_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return mistakes.score(layer, DataLoader(TensorDataset(logits, labels), 16))


def test_scores_are_scikit_learns_and_the_worst_come_first() -> None:
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(50, 4), torch.randint(0, 4, (50,))
    labels[7] = -1  # unreadable
    scored, counted = scored_logits(logits, labels), labels >= 0
    expected = confusion_matrix(labels[counted], logits.argmax(dim=1)[counted])
    pairs = scored.confusions(100)
    assert dict(pairs) == {pair: n for pair, n in np.ndenumerate(expected) if pair[0] != pair[1] and n}
    assert [count for _, count in pairs] == sorted((count for _, count in pairs), reverse=True)
    losses = torch.nn.functional.cross_entropy(logits[counted], labels[counted], reduction="none")
    wrong = (logits.argmax(dim=1) != labels)[counted]
    highest = losses[wrong].sort(descending=True).values[:5].tolist()
    assert scored.losses[scored.worst(5)] == pytest.approx(highest, rel=1e-5)
    assert 7 not in scored.worst(50)
    assert len(scored.worst(50)) == wrong.sum() == 49 - np.trace(expected)

    (axes,) = mistakes.confusion(scored, list("abcd")).axes
    assert np.allclose(axes.images[0].get_array().filled(0), expected / expected.sum(axis=1, keepdims=True))
    assert {text.get_text() for text in axes.texts} == {str(count) for count in expected.flat if count}
    (axes,) = mistakes.confusion(scored, [f"class {index}" for index in range(100)]).axes
    assert not axes.texts  # no names beyond `LABELLED`


def test_the_table_of_the_labels_begins_with_those_of_the_highest_loss(digits_root: Path, tmp_path: Path) -> None:
    source = FolderSource(Splits(str(digits_root)))
    torch.manual_seed(0)
    truth = torch.tensor([label for _, label in source.val])
    known = truth.clone()
    known[7] = -1  # unreadable
    logits = torch.randn(len(truth), 10)
    mistakes.write_labels(tmp_path / "labels.csv", source, scored_logits(logits, known))
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
    others = [(str(digits_root / row["path"]), int(row["label"])) for row in rows[len(order) :]]
    assert others == [*source.train]
    assert {(row["split"], row["probability"], row["suggestion"]) for row in rows[len(order) :]} == {("train", "", "")}


class Tags(HTMLParser):
    """The attributes of a page's tags, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_page(path: Path) -> tuple[str, list[Image.Image]]:
    """The text and the images of a page that a browser can show without a request."""
    html = path.read_text()
    tags, images = Tags(html), []
    assert not re.search(r"https?:|url\(|@import|<script|<link|<iframe|<b>&", html)
    for _, name, value in tags.attributes:
        if name == "src":
            kind, _, content = value.partition(";base64,")
            assert kind in ("data:image/png", "data:image/jpeg")
            images.append(Image.open(io.BytesIO(base64.b64decode(content, validate=True))).convert("RGB"))
    return "\n".join(tags.texts), images


def test_what_users_named_is_text(tmp_path: Path) -> None:
    figure, _ = plots.grid(1, 1, 2, 2)
    parts = [
        page.paragraph(EVIL),
        page.table([EVIL], [[EVIL]]),
        page.tiles([(np.zeros((4, 4, 3), np.uint8), EVIL, EVIL)]),
    ]
    page.write(tmp_path / "page.html", EVIL, [(EVIL, EVIL)], [(EVIL, page.beside(*parts, page.embed(figure, EVIL)))])
    tags = Tags((tmp_path / "page.html").read_text())
    assert tags.texts.count(EVIL) == 11
    assert [alt for tag, name, alt in tags.attributes if (tag, name) == ("img", "alt")] == [EVIL, EVIL]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """A run of two classes of photographs, not square and of every mode."""
    place = tmp_path_factory.mktemp("visualize")
    for label, name in enumerate((EVIL, "owl")):
        save_mixed(photographs, place / "mixed" / "train" / name, 12, label)
        save_mixed(photographs, place / "mixed" / "val" / name, 5, 10 + label)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        main(["fit", *SMALL, *FAST, "--data.crop_pct=0.9", "--ema.decay=0.9", "--run_name=a"])
    return place / "logs" / "a"


FAST = ["--data.root=mixed", "--data.batch_size=12", "--data.img_size=32", "--trainer.max_epochs=1"]
FAST += ["--data.num_workers=0", "--trainer.devices=1"]  # the tests' own process could not start others


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
    assert len(images) == wrong + 1 + 2 + 1  # mistakes, confusion matrix, maps of the two, curves
    assert text.index("Worst mistakes") < text.index("Attention maps") < text.index("Curves")
    for words in ("logs/a/checkpoints/best.ckpt, moving average, step ", EVIL, "cait visualize a", result):
        assert words in text
    for line in (first, second):
        assert Image.open(line.partition("  ")[0]).width > 500
    main(["eval", "a"])  # the same weights give the same accuracy
    assert f"{float(result.split()[1]):.2f} %" in capfd.readouterr().out

    main(["visualize", "logs/a", "--images", "mixed/val/owl", "mixed/train", "--num_images", "3", "--no_validation"])
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "the first 3 of 29 images; --num_images 29 draws all"
    text, images = check_page(trained / "visualize" / "index.html")
    assert (len(out), len(images)) == (5, 3 + 1)
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
    assert len(images) == 1
    for words in ("last.ckpt, moving average, step ", "CaiT 2×32, 64 × 64 pixels", "metrics.csv is "):
        assert words in text
    refuse_what_cannot_be(trained, capfd)


def refuse_what_cannot_be(trained: Path, capfd: Capture) -> None:
    Path("text.jpg").write_text("no image")
    Path("empty").mkdir()
    shutil.copy(trained / "checkpoints" / "best.ckpt", "moved.ckpt")
    for arguments, words in [
        ([], "which run?"),
        (["ghost"], "there is no run logs/ghost"),
        (["a", "--images", "ghost.jpg"], "there is no image ghost.jpg"),
        (["a", "--images", "empty"], "no images below empty"),
        (["a", "--images", "text.jpg"], "cannot read the image text.jpg: not an image"),
        (["a"], "mixed/val"),
        (["a", "--images", "x.jpg", "--img_size=30"], "img_size 30 is not a multiple of patch_size 4"),
        (["a", "--images", "x.jpg", "--self_attention=0,2"], "no self-attention block 2: the network has 2"),
        (["a", "--images", "x.jpg", "--self_attention=last"], "--self_attention: invalid numbers value: 'last'"),
        (["a", "--images", "x.jpg", "--query=8"], "--query takes the row and the column"),
        (["a", "--images", "x.jpg", "--output=x.jpg"], "x.jpg is a file; name a folder"),
        (["moved.ckpt"], "which images?"),
        (["x.jpg", "--images", "x.jpg"], "x.jpg is not a whole checkpoint of a run; of a file of weights say the"),
        (["timm/test_vit", "--pretrained", "--images", "x.jpg"], "timm/test_vit has no maps(), which visualize needs"),
        (["xs36", "--pretrained", "--images", "x.jpg"], "nobody publishes weights of xs36"),
    ]:
        assert words in refused(arguments, capfd), arguments


def test_a_network_without_maps_has_a_page_of_mistakes(trained: Path, capfd: Capture) -> None:
    network = ["--config", str(REPO / "configs/base.yaml"), "--model.name=timm/test_resnet"]
    main(["fit", *network, *FAST, "--run_name=plain"])
    assert "see its mistakes" in capfd.readouterr().out
    main(["visualize", "plain"])
    first, result, *_, last = capfd.readouterr().out.splitlines()
    assert first.startswith("no attention maps: ")
    assert re.match(r"top-1 \d+\.\d\d % of 10 validation images$", result)
    text, _ = check_page(Path(last))
    assert text.index("Worst mistakes") < text.index("Curves")
    assert "Attention maps" not in text
    assert "has no maps" in refused(["plain", "--images", "mixed/val/owl"], capfd)


def test_a_name_that_is_no_text_is_drawn(trained: Path, capfd: Capture) -> None:
    name = b"mixed/val/owl/" + NO_TEXT + b".png"
    shutil.copy(os.fsencode(next(Path("mixed/val/owl").iterdir())), name)
    main(["visualize", "a", "--images", os.fsdecode(name), "--no_validation"])
    assert Path("logs/a/visualize/index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_weights_of_a_file_see_as_timms_network_does(
    tmp_path: Path, photographs: list[Image.Image], monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("cait_xxs24_224", img_size=64, num_classes=1000).eval()
    torch.nn.init.normal_(theirs.head.weight)  # so that the classes differ
    monkeypatch.chdir(tmp_path)
    save_file(theirs.state_dict(), "timm.safetensors")
    photographs[0].save("china.png")
    transform = create_transform(64, is_training=False, crop_pct=1.0, interpolation="bicubic")
    with torch.no_grad():
        best = theirs(transform(photographs[0])[None]).softmax(dim=1)[0].topk(5)
    names = [ImageNetInfo().index_to_description(index).split(",")[0] for index in best.indices.tolist()]
    expected = ", ".join(f"{name} {value:.1%}" for name, value in zip(names, best.values.tolist(), strict=True))
    main(["visualize", "timm.safetensors", "--name", "xxs24", "--images", "china.png"])
    assert capfd.readouterr().out.splitlines()[0] == f"visualize/china.png  {expected}"
    main(["visualize", "timm.safetensors", "--name=xxs24", "--img_size=96", "--images", "china.png"])
    assert "positions resized from 16 to 36 patches" in check_page(Path("visualize/index.html"))[0]
    for arguments, words in [
        (["timm.safetensors"], "of a file of weights say the model: --name"),
        (["timm.safetensors", "--name=xs24"], "timm.safetensors is of another network"),
        (["timm.safetensors", "--name=xxs24", "--ema"], "holds no moving average"),
        (["china.png", "--name=xxs24"], "china.png cannot be read as weights"),
    ]:
        assert words in refused([*arguments, "--images", "china.png"], capfd)


def test_published_weights_come_through_timm(
    tmp_path: Path, photographs: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("cait_xxs24_224").eval()
    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda entry, pretrained, **_: theirs if pretrained else real(entry))
    photographs[0].save(tmp_path / "china.png")
    monkeypatch.chdir(tmp_path)
    main(["visualize", "xxs24", "--pretrained", "--images", "china.png"])
    text, _ = check_page(Path("visualize/index.html"))
    assert "timm's cait_xxs24_224.fb_dist_in1k" in text
    assert "xxs24, 224 × 224 pixels" in text
