"""What lies in a stranger's run, or a damaged one: every verb of `cait` reads it as data, or ends in one line.

A new verb is covered as soon as `verbs()` has it: `[verb, RUN]`, or what `MORE` adds to that.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import SMALL, checkpoint, rows, slow
from PIL import Image
from rich.table import Table

from cait import disk, signature, yaml_reader
from cait.cli import command, main
from cait.errors import UserError, console, printable

BAD = "bad"
MORE = {
    "resume": [BAD, "--trainer.max_epochs=2", "--trainer.limit_train_batches=2"],
    "predict": [BAD, "x.png"],
    "push": [BAD, "me/x", "--dry-run"],
    "compare": [BAD, "good"],
    "visualize": [BAD, "--images", "x.png", "--no_validation"],
    "features": [BAD, "--images", "images", "--output", "features.npz"],
    "replay": [BAD, "--step=1", "--data-only"],
    "demo": [BAD, "--samples=0", "--runtime=nowhere"],
    "runs": [],
}
"""What verbs need beyond the name of a run."""
WITHOUT = {"fit", "crossval", "imagenet-check", "paper", "shards", "study", "sweep", "zoo"}
"""Verbs that take no run."""
VERBS = {name: [name, *MORE.get(name, [BAD])] for name in command.verbs() if name not in WITHOUT}
"""The command lines of all verbs that take a run, and of those that read one by an option."""
VERBS["fit --from"] = ["fit", "--data.root=data/digits", "--from", BAD, "--trainer.fast_dev_run=true"]
FAST = [name for name in VERBS if name not in ("demo", "export", "push")]
Capture = pytest.CaptureFixture[str]
Mend = Callable[[Path], Any]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with a run that was trained and scored, `logs/good`."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "data").mkdir()
    (desk / "data/digits").symlink_to(digits_root)
    (desk / "images/a").mkdir(parents=True)
    for path in (desk / "x.png", desk / "images/a/x.png"):
        Image.new("RGB", (16, 16)).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=6", "--trainer.limit_val_batches=1"]
        main(["fit", *SMALL[:-2], "--data.num_workers=0", *short, "--ema.decay=0.9", "--run_name=good"])
        main(["eval", "good", "--trainer.limit_val_batches=1"])
    return desk


@pytest.fixture
def bad(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the run, to be damaged."""
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setenv("CAIT_RUN", "")
    run = desk / "logs" / BAD
    shutil.copytree(desk / "logs/good", run)
    yield run
    shutil.rmtree(run)
    (desk / "features.npz").unlink(missing_ok=True)


def ended(arguments: list[str]) -> Any:
    """The status of `cait`, called in this process."""
    try:
        main(arguments)
    except SystemExit as stop:
        return stop.code
    return 0


def told(arguments: list[str], capfd: Capture) -> tuple[str, str]:
    """(the one line of an error, or "" if there is none; all that was printed)"""
    os.environ.pop("CAIT_RUN", None)
    sys.argv[:] = ["cait"]
    status = ended(arguments)
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("cait: error: ")]
    assert status == 2 * len(lines), (arguments, err)
    assert "Traceback" not in err
    return "".join(lines), out + err


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize("name", ["card/curves.png", *slow("plots", ".owner", "validation.csv"), "any/name at all"])
def test_no_verb_leaves_a_run(name: str, kind: str, bad: Path, capfd: Capture) -> None:
    """Neither through a link, whatever it is called, nor into a pipe, which would wait."""
    victim, path = bad.parent.parent / "victim", bad / name
    victim.mkdir() if kind == "folder" else victim.write_text("mine")
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.remove(path)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    words = "is not a regular file" if kind == "pipe" else "is a link out of the run's folder"
    try:
        for verb, arguments in VERBS.items():
            line, shown = told(arguments, capfd)
            assert f"{path.name} {words}" in line or (verb == "runs" and f"{path.name} {words}" in shown), verb
        assert (victim.is_dir() and not any(victim.iterdir())) or victim.read_text() == "mine"
    finally:
        disk.remove(victim)


