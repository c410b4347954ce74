"""A trial of a sweep reports its metric at each validation, and ends early if the sweep's pruner says so."""

import math
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from cait.extras.sweep import trials


class ReportTrial(Callback):
    """Report the metric of a run, which is a trial, to the study beside its folder.

    Args:
        run_dir: of the run.
        number: of the trial.
        metric: what to report; the run has it at each validation.
    """

    def __init__(self, run_dir: Path, number: int, metric: str) -> None:
        self.folder, self.number, self.metric = run_dir.parent, number, metric

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self.metric not in trainer.callback_metrics:
            return
        value = float(trainer.callback_metrics[self.metric])
        stop = trainer.strategy.broadcast(trainer.is_global_zero and self._report(trainer.global_step, value))
        trainer.should_stop = trainer.should_stop or stop

    def _report(self, step: int, value: float) -> bool:
        """Whether the trial ends here."""
        study = trials.open_study(self.folder)
        trial, pruner = (
            trials.trial_of(study, self.number),
            trials.make_pruner(trials.search_space_of(study, self.folder)),
        )
        if step not in study.trials[self.number].intermediate_values:  # reported before a kill, to the same bits
            trial.report(value, step)
        stop = not math.isfinite(value) or trials.is_pruned(study, pruner, self.number)
        if stop:
            trial.set_user_attr(trials.STOPPED, step)
        return stop
