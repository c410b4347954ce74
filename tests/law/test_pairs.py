"""Situations that cover all pairs of settings, each a run that must keep the laws.

`make test` tries some of them, `make laws` all, and `make laws SEED=n` others.
"""

import itertools
import os

import pytest
from laws import Trial
from processes import apart
from situations import situations

SEED = os.environ.get("SEED")
QUICK = 2
"""Situations on one process, without a teacher and an export, that `make test` tries."""


def is_quick(situation):
    is_small = situation["devices"] == "1" and situation["teacher"] == "none"
    return is_small and situation["verb"] not in ("onnx", "demo")


def chosen():
    if SEED is not None:
        return [*situations(int(SEED))]
    # to draw all of them takes seconds
    return [*itertools.islice(filter(is_quick, situations()), QUICK)]


@pytest.mark.parametrize(
    "situation", chosen(), ids=lambda situation: "-".join(situation.values()).replace(" ", "_")
)
def test_a_run_keeps_the_laws(situation, tmp_path):
    assert apart(lambda: Trial(tmp_path, situation).check()) == []
