"""Kills, signals, full disks, torn files, broken loaders: a run survives them, and goes on to the same bits."""

import contextlib
import functools
import itertools
import os
import re
import resource
import signal
import subprocess

import pytest
from harness import (
    LIMIT,
    SMALL,
    call,
    checkpoint,
    ended,
    environment,
    over_table,
    rows,
    start,
    works,
)
from processes import apart
from recorder import lines_of
from runs import RECIPE, TWO, assert_same

from cait import ckpt
from cait.errors import UserError
from cait.guards.run_lock import RunLock

RECIPE = [
    *RECIPE,
    "--trainer.limit_train_batches=10",
    "--trainer.limit_val_batches=2",
    "--data.batch_size=16",
]
DEVICES = {1: [], 2: TWO}


@pytest.fixture(scope="module")
def whole(place):
    """The run of RECIPE on so many processes that nothing happened to."""

    @functools.cache
    def train(processes):
        return ended(place, f"on{processes}", [*RECIPE, *DEVICES[processes]])

    return train


@over_table(__file__, "ends", variables={}, is_torn=False)
@pytest.mark.usefixtures("cait")
def test_a_resumed_run_ends_with_the_bits_of_one_left_alone(
    name, processes, variables, is_torn, tmp_path, whole
):
    run = tmp_path / "logs/cut"
    expected = whole(processes)
    signum = signal.Signals[name]
    words = [
        *RECIPE,
        *DEVICES[processes],
        "--run_name=cut",
        "--trainer.callbacks+=misfortunes.GroupIsSignalled",
        "--trainer.callbacks.step=14",
        f"--trainer.callbacks.signum={signum.value}",
    ]
    if signum != signal.SIGKILL:
        words.append("--save_every_n_steps=1000")  # what stands there was saved for the signal
    job = start(tmp_path, "fit", *words, env=environment() | variables)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode in (-signum, 128 + signum), output
    assert not re.search("Seed set to|GPU available|Loading `train_dataloader`", output)
    assert 12 <= checkpoint(run)["global_step"] < 30
    if signum != signal.SIGKILL:
        assert "Traceback" not in output
        assert rows(run) == rows(expected)[: len(rows(run))]
    if is_torn:
        last = run / "checkpoints/last.ckpt"
        last.write_bytes(last.read_bytes()[:-1000])
    resumed = works(call(tmp_path, "resume", "cut"))
    damaged = "last.ckpt is damaged; going on from logs/cut/checkpoints/previous.ckpt"
    assert (damaged in resumed.stdout) is is_torn
    assert_same(run, expected)


@pytest.fixture
def no_limit():
    """The limit on the size of files goes after the test."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def small_disk(tmp_path):
    """One of 8 MB, as logs/."""
    logs = tmp_path / "logs"
    logs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(logs)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    yield
    subprocess.run(["umount", "--lazy", str(logs)])


@pytest.mark.slow
@pytest.mark.usefixtures("no_limit")
@over_table(__file__, "misfortunes")
def test_the_command_of_the_last_line_continues_a_run(
    case, says, file, words, cait, tmp_path, whole, request
):
    run = tmp_path / "logs/cut"
    if case == "DiskIsFilled":
        request.getfixturevalue("small_disk")
    happens = [f"--trainer.callbacks+=misfortunes.{case}", "--trainer.callbacks.step=5"]
    failed = cait("fit", *RECIPE, *words.split(), "--run_name=cut", *happens)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "data/gone").rename(tmp_path / "data/digits")
    (tmp_path / "logs/ballast").unlink(missing_ok=True)
    assert failed.returncode == 2, failed.stderr
    assert "Traceback" not in failed.stderr
    line, _, command = failed.stderr.splitlines()[-1].rpartition("; to continue: cait ")
    assert says in line
    assert ckpt.is_whole(run / "checkpoints" / file)
    assert not list((run / "checkpoints").glob(".*"))
    assert file in works(call(tmp_path, *command.split())).stderr
    assert not (run / "unreadable_images.csv").exists()
    assert_same(run, whole(1))


@pytest.mark.slow
@pytest.mark.usefixtures("cait")
def test_begun_on_one_process_and_gone_on_with_two(tmp_path):
    words = [
        *SMALL,
        "--trainer.max_epochs=3",
        # Mixing and stochastic depth are drawn by each process for itself, so they are off.
        "--model.drop_path_rate=0",
        "--data.mixup=0",
        "--data.cutmix=0",
        "--data.repeats=2",
        # The rate is flat, so that it does not depend on the length of the run.
        "--model.warmup_epochs=0",
        "--model.min_lr=2e-3",
        "--trainer.callbacks+=recorder.Recorder",
    ]
    commands = [
        ["fit", *words, "--trainer.callbacks.folder=one", "--run_name=one"],
        [
            "fit",
            *words,
            "--trainer.callbacks.folder=begin",
            "--run_name=two",
            "--trainer.max_epochs=1",
        ],
        ["resume", "two", *TWO, "--trainer.max_epochs=3", "--trainer.callbacks.folder=two"],
    ]
    for command in commands:
        works(call(tmp_path, *command))
    one = lines_of(tmp_path / "one")
    first, second = (lines_of(tmp_path / "two", rank) for rank in range(2))
    assert len(first) == 40  # two epochs of 20
    means = {}
    for step, line in first.items():
        pairs = zip(line["seen"], second[step]["seen"], strict=True)
        assert list(itertools.chain(*pairs)) == one[step]["seen"], step
        means[step] = (line["loss"] + second[step]["loss"]) / 2
        assert means[step] == pytest.approx(one[step]["loss"], abs=1e-5)
    shown = [row for row in rows(tmp_path / "logs/two") if row["train/loss"]]
    logged = {int(row["step"]) + 1: float(row["train/loss"]) for row in shown}
    both = logged.keys() & means.keys()
    assert len(both) == 8
    for step in both:
        assert logged[step] == pytest.approx(means[step], rel=1e-5)
    # not the loss of one process, though now and then both have the same
    assert any(abs(logged[step] - first[step]["loss"]) > 1e-3 for step in both)


@pytest.fixture
def held(tmp_path):
    """A process that holds the folder `run`; its forked child, as a loader's worker, lives on and must not hold it."""
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        try:
            os.setsid()
            lock = RunLock(tmp_path / "run")  # noqa: F841
            if not os.fork():
                os.write(writer, b".")  # the child: it has let go of the lock by then
            signal.pause()
        finally:
            os._exit(1)
    os.read(reader, 1)
    yield holder
    os.killpg(holder, signal.SIGKILL)


def test_a_folder_is_held_until_its_process_ends_however_it_ends(held, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="another process"):
        RunLock(folder)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/.last.ckpt.7.tmp").write_text("half")
    os.kill(held, signal.SIGKILL)
    os.waitpid(held, 0)
    lock = RunLock(folder)
    assert not (folder / "checkpoints/.last.ckpt.7.tmp").exists()
    lock.roll_back()
    assert (folder / "checkpoints").exists()  # it was not all ours


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_start_in_another_process_that_trained_nothing_is_cleaned_up(has_begun, tmp_path):
    metrics = tmp_path / "run/metrics.csv"
    lock = RunLock(metrics.parent)

    def begin():
        metrics.touch()
        if has_begun:
            lock.on_train_start()

    apart(begin)
    lock.roll_back()
    assert metrics.exists() is has_begun
