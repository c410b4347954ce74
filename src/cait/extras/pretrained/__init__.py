"""Use what a network has learned: its features, simple classifiers on them, and training with parts of it held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cait.plugins import Results, Run, Setting, Verb

VERBS = {
    "features": Verb(
        "cait.extras.pretrained.verb:features",
        "features of images: cait features RUN|--name MODEL --images DIR --output FILE.npz",
    )
}
MODEL_SETTINGS = "cait.extras.pretrained.freeze:FreezeSettings"
SETTINGS = [
    Setting(
        "baselines",
        bool,
        False,
        "After training, score simple classifiers of the pixels and of the network's features on the validation "
        "images, into baselines.json. A recipe chosen for a folder sets it.",
        ("fit",),
    )
]
RECIPE_SETTINGS = {"baselines": True}


def step_callbacks(data: Any) -> list[Any]:
    """What freezes the network when a run asks for it."""
    from cait.extras.pretrained.freeze import Freeze

    return [Freeze()]


def parameter_groups(optimizer: Any, network: Any) -> None:
    """Give the head groups of its own if it has a rate of its own."""
    if (factor := getattr(network, "head_lr_factor", None)) is not None:
        from cait.extras.pretrained.freeze import scale_head

        scale_head(optimizer, network, factor)


def callbacks(run: Run) -> list[Any]:
    """What scores the baselines, if the run asks for it and keeps anything."""
    keeps_nothing = run.trainer.logger is False and run.trainer.enable_checkpointing is False
    several = getattr(run.data, "task", None) is not None  # they answer with one class
    if not run.config.baselines or run.trainer.fast_dev_run or keeps_nothing or several:
        return []
    from cait.extras.pretrained.baselines import Baselines

    return [Baselines(run)]


def results(folder: Path) -> Results | None:
    """The table of a run's baselines; None if there is none."""
    from cait.extras.pretrained import baselines

    return baselines.table(found) if (found := baselines.read(folder)) else None


def suggest(run: Run) -> list[tuple[str, str]]:
    """What to try if a baseline is better than the run."""
    from cait.extras.pretrained import baselines

    return baselines.suggestions(run) if run.config.baselines else []
