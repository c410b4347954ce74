"""The baselines of a run: scored after training, kept in baselines.json, and what follows from them."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from cait import disk
from cait.data.dataset import NO_LABEL
from cait.errors import one_line, to_type
from cait.extras import probes
from cait.extras.extract import evenly, extract
from cait.model.config import TIMM, VARIANTS
from cait.plugins import Results, Run
from cait.run.checkpoints import BestCheckpoint, LastCheckpoint
from cait.run.rundir import CONFIG

FILE = "baselines.json"
MOST = 10_000
"""Images that are read of each set."""
LONGER = 10
"""Minutes that a run gets next whose baselines are better, if it was shorter."""
SHOWN = 0.01
"""Points that the table tells apart; a run logs its accuracy in float32."""
NAMES = {"acc1": "top-1", "acc1_macro": "mean of the classes"}
NUMBER: Any = (int, float)
ROW = {"name": str, "how": str, "seconds": NUMBER, "score": NUMBER}
SHAPE = {"metric": str, "run": NUMBER, "how": str, "baselines": [ROW]}
Scores = dict[str, Any]


class Baselines(Callback):
    """Writes the file when a run of one process has ended as planned; a failure is one line on the screen.

    Everything of the run is saved by then, so that nothing of it can change.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Score. Lightning does not call this after an exception or a signal."""
        if stage != "fit" or trainer.world_size > 1 or "val/acc1" not in trainer.callback_metrics:
            return
        file = self.run.folder / FILE
        try:
            file.unlink(missing_ok=True)  # from before the run went on
            self._score(trainer, pl_module, file)
        except (Exception, KeyboardInterrupt) as error:
            print(f"no baselines: {one_line(error) or type(error).__name__}", flush=True)

    def suggestions(self) -> list[tuple[str, str]]:
        """What the summary of the run says that one may try."""
        return suggestions(self.run)

    def _score(self, trainer: Trainer, pl_module: Any, file: Path) -> None:
        data, device = self.run.data, trainer.strategy.root_device
        sets = data.train_images.samples, data.val_images.samples
        count, val_count = (min(len(samples), MOST) for samples in sets)
        images = f"{count:,} training and {val_count:,} validation images"
        print(f"scoring baselines on {images}; --baselines false leaves this out", flush=True)
        found = [extract(pl_module.model, each, data, device, evenly(len(each), MOST), pixels=True) for each in sets]
        train, val = (each.at(each.labels != NO_LABEL) for each in found)
        metric, run, how = _of_run(trainer)
        rows = []
        for row in probes.scores(train, val, data.num_classes):
            rows.append(row | {"score": row[metric]})
            if any(each.signals.received for each in trainer.checkpoint_callbacks if isinstance(each, LastCheckpoint)):
                return  # a signal, which is only noted until the end
        scored = {"metric": NAMES[metric], "run": run, "how": how, "baselines": rows}
        with disk.whole(file) as beside:
            beside.write_text(json.dumps(scored, indent=1) + "\n", encoding="utf-8")


def _of_run(trainer: Trainer) -> tuple[str, float, str]:
    """The accuracy that the run is judged by, its value, and whose it is."""
    for callback in trainer.checkpoint_callbacks:
        metric = getattr(callback, "metric", "").removeprefix("val/")
        if metric in NAMES and isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
            return metric, float(callback.best_model_score), "its best.ckpt"
    return "acc1", float(trainer.callback_metrics["val/acc1"]), "its last weights"


def read(folder: Path) -> Scores | None:
    """What the file holds; None if it is not there, UserError if it is damaged."""
    try:
        return disk.read_json(folder / FILE, SHAPE)
    except OSError:
        return None


def table(found: Scores) -> Results:
    """The run and its baselines, the best first."""
    entries = [("this run", found["how"], found["run"])]
    entries += [(row["name"], f"{row['how']}, {row['seconds']:.1f} s", row["score"]) for row in found["baselines"]]
    entries.sort(key=lambda entry: -entry[2])
    better, points = entries[0][0], entries[0][2] - found["run"]
    note = f"{better}: {points:.2f} points better than this run" if points >= SHOWN else ""
    rows = [(name, how, f"{score:.2f} %") for name, how, score in entries]
    return Results("Baselines", ("", "how", found["metric"]), rows, note)


def suggestions(run: Run) -> list[tuple[str, str]]:
    """If a baseline is better than the run: the same from weights if it started from none, then more minutes."""
    found, start, name = read(run.folder), run.module.initial_weights, run.module.name
    if not found or not table(found).note or run.program.script:  # its classes have no recipe
        return []
    source = start.weights or ("timm" if start.pretrained else "")
    named = f"--model.name {name}" if name not in VARIANTS or start.weights else ""
    tries = [("timm", named)] if not source and (name in VARIANTS or name.startswith(TIMM)) else []
    if time.time() - (run.folder / CONFIG).stat().st_mtime < 60 * LONGER:
        tries.append((source, f"{named} --minutes {LONGER}".strip()))
    return [("try", _command(str(run.data.root), *each)) for each in tries]


def _command(root: str, source: str, options: str) -> str:
    command = to_type("make train DATA=", "cait fit --data.root ") + shlex.quote(root)
    if source:
        command += to_type(" FROM=", " --from ") + shlex.quote(source)
    return command + (to_type(f' ARGS="{options}"', f" {options}") if options else "")
