"""A run's folder from a stranger, or a damaged one: every verb reads it as data, or ends in one line.

The tables are in strangers.yaml. A new verb is covered as soon as `command.verbs()` has it.
"""

import contextlib
import io
import json
import os
import random
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from inspect import signature as parameters_of
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import call, checkpoint, free_port, link_digits, slow
from lightning.pytorch import Trainer
from PIL import Image

import cait
from cait import disk, plugins, references, signature
from cait.cli import command, saved
from cait.errors import UserError, console, printable
from cait.guards import configurations, trust

TABLES: dict[str, Any] = yaml.full_load(Path(__file__).with_name("strangers.yaml").read_text())
WORDS: dict[str, str] = TABLES["verbs"] | {"serve": f"bad --port={free_port()}"}
VERBS = [name for name in command.verbs() if name not in TABLES["take_no_run"]]
if "recipe" in plugins.extras():
    VERBS.append("fit --from")
CHECKPOINTS = ("checkpoints/best.ckpt", "checkpoints/last.ckpt")
NET = "payload:net"
TRUST = "--trust-config"
PAYLOAD = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from lightning.pytorch import Callback
class Payload(Callback):
    pass
import cait
def net(**arguments):
    return cait.create_model("xxs24", **arguments)
"""
"""A module that leaves `ran` beside itself when it is imported."""


def rows(table):
    """A table's rows, as the parameter `row` of a test."""
    values = TABLES[table]
    names = [row.get("case") or "-".join(map(str, row.values()))[:80] for row in values]
    return pytest.mark.parametrize("row", values, ids=names)


def verbs(*quick):
    """Every verb, as the parameter `verb` of a test; those that are not quick are for the outer ring."""
    others = [verb for verb in VERBS if verb not in quick]
    return pytest.mark.parametrize("verb", [*quick, *slow(*others)])


@pytest.fixture(scope="module")
def desk(tmp_path_factory, digits_root, trained):
    """A folder with a run that was trained and scored, `logs/good`."""
    desk = tmp_path_factory.mktemp("desk")
    link_digits(desk, digits_root)
    shutil.copytree(trained, desk / "logs/good")
    (desk / "payload.py").write_text(PAYLOAD)
    (desk / "images/a").mkdir(parents=True)
    for name in ("x.png", "images/a/x.png"):
        Image.new("RGB", (16, 16)).save(desk / name)
    return desk


@pytest.fixture
def bad(desk, monkeypatch):
    """A copy of the run, to be damaged."""
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    if "serve" in VERBS:  # it would answer until it is stopped
        monkeypatch.setattr("contrib.serve.server.run", lambda *_: None)
    run = desk / "logs/bad"
    shutil.copytree(desk / "logs/good", run)
    yield run
    disk.remove(run)
    for name in ("features.npz", "ran", "bare.ckpt", "away.ckpt"):
        (desk / name).unlink(missing_ok=True)
    sys.modules.pop("payload", None)


def answer(words):
    """(the one line of an error, or "" if there is none; all that is printed) of `cait`."""
    done = call(Path.cwd(), *words)
    lines = [line for line in done.stderr.splitlines() if line.startswith("cait: error: ")]
    assert done.returncode == 2 * len(lines), (words, done.stderr)
    assert "Traceback" not in done.stderr
    return "".join(lines), done.stdout + done.stderr


def of_verb(verb, *more):
    """The same of a verb that is given the run."""
    return answer([*verb.split(), *shlex.split(WORDS.get(verb, "bad")), *more])


def merged(values, more):
    """A dictionary with other values, also within those that are dictionaries."""
    if not isinstance(values, dict) or not isinstance(more, dict):
        return more
    # beside `key` the reader refuses `key+`
    kept = {key: value for key, value in values.items() if f"{key}+" not in more}
    return kept | {key: merged(values.get(key), value) for key, value in more.items()}


def put(path, values):
    """Put other values into a file of a run; it then is no longer this account's own."""
    if path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(merged(yaml.safe_load(path.read_text()), values)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(merged(json.loads(path.read_text()), values)))
    else:
        torch.save(merged(torch.load(path, weights_only=True), values), path)


def flip(path, name):
    """Change a bit of a weight, as a disk may."""
    weight = torch.load(path, weights_only=True)["state_dict"][name].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weight) + 3] ^= 0x80
    path.write_bytes(content)


