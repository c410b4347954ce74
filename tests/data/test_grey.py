"""Networks of one channel: grey images, learned with and used as timm prepares images of Pillow's mode L."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import SMALL
from modules import FIELDS, trainer
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.models._manipulate import adapt_input_conv
from torch import Tensor

import cait
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import seed_generators
from cait.data.reading import Reading, load_rgb
from cait.data.transforms import CROP_MODES, GREY, Augmentation, Preprocessing
from cait.errors import UserError
from cait.model.weights import load_weights
from cait.train.ema import EMA
from cait.train.module import CaiTModule
from cait.train.step_seed import StepSeed
from cait.train.teacher import Teacher

MEAN, STD = (0.458971,), (0.225609,)
ONE = dict(fields=FIELDS | dict(in_chans=1), lr=5e-3, lr_base_size=None, warmup_epochs=0, drop_path_rate=0.1)
POLICIES = [
    dict(auto_augment="rand-m9-mstd0.5-inc1"),
    dict(auto_augment="3a", color_jitter=[0.4, 0.4, 0.4, 0.5]),
    dict(auto_augment="original"),
    dict(auto_augment="augmix-m5-w4"),
    dict(auto_augment=None, color_jitter=[0.4, 0.4, 0.4, 0.5]),
]


def module(root: Path, **settings: object) -> ImageNetDataModule:
    given: dict = dict(img_size=32, batch_size=4, num_workers=0, repeats=1, in_chans=1)
    return ImageNetDataModule(root=str(root), **(given | settings))


def timms(**settings: object) -> object:
    return create_transform((1, 32, 32), interpolation="bicubic", mean=MEAN, std=STD, **settings)


def seen(path: str) -> Image.Image:
    """An image as viewers show it, in Pillow's mode L."""
    return load_rgb(path).convert("L")


def test_imagenets_mean_and_deviation_are_weighted_as_pillow_weights_colours() -> None:
    for colours, (grey,) in GREY.items():
        in_bytes = (
            Image.new("RGB", (1, 1), tuple(round(255 * value) for value in colours)).convert("L").getpixel((0, 0))
        )
        assert 255 * grey == pytest.approx(in_bytes, abs=0.6)
        assert grey == pytest.approx(np.dot(colours, (0.299, 0.587, 0.114)), abs=1e-6)
    assert [*GREY] == [IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD]


@pytest.mark.parametrize(("given", "mean"), [({}, [*MEAN]), ({"mean": [0.3]}, [0.3]), ({"mean": [0.3] * 3}, [0.3])])
def test_mean_and_deviation_are_one_number(given: dict, mean: list[float]) -> None:
    how = ImageNetDataModule(in_chans=1, **given).preprocessing
    assert (how.mean, how.std) == (mean, [*STD])


def test_each_image_is_read_as_pillows_grey(two_classes: Path) -> None:
    for path in two_classes.rglob("*.*"):
        for shrink in (None, 30):
            read = load_rgb(path, reading=Reading(in_chans=1, shrink=shrink))
            grey = np.asarray(load_rgb(path, reading=Reading(shrink=shrink)).convert("L"))
            np.testing.assert_array_equal(np.asarray(read), grey[..., None].repeat(3, axis=2))
    sixteen = Image.fromarray(np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64))
    np.testing.assert_array_equal(np.asarray(load_rgb(sixteen))[..., 0], np.asarray(sixteen) >> 8)
    assert load_rgb(sixteen, reading=Reading(in_chans=1)).tobytes() == load_rgb(sixteen).tobytes()


@pytest.mark.parametrize("fit", CROP_MODES)
def test_evaluation_pixels_are_timms_of_grey_images(two_classes: Path, fit: str) -> None:
    data = module(two_classes, fit=fit, crop_pct=0.9)
    data.setup("validate")
    transform = timms(crop_pct=0.9, crop_mode=CROP_MODES[fit])
    for index, (path, _) in enumerate(data.val_images.samples):
        pixels = data.normalize_and_erase(data.val_images[index][0][None])[0]
        assert torch.equal(pixels, transform(seen(path)))


