"""What each verb answers for the same images of one run, and the accuracy that each place gives: all must agree."""

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import call, rows

Answers = dict[str, str | None]
"""The class of each image by the image's real path; None if it cannot be read. Several classes are joined by ";"."""
CANNOT = (
    "timm does not know",
    "the page cannot run a reader or evaluation transform",
    "class folders that the model",
)
"""Refusals of a network or a data set that a verb is not for; its answers are then left out."""


def answers(
    run: Path, images: Sequence[Path] | None = None, only: Sequence[str] | None = None
) -> dict[str, Answers]:
    """{verb: {image: class}} of the run in the folder `run`, as its best checkpoint answers by default.

    Only validation images have an answer of "eval" and "page". A verb that is not installed is left out.

    Args:
        images: files; None takes the validation images.
        only: the verbs to ask; None asks all of `VERBS`.
    """
    place = run.absolute().parent.parent
    with contextlib.chdir(place):
        held_out = [name for name, _ in validation(run)]
    paths = [os.path.realpath(image) for image in images] if images is not None else held_out
    found = {}
    for verb, ask in VERBS.items():
        if only is None or verb in only:
            with (
                contextlib.chdir(place),
                pytest.MonkeyPatch.context() as patch,
                contextlib.suppress(_LeftOut),
            ):
                asked = ask(run.absolute(), held_out if verb in ("eval", "page") else paths, patch)
                found[verb] = {path: asked[path] for path in paths if path in asked}
    return found


def figures(
    run: Path, told: str = "", found: Mapping[str, Answers] | None = None
) -> dict[str, float]:
    """{source: top-1 in percent} of a run's best checkpoint on its validation images.

    Args:
        told: what `cait fit` printed; with it the summary's figure is among them.
        found: `answers` of the validation images; None asks all verbs.
    """
    place = run.absolute().parent.parent
    with contextlib.chdir(place):
        labels = {name: label for name, label in validation(run) if label is not None}
    found = answers(run) if found is None else found
    counted = {}
    for verb, of_verb in found.items():
        read = {
            path: answer
            for path, answer in of_verb.items()
            if path in labels and answer is not None
        }
        counted[verb] = (
            100 * sum(answer == labels[path] for path, answer in read.items()) / max(len(read), 1)
        )
    prefix, step = chosen_by(run)
    logged = [
        row
        for row in rows(run)
        if int(row["step"]) == max(step - 1, 0) and row.get(f"{prefix}/acc1")
    ]
    shown = {"metrics.csv": float(logged[-1][f"{prefix}/acc1"])} if logged else {}
    evaluation = run / "evaluation.json"
    if evaluation.exists():
        part = json.loads(evaluation.read_text())["ema" if prefix == "val_ema" else "raw"]
        shown["evaluation.json"] = part["acc1"]
    patterns = {
        "summary": (told, rf"best +{prefix}/acc1 ([\d.]+) %"),
        "card's table": (
            _text(run / "card/README.md"),
            r"\| validation images \| [\d,]+ \| ([\d.]+) %",
        ),
        "page's line": (_text(run / "visualize/index.html"), r"top-1 ([\d.]+) % of"),
        "demo's facts": (_text(run / "demo/model.json"), r'"Accuracy", "([\d.]+) %'),
    }
    for source, (text, pattern) in patterns.items():
        if match := re.search(pattern, text):
            shown[source] = float(match[1])
    return shown | counted


def validation(run: Path) -> list[tuple[str, str | None]]:
    """The real path and the class of each validation image of a run, in the order of the loader."""
    from cait.cli import loading

    checkpoint, folder = loading.checkpoint_of(os.path.relpath(run), "score")
    loaded = loading.from_checkpoint(checkpoint, folder)
    loaded.data.setup("validate")
    samples, names = loaded.data.val_images.samples, loaded.label_names
    pairs = [(samples.name(index), _label(samples, index)) for index in range(len(samples))]
    return [(os.path.realpath(path), names[label] if label >= 0 else None) for path, label in pairs]


