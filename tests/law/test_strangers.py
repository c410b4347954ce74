"""A run's folder from a stranger, or a damaged one: every verb reads it as data, or ends in one line.

The tables are in test_strangers.yaml. A new verb is covered as soon as `command.verbs()` has it.
"""

import contextlib
import io
import itertools
import json
import os
import random
import shlex
import shutil
import sys
from argparse import Namespace
from inspect import signature as parameters_of
from pathlib import Path

import pytest
import torch
import yaml
from harness import (
    beside,
    call,
    checkpoint,
    free_port,
    link_digits,
    over_table,
    parsed,
    slow,
    table,
)
from lightning.pytorch import Trainer
from PIL import Image

import cait
from cait import disk, plugins, references, signature
from cait.cli import command, saved
from cait.errors import UserError, console, printable
from cait.guards import configurations, trust

TABLES = beside(__file__)
WORDS = TABLES["verbs"] | {"serve": f"bad --port={free_port()}"}
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


def rows(name):
    """A table's rows, as the parameter `row` of a test."""
    return pytest.mark.parametrize("row", table(__file__, name))


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
    content = merged(parsed(path), values)
    if path.suffix == ".ckpt":
        torch.save(content, path)
        return
    write = json.dumps if path.suffix == ".json" else yaml.safe_dump
    path.write_text(write(content))


def flip(path, name):
    """Change a bit of a weight, as a disk may."""
    weight = torch.load(path, weights_only=True)["state_dict"][name].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weight) + 3] ^= 0x80
    path.write_bytes(content)


def change(run, row):
    """Change a run as a row says."""
    for path in run.glob(row.get("file", "config.yaml")):
        if "text" in row:
            path.write_text(row["text"], "latin-1")
        elif "flip" in row:
            flip(path, row["flip"])
        else:
            put(path, row["put"])


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
    tried = [row for row in TABLES["attacks"] if "verbs" in row]
    tried += [row | {"file": "checkpoints/*"} for row in TABLES["attacks_in_checkpoints"]]
    for row in tried:
        shutil.copytree(desk / "logs/good", bad, dirs_exist_ok=True)
        change(bad, row)
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
    put(bad / "config.yaml", {"model": {"name": NET}})
    for verb in ("eval", "resume"):
        assert TRUST in of_verb(verb)[0]
        assert not has_run()
        assert of_verb(verb, TRUST)[0] == ""
        assert has_run()
        Path("ran").unlink()
    assert of_verb("eval")[0] == ""  # who has resumed it has signed it
    change(bad, {"file": "checkpoints/*", "put": {"hyper_parameters": {"name": f"{NET}work"}}})
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


@over_table(__file__, "loaders")
def test_lightnings_own_loader_takes_a_file_as_data(key, setting, kind, bad):
    path = bad / CHECKPOINTS[1]
    content = checkpoint(bad)
    content[key] = content.pop("hyper_parameters") | {setting: NET}
    torch.save(content, path)
    shutil.copy(path, "away.ckpt")
    for file in (path, "away.ckpt"):
        with pytest.raises(UserError, match=f"^{file} names {NET}, which may do anything: "):
            getattr(cait, kind).load_from_checkpoint(file)
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

    def __reduce__(self):
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
    fit, *others = map(str.split, TABLES["signed"])
    try:
        for words in (fit, *others):
            assert answer(words)[0] == ""
        text = config.read_text()
        assert "max_steps: 3" in text  # resumed with another setting: it is signed anew
        config.write_text(text + "# a comment\n")
        assert TRUST in answer(["eval", "own"])[0]
        config.write_text(text)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(bad / "account"))
        for words in others:
            assert TRUST in answer(words)[0]
    finally:
        disk.remove(config.parent)


# Files


@over_table(__file__, "places", leads_to="")
def test_no_verb_leaves_a_run(name, leads_to, bad, tmp_path):
    """Neither through a link, whatever it is called, nor into a pipe, which would wait."""
    path = bad / name
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.remove(path)
    victim = tmp_path / "victim/file"
    victim.parent.mkdir()
    victim.write_text("mine")
    if leads_to:
        path.symlink_to(tmp_path / leads_to)
        why = f"{path.name} is a link out of the run's folder"
    else:
        os.mkfifo(path)
        why = f"{path.name} is not a regular file"
    for verb in VERBS:
        line, shown = of_verb(verb)
        assert why in (shown if verb == "runs" else line), verb
    assert [*victim.parent.iterdir()] == [victim]
    assert victim.read_text() == "mine"


def emptied(path):
    os.truncate(path, 0)


def halved(path):
    os.truncate(path, path.stat().st_size // 2)


def no_text(path):
    path.write_bytes(b"\xff\xfe\x00")


def a_folder(path):
    path.unlink()
    path.mkdir()


@verbs("predict")
def test_a_broken_file_is_told_in_a_line_or_not_needed(verb, bad, desk):
    good = desk / "logs/good"
    files = [path.relative_to(good) for path in good.rglob("*") if path.is_file()]
    for name, breaks in itertools.product(files, [Path.unlink, emptied, halved, no_text, a_folder]):
        disk.remove(bad)
        shutil.copytree(good, bad)
        breaks(bad / name)
        of_verb(verb)


@rows("damages")
def test_what_is_damaged_is_named(row, bad):
    if row["verb"] not in VERBS:
        pytest.skip("the verb of an extra that was removed")
    change(bad, row)
    assert row["says"] in of_verb(row["verb"])[0]


def test_one_reader_of_yaml_serves_all_verbs(bad):
    (bad / "config.yaml").write_text(TABLES["bomb"])
    answers = {verb: of_verb(verb) for verb in VERBS if verb not in ("heat-maps", "demo")}
    for words in TABLES["read_config"]:
        if words.split()[0] in command.verbs():
            answers[words] = answer(words.split())
    for verb, (line, shown) in answers.items():
        assert "in the place of *a" in (shown if verb == "runs" else line), verb


@verbs("eval", "predict")
def test_no_name_is_markup_or_a_code(verb, bad):
    names = TABLES["names"]
    named = {"ImageNetDataModule": {"class_names": names}}
    change(bad, {"file": "checkpoints/*", "put": named})
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