@pytest.mark.parametrize("jitter", [None, [0.4, 0.4, 0.4, 0.5]])
def test_training_pixels_are_timms_of_grey_images(two_classes: Path, jitter: list[float] | None) -> None:
    policy: dict = dict(auto_augment=None, color_jitter=jitter)
    data = module(two_classes, backend="timm", erase_prob=0.5, **policy)
    data.setup("fit")
    transform = timms(is_training=True, re_prob=0.5, re_mode="pixel", **policy)
    for index, (path, _) in enumerate(data.train_images.samples):
        for repeat in range(3):
            pixels, _ = data.train_images[(0, index, repeat)]
            seed_generators(cait.seeds.image(0, 0, index, repeat))
            assert torch.equal(pixels, transform(seen(path)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("fit", "train_crop"), [("crop", "resized"), ("pad", "resized"), ("squash", "simple")])
def test_no_operation_colours_grey(two_classes: Path, policy: dict, fit: str, train_crop: str) -> None:
    settings: dict = policy | dict(fit=fit, train_crop=train_crop, erase_prob=0.0)
    timm, fast = (module(two_classes, backend=backend, **settings) for backend in ("timm", "auto"))
    everything = Augmentation(**policy, train_crop=train_crop, erase_prob=0.0).transform(timm.preprocessing)
    everything.transforms.pop()  # what takes one of the three channels
    for data in (timm, fast):
        data.setup("fit")
    for index in range(len(timm.train_images)):
        for repeat in range(4):
            pixels, _ = fast.train_images[(0, index, repeat)][0]
            assert (pixels == pixels[..., :1]).all()
            seed_generators(100 * index + repeat)
            values = everything(timm.preprocessing.open(timm.train_images.samples[index][0], "", False))
            assert (values == values[:1]).all()
            assert timm.train_images[(0, index, repeat)][0].shape == (1, 32, 32)


def test_a_batch_is_normalised_erased_and_mixed(two_classes: Path) -> None:
    data = module(two_classes, erase_prob=1.0)
    data.setup("fit")
    pixels, labels = next(iter(data.train_dataloader()))
    assert pixels.shape == (4, 1, 32, 32)
    assert pixels.is_contiguous()
    mixed, shares = data.mixing(pixels, labels, 2, seed=0)
    assert (mixed.shape, shares.shape) == ((4, 1, 32, 32), (4, 2))


@pytest.mark.parametrize("fit", CROP_MODES)
def test_a_checkpoint_prepares_images_as_its_training_did(fit: str, two_classes: Path, tmp_path: Path) -> None:
    data, net = module(two_classes, fit=fit, mixup=0.0, cutmix=0.0), CaiTModule(**ONE)
    run = trainer(max_steps=1)
    run.fit(net, data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    hparams = torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]
    assert (hparams["mean"], hparams["std"]) == ([*MEAN], [*STD])
    path = data.val_images.samples[1][0]
    expected = timms(crop_pct=1.0, crop_mode=CROP_MODES[fit])(seen(path))
    (evaluated, labels), *_ = data.val_dataloader()
    assert torch.equal(data.on_after_batch_transfer((evaluated, labels), 0)[0][1], expected)
    for loaded in (
        CaiTModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True),
        cait.load(tmp_path / "x.ckpt"),
    ):
        assert torch.equal(loaded.transform(path), expected)
        (best, *_), *_ = loaded.predict([path])
        assert best["probability"] == pytest.approx(loaded.eval()(expected[None]).softmax(dim=1).max().item())


