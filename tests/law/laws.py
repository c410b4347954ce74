"""What must hold for a run in any situation, asked of its files and of what the verbs print; see docs/laws.md."""

import math
import os
import re
import shutil
from collections import Counter

import torch
from answers import check_agreement
from harness import parsed, rows
from processes import run as run_process
from runs import assert_same
from situations import CLASSES, NO_PICTURE, grow, make

TAUGHT = ("--model.distillation", "--model.teacher")
LEARNED = (*TAUGHT, "--model.weights", "--model.freeze", "--model.solve")
ONE_EPOCH = "--trainer.max_epochs=1"
ENDS = "--trainer.max_epochs=2"


class Trial:
    """A situation on the disk and the runs in it."""

    def __init__(self, folder, situation):
        self.made = make(folder, situation)
        self.words = self.made.arguments()
        self.situation = situation
        self.folder = folder
        self.run = folder / "logs/mine"
        self.processes = int(situation["devices"].replace("launcher", "2"))
        self.printed = ""

    def check(self):
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

    def call(self, *words):
        """Run a verb of `cait`, training on as many processes as the situation says."""
        processes = self.processes if words[0] in ("fit", "resume") else 1
        return run_process(self.folder, *words, processes=processes)

    def cait(self, *words, may_be=(0,)):
        """The same of a verb that has to do its work."""
        done = self.call(*words)
        assert done.returncode in may_be, (words[0], done.returncode, done.stderr[-500:])
        assert "Traceback" not in done.stderr, (words[0], done.stderr[-500:])
        return done

    def fit(self, name, *more, **how):
        return self.cait("fit", *self.words, f"--run_name={name}", *more, **how)

    def leave_out(self, *settings):
        self.words = [word for word in self.words if not word.startswith(settings)]


def seen(run):
    return parsed(run / "seen.json")


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
        leaves = ["--trainer.callbacks+=recorder.LeavesOnce", "--trainer.callbacks.step=2"]
        trial.fit("mine", ENDS, *leaves, may_be=(0, 137))
        trial.printed = trial.cait("resume", "mine").stdout
    else:
        trial.fit("mine", ONE_EPOCH)
        shutil.copy(trial.run / "seen.json", trial.folder / "first.json")
        if how == "grown":
            go_on_grown(trial)
            return
        trial.printed = trial.cait("resume", "mine", ENDS).stdout
    trial.fit("whole", ENDS)
    assert_same(trial.run, trial.folder / "logs/whole")


def train_before(trial):
    """Train what the run starts or learns from. Where classes meet, names decide."""
    words = trial.words
    trial.leave_out(*LEARNED)
    trial.fit("before", ONE_EPOCH)
    trial.words = words
    best = parsed(trial.folder / "logs/before/checkpoints/best.ckpt")
    if trial.situation["teacher"] != "renamed":
        torch.save(best, trial.folder / "teacher.ckpt")
        return
    best["ImageNetDataModule"]["class_names"] = ["other", "names", "as", "many"]
    torch.save(best, trial.folder / "teacher.ckpt")
    refused = trial.fit("refused", ONE_EPOCH, may_be=(0, 2))
    assert refused.returncode == 2, "a teacher of other classes is taken"
    assert "teacher" in refused.stderr
    trial.leave_out(*TAUGHT)


def go_on_grown(trial):
    """Resume a run whose folder has grown, also by the setting that a refusal names."""
    grow(trial.made)
    done = trial.call("resume", "mine", ENDS)
    advice = re.search(r"--data\.check_resume \w+", done.stderr)
    if done.returncode == 2 and advice:
        done = trial.cait("resume", "mine", ENDS, advice[0].replace(" ", "="))
    assert done.returncode == 0, f"a folder that has grown is continued: {done.stderr[-500:]}"
    trial.printed = done.stdout


# One run, one number


def one_number(trial):
    """What was printed as best, metrics.csv, eval, predict and load say the same of the same images."""
    for row in rows(trial.run):
        for name, figure in row.items():
            assert not figure or "grad" in name or math.isfinite(float(figure)), (name, figure)
    trial.cait("eval", "mine")
    verbs = {"load", "predict", trial.situation["verb"]}
    if trial.situation["images"] == "several":
        verbs.discard("page")  # which shows no single answers
    shown = check_agreement(trial.run, trial.printed, verbs)
    assert {"summary", "metrics.csv"} <= shown


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
        first = parsed(trial.folder / "first.json")
        sides += [(first["train"], now["val"]), (now["train"], first["val"])]
        assert trial.situation["images"] == "own" or first["val"] == now["val"], "it stays"
    for train, val in sides:
        for key in (lambda path: real(trial, path), made.group):
            train_keys, val_keys = ({key(path) for path, _ in side} for side in (train, val))
            both = train_keys & val_keys
            assert not both, sorted(both)[:3]
    no_equal_files(trial, now)
    several = ["always", CLASSES[1], CLASSES[3]]
    classes = several if trial.situation["images"] == "several" else CLASSES
    assert now["classes"] == sorted(classes)  # what a run writes is no data
    if not made.is_divided:
        each_class_is_on_both_sides(now)
        marked = parsed(trial.run / "validation.csv")
        listed = {real(trial, str(made.root / row["path"])) for row in marked}
        assert listed == {real(trial, path) for path, _ in now["val"]}


def no_equal_files(trial, now):
    """Where the user divides the images, `cait check` names equal files."""
    train, val = (
        {(trial.folder / path).read_bytes() for path, _ in now[side]} for side in ("train", "val")
    )
    both = train & val - {NO_PICTURE}
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
    for weight in seen(trial.run)["weights"]:
        assert 0 < weight < math.inf
