"""What each verb answers for the same images of one run, and the accuracy that each place gives: all must agree."""

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import call, rows
from sklearn.metrics import f1_score

import cait
from cait import ckpt
from cait.cli import command
from cait.errors import UserError

Answers = dict[str, str | None]
"""The class of each image by the image's real path; None if it cannot be read. Several classes are joined by ";"."""
Patch = pytest.MonkeyPatch
CANNOT = (
    "timm does not know",
    "the page cannot run a reader or evaluation transform",
    "class folders that the model",
)
"""Refusals of a network or a data set that a verb is not for; its answers are then left out."""


class LeftOut(Exception):  # noqa: N818  # it is no error
    """A verb is not for this run, or is not installed."""


def check_agreement(run, printed, verbs):
    """Assert that the verbs answer alike for a scored run's validation images, and all figures are the same.

    Returns what shows a figure.

    Args:
        printed: what `cait fit` printed.
        verbs: those that are asked; "load" has to be one.
    """
    labels = validation(run)
    found = answers(run, [*labels], verbs)
    for verb, answered in found.items():
        for path, answer in answered.items():
            # the page shows nothing of an image without a label
            if verb != "page" or labels[path] is not None:
                assert answer == found["load"][path], (verb, path)
    prefix, step = chosen_by(run)
    evaluation = json.loads((run / "evaluation.json").read_text())
    scored = evaluation["ema" if prefix == "val_ema" else "raw"]
    readable = {path: label for path, label in labels.items() if label and found["load"][path]}
    pairs = [(label, found["load"][path]) for path, label in readable.items()]
    several = "f1" in scored
    metric = "f1" if several else "acc1"
    shown = figures(run, printed, f"{prefix}/{metric}", step)
    shown |= {"eval": scored[metric], "load": macro_f1(pairs) if several else percent_right(pairs)}
    assert max(shown.values()) - min(shown.values()) < 0.006, shown
    assert scored["images"] == len(pairs)
    assert scored["loss"] == pytest.approx(loss_of_load(run, readable), rel=1e-4)
    recalls = {} if several else scored["per_class"]
    for name, share in recalls.items():
        assert share == pytest.approx(percent_right([pair for pair in pairs if pair[0] == name]))
    return {*shown}


def answers(run, images, verbs):
    """{verb: {image: class}} of validation images, as a run's best checkpoint answers by default.

    A verb that is not for this run or not installed is left out.
    """
    found = {}
    for verb in verbs:
        with in_place(run), Patch.context() as patch, contextlib.suppress(LeftOut):
            found[verb] = VERBS[verb](run.absolute(), images, patch)
    return found


def figures(run, printed, metric, step):
    """{source: figure} of what shows the metric after this step."""
    shown = {}
    for row in rows(run):
        if row.get(metric) and int(row["step"]) == max(step - 1, 0):
            shown["metrics.csv"] = float(row[metric])
    patterns = {"summary": (printed, rf"best +{metric} ([\d.]+)")}
    if metric.endswith("acc1"):
        card = text(run / "card/README.md")
        patterns["card"] = (card, r"\| validation images \| [\d,]+ \| ([\d.]+) %")
        patterns["page"] = (text(run / "visualize/index.html"), r"top-1 ([\d.]+) % of")
        patterns["demo"] = (text(run / "demo/model.json"), r'"Accuracy", "([\d.]+) %')
    for source, (page, pattern) in patterns.items():
        match = re.search(pattern, page)
        if match:
            shown[source] = float(match[1])
    return shown


def percent_right(pairs):
    return 100 * sum(label == answer for label, answer in pairs) / len(pairs)


def macro_f1(pairs):
    """scikit-learn's, of labels and answers that are sets of classes."""
    names = sorted({name for label, _ in pairs for name in label.split(";") if name})
    truth, found = (
        [[name in str(joined).split(";") for name in names] for joined in side]
        for side in zip(*pairs, strict=True)
    )
    return float(f1_score(truth, found, average="macro", zero_division=0))


def loss_of_load(run, labels):
    """The loss of the probabilities that `cait.load` gives for images."""
    with in_place(run):
        module = cait.load(run.absolute())
        module.task.best = lambda probabilities, *_: [*probabilities]
        shares = torch.stack(module.predict([*labels])).double()
    names = module.class_names
    right = torch.tensor(
        [[name in label.split(";") for name in names] for label in labels.values()]
    )
    if module.task.several:
        return torch.nn.functional.binary_cross_entropy(shares, right.double()).item()
    return -shares[right].log().mean().item()


def in_place(run):
    """In the folder above logs/."""
    return contextlib.chdir(run.absolute().parent.parent)


def validation(run):
    """The class of each validation image by its real path, as `own_things.Seen` saw it; None of one without."""
    with in_place(run):
        images = json.loads((run / "seen.json").read_text())["val"]
        return {os.path.realpath(path): label for path, label in images}


