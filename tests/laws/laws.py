"""What must hold for a run in any situation, asked of its files and of what the verbs print; see docs/laws.md."""

import csv
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import answers
from processes import run as run_process
from runs import same
from situations import CLASSES, TEACHER, Made, Situation, grow, make
from sklearn.metrics import f1_score

TAUGHT = ("--model.distillation", "--model.teacher")


class BrokenLawError(AssertionError):
    """A law that a run breaks."""


def hold(law: str, kept: bool, what: Any = "") -> Iterator[str]:
    """The law, if it is broken, with what shows it."""
    if not kept:
        yield f"{law}: {str(what)[:400]}"


class Trial:
    """A situation on the disk and the runs in it; `broken` lists the laws that do not hold."""

    def __init__(self, folder: Path, situation: Situation) -> None:
        self.made: Made = make(folder, situation)
        self.situation, self.folder = situation, folder
        self.processes = 2 if situation.devices == "launcher" else int(situation.devices)
        self.broken: list[str] = []
        self.printed = self.said = ""

    def check(self) -> list[str]:
        """Train, resume and score as the situation says, and ask all laws."""
        run = self.folder / "logs/mine"
        asked = (
            self.train,
            lambda: no_image_on_both_sides(self, run),
            lambda: settings_are_used(run),
        )
        for law in (*asked, lambda: one_number(self, run)):
            try:
                self.broken += law() or ()
            except BrokenLawError as broken:
                self.broken.append(str(broken))
                if law == self.train:
                    break
        return self.broken

    def call(self, verb: str, *arguments: str) -> Any:
        """Run a verb of `cait`, training on as many processes as the situation says."""
        return run_process(
            self.folder,
            verb,
            *arguments,
            processes=self.processes if verb in ("fit", "resume") else 1,
        )

    def cait(self, *arguments: str, may_be: tuple[int, ...] = (0,)) -> Any:
        done = self.call(*arguments)
        if done.returncode not in may_be or "Traceback" in done.stderr:
            *_, last = done.stderr.strip().splitlines() or [""]
            raise BrokenLawError(
                f"every verb does its work: cait {arguments[0]} ends with {done.returncode}: {last}"
            )
        self.said += done.stdout + done.stderr
        return done

    def fit(self, name: str, *more: str, **how: Any) -> Any:
        return self.cait("fit", *self.made.arguments, f"--run_name={name}", *more, **how)

    def before(self) -> None:
        """Train what the run starts or learns from."""
        anew = (
            "--model.weights",
            "--model.freeze",
            "--model.solve",
            "--model.distill",
            "--model.teacher",
        )
        words = [word for word in self.made.arguments if not word.startswith(anew)]
        self.cait("fit", *words, "--run_name=before", "--trainer.max_epochs=1")
        checkpoint = torch.load(
            self.folder / "logs/before/checkpoints/best.ckpt", weights_only=True
        )
        if self.situation.teacher == "renamed":
            checkpoint["ImageNetDataModule"]["class_names"] = ["other", "names", "as", "many"]
        torch.save(checkpoint, self.folder / TEACHER)

    def train(self) -> None:
        """Train the run logs/mine to the end of its second epoch."""
        if self.situation.weights == "run" or self.situation.teacher != "none":
            self.before()
        if self.situation.teacher == "renamed":
            refused = self.fit("refused", "--trainer.max_epochs=1", may_be=(0, 2))
            told = refused.returncode == 2 and "teacher" in refused.stderr
            self.broken += hold(
                "where classes meet, names decide", told, "a teacher of other classes is taken"
            )
            self.made.arguments = [
                word for word in self.made.arguments if not word.startswith(TAUGHT)
            ]
        how, end = self.situation.resumed, "--trainer.max_epochs=2"
        if how == "no":
            self.printed = self.fit("mine", end).stdout
            return
        if how == "amid":
            self.fit("mine", end, "--trainer.callbacks+=own_things.LeavesOnce", may_be=(0, 137))
            self.printed = self.cait("resume", "mine").stdout
        else:
            self.fit("mine", "--trainer.max_epochs=1")
            self.first = seen(self.folder / "logs/mine")
            if how == "grown":
                grow(self.made)
                self.printed = self.go_on(end)
                return
            self.printed = self.cait("resume", "mine", end).stdout
        self.fit("whole", end)
        self.broken += exact(self.folder / "logs/mine", self.folder / "logs/whole")

    def go_on(self, end: str) -> str:
        """Resume a run whose folder has grown, also by the setting that a refusal names."""
        done = self.call("resume", "mine", end)
        if done.returncode == 2 and (advice := re.search(r"--data\.check_resume \w+", done.stderr)):
            return self.cait("resume", "mine", end, advice[0].replace(" ", "=")).stdout
        if done.returncode:
            raise BrokenLawError(
                f"a folder that has grown is continued: {done.stderr.strip().splitlines()[-1:]}"
            )
        return done.stdout


