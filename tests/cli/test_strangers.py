"""A run's folder from a stranger, or a damaged one: every verb reads it as data, or ends in one line.

A new verb is covered as soon as `verbs()` has it: `[verb, RUN]`, or what `MORE` adds to that.
"""

import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from inspect import signature as parameters_of
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import SMALL, checkpoint, free_port, slow
from lightning.pytorch import Trainer
from PIL import Image

import cait
from cait import disk, plugins, references, signature
from cait.cli import command, main, saved
from cait.errors import UserError, console, printable
from cait.guards import configurations, trust

BAD = "bad"
MORE = {
    "resume": [BAD, "--trainer.max_epochs=2", "--trainer.limit_train_batches=2"],
    "predict": [BAD, "x.png"],
    "compare": [BAD, "good"],
    "visualize": [BAD, "--images", "x.png", "--no_validation"],
    "features": [BAD, "--images", "images", "--output", "features.npz"],
    "replay": [BAD, "--step=1", "--data-only"],
    "demo": [BAD, "--samples=0", "--runtime=nowhere"],
    "runs": [],
    "serve": [BAD, f"--port={free_port()}"],
}
"""What verbs need beyond the name of a run."""
WITHOUT = {
    *("fit", "crossval", "rehearse", "study", "sweep"),
    *("check", "new", "paper", "shards", "zoo"),
}
"""Verbs that take no run."""
VERBS = {name: [name, *MORE.get(name, [BAD])] for name in command.verbs() if name not in WITHOUT}
if "recipe" in plugins.extras():
    VERBS["fit --from"] = [
        "fit",
        "--data.root=data/digits",
        "--from",
        BAD,
        "--trainer.fast_dev_run=true",
    ]
OFTEN = ("eval", "predict")
EACH = [*OFTEN, *slow(*(name for name in VERBS if name not in OFTEN))]
NET, CALLBACK = "payload:net", "payload.Payload"
CLASS_IN_YAML = f'{{"\\x63lass_path": {CALLBACK}}}'
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
Capture = pytest.CaptureFixture[str]
Mend = Callable[[Path], Any]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with a run that was trained and scored, `logs/good`."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "data").mkdir()
    (desk / "data/digits").symlink_to(digits_root)
    (desk / "payload.py").write_text(PAYLOAD)
    (desk / "images/a").mkdir(parents=True)
    for path in (desk / "x.png", desk / "images/a/x.png"):
        Image.new("RGB", (16, 16)).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        short = [
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=6",
            "--trainer.limit_val_batches=1",
        ]
        here = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--data.num_workers=0"]
        main(["fit", *SMALL, *here, *short, "--ema.decay=0.9", "--run_name=good"])
        main(["eval", "good", "--trainer.limit_val_batches=1"])
    return desk


