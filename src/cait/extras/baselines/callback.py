"""After training: score the baselines, and write them into baselines.json."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cait import disk
from cait.errors import one_line
from cait.extras import probes
from cait.extras.baselines import report, scoring
from cait.plugins import Run
from cait.run.checkpoints import LastCheckpoint


class Baselines(Callback):
    """Writes the file when a run of one process has ended as planned; a failure is one line on the screen.

    Everything of the run is saved by then, so that nothing of it can change.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Score. Lightning does not call this after an exception or a signal."""
        last = trainer.callback_metrics.get("val/acc1")
        if stage != "fit" or trainer.world_size > 1 or last is None:
            return
        file = self.run.folder / report.FILE
        try:
            file.unlink(missing_ok=True)  # from before the run went on
            self._score(trainer, pl_module, file)
        except (Exception, KeyboardInterrupt) as error:
            print(f"no baselines: {one_line(error) or type(error).__name__}", flush=True)

    def _score(self, trainer: Trainer, pl_module: Any, file: Path) -> None:
        data, device = self.run.data, trainer.strategy.root_device
        samples, val_samples = data.train_images.samples, data.val_images.samples
        sizes = [min(len(each), scoring.MOST) for each in (samples, val_samples)]
        print(
            f"scoring baselines on {sizes[0]:,} training and {sizes[1]:,} validation images; "
            "--baselines false leaves this out",
            flush=True,
        )
        begin = time.monotonic()
        with probes.on(device, pl_module.model) as network:
            train, val = (scoring.read(each, data, network, device) for each in (samples, val_samples))
        reading = time.monotonic() - begin
        scores = scoring.Scores(train, val, data.num_classes)
        for name, answer in scoring.ANSWERS.items():
            if next(self._signals(trainer), 0):
                print("no further baselines: the run is to stop", flush=True)
                return
            if answer is not scoring.neighbours or train.features is not None:  # a head of another kind has none
                scores.add(name, answer)
        metrics = {name: trainer.callback_metrics.get(f"val/{name}") for name in report.UNITS}
        metric = "acc1_macro" if "acc1_macro" in str(self.run.config.best_metric) else "acc1"
        found = {
            "step": trainer.global_step,
            "metric": metric if metrics[metric] is not None else "acc1",
            "run": {name: float(value) for name, value in metrics.items() if value is not None},
            "images": dict(zip(("training", "validation"), map(len, (train.labels, val.labels)), strict=True)),
            "seconds_to_read": round(reading, 2),
            "baselines": scores.rows,
        }
        with disk.whole(file) as beside:
            beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def _signals(self, trainer: Trainer) -> Iterator[int]:
        """The signal that a run has received, if any; its handlers only note it until the end."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, LastCheckpoint):
                yield callback.signals.received
