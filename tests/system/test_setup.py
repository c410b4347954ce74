"""`scripts/setup.sh`: what it refuses, and what an interrupted or failed set-up leaves behind."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from harness import REPO, beside

pytestmark = pytest.mark.slow


PARTS = beside(__file__)
WHEEL = "tiny-1.0-py3-none-any.whl"


@pytest.fixture
def place(tmp_path):
    """A folder with a wheel, with pins that ask for it under another hash, and with the tools of the script."""
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        for name, text in PARTS["wheel"].items():
            wheel.writestr(name, text)
    (tmp_path / "constraints.txt").write_text(f"{pin('tiny')}torch==2.9.0\n")
    (tmp_path / "bin").mkdir()
    for tool in PARTS["tools"].split():
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def pin(name, digest="0" * 64):
    return f"{name}==1.0 \\\n    --hash=sha256:{digest}\n"


def write_program(path, code):
    path.write_text(f"#!/bin/bash\n{code}\n")
    path.chmod(0o755)


@pytest.fixture
def uv(place):
    """A uv that reaches no index and notes how it was called."""
    write_program(place / "bin/uv", 'echo "$@" >>calls; echo "error: no route"; exit 1')


def setup(place, *options, **variables):
    """What it says as it fails."""
    command = ["bash", REPO / "scripts/setup.sh", ".venv", "constraints.txt", *options]
    env = dict(
        PATH=f"{place}/bin",
        PYTHON=sys.executable,
        HOME=str(place),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(place),
        PIP_CONFIG_FILE=os.devnull,
    )
    env |= variables
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
    digest = hashlib.sha256((place / WHEEL).read_bytes()).hexdigest()
    (place / "constraints.txt").write_text(pin("tiny", digest))
    # what compiles the bytecode imports the package
    assert "No module named" in setup(place, PACKAGE=str(place / WHEEL))


def test_pip_brings_uv_where_there_is_none_and_checks_its_hash(place):
    shutil.copy(place / WHEEL, place / "uv-1.0-py3-none-any.whl")
    (place / "constraints-dev.txt").write_text(f"tiny==1.0\n{pin('uv')}")
    assert "setup: Hash mismatch for uv==1.0" in setup(place)
    assert "tiny" not in (place / ".venv/uv.txt").read_text()


@pytest.mark.usefixtures("uv")
def test_another_build_of_torch_has_the_other_pins(place):
    assert "(all of it: .venv/setup.log)" in setup(place, "cpu")
    (call,) = (place / "calls").read_text().splitlines()
    assert "--require-hashes -r .venv/pins.txt" in call
    assert "torch" not in (place / ".venv/pins.txt").read_text()


def test_a_driver_that_is_too_old_is_told_before_anything_is_installed(place):
    write_program(place / "bin/nvidia-smi", "echo 550.54.15")
    assert "driver 550 is older than the 580 that CUDA 13 needs; TORCH=auto" in setup(place)
    assert not (place / ".venv").exists()
