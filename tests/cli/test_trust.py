"""A run's folder from a stranger: its settings and weights are used, and nothing in it is run unasked."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import SMALL, checkpoint
from lightning.pytorch import Trainer

from cait import signature as run_signature
from cait.cli import main
from cait.errors import UserError
from cait.guards import trust

NAME = "stranger.payload.Payload"
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
NET = "stranger.payload:net"
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


Capture = pytest.CaptureFixture[str]


def settings(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Iterator[Path]:
    """A folder to work in, with the run of a stranger: a module that leaves `ran` beside itself when imported."""
    place = tmp_path_factory.mktemp("trust")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        place_of_run = [f"--data.root={digits_root}", "--data.num_workers=0", "--run_name=stranger"]
        main(["fit", *SMALL, *SHORT, *place_of_run, "--ema.decay=0.9", f"--trainer.default_root_dir={place}"])
    (place / "stranger/payload.py").write_text(PAYLOAD)
    (place / "pictures").symlink_to(digits_root / "val/0")
    return place


@pytest.fixture
def stranger(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)  # as `python -m cait` does
    monkeypatch.setattr(sys, "argv", ["cait"])
    run = place / "stranger"
    before = (run / "config.yaml").read_text()
    yield run
    (run / "config.yaml").write_text(before)
    for path in (run / "ran", place / "predictions.csv"):
        path.unlink(missing_ok=True)
    for name in ("stranger.payload", "stranger"):
        sys.modules.pop(name, None)


def write(run: Path, config: dict[str, Any]) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def refused(arguments: list[str], capfd: Capture) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert len(told) == 1
    return told[0]


LAUNCH = {
    "class_path": "torch.distributed.launcher.api.elastic_launch",
    "init_args": {"config": {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1}, "entrypoint": "stranger/payload.py"},
}
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
# What the code of a run could hide in: settings that name it, and settings that do not look like it.
ATTACKS: dict[str, dict[str, Any]] = {
    "a callback": {"trainer": {"callbacks": [{"class_path": NAME, "init_args": {}}]}},
    "Lightning's callback, by its name": {"trainer": {"callbacks": ["LambdaCallback"]}},
    "Lightning's callback that starts a program": {
        "trainer": {"callbacks": [{"class_path": LAMBDA, "init_args": {"on_fit_start": LAUNCH}}]}
    },
    "a function for a callback": {
        "trainer": {"callbacks": [{"class_path": LAMBDA, "init_args": {"on_fit_start": NAME}}]}
    },
    "a function of another module": {
        "trainer": {"callbacks": [{"class_path": LAMBDA, "init_args": {"on_fit_start": "torch.os.abort"}}]}
    },
    "a plugin": {"trainer": {"plugins": [NAME]}},
    "torch's plugin of checkpoints": {"trainer": {"plugins": ["lightning.pytorch.plugins.io.TorchCheckpointIO"]}},
    "a profiler": {"trainer": {"profiler": {"class_path": NAME}}},
    "Lightning's profiler, in any folder": {
        "trainer": {"profiler": {"class_path": "PyTorchProfiler", "init_args": {"dirpath": "elsewhere"}}}
    },
    "a strategy": {"trainer": {"strategy": {"class_path": NAME}}},
    "an accelerator": {"trainer": {"accelerator": {"class_path": NAME}}},
    "a file of callbacks": {"trainer": {"callbacks": ["stranger/one.yaml"]}},
    "a file of settings": {"trainer": "stranger/more.yaml"},
    "a key with a dot": {"trainer.callbacks": [NAME]},
    "a key that appends": {"trainer": {"callbacks+": NAME}},
    "a configuration": {"config": "stranger/more.yaml"},
    "a field": {"model": {"fields": {"depth": {"class_path": NAME}}}},
    "the class of the model": {"model": {"class_path": NAME}},
    "the class of the data": {"data": NAME},
    "an average": {"ema": NAME},
    "a network": {"model": {"name": NET}},
    "a loss": {"model": {"loss": NET}},
    "an optimizer": {"model": {"optimizer": NET}},
    "an optimizer's argument": {"model": {"optimizer_args": {"betas": {"class_path": NAME}}}},
    "a metric": {"model": {"metrics": {"f1": NET}}},
    "through a metric": {"model": {"metrics": {"f1": "torchmetrics:os.system"}}},
    "a teacher": {"model": {"distillation": "hard", "teacher": NET}},
    "a data set": {"data": {"root": NET}},
    "an augmentation": {"data": {"augment_ops": [NET]}},
    "a function of torch": {"model": {"name": "torch.hub:load"}},
}


PLACES: dict[str, dict[str, Any]] = {
    "nodes": {"trainer": {"num_nodes": 4242}},
    "processes": {"trainer": {"devices": 4242}},
    "workers": {"data": {"num_workers": 4242}},
    "a download": {"data": {"data_dir": "stranger/x"}},
    "weights": {"model": {"weights": "stranger/x"}},
    "a teacher's run": {"model": {"teacher": "stranger/x"}},
    "a teacher's weights": {"model": {"teacher_path": "stranger/x"}},
    "a checkpoint": {"ckpt_path": "stranger/x"},
    "an output": {"output": "stranger/x"},
    "its folder": {"trainer": {"default_root_dir": "stranger/x"}},
    "a tracker": {"logger": "stranger", "logger_args": {"base_url": "http://127.0.0.1:4242"}},
    "the tracker's class": {"trainer": {"logger": {"class_path": NAME}}},
    "pickles": {"weights_only": "stranger"},
    "a setting that is not known": {"data": {"of_tomorrow": "stranger/x"}},
}


@pytest.mark.parametrize("builds", [True, False], ids=["resume", "eval"])
@pytest.mark.parametrize("hidden", (ATTACKS | PLACES).values(), ids=[*ATTACKS, *PLACES])
def test_a_run_names_neither_code_nor_a_place(hidden: dict[str, Any], builds: bool, place: Path) -> None:
    path = place / "stranger/config.yaml"
    config = settings(path.parent)
    for name in ("root", "img_size", "batch_size", "class_names", "mean"):
        assert trust.as_data(config, (), path, (), own=False, builds=builds)["data"][name] == config["data"][name]
    for key, value in hidden.items():
        both = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = config[key] | value if both else value
    taken: dict[str, Any] = {}
    told = trust.REMEDY
    try:
        taken = trust.as_data(config, (), path, (), own=False, builds=builds)
    except UserError as error:
        told = str(error)
    assert told.endswith(trust.REMEDY)
    assert taken or hidden in ATTACKS.values()
    taken.get("data", {}).pop("root", None)  # the images of this test, which are read
    assert not [word for word in ("stranger", "http", "4242", "Lambda", "os.system", "torch.hub") if word in str(taken)]


VERBS = {
    "resume": ["resume", "stranger", "--trainer.max_epochs=9"],
    "eval": ["eval", "stranger"],
    "predict": ["predict", "stranger", "pictures", "--format=csv"],
    "export": ["export", "stranger"],
}


@pytest.mark.parametrize("verb", ["resume", "eval"])
def test_what_a_run_names_is_run_when_it_is_trusted_or_named(verb: str, stranger: Path, capfd: Capture) -> None:
    config = settings(stranger)
    config["model"]["name"] = NET
    write(stranger, config)
    line = f"cait: error: stranger/config.yaml names {NET}, code that may do anything: {trust.REMEDY}"
    assert refused(VERBS[verb], capfd) == line
    assert not (stranger / "ran").exists()
    more = ["--trainer.max_epochs", str(checkpoint(stranger)["epoch"] + 2)] if verb == "resume" else []
    for allowed in (f"--model.name={NET}", "--trust-config"):
        write(stranger, config)
        main([*VERBS[verb], *more, allowed])
        assert (stranger / "ran").exists()
        (stranger / "ran").unlink()
        sys.modules.pop("stranger.payload")


def test_callbacks_run_when_they_are_trusted_and_not_when_they_are_replaced(stranger: Path, capfd: Capture) -> None:
    config = settings(stranger)
    config["trainer"]["callbacks"] = [{"class_path": NAME}]
    write(stranger, config)
    epochs = checkpoint(stranger)["epoch"] + 2
    assert NAME in refused(VERBS["resume"], capfd)
    main(["resume", "stranger", f"--trainer.max_epochs={epochs}", "--trainer.callbacks=null"])
    write(stranger, config)
    main(VERBS["eval"])  # it builds none
    assert not (stranger / "ran").exists()
    main(["resume", "stranger", f"--trainer.max_epochs={epochs + 1}", "--trust-config"])
    assert (stranger / "ran").exists()


@pytest.mark.parametrize("name", [".owner", "metrics.csv", "checkpoints"])
def test_no_link_leads_what_is_written_out_of_a_strangers_run(
    name: str, stranger: Path, tmp_path: Path, capfd: Capture
) -> None:
    write(stranger, settings(stranger) | {"v2": "images"})  # no longer signed
    kept, victim = stranger / f"kept {name}", tmp_path / "victim"
    (stranger / name).rename(kept)
    (stranger / name).symlink_to(victim)
    if kept.is_dir():
        shutil.copytree(kept, victim)
    else:
        victim.write_text("mine")
    try:
        for verb in ("resume", "eval", "predict"):
            assert f"stranger/{name} is a link out of the run's folder: this account" in refused(VERBS[verb], capfd)
        assert victim.is_dir() or victim.read_text() == "mine"
    finally:
        (stranger / name).unlink()
        kept.rename(stranger / name)


@pytest.mark.parametrize("verb", ["resume", "eval"])
def test_the_text_that_was_checked_is_the_one_that_is_used(
    verb: str, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped after the check, the file could name anything."""
    check = run_signature.is_own

    def swap_afterwards(text: str) -> bool:
        own = check(text)
        config = settings(stranger)
        config["model"]["name"] = NET
        write(stranger, config)
        return own

    monkeypatch.setattr(run_signature, "is_own", swap_afterwards)
    epochs = f"--trainer.max_epochs={checkpoint(stranger)['epoch'] + 2}"
    main([verb, "stranger", *([epochs] if verb == "resume" else [])])
    assert not (stranger / "ran").exists()


