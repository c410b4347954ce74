"""Checkpoints written by a thread: what was copied, in which order, and what a failure does."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from modules import loader, module, trainer

from cait.errors import UserError
from cait.extras.background.checkpoint_io import BackgroundCheckpointIO, _Copy
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint, is_whole, newest_whole


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit on the size of files fails as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@contextmanager
def held(io: BackgroundCheckpointIO) -> Iterator[None]:
    """Keep the thread from writing."""
    gate = threading.Event()
    io._writer.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def test_the_file_has_the_state_of_the_moment_of_the_save(tmp_path: Path) -> None:
    io, path, keep = BackgroundCheckpointIO(), tmp_path / "last.ckpt", {"previous": tmp_path / "previous.ckpt"}
    weights, history = torch.zeros(2, 3).t(), [0]
    state = OrderedDict(weights=weights, same=weights, nested={"half": torch.zeros(2, dtype=torch.bfloat16)}, h=history)
    for _ in range(2):  # the second time in the memory of the first
        with held(io):
            for step in (1, 2):
                weights.fill_(step)
                state["nested"]["half"].fill_(step)
                history.append(step)
                io.save_checkpoint(state, path, keep)
            weights.fill_(9)
            history.append(9)
            third = threading.Thread(target=io.save_checkpoint, args=(state, tmp_path / "third.ckpt"))
            third.start()
            third.join(0.2)
            assert third.is_alive()  # there is room for two copies
        third.join()
        io.finish()
        for step, file in ((1, keep["previous"]), (2, path), (9, tmp_path / "third.ckpt")):
            found = load(file)
            assert found["weights"].unique().item() == step
            assert found["weights"].stride() == weights.stride()
            assert found["same"].data_ptr() == found["weights"].data_ptr()
            assert found["h"][-1] == step
        assert load(path)["nested"]["half"].tolist() == [2, 2]
    io.teardown()
    io.save_checkpoint(state, path)  # a Trainer may fit again
    assert io.load_checkpoint(path)["h"][-1] == 9


def test_a_copy_that_no_cuda_event_follows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, waits = torch.Tensor.copy_, []

    def noting(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        waits.append(not non_blocking)
        return copy(into, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noting)
    assert _Copy().take({"weights": torch.ones(2)})[1] is None  # as on MPS: no event
    assert waits == [True]


class FillsTheDisk(Callback):
    """From the save of `step` on, files cannot grow; the disk is free again before the next save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        io = trainer.strategy.checkpoint_io
        if trainer.global_step == self.step:
            io.finish()
            with full_disk():
                trainer.save_checkpoint(trainer.default_root_dir + "/checkpoints/last.ckpt")
                io.finish()


@pytest.mark.parametrize(("step", "reached"), [(2, 3), (5, 6)])
def test_a_failure_ends_the_run_at_the_next_save(step: int, reached: int, tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path / "checkpoints", every_n_steps=1 if step == 2 else 5)
    fit = trainer(
        max_steps=6,
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        plugins=[BackgroundCheckpointIO()],
        callbacks=[FillsTheDisk(step), last],
    )
    with pytest.raises(UserError, match=r"cannot write .*last.ckpt: File too large; the checkpoint before is whole"):
        fit.fit(module(), loader(48))
    assert fit.global_step == reached
    assert is_whole(tmp_path / "checkpoints/last.ckpt")
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_run_that_ends_has_its_last_checkpoint(tmp_path: Path) -> None:
    ends = {}
    for name, plugins in (("thread", [BackgroundCheckpointIO()]), ("process", [DurableCheckpointIO()])):
        last = LastCheckpoint(tmp_path / name, every_n_steps=2)
        torch.manual_seed(0)
        fit = trainer(max_epochs=1, enable_checkpointing=True, plugins=plugins, callbacks=[last])
        fit.fit(module(), loader(12))
        ends[name] = load(tmp_path / name / "last.ckpt")
    assert ends["thread"]["global_step"] == ends["process"]["global_step"] == 3
    for name, value in ends["process"]["state_dict"].items():
        assert torch.equal(ends["thread"]["state_dict"][name], value), name


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(steps: int, start: Path | None) -> None:
        settings = dict(max_steps=steps, enable_checkpointing=True, plugins=[DurableCheckpointIO()])
        callbacks = [LastCheckpoint(tmp_path, every_n_steps=1)]
        trainer(callbacks=callbacks, **settings).fit(module(), loader(48), ckpt_path=start, weights_only=True)

    fit(3, None)
    (tmp_path / "last.ckpt").write_bytes(b"damaged")
    start = newest_whole(tmp_path)
    assert start == tmp_path / "previous.ckpt"
    before = load(start)["global_step"]

    class KilledError(Exception):
        """A kill when the new file is about to take its place."""

    def replace(source: str, target: Path) -> None:
        if Path(target).name == "last.ckpt":
            raise KilledError
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(KilledError):
        fit(5, start)
    whole = newest_whole(tmp_path)
    assert whole is not None
    assert load(whole)["global_step"] == before
