"""Checkpoints that survive a kill, a full disk and a torn file; and which one is the best."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from modules import loader, module, trainer

from cait.run.checkpoints import BestCheckpoint, DurableCheckpointIO, LastCheckpoint, newest_whole


def step_of(path):
    return torch.load(path, weights_only=True)["step"]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # of one weight
    path.write_bytes(content)


# Writing


class Folder:
    """A run's checkpoints: the one of step 2, and the one before."""

    def __init__(self, folder):
        self.folder = folder
        self.last, self.previous = folder / "last.ckpt", folder / "previous.ckpt"
        self.io = DurableCheckpointIO()
        self.save(1)
        self.save(2)

    def save(self, step, **state):
        content = {"step": step, "weights": torch.full((1000,), step), **state}
        self.io.save_checkpoint(content, self.last, {"previous": self.previous})

    def assert_unchanged(self):
        assert sorted(self.folder.iterdir()) == [self.last, self.previous]
        assert (step_of(self.last), step_of(self.previous)) == (2, 1)


@pytest.fixture
def run(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def full_disk():
    """A limit of a megabyte on the size of files fails as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_the_checkpoint_before_is_kept(run):
    run.assert_unchanged()
    assert newest_whole(run.folder) == run.last


@pytest.mark.usefixtures("full_disk")
def test_what_the_disk_has_no_room_for_leaves_the_ones_before(run):
    run.save(3, more=torch.zeros(1 << 20))
    assert run.io.error == f"cannot write {run.last}: File too large"
    run.assert_unchanged()


@pytest.mark.parametrize(
    ("state", "words"),
    [(Path("x"), "a state holds pathlib.PosixPath"), (lambda: 0, "pickle")],
    ids=["a path", "a function"],
)
def test_what_no_run_reads_back_is_not_written(state, words, run):
    run.save(3, callbacks={"mine": state})
    assert words in run.io.error
    run.assert_unchanged()


def test_a_damaged_checkpoint_is_passed_over(run):
    flip_a_bit(run.last)
    assert newest_whole(run.folder) == run.previous
    run.previous.write_bytes(b"")
    run.io.save_checkpoint({"step": 1}, run.folder / "best.ckpt")
    assert newest_whole(run.folder) == run.folder / "best.ckpt"


@pytest.mark.parametrize(("start", "stays"), [("other", True), (None, True), ("previous", False)])
def test_a_damaged_checkpoint_goes_if_the_run_goes_on_from_the_one_before(start, stays, run):
    run.last.write_bytes(b"torn")
    path = start and run.folder / f"{start}.ckpt"
    LastCheckpoint(run.folder)._remove_damaged(path)
    assert run.last.exists() is stays


def train(folder, steps, start=None, **settings):
    last = LastCheckpoint(folder, **settings)
    fit = trainer(max_steps=steps, callbacks=[last], plugins=[DurableCheckpointIO()])
    fit.fit(module(), loader(), ckpt_path=start)


def test_a_kill_in_the_first_save_after_a_damaged_checkpoint_leaves_a_whole_one(
    tmp_path, monkeypatch
):
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    train(tmp_path, 1)
    last.rename(previous)
    last.write_bytes(b"torn")
    replace = os.replace

    def killed(source, target):
        if target == last:  # what was there is `previous` by now
            raise SystemExit
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(SystemExit):
        train(tmp_path, 2, previous, every_n_steps=1)
    assert newest_whole(tmp_path) == previous


@pytest.mark.parametrize(("minutes", "saves"), [(1e-9, 6), (None, 1), (100.0, 1)])
def test_saving_by_the_clock(minutes, saves, tmp_path, monkeypatch):
    steps = []
    save = LastCheckpoint.save

    def note(callback, fit):
        steps.append(fit.global_step)
        save(callback, fit)

    monkeypatch.setattr(LastCheckpoint, "save", note)
    train(tmp_path, 6, every_n_minutes=minutes)
    assert len(steps) == saves
    assert steps[-1] == 6


# The best


@pytest.fixture
def best(tmp_path):
    """After a validation."""
    callback = BestCheckpoint(tmp_path, "val/acc1")
    fit = trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    fit.fit(module(), loader(8), loader(8))
    assert callback.best_model_score is not None
    return callback


def leave(path):
    pass


@pytest.mark.parametrize(
    ("spoil", "is_kept"), [(leave, True), (Path.unlink, False), (flip_a_bit, False)]
)
def test_a_best_checkpoint_is_kept_as_long_as_its_file_is_whole(spoil, is_kept, best, caplog):
    spoil(Path(best.best_model_path))
    again = BestCheckpoint(Path(best.dirpath), "val/acc1")
    again.load_state_dict(best.state_dict())
    assert again.best_model_score == (best.best_model_score if is_kept else None)
    assert again.best_k_models == (best.best_k_models if is_kept else {})
    assert ("best.ckpt is damaged" in caplog.text) is (spoil is flip_a_bit)


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ("nan 1 2", "max", 2.0),
        ("2 nan 1", "min", 1.0),
        ("1 inf 2", "max", 2.0),
        ("-inf 2 3", "min", 2.0),
        ("nan inf nan", "max", None),
    ],
)
def test_what_is_not_finite_is_never_the_best(values, mode, best, tmp_path):
    def log(fit, net):
        net.log("val/x", float(values.split()[fit.current_epoch]))

    checkpoint = BestCheckpoint(tmp_path, "val/x", mode)
    fit = trainer(
        max_epochs=3,
        num_sanity_val_steps=0,
        limit_train_batches=1,
        callbacks=[LambdaCallback(on_validation_epoch_end=log), checkpoint],
        enable_checkpointing=True,
    )
    fit.fit(module(), loader(), loader(4))
    assert checkpoint.best_model_score == best
    assert (tmp_path / "best.ckpt").exists() is (best is not None)


def test_a_callback_knows_its_checkpoints_in_a_folder_that_was_moved(tmp_path):
    def run(folder, epochs, start=None):
        kept = ModelCheckpoint(folder, monitor="val/loss", save_top_k=2)
        best = BestCheckpoint(folder)
        fit = trainer(
            max_epochs=epochs,
            callbacks=[LastCheckpoint(folder), best, kept],
            plugins=[DurableCheckpointIO()],
            enable_checkpointing=True,
        )
        fit.fit(module(warmup_epochs=0), loader(8), loader(8), ckpt_path=start)
        return [best, kept]

    moved = tmp_path / "moved"
    run(tmp_path / "run", 3)
    (tmp_path / "run").rename(moved)
    for callback in run(moved, 5, moved / "last.ckpt"):
        assert {Path(path).parent for path in callback.best_k_models} == {moved}
    assert len([*moved.glob("epoch=*")]) == 2  # the others are deleted
    assert not (tmp_path / "run").exists()
    # a new run, elsewhere, from that checkpoint has none of its files
    _, kept = run(tmp_path / "other", 6, moved / "last.ckpt")
    assert {Path(path).parent for path in kept.best_k_models} == {tmp_path / "other"}
