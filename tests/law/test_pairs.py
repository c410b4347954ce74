"""Situations that cover all pairs of settings, each a run that must keep the laws.

`make test` tries two short ones, `make laws` all, and `make laws SEED=n` others.
"""

import os

import pytest
from laws import Trial
from processes import apart
from situations import TABLE, situations

SEED = os.environ.get("SEED")
CHOSEN = TABLE["quick"] if SEED is None else [*situations(int(SEED))]


@pytest.mark.parametrize(
    "situation", CHOSEN, ids=lambda situation: "-".join(situation.values()).replace(" ", "_")
)
def test_a_run_keeps_the_laws(situation, tmp_path):
    assert apart(lambda: Trial(tmp_path, situation).check()) == []