def change(run, row):
    """Change a run as a row says."""
    file = row.get("file", "config.yaml")
    for name in CHECKPOINTS if file == "checkpoints" else [file]:
        if "text" in row:
            (run / name).write_bytes(row["text"].encode("latin-1"))
        elif "flip" in row:
            flip(run / name, row["flip"])
        else:
            put(run / name, row["put"])


def has_run():
    return Path("ran").exists()


# Code


@rows("attacks")
def test_a_strangers_settings_are_not_run(row, bad):
    """Those of the data, which other verbs take, name neither code nor a place to write to."""
    config = bad / "config.yaml"
    assert trust.settings(config)  # as it was signed
    change(bad, row)
    with pytest.raises(UserError, match=TRUST):
        trust.settings(config)
    with signature.only_own(True):
        assert trust.settings(config)
    taken = ""
    with contextlib.suppress(UserError):
        taken = str(saved.data_settings(bad))
    for word in ("payload", "elsewhere", "4242", "torch.hub"):
        assert word not in taken


@verbs("predict")
def test_no_verb_runs_what_a_run_names(verb, bad, desk):
    named = [row for row in TABLES["attacks"] if "verbs" in row]
    for row in named + TABLES["attacks_in_checkpoints"]:
        for name in ("config.yaml", *CHECKPOINTS):
            shutil.copy(desk / "logs/good" / name, bad / name)
        change(bad, row if row in named else row | {"file": "checkpoints"})
        of_verb(verb)  # an error of another kind than the user's fails here
        assert not has_run(), row["case"]


@verbs("eval")
def test_a_run_without_code_needs_no_trust(verb, bad, desk, monkeypatch):
    """Whoever wrote it: it was edited by hand, or copied from another account. It stays in its folder."""
    if verb not in ("eval", "resume", "fit --from"):
        pytest.skip("reads no settings of training")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(bad / "account"))
    for row in TABLES["harmless"]:
        shutil.copy(desk / "logs/good/config.yaml", bad)
        change(bad, row)
        line, _ = of_verb(verb)
        assert TRUST not in line
        assert (line != "") == (verb in row.get("fails", ())), line
        assert not [*Path().rglob("elsewhere*")]


def test_what_a_run_names_is_run_when_it_is_trusted(bad):
    [callback] = [row for row in TABLES["attacks"] if row["case"] == "a callback"]
    change(bad, callback)
    put(bad / "config.yaml", {"model": {"name": NET}})
    for verb in ("eval", "resume"):
        assert TRUST in of_verb(verb)[0]
        assert not has_run()
        assert of_verb(verb, TRUST)[0] == ""
        assert has_run()
        Path("ran").unlink()
    assert of_verb("eval")[0] == ""  # who has resumed it has signed it
    for name in CHECKPOINTS:
        put(bad / name, {"hyper_parameters": {"name": f"{NET}work"}})
    assert TRUST in of_verb("predict")[0]


@pytest.mark.parametrize("verb", ["eval", *slow("resume")])
def test_the_text_that_was_checked_is_the_one_that_is_used(verb, bad, monkeypatch):
    """Swapped after the check, the file could name anything."""
    check = signature.is_own

    def swap_afterwards(text):
        is_own = check(text)
        put(bad / "config.yaml", {"model": {"name": NET}})
        return is_own

    monkeypatch.setattr(signature, "is_own", swap_afterwards)
    assert of_verb(verb)[0] == ""
    assert not has_run()


def test_a_config_yaml_of_ones_own_is_no_runs(tmp_path):
    """It lies beside no checkpoints: code in it is the user's."""
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{name: {NET!r}}}\n")
    assert trust.settings(config)
    with pytest.raises(UserError, match="may do anything"):
        trust.settings(config, is_run=True)


@pytest.mark.parametrize("verb", ["resume", "eval"])
def test_a_run_without_checkpoints_is_a_strangers_too(verb, bad):
    put(bad / "config.yaml", {"model": {"name": NET}})
    shutil.rmtree(bad / "checkpoints")
    (bad / ".lock").unlink(missing_ok=True)
    assert of_verb(verb)[0]
    assert not has_run()


def check_code(value):
    signature.check_code(Path("it"), disk.plain(value, "it"), None)


@pytest.mark.parametrize("code", TABLES["code"], ids=str)
def test_code_is_named_at_any_depth(code):
    """Wherever a file may put it."""
    for value in ([[code]], {"a": {"b": (code,)}}, (("a", code),), {"metrics": {"f1": [code]}}):
        with pytest.raises(UserError, match="which may do anything"):
            check_code(value)


