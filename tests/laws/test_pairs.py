"""Situations that cover all pairs of settings, each a run that must keep the laws.

`make test` tries some of them, `make laws` all, and `make laws SEED=n` others.
"""

import itertools
import os
from pathlib import Path

import pytest
from laws import Trial
from processes import apart
from situations import Situation, all_pairs, pairs, situations

SEED = os.environ.get("SEED")
QUICK = 2
"""Situations on one process, without an export, that `make test` tries."""


def chosen() -> list:
    if SEED is not None:
        return [*situations(int(SEED))]
    quick = (
        each for each in situations() if each.devices == "1" and each.verb not in ("onnx", "demo")
    )
    return [*itertools.islice(quick, QUICK)]  # to draw all of them takes seconds


@pytest.mark.slow
def test_each_pair_that_makes_sense_is_covered() -> None:
    assert {pair for each in situations() for pair in pairs(each)} == all_pairs()


@pytest.mark.parametrize("situation", chosen(), ids=lambda each: "-".join(each).replace(" ", "_"))
def test_a_run_keeps_the_laws(situation: Situation, tmp_path: Path) -> None:
    assert apart(lambda: Trial(tmp_path, situation).check()) == []
