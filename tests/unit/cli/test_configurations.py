"""Configurations as they are read, and where a setting comes from."""

from pathlib import Path

import pytest
import yaml
from jsonargparse._loaders_dumpers import yaml_load

from cait.cli.options import Line
from cait.errors import UserError
from cait.guards import configurations
from cait.guards.configurations import is_overlay, without_absent
from cait.settings import flatten, nested


def test_an_overlay_says_neither_data_nor_model():
    assert is_overlay(Path("it.yaml"), {"logger": "wandb", "trainer": {"max_epochs": 2}})
    assert not is_overlay(Path("it.yaml"), {"model": {"lr": 1.0}})
    assert is_overlay(Path("trainer/it.yaml"), {"data": {"num_workers": 1}})


@pytest.mark.parametrize("value", ["1e-3", "12e4", "+1.5E7", 1e-3, 1e22, "1e", "e3", "2024"])
def test_a_name_like_a_number_stays_text(value):
    """As that of a run, or of its data, in config.yaml: YAML 1.1 takes it for text, and the parser for a number."""
    text = yaml.safe_dump({"it": value})
    assert configurations.load(text, "it") == yaml_load(text) == {"it": value}


def test_a_number_needs_no_dot():
    assert configurations.load("1e-3", "it") == 1e-3


@pytest.mark.parametrize("text", ["2024-01-31", "2024-01-31 12:30:00", "2024-01-31T12:30:00Z"])
def test_a_name_like_a_date_is_text_as_the_parser_takes_it(text):
    assert configurations.load(f"run_name: {text}", "it") == {"run_name": text}
    assert yaml_load(f"run_name: {text}") == {"run_name": text}


def test_a_key_and_the_same_with_a_plus_are_there_twice():
    with pytest.raises(UserError, match="callbacks is there twice"):
        configurations.load("{callbacks: [A], callbacks+: [B]}", "it")


def test_a_group_whose_lines_are_commented_out_sets_nothing(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data:\n  # root: photos\nmodel: {lr: 1.0}\nrun_name:\n")
    assert configurations.settings(file) == {"model": {"lr": 1.0}, "run_name": None}


def test_what_an_absent_extra_took_is_left_out_and_the_models_own_stays():
    config = yaml.safe_load("""
    data: {root: x, gone: 3, off: null}
    model: {lr: 1.0, off: false, own: 4}
    gone: {every_n_steps: 5}
    """)
    kept, left_out = without_absent(config, {"data", "data.root", "model", "model.lr"})
    assert kept == {"data": {"root": "x"}, "model": {"lr": 1.0, "own": 4}}
    assert left_out == ["data.gone", "gone.every_n_steps"]


def test_a_plus_names_the_setting_that_it_appends_to(tmp_path):
    """Whoever asks what is given, or leaves out what scoring does not need, finds it."""
    file = tmp_path / "a.yaml"
    file.write_text("{data: {augment_ops+: [a:b]}, trainer: {callbacks+: {class_path: X}}}")
    sources = Line("fit", [f"--config={file}"]).sources
    config = {"data": {"augment_ops": ["a:b"], "root": "x"}}
    assert sources.given(config) == {"data.augment_ops": ["a:b"]}
    assert sources.last(["trainer.callbacks"]) == 0
    content = configurations.settings(file)
    assert configurations.without_classes(content)["trainer"] == {}
    assert without_absent(content, {"data", "trainer", "data.augment_ops"}) == (content, [])


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        (["model.lr"], 0),
        (["data.root"], 1),
        (["data.root", "model.lr"], 1),
        (["model.fields"], 2),  # what is typed
        (["model"], 2),
        (["seed"], -1),
    ],
)
def test_where_a_setting_comes_from(settings, source):
    line = Line("fit", ["--model.fields.depth=3", "--trainer.callbacks+", "Timer", "word"])
    line.layers = [(None, {"model": {"lr": 1, "fields": {"depth": 2}}}), (None, {"data.root": "x"})]
    assert line.typed == {"model.fields.depth", "trainer.callbacks"}
    assert line.sources.last(settings) == source
    config = {"model": {"lr": 1, "name": "x"}, "data": {"root": "y"}}
    assert line.sources.given(config) == {"model.lr": 1, "data.root": "y"}


def test_what_is_flattened_is_nested_again():
    settings = yaml.safe_load("""
    model: {fields: {depth: 2, stem: null}, lr: 0.1}
    data: {mean: [0.5]}
    logger_args: {}
    """)
    assert nested(flatten(settings)) == settings


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_field_stays_below_a_group_that_was_emptied(nothing):
    """As by `--model.fields null`, to which a recipe adds fields."""
    settings = {"model.fields": nothing, "model.fields.depth": 2}
    assert nested(settings) == {"model": {"fields": {"depth": 2}}}
    assert settings["model.fields"] == nothing
