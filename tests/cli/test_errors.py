"""What a newcomer types wrong gets one line that names file, key and value, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import logging
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import REPO
from torch._utils import ExceptionWrapper

from cait.cli import main
from cait.data.reading import UnreadableImageError
from cait.errors import UserError
from cait.plugins import Verb

FILES = {
    "open.yaml": b"trainer:\n  max_epochs: [1\nmodel: {\n",
    "tabs.yaml": b"trainer:\n\tmax_epochs: 1\n",
    "empty.yaml": b"",
    "list.yaml": b"- a\n- b\n",
    "bytes.yaml": bytes(range(256)),
    "twice.yaml": b"model:\n  name: xxs24\n  lr: 1.0e-3\n  name: xs24\n",
    "key.yaml": b"trainer:\n  max_epoch: 3\n",
    "group.yaml": b"trainr:\n  max_epochs: 3\n",
    "type.yaml": b"trainer:\n  max_epochs: many\n",
    "linked.yaml": b"model:\n  num_classes: 7\n",
    "notes.txt": b"hi\n",
}
FIT = ["fit", "--config", "digits.yaml"]
# Refused before a folder is made. Options of fit alone stand here with what the line says.
OPTIONS = {
    "--model.lr fast": "--model.lr cannot be 'fast': it takes float",
    "--model.lr": "argument --model.lr: expected one argument",
    "--model foo": "--model cannot be used: Unable to load config 'foo'",
    "--modl.lr 3": "there is no option --modl.lr; did you mean --model.lr?",
    "--lr 3": "there is no option --lr; did you mean --model.lr?",
    "--batch_size 8": "did you mean --data.batch_size?",
    "--data.batch-size 8": "did you mean --data.batch_size?",
    "--data.batch_size 2.5": "--data.batch_size cannot be '2.5': it takes int",
    "--data.batch_size 0": "batch_size must be at least 1, got 0",
    "--data.batch_size 33": "batch_size must be even, got 33",
    "--data.scale 0.5": "--data.scale cannot be '0.5': it takes tuple",
    "--data.mix_mode foo": "--data.mix_mode cannot be 'foo': it takes Literal['batch', 'pair', 'elem']",
    "--data.color_jitter foo": "--data.color_jitter cannot be 'foo': it takes float, collections",
    "--data.auto_augment foo": "auto_augment 'foo'",
    "--data.img_size 15": "img_size 15 is not a multiple of patch_size 4",
    "--data.root=": "root is empty; name a folder or a data set with --data.root",
    "--data.seed 3": "data.seed cannot be set: give --seed_everything",
    "--model.num_classes 7": "model.num_classes cannot be set: it is the number of the data's classes",
    "--model.name xxs25": "unknown model 'xxs25'; did you mean xxs24?",
    "--model.compile 3": "--model.compile cannot be '3': it takes bool",
    "--model.fields [1]": "--model.fields cannot be '[1]': it takes dict[str, Any], null",
    "--trainer.precision bf8": "--trainer.precision cannot be 'bf8': it takes Literal[64, 32, 16],",
    "--trainer.accelerator tpu": "torch_xla",
    "--trainer.strategy ddp_spawn": "--trainer.strategy ddp_spawn: a run takes auto, ddp, ddp_...",
    "--trainer.accumulate_grad_batches 0": "--trainer.accumulate_grad_batches must be at least 1, got 0",
    "--trainer.val_check_interval 00:00:30:00": "--trainer.val_check_interval counts batches or a share of an epoch",
    "--trainer.use_distributed_sampler true": "--trainer.use_distributed_sampler true",
    "--trainer.callbacks EarlyStoping": "--trainer.callbacks cannot be 'EarlyStoping': it takes list[",
    "--trainer.callbacks EarlyStopping": "callbacks.EarlyStopping: the following arguments are required: monitor",
    "--trainer.profiler XLAProfiler": "cannot make lightning.pytorch.profilers.XLAProfiler: Requirement 'torch_xla",
    "--model.fields.embed_dim 1000000000000": "out of memory",
    "--model.min_lr 1": "--model.min_lr 1 is above --model.lr 0.002",
    "--model.loss torch.nn:Linear": "cannot make torch.nn:Linear: Linear.__init__() missing 2 required",
    "--model.loss torch.nn:ReLU": "the loss torch.nn:ReLU fails on logits [2, 10] and targets [2, 10]: TypeError",
    "--model.loss torch.nn:PairwiseDistance": "must be one number that depends on the logits, got a tensor of [2]",
    "--model.metrics.a torchmetrics.classification:BinaryAccuracy": "cannot make torchmetrics.classification:Binary",
    "--model.name own_parts:Failing --model.fields null": "cannot make own_parts:Failing: RuntimeError: no such luck (",
    "extra": "what is 'extra'? Settings are given as --name value",
}
CONFIGS = {
    "nowhere.yaml": "--config nowhere.yaml: there is no such file",
    "digit.yaml": "--config digit.yaml: there is no such file; did you mean digits.yaml?",
    "folder": "--config folder: there is no such file",
    "open.yaml": "open.yaml is not YAML at line 3, column 6",
    "tabs.yaml": "tabs.yaml is not YAML at line 2, column 1: found character",
    "empty.yaml": "empty.yaml is not a configuration: it holds no settings",
    "list.yaml": "list.yaml is not a configuration: it holds no settings",
    "bytes.yaml": "bytes.yaml is no text",
    "twice.yaml": "twice.yaml is not YAML at line 4, column 3: name is there twice",
    "key.yaml": "key.yaml: there is no setting trainer.max_epoch; did you mean --trainer.max_epochs?",
    "group.yaml": "group.yaml: there is no setting trainr.max_epochs; did you mean --trainer.max_epochs?",
    "type.yaml": "type.yaml: --trainer.max_epochs cannot be 'many': it takes int, null",
    "linked.yaml": "linked.yaml: model.num_classes cannot be set: it is the number of the data's classes",
}
VERBS = {
    "fit configs/x.yaml": "what is 'configs/x.yaml'? Settings are given",
    "fit --config": "--config: expected one argument",
    "train --config digits.yaml": "unknown verb 'train'; did you mean fit?",
    "runs nowhere": "there is no folder nowhere",
    "resume": "which run?",
    "resume nowhere": "there is no run logs/nowhere",
    "resume broken": "logs/broken/config.yaml is not YAML at line 2",
    "compare broken hollow": "logs/broken/config.yaml is not YAML at line 2",
    "eval it's": "there is no run logs/it's",
    "imagenet-check notes.txt": "the data folder notes.txt does not exist",
    "paper table9": "no table 'table9'",
}
if not torch.accelerator.is_available():
    OPTIONS["--trainer.accelerator gpu"] = "--trainer.accelerator gpu: this machine has no GPU that PyTorch can use"
if sys.version_info < (3, 14):  # later ones say that such a folder does not exist
    VERBS |= {
        f"imagenet-check {300 * 'x'}": f"cannot use {300 * 'x'}: File name too long",
        f"fit --data.root {300 * 'x'}": ": File name too long",
    }
ROWS = [
    *(([*FIT, *option.split(" ")], words) for option, words in OPTIONS.items()),
    *((["fit", "--config", file], words) for file, words in CONFIGS.items()),
    *((line.split(" "), words) for line, words in VERBS.items()),
    (["eval", ""], "which run?"),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with the digits, files that are no configurations, and runs whose config.yaml is broken."""
    folder = tmp_path_factory.mktemp("desk")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "data").mkdir()
    (folder / "data/digits").symlink_to(digits_root)
    digits = (REPO / "configs/digits.yaml").read_text()
    (folder / "digits.yaml").write_text(digits.replace("accelerator: auto", "accelerator: cpu"))
    for name, content in (("broken", "model: {\n"), ("hollow", "")):
        (folder / "logs" / name / "checkpoints").mkdir(parents=True)
        (folder / "logs" / name / "config.yaml").write_text(content)
        with (folder / "logs" / name / "checkpoints/last.ckpt").open("wb") as file:
            np.savez(file, empty=0)  # a whole zip file, which is all that is looked at before the configuration
        shutil.copy(folder / "logs" / name / "checkpoints/last.ckpt", folder / "logs" / name / "checkpoints/best.ckpt")
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"), ROWS, ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else ""
)
def test_what_is_typed_wrong_gets_one_line(
    arguments: list[str], words: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)  # whose handlers are pytest's here, not ours
    before = sorted(desk.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    told = capfd.readouterr().err
    assert stop.value.code == 2
    assert told.startswith("cait: error: ")
    assert told.count("\n") == 1
    assert words in told
    assert sorted(desk.rglob("*")) == before


ALONE = "--trainer.devices and num_nodes make 2 processes, SLURM has started 1"
SRUN = dict(SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NTASKS="4")
ENVIRONMENTS = [
    (SRUN, "SLURM has several tasks and this is none: start it with srun"),
    (SRUN | {"SLURM_NTASKS": "1"} | dict.fromkeys(["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"], "0"), ALONE),
]


@pytest.mark.parametrize("verb", [FIT, ["eval", *FIT[1:], "--model.weights=notes.txt"]], ids=["fit", "eval"])
@pytest.mark.parametrize(("variables", "words"), ENVIRONMENTS)
def test_variables_of_a_launcher_that_do_not_fit_together_get_one_line_too(
    variables: dict[str, str],
    words: str,
    verb: list[str],
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if words == ALONE:
        verb = [*FIT, "--trainer.devices=2", "--trainer.accelerator=cpu"]
    test_what_is_typed_wrong_gets_one_line(verb, words, desk, monkeypatch, capfd)


def test_two_names_of_a_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--run_name", "a1", "--run_name=b1"])
    assert capsys.readouterr().err == "cait: error: the run is given 2 names, a1 and b1; keep one of them\n"


def of_worker() -> UserError:
    """As a DataLoader raises what one of its workers has raised."""
    try:
        raise UserError("one\n  two: 2") from KeyError("a cause")
    except UserError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(UserError) as raised:
        wrapped.reraise()
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        *(UserError(f"one{end}two: 2") for end in ("\n", "\r\n", "\n\n  ", "\v", "\x1c", "\x85", "\u2028")),
        UserError("\none\ntwo: 2\n"),
        UnreadableImageError("one\ntwo: 2"),
        pickle.loads(pickle.dumps(UserError("one\ntwo: 2"))),
        of_worker(),
    ],
)
def test_every_user_error_is_one_line(
    error: UserError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(Verb, "load", lambda _: fails)
    with pytest.raises(SystemExit) as stop:
        main(["eval"])
    assert (stop.value.code, capsys.readouterr().err) == (2, "cait: error: one two: 2\n")
    assert str(UserError("a  b")) == "a  b"  # the name of a file
