"""The recipe, augmentation and order of samples against timm's own parts; benchmarks/recipe.py has the long form."""

import pytest
import recipe
from harness import slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    recipe.prepare(folder)
    return folder


@pytest.mark.parametrize("kind", ["none", "hard", *slow("soft")])
def test_every_step_is_timms(kind, prepared):
    worst, steps, moved = recipe.compare(prepared, kind, batches=1)
    assert steps == 10
    # a difference of the allowed size would be a hundredth of what training did
    assert moved > 1e-4
    for name, allowed in recipe.ALLOWED.items():
        assert worst[name] <= allowed, name
