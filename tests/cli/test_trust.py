"""A run's folder from a stranger: its settings and weights are used, and nothing in it is run unasked."""

from __future__ import annotations

import contextlib
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

from cait.cli import main
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


PREDICT = ["predict", "stranger", "pictures", "--output=predictions.csv"]


def test_scoring_and_export_build_nothing_that_a_run_names(
    stranger: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(stranger)
    config["trainer"] |= BUILT
    write(stranger, config | {"output": "stranger/written", "weights_only": False})
    main(["eval", "stranger"])
    assert "top-1" in capfd.readouterr().out
    left_out = ", ".join(f"trainer.{name}" for name in trust.BUILT if name in BUILT)
    assert f"config.yaml: left out {left_out}, output; on the command line they count" in caplog.text
    main(["eval", "--config", "stranger/config.yaml", "--ckpt_path=stranger/checkpoints/best.ckpt"])
    main(["eval", "-c", "stranger/config.yaml", "--ckpt_path=stranger/checkpoints/best.ckpt"])
    main(PREDICT)
    assert Path("predictions.csv").is_file()
    main(["export", "stranger"])
    assert not (stranger / "ran").exists()
    assert not (stranger / "written").exists()


# What does not stand where a class is expected.
SNEAKED = {
    "another file": {"trainer": "stranger/more.yaml"},
    "a key with a dot": {"trainer.callbacks": [NAME]},
    "a key that appends": {"trainer": {"callbacks+": NAME}},
    "a configuration": {"config": "stranger/more.yaml"},
    "a file of callbacks": {"trainer": {"callbacks": ["stranger/one.yaml"]}},
    "a function": {
        "trainer": {
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"on_fit_start": NAME}}
            ]
        }
    },
    "a module of another": {
        "trainer": {
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.LambdaCallback",
                    "init_args": {"on_fit_start": "torch.os.abort"},
                }
            ]
        }
    },
    "a field": {"model": {"fields": {"depth": {"class_path": NAME}}}},
    "the model": {"model": {"class_path": NAME}},
    "an average": {"ema": NAME},
}


@pytest.mark.parametrize("verb", ["eval", *slow("predict")])
@pytest.mark.parametrize("sneaked", SNEAKED.values(), ids=SNEAKED.keys())
def test_nothing_is_run_wherever_it_is_named(
    sneaked: dict[str, Any], verb: str, stranger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (stranger / "more.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [NAME]}, "callbacks": [NAME]}))
    (stranger / "one.yaml").write_text(yaml.safe_dump({"class_path": NAME}))
    config = settings(stranger)
    for key, value in sneaked.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = config[key] | value
        else:
            config[key] = value
    write(stranger, config)
    refused(["resume", "stranger", "--trainer.max_epochs=2"], capfd)
    with contextlib.suppress(SystemExit):  # it need not be refused: what it names may be left out
        main(VERBS[verb])
    assert not (stranger / "ran").exists()


@pytest.mark.parametrize("name", BUILT)
def test_resume_refuses_in_one_line_what_is_not_of_this_package(
    name: str, stranger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(stranger)
    config["trainer"][name] = BUILT[name]
    write(stranger, config)
    told = refused(["resume", "stranger", "--trainer.max_epochs=2"], capfd)
    assert told == (
        f"cait: error: stranger/config.yaml names {NAME}, code that may do anything: if you trust it add --trust-config"
    )
    assert not (stranger / "ran").exists()


def test_with_the_flag_it_runs_and_without_it_what_the_packages_have(stranger: Path) -> None:
    config = settings(stranger)
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/acc1"}}
    config["trainer"]["callbacks"] = [stopping, "LambdaCallback"]
    write(stranger, config)
    main(["resume", "stranger", "--trainer.max_epochs=2"])
    assert any("EarlyStopping" in key for key in checkpoint(stranger)["callbacks"])
    config = settings(stranger)
    config["trainer"]["callbacks"] = BUILT["callbacks"]
    write(stranger, config)
    for epochs, flag in ((3, "--trust-config"), (4, "--trust_config")):
        main(["resume", flag, "stranger", f"--trainer.max_epochs={epochs}"])
        assert (stranger / "ran").exists()
    assert checkpoint(stranger)["global_step"] == 8


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


SCORED = ["--config=stranger/config.yaml", "--ckpt_path=stranger/checkpoints/best.ckpt"]
VERBS = {
    "resume": ["resume", "stranger", "--trainer.max_epochs=9"],
    "eval": ["eval", "stranger"],
    "eval of a file": ["eval", *SCORED],
    "predict": PREDICT,
}
OWN: dict[str, dict[str, Any]] = {
    "network": {"model": {"name": NET}},
    "loss": {"model": {"loss": NET}},
    "optimizer": {"model": {"optimizer": NET}},
    "metric": {"model": {"metrics": {"f1": NET}}},
    "data": {"data": {"root": NET}},
    "augmentation": {"data": {"augment_ops": [NET]}},
    "of torch": {"model": {"name": "torch.hub:load"}},
    "through a metric": {"model": {"metrics": {"f1": "torchmetrics:os.system"}}},
}
REMEDY = f"code that may do anything: {trust.REMEDY}"


@pytest.mark.parametrize("verb", ["eval", *slow("predict")])
@pytest.mark.parametrize("own", OWN.values(), ids=OWN.keys())
def test_own_parts_that_a_run_names_are_refused_before_they_are_imported(
    own: dict[str, Any], verb: str, stranger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(stranger)
    for group, values in own.items():
        config[group] |= values
    write(stranger, config)
    told = refused(VERBS["resume"], capfd)
    assert told.startswith("cait: error: the run names ")
    assert told.endswith(REMEDY)
    with contextlib.suppress(SystemExit):  # it may do without that part
        main(VERBS[verb])
    assert not (stranger / "ran").exists()


@pytest.mark.parametrize("verb", ["resume", "eval", "eval of a file", *slow("predict")])
def test_a_network_of_ones_own_runs_when_it_is_trusted_or_named(
    verb: str, stranger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(stranger)
    config["model"]["name"] = NET
    write(stranger, config)
    assert refused(VERBS[verb], capfd) == f"cait: error: the run names {NET}, {REMEDY}"
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