@pytest.fixture
def bad(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the run, to be damaged."""
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    run = desk / "logs" / BAD
    shutil.copytree(desk / "logs/good", run)
    yield run
    shutil.rmtree(run)
    for name in ("features.npz", "ran"):
        (desk / name).unlink(missing_ok=True)
    sys.modules.pop("payload", None)


def ended(arguments: list[str]) -> Any:
    """The status of `cait`, called in this process."""
    os.environ.pop("CAIT_RUN", None)
    sys.argv[:] = ["cait"]
    with pytest.MonkeyPatch.context() as patch:
        if arguments[0] == "serve":  # it would answer until it is stopped
            patch.setattr("contrib.serve.server.run", lambda *_: None)
        try:
            main(arguments)
        except SystemExit as stop:
            return stop.code
    return 0


def told(arguments: list[str], capfd: Capture) -> tuple[str, str]:
    """(the one line of an error, or "" if there is none; all that was printed)"""
    status = ended(arguments)
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("cait: error: ")]
    assert status == 2 * len(lines), (arguments, err)
    assert "Traceback" not in err
    return "".join(lines), out + err


def changed(bad: Path, **parts: Any) -> None:
    """Change the run's config.yaml, which then is no longer this account's own."""
    path = bad / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for name, value in parts.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            # beside `key` the reader refuses `key+`
            before = {key: held for key, held in config[name].items() if f"{key}+" not in value}
            value = before | value
        config[name] = value
    path.write_text(yaml.safe_dump(config))


def rewrite(bad: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the run's checkpoints."""
    for name in ("best.ckpt", "last.ckpt"):
        content = torch.load(bad / "checkpoints" / name, weights_only=True)
        change(content)
        torch.save(content, bad / "checkpoints" / name)


# Code


LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
LAUNCH = {
    "class_path": "torch.distributed.launcher.api.elastic_launch",
    "init_args": {
        "config": {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1},
        "entrypoint": "payload.py",
    },
}


def calls(function: Any) -> dict[str, Any]:
    """A callback of Lightning's that calls a function."""
    return {
        "trainer": {"callbacks": [{"class_path": LAMBDA, "init_args": {"on_fit_start": function}}]}
    }


# What the code of a run could hide in, what would write or send elsewhere, and what would start processes.
ATTACKS: dict[str, dict[str, Any]] = {
    "a callback": {"trainer": {"callbacks": [{"class_path": CALLBACK, "init_args": {}}]}},
    "Lightning's callback, by its name": {"trainer": {"callbacks": ["LambdaCallback"]}},
    "Lightning's callback that starts a program": calls(LAUNCH),
    "a function for a callback": calls(CALLBACK),
    "a function of another module": calls("torch.os.abort"),
    "a plugin": {"trainer": {"plugins": [CALLBACK]}},
    "a profiler": {
        "trainer": {
            "profiler": {"class_path": "PyTorchProfiler", "init_args": {"dirpath": "elsewhere"}}
        }
    },
    "a strategy": {"trainer": {"strategy": {"class_path": CALLBACK}}},
    "an accelerator": {"trainer": {"accelerator": {"class_path": CALLBACK}}},
    "a file of callbacks": {"trainer": {"callbacks": ["one.yaml"]}},
    "a file of settings": {"trainer": "more.yaml"},
    "a key with a dot": {"trainer.callbacks": [CALLBACK]},
    "a key that appends": {"trainer": {"callbacks+": CALLBACK}},
    "a configuration": {"config+": "more.yaml"},
    "a field": {"model": {"fields": {"depth": {"class_path": CALLBACK}}}},
    "the class of the model": {"model": {"class_path": CALLBACK}},
    "the class of the data": {"data": CALLBACK},
    "an average": {"ema": CALLBACK},
    "a network": {"model": {"name": NET}},
    "a loss": {"model": {"loss": NET}},
    "an optimizer": {"model": {"optimizer": NET}},
    "an optimizer's argument": {"model": {"optimizer_args": {"betas": {"class_path": CALLBACK}}}},
    "a metric": {"model": {"metrics": {"f1": NET}}},
    "through a metric": {"model": {"metrics": {"f1": "torchmetrics:os.system"}}},
    "a teacher": {"model": {"distillation": "hard", "teacher": NET}},
    "a data set": {"data": {"root": NET}},
    "an augmentation": {"data": {"augment_ops": [NET]}},
    "a function of torch": {"model": {"name": "torch.hub:load"}},
    "a download": {"data": {"data_dir": "elsewhere/x"}},
    "a tracker": {"logger": "wandb", "logger_args": {"base_url": "http://127.0.0.1:4242"}},
    "the tracker's class": {"trainer": {"logger": {"class_path": CALLBACK}}},
}
# What needs no leave, because a run that is continued or scored writes to its own folder, and reads data.
HARMLESS: dict[str, dict[str, Any]] = {
    "nodes": {"trainer": {"num_nodes": 4242}},
    "workers": {"data": {"num_workers": 4242}},
    "places, and how files are read": {
        "model": {"weights": "elsewhere/x", "teacher_path": "elsewhere/x"},
        "trainer": {"default_root_dir": "elsewhere/x"},
        "output": "elsewhere/x",
        "run_name": "elsewhere",
        "weights_only": None,
        "data": {"of_tomorrow": "elsewhere/x"},
    },
}


@pytest.mark.parametrize("hidden", ATTACKS.values(), ids=ATTACKS)
def test_a_strangers_settings_are_not_run(hidden: dict[str, Any], bad: Path) -> None:
    """Those of the data, which other verbs take, name neither code nor a place to write to."""
    config = bad / "config.yaml"
    assert trust.settings(config)  # as it was signed
    changed(bad, **hidden)
    with pytest.raises(UserError, match=re.escape(signature.REMEDY)):
        trust.settings(config)
    with signature.only_own(True):
        assert trust.settings(config)
    taken = ""
    with contextlib.suppress(UserError):
        taken = str(saved.data_settings(bad))
    assert not [word for word in ("payload", "elsewhere", "4242", "torch.hub") if word in taken]


@pytest.mark.parametrize("verb", ["eval", *slow("resume")])
def test_a_strangers_run_stays_in_its_folder(verb: str, bad: Path, capfd: Capture) -> None:
    before = (bad / "config.yaml").read_text()
    for kind, settings in HARMLESS.items():
        (bad / "config.yaml").write_text(before)
        changed(bad, **settings)
        line, _ = told(VERBS[verb], capfd)
        assert signature.REMEDY not in line
        assert (line == "") == (kind.startswith("places") or (kind, verb) == ("nodes", "eval")), (
            line
        )
        assert not [*Path().rglob("elsewhere*")]


def of_checkpoint(**parts: Any) -> Mend:
    return lambda bad: rewrite(bad, lambda content: content["hyper_parameters"].update(parts))


NAMED: dict[str, Mend] = {
    "a callback": lambda bad: changed(bad, **ATTACKS["a callback"]),
    "a network": lambda bad: changed(bad, model={"name": NET}),
    "a data set": lambda bad: changed(bad, data={"root": NET}),
    "a field": lambda bad: changed(bad, **ATTACKS["a field"]),
    "a checkpoint's network": of_checkpoint(name=NET),
    "a checkpoint's class": of_checkpoint(_class_path=CALLBACK),
    "a checkpoint's metric without a colon": of_checkpoint(metrics={"f1": "payload"}),
    "a checkpoint's loss without a colon": of_checkpoint(loss="payload"),
    "a checkpoint's optimizer without a colon": of_checkpoint(optimizer="payload"),
    "a checkpoint's reader without a colon": lambda bad: rewrite(
        bad, lambda content: of_data(content)["preprocessing"].update(reader="payload")
    ),
    "what is done to pixels, without a colon": lambda bad: rewrite(
        bad, lambda content: of_data(content)["preprocessing"].update(augment_ops=["payload"])
    ),
    "a checkpoint's metric in a tuple": of_checkpoint(metrics=(("f1", NET),)),
    "a checkpoint's metrics in a set": of_checkpoint(metrics={NET}),
    "a text that is a class in YAML": lambda bad: changed(
        bad, model={"optimizer_args": {"own": CLASS_IN_YAML}}
    ),
    "a checkpoint's text that is a class in YAML": of_checkpoint(fields={"norm": CLASS_IN_YAML}),
    "a key that the parser takes apart": of_checkpoint(fields={"norm.class_path": CALLBACK}),
    "what is done to pixels": lambda bad: rewrite(
        bad, lambda content: of_data(content)["preprocessing"].update(augment_ops=[NET], root=NET)
    ),
    # Lightning's `instantiate_module` would make an object of any value with a class path.
    "a checkpoint's instantiator": of_checkpoint(
        _instantiator="lightning.pytorch.cli.instantiate_module",
        optimizer_args={"own": {"class_path": CALLBACK}},
    ),
}


@pytest.mark.parametrize("verb", ["predict", *slow(*(name for name in VERBS if name != "predict"))])
def test_no_verb_runs_what_a_run_names(verb: str, bad: Path, capfd: Capture) -> None:
    files = [
        bad / name for name in ("config.yaml", "checkpoints/best.ckpt", "checkpoints/last.ckpt")
    ]
    untouched = {path: path.read_bytes() for path in files}
    for kind, name_it in NAMED.items():
        for path, content in untouched.items():
            path.write_bytes(content)
        name_it(bad)
        told(VERBS[verb], capfd)  # an error of another kind than the user's fails here
        assert not Path("ran").exists(), kind
        assert "payload" not in sys.modules, kind


def test_what_a_run_names_is_run_when_it_is_trusted(bad: Path, capfd: Capture) -> None:
    changed(bad, model={"name": NET}, **ATTACKS["a callback"])
    line = f"cait: error: logs/bad/config.yaml names {NET}, {CALLBACK}, which may do anything: {signature.REMEDY}"
    for verb in ("eval", "resume"):
        assert told(VERBS[verb], capfd)[0] == line
        assert not Path("ran").exists()
        assert told([*VERBS[verb], "--trust-config"], capfd)[0] == ""
        assert Path("ran").exists()
        Path("ran").unlink()
        sys.modules.pop("payload")
    assert told(VERBS["eval"], capfd)[0] == ""  # who has resumed it has signed it
    of_checkpoint(name=f"{NET}work")(bad)
    assert (
        f"names {NET}work, which may do anything: {signature.REMEDY}"
        in told(VERBS["predict"], capfd)[0]
    )


@pytest.mark.parametrize("verb", ["eval", *slow("resume")])
def test_the_text_that_was_checked_is_the_one_that_is_used(
    verb: str, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped after the check, the file could name anything."""
    check = signature.is_own

    def swap_afterwards(text: str) -> bool:
        own = check(text)
        changed(bad, model={"name": NET})
        return own

    monkeypatch.setattr(signature, "is_own", swap_afterwards)
    assert ended(VERBS[verb]) == 0
    assert not Path("ran").exists()


def test_a_config_yaml_of_ones_own_is_no_runs(bad: Path, capfd: Capture) -> None:
    """It lies beside no checkpoints: a misspelled setting is refused, and code in it is the user's."""
    own = bad.parent.parent / "config.yaml"
    own.write_text("data: {batchsize: 8}\n")
    try:
        line, _ = told(["fit", *SMALL, "--config=config.yaml", "--run_name=own"], capfd)
        assert line.startswith("cait: error: there is no setting data.batchsize")
        own.write_text(f"model: {{name: {NET!r}}}\n")
        assert trust.settings(own)
        with pytest.raises(UserError, match="may do anything"):
            trust.settings(own, is_run=True)
    finally:
        own.unlink()


@pytest.mark.parametrize("verb", ["resume", "eval"])
def test_a_run_without_checkpoints_is_a_strangers_too(verb: str, bad: Path, capfd: Capture) -> None:
    changed(bad, model={"name": NET})
    for path in [*(bad / "checkpoints").glob("*"), bad / ".lock"]:
        path.unlink(missing_ok=True)
    (bad / "checkpoints").rmdir()
    assert told(VERBS[verb], capfd)[0]
    assert "payload" not in sys.modules


def test_public_classes_and_timms_networks_need_no_trust(bad: Path) -> None:
    metric = {"f1": "torchmetrics.classification:MulticlassF1Score"}
    signature.check_code(
        bad, {"metrics": metric, "name": "timm/resnet18", "optimizer": "torch.optim:SGD"}, None
    )
    for name in ("torchmetrics:os.system", "torch.hub:load", "torch.nn:functional.relu"):
        with pytest.raises(UserError, match="which may do anything"):
            signature.check_code(bad, {"metrics": {"f1": [name]}}, None)


@pytest.mark.parametrize(
    "named", [NET, CLASS_IN_YAML, {"class_path": CALLBACK}, {"norm.class_path": CALLBACK}]
)
def test_code_is_named_at_any_depth(named: Any) -> None:
    """Wherever a file may put it."""
    for value in (named, [[named]], {"a": {"b": (named,)}}, (("a", named),)):
        with pytest.raises(UserError, match="which may do anything"):
            signature.check_code(Path("it"), disk.plain(value, "it"), None)
    with pytest.raises(UserError, match="names 1, which"):
        signature.check_code(Path("it"), {"a": {"norm.class_path": 1}}, None)


AROUND = (
    "",
    ":",
    ".",
    ":net",
    ".net",
    "::net",
    ":net:net",
    " :net",
    ": net",
    ";net",
    "：net",
    "\n:net",
)


def import_untrusted(text: str) -> None:
    """Do with a text of a stranger's checkpoint what a verb does."""
    signature.check_code(Path("it"), {"metrics": [text]}, None)
    references.locate(text)


@pytest.mark.parametrize("before", ["", " ", ".", ":", "./", "\ufeff", "0"])
def test_what_is_imported_is_what_needs_trust(before: str, bad: Path) -> None:
    """However a module is written: a text that needs no trust imports nothing."""
    for after in AROUND:
        text = f"{before}payload{after}"
        with pytest.raises(UserError, match=r"may do anything|write it as"):
            import_untrusted(text)
        assert "payload" not in sys.modules, text


PLACES = [
    ("hyper_parameters",),
    *[
        ("hyper_parameters", name)
        for name in ("name", "fields", "metrics", "img_size", "mean", "loss", "task", "new")
    ],
    *[
        ("hyper_parameters", "fields", name)
        for name in ("depth", "embed_dim", "act", "mlp_ratio", "norm", "img_size")
    ],
    *[("data", name) for name in ("class_names", "depends_on", "preprocessing")],
    *[
        ("data", "preprocessing", name)
        for name in ("augment_ops", "root", "mean", "crop_pct", "background", "shrink")
    ],
    *[
        (name,)
        for name in (
            "data",
            "state_dict",
            "epoch",
            "global_step",
            "callbacks",
            "loops",
            "optimizer_states",
        )
    ],
]
"""Where a checkpoint may hold something else."""


def hostile(draw: random.Random) -> Any:
    """A value that no run saves."""
    looped: list[Any] = ["x"]
    looped.append({"a": looped})
    doubled: list[Any] = ["x"]
    for _ in range(40):
        doubled = [doubled, doubled]
    plain = [
        None,
        -1,
        0,
        10**9,
        10**30,
        1e300,
        math.nan,
        "",
        "x" * 99,
        NET,
        CALLBACK,
        "{class_path: payload.Payload}",
        b"x",
    ]
    value = draw.choice(
        [*plain, torch.zeros(3), looped, doubled, torch.float32, Namespace(a=looped)]
    )
    for _ in range(draw.randrange(3)):
        value = draw.choice(
            [[value], (value, 1), {"a": value}, {"class_path": value}, {"norm.class_path": value}]
        )
    return value


@pytest.mark.slow
def test_a_checkpoint_is_data_whatever_it_holds(bad: Path) -> None:
    """It is loaded, or refused in a line; what it names is never imported, and what is no tree is walked by nobody."""
    draw, path, bare = random.Random(0), bad / "checkpoints/best.ckpt", bad.parent / "bare.ckpt"
    whole = path.read_bytes()
    for trial in range(30):
        content = torch.load(io.BytesIO(whole), weights_only=True)
        first, *others = draw.choice(PLACES)
        if first == "data":
            first = next(key for key, part in content.items() if part is of_data(content))
        held: Any = content
        for name, following in itertools.pairwise([first, *others]):
            held, first = held[name], following
        held[first] = hostile(draw)
        torch.save(content, path)
        for source in (path, bare):
            if source == bare:
                shutil.move(path, bare)
            with contextlib.suppress(UserError):
                cait.load(source)
            assert not Path("ran").exists(), (trial, first, others)
            assert "payload" not in sys.modules, (trial, first, others)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("hyper_parameters", {"name": NET}),
        ("hyper_parameters", {"loss": NET}),
        ("hyper_parameters", {"metrics": {"m": NET}}),
        ("hyper_parameters", {"optimizer": NET}),
        ("hparams", {"loss": NET}),
        ("module_arguments", {"loss": NET}),
    ],
    ids=str,
)
def test_lightnings_own_loader_takes_a_file_as_data(
    key: str, named: dict[str, Any], bad: Path
) -> None:
    path = bad / "checkpoints/last.ckpt"
    own = cait.CaiTModule.load_from_checkpoint(path, map_location="cpu")
    content = checkpoint(bad)
    content[key] = content.pop("hyper_parameters") | named
    torch.save(content, path)
    away = Path(shutil.copy(path, "away.ckpt"))
    for file in (path, away):
        with pytest.raises(UserError, match=f"^{file} names {NET}, which may do anything: "):
            cait.CaiTModule.load_from_checkpoint(file)
        assert not Path("ran").exists()
    away.unlink()
    assert own.hparams["name"] == "xxs24"
    with contextlib.suppress(Exception):
        cait.CaiTModule.load_from_checkpoint(path, weights_only=False)
    assert Path("ran").exists()


