"""Processes that torchrun or SLURM started: all end if one cannot start or is lost, and the run goes on from there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import LIMIT, Cait, checkpoint, ended, environment, free_port, link_digits, start
from runs import ENDLESS, RECIPE, TWO, apart, assert_same, slurm_task, torchrun, wait_for_steps


@pytest.mark.slow
def test_nodes_without_a_folder_in_common_all_end_at_once(tmp_path: Path, digits_root: Path) -> None:
    command = apart(tmp_path, digits_root)
    job = start(tmp_path, "fit", *ENDLESS, "--run_name=lost", command=command)
    output = job.communicate(timeout=LIMIT)[0]
    lines = [line for line in output.splitlines() if line.startswith("cait: error:")]
    assert lines, output
    assert len(set(lines)) == 1
    assert re.search(r"process 1 on \S+: logs/lost is not the folder of process \d+ on \S+ since", lines[0])
    assert "all nodes must share it" in lines[0]
    assert "cait/cli.py" not in output  # no traceback of ours; torchrun shows its own
    assert not (tmp_path / "node0/logs/lost").exists()  # its name stays free


@pytest.mark.slow
def test_a_node_that_does_not_see_the_run_ends_the_resume_of_all(tmp_path: Path, digits_root: Path) -> None:
    command = apart(tmp_path, digits_root)
    short = [*ENDLESS, "--trainer.devices=1", "--trainer.max_steps=2", "--data.batch_size=64", "--run_name=cut"]
    job = start(tmp_path / "node0", "fit", *short)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    again = start(tmp_path, "resume", "cut", *TWO, "--trainer.max_steps=4", command=command)
    output = again.communicate(timeout=LIMIT)[0]
    lines = [line for line in output.splitlines() if line.startswith("cait: error:")]
    assert lines, output
    assert re.fullmatch(
        r"cait: error: process 1 on \S+: there is no run logs/cut; .*; all nodes must share logs/", lines[0]
    )
    assert "cait/cli.py" not in output
    assert checkpoint(tmp_path / "node0/logs/cut")["global_step"] == 2


FAILS = """
import errno, os, sys
if os.environ.get("RANK") == "1":
    import builtins
    opened = builtins.open
    def fails(file, *arguments, **settings):
        if "last.ckpt" in str(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return opened(file, *arguments, **settings)
    builtins.open = fails
    import io
    io.open = fails
"""
REVERSED = """
import os
if os.environ.get("RANK") == "1":
    listed, walked = os.listdir, os.walk
    os.listdir = lambda *place: listed(*place)[::-1]
    os.walk = lambda *place, **how: ((at, folders[::-1], files[::-1]) for at, folders, files in walked(*place, **how))
"""
"""Files named sitecustomize.py, which Python runs first: what another machine's file system does."""


def lines_of(job: subprocess.Popen[str]) -> list[str]:
    output = job.communicate(timeout=LIMIT)[0]
    lines = [line for line in output.splitlines() if line.startswith("cait: error:")]
    assert lines, output
    assert job.returncode != 0
    assert "cait/cli" not in output  # no traceback of ours; torchrun shows its own
    return lines


def with_first(folder: Path, code: str) -> dict[str, str]:
    (folder / "first").mkdir()
    (folder / "first/sitecustomize.py").write_text(code)
    found = environment()
    return found | {"PYTHONPATH": f"{folder}/first{os.pathsep}{found['PYTHONPATH']}"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["training", "validation", "replaced"])
def test_a_node_with_other_images_ends_the_run_before_its_first_step(
    kind: str, tmp_path: Path, digits_root: Path
) -> None:
    command = apart(tmp_path, digits_root)
    (tmp_path / "node0/logs").mkdir()
    (tmp_path / "node1/logs").symlink_to(tmp_path / "node0/logs")
    (data := tmp_path / "node1/data/digits").unlink()
    shutil.copytree(digits_root, data)
    gone = sorted((data / ("val" if kind == "validation" else "train") / "3").iterdir())[5]
    gone.rename(gone.with_name("other.png")) if kind == "replaced" else gone.unlink()
    job = start(tmp_path, "fit", *ENDLESS, "--run_name=odd", command=command)
    (line,) = set(lines_of(job))
    where = f"{gone.parent.parent.name}/3/{gone.name} is not there on "
    if kind == "training":
        seen = r"process 1 on \S+ sees 1,436 training images in data/digits, process 0 on \S+ 1,437: "
    elif kind == "validation":
        seen = r"process 1 on \S+ sees 359 validation images in data/digits, process 0 on \S+ 360: "
    else:
        seen = r"process 1 on \S+ sees 1,437 training images in data/digits, process 0 on \S+ 1,437: "
    assert re.search(seen + re.escape(where), line), line
    assert not (tmp_path / "node0/logs/odd/metrics.csv").exists()


@pytest.mark.slow
def test_a_node_may_list_its_files_in_another_order(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    short = [*ENDLESS, "--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--run_name=same"]
    env = with_first(tmp_path, REVERSED)
    job = start(tmp_path, "fit", *short, command=torchrun("--standalone"), env=env)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["older", "gone", "torn", "unreadable"])
def test_a_node_that_sees_another_checkpoint_ends_the_resume_of_all(
    kind: str, tmp_path: Path, digits_root: Path
) -> None:
    command = apart(tmp_path, digits_root)
    short = [*ENDLESS, "--trainer.devices=1", "--data.batch_size=64", "--run_name=cut", "--save_every_n_steps=2"]
    job = start(tmp_path / "node0", "fit", *short, "--trainer.max_steps=5", "--trainer.limit_val_batches=1")
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    run, other = tmp_path / "node0/logs/cut", tmp_path / "node1/logs/cut"
    (other / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "config.yaml", other)
    (other / ".owner").symlink_to(run / ".owner")
    last = other / "checkpoints/last.ckpt"
    env = environment()
    if kind == "older":
        shutil.copy(run / "checkpoints/previous.ckpt", last)
        says = r"process 1 on \S+ starts from last.ckpt at step 4, process 0 on \S+ from .* at step 5; "
    elif kind == "gone":
        says = r"process 1 on \S+: the checkpoint logs/cut/checkpoints/last.ckpt does not exist"
    elif kind == "torn":
        last.write_bytes((run / "checkpoints/last.ckpt").read_bytes()[:-5000])
        says = r"process 1 on \S+: logs/cut/checkpoints/last.ckpt is not a whole checkpoint of a run"
    else:
        shutil.copy(run / "checkpoints/last.ckpt", last)
        env = with_first(tmp_path, FAILS)
        says = r"\S+ cannot read \S*logs/cut/checkpoints/last.ckpt: Input/output error"
    again = start(tmp_path, "resume", "cut", *TWO, "--trainer.max_steps=7", command=command, env=env)
    (line,) = set(lines_of(again))
    assert re.search(says, line), line


@pytest.mark.slow
def test_a_node_whose_disk_fails_ends_the_run_in_a_line_that_names_it(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    env = with_first(tmp_path, FAILS.replace("last.ckpt", "digits/train/3/"))
    job = start(tmp_path, "fit", *ENDLESS, "--run_name=cut", command=torchrun("--standalone"), env=env)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode != 0
    image = rf"cannot read the image data/digits/train/3/\d+.png: Input/output error on {socket.gethostname()}"
    assert re.search(rf"^{image}; the run goes on without it, and logs/cut/\S+ lists all such images$", output, re.M)
    (line,) = re.findall(r"^cait: error: .*", output, re.M)
    assert re.search(rf"18 images cannot be read, 17 are allowed \(data.max_bad_share\): {image}", line), line


@pytest.mark.slow
def test_the_first_process_alone_needs_the_key_that_signed_the_run(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, img_size, num_classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(3 * img_size ** 2, num_classes))\n"
    )
    settings = [*ENDLESS, "--model.name=own_net:Net", "--model.fields=null", "--trainer.limit_val_batches=1"]
    alone = ["--trainer.devices=1", "--data.batch_size=64", "--trainer.max_steps=2", "--run_name=own"]
    job = start(tmp_path, "fit", *settings, *alone, env=environment() | {"XDG_CONFIG_HOME": str(tmp_path / "home0")})
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    script = tmp_path / "homes.sh"
    script.write_text(f'XDG_CONFIG_HOME={tmp_path}/home$RANK exec {sys.executable} "$@"\n')
    command = (*torchrun("--standalone", "--no_python"), "bash", str(script))
    again = start(tmp_path, "resume", "own", *TWO, "--trainer.max_steps=4", command=command)
    output = again.communicate(timeout=LIMIT)[0]
    assert again.returncode == 0, output
    assert checkpoint(tmp_path / "logs/own")["global_step"] == 4


@pytest.mark.slow
def test_both_tasks_of_slurm_end_if_the_name_of_the_run_is_taken(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    (tmp_path / "logs/cut/checkpoints").mkdir(parents=True)
    (tmp_path / "logs/cut/checkpoints/last.ckpt").touch()
    tasks = [slurm_task(tmp_path, rank, "fit", *ENDLESS, "--run_name=cut") for rank in range(2)]
    outputs = [job.communicate(timeout=LIMIT)[0] for job in tasks]
    assert [job.returncode for job in tasks] == [2, 2], outputs
    assert all("cait: error: process 0 on" in output and "logs/cut holds a run" in output for output in outputs)


@pytest.mark.slow
def test_a_node_that_is_killed_ends_the_other_and_the_run_resumes_to_the_same_bits(cait: Cait, tmp_path: Path) -> None:
    nodes = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.strategy=ddp"]

    def agents(*arguments: str) -> list[subprocess.Popen[str]]:
        common = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
        return [
            start(
                tmp_path,
                *arguments,
                command=(sys.executable, "-m", "torch.distributed.run", *common, f"--node_rank={rank}"),
            )
            for rank in range(2)
        ]

    run = tmp_path / "logs/cut"
    jobs = agents("fit", *RECIPE, *nodes, "--run_name=whole")
    try:
        outputs = [job.communicate(timeout=LIMIT)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], outputs
        jobs = agents("fit", *RECIPE, *nodes, "--run_name=cut")
        wait_for_steps(run, 26, jobs[0])
        worker = int(
            subprocess.run(["pgrep", "-P", str(jobs[1].pid)], capture_output=True, text=True).stdout.split()[0]
        )
        for pid in (jobs[1].pid, worker):
            os.kill(pid, signal.SIGKILL)
        output = jobs[0].communicate(timeout=LIMIT)[0]
        assert jobs[0].returncode != 0, output
        assert len(re.findall(r"^cait: error: process 1 on \S+: no answer", output, re.M)) == 1, output
        jobs[1].wait()
        jobs = agents("resume", "cut")
        outputs = [job.communicate(timeout=LIMIT)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], outputs
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert_same(run, tmp_path / "logs/whole")


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_lost_a_process(cait: Cait, tmp_path: Path, place: Path) -> None:
    # Saved by the clock, and inside SLURM, which started torchrun as its one task.
    recipe = [*RECIPE, *TWO, "--save_every_n_steps=null", "--save_every_n_minutes=0.005"]
    slurm = dict(SLURM_NTASKS="1", SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_PROCID="0", SLURM_LOCALID="0")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1", "--standalone")
    job = start(tmp_path, "fit", *recipe, "--run_name=cut", command=torchrun, env=environment() | slurm)
    run = tmp_path / "logs/cut"
    wait_for_steps(run, 26, job)
    workers = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[1]), signal.SIGKILL)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    assert "nothing to do" not in output
    assert_same(run, ended(place, "two", [*RECIPE, *TWO]))
