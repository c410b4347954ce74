"""Use what a network has learned: its features, simple classifiers on them, and training of its head alone."""

from pathlib import Path
from typing import Any

from cait.errors import UserError
from cait.plugins import Results, Run, Setting, Verb

VERBS = {
    "features": Verb(
        "cait.extras.pretrained.verb:features",
        "features of images: cait features RUN|--name MODEL --images DIR --output FILE.npz",
    )
}
GROUPS = {"model": "cait.extras.pretrained.freeze:FreezeSettings"}
TIMM_FIELDS = {"intermediates": "cait.extras.pretrained.intermediates:see_intermediates"}
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


def step_callbacks(module: Any, data: Any) -> list[Any]:
    """What solves a new head, and what freezes the network, when a run asks for it."""
    from cait.extras.pretrained.freeze import Freeze

    if not module.hparams.get("solve_head"):
        return [Freeze()]
    from cait.extras.pretrained.solve import SolveHead

    return [SolveHead(), Freeze()]


def callbacks(run: Run) -> list[Any]:
    """What scores the baselines, if the run asks for it and keeps anything."""
    _check_used(run)
    # an image has one class
    if not run.config.baselines or not run.keeps or getattr(run.data, "task", None):
        return []
    from cait.extras.pretrained.baselines import Baselines

    return [Baselines(run)]


def _check_used(run: Run) -> None:
    """Refuse settings of a new run that would do nothing."""
    from torch.nn.modules.batchnorm import _BatchNorm

    asks = run.module.hparams.get
    start = run.module.settings
    if run.first_step:
        return
    is_typed = "model.freeze_norm" in run.typed  # a recipe sets it for any network
    has_norm = any(isinstance(layer, _BatchNorm) for layer in run.module.model.modules())
    if is_typed and asks("freeze_norm") and not has_norm:
        raise UserError(
            f"--model.freeze_norm does nothing without BatchNorm, which {run.module.name} has not"
        )
    if asks("solve_head") and not start.weights and not start.pretrained:
        raise UserError(
            "--model.solve_head does nothing without --model.weights or --model.pretrained: leave it out"
        )


def results(folder: Path) -> Results | None:
    """The table of a run's baselines; None if there is none."""
    from cait.extras.pretrained import baselines

    return baselines.results(folder)
