"""What must hold for a run in any situation, asked of its files and of what the verbs print; see docs/laws.md."""

import csv
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from answers import check_agreement, chosen_by
from harness import rows
from processes import run as run_process
from same import same
from situations import CLASSES, NO_PICTURE, Made, Situation, grow, make

TAUGHT = ("--model.distillation", "--model.teacher")
LEARNED = (*TAUGHT, "--model.weights", "--model.freeze", "--model.solve")
ENDS = "--trainer.max_epochs=2"


class Trial:
    """A situation on the disk and the runs in it."""

    def __init__(self, folder: Path, situation: Situation):
        self.made: Made = make(folder, situation)
        self.words = self.made.arguments()
        self.situation = situation
        self.folder = folder
        self.run = folder / "logs/mine"
        devices = situation["devices"]
        self.processes = 2 if devices == "launcher" else int(devices)
        self.printed = ""

    def check(self) -> list[str]:
        """Train, resume and score as the situation says, and ask all laws: those that do not hold."""
        broken = []
        for law in (train, no_image_on_both_sides, settings_are_used, one_number):
            try:
                law(self)
            except AssertionError as error:
                broken.append(f"{law.__name__}: {str(error)[:1000]}")
                if law == train:
                    break
        return broken

    def call(self, verb: str, *words: str) -> Any:
        """Run a verb of `cait`, training on as many processes as the situation says."""
        processes = self.processes if verb in ("fit", "resume") else 1
        return run_process(self.folder, verb, *words, processes=processes)

    def cait(self, *words: str, may_be: tuple[int, ...] = (0,)) -> Any:
        """The same of a verb that has to do its work."""
        done = self.call(*words)
        assert done.returncode in may_be, (words[0], done.returncode, done.stderr[-500:])
        assert "Traceback" not in done.stderr, (words[0], done.stderr[-500:])
        return done

    def fit(self, name: str, *more: str, without: tuple[str, ...] = (), **how: Any) -> Any:
        words = [word for word in self.words if not word.startswith(without)]
        return self.cait("fit", *words, f"--run_name={name}", *more, **how)


def seen(run):
    return json.loads((run / "seen.json").read_text())


# Exact and continued


def train(trial):
    """Train the run logs/mine to the end of its second epoch."""
    if trial.situation["weights"] == "run" or trial.situation["teacher"] != "none":
        train_before(trial)
    how = trial.situation["resumed"]
    if how == "no":
        trial.printed = trial.fit("mine", ENDS).stdout
        return
    if how == "amid":
        trial.fit("mine", ENDS, "--trainer.callbacks+=own_things.LeavesOnce", may_be=(0, 137))
        trial.printed = trial.cait("resume", "mine").stdout
    else:
        trial.fit("mine", "--trainer.max_epochs=1")
        shutil.copy(trial.run / "seen.json", trial.folder / "first.json")
        if how == "grown":
            go_on_grown(trial)
            return
        trial.printed = trial.cait("resume", "mine", ENDS).stdout
    trial.fit("whole", ENDS)
    ends_with_the_bits_of_one_left_alone(trial.run, trial.folder / "logs/whole")


def train_before(trial):
    """Train what the run starts or learns from. Where classes meet, names decide."""
    trial.fit("before", "--trainer.max_epochs=1", without=LEARNED)
    best = torch.load(trial.folder / "logs/before/checkpoints/best.ckpt", weights_only=True)
    is_renamed = trial.situation["teacher"] == "renamed"
    if is_renamed:
        best["ImageNetDataModule"]["class_names"] = ["other", "names", "as", "many"]
    torch.save(best, trial.folder / "teacher.ckpt")
    if is_renamed:
        refused = trial.fit("refused", "--trainer.max_epochs=1", may_be=(0, 2))
        assert refused.returncode == 2, "a teacher of other classes is taken"
        assert "teacher" in refused.stderr
        trial.words = [word for word in trial.words if not word.startswith(TAUGHT)]


def go_on_grown(trial):
    """Resume a run whose folder has grown, also by the setting that a refusal names."""
    grow(trial.made)
    done = trial.call("resume", "mine", ENDS)
    advice = re.search(r"--data\.check_resume \w+", done.stderr)
    if done.returncode == 2 and advice:
        done = trial.cait("resume", "mine", ENDS, advice[0].replace(" ", "="))
    assert done.returncode == 0, f"a folder that has grown is continued: {done.stderr[-500:]}"
    trial.printed = done.stdout