class Leave(EMA):
    """A moving average that also saves after three steps."""

    def on_train_batch_end(self, trainer: object, *args: object) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_a_run_that_was_left_ends_with_the_same_bits(two_classes: Path, tmp_path: Path) -> None:
    (leave := Leave(0.9)).path = tmp_path / "x.ckpt"
    ends: list[dict[str, Tensor]] = []
    for average, checkpoint in ((leave, None), (EMA(0.9), leave.path)):
        net = CaiTModule(**ONE)
        run = trainer(callbacks=[StepSeed(0), average], max_epochs=2)
        torch.manual_seed(len(ends))
        run.fit(net, module(two_classes), ckpt_path=checkpoint)
        assert run.global_step == 6
        ends.append(net.state_dict())
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def test_the_command_line_needs_the_field_alone(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--data.num_workers=0"]
    main(["fit", *SMALL, *short, f"--data.root={digits_root}", "--model.fields.in_chans=1", "--run_name=one"])
    main(["resume", "one", "--trainer.max_steps=5"])
    hparams = torch.load("logs/one/checkpoints/last.ckpt", weights_only=True)["hyper_parameters"]
    assert ([*hparams["mean"]], [*hparams["std"]]) == ([*MEAN], [*STD])
    assert "in_chans" not in Path("logs/one/config.yaml").read_text().partition("\ndata:")[2]
    main(["eval", "one"])
    assert json.loads(Path("logs/one/evaluation.json").read_text())["raw"]["images"] == 360
    capsys.readouterr()
    main(["predict", "one", str(digits_root / "val/3"), "--format=jsonl", "--top_k=1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = cait.load("logs/one").predict([row["path"] for row in rows], top_k=1)
    for row, (best, *_) in zip(rows, expected, strict=True):
        assert row["predictions"][0]["index"] == best["index"]
        assert row["predictions"][0]["probability"] == pytest.approx(best["probability"], abs=1e-5)
    main(["export", "one", "--format=torch_export"])
    torch.export.load("logs/one/export/model.pt2", extra_files=(extra := {"metadata.json": ""}))
    told = json.loads(extra["metadata.json"])
    assert (told["in_chans"], told["mean"], told["std"]) == (1, [*MEAN], [*STD])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--model.fields.in_chans=2"], "--model.fields.in_chans 2: images have 3 channels (RGB) or 1 (grey)"),
        (["--model.fields={in_chans: 4}"], "--model.fields.in_chans 4: images have 3 channels (RGB) or 1 (grey)"),
        (["--model.fields.in_chans=1", "--data.mean=[0.1,0.2,0.3]"], "mean and std take one number each"),
        (["--data.in_chans=1"], "give --model.fields.in_chans"),
        (["--data.mean=[0.5]"], "mean and std take three numbers each"),
    ],
)
def test_other_channels_are_refused_in_one_line(
    settings: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, *settings])
    assert stop.value.code == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert words in line
    assert not Path("logs").exists()


def test_a_module_and_a_data_module_of_other_channels_are_refused(two_classes: Path) -> None:
    with pytest.raises(UserError, match="the network has in_chans 1, the data module 3: give both the same"):
        trainer(max_steps=1).fit(CaiTModule(**ONE), module(two_classes, in_chans=3))


def test_weights_of_three_channels_are_added_up_as_timm_adds_them(tmp_path: Path) -> None:
    colour = cait.create_model("xxs24", img_size=8, num_classes=7, **FIELDS)
    torch.save(colour.state_dict(), tmp_path / "x.pth")
    grey = cait.create_model("xxs24", img_size=8, num_classes=7, **FIELDS, in_chans=1)
    notes = load_weights(grey, tmp_path / "x.pth")
    assert notes == ["the three channels of patch_embed.proj.weight added up for grey images"]
    assert torch.equal(grey.patch_embed.proj.weight, adapt_input_conv(1, colour.patch_embed.proj.weight))
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(grey.eval()(images), colour.eval()(images.expand(-1, 3, -1, -1)), atol=1e-5)
    torch.save(grey.state_dict(), tmp_path / "grey.pth")
    with pytest.raises(UserError, match=r"another network: patch_embed\.proj\.weight is"):
        load_weights(colour, tmp_path / "grey.pth")


def test_a_teacher_of_colours_sees_grey_in_all_channels() -> None:
    teacher = Teacher(torch.nn.Identity(), (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD), None, (MEAN, STD))
    pixels = torch.rand(2, 1, 8, 8)
    normal = create_transform(8).transforms[-1]
    got = teacher((pixels - torch.tensor(MEAN)) / torch.tensor(STD))
    assert torch.allclose(got, normal(pixels.expand(-1, 3, -1, -1)), atol=1e-5)


def test_no_other_preprocessing_changed() -> None:
    how = Preprocessing(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    assert (how.mean, how.std, how.reading.in_chans) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], 3)
    assert how.timms()["mean"] == (0.1, 0.2, 0.3)