def test_lightnings_own_loader_of_data_takes_a_file_as_data(bad: Path) -> None:
    path = bad / "checkpoints/last.ckpt"
    root = str(Path("data/digits").resolve())
    data = cait.ImageNetDataModule.load_from_checkpoint(path, root=root)
    assert data.num_classes == 10
    torch.save(checkpoint(bad) | {"datamodule_hyper_parameters": {"root": NET}}, path)
    with pytest.raises(UserError, match="which may do anything"):
        cait.ImageNetDataModule.load_from_checkpoint(path)


def test_lightnings_own_loader_imports_what_this_account_signed(bad: Path) -> None:
    changed(bad, model={"name": NET})
    config = bad / "config.yaml"
    config.write_text(signature.signed(config.read_text()))
    of_checkpoint(name=NET)(bad)
    assert cait.CaiTModule.load_from_checkpoint(bad / "checkpoints/last.ckpt").name == NET
    assert Path("ran").exists()


class Unpickled:
    """Unpickled without care, it writes a file."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("ran"),)


def test_a_checkpoint_is_no_code(bad: Path, tmp_path: Path, capfd: Capture) -> None:
    hostile, timms = tmp_path / "hostile.ckpt", tmp_path / "timm.pth"
    torch.save(checkpoint(bad) | {"more": Unpickled()}, hostile)
    timms.write_bytes(hostile.read_bytes())
    torch.load(hostile, weights_only=False)
    Path("ran").unlink()  # so it would
    given = ["--trust-config", f"--ckpt_path={hostile}"]
    fresh = ["fit", "--config=logs/good/config.yaml", "--ckpt_path=null", "--run_name=fresh"]
    distilled = [*fresh, "--model.distillation=hard"]
    for arguments, words in (
        (["resume", BAD, *given, "--trainer.max_epochs=9"], "not a whole checkpoint"),
        (["eval", BAD, *given], "not a whole checkpoint"),
        ([*fresh, f"--model.weights={hostile}"], "cannot be read as weights"),
        ([*distilled, f"--model.teacher={hostile}"], "not a whole checkpoint"),
        (
            [*distilled, "--model.teacher=test_resnet.r160_in1k", f"--model.teacher_path={timms}"],
            "cannot be loaded",
        ),
    ):
        assert words in told(arguments, capfd)[0]
    assert not Path("ran").exists()


def test_the_trainer_has_no_other_setting_that_takes_an_object() -> None:
    """A canary for Lightning's upgrades."""
    annotated = parameters_of(Trainer.__init__).parameters.items()
    taking = {name for name, parameter in annotated if "lightning." in str(parameter.annotation)}
    assert taking == {*configurations.CLASSES, *configurations.WORDS}


