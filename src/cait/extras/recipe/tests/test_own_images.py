"""Own photographs: layouts of folders, the split, the recipe that is chosen, balance, and one run of it all."""

import csv
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from harness import REPO, rows
from networks import needs_cait
from PIL import Image

from cait.cli import main
from cait.cli.options import Line
from cait.data.datamodule import ImageNetDataModule
from cait.data.folder import not_listed
from cait.data.listing import OTHER
from cait.data.loader import Balanced, TrainBatchSampler, occurrences, shares
from cait.data.reading import AS_SEEN, Reading, load_image
from cait.data.source import open_source
from cait.errors import UserError
from cait.extras.display import duration
from cait.extras.recipe import add_settings, arguments, figures
from cait.extras.recipe.figures import Machine, Settings, Survey, Trial, survey, this_machine
from cait.extras.recipe.rules import Recipe, choose
from cait.extras.recipe.weights import Weights
from cait.model.config import VARIANTS
from cait.run.program import Program

TWO_CORES = Machine(2)
DIGITS_YAML = f"--config={REPO / 'configs/digits.yaml'}"


@dataclass(frozen=True)
class Typical(Trial):
    """Measures of a machine that takes so long for an image of 64 pixels, whatever the network."""

    image: float = 4e-3
    has_head: bool = False

    def begun(self) -> float:
        return 9.0

    def takes_head(self, held: Settings, classes: int) -> bool:
        return self.has_head

    def step(self, held: Settings, size: int) -> float | None:
        return None if "no_such" in held.get("model.name", "") else self.image * (size / 64) ** 2


PUBLISHED = Weights("timm's", {"model.pretrained": True})
RESNET = {"model.name": "timm/resnet10t"}
PHOTOGRAPHS = Survey({"cat": 300, "dog": 280}, 60, side=480, gray=False)
DIGITS = Survey({str(digit): 600 for digit in range(10)}, 600, side=28, gray=True)


def fill(root: Path, images: dict[str, int], size: int = 24, gray: bool = False, suffix: str = ".png") -> Path:
    """Class folders of noise around a color of their own."""
    rng = np.random.default_rng(0)
    for label, (name, count) in enumerate(images.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 80, (size, size, 3)) + np.eye(3, dtype=int)[label % 3] * 150
            image = Image.fromarray(pixels.astype(np.uint8))
            (image.convert("L") if gray else image).save(root / name / f"{number:03d}{suffix}")
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


def test_photographs_of_telephones_are_read(tmp_path: Path, photographs: list[Image.Image]) -> None:
    assert not_listed({OTHER: ["a/1.HEIC"]}).startswith("; left out: other files (1): a/1.HEIC; to read .heic")
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
        assert np.abs(np.asarray(load_image(path), int) - np.asarray(expected, int)).mean() < 4


@pytest.mark.parametrize(
    ("size", "halved"),
    [((99, 300), (99, 300)), ((100, 300), (50, 150)), ((401, 800), (51, 100)), ((1700, 1601), (54, 51))],
)
def test_images_are_halved_while_their_shorter_side_keeps_so_many_pixels(
    size: tuple[int, int], halved: tuple[int, int], photographs: list[Image.Image], tmp_path: Path
) -> None:
    photo, shrunk = photographs[0].resize(size), Reading(shrink=50)
    assert load_image(photo, reading=shrunk).size == halved
    means = np.asarray(photo, np.float64)
    while min(means.shape[:2]) >= 100:  # the mean of four pixels, or of two or one at an odd side
        padded = np.pad(means, [(0, side % 2) for side in means.shape[:2]] + [(0, 0)], mode="edge")
        means = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2, 3).mean((1, 3))
    np.testing.assert_allclose(np.asarray(load_image(photo, reading=shrunk)), means, atol=3)
    photo.save(tmp_path / "photo.jpg")
    with Image.open(tmp_path / "photo.jpg") as opened:
        assert load_image(opened, reading=shrunk).size == halved
        assert opened.size == size  # the caller's image is as it was


