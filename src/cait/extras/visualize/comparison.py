"""What differs between runs: their settings, and what they reached."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from cait.errors import UserError, one_line
from cait.guards.configurations import check_config
from cait.run import rundir
from cait.run.curves import Curve
from cait.settings import Settings, as_text, flatten

NOT_SETTINGS = ("run_name", "output", "ckpt_path", "trainer.default_root_dir")
"""A run's own name and places."""


class Reached(NamedTuple):
    """One metric of one run."""

    best: float
    last: float
    best_step: int


def settings(folder: Path) -> Settings:
    """The run's config.yaml as {"model.lr": 0.001, ...}.

    Raises:
        UserError: there is none, or it is no configuration.
    """
    path = rundir.config(folder)
    check_config(path)
    try:
        nested = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:  # a tag, which nothing here reads
        raise UserError(f"{path} is not a configuration: {one_line(error)}") from error
    return {name: value for name, value in flatten(nested).items() if name not in NOT_SETTINGS}


def differing(all_settings: list[Settings]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, with the value of each run; "-" where a run does not have it."""
    names = sorted({name for settings in all_settings for name in settings})
    values = {
        name: [as_text(settings[name]) if name in settings else "-" for settings in all_settings] for name in names
    }
    return {name: those for name, those in values.items() if len(set(those)) > 1}


def reached(curve: Curve, name: str) -> Reached:
    """The best and the last value of a curve; the best of a loss is its smallest, of anything else its largest."""
    steps, values = curve
    best = (min if "loss" in name else max)(values)
    return Reached(best, values[-1], steps[values.index(best)])