BOMB = "\n".join(
    [
        "a: &a [x,x,x,x,x,x,x,x,x,x]",
        *(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]" for a, b in itertools.pairwise("abcdefghi")),
    ]
)
YAML = {
    "aliases of aliases": (BOMB, "in the place of *a write what it stands for"),
    "lists in lists": (f"a: {'[' * 30_000}{']' * 30_000}", "more than 50 levels"),
    "mappings in mappings": ("".join(f"{' ' * n}a{n}:\n" for n in range(900)), "more than 50 levels"),
    "a number": (f"seed_everything: {'9' * 6000}", "is not YAML: Exceeds the limit"),
    "a part of itself": ("model: &a\n  fields: *a\n", "at line 2, column 11: in the place of *a"),
    "a value that its tag refuses": ("a: !!int x", "is not YAML: invalid literal"),
    "a class": ("a: !!python/name:os.system", "could not determine a constructor"),
    "a call": ("a: !!python/object/apply:os.abort []", "could not determine a constructor"),
    "two texts": ("a: 1\n---\nb: 2", "is not YAML at line 2"),
    "a key twice": ("a: {b: 1, b: 2}", "b is there twice"),
    "a control character": ('a: "\\e]"', "a control character"),
}


@pytest.mark.parametrize(("text", "words"), YAML.values(), ids=YAML)
def test_a_hostile_yaml_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        yaml_reader.load(text, "it")


def test_one_reader_of_yaml_serves_all_verbs(bad: Path, capfd: Capture) -> None:
    (bad / "config.yaml").write_text(BOMB)
    files = {
        "fit --config": ["fit", "--config", f"logs/{BAD}/config.yaml"],
        "eval --config": ["eval", "--config", f"logs/{BAD}/config.yaml", "--ckpt_path", "x.png"],
        "sweep": ["sweep", f"logs/{BAD}/config.yaml"],
    }
    for verb, arguments in (VERBS | files).items():
        if verb not in ("plot", "heat-maps", "demo") and arguments[0] in command.verbs():  # they need no settings
            line, shown = told(arguments, capfd)
            assert "in the place of *a" in (shown if verb == "runs" else line), verb


def changed(bad: Path, **parts: Any) -> None:
    """Change the run's config.yaml, which then is no longer this account's own."""
    path = bad / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name, value in parts.items():
        config[name] = config[name] | value if isinstance(value, dict) and isinstance(config.get(name), dict) else value
    path.write_text(yaml.safe_dump(config))


CODE = "strange_code:net"
NAMED: dict[str, Mend] = {
    "a callback": lambda bad: changed(bad, trainer={"callbacks": [{"class_path": "strange_code.Payload"}]}),
    "a network": lambda bad: changed(bad, model={"name": CODE}),
    "a data set": lambda bad: changed(bad, data={"root": CODE}),
    "a field": lambda bad: changed(bad, model={"fields": {"depth": {"class_path": "strange_code.Payload"}}}),
    "a checkpoint's network": lambda bad: rewrite(bad, lambda content: content["hyper_parameters"].update(name=CODE)),
    "a checkpoint's class": lambda bad: rewrite(
        bad, lambda content: content["hyper_parameters"].update(_class_path="strange_code.Payload")
    ),
    "a checkpoint's instantiator": lambda bad: rewrite(
        bad, lambda content: content["hyper_parameters"].update(_instantiator="strange_code.net")
    ),
}