def chosen_by(run):
    """("val" or "val_ema", step): the weights that chose a run's best.ckpt, as Lightning notes it, and its steps."""
    content = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    [state] = [
        state for key, state in content["callbacks"].items() if key.startswith("BestCheckpoint")
    ]
    return state["monitor"].partition("/")[0], content["global_step"]


def text(path):
    return path.read_text() if path.exists() else ""


def joined(best, module):
    """The class of an answer, or all of them."""
    chosen = best if module.task.several else best[:1]
    return ";".join(answer["class"] for answer in chosen) or ";"


def check_verb(name):
    if name not in command.verbs():
        raise LeftOut


def done(run, verb, *words):
    """Run a verb of `cait`."""
    check_verb(verb)
    ended = call(Path.cwd(), verb, os.path.relpath(run), *words)
    if ended.returncode and any(reason in ended.stderr for reason in CANNOT):
        raise LeftOut
    assert ended.returncode == 0, ended.stderr


# The verbs


def of_predict(run, images, _):
    output = run / "answers.csv"
    output.unlink(missing_ok=True)
    done(run, "predict", *images, f"--output={output}")
    with output.open(newline="") as file:
        return {row["path"]: None if row["error"] else row["class"] for row in csv.DictReader(file)}


def of_load(run, images, _):
    module = cait.load(run)
    found = Answers.fromkeys(images)
    for image in images:
        with contextlib.suppress(UserError):  # one that cannot be read
            found[image] = joined(module.predict(image), module)
    return found


def of_page(run, images, patch):
    check_verb("visualize")
    from cait.extras.visualize import sections

    score = sections.score
    scored: list[Any] = []

    def spied(*arguments, **settings):
        scored[:] = score(*arguments, **settings)
        return scored

    patch.setattr(sections, "score", spied)
    done(run, "visualize", "--num_images=1")
    names = cait.load(run).class_names
    return Answers.fromkeys(images) | {images[one.place]: names[one.predicted] for one in scored}


def of_onnx(run, images, _):
    done(run, "export", "--format=onnx", f"--output={run / 'answers.onnx'}")
    return by_onnxruntime(run, images, run / "answers.onnx")


def of_demo(run, images, patch):
    """The page's own network. Its preparation in JavaScript is Pillow's to the bit, as its own tests show."""
    check_verb("demo")
    from contrib.demo import web_runtime

    # the tests have no network; the page's files are not needed for the answers
    runtime = run / "runtime"
    runtime.mkdir(exist_ok=True)
    for name in web_runtime.FILES:
        (runtime / name).write_bytes(name.encode())
        digest = base64.b64encode(hashlib.sha512(name.encode()).digest()).decode()
        patch.setitem(web_runtime.FILES, name, f"sha512-{digest}")
    done(run, "demo", "--samples=0", f"--runtime={runtime}")
    return by_onnxruntime(run, images, run / "demo/model.onnx")


def by_onnxruntime(run, images, file):
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    module = cait.load(run)
    found = Answers.fromkeys(images)
    for image in images:
        with contextlib.suppress(UserError):
            pixels = module.transform(image)[None].numpy()
            [logits] = session.run(["logits"], {"images": pixels})
            probabilities = module.task.probabilities(torch.from_numpy(logits))
            [best] = module.task.best(probabilities, module.class_names)
            found[image] = joined(best, module)
    return found


def of_card(run, images, _):
    """The code on the card, as it is typed, on timm's files beside it."""
    done(run, "card", "me/own")
    code = re.search(r"```python\n(.*?)```", text(run / "card/README.md"), re.S)[1]
    code = code.replace("hf_hub:me/own", f"local-dir:{run / 'card'}")
    code = code.replace(":.3f}", ":.9f}")  # which side of .5 a probability is
    module = cait.load(run)
    names = module.class_names
    of_card = ckpt.class_names(ckpt.read_checkpoint(run / "checkpoints/best.ckpt")) or names
    readable = dict(zip(of_card, names, strict=True))
    found = Answers.fromkeys(images)
    for image in images:
        shown = io.StringIO()
        try:
            with contextlib.redirect_stdout(shown):
                exec(code.replace('"image.jpg"', repr(image)), {})
        except OSError:
            continue
        lines = [line.partition(" ") for line in shown.getvalue().splitlines()]
        likely = [line for line in lines if float(line[0]) > 0.5]
        chosen = likely if module.task.several else lines[:1]
        found[image] = ";".join(readable[name] for _, _, name in chosen) or ";"
    return found


VERBS: dict[str, Callable[[Path, Sequence[str], Patch], Answers]] = {
    "predict": of_predict,
    "load": of_load,
    "page": of_page,
    "onnx": of_onnx,
    "card": of_card,
    "demo": of_demo,
}
