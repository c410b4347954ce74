"""What a newcomer types wrong gets one line that names key and value, exit code 2, and leaves nothing behind."""

import errno
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import REPO
from torch._utils import ExceptionWrapper

from cait.cli import main
from cait.data.reading import UnreadableImageError
from cait.errors import UserError, system_error
from cait.model.config import VARIANTS
from cait.plugins import Verb

FILES = {
    "open.yaml": b"trainer:\n  max_epochs: [1\nmodel: {\n",
    "empty.yaml": b"",
    "word.yaml": b"hello\n",
    "bytes.yaml": bytes(range(256)),
    "twice.yaml": b"model:\n  name: xxs24\n  lr: 1.0e-3\n  name: xs24\n",
    "key.yaml": b"trainer:\n  max_epoch: 3\n",
    "type.yaml": b"trainer:\n  max_epochs: many\n",
    "linked.yaml": b"model:\n  num_classes: 7\n",
    "base.yaml": b"config: digits.yaml\nmodel:\n  lr: 1.0\n",
    "notes.txt": b"hi\n",
}
FIT = ["fit", "--config", "digits.yaml"]
# Refused before a folder is made. Options of fit alone stand here with what the line says.
OPTIONS = {
    "--model.lr fast": "--model.lr: Expected a <class 'float'>. Got value: fast",
    "--model.lr": "--model.lr",
    "--modl.lr 3": "there is no setting modl.lr; did you mean --model.lr?",
    "--batch_size 8": "did you mean --data.batch_size?",
    "--model.init_args.lr 3": "there is no setting model.init_args.lr; did you mean --model.lr?",
    "--data.batch_size 0": "batch_size must be at least 1, got 0",
    "--data.batch_size 33": "batch_size must be even, got 33",
    "--data.mix_mode foo": "--data.mix_mode: Expected a typing.Literal['batch', 'pair', 'elem']. Got value: foo",
    "--data.root nowhere": "nowhere does not exist",
    "--data.seed 3": "data.seed cannot be set: give --seed_everything",
    "--model": "argument --model: expected one argument",
    "--model.name resnet18": "unknown model 'resnet18'; choose one of ",
    "--model.fields.embed_dim 1000000000000": "embed_dim 1,000,000,000,000 is too large",
    "--ckpt_path no.ckpt": "no.ckpt does not exist",
    "--ckpt_path no.ckpt --model.weights x.pth": "--model.weights is not read beside the checkpoint no.ckpt",
    "--ckpt_path no.ckpt --model.fields.layer_scale_init 1": "layer_scale_init is not read beside the checkpoint",
    "--ckpt_path notes.txt": "not a whole checkpoint",
    "--ckpt_path data": "cannot read data on ",
    "--run_name a/b": "not a path",
    "--run_name taken": "cannot use logs/taken",
    "--trainer.max_epochs 0": "--trainer.max_epochs 0: a run cannot train with it",
    "--trainer.gradient_clip_val -1": "gradient_clip_val must be at least 0, got -1",
    "--trainer.val_check_interval 00:00:10:00": "--trainer.val_check_interval counts batches or a share of an epoch",
    "--trainer.strategy ddp_spawn_find_unused_parameters_true": "--trainer.strategy: runs save and resume with ddp or",
    "--trainer.devices 3": "batch_size 32 cannot be shared out over 3 batches",
    "--trainer.callbacks EarlyStoping": "--trainer.callbacks: Expected a path but EarlyStoping",
    "--trainer.callbacks EarlyStopping": "callbacks.EarlyStopping': the following arguments are required: monitor",
    "--model.name own_parts:Net --model.fields null --model.fields.size 1": "cannot make own_parts:Net: TypeError: ",
    "extra": "there is no setting extra",
}
if VARIANTS:  # CaiT may have been deleted
    OPTIONS |= {
        "--data.img_size 15": "img_size 15 is not a multiple of patch_size 4",
        "--model.fields.dept 3": "did you mean depth?",
    }