def _label(samples: Any, index: int) -> int:
    from cait.data.reading import UnreadableImageError

    try:
        return samples[index][1]
    except UnreadableImageError:
        return -1


def chosen_by(run: Path) -> tuple[str, int]:
    """("val" or "val_ema", step): the weights that chose a run's best.ckpt, as Lightning notes it, and its steps."""
    content = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    states = [
        state for key, state in content["callbacks"].items() if key.startswith("BestCheckpoint")
    ]
    return states[0]["monitor"].partition("/")[0], content["global_step"]


class _LeftOut(Exception):  # noqa: N818  # it is no error
    """A verb is not for this run, or is not installed."""


def _done(run: Path, *arguments: str) -> str:
    """What `cait` prints, in the folder above logs/."""
    from cait.cli import command

    if arguments[0] not in command.verbs():
        raise _LeftOut
    done = call(run.parent.parent, arguments[0], os.path.relpath(run), *arguments[1:])
    if done.returncode and any(words in done.stderr for words in CANNOT):
        raise _LeftOut
    assert done.returncode == 0, done.stderr
    return done.stdout


def _predict(run: Path, images: Sequence[str], patch: pytest.MonkeyPatch) -> Answers:
    output = run / "answers.csv"
    output.unlink(missing_ok=True)
    _done(run, "predict", *images, "--output", str(output))
    with output.open(newline="") as file:
        return {row["path"]: None if row["error"] else row["class"] for row in csv.DictReader(file)}


def _load(run: Path, images: Sequence[str], patch: pytest.MonkeyPatch) -> Answers:
    from cait import load
    from cait.errors import UserError

    module, found = load(run), Answers()
    for image in images:
        try:
            best = module.predict(image)
        except UserError:
            found[image] = None
        else:
            found[image] = (
                ";".join(each["class"] for each in (best if module.task.several else best[:1]))
                or ";"
            )
    return found


def _eval(run: Path, images: Sequence[str], patch: pytest.MonkeyPatch) -> Answers:
    from cait.train.callbacks import EMA
    from cait.train.module import CaiTModule

    logits: dict[str, list[torch.Tensor]] = {"val": [], "val_ema": []}
    labels: list[torch.Tensor] = []
    step, average = CaiTModule.validation_step, EMA.on_validation_batch_end
    module: list[Any] = []

    def of_raw(self: Any, batch: Any, *others: Any) -> Any:
        module[:] = [self]
        logits["val"].append(step(self, batch, *others))
        labels.append(batch[1])
        return logits["val"][-1]

    def of_average(self: Any, *others: Any) -> None:
        average(self, *others)
        if self.logits is not None:
            logits["val_ema"].append(self.logits)

    patch.setattr(CaiTModule, "validation_step", of_raw)
    patch.setattr(EMA, "on_validation_batch_end", of_average)
    _done(run, "eval", "--trainer.accelerator=cpu", "--trainer.devices=1")
    task, names = module[0].task, _class_names(run)
    probabilities = task.probabilities(torch.cat(logits[chosen_by(run)[0]]).float())[: len(images)]
    read = torch.cat(labels)[: len(images)].reshape(len(images), -1)[:, 0] >= 0
    best = task.best(probabilities, names)
    texts = [
        ";".join(each["class"] for each in (many if task.several else many[:1])) or ";"
        for many in best
    ]
    return {
        path: text if is_read else None
        for path, text, is_read in zip(images, texts, read, strict=True)
    }


def _page(run: Path, images: Sequence[str], patch: pytest.MonkeyPatch) -> Answers:
    from cait.cli import command

    if "visualize" not in command.verbs():
        raise _LeftOut
    from cait.extras.visualize import sections

    score, scored = sections.score, list[Any]()

    def spied(*given: Any, **named: Any) -> Any:
        scored[:] = found = score(*given, **named)
        return found

    patch.setattr(sections, "score", spied)
    _done(run, "visualize", "--num_images", "1")
    names = _class_names(run)
    return dict.fromkeys(images) | {images[each.place]: names[each.predicted] for each in scored}