def test_public_classes_and_timms_networks_need_no_trust():
    for name in TABLES["public"]:
        check_code({"name": name, "metrics": {"f1": name}})


def import_untrusted(text):
    """Do with a text of a stranger's checkpoint what a verb does."""
    check_code({"metrics": [text]})
    references.locate(text)


@pytest.mark.parametrize("before", TABLES["before"])
def test_what_is_imported_is_what_needs_trust(before, bad):
    """However a module is written: a text that needs no trust imports nothing."""
    for behind in TABLES["behind"]:
        text = f"{before}payload{behind}"
        with pytest.raises(UserError, match=r"may do anything|write it as"):
            import_untrusted(text)
        assert not has_run(), text


OBJECTS = [torch.zeros(3), torch.float32, Namespace(a=1)]


def place_in(content, draw):
    """A dictionary within the content, and one of its keys."""
    key = draw.choice([*content])
    inner = content[key]
    if isinstance(inner, dict) and inner and draw.random() < 0.7:
        return place_in(inner, draw)
    return content, key


@pytest.mark.parametrize("trials", [4, *slow(60)])
def test_a_checkpoint_is_data_whatever_it_holds(trials, bad):
    """It is loaded, or refused in a line; what it names is never imported, and what is no tree is walked by nobody."""
    draw = random.Random(0)
    path = bad / CHECKPOINTS[0]
    whole = path.read_bytes()
    for trial in range(trials):
        content = torch.load(io.BytesIO(whole), weights_only=True)
        holder, key = place_in(content, draw)
        if draw.random() < 0.2:
            del holder[key]
        else:
            holder[key] = draw.choice([*TABLES["hostile"], *OBJECTS])
        for source in (path, Path("bare.ckpt")):
            torch.save(content, source)
            with contextlib.suppress(UserError):
                cait.load(source)
            assert not has_run(), (trial, key)


@pytest.mark.parametrize(
    ("kind", "key", "setting"),
    [
        (cait.CaiTModule, "hyper_parameters", "loss"),
        (cait.CaiTModule, "hparams", "loss"),
        (cait.CaiTModule, "module_arguments", "loss"),
        (cait.ImageNetDataModule, "datamodule_hyper_parameters", "root"),
        *slow(
            (cait.CaiTModule, "hyper_parameters", "name"),
            (cait.CaiTModule, "hyper_parameters", "metrics"),
            (cait.CaiTModule, "hyper_parameters", "optimizer"),
        ),
    ],
)
def test_lightnings_own_loader_takes_a_file_as_data(kind, key, setting, bad):
    path = bad / CHECKPOINTS[1]
    content = checkpoint(bad)
    content[key] = content.pop("hyper_parameters") | {setting: NET}
    torch.save(content, path)
    for file in (path, Path(shutil.copy(path, "away.ckpt"))):
        with pytest.raises(UserError, match=f"^{file} names {NET}, which may do anything: "):
            kind.load_from_checkpoint(file)
        assert not has_run()


def test_lightnings_own_loader_loads_ones_own(bad):
    """What names no code, and code that this account has signed."""
    path = bad / CHECKPOINTS[1]
    root = str(Path("data/digits").resolve())
    assert cait.ImageNetDataModule.load_from_checkpoint(path, root=root).num_classes == 10
    assert cait.CaiTModule.load_from_checkpoint(path).name == "xxs24"
    config = bad / "config.yaml"
    put(config, {"model": {"name": NET}})
    config.write_text(signature.signed(config.read_text()))
    put(path, {"hyper_parameters": {"name": NET}})
    assert cait.CaiTModule.load_from_checkpoint(path).name == NET
    assert has_run()


class Unpickled:
    """Unpickled without care, it writes a file."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("ran"),)


def test_a_checkpoint_is_no_code(bad):
    for name in ("hostile.ckpt", "timm.pth"):
        torch.save(checkpoint(bad) | {"more": Unpickled()}, name)
    torch.load("hostile.ckpt", weights_only=False)
    Path("ran").unlink()  # so it would
    for row in TABLES["pickled"]:
        assert row["says"] in answer(row["words"].split())[0]
    assert not has_run()


def test_the_trainer_has_no_other_setting_that_takes_an_object():
    """A canary for Lightning's upgrades."""
    parameters = parameters_of(Trainer.__init__).parameters.items()
    taking = {name for name, parameter in parameters if "lightning." in str(parameter.annotation)}
    assert taking == {*configurations.CLASSES, *configurations.WORDS}


