"""An error that a user can mend is one line, whatever it quotes; the messages themselves are in golden files."""

import errno
import os
import pickle
import subprocess
import sys

import pytest
from torch._utils import ExceptionWrapper

from cait.data.reading import UnreadableImageError
from cait.errors import UserError, system_error

LINES = "one\n  two: 2"


def raised_by_a_loaders_process():
    """As a DataLoader raises what one of its workers has raised."""
    try:
        raise UserError(LINES) from KeyError("a cause")
    except UserError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(UserError) as raised:
        wrapped.reraise()
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        UserError(LINES),
        UserError("one\n\ntwo: 2"),
        UserError("one\vtwo: 2"),
        UnreadableImageError(LINES),
        pickle.loads(pickle.dumps(UserError(LINES))),
        raised_by_a_loaders_process(),
    ],
)
def test_every_user_error_is_one_line(error):
    assert str(error) == "one two: 2"


def test_spaces_of_a_files_name_stay():
    assert str(UserError("a  b")) == "a  b"


def test_a_taken_port_is_a_line():
    error = RuntimeError("The server socket has failed. port: 29787, name: EADDRINUSE")
    line = str(system_error(error))
    assert line.startswith("port: 29787: ")
    assert "MASTER_PORT" in line


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE"])
def test_what_a_disk_says_without_a_files_name_is_told(code):
    number = getattr(errno, code)
    error = OSError(number, os.strerror(number))
    wrapped = RuntimeError("unexpected pos 64 vs 0")
    wrapped.__context__ = error  # as torch.save has it
    line = f"cannot use the disk: {os.strerror(number)}"
    assert str(system_error(error)) == line
    assert str(system_error(wrapped)) == line


def test_any_letter_is_printed_where_the_system_knows_ascii_alone():
    code = r"from cait.errors import say; say('6\u00d796 \u2502 \U0001f4a1')"
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables = os.environ | ascii_alone | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    assert done.stdout.decode() == "6\u00d796 \u2502 \U0001f4a1\n", done.stderr.decode()
