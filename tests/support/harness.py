"""Real pictures and the real command line for the tests."""

import contextlib
import csv
import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cait` has it, before torch is loaded
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time
# Runs are signed with a key of the tests' own; the user's home may be read-only, and is not theirs to write to.
os.environ["XDG_CONFIG_HOME"] = (HOME := tempfile.TemporaryDirectory(prefix="cait-tests-")).name
# No recipe starts from published weights, or waits for the hub, unless a test has it do so.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("CAIT_MAKE", None)  # messages name make's commands to those who typed one
os.environ["HF_HUB_CACHE"] = os.path.join(HOME.name, "hub")

import pytest
import rich
from PIL import Image

REPO = Path(__file__).parents[2]
LIMIT = 1200
"""Seconds after which a process hangs, however slow the machine."""

DEVICES = [
    "--trainer.accelerator=cpu",
    f"--trainer.devices={os.environ.get('CAIT_TEST_DEVICES', '1')}",
]
"""Where runs train unless a test says otherwise, the same on every machine; `make test-two` takes two processes."""

NO_TEXT = b"\xff" if sys.platform != "darwin" else b"y"
"""A file's name that is no text; macOS refuses such names."""

CLASSES = ["cat", "dog", "owl"]

# A network and a recipe of seconds, for what is about the run and not about the accuracy.
SMALL = [
    "--config",
    str(REPO / "configs/digits.yaml"),
    *DEVICES,
    "--model.fields.embed_dim=32",
    "--model.fields.depth=2",
    "--data.batch_size=64",
    "--data.num_workers=1",
    "--trainer.log_every_n_steps=5",
]


def slow(*values: Any) -> list[Any]:
    """Parameters for `make test-all`, beside one for `make test`."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]


@pytest.fixture(autouse=True)
def nothing_of_the_test_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a call leaves behind: a console as wide as it was then, folders to import from, variables as MLflow sets.

    And the lines that it has told once, and which process Lightning takes this one for.
    """
    monkeypatch.setattr(rich, "_console", None)
    if "cait.errors" in sys.modules:
        sys.modules["cait.errors"].tell_once.cache_clear()
    monkeypatch.setattr(sys, "path", sys.path.copy())
    variables = os.environ.copy()
    yield
    if "lightning_utilities" in sys.modules:
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = 0
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture(scope="session")
def digits_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # here, as all that takes long to import: xdist waits for this file
    from cait.data.source import (
        write_digits,
    )

    root = tmp_path_factory.mktemp("data") / "digits"
    root.mkdir()  # an empty folder is filled
    write_digits(root)
    return root


@pytest.fixture(scope="session")
def photographs() -> list[Image.Image]:
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def save_mixed(photographs: list[Image.Image], folder: Path, count: int, seed: int) -> None:
    """Photographs of many sizes as gray, CMYK, palette, RGBA, gray with alpha and progressive files."""
    import numpy as np

    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        picture = photographs[i % 2].resize(
            (int(rng.integers(40, 300)), int(rng.integers(40, 300)))
        )
        kind = i % 6
        if kind == 0:
            picture.convert("L").save(folder / f"{i}.jpg")
        elif kind == 1:
            picture.convert("CMYK").save(folder / f"{i}.jpeg")
        elif kind == 2:
            picture.convert("P").save(folder / f"{i}.png", transparency=b"\x00\x10\x20")
        elif kind == 3:
            picture.putalpha(128)
            picture.save(folder / f"{i}.png")
        elif kind == 4:
            picture.convert("LA").save(folder / f"{i}.png")
        else:
            picture.save(folder / f"{i}.JPEG", progressive=True)


def save_classes(photographs: list[Image.Image], root: Path, train: int, val: int) -> None:
    """Such files in train and val folders of three classes: so many of each class."""
    for label, name in enumerate(CLASSES):
        save_mixed(photographs, root / "train" / name, train, label)
        save_mixed(photographs, root / "val" / name, val, 10 + label)


@pytest.fixture
def mixed_root(tmp_path: Path, photographs: list[Image.Image]) -> Path:
    """A folder of three classes with pictures of every mode: 36 to train on, 15 to validate on."""
    root = tmp_path / "mixed"
    save_classes(photographs, root, 12, 5)
    return root


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory: pytest.TempPathFactory, photographs: list[Image.Image]) -> Path:
    """Two classes of images of every mode and of many sizes, 12 to train on and 12 to validate on."""
    root = tmp_path_factory.mktemp("images")
    for seed, place in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        save_mixed(photographs, root / place, 6, seed)
    return root


Cait = Callable[..., subprocess.CompletedProcess[str]]


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{REPO / 'tests/support'}",
        "COLUMNS": "200",
    }


def heed_ctrl_c() -> None:
    """A shell that runs the tests in the background has them ignore Ctrl-C, and nohup a hangup: so would their jobs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def python(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, where nothing is imported yet."""
    return script("-c", cwd, code)


def script(file: str, folder: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a file in a process of its own."""
    command = [sys.executable, file, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT
    )


def start(
    folder: Path,
    *arguments: str,
    command: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    stderr: int = subprocess.STDOUT,
) -> subprocess.Popen[str]:
    """Start `cait` in a process group of its own, behind `command`, such as torchrun's, if there is one."""
    return subprocess.Popen(
        [*(command or (sys.executable,)), "-m", "cait", *arguments],
        cwd=folder,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=heed_ctrl_c,
        start_new_session=True,
    )


@contextlib.contextmanager
def caught(number: int) -> Iterator[list[str]]:
    """What is written to standard output, 1, or standard error, 2, also by children: put into the list at the end."""
    name, texts = ("stdout", "stderr")[number - 1], []
    getattr(sys, name).flush()
    kept = os.dup(number)
    with (
        tempfile.TemporaryFile("w+", errors="surrogateescape") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        os.dup2(file.fileno(), number)
        stream = open(number, "w", buffering=1, closefd=False, errors="surrogateescape")  # noqa: SIM115
        patch.setattr(sys, name, stream)
        try:
            yield texts
        finally:
            stream.flush()
            os.dup2(kept, number)
            os.close(kept)
            file.seek(0)
            texts.append(file.read())


def takes_several_processes(folder: Path, arguments: Sequence[str]) -> bool:
    """Whether the words, or the run that they name, ask for more than one device."""
    devices = [word for word in arguments if word.startswith("--trainer.devices=")]
    if devices:
        return devices[-1] != "--trainer.devices=1"
    config = folder / "logs" / arguments[min(1, len(arguments) - 1)] / "config.yaml"
    return (
        config.is_file() and re.search(r"^  devices: '?[2-9]", config.read_text(), re.M) is not None
    )


def call(
    folder: Path, *arguments: str, command: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `cait` in a folder as a user does, but in this process; on several devices in a process of its own."""
    if command or takes_several_processes(folder, arguments):
        job = start(folder, *arguments, command=command, stderr=subprocess.PIPE)
        out, err = job.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(job.args, job.returncode, out, err)
    from cait.cli import main

    variables, modules, status = os.environ.copy(), {*sys.modules}, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["cait", *arguments])
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(rich, "_console", None)
        os.environ.update(environment())
        with caught(1) as out, caught(2) as err:
            # Lightning prints through a handler of its own, unless it was imported by pytest, which has another.
            handler = logging.StreamHandler(sys.stderr)
            patch.setattr(logging.getLogger("lightning"), "handlers", [handler])
            for name in ("lightning.pytorch", "lightning.fabric"):
                patch.setattr(logging.getLogger(name), "handlers", [])
                patch.setattr(logging.getLogger(name), "propagate", True)
            try:
                main([*arguments])
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
    os.environ.clear()
    os.environ.update(variables)
    for name in sys.modules.keys() - modules:  # files of the folder's own
        if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{folder}/"):
            del sys.modules[name]
    return subprocess.CompletedProcess(arguments, status, out[0], err[0])


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def rows(run: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv."""
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def checkpoint(run: Path) -> dict:
    import torch

    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def link_digits(folder: Path, digits_root: Path) -> None:
    """Put the digits at data/digits, where runs look for them."""
    (folder / "data").mkdir()
    (folder / "data/digits").symlink_to(digits_root)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A folder with the digits, for the runs that a file's tests share."""
    folder = tmp_path_factory.mktemp("place")
    link_digits(folder, digits_root)
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, with `cait` in it called from this process."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    return place


def ended(place: Path, name: str, recipe: list[str]) -> Path:
    """Train a run to its end; returns its folder."""
    done = call(place, "fit", *recipe, f"--run_name={name}")
    assert done.returncode == 0, done.stderr
    return place / "logs" / name


@pytest.fixture
def cait(tmp_path: Path, digits_root: Path) -> Cait:
    """`call` in a folder of the test's own that has the digits at data/digits."""
    link_digits(tmp_path, digits_root)
    return functools.partial(call, tmp_path)
