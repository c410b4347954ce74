"""`scripts/setup.sh`: what it refuses, and what an interrupted or failed set-up leaves behind."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from harness import REPO

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path):
    """A folder with a wheel, and with pins that ask for it under another hash."""
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    (tmp_path / "constraints.txt").write_text(
        f"tiny==1.0 \\\n    --hash=sha256:{64 * '0'}\ntorch==2.9.0\n"
    )
    (tmp_path / "bin").mkdir()
    for tool in (
        "bash",
        "awk",
        "grep",
        "tee",
        "cat",
        "tail",
        "tr",
        "sed",
        "env",
        "dirname",
        "head",
        "cut",
    ):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


@pytest.fixture
def uv(place):
    """A uv that reaches no index and notes how it was called."""
    uv = place / "bin/uv"
    uv.write_text('#!/bin/bash\necho "$@" >>calls\necho "error: no route"\nexit 1\n')
    uv.chmod(0o755)
    return uv


def setup(place, *options, **variables):
    """What it says as it fails."""
    command = ["bash", REPO / "scripts/setup.sh", ".venv", "constraints.txt", *options]
    pip = dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(place), PIP_CONFIG_FILE=os.devnull)
    env = {
        "PATH": str(place / "bin"),
        "PYTHON": sys.executable,
        "HOME": str(place),
        **pip,
        **variables,
    }
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done
    return done.stderr


@pytest.mark.usefixtures("uv")
def test_pip_installs_where_uv_cannot_and_refuses_a_wrong_hash_in_a_half_made_environment(place):
    (place / ".venv/bin").mkdir(parents=True)
    (place / ".venv/bin/python").symlink_to(sys.executable)  # where venv was cut short, before pip
    assert "setup: Hash mismatch for tiny==1.0" in setup(place)
    assert (place / ".venv/bin/pip").exists()


@pytest.mark.usefixtures("uv")
def test_a_wheel_is_installed_in_place_of_the_repository(place):
    wheel = place / "tiny-1.0-py3-none-any.whl"
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (place / "constraints.txt").write_text(f"tiny==1.0 \\\n    --hash=sha256:{found}\n")
    # what compiles the bytecode imports the package
    assert "No module named" in setup(place, PACKAGE=str(wheel))


def test_pip_brings_uv_where_there_is_none_and_checks_its_hash(place):
    shutil.copy(place / "tiny-1.0-py3-none-any.whl", place / "uv-1.0-py3-none-any.whl")
    (place / "constraints-dev.txt").write_text(
        f"tiny==1.0\nuv==1.0 \\\n    --hash=sha256:{64 * '0'}\n"
    )
    assert "setup: Hash mismatch for uv==1.0" in setup(place)
    assert "tiny" not in (place / ".venv/uv.txt").read_text()


def test_another_build_of_torch_has_the_other_pins(place, uv):
    assert "(all of it: .venv/setup.log)" in setup(place, "cpu")
    (call,) = (place / "calls").read_text().splitlines()
    assert "--require-hashes -r .venv/pins.txt" in call
    assert "torch" not in (place / ".venv/pins.txt").read_text()


def test_a_driver_that_is_too_old_is_told_before_anything_is_installed(place):
    (place / "bin/nvidia-smi").write_text("#!/bin/bash\necho 550.54.15\n")
    (place / "bin/nvidia-smi").chmod(0o755)
    assert "driver 550 is older than the 580 that CUDA 13 needs; TORCH=auto" in setup(place)
    assert not (place / ".venv").exists()