# The signature


@pytest.mark.parametrize("content", [b"", b"short", b"\n"])
def test_a_damaged_key_signs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_key_that_cannot_be_written_is_made_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(signature.secrets, "token_bytes", full)
        assert signature.signed("a: 1\n") == "a: 1\n"
    assert signature.is_own(signature.signed("a: 1\n"))
    assert {path.name for path in (tmp_path / "cait").iterdir()} == {"key", "lock"}


def test_a_run_without_code_needs_no_trust(
    bad: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    """Whoever wrote it: it was edited by hand, or copied from another account."""
    changed(bad, model={"lr": 0.001})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(bad / "elsewhere"))
    for verb in ("resume", "eval", "fit --from"):
        assert verb not in VERBS or told(VERBS[verb], capfd)[0] == ""


def test_what_this_account_signed_needs_no_trust(
    bad: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    """Code does that a changed configuration names, or another account's."""
    network = [
        "--model.name=payload:net",
        "--run_name=own",
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=1",
    ]
    try:
        for arguments in (
            ["fit", "--config=logs/good/config.yaml", *network],
            ["resume", "own", "--trainer.max_steps=3"],  # with another setting: it is signed anew
            ["eval", "own"],
            ["predict", "own", "x.png"],
        ):
            assert told(arguments, capfd)[0] == ""
        config = Path("logs/own/config.yaml")
        text = config.read_text()
        assert "max_steps: 3" in text
        config.write_text(text + "# a comment\n")
        assert signature.REMEDY in told(["eval", "own"], capfd)[0]
        config.write_text(text)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(bad / "elsewhere"))
        for arguments in (["eval", "own"], ["resume", "own"], ["predict", "own", "x.png"]):
            assert signature.REMEDY in told(arguments, capfd)[0]
    finally:
        disk.remove(Path("logs/own"))