def change(path: Path, **parts: Any) -> None:
    """Change what a checkpoint says of its network."""
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"] |= parts
    torch.save(content, path)


def test_no_code_that_a_checkpoint_names_is_run(stranger: Path, capfd: Capture) -> None:
    best = stranger / "checkpoints/best.ckpt"
    before = best.read_bytes()
    export = ["export", "stranger", "--format=torch_export"]
    try:
        change(best, name=NET)
        assert refused(export, capfd).endswith(trust.REMEDY)
        assert not (stranger / "ran").exists()
        main([*export, "--trust-config"])
        assert (stranger / "ran").exists()
        (stranger / "ran").unlink()
        sys.modules.pop("stranger.payload")
        # Lightning's `instantiate_module` would make an object of any value with a class path.
        best.write_bytes(before)
        own = {"own": {"class_path": NAME}}
        name = settings(stranger)["model"]["name"]
        change(best, name=name, _instantiator="lightning.pytorch.cli.instantiate_module", optimizer_args=own)
        assert "unexpected keyword argument 'own'" in refused(export, capfd)
        change(best, _class_path=NAME)
        assert "best.ckpt cannot be loaded: The class" in refused(export, capfd)
        assert not (stranger / "ran").exists()
    finally:
        best.write_bytes(before)


def test_public_classes_and_timms_networks_need_no_trust(stranger: Path, capfd: Capture) -> None:
    config = settings(stranger)
    config["model"]["metrics"] = {"f1": "torchmetrics.classification:MulticlassF1Score"}
    write(stranger, config)
    main(["eval", "stranger"])
    assert "f1" in capfd.readouterr().out
    config["model"] |= {"name": "timm/vit_tiny_patch16_224", "fields": {"patch_size": 4, "depth": 1, "embed_dim": 48}}
    write(stranger, config)
    assert "is of another network" in refused(["eval", "stranger"], capfd)


