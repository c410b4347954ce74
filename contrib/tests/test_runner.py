"""Runs that a program starts: resumed when there is a checkpoint, stopped, and why they failed."""

import signal
import sys
from contextvars import copy_context

import pytest

from cait.errors import COMMAND, UserError
from cait.run.program import Program
from contrib.runner import OUTPUT, failure, interruptible, train_run


def other(folder, code):
    """A program that runs Python code in the place of `cait`."""
    script = folder / "other.py"
    script.write_text(code)
    return Program(script=str(script))


def test_a_run_with_a_checkpoint_is_resumed(tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    program = other(
        tmp_path, "import os, sys; print(*sys.argv[1:], os.environ['EXTRA']); sys.exit(3)"
    )
    assert train_run(program, folder, ["--model.lr=1"], {"EXTRA": "here"}) == 3
    words = f"fit --model.lr=1 --trainer.default_root_dir={tmp_path} --run_name=mine here"
    assert failure(folder, 3) == words
    with pytest.raises(UserError, match="--run_name cannot be given"):
        train_run(program, folder, ["--run_name=other"])
    (folder / "checkpoints/last.ckpt").touch()
    train_run(program, folder, ["--model.lr=1"], {"EXTRA": ""})
    assert (folder / OUTPUT).read_text().splitlines()[1:] == [f"resume {folder} "]


def test_a_run_is_stopped_once_it_is_enough_and_by_a_signal(tmp_path, capsys):
    program = other(tmp_path, "import time; print('here', flush=True); time.sleep(600)")
    assert train_run(program, tmp_path, [], is_enough=(tmp_path / OUTPUT).read_text) is None
    assert failure(tmp_path, -signal.SIGTERM) == "killed by signal 15"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt), interruptible("trials"):
            train_run(program, tmp_path, [], is_enough=lambda: signal.raise_signal(signal.SIGHUP))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "The trials have saved; the same command continues them" in capsys.readouterr().err


def test_a_run_finds_modules_where_the_program_does(tmp_path, monkeypatch):
    """`cait` has the current folder last on the path, if at all; `python -m cait` would have it first."""
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("cait", "leafnet"):  # the second a console script of the user's own
        script = tmp_path / "bin" / name
        script.write_text("import os, sys; sys.exit(sys.path[0] in ('', os.getcwd()))")
        monkeypatch.setattr(sys, "argv", [str(script)])
        context = copy_context()
        context.run(COMMAND.set, name)
        assert context.run(train_run, Program(), tmp_path, []) == 0
