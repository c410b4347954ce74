"""Own images: what stands beside `--data.root`, and one run of it all."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from class_folders import fill
from harness import REPO, rows

from cait.cli import main
from cait.cli.options import Line
from cait.extras.recipe import add_settings, arguments
from cait.run.program import Program

DIGITS_YAML = f"--config={REPO / 'configs/digits.yaml'}"


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of two classes in the working folder."""
    monkeypatch.chdir(tmp_path)
    return fill(Path("photos"), {"a": 6, "b": 6})


def added(given, *words, program=None):
    """What the recipe adds to the settings that are given, beside words."""
    line = Line("fit", list(words))
    arguments.add_recipe(line, program or Program())
    [step] = line.steps
    return step(given)


def test_minutes_are_taken(photos):
    given = {"data.root": "photos", "trainer.max_steps": 2}
    assert added(given, "--minutes", "10") == added(given)


def test_a_run_named_minutes_asks_for_no_recipe():
    line = Line("fit", [DIGITS_YAML, "--run_name", "minutes"])
    add_settings(line, Program())
    assert line.steps == []


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--from none", {}),
        ("--from timm", {"model.pretrained": True}),
        ("--from=w.pth", {"model.weights": "w.pth"}),
        ("--from timm --model.pretrained=0", {}),
        ("--from=w.pth --model.weights=x", {}),
    ],
)
def test_weights_are_taken_beside_a_configuration_too(words, settings, photos):
    Path("w.pth").touch()
    given = {"data.root": "photos", "model.lr": 1e-3}
    assert added(given, DIGITS_YAML, *words.split()) == settings


def test_planes_are_normalized_as_measured_whatever_the_weights_saw(trained, photos):
    given = {"data.root": "photos"}
    from_run = added(given, DIGITS_YAML, f"--from={trained}")
    of_planes = added(given | {"data.reader": "my:planes"}, DIGITS_YAML, f"--from={trained}")
    assert from_run.keys() - of_planes.keys() == {"data.mean", "data.std"}


def test_an_overlay_leaves_the_choice_and_a_configuration_takes_it(photos):
    given = {"data.root": "photos"}
    program = Program()
    debug = given | {"trainer.max_epochs": 1}
    chosen = added(debug, "--config=trainer/debug.yaml", program=program)
    assert program.default_name == "photos"
    assert "data.repeats" in chosen
    assert "trainer.max_epochs" not in chosen  # the overlay's
    assert added(given, DIGITS_YAML) == {}


@pytest.mark.parametrize(
    ("images", "source", "words"),
    [
        (2, "none", "2 training images are too few"),
        (12, "w.pth", "w.pth, with the names a.weight, is of another network: "),
        (12, "w.pth", "--model.name says which network to train, here xxs24"),
    ],
)
def test_what_is_of_no_use_is_told_before_anything_is_measured(
    images, source, words, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    fill(Path("photos"), {"a": images, "b": images})
    torch.save({"a.weight": torch.zeros(3)}, "w.pth")
    with pytest.raises(SystemExit):
        main(["fit", "--data.root=photos", f"--from={source}"])
    out, err = capfd.readouterr()
    assert out == ""  # not a line of the recipe, which a trial measures
    error = err.splitlines()[-1]  # after what is being done
    assert error.startswith("cait: error: ")
    assert words in error


BRIEF = """
    --trainer.accelerator=cpu --trainer.max_epochs=2 --data.num_workers=0 --model.fields.depth=1
"""


def test_one_command_trains_on_a_folder_and_another_goes_on_from_its_weights(
    tmp_path, monkeypatch, capfd, caplog
):
    monkeypatch.chdir(tmp_path)
    fill(Path("my photos"), {"it's": 24, "ä ö": 6})
    main(["fit", "--data.root", "my photos", *BRIEF.split()])
    recipe = capfd.readouterr().out.partition("Any setting")[0]
    assert "  weights   none, because " in recipe
    assert max(map(len, recipe.splitlines())) <= 80
    run = Path("logs/my-photos")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["balance"] == "sqrt"
    assert config["model"]["fields"]["depth"] == 1
    with (run / "validation.csv").open(encoding="utf-8") as file:
        assert Counter(row["class"] for row in csv.DictReader(file)) == {"it's": 2, "ä ö": 1}

    # the folder grows
    fill(Path("my photos/ä ö"), {".": 8}, suffix=".bmp")
    with pytest.raises(SystemExit):
        main(["resume", "my-photos", "--trainer.max_epochs=5"])
    assert "training pictures" in capfd.readouterr().err
    main(["eval", "my-photos"])
    scores = json.loads((run / "evaluation.json").read_text())["raw"]
    assert scores["images"] == 3
    best = max(float(row["val/acc1_macro"] or 0) for row in rows(run))
    assert scores["acc1_macro"] == pytest.approx(best)

    fill(Path("my photos"), {"new": 6})
    brief = ["--data.balance=null", "--trainer.max_steps=1", "--baselines=false"]
    from_run = ["--from=my-photos", "--run_name=second"]
    main(["fit", "--data.root=my photos", *from_run, *BRIEF.split(), *brief])
    assert "the head starts anew" in caplog.text
