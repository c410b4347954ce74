"""Configurations as they are read, and where a setting comes from."""

import yaml
from harness import over_table
from jsonargparse._loaders_dumpers import yaml_load

from cait.cli.options import Line
from cait.guards import configurations


@over_table(__file__, "numbers")
def test_a_name_like_a_number_stays_text(value):
    """As that of a run, or of its data, in config.yaml: YAML 1.1 takes it for text, and the parser for a number."""
    text = yaml.safe_dump({"it": value})
    assert configurations.load(text, "it") == yaml_load(text) == {"it": value}


def test_a_number_needs_no_dot():
    assert configurations.load("1e-3", "it") == 1e-3


@over_table(__file__, "dates")
def test_a_name_like_a_date_is_text_as_the_parser_takes_it(text):
    assert configurations.load(f"run_name: {text}", "it") == {"run_name": text}
    assert yaml_load(f"run_name: {text}") == {"run_name": text}


def test_a_plus_names_the_setting_that_it_appends_to(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("{data: {augment_ops+: [a:b]}, trainer: {callbacks+: {class_path: X}}}")
    sources = Line("fit", [f"--config={file}"]).sources
    config = {"data": {"augment_ops": ["a:b"], "root": "x"}}
    assert sources.given(config) == {"data.augment_ops": ["a:b"]}
    assert sources.last(["trainer.callbacks"]) == 0
    content = configurations.settings(file)
    assert configurations.without_classes(content)["trainer"] == {}
    assert configurations.without_absent(content, {"data", "trainer", "data.augment_ops"}) == (
        content,
        [],
    )


@over_table(__file__, "sources")
def test_where_a_setting_comes_from(settings, source):
    line = Line("fit", ["--model.fields.depth=3", "--trainer.callbacks+", "Timer", "word"])
    line.layers = [(None, {"model": {"lr": 1, "fields": {"depth": 2}}}), (None, {"data.root": "x"})]
    assert line.typed == {"model.fields.depth", "trainer.callbacks"}
    assert line.sources.last(settings) == source
    config = {"model": {"lr": 1, "name": "x"}, "data": {"root": "y"}}
    assert line.sources.given(config) == {"model.lr": 1, "data.root": "y"}