def seen(run: Path) -> dict[str, Any]:
    return json.loads((run / "seen.json").read_text())


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [*csv.DictReader(file)]


def exact(run: Path, whole: Path) -> Iterator[str]:
    """Law 5: a run that was left and resumed ends with the bits of one left alone."""
    law = "a resumed run ends with the bits of one left alone"
    got, expected = (
        torch.load(each / "checkpoints/last.ckpt", weights_only=True) for each in (run, whole)
    )
    for part in ("state_dict", "optimizer_states"):
        yield from hold(law, same(got[part], expected[part]), f"{part} differs")
    average = [each["callbacks"].get("EMA") for each in (got, expected)]
    yield from hold(law, same(*average), "the moving average differs")
    rows = [*zip(metrics(run), metrics(whole), strict=False)]
    odd = [f"{name}: {a[name]}, {b[name]}" for a, b in rows for name in a if a[name] != b.get(name)]
    yield from hold(law, not odd and len(metrics(run)) == len(metrics(whole)), odd)


# Law 1


def one_number(trial: Trial, run: Path) -> Iterator[str]:
    """Law 1: what was printed as best, metrics.csv, eval, predict and load say the same of the same images."""
    law, several = "one run, one number", trial.situation.images == "several"
    best = re.search(r"│ best +(val\S*)/(\S+) ([\d.]+)", trial.printed)
    if not best:
        raise BrokenLawError(f"{law}: no best among what was printed: {trial.printed[-300:]}")
    name, printed = best[2], float(best[3])
    figures = [{key: float(text) for key, text in row.items() if text} for row in metrics(run)]
    bad = {
        key: figure for row in figures for key, figure in row.items() if not math.isfinite(figure)
    }
    bad = {key: figure for key, figure in bad.items() if "grad" not in key}
    yield from hold("a figure is a number of images that count", not bad, bad)
    logged = max(row[f"{best[1]}/{name}"] for row in figures if f"{best[1]}/{name}" in row)
    yield from hold(law, abs(logged - printed) < 0.006, f"printed {best[0]}, metrics.csv {logged}")

    trial.cait("eval", "mine")
    scored = json.loads((run / "evaluation.json").read_text())[
        "ema" if best[1] == "val_ema" else "raw"
    ]
    yield from hold(
        law, abs(scored[name] - printed) < 0.006, f"printed {best[0]}, eval {scored[name]}"
    )

    images = [(path, label) for path, label in seen(run)["val"] if label is not None]
    trial.cait(
        "predict", "mine", *(path for path, _ in images), "--format=csv", "--output=found.csv"
    )
    with (trial.folder / "found.csv").open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    counted = [
        (row, label) for row, (_, label) in zip(rows, images, strict=True) if not row["error"]
    ]
    if several:
        truth, found = (
            [[name in text.split(";") for name in seen(run)["classes"]] for text in texts]
            for texts in zip(*((label, row["class"]) for row, label in counted), strict=True)
        )
        of_predict, of_eval = (
            float(f1_score(truth, found, average="macro", zero_division=0)),
            scored["f1"],
        )
    else:
        of_predict = 100 * sum(row["class"] == label for row, label in counted) / len(counted)
        of_eval = scored["acc1"]
    yield from hold(
        law, abs(of_predict - of_eval) < 1e-3, f"eval {of_eval}, counted from predict {of_predict}"
    )
    yield from hold(
        law,
        scored["images"] == len(counted),
        f"eval {scored['images']} images, predict {len(counted)}",
    )
    said = {os.path.realpath(trial.folder / row["path"]): row["class"] for row, _ in counted}
    paths = [Path(path) for path in said]
    for verb, answered in answers(run, paths, only=[trial.situation.verb]).items():
        if several and verb == "page":  # which shows no single answers
            continue
        odd = [
            (path, said[path], found)
            for path, found in answered.items()
            if said.get(path, found) != found
        ]
        yield from hold(
            law, not odd, f"of {len(said)}, {verb} answers {len(odd)} unlike predict: {odd[:2]}"
        )
    yield from loaded(
        trial, [row for row, _ in counted], [label for _, label in counted], scored["loss"]
    )


