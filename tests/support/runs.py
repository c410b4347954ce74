"""Whole runs of the command line: what they train, when they have got somewhere, whether two ended alike."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LIMIT, SMALL, Cait, call, checkpoint, environment, rows, start
from torture import same

# A step checkpoint every third step, in epochs of 22, with all that a checkpoint could forget.
RECIPE = [
    *SMALL,
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--save_every_n_steps=3",
    "--model.drop_path_rate=0.2",
    "--ema.decay=0.9",
]


TWO = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]


def assert_same(run: Path, whole: Path) -> None:
    got, expected = checkpoint(run), checkpoint(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert same(got[part], expected[part]), part
    assert same(got["callbacks"]["EMA"], expected["callbacks"]["EMA"])
    assert rows(run) == rows(whole)


def kill_and_resume(place: Path, recipe: list[str], whole: Path) -> str:
    """End a run before its step 5, resume it, and hold it against a whole one. Returns what the resumed run said."""
    once = ["--trainer.callbacks+=recorder.LeavesOnce", "--trainer.callbacks.step=5"]
    left = call(place, "fit", *recipe, "--run_name=killed", *once)
    assert left.returncode == 137, left.stderr
    resumed = call(place, "resume", "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(place / "logs/killed", whole)
    return resumed.stdout


def wait_for_steps(run: Path, steps: int, job: subprocess.Popen) -> None:
    """Until the run has logged that many steps."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            if len(rows(run)) >= steps:
                return
        except OSError:
            pass
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.02)
    raise AssertionError("the run does not get on")


@contextlib.contextmanager
def filled_disk(
    cait: Cait, place: Path, size: str, recipe: list[str], compare: Callable[[Path], None]
) -> Iterator[Path]:
    """Fill the disk, of `size`, under a run. Look at the run's folder; then it goes on, and `compare` sees its end."""
    logs = place / "logs"
    logs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(logs)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        job = start(place, "fit", *recipe, "--run_name=full")
        wait_for_steps(logs / "full", 10, job)
        ballast = logs / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        output = job.communicate(timeout=LIMIT)[0]
        assert job.returncode == 2, output
        assert "No space left on device" in output
        assert "Traceback" not in output
        yield logs / "full"
        ballast.unlink()
        resumed = cait("resume", "full")
        assert resumed.returncode == 0, resumed.stderr
        compare(logs / "full")
    finally:
        subprocess.run(["umount", str(logs)])


# Long enough never to end by itself.
ENDLESS = [*SMALL, *TWO, "--trainer.max_epochs=1000", "--trainer.log_every_n_steps=1", "--data.num_workers=0"]


def torchrun(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *options)


def apart(tmp_path: Path, digits_root: Path, *more: str) -> tuple[str, ...]:
    """A launcher whose process 1 works in another folder, as on a node with a disk of its own, and gets `more`."""
    for name in ("node0", "node1"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data/digits").symlink_to(digits_root)
    script = tmp_path / "apart.sh"
    own = f'[ $RANK = 1 ] && set -- "$@" {" ".join(more)}\n'
    script.write_text(f'{own}cd {tmp_path}/node$RANK && exec {sys.executable} "$@"\n')
    return (*torchrun("--standalone", "--no_python"), "bash", str(script))


def slurm_task(folder: Path, rank: int, *arguments: str) -> subprocess.Popen:
    """Start one of two tasks of a SLURM job on this machine."""
    job = dict(NTASKS="2", NTASKS_PER_NODE="2", NNODES="1", JOB_ID="7", JOB_NAME="train", NODEID="0")
    job |= dict(STEP_NUM_TASKS="2", NODELIST="127.0.0.1", PROCID=str(rank), LOCALID=str(rank))
    slurm = {f"SLURM_{name}": value for name, value in job.items()} | {"MASTER_PORT": "29714"}
    return start(folder, *arguments, env=environment() | slurm)
