"""Own photographs: layouts of folders, the split, the recipe that is chosen, balance, and one run of it all."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from harness import REPO
from PIL import Image

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.loader import Balanced, TrainBatchSampler, occurrences, shares
from cait.data.reading import AS_SEEN, Reading, load_rgb
from cait.data.source import open_source
from cait.errors import UserError
from cait.extras.recipe import arguments, replace_arguments
from cait.extras.recipe.rules import choose
from cait.extras.recipe.survey import Machine, Survey, survey, this_machine
from cait.extras.recipe.trial import Pace, Settings, Trial
from cait.extras.recipe.weights import Weights
from cait.extras.words import duration
from cait.run.program import Program
from cait.train.metrics import EvalMetrics
from cait.train.module import CaiTModule

TWO_CORES = Machine(2)


@dataclass(frozen=True)
class Typical(Trial):
    """Measures of a machine that takes so long for an image of 64 pixels, whatever the network."""

    image: float = 4e-3
    pace: Pace | None = None
    scores: tuple[float, float] | None = None

    def begun(self) -> float:
        return 9.0

    def step(self, held: Settings, size: int) -> float | None:
        return None if "no_such" in held.get("model.name", "") else self.image * (size / 64) ** 2

    def domain(self, held: Settings) -> tuple[float, float] | None:
        return self.scores

    def run(self, held: Settings) -> Pace | None:
        return self.pace or Pace(self.image * (held.get("data.img_size", 64) / 64) ** 2)


PUBLISHED = Weights("timm's", {"model.pretrained": True})
PHOTOGRAPHS = Survey({"cat": 300, "dog": 280}, 60, side=480, megapixels=0.4, grey=False)
DIGITS = Survey({str(digit): 600 for digit in range(10)}, 600, side=28, megapixels=0.0008, grey=True)


def fill(root: Path, images: dict[str, int], size: int = 24, grey: bool = False, suffix: str = ".png") -> Path:
    """Class folders of noise around a colour of their own."""
    rng = np.random.default_rng(0)
    for label, (name, count) in enumerate(images.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 80, (size, size, 3)) + np.eye(3, dtype=int)[label % 3] * 150
            image = Image.fromarray(pixels.astype(np.uint8))
            (image.convert("L") if grey else image).save(root / name / f"{number:03d}{suffix}")
    return root


def listed(root: Path, **settings) -> list[list[str]]:
    source = open_source(str(root), **settings)
    return [[str(Path(path).relative_to(root)) for path, _ in samples] for samples in (source.train, source.val)]


def test_names_nests_hidden_files_and_gifs(tmp_path: Path) -> None:
    """What lies in people's folders: every image is taken, and nothing else."""
    names = ["it's mine", "Vögel und so", 'the "best" 車']
    for name in names:
        fill(tmp_path, {f"{name}/2024/summer": 2, name: 1})
        fill(tmp_path, {name: 1}, suffix=".GIF")
        (tmp_path / name / "._000.png").write_bytes(b"of macOS")
        (tmp_path / name / "notes.txt").write_text("stray")
        fill(tmp_path / name, {".thumbnails": 1})
    fill(tmp_path, {".hidden": 2, "__MACOSX": 2})
    Image.new("RGB", (8, 8)).save(tmp_path / "beside.png")
    source = open_source(str(tmp_path))
    assert source.class_names == sorted(names)
    assert (len(source.train), len(source.val)) == (9, 3)
    assert source.left_out["images beside the class folders"] == ["beside.png"]
    assert [Path(path).name for path in source.left_out["other files"]] == ["notes.txt"] * 3
    data = ImageNetDataModule(
        root=str(tmp_path), img_size=16, batch_size=2, mixup=0, cutmix=0, repeats=1, num_workers=0
    )
    data.setup("fit")
    assert len([labels for _, labels in data.train_dataloader()]) == 4


