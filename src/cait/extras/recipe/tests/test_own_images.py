"""Own images: what stands beside `--data.root`, and one run of it all."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from class_folders import fill
from harness import REPO, rows

from cait.cli import main
from cait.cli.options import Line
from cait.errors import UserError
from cait.extras.recipe import add_settings, arguments
from cait.model.config import VARIANTS
from cait.run.program import Program

DIGITS_YAML = f"--config={REPO / 'configs/digits.yaml'}"


def added(given: dict[str, Any], *words: str, program: Any = None) -> dict[str, Any]:
    """What the recipe adds to the settings that are given, beside words."""
    line = Line("fit", list(words))
    arguments.add_recipe(line, program or Program())
    [step] = line.steps
    return step(given)


def test_minutes_are_taken_and_wrong_ones_are_told(tmp_path: Path) -> None:
    given = {"data.root": str(fill(tmp_path / "photos", {"a": 6, "b": 6})), "trainer.max_steps": 2}
    assert added(given, "--minutes", "10") == added(given)
    for wrong, words in (
        ("0", "must be a number above 0, got 0"),
        ("inf", "got inf"),
        ("soon", "invalid float value"),
    ):
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
    assert (
        added(given, "--from", source, DIGITS_YAML, "--model.pretrained=0", "--model.weights=x")
        == {}
    )
    monkeypatch.setattr(
        arguments, "beside_a_configuration", lambda _: settings | {"data.mean": [0.5] * 3}
    )
    # they are normalized as measured
    assert added(given | {"data.reader": "my:planes"}, DIGITS_YAML) == settings


def test_an_overlay_leaves_the_choice_and_a_configuration_takes_it(tmp_path: Path) -> None:
    given, program = {"data.root": str(fill(tmp_path / "photos", {"a": 6, "b": 6}))}, Program()
    chosen = added(
        given | {"trainer.max_epochs": 1}, "--config=trainer/debug.yaml", program=program
    )
    assert program.default_name == "photos"
    assert "data.repeats" in chosen
    assert "trainer.max_epochs" not in chosen  # the overlay's
    assert added(given, DIGITS_YAML) == {}


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


BRIEF = [
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=2",
    "--data.num_workers=0",
    "--model.fields.depth=1",
]


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
    assert scores["acc1_macro"] == pytest.approx(
        max(float(row["val/acc1_macro"] or 0) for row in rows(run))
    )

    fill(tmp_path / "my photos", {"new": 6})
    brief = ["--data.balance=null", "--trainer.max_steps=1", "--baselines=false"]
    main(
        ["fit", "--data.root=my photos", "--from", "my-photos", *BRIEF, *brief, "--run_name=second"]
    )
    assert "the head starts anew" in caplog.text