def test_the_split_can_be_written_down_and_used_again(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", {"a": 20, "b": 2})
    val = listed(root)[1]
    assert [Path(name).parent.name for name in val] == ["a", "a", "b"]
    kept = tmp_path / "validation.csv"
    with kept.open("w", newline="") as file:
        names = [(root / val[0]).absolute(), f"./{val[1]}", *val[2:]]
        csv.writer(file).writerows([("path", "class"), *((name, "") for name in names)])
    fill(root, {"a": 30})  # more images: a new split would hold out others
    assert listed(root)[1] != val
    again = listed(root, val_list=str(kept))
    assert again[1] == val
    assert not set(val) & set(again[0])
    (root / val[0]).unlink()
    with pytest.raises(UserError, match="names images that are not in"):
        listed(root, val_list=str(kept))


def surveyed(root: Path, reading: Reading = AS_SEEN) -> Survey:
    return survey(open_source(str(root)), reading)


def test_the_survey_counts_and_reads_the_images_as_the_run_will(tmp_path: Path) -> None:
    for name, gray in (("gray", True), ("color", False)):
        root = fill(tmp_path / name, {"a": 6, "b": 3}, gray=gray)
        found = surveyed(root)
        assert (found.counts, found.val, found.side, found.gray) == ({"a": 5, "b": 2}, 2, 24, gray)
        pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in root.rglob("*.png")]) / 255
        assert np.allclose(found.mean, pixels.mean((0, 1, 2)), atol=0.1)
    as_grey = surveyed(root, Reading(in_chans=1))
    assert as_grey.gray
    assert as_grey.mean[0] == pytest.approx(np.dot(found.mean, (0.299, 0.587, 0.114)), abs=0.005)
    for name in ("a", "b"):
        for number in range(4):  # black where nobody sees it
            (tmp_path / "clear" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(tmp_path / "clear" / name / f"{number}.png")
    for background, mean in (("white", 1.0), (None, 0.0)):
        assert surveyed(tmp_path / "clear", Reading(background=background)).mean == (mean,) * 3


def recipe(
    folder: Survey = PHOTOGRAPHS,
    given: Settings | None = None,
    measure: Trial = Typical(),
    weights: Weights | None = None,
    minutes: float = 3,
    machine: Machine = TWO_CORES,
) -> Recipe:
    return choose(folder, machine, given or {}, measure, weights, minutes)


GREY, RANDOM = replace(PHOTOGRAPHS, gray=True), "rand-m6-mstd0.5-inc1"
LARGE = replace(PHOTOGRAPHS, side=3000)


def uneven(few: int, many: int = 300, **figures) -> Survey:
    return replace(PHOTOGRAPHS, counts={"many": many, "few": few}, **figures)


OF_CAIT: list = [
    (DIGITS, {}, {"data.img_size": 32, "data.hflip": 0.0, "data.auto_augment": None}),
    (PHOTOGRAPHS, {}, {"data.img_size": 64, "data.hflip": 0.5, "data.auto_augment": RANDOM}),
    (replace(DIGITS, side=48), {}, {"data.img_size": 48, "data.hflip": 0.0, "model.fields.patch_size": 8}),
    (PHOTOGRAPHS, {}, {"model.fields.stem": "pooled", "model.fields.depth": 1, "model.fields.mlp_ratio": 2.0}),
    (DIGITS, {}, {"data.eval_batch_size": 75}),  # each of two cores reads four batches of 600 images
    (PHOTOGRAPHS, {"model.fields.stem": "patch"}, {"model.fields.depth": 4}),
    (LARGE, {}, {"data.shrink": 128}),
    (replace(LARGE, side=250), {}, {"data.shrink": 128}),  # a few may be huge
    (PHOTOGRAPHS, {"data.img_size": 96}, {"data.img_size": "absent", "model.fields.patch_size": 16}),
    (PHOTOGRAPHS, {"model.name": "s24"}, {"model.fields.depth": "absent", "model.fields.embed_dim": "absent"}),
]


@pytest.mark.parametrize(
    ("folder", "given", "expected"),
    [
        (GREY, {}, {"data.hflip": 0.0, "data.auto_augment": None, "data.scale": [0.7, 1.0]}),
        (uneven(13, 1300, gray=True), {}, {"data.auto_augment": RANDOM}),
        (uneven(200, 1300, gray=True), {}, {"data.auto_augment": None}),
        (uneven(13, 1300, gray=True, side=28), {}, {"data.auto_augment": None}),
        (PHOTOGRAPHS, {}, {"data.eval_batch_size": 16, "data.global_batch": True}),
        (uneven(58, 58), {"trainer.accumulate_grad_batches": 4}, {"data.batch_size": 8}),  # of even parts
        (uneven(150), {}, {"data.balance": "absent"}),
        (uneven(60), {}, {"data.balance": "sqrt"}),
        (uneven(30), {}, {"data.balance": "full", "best_metric": "val/acc1_macro"}),
        (LARGE, {"data.img_size": 96}, {"data.shrink": 192}),
        (PHOTOGRAPHS, {"trainer.max_epochs": 97}, {"trainer.check_val_every_n_epoch": 1}),  # the last is validated
        (PHOTOGRAPHS, {"trainer.max_epochs": 120}, {"trainer.check_val_every_n_epoch": 4}),
        (PHOTOGRAPHS, {"trainer.max_epochs": 7}, {"trainer.max_epochs": "absent", "model.warmup_epochs": 0.7}),
        (PHOTOGRAPHS, {"trainer.max_epochs": None}, {"trainer.check_val_every_n_epoch": 1}),
        (PHOTOGRAPHS, {"trainer.check_val_every_n_epoch": None}, {"model.warmup_epochs": 5.0}),
        (PHOTOGRAPHS, {"trainer.max_steps": 5}, {"trainer.max_epochs": "absent"}),
        (PHOTOGRAPHS, {"model.optimizer": "adamw"}, {"model.optimizer": "absent", "model.lr": 1e-3}),
        *(pytest.param(*each, marks=needs_cait) for each in OF_CAIT),
    ],
)
def test_the_rules_go_by_the_images_the_classes_and_what_is_given(folder: Survey, given: dict, expected: dict) -> None:
    found = recipe(folder, given).settings
    assert {name: found.get(name, "absent") for name in expected} == expected


def test_a_class_of_few_images_is_told() -> None:
    told = ["a fair result needs at least 20" in dict(recipe(uneven(few)).lines).get("warning", "") for few in (19, 20)]
    assert told == [True, False]
    assert recipe(uneven(2, 2)).settings  # four images are enough
    assert "all are drawn alike, as given" in dict(recipe(uneven(30), {"data.balance": None}).lines)["balance"]


@needs_cait
@pytest.mark.parametrize(
    ("machine", "patches"), [(TWO_CORES, [4, 8, 4, 8, 16, 16, 1, 1]), (Machine(16, 1, True), [2, 2, 3, 3, 4, 6, 1, 1])]
)
def test_the_blocks_see_few_patches(machine: Machine, patches: list[int]) -> None:
    assert recipe(machine=machine).settings["data.img_size"] == (128 if machine.gpus else 64)
    found = [recipe(given={"data.img_size": size}, machine=machine) for size in (28, 32, 36, 48, 64, 96, 2, 1)]
    assert [each.settings["model.fields.patch_size"] for each in found] == patches
    assert found[0].settings["model.fields.depth"] == (12 if machine.gpus else 1)
    assert found[0].settings["model.drop_path_rate"] == (0.1 if machine.gpus else 0.0)


@pytest.mark.parametrize(
    ("name", "weights", "image", "side", "size"),
    [
        ("timm/resnet10t", None, 4e-3, 28, 64),
        ("timm/resnet10t", None, 4e-3, 480, 96),
        ("timm/no_such_network", None, 4e-3, 48, 224),
        ("timm/resnet10t", PUBLISHED, 6e-4, 480, 224),
        ("timm/resnet10t", PUBLISHED, 8e-4, 480, 192),
        ("timm/resnet10t", PUBLISHED, 3e-2, 480, 128),
        ("timm/resnet10t", PUBLISHED, 1e-3, 48, 128),
        ("timm/resnet10t", PUBLISHED, 1e-3, 90, 160),
    ],
)
def test_other_networks_see_the_largest_images_for_which_there_is_time(
    name: str, weights: Weights | None, image: float, side: int, size: int
) -> None:
    found = recipe(replace(PHOTOGRAPHS, side=side), {"model.name": name}, Typical(image), weights).settings
    assert found["data.img_size"] == size
    assert found.get("data.mean") == (None if weights else list(PHOTOGRAPHS.mean))
    assert found.get("data.std") == (None if weights else list(PHOTOGRAPHS.std))
    assert found["model.lr"] == (3e-4 if weights else 1e-3)
    assert found.get("model.solve_head", False) is bool(weights)
    assert found.get("model.fields.intermediates", False) is bool(weights)
    assert not any(key.startswith(("model.fields.patch", "model.fields.stem", "model.optimizer")) for key in found)


def test_the_head_is_solved_and_the_rest_trains_gently() -> None:
    found = recipe(given=RESNET, weights=PUBLISHED).settings
    assert (found["model.freeze_norm"], found["model.lr"], found["data.mixup"]) == (True, 3e-4, 0.0)
    assert (found["model.freeze"], found["model.fields.intermediates"]) == (0.33, True)
    on_gpu = recipe(given=RESNET, machine=Machine(2, gpus=1), weights=PUBLISHED).settings
    assert "model.freeze" not in on_gpu
    kept = recipe(given=RESNET, measure=Typical(has_head=True), weights=PUBLISHED).settings
    assert (kept["model.freeze"], "model.fields.intermediates" in kept) == (0.33, False)
    distilled = recipe(given={"model.name": "timm/deit_tiny_distilled_patch16_224"}, weights=PUBLISHED).settings
    assert "model.fields.intermediates" not in distilled
    rare = recipe(uneven(30), RESNET, weights=PUBLISHED).settings
    assert (rare["data.balance"], "best_metric" in rare) == ("sqrt", False)
    slow = recipe(given=RESNET, measure=Typical(1.0), weights=PUBLISHED)
    assert slow.settings["model.freeze"] is True
    assert (slow.settings["trainer.max_epochs"], "trainer.max_steps" in slow.settings) == (1, False)
    assert "because not one epoch fits" in dict(slow.lines)["frozen"]
    whole = recipe(given=RESNET | {"model.solve_head": False}, weights=PUBLISHED).settings
    assert (whole["model.lr"], whole["model.layer_decay"]) == (3e-4, 0.75)


@needs_cait
def test_the_measured_pace_sets_the_length_and_the_minutes_are_kept() -> None:
    for minutes in (1, 3, 10):
        for image, val, many in ((1e-3, 60, 300), (0.05, 1200, 300), (1e-4, 60, 300), (2e-3, 5000, 1_281_167)):
            folder = replace(PHOTOGRAPHS, val=val, counts={"a": many, "b": 280})
            found = recipe(folder, measure=Typical(image), minutes=minutes)
            epochs, every = (found.settings[f"trainer.{name}"] for name in ("max_epochs", "check_val_every_n_epoch"))
            if "trainer.max_steps" in found.settings:  # an epoch that does not fit is not begun
                assert found.settings["trainer.max_steps"] * 64 * image < 60 * minutes
                assert "plan_minutes" not in found.settings
                continue
            assert found.settings["plan_minutes"] == minutes
            image *= figures.OVERHEAD
            seconds = (
                9 + figures.SETUP + epochs * (folder.images * image + figures.EPOCH) + epochs / every * val * image / 3
            )
            assert seconds <= 60 * minutes or epochs == 1
            assert f"about {duration(10 * round(seconds / 10))} on 2 cores, planned anew" in dict(found.lines)["length"]
    assert "plan_minutes" not in recipe(given={"trainer.max_epochs": 3}).settings


def test_a_trial_measures_a_network_at_a_size_and_knows_whose_head_the_weights_have(tmp_path: Path) -> None:
    measure = Trial(Program())
    quick = {"trainer.accelerator": "cpu", "model.name": "timm/resnet10t"}
    small, large = (measure.step(quick, size) for size in (32, 128))
    assert small is not None
    assert large is not None
    assert 0 < small < large
    assert measure.step(quick | {"model.name": "timm/no_such_network"}, 64) is None
    assert measure.begun() > 0
    torch.save(timm.create_model("resnet10t", num_classes=3).state_dict(), tmp_path / "w.pth")
    of_file = quick | {"model.weights": str(tmp_path / "w.pth"), "model.freeze": 0.33}
    assert [measure.takes_head(of_file, classes) for classes in (3, 4)] == [True, False]
    assert measure.step(of_file, 32) is not None


def added(given: dict[str, Any], *words: str, program: Any = None) -> dict[str, Any]:
    """What the recipe adds to the settings that are given, beside words."""
    line = Line("fit", list(words))
    arguments.add_recipe(line, program or Program())
    [step] = line.steps
    return step(given)


def test_minutes_are_taken_and_wrong_ones_are_told(tmp_path: Path) -> None:
    given = {"data.root": str(fill(tmp_path / "photos", {"a": 6, "b": 6})), "trainer.max_steps": 2}
    assert added(given, "--minutes", "10") == added(given)
    for wrong, words in (("0", "must be a number above 0, got 0"), ("inf", "got inf"), ("soon", "invalid float value")):
        with pytest.raises(UserError, match=f"--minutes.*{words}"):
            added(given, f"--minutes={wrong}")
    line = Line("fit", [DIGITS_YAML, "--run_name", "minutes"])
    add_settings(line, Program())
    assert line.steps == []
    for words, root in (([DIGITS_YAML], str(tmp_path / "photos")), ([], "own:digits"), ([], None)):
        with pytest.raises(UserError, match="--minutes is for a folder of images"):
            added({"data.root": root}, *words, "--minutes=2")


@pytest.mark.parametrize(
    ("source", "settings"),
    [("none", {}), ("timm", {"model.pretrained": True}), ("w.pth", {"model.weights": "w.pth"})],
)
def test_weights_are_taken_beside_a_configuration_too(
    source: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.pth").touch()
    given = {"data.root": "photos", "model.lr": 1e-3}
    assert added(given, DIGITS_YAML, f"--from={source}") == settings
    assert added(given, "--from", source, DIGITS_YAML, "--model.pretrained=0", "--model.weights=x") == {}
    monkeypatch.setattr(arguments, "beside_a_configuration", lambda _: settings | {"data.mean": [0.5] * 3})
    assert added(given | {"data.reader": "my:planes"}, DIGITS_YAML) == settings  # they are normalized as measured


def test_an_overlay_leaves_the_choice_and_a_configuration_takes_it(tmp_path: Path) -> None:
    given, program = {"data.root": str(fill(tmp_path / "photos", {"a": 6, "b": 6}))}, Program()
    chosen = added(given | {"trainer.max_epochs": 1}, "--config=trainer/debug.yaml", program=program)
    assert program.default_name == "photos"
    assert "data.repeats" in chosen
    assert "trainer.max_epochs" not in chosen  # the overlay's
    assert added(given, DIGITS_YAML) == {}


def keys(rank: int = 0, world: int = 1, balance: str = "full", first: int = 0) -> list[list[tuple]]:
    labels = torch.tensor([0] * 90 + [1] * 10)
    sampler = TrainBatchSampler(100, 10, 3, rank=rank, world_size=world, order=Balanced(labels, balance))
    sampler.epoch, sampler.first_batch = 2, first
    return list(sampler)


@pytest.mark.parametrize(("balance", "small"), [("full", 50), ("sqrt", 25)])
def test_the_balanced_order_is_the_same_for_all_processes_and_from_any_step(balance: str, small: int) -> None:
    whole = keys(balance=balance)
    flat = [key for batch in whole for key in batch]
    assert len({*flat}) == len(flat) == 100
    times = Counter(index for _, index, _ in flat if index >= 90)
    assert times.total() == small
    assert max(times.values()) - min(times.values()) <= 1
    parts = [keys(rank, 2, balance) for rank in range(2)]
    assert [key for batches in zip(*parts, strict=True) for pair in zip(*batches, strict=True) for key in pair] == flat
    assert keys(balance=balance, first=7) == whole[7:]
    assert (shares([90, 10], 0.5), shares([5, 3, 2], 0.5)) == ([75, 25], [4, 3, 3])
    assert occurrences(torch.tensor([5, 7, 5, 5])).tolist() == [0, 0, 1, 2]


def test_a_balanced_checkpoint_is_not_resumed_in_another_order(tmp_path: Path) -> None:
    how: dict = dict(root=str(fill(tmp_path, {"a": 6, "b": 3})), img_size=16, batch_size=2, repeats=1)
    balanced, plain = (ImageNetDataModule(**how, balance=balance) for balance in ("sqrt", None))
    assert balanced.state_dict()["depends_on"] != plain.state_dict()["depends_on"]
    assert balanced.class_counts() == [5, 2]


@pytest.mark.parametrize(
    ("images", "source", "words"),
    [
        (2, "none", "2 training images are too few to learn from"),
        (12, "w.pth", "w.pth, with the names a.weight, is of another network: "),
        (12, "w.pth", "in the model; --model.name says which network to train, here xxs24"),
    ],
)
def test_what_is_of_no_use_is_told_before_anything_is_measured(
    images: int, source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "photos", {"a": images, "b": images})
    torch.save({"a.weight": torch.zeros(3)}, "w.pth")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--data.root=photos", f"--from={source}"])
    out, err = capfd.readouterr()
    assert (stop.value.code, out) == (2, "")  # not a line of the recipe, which a trial measures
    *_, told = err.splitlines()  # after what is being done
    assert told.startswith("cait: error: ")
    assert words in told


BRIEF = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--data.num_workers=0", "--model.fields.depth=1"]


def test_one_command_trains_on_a_folder_and_another_goes_on_from_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "my photos", {"it's": 24, "ä ö": 6})
    main(["fit", "--data.root", "my photos", *BRIEF])
    output = capfd.readouterr().out
    chosen = output[: output.index("Any setting")]
    assert "  weights   none, because " in chosen
    assert max(map(len, chosen.splitlines())) <= 80
    run = tmp_path / "logs" / "my-photos"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["data"]["balance"], config["best_metric"]) == ("sqrt", "val/acc1_macro")
    assert config["model"]["fields"]["depth"] == 1  # given; the others were chosen
    assert not VARIANTS or config["model"]["fields"]["embed_dim"] == 96
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
    assert scores["acc1_macro"] == pytest.approx(max(float(row["val/acc1_macro"] or 0) for row in rows(run)))

    fill(tmp_path / "my photos", {"new": 6})
    brief = ["--data.balance=null", "--trainer.max_steps=1", "--baselines=false"]
    main(["fit", "--data.root=my photos", "--from", "my-photos", *BRIEF, *brief, "--run_name=second"])
    assert "the head starts anew" in caplog.text


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", False), ("amx_bf16 amx_tile", True)])
def test_a_processor_with_units_for_bfloat16_trains_in_it(
    flags: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}\n")
    monkeypatch.setattr(figures, "Path", lambda _: tmp_path / "cpuinfo")
    assert this_machine({"trainer.accelerator": "cpu"}).fast_bf16 == fast


@pytest.mark.parametrize(("name", "mixed"), [("xxs24", True), ("timm/resnet10t", True), ("timm/lcnet_035", False)])
def test_convolutions_of_single_channels_train_in_float32_on_a_processor(name: str, mixed: bool) -> None:
    found = recipe(given={"model.name": name}, machine=Machine(2, fast_bf16=True)).settings
    assert found.get("trainer.precision") == ("bf16-mixed" if mixed else None)


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
    chosen = recipe(machine=machine).settings
    assert chosen.get("trainer.precision") == ("bf16-mixed" if fast else None)