def loaded(
    trial: Trial, rows: list[dict[str, str]], labels: list[str], loss: float
) -> Iterator[str]:
    """What `cait.load` says of the images: the classes of predict, and the loss of eval."""
    import cait

    law = "one run, one number"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trial.folder)
        patch.syspath_prepend(trial.folder)
        module = cait.load("logs/mine")
        answers = module.predict([row["path"] for row in rows], top_k=len(module.class_names))
        module.task.best = lambda probabilities, *_: [*probabilities]
        shares = torch.stack(module.predict([row["path"] for row in rows])).double()
    for row, answer in zip(rows, answers, strict=True):
        several = trial.situation.images == "several"
        found = (";".join(one["class"] for one in answer) or ";") if several else answer[0]["class"]
        yield from hold(
            law, found == row["class"], f"{row['path']}: predict {row['class']}, load {found}"
        )
    names = module.class_names
    if trial.situation.images == "several":
        targets = torch.tensor(
            [[float(name in label.split(";")) for name in names] for label in labels]
        )
        of_load = torch.nn.functional.binary_cross_entropy(shares, targets.double()).item()
    else:
        of_load = (
            -shares[range(len(labels)), [names.index(label) for label in labels]]
            .log()
            .mean()
            .item()
        )
    yield from hold(
        law,
        math.isclose(of_load, loss, rel_tol=1e-4),
        f"loss of eval {loss:.6f}, of load {of_load:.6f}",
    )


# Law 2


def no_image_on_both_sides(trial: Trial, run: Path) -> Iterator[str]:
    """Law 2: training and validation share no file, group or content, also before and after a folder has grown."""
    law, made, folder = "no image on both sides", trial.made, trial.folder
    now = seen(run)
    yield from hold(
        "all processes train one run", now["processes"] == trial.processes, now["processes"]
    )
    stages = [("", now["train"], now["val"])]
    if trial.situation.resumed in ("grown", "extended"):
        stages += [("since the run began ", trial.first["train"], now["val"])]
        stages += [("since the run began ", now["train"], trial.first["val"])]
        yield from hold(
            "what validates stays",
            made.situation.images == "own" or trial.first["val"] == now["val"],
        )
    for when, train, val in stages:
        keys = {
            "file": lambda path: os.path.realpath(folder / path),
            "group": lambda path: made.groups.get(Path(path).name, path),
        }
        for kind, key in keys.items():
            both = {key(path) for path, _ in train} & {key(path) for path, _ in val}
            yield from hold(f"{law} ({kind})", not both, f"{when}{len(both)}: {sorted(both)[:3]}")
    digest = {
        path: hashlib.sha256((folder / path).read_bytes()).digest()
        for path, _ in now["train"] + now["val"]
    }
    both = {digest[path] for path, _ in now["train"]} & {digest[path] for path, _ in now["val"]}
    both -= {hashlib.sha256(b"no picture").digest()}
    if made.situation.images == "folders":  # the user divides them
        told = trial.call("check", str(made.root))
        both = {each for each in both if "copy." not in told.stdout + told.stderr}
    equal = f"{len(both)} equal files, and nothing says so"
    yield from hold(f"{law} (content)", not both or made.situation.images == "own", equal)
    several = ["always", CLASSES[1], CLASSES[3]]
    expected = sorted(several if made.situation.images == "several" else CLASSES)
    yield from hold("what a run writes is no data", now["classes"] == expected, now["classes"])
    if made.holds_out:
        yield from shares(now)
        with (run / "validation.csv").open(newline="", encoding="utf-8") as file:
            listed = [row["path"] for row in csv.DictReader(file)]
        paths = {os.path.realpath(folder / made.root / path) for path in listed}
        same_paths = paths == {os.path.realpath(folder / path) for path, _ in now["val"]}
        yield from hold("validation.csv lists what validates", same_paths, listed[:3])


def shares(now: dict[str, Any]) -> Iterator[str]:
    """Each class is on both sides, and no class is nearly all on one."""
    train, val = (
        Counter(part for _, label in now[side] for part in label.split(";"))
        for side in ("train", "val")
    )
    for name in now["classes"]:
        held, images = val[name], val[name] + train[name]
        yield from hold(
            "a split keeps its classes", 0 < held <= images / 2, f"{held} of {images} {name}"
        )


# Law 3


def settings_are_used(run: Path) -> Iterator[str]:
    weights = seen(run)["weights"]
    if weights is not None:
        kept = all(math.isfinite(weight) and weight > 0 for weight in weights)
        yield from hold("each class counts in a balanced loss", kept, weights)
