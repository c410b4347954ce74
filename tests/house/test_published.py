"""The shipped configurations say what the papers' recipes say."""

from pathlib import Path

import pytest
import yaml
from harness import call, parsed, works

from cait.settings import flatten

RECIPES = parsed(Path(__file__).with_name("published.yaml"))


@pytest.mark.parametrize("words", RECIPES)
def test_a_configuration_is_the_published_recipe(words, tmp_path):
    done = works(call(tmp_path, "fit", *words.split(), "--print_config"))
    settings = flatten(yaml.safe_load(done.stdout))
    for name, value in flatten(RECIPES[words]).items():
        assert settings[name] == value, name