def rewrite(bad: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the run's checkpoints."""
    for name in ("best.ckpt", "last.ckpt"):
        content = torch.load(bad / "checkpoints" / name, weights_only=True)
        change(content)
        torch.save(content, bad / "checkpoints" / name)


@pytest.mark.parametrize("verb", [*FAST, *slow(*(name for name in VERBS if name not in FAST))])
def test_no_verb_runs_what_a_run_names(verb: str, bad: Path, capfd: Capture) -> None:
    source = "import pathlib\npathlib.Path('ran').touch()\nPayload = net = None\n"
    (bad.parent.parent / "strange_code.py").write_text(source)
    untouched = {
        name: (bad / name).read_bytes() for name in ("config.yaml", "checkpoints/best.ckpt", "checkpoints/last.ckpt")
    }
    for kind, name_it in NAMED.items():
        for name, content in untouched.items():
            (bad / name).write_bytes(content)
        name_it(bad)
        told(VERBS[verb], capfd)  # an error of another kind than the user's fails here
        assert not Path("ran").exists(), kind
        assert "strange_code" not in sys.modules, kind


def scores(change: Callable[[dict[str, Any]], Any]) -> Mend:
    def mend(bad: Path) -> None:
        path = bad / "evaluation.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return mend


def written(name: str, content: str | bytes, mode: str = "wb") -> Mend:
    def mend(bad: Path) -> None:
        with (bad / name).open(mode) as file:
            file.write(content.encode() if isinstance(content, str) else content)

    return mend


DAMAGED: dict[str, tuple[str, Mend, str]] = {
    "scores: no JSON": ("card", written("evaluation.json", "{"), "evaluation.json is no JSON"),
    "scores: NaN": ("card", written("evaluation.json", '{"step": NaN}'), "is no JSON: NaN is no number"),
    "scores: a list": ("card", written("evaluation.json", "[1]"), "evaluation.json: its content cannot be used"),
    "scores: acc1": ("card", scores(lambda found: found["raw"].update(acc1="x")), "raw.acc1 cannot be used"),
    "scores: a class": ("card", scores(lambda found: found["raw"].update(per_class={"a": []})), "raw.per_class.a"),
    "baselines": ("card", written("baselines.json", '{"step": 1}'), "baselines.json: metric cannot be used"),
    "metrics: no text": ("plot", written("metrics.csv", b"\xff\n", "ab"), "metrics.csv is no text"),
    "metrics: a cell": (
        "plot",
        written("metrics.csv", "step,val/acc1\n1,x\n"),
        "is no row of numbers",
    ),
    "metrics: cells": ("plot", written("metrics.csv", f"1{',1' * 40}\n", "ab"), "is no row of numbers"),
    "weights: empty": ("predict", written("checkpoints/best.ckpt", ""), "best.ckpt is not a whole checkpoint"),
    "weights: step": ("predict", lambda bad: rewrite(bad, lambda c: c.update(global_step="x")), "global_step"),
    "weights: weights": ("predict", lambda bad: rewrite(bad, lambda c: c.update(state_dict=[1])), "state_dict"),
    "weights: a network": (
        "predict",
        lambda bad: rewrite(bad, lambda c: c["hyper_parameters"].update(num_classes="x")),
        "hyper_parameters.num_classes",
    ),
    "weights: a field": (
        "predict",
        lambda bad: rewrite(bad, lambda c: c["hyper_parameters"].update(fields={"depth": "x"})),
        "best.ckpt cannot be loaded",
    ),
    "weights: a class": (
        "predict",
        lambda bad: rewrite(bad, lambda c: of_data(c).update(class_names=[1])),
        "class_names[0]",
    ),
    "weights: an average": (
        "eval",
        lambda bad: rewrite(bad, lambda c: c["callbacks"].update(EMA={"x": 1})),
        "the moving average in logs/bad/checkpoints/best.ckpt cannot be used",
    ),
    "weights: averages": (
        "resume",
        lambda bad: rewrite(bad, lambda c: c["callbacks"].update(EMA=[1])),
        "last.ckpt cannot",
    ),
    "weights: loops": ("resume", lambda bad: rewrite(bad, lambda c: c["loops"].update(fit_loop=[1])), "last.ckpt"),
    "weights: optimizer": ("resume", lambda bad: rewrite(bad, lambda c: c.update(optimizer_states=[1])), "last.ckpt"),
}


def of_data(content: dict[str, Any]) -> dict[str, Any]:
    """The data module's part of a checkpoint."""
    return next(part for part in content.values() if isinstance(part, dict) and "depends_on" in part)


@pytest.mark.parametrize(("verb", "damage", "words"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_named(verb: str, damage: Mend, words: str, bad: Path, capfd: Capture) -> None:
    damage(bad)
    line, _ = told(VERBS[verb], capfd)
    assert words in line


def test_garbage_in_the_metrics_stops_no_resume(bad: Path, capfd: Capture) -> None:
    """The checkpoint says where the run is. What is no metric is left out."""
    before = rows(bad)
    written("metrics.csv", b"a,b\n", "ab")(bad)
    line, _ = told(VERBS["resume"], capfd)
    assert line == ""
    assert checkpoint(bad)["global_step"] == 8
    assert {row["step"] for row in rows(bad)} >= {row["step"] for row in before}


@pytest.mark.parametrize(
    "damage",
    [
        written("config.yaml", BOMB),
        lambda bad: os.mkfifo(bad / "pipe"),
        lambda bad: changed(bad, trainer={"max_epochs": "x"}),
    ],
)
def test_one_bad_run_breaks_no_list(damage: Mend, bad: Path, capfd: Capture) -> None:
    damage(bad)
    _, shown = told(["runs", "--json"], capfd)
    found = {row["name"]: row for row in json.loads(shown)}
    assert found["good"]["damage"] is None
    assert BAD in found[BAD]["damage"]
    _, shown = told(["runs"], capfd)
    assert re.search(r"^bad .*, damaged *$", shown, re.M)


CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
NAMES = [
    "[/b] x",
    f"a{CLIPBOARD}",
    ":smile:",
    "[link=file:///]y",
    "\u202eabc",
    "<b>",
]
"""Markup, and codes of a terminal."""


@pytest.mark.parametrize("verb", [*FAST, *slow(*(name for name in VERBS if name not in FAST))])
def test_no_name_is_markup_or_a_code(verb: str, bad: Path, capfd: Capture) -> None:
    rewrite(bad, lambda content: of_data(content).update(class_names=NAMES))

    def renamed(content: dict[str, Any]) -> None:
        content["class_names"] = NAMES
        for part in ("raw", "ema"):
            content[part]["per_class"] = dict.fromkeys(NAMES, 50.0)

    scores(renamed)(bad)
    logged = (bad / "metrics.csv").read_text().replace("val/acc5", "val/[/b]" + CLIPBOARD)
    (bad / "metrics.csv").write_text(logged)
    _, shown = told(VERBS[verb], capfd)
    assert not {"\x1b", "\x07", "\u202e"} & {*shown}


def test_the_console_shows_names_as_they_are(capsys: Capture) -> None:
    table = Table("[/b] x", title="[/i] y")
    for name in NAMES:
        table.add_row(name)
    console(width=80).print(table, *NAMES)
    shown = capsys.readouterr().out
    assert all(shown.count(name) >= 2 for name in NAMES if printable(name) == name)
    assert not {"\x1b", "\x07", "\u202e"} & {*shown}


OUTPUTS = {
    "eval": ["eval", "good"],
    "predict": ["predict", "good", "x.png"],
    "export": ["export", "good", "--format=torch_export"],
    "card": ["card", "good"],
    "plot": ["plot", "good"],
    "visualize": ["visualize", "good", "--images=x.png"],
    "compare": ["compare", "good", BAD],
    "features": ["features", "good", "--images=images"],
    "replay": ["replay", "good", "--step=1", "--data-only"],
    "demo": ["demo", "good"],
}
"""Verbs with --output."""


@pytest.mark.parametrize("verb", [verb for verb in OUTPUTS if verb in VERBS])
def test_an_output_that_cannot_be_is_refused_at_once(
    verb: str, bad: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    """A pipe, a file in the place of a folder, and a place that cannot be: before anything is computed."""
    desk = bad.parent.parent
    monkeypatch.setattr(torch.nn.Module, "__call__", None)
    suffix = {"features": ".npz", "compare": ".png", "export": ".pt2"}.get(verb, "")
    pipe = desk / f"pipe{suffix}"
    os.mkfifo(pipe)
    before = sorted(desk.rglob("*"))
    try:
        for place in (pipe, desk / "x.png/y" / f"z{suffix}", Path("/proc/none") / f"z{suffix}"):
            line, _ = told([*OUTPUTS[verb], f"--output={place}"], capfd)
            assert str(place) in line
        assert sorted(desk.rglob("*")) == before
    finally:
        pipe.unlink()


@pytest.mark.parametrize("content", [b"", b"short", b"\n"])
def test_a_damaged_key_signs_nothing(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = signature.signed("a: 1\n")
    assert (tmp_path / "cait/key").stat().st_mode & 0o777 == 0o600
    assert signature.is_own(own)
    assert not signature.is_own(own.replace("1", "2", 1))
    assert not signature.is_own(own[: own.index("signed") + 9])
    assert not signature.is_own("a: 1\n")
    (tmp_path / "cait/key").write_bytes(content)
    assert not signature.is_own(own)
    assert signature.signed("a: 1\n") == "a: 1\n"