class Unpickled:
    """Unpickled without care, it writes a file."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("stranger/ran"),)


def test_a_checkpoint_is_no_code(stranger: Path, tmp_path: Path, capfd: Capture) -> None:
    hostile = tmp_path / "hostile.ckpt"
    torch.save(checkpoint(stranger) | {"more": Unpickled()}, hostile)
    torch.load(hostile, weights_only=False)
    (stranger / "ran").unlink()  # so it would
    write(stranger, settings(stranger) | {"weights_only": False})
    given = f"--ckpt_path={hostile}"
    for arguments in (["resume", "stranger", given, "--trainer.max_epochs=9"], ["eval", "stranger", given]):
        assert "not a whole checkpoint" in refused(arguments, capfd)
    fresh = ["fit", "--config=stranger/config.yaml", "--ckpt_path=null", "--run_name=fresh"]
    fresh += ["--trainer.default_root_dir=.", "--trainer.max_steps=1"]
    assert "cannot be read as weights" in refused([*fresh, f"--model.weights={hostile}"], capfd)
    teacher = ["--model.distillation=hard", f"--model.teacher={hostile}"]
    assert "not a whole checkpoint" in refused([*fresh, *teacher], capfd)
    (tmp_path / "timm.pth").write_bytes(hostile.read_bytes())
    timm = ["--model.distillation=hard", "--model.teacher=test_resnet.r160_in1k"]
    assert "cannot be loaded" in refused([*fresh, *timm, f"--model.teacher_path={tmp_path / 'timm.pth'}"], capfd)
    assert not (stranger / "ran").exists()


def test_the_trainer_has_no_other_setting_that_takes_an_object() -> None:
    """A canary for Lightning's upgrades."""
    parameters = signature(Trainer.__init__).parameters.items()
    assert sorted(name for name, parameter in parameters if "lightning." in str(parameter.annotation)) == [*trust.BUILT]