def ends_with_the_bits_of_one_left_alone(run, whole):
    got, expected = (
        torch.load(path / "checkpoints/last.ckpt", weights_only=True) for path in (run, whole)
    )
    for part in ("state_dict", "optimizer_states"):
        assert same(got[part], expected[part]), part
    assert same(got["callbacks"].get("EMA"), expected["callbacks"].get("EMA")), "moving average"
    assert rows(run) == rows(whole), (rows(run), rows(whole))


# One run, one number


def one_number(trial):
    """What was printed as best, metrics.csv, eval, predict and load say the same of the same images."""
    run = trial.run
    best = re.search(r"│ best +(val\S*)/(\S+) ([\d.]+)", trial.printed)
    assert best, f"no best among what was printed: {trial.printed[-300:]}"
    logged = [{name: float(cell) for name, cell in row.items() if cell} for row in rows(run)]
    for row in logged:
        for name, figure in row.items():
            assert math.isfinite(figure) or "grad" in name, (name, figure)
    trial.cait("eval", "mine")
    evaluation = json.loads((run / "evaluation.json").read_text())
    scored = evaluation["ema" if chosen_by(run)[0] == "val_ema" else "raw"]
    name = f"{best[1]}/{best[2]}"
    figures_of_best = [float(best[3]), scored[best[2]], max(row.get(name, -1) for row in logged)]
    assert max(figures_of_best) - min(figures_of_best) < 0.006, (name, figures_of_best)

    verbs = ["load", trial.situation["verb"]]
    if "predict" not in verbs:
        verbs.append("predict")
    if trial.situation["images"] == "several" and "page" in verbs:
        verbs.remove("page")  # which shows no single answers
    check_agreement(run, trial.printed, verbs)


def real(trial, path):
    return os.path.realpath(trial.folder / path)


# No image on both sides


def no_image_on_both_sides(trial):
    """Training and validation share no file, group or content, also before and after a folder has grown."""
    made = trial.made
    now = seen(trial.run)
    assert now["processes"] == trial.processes, "all processes train one run"
    sides = [(now["train"], now["val"])]
    if trial.situation["resumed"] in ("grown", "extended"):
        first = json.loads((trial.folder / "first.json").read_text())
        sides += [(first["train"], now["val"]), (now["train"], first["val"])]
        assert trial.situation["images"] == "own" or first["val"] == now["val"], "it stays"
    for train, val in sides:
        for key in (lambda path: real(trial, path), made.group):
            both = {key(path) for path, _ in train} & {key(path) for path, _ in val}
            assert not both, sorted(both)[:3]
    no_equal_files(trial, now)
    several = ["always", CLASSES[1], CLASSES[3]]
    is_of_several = trial.situation["images"] == "several"
    # what a run writes is no data
    assert now["classes"] == sorted(several if is_of_several else CLASSES)
    if not made.is_divided:
        each_class_is_on_both_sides(now)
        with (trial.run / "validation.csv").open(newline="", encoding="utf-8") as file:
            listed = {real(trial, str(made.root / row["path"])) for row in csv.DictReader(file)}
        assert listed == {real(trial, path) for path, _ in now["val"]}


def no_equal_files(trial, now):
    """Where the user divides the images, `cait check` names equal files."""
    train, val = (
        {hashlib.sha256((trial.folder / path).read_bytes()).digest() for path, _ in now[side]}
        for side in ("train", "val")
    )
    both = train & val - {hashlib.sha256(NO_PICTURE).digest()}
    if both and trial.situation["images"] == "folders":
        told = trial.call("check", str(trial.made.root))
        assert "copy." in told.stdout + told.stderr
    else:
        assert not both or trial.situation["images"] == "own", f"{len(both)} equal files"


def each_class_is_on_both_sides(now):
    """And no class is nearly all on one."""
    train, val = (
        Counter(name for _, label in now[side] for name in label.split(";"))
        for side in ("train", "val")
    )
    for name in now["classes"]:
        assert 0 < val[name] <= train[name], (name, val[name], train[name])


# Used or refused


def settings_are_used(trial):
    """Each class counts in a balanced loss."""
    for weight in seen(trial.run)["weights"] or []:
        assert math.isfinite(weight)
        assert weight > 0
