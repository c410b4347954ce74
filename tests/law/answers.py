"""What each verb answers for the same images of one run, and the accuracy that each place gives: all must agree."""

import base64
import contextlib
import hashlib
import io
import os
import re
from pathlib import Path

import pytest
import torch
from harness import call, parsed, rows
from sklearn.metrics import f1_score

import cait
from cait import ckpt
from cait.cli import command
from cait.errors import UserError

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
    scored = parsed(run / "evaluation.json")["ema" if prefix == "val_ema" else "raw"]
    readable = {path: label for path, label in labels.items() if label and found["load"][path]}
    pairs = [(label, found["load"][path]) for path, label in readable.items()]
    several = "f1" in scored
    best = "mAP" if several else "acc1"
    shown = figures(run, printed, f"{prefix}/{best}", step) | {"eval": scored[best]}
    if several:
        assert scored["f1"] == pytest.approx(macro_f1(pairs), abs=0.006)
    else:
        shown["load"] = percent_right(pairs)
        for name, share in scored["per_class"].items():
            of_class = [pair for pair in pairs if pair[0] == name]
            assert share == pytest.approx(percent_right(of_class))
    assert max(shown.values()) - min(shown.values()) < 0.006, shown
    assert scored["images"] == len(pairs)
    assert scored["loss"] == pytest.approx(loss_of_load(run, readable), rel=1e-4)
    return {*shown}


def answers(run, images, verbs):
    """{verb: {image: class}} of validation images, as a run's best checkpoint answers by default.

    Of an image that cannot be read the class is None; several classes are joined by ";". A verb that is not for this
    run or not installed is left out.
    """
    found = {}
    for verb in verbs:
        with in_place(run), pytest.MonkeyPatch.context() as patch, contextlib.suppress(LeftOut):
            found[verb] = VERBS[verb](run.absolute(), images, patch)
    return found


PAGES = {
    "card": ("card/README.md", r"\| validation images \| [\d,]+ \| ([\d.]+) %"),
    "page": ("visualize/index.html", r"top-1 ([\d.]+) % of"),
    "demo": ("demo/model.json", r'"Accuracy", "([\d.]+) %'),
}
"""Where an accuracy stands."""


def figures(run, printed, metric, step):
    """{source: figure} of what shows the metric, which was best after this step."""
    logged = {int(row["step"]): float(row[metric]) for row in rows(run) if row.get(metric)}
    shown = {"metrics.csv": logged[max(step - 1, 0)], "the best row": max(logged.values())}
    for match in re.finditer(rf"best +{metric} ([\d.]+)", printed):
        shown["summary"] = float(match[1])
    if metric.endswith("acc1"):
        for source, (file, pattern) in PAGES.items():
            for match in re.finditer(pattern, text(run / file)):
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
        images = parsed(run / "seen.json")["val"]
        return {os.path.realpath(path): label for path, label in images}


def chosen_by(run):
    """("val" or "val_ema", step): the weights that chose a run's best.ckpt, as Lightning notes it, and its steps."""
    content = parsed(run / "checkpoints/best.ckpt")
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
    return {row["path"]: None if row["error"] else row["class"] for row in parsed(output)}


def each(images, answer):
    """What is answered for each; None of one that cannot be read."""
    found = dict.fromkeys(images)
    for image in images:
        with contextlib.suppress(UserError, OSError):
            found[image] = answer(image)
    return found


def of_load(run, images, _):
    module = cait.load(run)
    return each(images, lambda image: joined(module.predict(image), module))


def of_page(run, images, patch):
    check_verb("visualize")
    from cait.extras.visualize import sections

    score = sections.score
    scored = []

    def spied(*arguments, **settings):
        scored[:] = score(*arguments, **settings)
        return scored

    patch.setattr(sections, "score", spied)
    done(run, "visualize", "--num_images=1")
    names = cait.load(run).class_names
    answered = {images[one.place]: names[one.predicted] for one in scored}
    return dict.fromkeys(images) | answered


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
    digest = base64.b64encode(hashlib.sha512(b"").digest()).decode()
    for name in web_runtime.FILES:
        (runtime / name).touch()
        patch.setitem(web_runtime.FILES, name, f"sha512-{digest}")
    done(run, "demo", "--samples=0", f"--runtime={runtime}")
    return by_onnxruntime(run, images, run / "demo/model.onnx")


def by_onnxruntime(run, images, file):
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    module = cait.load(run)

    def answer(image):
        pixels = module.transform(image)[None].numpy()
        [logits] = session.run(["logits"], {"images": pixels})
        probabilities = module.task.probabilities(torch.from_numpy(logits))
        [best] = module.task.best(probabilities, module.class_names)
        return joined(best, module)

    return each(images, answer)


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

    def answer(image):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(code.replace('"image.jpg"', repr(image)), {})
        lines = [line.partition(" ") for line in shown.getvalue().splitlines()]
        likely = [line for line in lines if float(line[0]) > 0.5]
        chosen = likely if module.task.several else lines[:1]
        return ";".join(readable[name] for _, _, name in chosen) or ";"

    return each(images, answer)


VERBS = {
    "predict": of_predict,
    "load": of_load,
    "page": of_page,
    "onnx": of_onnx,
    "card": of_card,
    "demo": of_demo,
}