def test_what_this_account_signed_needs_no_trust(bad, monkeypatch):
    """Code does that a changed configuration names, or another account's."""
    config = Path("logs/own/config.yaml")
    short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    fit = ["fit", "--config=logs/good/config.yaml", f"--model.name={NET}", "--run_name=own"]
    scored = ["eval", "own"]
    predicted = ["predict", "own", "x.png"]
    try:
        # resumed with another setting: it is signed anew
        for words in (
            [*fit, *short],
            ["resume", "own", "--trainer.max_steps=3"],
            scored,
            predicted,
        ):
            assert answer(words)[0] == ""
        text = config.read_text()
        assert "max_steps: 3" in text
        config.write_text(text + "# a comment\n")
        assert TRUST in answer(scored)[0]
        config.write_text(text)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(bad / "account"))
        for words in (scored, predicted, ["resume", "own"]):
            assert TRUST in answer(words)[0]
    finally:
        disk.remove(config.parent)


# Files


@rows("places")
def test_no_verb_leaves_a_run(row, bad, tmp_path):
    """Neither through a link, whatever it is called, nor into a pipe, which would wait."""
    path = bad / row["name"]
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.remove(path)
    victim = tmp_path / "victim"
    victim.mkdir() if row["kind"].endswith("folder") else victim.write_text("mine")
    os.mkfifo(path) if row["kind"] == "pipe" else path.symlink_to(victim)
    why = "is not a regular file" if row["kind"] == "pipe" else "is a link out of the run's folder"
    for verb in VERBS:
        line, shown = of_verb(verb)
        assert f"{path.name} {why}" in (shown if verb == "runs" else line), verb
    assert not any(victim.iterdir()) if victim.is_dir() else victim.read_text() == "mine"


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def in_a_folders_place(path):
    path.unlink()
    path.mkdir()


BREAKS: dict[str, Callable[[Path], Any]] = {
    "gone": Path.unlink,
    "empty": partial(Path.write_bytes, data=b""),
    "truncated": truncated,
    "no text": partial(Path.write_bytes, data=b"\xff\xfe\x00"),
    "a folder": in_a_folders_place,
}


@verbs("predict")
def test_a_broken_file_is_told_in_a_line_or_not_needed(verb, bad, desk):
    good = desk / "logs/good"
    files = [path.relative_to(good) for path in good.rglob("*") if path.is_file()]
    for name in files:
        for broken in BREAKS.values():
            disk.remove(bad)
            shutil.copytree(good, bad)
            broken(bad / name)
            of_verb(verb)


@rows("damages")
def test_what_is_damaged_is_named(row, bad):
    if row["verb"] not in VERBS:
        pytest.skip("the verb of an extra that was removed")
    change(bad, row)
    assert row["says"] in of_verb(row["verb"])[0]


def test_one_reader_of_yaml_serves_all_verbs(bad):
    (bad / "config.yaml").write_text(TABLES["bomb"])
    others = ["fit --config logs/bad/config.yaml", "sweep logs/bad/config.yaml"]
    others += ["eval --config logs/bad/config.yaml --ckpt_path x.png"]
    # some need no settings
    lines = [
        f"{verb} {WORDS.get(verb, 'bad')}" for verb in VERBS if verb not in ("heat-maps", "demo")
    ]
    for line in lines + others:
        words = line.split()
        if words[0] in command.verbs():
            error, shown = answer(words)
            assert "in the place of *a" in (shown if words[0] == "runs" else error), line


@verbs("eval", "predict")
def test_no_name_is_markup_or_a_code(verb, bad):
    names = TABLES["names"]
    for name in CHECKPOINTS:
        put(bad / name, {"ImageNetDataModule": {"class_names": names}})
    shares = {"per_class": dict.fromkeys(names, 50.0)}
    put(bad / "evaluation.json", {"class_names": names, "raw": shares, "ema": shares})
    metrics = bad / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("val/acc5", f"val/[/b]{names[1]}"))
    assert {"\x1b", "\x07", "\u202e"}.isdisjoint(of_verb(verb)[1])


def test_the_console_shows_names_as_they_are(capsys):
    names = TABLES["names"]
    console(width=80).print(*names)
    shown = capsys.readouterr().out
    for name in names:
        assert name in shown or printable(name) != name
    assert {"\x1b", "\x07", "\u202e"}.isdisjoint(shown)
