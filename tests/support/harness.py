"""Real pictures and the real command line for the tests."""

import contextlib
import csv
import fcntl
import functools
import inspect
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextvars import copy_context
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cait` has it, before torch is loaded
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time
# Runs are signed with a key of the tests' own; the user's home may be read-only, and is not theirs to write to.
if "PYTEST_XDIST_WORKER" not in os.environ:  # which has the home of the process that started it
    HOME = tempfile.TemporaryDirectory(prefix="cait-tests-")
    os.environ["XDG_CONFIG_HOME"] = HOME.name
# No recipe starts from published weights, or waits for the hub, unless a test has it do so.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("CAIT_MAKE", None)  # messages name make's commands to those who typed one
os.environ["HF_HUB_CACHE"] = os.path.join(os.environ["XDG_CONFIG_HOME"], "hub")

import pytest
import rich
import yaml
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
    "--model.fields.depth=1",
    "--model.fields.depth_token_only=1",
    "--data.batch_size=64",
    "--data.num_workers=1",
    "--trainer.log_every_n_steps=5",
]
# After `SMALL`, where a second block of each kind tells something.
TWO_BLOCKS = '--model.fields={"embed_dim":32,"depth":2,"num_heads":2,"patch_size":4}'


def slow(*values):
    """Parameters for `make test-all`, beside one for `make test`."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def beside(test):
    """What the YAML file beside a test holds."""
    return yaml.load(Path(test).with_suffix(".yaml").read_text(), yaml.CFullLoader)


def table(test, name):
    """Its rows of this name, as parameters. `case` names one, `slow` is for `make test-all`, and `needs` for a part."""
    return [
        pytest.param(row, id=row.get("case"), marks=[pytest.mark.slow] * row.get("slow", False))
        for row in beside(test)[name]
        if is_there(row.get("needs"))
    ]


def over_table(file, name, **usual):
    """Run a test for each of its rows: the test's arguments are what a row holds, or else `usual`."""
    rows = [(usual | row, marks, case) for (row,), marks, case in table(file, name)]
    keys = dict.fromkeys(key for row, _, _ in rows for key in row)

    def parametrized(test):
        optional = {"case", "needs", "slow"} - inspect.signature(test).parameters.keys()
        # pytest refuses any other key that the test does not take
        names = [key for key in keys if key not in optional]
        cases = []
        for row, marks, case in rows:
            values = [row[key] for key in names]
            cases.append(pytest.param(*values, id=case or str(values), marks=marks))
        return pytest.mark.parametrize(names, cases)(test)

    return parametrized


def is_there(part):
    """Whether a part that may be deleted is there: CaiT's own network (`cait`), an extra, or contrib/NAME.

    `cpu` is there on a machine without an accelerator, and so is what has no name.
    """
    if not part:
        return True
    if part == "cpu":
        import torch

        return not torch.accelerator.is_available()
    if part == "cait":
        return (REPO / "src/cait/model/cait.py").exists()
    return (REPO / part).is_dir() or (REPO / "src/cait/extras" / part).is_dir()


@pytest.fixture(autouse=True)
def nothing_of_the_test_before(monkeypatch):
    """What a call leaves behind: a console as wide as it was then, folders to import from, variables as MLflow sets.

    And the lines that it has told once, and which process Lightning takes this one for.
    """
    monkeypatch.setattr(rich, "_console", None)
    if "cait.errors" in sys.modules:
        sys.modules["cait.errors"].tell_once.cache_clear()
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with mock.patch.dict(os.environ):
        yield
    if "lightning_utilities" in sys.modules:
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = 0


def shared(tmp_path_factory, name, fill):
    """A folder that the first of the tests' processes fills, for tests that only read it; all processes share it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            fill(folder)
    return folder


@pytest.fixture(scope="session")
def digits_root(tmp_path_factory):
    # here, as all that takes long to import: xdist waits for this file
    from cait.data.source import (
        write_digits,
    )

    return shared(tmp_path_factory, "digits", write_digits)


@pytest.fixture(scope="session")
def photographs():
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


FORMATS = beside(__file__)


def save_mixed(photographs, folder, count, seed):
    """Photographs of many sizes as gray, CMYK, palette, RGBA, gray with alpha and progressive files."""
    import numpy as np

    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        size = rng.integers(40, 300, 2).tolist()
        mode, suffix, options = FORMATS[i % 6]
        picture = photographs[i % 2].resize(size).convert(mode)
        if mode == "RGBA":
            picture.putalpha(128)
        picture.save(folder / f"{i}.{suffix}", **options)


def save_classes(photographs, root, train, val):
    """Such files in train and val folders of three classes: so many of each class."""
    for label, name in enumerate(CLASSES):
        save_mixed(photographs, root / "train" / name, train, label)
        save_mixed(photographs, root / "val" / name, val, 10 + label)


@pytest.fixture
def mixed_root(tmp_path, photographs):
    """A folder of three classes with pictures of every mode: 36 to train on, 15 to validate on."""
    root = tmp_path / "mixed"
    save_classes(photographs, root, 12, 5)
    return root


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory, photographs):
    """Two classes of images of every mode and of many sizes, 12 to train on and 12 to validate on."""
    root = tmp_path_factory.mktemp("images")
    for seed, place in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        save_mixed(photographs, root / place, 6, seed)
    return root


def environment():
    return os.environ | {
        "PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{REPO / 'tests/support'}",
        "COLUMNS": "200",
    }


def heed_ctrl_c():
    """A shell that runs the tests in the background has them ignore Ctrl-C, and nohup a hangup: so would their jobs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def python(code, cwd=None):
    """Run code in a process of its own, where nothing is imported yet."""
    return script("-c", cwd, code)


def script(file, folder, *arguments):
    """Run a file in a process of its own."""
    return subprocess.run(
        [sys.executable, file, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def start(
    folder,
    *arguments,
    command=(),
    env=None,
    stderr=subprocess.STDOUT,
):
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
def caught(number):
    """What is written to standard output, 1, or standard error, 2, also by children: put into the list at the end."""
    name, texts = ("stdout", "stderr")[number - 1], []
    getattr(sys, name).flush()
    kept = os.dup(number)
    with (
        tempfile.TemporaryFile("w+", buffering=1, errors="surrogateescape") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        os.dup2(file.fileno(), number)
        patch.setattr(sys, name, file)
        try:
            yield texts
        finally:
            os.dup2(kept, number)
            os.close(kept)
            file.seek(0)
            texts.append(file.read())


def takes_several_processes(folder, arguments):
    """Whether the words, or the run that they name, ask for more than one device."""
    devices = [word for word in arguments if word.startswith("--trainer.devices=")]
    if devices:
        return devices[-1] != "--trainer.devices=1"
    config = folder / "logs" / arguments[:2][-1] / "config.yaml"
    return (
        config.is_file()
        and re.search(r"^  devices: '?[2-9]", config.read_text(errors="replace"), re.M) is not None
    )


def call(folder, *arguments, command=(), program="cait"):
    """Run `cait` in a folder as a user does, but in this process; on several devices in a process of its own."""
    if command or takes_several_processes(folder, arguments):
        job = start(folder, *arguments, command=command, stderr=subprocess.PIPE)
        out, err = job.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(job.args, job.returncode, out, err)
    from cait.cli import main

    status = 0
    with in_folder(folder) as patch, caught(1) as out, caught(2) as err:
        patch.setattr(sys, "argv", [program, *arguments])
        # Lightning prints through a handler of its own, unless it was imported by pytest, which has another.
        handler = logging.StreamHandler(sys.stderr)
        patch.setattr(logging.getLogger("lightning"), "handlers", [handler])
        for name in ("lightning.pytorch", "lightning.fabric"):
            patch.setattr(logging.getLogger(name), "handlers", [])
            patch.setattr(logging.getLogger(name), "propagate", True)
        try:
            copy_context().run(main, [*arguments])  # it sets the name of the program
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(arguments, status, out[0], err[0])


@contextlib.contextmanager
def in_folder(folder):
    """This process in another folder, from which it also imports, as a user's own; all is undone at the end."""
    modules = {*sys.modules}
    try:
        with mock.patch.dict(os.environ, environment()), pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "path", [str(folder), *sys.path])
            patch.setattr(rich, "_console", None)
            yield patch
    finally:
        for name in sys.modules.keys() - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{folder}/"):
                del sys.modules[name]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def rows(run):
    """The rows of a run's metrics.csv."""
    return parsed(run / "metrics.csv")


def parsed(path):
    """What a file of JSON, of YAML or of tensors holds, or the rows of one of CSV."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".yaml":
        return yaml.load(path.read_text(), yaml.CSafeLoader)
    import torch  # only here: xdist waits for what a test file reads when it is imported

    return torch.load(path, weights_only=True)


def checkpoint(run):
    return parsed(run / "checkpoints/last.ckpt")


def link_digits(folder, digits_root):
    """Put the digits at data/digits, where runs look for them."""
    (folder / "data").mkdir()
    (folder / "data/digits").symlink_to(digits_root)


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits_root):
    """A folder with the digits, for the runs that a file's tests share."""
    folder = tmp_path_factory.mktemp("place")
    link_digits(folder, digits_root)
    return folder


@pytest.fixture
def here(place, monkeypatch):
    """The same folder, with `cait` in it called from this process."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    return place


def works(done):
    """What `call` returned of words that must end well."""
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done


def ended(place, name, recipe):
    """Train a run to its end; returns its folder."""
    works(call(place, "fit", *recipe, f"--run_name={name}"))
    return place / "logs" / name


@pytest.fixture(scope="session")
def trained(tmp_path_factory, digits_root):
    """A run of six steps, trained and scored, for tests that only read it; its network has `TWO_BLOCKS`."""

    def train(folder):
        link_digits(folder, digits_root)
        words = "--trainer.max_epochs=1 --trainer.limit_train_batches=6 --ema.decay=0.9 --data.num_workers=0"
        ended(folder, "good", [*SMALL, TWO_BLOCKS, *words.split()])
        works(call(folder, "eval", "good"))

    return shared(tmp_path_factory, "trained", train) / "logs/good"


@pytest.fixture
def cait(tmp_path, digits_root):
    """`call` in a folder of the test's own that has the digits at data/digits."""
    link_digits(tmp_path, digits_root)
    return functools.partial(call, tmp_path)