def _onnx(run: Path, images: Sequence[str], patch: pytest.MonkeyPatch) -> Answers:
    _done(run, "export", "--format", "onnx", "--output", str(run / "answers.onnx"))
    return _of_onnx(run, images, run / "answers.onnx")


def _demo(run: Path, images: Sequence[str], patch: pytest.MonkeyPatch) -> Answers:
    """The page's own network. Its preparation in JavaScript is Pillow's to the bit, as its own tests show."""
    from cait.cli import command

    if "demo" not in command.verbs():
        raise _LeftOut
    from contrib.demo import web_runtime

    # the tests have no network; the page's files are not needed for the answers
    runtime = run / "runtime"
    runtime.mkdir(exist_ok=True)
    for name in web_runtime.FILES:
        (runtime / name).write_bytes(name.encode())
        digest = base64.b64encode(hashlib.sha512(name.encode()).digest()).decode()
        patch.setitem(web_runtime.FILES, name, f"sha512-{digest}")
    _done(run, "demo", "--samples", "0", "--runtime", str(runtime))
    return _of_onnx(run, images, run / "demo/model.onnx")


def _of_onnx(run: Path, images: Sequence[str], file: Path) -> Answers:
    import onnxruntime

    from cait import load
    from cait.errors import UserError

    session, module, found = onnxruntime.InferenceSession(file), load(run), Answers()
    names = _class_names(run)
    for image in images:
        try:
            given = {"images": module.transform(image)[None].numpy()}
        except UserError:
            found[image] = None
            continue
        probabilities = module.task.probabilities(
            torch.from_numpy(session.run(["logits"], given)[0])
        )
        (best,) = module.task.best(probabilities, names)
        found[image] = (
            ";".join(each["class"] for each in (best if module.task.several else best[:1])) or ";"
        )
    return found


def _card(run: Path, images: Sequence[str], patch: pytest.MonkeyPatch) -> Answers:
    """The code on the card, as it is typed, on timm's files beside it."""
    if not (run / "evaluation.json").exists():
        _done(run, "eval", "--trainer.accelerator=cpu", "--trainer.devices=1")
    _done(run, "card", "me/own")
    code = re.search(r"```python\n(.*?)```", _text(run / "card/README.md"), re.S)[1]
    code = code.replace(":.3f}", ":.9f}")  # which side of .5 a probability is
    readable, found = dict(zip(_raw_names(run), _class_names(run), strict=True)), Answers()
    for image in images:
        typed = code.replace("hf_hub:me/own", f"local-dir:{run / 'card'}").replace(
            '"image.jpg"', repr(image)
        )
        try:
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                exec(typed, {})
        except OSError:
            found[image] = None
            continue
        lines = [line.partition(" ") for line in shown.getvalue().splitlines()]
        if "sigmoid" in code:
            found[image] = (
                ";".join(readable[name] for share, _, name in lines if float(share) > 0.5) or ";"
            )
        else:
            found[image] = readable[lines[0][2]]
    return found


def _class_names(run: Path) -> list[str]:
    from cait import load

    return load(run).class_names


def _raw_names(run: Path) -> list[str]:
    from cait import ckpt

    return ckpt.class_names(ckpt.read_checkpoint(run / "checkpoints/best.ckpt")) or _class_names(
        run
    )


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


VERBS: dict[str, Callable[[Path, Sequence[str], pytest.MonkeyPatch], Answers]] = {
    "predict": _predict,
    "load": _load,
    "eval": _eval,
    "page": _page,
    "onnx": _onnx,
    "card": _card,
    "demo": _demo,
}