# Files


@pytest.mark.parametrize(
    ("name", "kind"),
    [("metrics.csv", "link"), ("checkpoints", "folder"), ("any/name", "link"), ("plots", "pipe")],
)
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
            assert f"{path.name} {words}" in line or (
                verb == "runs" and f"{path.name} {words}" in shown
            ), verb
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
    "mappings in mappings": (
        "".join(f"{' ' * n}a{n}:\n" for n in range(900)),
        "more than 50 levels",
    ),
    "a number": (f"seed_everything: {'9' * 6000}", "is not YAML: Exceeds the limit"),
    "a part of itself": (
        "model: &a\n  fields: *a\n",
        "in the place of *a write what it stands for",
    ),
    "a value that its tag refuses": ("a: !!int x", "is not YAML: invalid literal"),
    "a class": ("a: !!python/name:os.system", "could not determine a constructor"),
    "a call": ("a: !!python/object/apply:os.abort []", "could not determine a constructor"),
    "two texts": ("a: 1\n---\nb: 2", "is not YAML: "),
    "a key twice": ("a: {b: 1, b: 2}", "b is there twice"),
    "a control character": ('a: "\\e]"', "a control character"),
}


@pytest.mark.parametrize(("text", "words"), YAML.values(), ids=YAML)
def test_a_hostile_yaml_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        configurations.load(text, "it")


