"""A run's folder from a stranger: its settings and weights are used, and nothing in it is run unasked."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import SMALL, Cait, checkpoint, slow
from jsonargparse import _common
from lightning.pytorch import Trainer
from PIL import Image

from cait import signature as run_signature
from cait.cli import command, main
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
BUILT: dict[str, Any] = {
    "callbacks": [{"class_path": NAME, "init_args": {}}],
    "logger": NAME,
    "plugins": [NAME],
    "profiler": {"class_path": NAME},
    "strategy": {"class_path": NAME},
}
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


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


def refused(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert len(told) == 1
    return told[0]


PREDICT = ["predict", "stranger", "pictures", "--format=csv", "--output=predictions.csv"]


def test_scoring_and_export_build_nothing_that_a_run_names(
    stranger: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(stranger)
    config["trainer"] |= BUILT
    write(stranger, config | {"output": "stranger/written", "weights_only": False})
    main(["eval", "stranger"])
    assert "top-1" in capfd.readouterr().out
    left_out = caplog.text.split("stranger/config.yaml: left out ")[1].split("; on the command line they count")[0]
    assert {*left_out.split(", ")} == {"output", *(f"trainer.{name}" for name in BUILT)}
    for option in (["--config", "stranger/config.yaml"], ["-c", "stranger/config.yaml"]):
        main(["eval", *option, "--ckpt_path=stranger/checkpoints/best.ckpt"])
    main(PREDICT)
    assert Path("predictions.csv").is_file()
    main(["export", "stranger"])
    assert not (stranger / "ran").exists()
    assert not (stranger / "written").exists()


LAUNCH = {
    "class_path": "torch.distributed.launcher.api.elastic_launch",
    "init_args": {"config": {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1}, "entrypoint": "stranger/payload.py"},
}
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
# What the code of a run could hide in: settings that name it, and settings that do not look like it.
ATTACKS: dict[str, dict[str, Any]] = {
    "a callback": {"trainer": {"callbacks": BUILT["callbacks"]}},
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
    "a plugin": {"trainer": {"plugins": BUILT["plugins"]}},
    "torch's plugin of checkpoints": {"trainer": {"plugins": ["lightning.pytorch.plugins.io.TorchCheckpointIO"]}},
    "a profiler": {"trainer": {"profiler": BUILT["profiler"]}},
    "Lightning's profiler, in any folder": {
        "trainer": {"profiler": {"class_path": "PyTorchProfiler", "init_args": {"dirpath": "elsewhere"}}}
    },
    "a strategy": {"trainer": {"strategy": BUILT["strategy"]}},
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


def attack(run: Path, settings_: dict[str, Any]) -> None:
    (run / "more.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [NAME]}, "callbacks": [NAME]}))
    (run / "one.yaml").write_text(yaml.safe_dump({"class_path": NAME}))
    config = settings(run)
    for key, value in settings_.items():
        both = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = config[key] | value if both else value
    write(run, config)


@pytest.mark.parametrize("verb", ["eval", *slow("predict")])
@pytest.mark.parametrize("hidden", ATTACKS.values(), ids=ATTACKS.keys())
def test_nothing_is_run_wherever_it_is_named(
    hidden: dict[str, Any], verb: str, stranger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attack(stranger, hidden)
    told = refused(["resume", "stranger", "--trainer.max_epochs=2"], capfd)
    assert told.startswith("cait: error: stranger/config.yaml ")
    assert told.endswith(trust.REMEDY)
    with contextlib.suppress(SystemExit):  # it need not be refused: what it names may be left out
        main(VERBS[verb])
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert all(line.endswith(trust.REMEDY) for line in errors)  # and not because of something else
    assert not (stranger / "ran").exists()


def test_the_name_of_the_run_is_no_word_of_the_users(stranger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attack(stranger, {"trainer": {"callbacks": [NAME]}})
    named = stranger.with_name(NAME)
    shutil.copytree(stranger, named)
    try:
        assert f"names {NAME}, code that may do anything" in refused(["resume", NAME, "--trainer.max_epochs=9"], capfd)
        assert not (stranger / "ran").exists()
    finally:
        shutil.rmtree(named)


@pytest.mark.parametrize("tag", ["!!python/name:stranger.payload.net", "!!python/object/apply:os.abort []"])
def test_a_tag_of_yaml_builds_nothing(tag: str, stranger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = stranger / "config.yaml"
    config.write_text(config.read_text().replace("seed_everything: 0", f"seed_everything: {tag}"))
    for verb in ("resume", "eval"):
        assert "is not a configuration: could not determine a constructor" in refused(VERBS[verb], capfd)
    assert not (stranger / "ran").exists()


def test_yaml_that_contains_itself_is_refused(stranger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (stranger / "config.yaml").write_text("model: &a\n  fields: *a\n")
    assert "a part of it contains itself" in refused(VERBS["resume"], capfd)


def test_a_strangers_loggers_are_left_out(
    stranger: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They would send the user's keys to an address that the run names."""
    attack(
        stranger,
        {
            "trainer": {"logger": {"class_path": "WandbLogger", "init_args": {"base_url": "http://127.0.0.1:9"}}},
            "logger": "mlflow",
            "logger_args": {"tracking_uri": "http://127.0.0.1:9"},
        },
    )
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    main(["resume", "stranger", f"--trainer.max_epochs={checkpoint(stranger)['epoch'] + 2}"])
    left_out = ("logger", "logger_args", "trainer.logger")
    assert all(name in caplog.text.split("left out ")[1].split(";")[0].split(", ") for name in left_out)
    assert "127.0.0.1:9" not in (stranger / "config.yaml").read_text()


