"""Kills, signals, full disks, torn files, broken pictures, gradients that are not finite: a run survives them."""

import contextlib
import functools
import itertools
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from harness import LIMIT, SMALL, Cait, checkpoint, ended, environment, rows, slow, start
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, Chosen, loader, module, precision_of, trainer
from runs import RECIPE, TWO, assert_same, wait_for_steps
from same import same
from torch.utils._pytree import tree_leaves

from cait import ckpt
from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard
from cait.run.checkpoints import DurableCheckpointIO, newest_whole


@pytest.fixture(scope="module")
def wholes(place: Path) -> Callable[[int], Path]:
    """The run of RECIPE on so many processes that nothing happened to."""
    return functools.cache(
        lambda processes: ended(place, f"on{processes}", [*RECIPE, *DEVICES_OF[processes]])
    )


DEVICES_OF = {1: [], 2: TWO}
SLURM = dict(
    NTASKS="1", JOB_ID="7", JOB_NAME="train", PROCID="0", LOCALID="0", NODEID="0", NODELIST="node1"
)
WAYS = {
    "kill": (signal.SIGKILL, {}),
    "kill, and the newest checkpoint is torn": (signal.SIGKILL, {}),
    "a scheduler's end": (signal.SIGTERM, {}),
    "Ctrl-C": (signal.SIGINT, {}),
    "SLURM's time limit": (
        signal.SIGUSR1,
        {f"SLURM_{name}": value for name, value in SLURM.items()},
    ),
    "a closed terminal": (signal.SIGHUP, {}),
}
"""How a run ends: the signal, which its whole group gets, and variables beside it."""
OFTEN = [("kill, and the newest checkpoint is torn", 1)]


@pytest.mark.parametrize(
    ("way", "processes"),
    [*OFTEN, *slow(*(cell for cell in itertools.product(WAYS, DEVICES_OF) if cell not in OFTEN))],
)
def test_a_resumed_run_ends_with_the_bits_of_one_left_alone(
    way: str, processes: int, cait: Cait, tmp_path: Path, wholes: Callable[[int], Path]
) -> None:
    (signum, variables), run, whole = WAYS[way], tmp_path / "logs/cut", wholes(processes)
    # What stands there after a signal to stop was saved for the signal.
    often = [] if signum == signal.SIGKILL else ["--save_every_n_steps=1000"]
    recipe = [*RECIPE, *DEVICES_OF[processes], *often, "--run_name=cut"]
    job = start(tmp_path, "fit", *recipe, env=environment() | (variables if processes == 1 else {}))
    wait_for_steps(run, 30, job)
    os.killpg(job.pid, signum)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode in (-signum, 128 + signum), output
    assert checkpoint(run)["global_step"] >= 24
    if signum != signal.SIGKILL:
        assert "Traceback" not in output
        assert rows(run) == rows(whole)[: len(rows(run))]
    if "torn" in way:
        last = run / "checkpoints/last.ckpt"
        last.write_bytes(last.read_bytes()[:-1000])
    resumed = cait("resume", "cut")
    assert resumed.returncode == 0, resumed.stderr
    damaged = "last.ckpt is damaged; going on from logs/cut/checkpoints/previous.ckpt"
    assert (damaged in resumed.stdout) is ("torn" in way)
    assert_same(run, whole)


