"""Whole runs of the command line: what they train, when they have got somewhere, whether two ended alike."""

import sys
import time

from harness import LIMIT, SMALL, call, checkpoint, rows, works
from same import same

# A step checkpoint every third step, in epochs of 22, with all that a checkpoint could forget.
RECIPE = [
    *SMALL,
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--save_every_n_steps=3",
    "--model.drop_path_rate=0.2",
    "--ema.decay=0.9",
]


SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "node1",
}
"""The variables of a job of one task."""

TWO = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]


def assert_same(run, whole):
    got, expected = checkpoint(run), checkpoint(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert same(got[part], expected[part]), part
    assert same(got["callbacks"].get("EMA"), expected["callbacks"].get("EMA"))
    assert rows(run) == rows(whole)


def kill_and_resume(place, recipe, whole):
    """End a run before its step 5, resume it, and hold it against a whole one."""
    once = ["--trainer.callbacks+=recorder.LeavesOnce", "--trainer.callbacks.step=5"]
    left = call(place, "fit", *recipe, "--run_name=killed", *once)
    assert left.returncode == 137, left.stderr
    works(call(place, "resume", "killed"))
    assert_same(place / "logs/killed", whole)


def wait_for_steps(run, steps, job):
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


# Long enough never to end by itself.
ENDLESS = [
    *SMALL,
    *TWO,
    "--trainer.max_epochs=1000",
    "--trainer.log_every_n_steps=1",
    "--data.num_workers=0",
]


def torchrun(*options):
    return (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *options)