def test_one_reader_of_yaml_serves_all_verbs(bad: Path, capfd: Capture) -> None:
    (bad / "config.yaml").write_text(BOMB)
    files = {
        "fit --config": ["fit", "--config", f"logs/{BAD}/config.yaml"],
        "eval --config": ["eval", "--config", f"logs/{BAD}/config.yaml", "--ckpt_path", "x.png"],
        "sweep": ["sweep", f"logs/{BAD}/config.yaml"],
    }
    for verb, arguments in (VERBS | files).items():
        # they need no settings
        if verb not in ("heat-maps", "demo") and arguments[0] in command.verbs():
            line, shown = told(arguments, capfd)
            assert "in the place of *a" in (shown if verb == "runs" else line), verb


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


def of_data(content: dict[str, Any]) -> dict[str, Any]:
    """The data module's part of a checkpoint."""
    return next(
        part for part in content.values() if isinstance(part, dict) and "depends_on" in part
    )


def weights(change: Callable[[dict[str, Any]], Any]) -> Mend:
    return lambda bad: rewrite(bad, change)


def flipped(bad: Path) -> None:
    """A bit of the head has changed on the disk."""
    for name in ("best.ckpt", "last.ckpt"):
        path = bad / "checkpoints" / name
        found, whole = (
            checkpoint(bad)["state_dict"]["model.head.weight"].numpy().tobytes(),
            bytearray(path.read_bytes()),
        )
        if (at := whole.find(found)) >= 0:
            whole[at + 3] ^= 0x80
            path.write_bytes(whole)


