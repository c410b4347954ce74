"""A run from weights races one from scratch: the better goes on, and a kill in any phase changes no bit of it."""

import json
from pathlib import Path
from string import Template

import pytest
import timm
import torch
from class_folders import fill_with_few
from harness import LIMIT, checkpoint, over_table, parsed, rows, start
from modules import images_in
from networks import needs_cait
from same import same

from cait.cli import main
from cait.extras.recipe.race import SCRATCH, enter, unlikeness, verdict
from cait.extras.recipe.rules import Recipe
from cait.loops import Position
from cait.model.config import VARIANTS

SETTINGS = Path(__file__).with_name("race.yaml").read_text()
LITTLE, MUCH = 1e-3, 1e9
"""Seconds of the run from scratch: it is judged after its first epoch, or once it is ahead."""


@pytest.fixture
def here(tmp_path, monkeypatch, digits_root):
    """A part of the digits, and weights that tell them apart, or give all images the same features."""
    monkeypatch.chdir(tmp_path)
    fill_with_few(Path("few"), digits_root)
    torch.manual_seed(0)
    network = timm.create_model("test_efficientnet")
    torch.save(network.state_dict(), "good.pth")
    torch.nn.init.zeros_(network.conv_head.weight)
    torch.save(network.state_dict(), "blind.pth")
    return tmp_path


def write(weights, seconds, killed_at=-1, unlike="null"):
    """The settings of a run from weights that races one from scratch, which has so many seconds."""
    text = Template(SETTINGS).substitute(
        weights=weights,
        seconds=seconds,
        killed_at=killed_at,
        unlike=unlike,
        # CaiT may have been deleted
        fields_of_cait=", stem: conv, layer_scale_init: 1.0" if VARIANTS else "",
    )
    Path("race.yaml").write_text(text)


def fit(name, *race):
    write(*race)
    main(["fit", "--config=race.yaml", f"--run_name={name}"])
    return Path("logs", name)


def config(run):
    return parsed(run / "config.yaml")


def assert_alike(run, other):
    assert same(checkpoint(run)["state_dict"], checkpoint(other)["state_dict"])
    assert rows(run) == rows(other)


@pytest.mark.slow
def test_the_solved_head_goes_on_as_if_there_had_been_no_race(here, caplog):
    raced = fit("raced", "good.pth", LITTLE)
    assert "race: from scratch has 0 s to be ahead by more than the noise" in caplog.text
    assert "race won by weights: val/acc1 of the solved head" in caplog.text
    assert (raced / "scratch/checkpoints/last.ckpt").is_file()
    assert config(raced)["model"]["weights"] == "good.pth"
    alone = fit("alone", "good.pth", LITTLE, -1, 9.0)
    assert "no race: by BatchNorm the images are like those of the weights" in caplog.text
    assert not (alone / "scratch").exists()
    assert_alike(raced, alone)


@needs_cait  # a small ViT learns nothing in three epochs
def test_the_run_from_scratch_takes_the_place_and_goes_on(here, caplog):
    # a name like that of the folder inside it
    won = fit(SCRATCH, "blind.pth", MUCH, -1, "0.000001")
    assert "race won by scratch: val/acc1 of the solved head 10" in caplog.text
    settings = config(won)
    assert settings["model"]["name"] == "xxs24"
    assert settings["run_name"] == SCRATCH
    assert rows(won)[0]["val/acc1"] == ""  # nothing of step 0 of the other
    del settings["race"]
    Path("alone.json").write_text(json.dumps(settings))
    main(["fit", "--config=alone.json", "--run_name=alone", "--trainer.default_root_dir=logs"])
    assert_alike(won, Path("logs/alone"))
    main(["eval", SCRATCH])