def test_photographs_of_telephones_are_read(tmp_path: Path, photographs: list[Image.Image]) -> None:
    pytest.importorskip("pillow_heif")
    turned = Image.Exif()
    turned[0x0112] = 6
    for label, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        photographs[label].save(tmp_path / name / "1.HEIC", "HEIF", quality=95, exif=turned.tobytes())
        photographs[label].save(tmp_path / name / "2.avif", quality=95)
    source = open_source(str(tmp_path))
    assert (len(source.train), len(source.val)) == (2, 2)
    for path, label in (*source.train, *source.val):
        photo = photographs[label]
        expected = photo.transpose(Image.Transpose.ROTATE_270) if path.endswith("HEIC") else photo
        assert np.abs(np.asarray(load_rgb(path), int) - np.asarray(expected, int)).mean() < 4


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"a": 3}, "holds 1 class folder(s), at least 2 are needed"),
        ({"a": 3, "b": 1}, "is the only image of its class; two are needed"),
        ({"a": 2, "b": 2}, "2 training images are too few to learn from"),
        ({}, "does not exist; name yours with --data.root"),
    ],
)
def test_what_cannot_be_trained_on_is_told_in_a_line(
    counts: dict[str, int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = fill(tmp_path / "photos", counts)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--data.root", str(root)])
    assert stop.value.code == 2
    assert words in (told := capsys.readouterr().err)
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("size", "halved"),
    [((99, 300), (99, 300)), ((100, 300), (50, 150)), ((401, 800), (51, 100)), ((1700, 1601), (54, 51))],
)
def test_images_are_halved_while_their_shorter_side_keeps_so_many_pixels(
    size: tuple[int, int], halved: tuple[int, int], photographs: list[Image.Image]
) -> None:
    photo, shrunk = photographs[0].resize(size), Reading(shrink=50)
    assert load_rgb(photo, reading=shrunk).size == halved
    means = np.asarray(photo, np.float64)
    while min(means.shape[:2]) >= 100:  # the mean of four pixels, or of two or one at an odd side
        padded = np.pad(means, [(0, side % 2) for side in means.shape[:2]] + [(0, 0)], mode="edge")
        means = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2, 3).mean((1, 3))
    np.testing.assert_allclose(np.asarray(load_rgb(photo, reading=shrunk)), means, atol=3)


def test_the_split_can_be_written_down_and_used_again(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", {"a": 20, "b": 2})
    val = listed(root)[1]
    assert [Path(name).parent.name for name in val] == ["a", "a", "b"]
    kept = tmp_path / "validation.csv"
    with kept.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "class"), *((name, "") for name in val)])
    fill(root, {"a": 30})  # more images: a new split would hold out others
    assert listed(root)[1] != val
    again = listed(root, val_list=str(kept))
    assert again[1] == val
    assert not set(val) & set(again[0])
    (root / val[0]).unlink()
    with pytest.raises(UserError, match="names images that are not in"):
        listed(root, val_list=str(kept))


def surveyed(root: Path, reading: Reading = AS_SEEN) -> Survey:
    source = open_source(str(root))
    return survey(source.train, source.val, source.class_names, reading)