DAMAGED: dict[str, tuple[str, Mend, str]] = {
    "scores: no JSON": ("card", written("evaluation.json", "{"), "evaluation.json is no JSON"),
    "scores: acc1": (
        "card",
        scores(lambda found: found["raw"].update(acc1="x")),
        "raw.acc1 cannot be used",
    ),
    "metrics: no text": (
        "compare",
        written("metrics.csv", b"\xff\n", "ab"),
        "metrics.csv is no text",
    ),
    "weights: empty": (
        "predict",
        written("checkpoints/best.ckpt", ""),
        "best.ckpt is not a whole checkpoint",
    ),
    "weights: weights": ("predict", weights(lambda c: c.update(state_dict=[1])), "state_dict"),
    "weights: a network": (
        "predict",
        of_checkpoint(num_classes="x"),
        "hyper_parameters.num_classes",
    ),
    "weights: a field": (
        "predict",
        of_checkpoint(fields={"depth": "x"}),
        "best.ckpt cannot be loaded",
    ),
    "weights: a class": (
        "predict",
        weights(lambda c: of_data(c).update(class_names=[1])),
        "class_names[0]",
    ),
    "weights: an average": (
        "eval",
        weights(lambda c: c["callbacks"].update(EMA={"x": 1})),
        "the moving average in logs/bad/checkpoints/best.ckpt cannot be used",
    ),
    "weights: a bit": ("predict", flipped, "best.ckpt is damaged"),
    "weights: a bit, to score": ("eval", flipped, "best.ckpt is damaged"),
    "weights: a bit, to start from": ("fit --from", flipped, "best.ckpt is damaged"),
    "weights: sizes": (
        "predict",
        of_checkpoint(num_classes=10**8),
        "num_classes 100,000,000 is too large",
    ),
    "weights: a deep network": (
        "predict",
        of_checkpoint(fields={"depth": 10**6}),
        "far larger than its weights",
    ),
    "weights: loops": ("resume", weights(lambda c: c["loops"].update(fit_loop=[1])), "last.ckpt"),
    "weights: optimizer": (
        "resume",
        weights(lambda c: c.update(optimizer_states=[1])),
        "last.ckpt",
    ),
}