def test_a_key_is_made_also_on_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(os, "link", refuse)
    text = run_signature.signed("model: {}\n")
    assert run_signature.is_own(text)
    assert not run_signature.is_own(f"{text}trainer: {{}}\n")
    assert [path.name for path in (tmp_path / "cait").iterdir()] == ["key"]


def test_what_this_account_signed_needs_no_trust(tmp_path: Path, digits_root: Path, monkeypatch, capfd) -> None:
    """A new run's configuration is signed; a changed one, another account's, and a checkpoint's own word are not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setenv("CAIT_RUN", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    source = (
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, img_size, num_classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(3 * img_size ** 2, num_classes))\n"
    )
    for name in ("signed_net", "other_net"):
        (tmp_path / f"{name}.py").write_text(source)
    network = ["--model.name=signed_net:Net", "--model.fields=null", f"--data.root={digits_root}"]
    few = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--data.num_workers=0"]
    main(["fit", *SMALL[:3], "--trainer.devices=1", *network, *few, "--run_name=own"])
    assert (tmp_path / "home/cait/key").stat().st_mode & 0o777 == 0o600
    main(["eval", "own"])
    main(["export", "own", "--format=torch_export"])
    main(["resume", "own", "--trainer.max_steps=3"])  # with another setting: it is signed anew
    main(["eval", "own"])

    own, config = tmp_path / "logs/own", tmp_path / "logs/own/config.yaml"
    text = config.read_text()
    assert "max_steps: 3" in text
    config.write_text(text + "# a comment\n")
    assert "signed_net:Net, code that may do anything" in refused(["eval", "own"], capfd)
    config.write_text(text)
    main(["eval", "own"])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    for verb in ("eval", "resume", "export"):
        assert "signed_net:Net, code that may do anything" in refused([verb, "own"], capfd)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for path in own.glob("checkpoints/*.ckpt"):
        content = torch.load(path, weights_only=True)
        content["hyper_parameters"]["name"] = "other_net:Net"
        torch.save(content, path)
    assert "other_net:Net, code that may do anything" in refused(["export", "own"], capfd)
    assert "other_net" not in sys.modules