@pytest.mark.slow
def test_what_is_given_is_for_the_run_from_scratch_too(here):
    write("blind.pth", MUCH, 12)
    given = ["--data.batch_size=10", "--model.freeze_norm=false"]  # the last of weights
    with pytest.raises(SystemExit):
        main(["fit", "--config=race.yaml", "--run_name=cut", *given])
    assert config(Path("logs/cut/scratch"))["data"]["batch_size"] == 10
    main(["resume", "cut", "--trainer.max_epochs=2"])
    assert Position.saved(checkpoint(Path("logs/cut"))) == (2, 0, 40)
    again = ["--run_name=again", "--race=false", "--trainer.max_epochs=1"]
    main(["fit", "--config=logs/cut/config.yaml", *again])
    assert config(Path("logs/again"))["race"] is None


@over_table(__file__, "lines", minutes=3.0)
def test_a_line_says_whether_there_is_a_race(given, minutes, from_weights, epochs, line, races):
    recipe, scratch = (Recipe(given, None, minutes) for _ in range(2))
    recipe.take_all(from_weights)
    scratch.take_all({"trainer.max_epochs": epochs, "plan_minutes": minutes})
    enter(recipe, scratch, True)
    assert recipe.lines == [("race", line)]
    assert ("race" in recipe.settings) == races


def test_a_network_that_has_seen_the_images_is_near_to_them(here):
    data = images_in("few", eval_batch_size=200)
    data.setup("fit")
    samples = data.predict_samples = data.train_images.samples
    network = timm.create_model("test_efficientnet", bn_momentum=1.0).train()
    images, _ = next(iter(data.predict_dataloader()))
    network(images)
    others = images_in("few", mean=(0.9, 0.9, 0.9))
    cpu = torch.device("cpu")
    assert unlikeness(network, samples, data, cpu) < 0.1
    assert unlikeness(network, samples, others, cpu) > 0.5
    without = timm.create_model("test_vit", img_size=32)  # it has no BatchNorm, so nothing tells
    assert unlikeness(without, samples, others, cpu) is None


@over_table(__file__, "verdicts")
def test_who_is_ahead_by_more_than_the_noise_wins(head, scratch, part, epochs, winner):
    assert verdict(head, scratch, 80, part, epochs) == winner


@needs_cait
@pytest.mark.slow
@over_table(__file__, "kills")
def test_a_race_that_is_killed_ends_with_the_same_bits(weights, step, here):
    """The run from scratch is judged after its step 10, and of blind weights has won after step 20."""
    seconds = LITTLE if weights == "good.pth" else MUCH
    whole = fit("whole", weights, seconds)
    with pytest.raises(SystemExit):
        fit("cut", weights, seconds, step)
    main(["resume", "cut"])
    assert_alike(Path("logs/cut"), whole)


@needs_cait
@pytest.mark.slow
@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_kill_while_one_run_takes_the_place_of_the_other_loses_nothing(moved, here, monkeypatch):
    whole = fit("whole", "blind.pth", MUCH)
    replace = Path.replace
    moves = []

    def killed(source, target):
        if SCRATCH in source.parts and SCRATCH not in target.parts:
            moves.append(source)
            if len(moves) > moved:
                raise KeyboardInterrupt
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(SystemExit):
        fit("cut", "blind.pth", MUCH)
    monkeypatch.setattr(Path, "replace", replace)
    main(["resume", "cut"])
    assert_alike(Path("logs/cut"), whole)


@needs_cait
@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "seconds", "winner"),
    [("good.pth", LITTLE, "timm/test_efficientnet"), ("blind.pth", MUCH, "xxs24")],
)
def test_two_processes_race_too(weights, seconds, winner, here):
    def ended(*words):
        job = start(here, *words)
        output, _ = job.communicate(timeout=LIMIT)
        print(output)
        return job.returncode

    write(weights, seconds, 12)
    settings = parsed(Path("race.yaml"))
    for run in (settings, settings["race"]["settings"]):
        run["trainer"] |= {"devices": 2, "strategy": "ddp"}
        run["data"]["batch_size"] = 10
    Path("race.yaml").write_text(json.dumps(settings))
    assert ended("fit", "--config=race.yaml", "--run_name=cut")
    assert ended("resume", "cut") == 0
    assert config(Path("logs/cut"))["model"]["name"] == winner
    assert Position.saved(checkpoint(Path("logs/cut"))).epoch == 3