def test_the_survey_counts_and_reads_the_images_as_the_run_will(tmp_path: Path) -> None:
    for name, grey in (("grey", True), ("colour", False)):
        root = fill(tmp_path / name, {"a": 6, "b": 3}, grey=grey)
        found = surveyed(root)
        assert (found.counts, found.val, found.side, found.grey) == ({"a": 5, "b": 2}, 2, 24, grey)
        pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in root.rglob("*.png")]) / 255
        assert np.allclose(found.mean, pixels.mean((0, 1, 2)), atol=0.1)
    as_grey = surveyed(root, Reading(in_chans=1))
    assert as_grey.grey
    assert as_grey.mean[0] == pytest.approx(np.dot(found.mean, (0.299, 0.587, 0.114)), abs=0.005)
    for name in ("a", "b"):
        for number in range(4):  # black where nobody sees it
            (tmp_path / "clear" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(tmp_path / "clear" / name / f"{number}.png")
    for background, mean in (("white", 1.0), (None, 0.0)):
        assert surveyed(tmp_path / "clear", Reading(background=background)).mean == (mean,) * 3


def settings(
    folder: Survey, machine: Machine = TWO_CORES, weights: Weights | None = None, minutes: float = 3, **given
) -> dict:
    named = {key.replace("__", "."): value for key, value in given.items()}
    return choose(folder, machine, named, Typical(), weights, minutes).settings


GREY, RANDOM = replace(PHOTOGRAPHS, grey=True), "rand-m6-mstd0.5-inc1"


def uneven(few: int, many: int = 300, **figures) -> Survey:
    return replace(PHOTOGRAPHS, counts={"many": many, "few": few}, **figures)


@pytest.mark.parametrize(
    ("folder", "given", "expected"),
    [
        (DIGITS, {}, {"data.img_size": 32, "data.hflip": 0.0, "data.auto_augment": None}),
        (PHOTOGRAPHS, {}, {"data.img_size": 64, "data.hflip": 0.5, "data.auto_augment": RANDOM}),
        (GREY, {}, {"data.hflip": 0.0, "data.auto_augment": None, "data.scale": [0.7, 1.0]}),
        (replace(DIGITS, side=48), {}, {"data.img_size": 48, "data.hflip": 0.0, "model.fields.patch_size": 8}),
        (uneven(13, 1300, grey=True), {}, {"data.auto_augment": RANDOM}),
        (uneven(200, 1300, grey=True), {}, {"data.auto_augment": None}),
        (uneven(13, 1300, grey=True, side=28), {}, {"data.auto_augment": None}),
        (PHOTOGRAPHS, {}, {"model.fields.stem": "pooled", "model.fields.depth": 1}),
        (PHOTOGRAPHS, {"model.fields.stem": "patch"}, {"model.fields.depth": 4}),
        (uneven(150), {}, {"data.balance": "absent"}),
        (uneven(60), {}, {"data.balance": "sqrt"}),
        (uneven(30), {}, {"data.balance": "full", "best_metric": "val/acc1_macro"}),
    ],
)
def test_the_rules_go_by_the_images_and_the_classes(folder: Survey, given: dict, expected: dict) -> None:
    found = choose(folder, TWO_CORES, given, Typical()).settings
    assert {name: found.get(name, "absent") for name in expected} == expected


def test_large_images_are_halved() -> None:
    large = replace(PHOTOGRAPHS, side=3000, megapixels=12.0)
    assert settings(large)["data.shrink"] == 128
    assert settings(large, data__img_size=96)["data.shrink"] == 192
    small = replace(PHOTOGRAPHS, side=250, megapixels=0.1)
    assert "data.shrink" not in settings(small)
    assert settings(replace(small, megapixels=2.3))["data.shrink"] == 128  # a few are huge


def test_the_blocks_see_few_patches() -> None:
    gpu, sizes = Machine(16, 1, True), (28, 32, 36, 48, 64, 96, 2, 1)
    patches = [settings(PHOTOGRAPHS, data__img_size=size)["model.fields.patch_size"] for size in sizes]
    assert patches == [4, 8, 4, 8, 16, 16, 1, 1]
    patches = [settings(PHOTOGRAPHS, gpu, data__img_size=size)["model.fields.patch_size"] for size in sizes]
    assert patches == [2, 2, 3, 3, 4, 6, 1, 1]
    assert settings(PHOTOGRAPHS, gpu)["model.fields.depth"] == 12


def test_what_is_given_wins_and_the_rules_go_on_from_it() -> None:
    found = settings(PHOTOGRAPHS, data__img_size=96, trainer__max_epochs=7, model__optimizer="adamw")
    assert found.keys().isdisjoint({"data.img_size", "trainer.max_epochs", "model.optimizer"})
    assert 96 % found["model.fields.patch_size"] == 0
    assert (found["model.warmup_epochs"], found["model.lr"]) == (0.7, 1e-3)
    assert "trainer.max_epochs" not in settings(PHOTOGRAPHS, trainer__max_steps=5)
    large = settings(PHOTOGRAPHS, model__name="s24")
    assert {"model.fields.embed_dim", "model.fields.depth"}.isdisjoint(large)
    assert not any(key.startswith("model.fields") for key in settings(PHOTOGRAPHS, model__name="timm/resnet18"))


def test_minutes_count_for_any_number_of_images() -> None:
    """There is no step at a number, and an epoch that does not fit is not begun."""
    for images in (50_000, 99_999, 100_000, 1_281_167):
        folder, pace = replace(PHOTOGRAPHS, counts={"a": images, "b": 20}, val=5000), Pace(2e-3)
        recipe = choose(folder, TWO_CORES, {}, Typical(pace=pace))
        steps = recipe.settings.get("trainer.max_steps", recipe.settings["trainer.max_epochs"] * images // 64)
        assert steps * 64 * pace.image < 180
        assert recipe.settings["model.fields.depth"] == 1
    assert dict(recipe.lines)["warning"].startswith("1,281,187 images are many")


@pytest.mark.parametrize(
    ("name", "side", "size"),
    [("timm/resnet10t", 28, 64), ("timm/resnet10t", 480, 96), ("timm/no_such_network", 48, 224)],
)
def test_other_networks_see_images_for_which_there_is_time(name: str, side: int, size: int) -> None:
    recipe = choose(replace(PHOTOGRAPHS, side=side), TWO_CORES, {"model.name": name}, Typical())
    found = recipe.settings
    assert (found["data.img_size"], found["model.lr"]) == (size, 1e-3)
    assert found["data.mean"] == list(PHOTOGRAPHS.mean)
    assert found.keys().isdisjoint({"model.optimizer", "model.solve_head"})
    assert not any(key.startswith("model.fields") for key in found)


@pytest.mark.parametrize(
    ("image", "side", "size"),
    [(4e-3, 480, 224), (8e-3, 480, 192), (3e-2, 480, 128), (1e-3, 48, 128), (1e-3, 90, 160)],
)
def test_weights_see_the_largest_images_for_which_there_is_time(image: float, side: int, size: int) -> None:
    folder = replace(PHOTOGRAPHS, side=side)
    recipe = choose(folder, TWO_CORES, {"model.name": "timm/resnet10t"}, Typical(image), PUBLISHED)
    assert recipe.settings["data.img_size"] == size
    assert "data.mean" not in recipe.settings


@pytest.mark.parametrize(
    ("by_default", "scores", "starts", "words"),
    [
        (True, (90.0, 40.0), True, ""),
        (True, (48.0, 80.0), False, "so the network starts from scratch"),
        (False, (48.0, 80.0), True, "a run is likely to end higher"),
        (True, None, True, ""),
    ],
)
def test_weights_that_tell_less_than_the_pixels_are_left(
    by_default: bool, scores: tuple[float, float] | None, starts: bool, words: str
) -> None:
    weights = Weights("timm's", {"model.pretrained": True, "model.name": "timm/resnet10t"}, by_default)
    recipe = choose(PHOTOGRAPHS, TWO_CORES, {}, Typical(scores=scores), weights)
    assert recipe.settings.get("model.pretrained", False) is starts
    assert words in " ".join(text for topic, text in recipe.lines if topic == "weights")


def test_the_head_is_solved_and_the_rest_trains_gently() -> None:
    recipe = choose(PHOTOGRAPHS, TWO_CORES, {"model.name": "timm/resnet10t"}, Typical(), PUBLISHED)
    found = recipe.settings
    assert (found["model.freeze_norm"], found["model.lr"], found["data.mixup"]) == (True, 1e-4, 0.0)
    assert "model.freeze" not in found
    slow = choose(PHOTOGRAPHS, TWO_CORES, {"model.name": "timm/resnet10t"}, Typical(1.0), PUBLISHED)
    assert slow.settings["model.freeze"] is True
    assert "because not one epoch fits" in dict(slow.lines)["frozen"]
    unsolved = {"model.name": "timm/resnet10t", "model.solve_head": False}
    assert choose(PHOTOGRAPHS, TWO_CORES, unsolved, Typical(), PUBLISHED).settings["model.lr"] == 3e-4


def test_the_measured_pace_sets_the_length_and_the_minutes_are_kept() -> None:
    for minutes in (1, 3, 10):
        for image, val in ((1e-3, 60), (0.05, 1200), (1e-4, 60)):
            pace, folder = Pace(image, start=15.0), replace(PHOTOGRAPHS, val=val)
            recipe = choose(folder, TWO_CORES, {}, Typical(pace=pace), minutes=minutes)
            epochs, every = (recipe.settings[f"trainer.{name}"] for name in ("max_epochs", "check_val_every_n_epoch"))
            if "trainer.max_steps" in recipe.settings:
                continue
            seconds = pace.seconds(epochs, folder.images, val, epochs / every)
            assert seconds <= 60 * minutes or epochs == 1
            assert f"about {duration(10 * round(seconds / 10))} on 2 cores, measured" in dict(recipe.lines)["length"]
    few, many = (settings(replace(PHOTOGRAPHS, counts={"a": 4000, "b": 4000}), minutes=minutes) for minutes in (3, 9))
    assert many["trainer.max_epochs"] > 2.5 * few["trainer.max_epochs"]


def test_a_trial_measures_the_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cait.extras.recipe import trial

    monkeypatch.chdir(tmp_path)
    root = fill(tmp_path / "photos", {"a": 40, "b": 40}, size=80)
    folder = surveyed(root, Reading(in_chans=1))
    quick = {"data.num_workers": 0, "trainer.accelerator": "cpu", "data.root": str(root)}
    depths: list[int] = []
    monkeypatch.setattr(trial, "SECONDS", 0.3)
    monkeypatch.setattr(
        trial, "CaiTModule", lambda **settings: depths.append(settings["fields"]["depth"]) or CaiTModule(**settings)
    )
    one = {"depth": 12, "in_chans": 1}
    for given in ({"model.fields.depth": 1, "model.fields.in_chans": 1}, {"model.fields": one}):  # in either spelling
        given = quick | given | {"data.shrink": 20}
        pace = Trial().run(choose(folder, TWO_CORES, given, Typical()).held)
        assert pace is not None
        assert min(pace.image, pace.start) > 0
    assert depths == [1, 12]
    named = [f"{path.relative_to(root)},{path.parent.name};any" for path in sorted(root.glob("*/*"))]
    Path("several.csv").write_text("\n".join(["path,label", *named]))
    several = quick | {"data.labels": "several.csv", "data.multi_label": True}
    assert Trial().run(choose(folder, TWO_CORES, several, Typical()).held) is not None
    assert Trial().run(choose(folder, TWO_CORES, quick | {"model.optimizer": "nope"}, Typical()).held) is None
    small, large = (Trial().step(quick | {"model.name": "timm/resnet10t"}, size) for size in (32, 128))
    assert 0 < small < large
    assert Trial().step(quick | {"model.name": "timm/no_such_network"}, 64) is None


def test_minutes_are_taken_and_wrong_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fill(tmp_path / "photos", {"a": 6, "b": 6})
    given = ["--data.root", str(root), "--trainer.max_steps=2"]
    chosen = arguments.add_recipe([*given, "--minutes", "10"], Program())
    assert chosen == arguments.add_recipe(given, Program())
    for wrong in ("0", "soon"):
        with pytest.raises(UserError, match="--minutes must be a number above 0"):
            arguments.add_recipe([*given, f"--minutes={wrong}"], Program())
    with pytest.raises(UserError, match="there is no setting minuts; did you mean --minutes"):
        replace_arguments("fit", [*given, "--minuts=3"], Program())
    digits = f"--config={REPO / 'configs/digits.yaml'}"
    named = [digits, "--run_name", "minutes"]
    assert replace_arguments("fit", named, Program()) == named
    with pytest.raises(UserError, match="--minutes is for a folder of images"):
        arguments.add_recipe([digits, "--minutes=2"], Program())


@pytest.mark.parametrize("given", [None, 97, 100, 120])
def test_the_last_epoch_is_validated(given: int | None) -> None:
    found = {"trainer.max_epochs": given} | settings(PHOTOGRAPHS, **({"trainer__max_epochs": given} if given else {}))
    assert found["trainer.max_epochs"] % found["trainer.check_val_every_n_epoch"] == 0
    assert found["trainer.check_val_every_n_epoch"] == {97: 1, 100: 2, 120: 4}.get(given or 0, 1) or not given


def test_settings_are_read_in_every_spelling() -> None:
    assert arguments.given_settings(["--data.root=2024"]) == {"data.root": "2024"}
    assert arguments.given_settings(["--data.background", "#8090a0"]) == {"data.background": "#8090a0"}
    words = ["--data.root", "a b", "--model.lr=1e-3", "--model.fields", "{depth: 2}", "--print_config", "--x=null"]
    named = {"data.root": "a b", "model.lr": 1e-3, "print_config": True, "x": None}
    fields = {"model.fields": {"depth": 2}, "model.fields.depth": 2}
    assert arguments.given_settings(words) == named | fields
    assert arguments.without(words, "model.fields") == [*words[:3], *words[5:]]


def test_an_overlay_leaves_the_choice_and_a_configuration_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ["--data.root", str(fill(tmp_path / "photos", {"a": 6, "b": 6}))]
    overlay, digits = (f"--config={REPO / 'configs' / name}" for name in ("trainer/debug.yaml", "digits.yaml"))
    program = Program()
    chosen = arguments.add_recipe([overlay, *root], program)
    name = program.default_name
    assert name == "photos"
    given = arguments.given_settings(chosen)
    assert "model.fields.patch_size" in given
    assert "trainer.max_epochs" not in given  # the overlay's
    capsys.readouterr()
    assert arguments.add_recipe([digits, *root], Program()) == [digits, *root]
    wrong = [*root, "--data.img_size", "abc"]
    assert arguments.add_recipe(wrong, Program()) == wrong  # the parser tells


def keys(rank: int = 0, world: int = 1, balance: str = "full", first: int = 0) -> list[list[tuple]]:
    labels = torch.tensor([0] * 90 + [1] * 10)
    sampler = TrainBatchSampler(100, 10, 3, rank=rank, world_size=world, order=Balanced(labels, balance))
    sampler.epoch, sampler.first_batch = 2, first
    return list(sampler)


@pytest.mark.parametrize(("balance", "small"), [("full", 50), ("sqrt", 25)])
def test_an_epoch_shares_out_the_classes_and_repeats_no_key(balance: str, small: int) -> None:
    flat = [key for batch in keys(balance=balance) for key in batch]
    assert sum(index >= 90 for _, index, _ in flat) == small
    assert len({*flat}) == len(flat) == 100
    times = Counter(index for _, index, _ in flat if index >= 90)
    assert max(times.values()) - min(times.values()) <= 1


def test_the_balanced_order_is_the_same_for_all_processes_and_from_any_step() -> None:
    whole = keys()
    parts = [keys(rank, 2) for rank in range(2)]
    assert [key for batches in zip(*parts, strict=True) for pair in zip(*batches, strict=True) for key in pair] == [
        key for batch in whole for key in batch
    ]
    assert keys(first=7) == whole[7:]
    assert shares([90, 10], 0.5) == [75, 25]
    assert occurrences(torch.tensor([5, 7, 5, 5])).tolist() == [0, 0, 1, 2]


def test_a_balanced_checkpoint_is_not_resumed_in_another_order(tmp_path: Path) -> None:
    how: dict = dict(root=str(fill(tmp_path, {"a": 6, "b": 3})), img_size=16, batch_size=2, repeats=1)
    balanced, plain = (ImageNetDataModule(**how, balance=balance) for balance in ("sqrt", None))
    assert balanced.state_dict()["depends_on"] != plain.state_dict()["depends_on"]
    assert balanced.class_counts() == [5, 2]


def test_the_mean_over_the_classes_leaves_out_those_without_images() -> None:
    from sklearn.metrics import recall_score

    metrics = EvalMetrics(4, per_class=True)
    logits, labels = torch.randn(50, 4), torch.randint(0, 3, (50,))
    metrics.update(logits[:20], labels[:20])
    metrics.update(logits[20:], labels[20:])
    value = metrics.compute("val")["val/acc1_macro"].item()
    recall = recall_score(labels, logits.argmax(1), labels=[0, 1, 2], average="macro")
    assert value == pytest.approx(100 * recall, rel=1e-4)
    assert metrics.per_class is not None
    assert metrics.per_class[:, 0].tolist() == torch.bincount(labels, minlength=4).tolist()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (timm.create_model("test_resnet", num_classes=3).state_dict(), "; --model.name says which network to train"),
        ({"a.weight": torch.zeros(3)}, "in the model; --model.name says which network to train, here xxs24"),
    ],
)
def test_weights_of_another_network_are_refused_before_anything_is_measured(
    state: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "photos", {"a": 12, "b": 12})
    torch.save(state, "w.pth")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--data.root=photos", "--from=w.pth"])
    out, err = capfd.readouterr()
    assert (stop.value.code, out) == (2, "")  # not a line of the recipe, which a trial measures
    assert err.startswith("cait: error: w.pth is of another network: ")
    assert words in err
    assert err.count("\n") == 1
    assert not Path("logs").exists()


