"""What happens when a process fails, with this extra and in a copy of the tree without it: the table in docs/scale.md.

torchrun and a time limit for collectives are all that the copy has.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import LIMIT, REPO, environment, free_port, link_digits, start
from runs import ENDLESS, apart, torchrun, wait_for_steps

LIMITED = [
    *ENDLESS,
    "--trainer.strategy=lightning.pytorch.strategies.DDPStrategy",
    "--trainer.strategy.timeout=0:00:45",
    "--trainer.limit_val_batches=1",
    "--run_name=cut",
]
"""Collectives wait for 45 s."""
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("watched", [True, False], ids=["with", "without"])]


@pytest.fixture
def env(watched: bool, tmp_path: Path, digits_root: Path) -> dict[str, str]:
    """Variables for this tree, or for a copy of it without the extra."""
    link_digits(tmp_path, digits_root)
    found = environment()
    if watched:
        return found
    shutil.copytree(REPO / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "tests"))
    shutil.rmtree(tmp_path / "src/cait/extras" / Path(__file__).parents[1].name)
    return found | {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{found['PYTHONPATH']}"}


BY_TORCHRUN = r"Root Cause.*rank +: 1 .*Signal 9 \(SIGKILL\) received"
TIMED_OUT = "Timed out waiting 45000ms"
BROKEN = r"RuntimeError: .*gloo"


def errors(output: str) -> list[str]:
    return re.findall(r"^cait: error: (.*)", output, re.M)


def ended(job: subprocess.Popen[str], leaves_some: bool = False) -> str:
    """What a run has printed that failed. One that leaves a stopped process behind leaves its output open too."""
    end = time.monotonic() + LIMIT
    while True:
        try:
            output = job.communicate(timeout=5)[0]
            break
        except subprocess.TimeoutExpired:
            if leaves_some and job.poll() is not None:
                subprocess.run(["pkill", "-KILL", "-g", str(job.pid)])
            assert time.monotonic() < end
    assert job.returncode != 0, output
    return output


def worker(agent: subprocess.Popen[str]) -> int:
    """The last process that a torchrun has started."""
    return int(subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()[-1])


def alive(group: int) -> list[str]:
    """The processes of a group that have not ended, stopped ones among them."""
    listed = subprocess.run(["ps", "-e", "-o", "pgid=,stat=,args="], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(group) and line.split()[1][0] != "Z"]


@pytest.mark.parametrize(  # torchrun may end the others before the broken connection has made them raise too
    ("launcher", "rank", "how", "says", "says_without"),
    [
        ("torchrun", 1, "SIGKILL", BY_TORCHRUN, BY_TORCHRUN),
        ("torchrun", 0, "raise", "ValueError: no such luck", "ValueError: no such luck"),
        ("torchrun", 1, "raise", "ValueError: no such luck", "ValueError: no such luck"),
        ("torchrun", 0, "SIGSTOP", "cait: error: process 0 on .*: no answer for", TIMED_OUT),
        ("torchrun", 1, "SIGSTOP", "cait: error: process 1 on .*: no answer for", TIMED_OUT),
        ("lightning", 1, "SIGKILL", "cait: error: process 1 on .* was killed by SIGKILL", BROKEN),
        ("lightning", 0, "raise", "ValueError: no such luck", "ValueError: no such luck"),
        ("lightning", 1, "raise", "ValueError: no such luck", BROKEN),
        ("lightning", 0, "SIGSTOP", "cait: error: process 0 on .*: no answer for", None),
        ("lightning", 1, "SIGSTOP", "cait: error: process 1 on .*: no answer for", TIMED_OUT),
    ],
)
def test_a_process_that_fails_amid_an_epoch_ends_all(
    launcher: str,
    rank: int,
    how: str,
    says: str,
    says_without: str | None,
    watched: bool,
    tmp_path: Path,
    env: dict[str, str],
) -> None:
    if not watched and says_without is None:
        pytest.skip("it would never end")
    fails = "--trainer.callbacks"
    settings = [f"{fails}+=recorder.Fails", f"{fails}.rank={rank}", f"{fails}.how={how}"]
    settings += ["--silence_seconds=25"] if watched else []
    command = torchrun("--standalone") if launcher == "torchrun" else (sys.executable,)
    job = start(tmp_path, "fit", *LIMITED, *settings, command=command, env=env)
    try:
        output = ended(job, leaves_some=not watched)
        assert re.search(says if watched else str(says_without), output, re.S), output
        if watched:
            assert len(errors(output)) <= 1, output
            assert len(re.findall("ValueError: no such luck", output)) == (how == "raise"), output
            assert not re.search(BROKEN, output), output
            end = time.monotonic() + LIMIT
            while alive(job.pid) and time.monotonic() < end:  # loader processes notice within seconds
                time.sleep(0.5)
            assert alive(job.pid) == []
    finally:
        subprocess.run(["pkill", "-KILL", "-g", str(job.pid)])  # what is stopped, without the watch


def test_nobody_names_a_process_that_hangs_in_its_own_code(watched: bool, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "hanging.py").write_text(
        "import time\nfrom lightning.pytorch import Callback\n\n\nclass Hangs(Callback):\n"
        "    def on_train_batch_start(self, trainer, *_):\n"
        "        while trainer.global_rank == 1 and trainer.global_step == 5:\n            time.sleep(1)\n"
    )
    hangs = "--trainer.callbacks+=hanging.Hangs"
    output = ended(start(tmp_path, "fit", *LIMITED, hangs, command=torchrun("--standalone"), env=env))
    assert TIMED_OUT in output
    assert "process 1 on" not in output
    assert ("[rank0]: Traceback" in output) is not watched, output


def test_a_machine_with_other_images_is_refused_by_the_watch_alone(
    watched: bool, tmp_path: Path, digits_root: Path, env: dict[str, str]
) -> None:
    command = apart(tmp_path, digits_root)
    for name in ("node0", "node1"):
        (tmp_path / name / "logs").symlink_to(tmp_path)
    (data := tmp_path / "node1/data/digits").unlink()
    shutil.copytree(digits_root, data)
    next((data / "train/3").iterdir()).unlink()
    job = start(tmp_path, "fit", *LIMITED, "--trainer.max_steps=8", command=command, env=env)
    output = job.communicate(timeout=LIMIT)[0]
    assert (job.returncode == 0) is not watched, output  # without the watch it trains on other images
    assert [line for line in errors(output) if "sees 1,436 training images" in line][:1] == errors(output)[:1]
    assert bool(errors(output)) is watched


def test_a_machine_that_cannot_start_ends_the_others_by_the_watch_alone(
    watched: bool, tmp_path: Path, env: dict[str, str]
) -> None:
    common = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    nodes = [*LIMITED, "--trainer.devices=1", "--trainer.num_nodes=2"]
    jobs = [
        start(
            tmp_path,
            "fit",
            *nodes,
            *wrong,
            command=(sys.executable, "-m", "torch.distributed.run", *common, f"--node_rank={rank}"),
            env=env,
        )
        for rank, wrong in enumerate(([], ["--data.root=nowhere"]))
    ]
    try:
        outputs = [ended(job) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.kill(worker(job), signal.SIGKILL)
                job.kill()
    assert "the data folder nowhere does not exist" in outputs[1]
    assert ("the data folder nowhere does not exist" in outputs[0]) is watched, outputs[0]


def test_torchrun_starts_a_run_again_if_its_store_is_not_the_processes(
    watched: bool, tmp_path: Path, env: dict[str, str]
) -> None:
    """torchrun's own store still holds the addresses of those that were killed. With the watch it may."""
    variable = {} if watched else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    settings = [*LIMITED, "--save_every_n_steps=2", "--trainer.max_steps=90"]
    command = torchrun("--standalone", "--max-restarts=1")
    job = start(tmp_path, "fit", *settings, command=command, env=env | variable)
    wait_for_steps(tmp_path / "logs/cut", 10, job)
    os.kill(worker(job), signal.SIGKILL)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    assert "Restoring states from the checkpoint" in output