CONFIGS = {
    "digit.yaml": "--config digit.yaml: there is no such file; did you mean digits.yaml?",
    "open.yaml": "line 3, column 6",
    "empty.yaml": "empty.yaml is not a configuration",
    "word.yaml": "word.yaml is not a configuration: it holds no settings",
    "bytes.yaml": "no text",
    "twice.yaml": "twice",
    "key.yaml": "error: there is no setting trainer.max_epoch; did you mean --trainer.max_epochs?",
    "type.yaml": "error: --trainer.max_epochs: Expected a <class 'int'>; Given value: many",
    "base.yaml": "base.yaml: config cannot be set: give each file as --config",
    "linked.yaml": "linked.yaml: model.num_classes cannot be set: it is the number of the data's classes",
}
VERBS = {
    "train --config digits.yaml": "unknown verb 'train'; did you mean fit?",
    "evall": "unknown verb 'evall'; did you mean eval?",
    "resume": "which run?",
    "resume nowhere": "there is no run logs/nowhere",
    "resume broken": "logs/broken/config.yaml is not YAML: ",
    "resume new": "logs/new/config.yaml is missing",
    "eval broken": "logs/broken/config.yaml is not YAML: ",
    "resume changed --trust-config": "error: --trainer.max_epochs: Expected a <class 'int'>",
    "eval new": "nothing to score",
    "eval --config digits.yaml --ckpt_path no.ckpt --model.pretrained true": "--model.pretrained is not read beside",
    "eval --config digits.yaml": "nothing to score: give --ckpt_path",
}
if not torch.accelerator.is_available():
    OPTIONS["--trainer.accelerator gpu"] = (
        "no supported gpu backend found: take --trainer.accelerator auto"
    )
ROWS = [
    *(([*FIT, *option.split(" ")], words) for option, words in OPTIONS.items()),
    *((["fit", "--config", file], words) for file, words in CONFIGS.items()),
    *((line.split(" "), words) for line, words in VERBS.items()),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with the digits, files that are no configurations, and runs whose config.yaml is broken."""
    folder = tmp_path_factory.mktemp("desk")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "data").mkdir()
    (folder / "data/digits").symlink_to(digits_root)
    digits = (REPO / "configs/digits.yaml").read_text()
    (folder / "digits.yaml").write_text(digits.replace("accelerator: auto", "accelerator: cpu"))
    (folder / "logs/new").mkdir(parents=True)
    (folder / "logs/taken").touch()
    run = folder / "logs/broken"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("model: {\n")
    (folder / "logs/changed").mkdir()
    (folder / "logs/changed/config.yaml").write_text("trainer: {max_epochs: many}")
    for name in ("last.ckpt", "best.ckpt"):
        with (run / "checkpoints" / name).open("wb") as file:
            # a whole zip file, which is all that is looked at before the configuration
            np.savez(file, empty=0)
    return folder


@pytest.fixture(autouse=True)
def no_information() -> Iterator[None]:
    """Lightning's handlers are pytest's here."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("arguments", "words"),
    ROWS,
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "",
)
def test_what_is_typed_wrong_gets_one_line(
    arguments: list[str],
    words: str,
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "argv", ["cait"])
    before = sorted(desk.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    told = capfd.readouterr().err
    assert stop.value.code == 2
    assert told.startswith("cait: error: ")
    assert told.count("\n") == 1
    assert words in told
    assert sorted(desk.rglob("*")) == before


OF_TASK = dict(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_NODELIST="localhost")
IN_SHELL = OF_TASK | dict(SLURM_STEP_ID="4294967290", SLURM_STEP_NUM_TASKS="1")


@pytest.mark.parametrize("place", [{}, OF_TASK | dict(ENVIRONMENT="BATCH"), IN_SHELL])
def test_tasks_that_srun_did_not_start_are_told(
    place: dict[str, str],
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In a shell of salloc, in a batch script, and in the step of one task that is an interactive shell."""
    job = dict(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="4"
    )
    for name, value in (job | place).items():
        monkeypatch.setenv(name, value)
    test_what_is_typed_wrong_gets_one_line(FIT, "SLURM", desk, monkeypatch, capfd)


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
        *(UserError(f"one{end}two: 2") for end in ("\n", "\n\n  ", "\v")),
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


def test_a_taken_port_is_a_line() -> None:
    error = RuntimeError("The server socket has failed. port: 29787, name: EADDRINUSE")
    assert str(system_error(error)).startswith("port: 29787: another program listens there; set")


def test_any_letter_is_printed_where_the_system_knows_ascii_alone() -> None:
    code = r"from cait.errors import say; say('6\u00d796 \u2502 \U0001f4a1')"
    ascii_alone = dict(
        LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="utf-8"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | ascii_alone, capture_output=True)
    assert done.stdout.decode() == "6\u00d796 \u2502 \U0001f4a1\n", done.stderr.decode()


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE"])
def test_what_a_disk_says_without_a_files_name_is_told(code: str) -> None:
    number = getattr(errno, code)
    plain, wrapped = OSError(number, os.strerror(number)), RuntimeError("unexpected pos 64 vs 0")
    wrapped.__context__ = plain  # as torch.save has it
    line = f"cannot use the disk: {os.strerror(number)}"
    assert [str(system_error(error)) for error in (plain, wrapped)] == [line] * 2