@pytest.mark.parametrize("name", [".owner", "metrics.csv", "checkpoints"])
def test_no_link_leads_what_is_written_out_of_a_strangers_run(
    name: str, stranger: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize("verb", [verb for verb in ("resume", "eval", "replay") if verb in command.verbs()])
def test_the_text_that_was_checked_is_the_one_that_is_used(
    verb: str, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped after the check, the file could name anything."""
    config, check = stranger / "config.yaml", run_signature.is_own

    def swap_afterwards(path: Path, text: str) -> bool:
        own = check(path, text)
        (stranger / "checked").write_text(text)
        attack(stranger, {"trainer": {"callbacks": [NAME]}, "model": {"name": NET}})
        return own

    monkeypatch.setattr(run_signature, "is_own", swap_afterwards)
    epochs = f"--trainer.max_epochs={checkpoint(stranger)['epoch'] + 2}"
    main([verb, "stranger", *{"resume": [epochs], "replay": ["--step=1"]}.get(verb, [])])
    assert NAME in config.read_text() or verb == "resume"  # which writes its own
    assert not (stranger / "ran").exists()


CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
"""Asks a terminal to put something else into the clipboard."""


def test_no_name_of_a_strangers_run_reaches_the_terminal_raw(
    stranger: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    best = stranger / "checkpoints/best.ckpt"
    before = best.read_bytes()
    content = torch.load(best, weights_only=True)
    key = next(key for key, part in content.items() if isinstance(part, dict) and "depends_on" in part)
    content[key]["class_names"] = [name + CLIPBOARD for name in content[key]["class_names"]]
    torch.save(content, best)
    try:
        for form in ("table", "csv", "jsonl"):
            main(["predict", "stranger", "pictures", f"--format={form}"])
            shown = "".join(capfd.readouterr())
            assert "]52;c;" in shown
            assert not {"\x1b", "\x07"} & {*shown}
        assert "\x1b]" not in refused(VERBS["eval"], capfd)  # other classes than the folder's
    finally:
        best.write_bytes(before)
    config = stranger / "config.yaml"
    config.write_text(config.read_text() + 'more: "\\e]52;c;cm0gLXJmIH4=\\a"\n')
    for verb in ("resume", "eval", "predict"):
        assert "config.yaml holds a control character, in line" in refused(VERBS[verb], capfd)


def test_with_the_flag_everything_that_a_run_names_is_run(stranger: Path) -> None:
    config = settings(stranger)
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/acc1"}}
    config["trainer"]["callbacks"] = [stopping, *BUILT["callbacks"]]
    write(stranger, config)
    first = checkpoint(stranger)["epoch"] + 2
    for epochs, flag in ((first, "--trust-config"), (first + 1, "--trust_config")):
        main(["resume", flag, "stranger", f"--trainer.max_epochs={epochs}"])
        assert (stranger / "ran").exists()
    assert any("EarlyStopping" in key for key in checkpoint(stranger)["callbacks"])


def test_a_setting_that_the_command_line_replaces_is_not_read(stranger: Path) -> None:
    attack(stranger, {"trainer": {"callbacks": [NAME]}})
    epochs = checkpoint(stranger)["epoch"] + 2
    main(["resume", "stranger", f"--trainer.max_epochs={epochs}", "--trainer.callbacks=null"])
    assert not (stranger / "ran").exists()


def test_what_the_command_line_names_itself_is_run(stranger: Path) -> None:
    last = checkpoint(stranger)["epoch"]
    main(
        [
            "resume",
            "stranger",
            f"--trainer.max_epochs={last + 2}",
            "--trainer.callbacks+=recorder.Recorder",
            "--trainer.callbacks.folder=seen",
        ]
    )
    assert (Path("seen") / "0.jsonl").is_file()


VERBS = {
    "resume": ["resume", "stranger", "--trainer.max_epochs=9"],
    "eval": ["eval", "stranger"],
    "eval of a file": ["eval", "--config=stranger/config.yaml", "--ckpt_path=stranger/checkpoints/best.ckpt"],
    "predict": PREDICT,
}
REMEDY = f"code that may do anything: {trust.REMEDY}"


@pytest.mark.parametrize("verb", ["resume", "eval", *slow("eval of a file")])
def test_a_network_of_ones_own_runs_when_it_is_trusted_or_named(
    verb: str, stranger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(stranger)
    config["model"]["name"] = NET
    write(stranger, config)
    assert refused(VERBS[verb], capfd) == f"cait: error: stranger/config.yaml names {NET}, {REMEDY}"
    assert not (stranger / "ran").exists()
    more = ["--trainer.max_epochs", str(checkpoint(stranger)["epoch"] + 2)] if verb == "resume" else []
    main([*VERBS[verb], *more, f"--model.name={NET}"])
    assert (stranger / "ran").exists()
    (stranger / "ran").unlink()
    sys.modules.pop("stranger.payload")
    Path("predictions.csv").unlink(missing_ok=True)
    write(stranger, config)
    main([*VERBS[verb], *more, "--trust-config"])
    assert (stranger / "ran").exists()


def test_export_refuses_a_network_that_the_checkpoint_names(stranger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    best = stranger / "checkpoints/best.ckpt"
    before = best.read_bytes()
    content = torch.load(best, weights_only=True)
    content["hyper_parameters"]["name"] = NET
    torch.save(content, best)
    try:
        assert refused(["export", "stranger", "--format=onnx"], capfd).endswith(REMEDY)
        assert not (stranger / "ran").exists()
        main(["export", "stranger", "--format=onnx", "--trust-config"])
        assert (stranger / "ran").exists()
        assert (stranger / "export/model.onnx").is_file()
    finally:
        best.write_bytes(before)


@pytest.mark.parametrize("signed", [True, False])
def test_no_hyper_parameter_of_a_checkpoint_is_built(
    signed: bool, stranger: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lightning's `instantiate_module` would make an object of any value with a class path."""
    if not signed:
        write(stranger, settings(stranger) | {"v2": "images"})
    best = stranger / "checkpoints/best.ckpt"
    before = best.read_bytes()
    content = torch.load(best, weights_only=True)
    content["hyper_parameters"] |= {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "optimizer_args": {"own": {"class_path": NAME}},
    }
    torch.save(content, best)
    Image.new("RGB", (16, 16)).save(tmp_path / "x.png")
    try:
        for arguments in (["export", "stranger", "--format=onnx"], ["visualize", "stranger", f"--images={tmp_path}"]):
            assert "unexpected keyword argument 'own'" in refused(arguments, capfd)
        content["hyper_parameters"]["_class_path"] = NAME
        torch.save(content, best)
        assert "best.ckpt cannot be loaded: The class" in refused(["export", "stranger"], capfd)
        assert not (stranger / "ran").exists()
    finally:
        best.write_bytes(before)


def test_public_classes_and_timms_networks_need_no_trust(stranger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = settings(stranger)
    config["model"]["metrics"] = {"f1": "torchmetrics.classification:MulticlassF1Score"}
    write(stranger, config)
    main(["eval", "stranger"])
    assert "f1" in capfd.readouterr().out
    config["model"] |= {"name": "timm/vit_tiny_patch16_224", "fields": {"patch_size": 4, "depth": 1, "embed_dim": 48}}
    write(stranger, config)
    assert "is of another network" in refused(["eval", "stranger"], capfd)


def test_the_processes_that_lightning_starts_run_nothing_either(cait: Cait, stranger: Path) -> None:
    config = settings(stranger)
    config["trainer"] |= {"devices": 2, "callbacks": [NAME]}
    write(stranger, config)
    scored = cait("eval", str(stranger))
    assert scored.returncode == 0, scored.stderr
    assert not (stranger / "ran").exists()


class Unpickled:
    """Unpickled without care, it writes a file."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("stranger/ran"),)


@pytest.mark.parametrize("careless", [None, False])
def test_a_checkpoint_is_no_code(
    careless: bool | None, stranger: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(stranger)
    hostile = tmp_path / "hostile.ckpt"
    torch.save(checkpoint(stranger) | {"more": Unpickled()}, hostile)
    torch.load(hostile, weights_only=False)
    (stranger / "ran").unlink()  # so it would
    write(stranger, config | {"weights_only": careless})
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


def test_the_policy_ends_with_the_command(stranger: Path) -> None:
    before = dict(_common.parsing_settings)
    with contextlib.suppress(SystemExit):
        main(["eval", "stranger", "--trainer.limit_val_batches=0"])
    assert _common.parsing_settings == before


def test_the_trainer_has_no_other_setting_that_takes_an_object() -> None:
    """A canary for Lightning's upgrades."""
    parameters = signature(Trainer.__init__).parameters.items()
    assert sorted(name for name, parameter in parameters if "lightning." in str(parameter.annotation)) == [*trust.BUILT]


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