BRIEF = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--data.num_workers=0", "--model.fields.depth=1"]


def test_one_command_trains_on_a_folder_and_another_goes_on_from_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "my photos", {"it's": 24, "ä ö": 6})
    main(["fit", "--data.root", "my photos", *BRIEF])
    output = capfd.readouterr().out
    chosen = output[: output.index("Any setting")]
    assert max(map(len, chosen.splitlines())) <= 80
    run = tmp_path / "logs" / "my-photos"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["data"]["balance"], config["best_metric"]) == ("sqrt", "val/acc1_macro")
    assert config["model"]["fields"]["depth"] == 1  # given; the others were chosen
    assert config["model"]["fields"]["embed_dim"] == 96
    held = list(csv.DictReader((run / "validation.csv").open(encoding="utf-8")))
    assert Counter(row["class"] for row in held) == {"it's": 2, "ä ö": 1}

    # The folder grows: the run keeps the images that it held out, and is scored on them alone.
    fill(tmp_path / "my photos" / "ä ö", {".": 8}, suffix=".bmp")  # beside those that were held out
    with pytest.raises(SystemExit):
        main(["resume", "my-photos", "--trainer.max_epochs=5"])
    assert "training pictures" in capfd.readouterr().err
    main(["eval", "my-photos"])
    scores = json.loads((run / "evaluation.json").read_text())["raw"]
    assert scores["images"] == 3
    assert f"val/acc1_macro {scores['acc1_macro']:.2f} %" in output

    fill(tmp_path / "my photos", {"new": 6})
    brief = ["--data.balance=null", "--trainer.max_steps=1", "--baselines=false"]
    main(["fit", "--data.root=my photos", "--from", "my-photos", *BRIEF, *brief, "--run_name=second"])
    assert "the head starts anew" in caplog.text


@pytest.mark.parametrize(("capability", "fast"), [(7, False), (8, True)])  # T4, V100 and RTX 20; A100
def test_a_gpu_that_emulates_bfloat16_trains_in_float32(
    capability: int, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=capability))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)  # the emulation
    machine = this_machine({})
    assert (machine.gpus, machine.fast_bf16) == (1, fast)
    chosen = choose(PHOTOGRAPHS, machine, {}, Typical()).settings
    assert chosen.get("trainer.precision") == ("bf16-mixed" if fast else None)