@pytest.mark.parametrize(("verb", "damage", "words"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_named(
    verb: str, damage: Mend, words: str, bad: Path, capfd: Capture
) -> None:
    if verb not in VERBS:
        pytest.skip("the verb of an extra that was removed")
    damage(bad)
    assert words in told(VERBS[verb], capfd)[0]


NAMES = ["[/b] x", "a\x1b]52;c;cm0gLXJmIH4=\x07", ":smile:", "[link=file:///]y", "\u202eabc", "<b>"]
"""Markup, and codes of a terminal."""


@pytest.mark.parametrize("verb", EACH)
def test_no_name_is_markup_or_a_code(verb: str, bad: Path, capfd: Capture) -> None:
    rewrite(bad, lambda content: of_data(content).update(class_names=NAMES))

    def renamed(content: dict[str, Any]) -> None:
        content["class_names"] = NAMES
        for part in ("raw", "ema"):
            content[part]["per_class"] = dict.fromkeys(NAMES, 50.0)

    scores(renamed)(bad)
    logged = (bad / "metrics.csv").read_text().replace("val/acc5", f"val/[/b]{NAMES[1]}")
    (bad / "metrics.csv").write_text(logged)
    assert not {"\x1b", "\x07", "\u202e"} & {*told(VERBS[verb], capfd)[1]}


def test_the_console_shows_names_as_they_are(capsys: Capture) -> None:
    console(width=80).print(*NAMES)
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES if printable(name) == name)
    assert not {"\x1b", "\x07", "\u202e"} & {*shown}