ENDS = {
    "a loader process is killed": ("lower --data.num_workers", []),
    "the images are gone": ("images cannot be read", ["--data.num_workers=0"]),
    "the disk is full": ("cannot write", ["--save_every_n_steps=null"]),
}
"""What happens to a run, what it says, and its settings. In the last case it has written best.ckpt alone."""


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_the_command_of_the_last_line_continues_a_run(
    what: str, cait: Cait, tmp_path: Path, wholes: Callable[[int], Path]
) -> None:
    says, settings = ENDS[what]
    happens = [
        "--trainer.callbacks+=recorder.Misfortune",
        "--trainer.callbacks.step=5",
        f"--trainer.callbacks.what={what}",
    ]
    failed = cait("fit", *RECIPE, *settings, "--run_name=cut", *happens)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if (gone := tmp_path / "data/gone").exists():
        gone.rename(tmp_path / "data/digits")
    assert failed.returncode == 2, failed.stderr
    line = failed.stderr.splitlines()[-1]
    assert says in line
    assert "Traceback" not in failed.stderr
    resumed = cait(
        *line.rpartition("to continue: cait ")[2].split(), "--trainer.callbacks.what=nothing"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"{'best' if says == 'cannot write' else 'last'}.ckpt" in resumed.stderr
    assert not (tmp_path / "logs/cut/unreadable_images.csv").exists()
    assert_same(tmp_path / "logs/cut", wholes(1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One of 8 MB, as logs/."""
    (logs := tmp_path / "logs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(logs)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    yield logs
    subprocess.run(["umount", str(logs)])


@pytest.mark.slow
def test_a_full_disk_keeps_the_checkpoint_before(
    cait: Cait, small_disk: Path, wholes: Callable[[int], Path]
) -> None:
    run, ballast = small_disk / "full", small_disk / "ballast"
    job = start(small_disk.parent, "fit", *RECIPE, "--run_name=full")
    wait_for_steps(run, 10, job)
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 2, output
    assert "No space left on device" in output
    assert "Traceback" not in output
    assert ckpt.is_whole(run / "checkpoints/last.ckpt")
    assert not list((run / "checkpoints").glob(".*"))
    ballast.unlink()
    resumed = cait("resume", "full")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(run, wholes(1))


def test_a_checkpoint_that_took_anothers_place_is_checked_anew(tmp_path: Path) -> None:
    """A copy from elsewhere may have the size and the time of the file that it replaces, as rsync keeps them."""
    path, copy = tmp_path / "last.ckpt", tmp_path / "copy.ckpt"
    torch.save({"weights": torch.randn(10_000)}, path)
    assert ckpt.is_whole(path)
    content = bytearray(path.read_bytes())
    content[5000] ^= 0xFF
    copy.write_bytes(content)
    status = path.stat()
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)
    assert not ckpt.is_whole(path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the maps")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what is mapped")
def test_a_checkpoint_takes_no_memory_before_its_weights_are_used(tmp_path: Path) -> None:
    torch.save(saved := {"weights": torch.randn(10_000)}, path := tmp_path / "last.ckpt")
    content = ckpt.read(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert same(content, saved)


@pytest.mark.slow
def test_begun_on_one_process_and_gone_on_with_two(cait: Cait, tmp_path: Path) -> None:
    # Mixing and stochastic depth are drawn by each process for itself, so they are off.
    plain = [
        *SMALL,
        "--model.drop_path_rate=0",
        "--data.mixup=0",
        "--data.cutmix=0",
        "--data.repeats=2",
    ]
    # The rate is flat, so that it does not depend on the length of the run.
    plain += ["--trainer.max_epochs=3", "--model.warmup_epochs=0", "--model.min_lr=2e-3"]

    def recorder(name: str) -> list[str]:
        return ["--trainer.callbacks+=recorder.Recorder", f"--trainer.callbacks.folder={name}"]

    assert cait("fit", *plain, *recorder("seen-one"), "--run_name=one").returncode == 0
    assert (
        cait(
            "fit", *plain, "--trainer.max_epochs=1", "--run_name=two", *recorder("seen-begin")
        ).returncode
        == 0
    )
    further = [
        "resume",
        "two",
        *TWO,
        "--trainer.max_epochs=3",
        "--trainer.callbacks.folder=seen-two",
    ]
    done = cait(*further)
    assert done.returncode == 0, done.stderr

    def seen(name: str, rank: int) -> dict[int, dict]:
        lines = (tmp_path / name / f"{rank}.jsonl").read_text().splitlines()
        return {line["step"]: line for line in map(json.loads, lines)}

    one, ranks = seen("seen-one", 0), [seen("seen-two", 0), seen("seen-two", 1)]
    assert len(ranks[0]) == 40  # two epochs of 20
    for step, line in ranks[0].items():
        other = ranks[1][step]
        together = [
            picture for pair in zip(line["seen"], other["seen"], strict=True) for picture in pair
        ]
        assert together == one[step]["seen"], step
        assert (line["loss"] + other["loss"]) / 2 == pytest.approx(one[step]["loss"], abs=1e-5)

    logged = {
        int(row["step"]) + 1: row["train/loss"]
        for row in rows(tmp_path / "logs/two")
        if row["train/loss"]
    }
    assert len(logged.keys() & ranks[0].keys()) == 8
    for step in logged.keys() & ranks[0].keys():  # not the loss of one process, but of both
        mean = (ranks[0][step]["loss"] + ranks[1][step]["loss"]) / 2
        assert float(logged[step]) == pytest.approx(mean, rel=1e-5)
        assert mean != pytest.approx(ranks[0][step]["loss"], rel=1e-4)


def poisoned(batches: Iterable[int]):
    data = loader(24)
    images = data.dataset.tensors[0]
    for batch in batches:
        images[4 * batch] = float("nan")
    return data


def test_a_step_without_a_finite_gradient_is_left_out(tmp_path: Path) -> None:
    guard = NonFiniteGuard(tmp_path, limit=3)
    net = module(lr=1e-2, warmup_lr=1e-2, min_lr=1e-2, warmup_epochs=0, drop_path_rate=0.0)
    torch.manual_seed(1)
    start = {key: value.clone() for key, value in net.state_dict().items()}
    data = poisoned((1, 2, 4))
    trainer(max_epochs=1, callbacks=[guard]).fit(net, data)

    # The same by hand: torch's AdamW, never called for those batches.
    other = module(drop_path_rate=0.0)
    other.load_state_dict(start)
    from cait.train.optim import param_groups

    optimizer = torch.optim.AdamW(param_groups(other.model, 0.05), lr=1e-2, fused=True)
    for number, (images, labels) in enumerate(data):
        if number not in (1, 2, 4):
            optimizer.zero_grad()
            other.loss(other.model(images), labels).backward()
            optimizer.step()
    for key, value in other.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value, rtol=0, atol=1e-6)
        assert value.isfinite().all()
    assert int(guard.in_a_row) == 0


@pytest.mark.parametrize(
    ("optimizer", "clip"), [("fused AdamW", None), ("Lamb", 0.5), *slow(("SGD", 0.5))]
)
@pytest.mark.parametrize("precision", ["32", "bf16-mixed", *slow("bf16-true", "16-mixed")])
def test_weights_moments_and_step_count_stay_in_every_precision(
    precision: str, optimizer: str, clip: float | None, tmp_path: Path
) -> None:
    def state(net: Chosen) -> list:
        optimizer = net.optimizers().optimizer.state_dict()
        steps = [group.get("step") for group in optimizer["param_groups"]]  # where Lamb counts
        return tree_leaves(deepcopy([net.state_dict(), optimizer["state"], steps]))

    seen: list = []
    watch = LambdaCallback(on_train_batch_end=lambda trainer, net, *_: seen.append(state(net)))
    settings: dict = dict(max_epochs=1, gradient_clip_val=clip, **precision_of(precision))
    net = Chosen(
        optimizer,
        img_size=8,
        num_classes=7,
        fields=FIELDS,
        lr_base_size=None,
        lr=1e-2,
        warmup_epochs=0,
    )
    trainer(callbacks=[NonFiniteGuard(tmp_path, 10), watch], **settings).fit(
        net, poisoned((1, 2, 4))
    )
    for step, (before, after) in enumerate(itertools.pairwise(seen), start=1):
        same = [
            a.equal(b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(before, after, strict=True)
        ]
        assert all(same) is (step in (1, 2, 4)), step
    assert all(leaf.isfinite().all() for leaf in seen[-1] if isinstance(leaf, torch.Tensor))


def test_too_many_of_them_end_the_run_with_the_batch(tmp_path: Path) -> None:
    data = poisoned((1, 2, 3))
    with pytest.raises(UserError, match="3 steps in a row gave no finite gradient"):
        trainer(max_epochs=1, callbacks=[NonFiniteGuard(tmp_path, limit=3)]).fit(
            module(lr=1e-2), data
        )
    kept = torch.load(tmp_path / "nonfinite.pt", weights_only=True)
    assert torch.equal(kept["images"].nan_to_num(7), data.dataset.tensors[0][12:16].nan_to_num(7))
    assert kept["step"] == 4


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    io, path = DurableCheckpointIO(), tmp_path / "last.ckpt"
    keep = {"previous": tmp_path / "previous.ckpt"}
    for step in (1, 2):
        io.save_checkpoint({"step": step, "weights": torch.full((1000,), step)}, path, keep)
    assert newest_whole(tmp_path) == path
    assert torch.load(tmp_path / "previous.ckpt", weights_only=True)["step"] == 1

    # A limit on the size of files fails as a full disk does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        io.save_checkpoint({"step": 3, "weights": torch.zeros(100_000)}, path, keep)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert io.error == f"cannot write {path}: File too large"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "previous.ckpt"]
    assert torch.load(path, weights_only=True)["step"] == 2

    # as a callback's may
    for state, told in (
        (Path("x"), "a state holds pathlib.PosixPath"),
        (lambda: 0, "pickle"),
    ):
        io.save_checkpoint({"step": 3, "callbacks": {"mine": state}}, path, keep)
        assert told in io.error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "previous.ckpt"]

    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1  # one bit of one weight
    path.write_bytes(flipped)
    assert newest_whole(tmp_path) == tmp_path / "previous.ckpt"
    (tmp_path / "previous.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        newest_whole(tmp_path)
    io.save_checkpoint({"step": 1}, tmp_path / "best.ckpt")
    assert newest_whole(tmp_path) == tmp_path / "best.ckpt"


def test_one_bit_is_told() -> None:
    a = {"weights": torch.tensor([1.0, float("nan")]), "rows": [1, float("nan"), "x"]}
    b = {"weights": a["weights"].clone(), "rows": [1, float("nan"), "x"]}
    assert same(a, b)
    b["weights"].view(torch.int32)[0] ^= 1
    assert not same(a, b)
    assert not same(a["rows"], [1, float("nan"), "y"])
