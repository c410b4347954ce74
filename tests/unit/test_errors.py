"""What a disk says, and any letter on a screen; see also tests/cli/golden/errors.yaml."""

import errno
import os
import subprocess
import sys

import pytest

from cait.errors import system_error


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE"])
def test_what_a_disk_says_without_a_files_name_is_told(code):
    number = getattr(errno, code)
    error = OSError(number, os.strerror(number))
    wrapped = RuntimeError("unexpected pos 64 vs 0")
    wrapped.__context__ = error  # as torch.save has it
    lines = {str(system_error(error)), str(system_error(wrapped))}
    assert lines == {f"cannot use the disk: {os.strerror(number)}"}


def test_any_letter_is_printed_where_the_system_knows_ascii_alone():
    code = r"from cait.errors import say; say('6\u00d796 \u2502 \U0001f4a1')"
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables = os.environ | ascii_alone | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    assert done.stdout.decode() == "6\u00d796 \u2502 \U0001f4a1\n", done.stderr.decode()
