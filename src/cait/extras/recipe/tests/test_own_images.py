"""Own images: what stands beside `--data.root`, and one run of it all."""

from pathlib import Path

import pytest
from class_folders import fill
from harness import over_table, parsed

from cait.cli import main
from cait.cli.options import Line
from cait.extras.recipe import add_settings, arguments
from cait.run.program import Program


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of two classes in the working folder."""
    monkeypatch.chdir(tmp_path)
    return fill(Path("photos"), {"a": 6, "b": 6})


def added(given, *words, program=None):
    """What the recipe adds to the settings that are given for the folder, beside words."""
    line = Line("fit", list(words))
    arguments.add_recipe(line, program or Program())
    [step] = line.steps
    return step({"data.root": "photos"} | given)


def test_minutes_are_taken(photos):
    given = {"trainer.max_steps": 2}
    assert added(given, "--minutes", "10") == added(given)


def test_a_run_named_minutes_asks_for_no_recipe():
    line = Line("fit", ["--config=digits.yaml", "--run_name", "minutes"])
    add_settings(line, Program())
    assert line.steps == []


@over_table(__file__, "added")
def test_a_configuration_leaves_only_the_weights_and_the_race_to_the_recipe(words, adds, photos):
    Path("w.pth").touch()
    assert added({"model.lr": 1e-3}, *words.split()) == adds


def test_planes_are_normalized_as_measured_whatever_the_weights_saw(trained, photos):
    words = ["--config=digits.yaml", f"--from={trained}"]
    from_run = added({}, *words)
    of_planes = added({"data.reader": "my:planes"}, *words)
    assert from_run.keys() - of_planes.keys() == {"data.mean", "data.std"}


def test_an_overlay_leaves_the_choice(photos):
    program = Program()
    overlay = "--config=trainer/debug.yaml"
    chosen = added({"trainer.max_epochs": 1}, overlay, program=program)
    assert program.default_name == "photos"
    assert "data.repeats" in chosen
    assert "trainer.max_epochs" not in chosen  # the overlay's


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
    config = parsed(Path("logs/my-photos/config.yaml"))
    assert config["data"]["balance"] == "sqrt"

    fill(Path("my photos"), {"new": 6})
    brief = ["--data.balance=null", "--trainer.max_steps=1", "--baselines=false"]
    from_run = ["--from=my-photos", "--run_name=second"]
    main(["fit", "--data.root=my photos", *from_run, *BRIEF.split(), *brief])
    assert "the head starts anew" in caplog.text
