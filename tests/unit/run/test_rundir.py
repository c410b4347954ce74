"""A run's folder: which one a name means, what is in it, who holds it, and where it may not lie."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
from harness import over_table
from lightning.pytorch import Callback
from modules import loader, module, trainer

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.guards.refusals import check_folder
from cait.guards.run_lock import RunLock
from cait.run import rundir
from cait.run.program import Program


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("place")
def test_a_run_is_a_name_or_a_path():
    Path("elsewhere/second").mkdir(parents=True)
    run = rundir.new_folder(Path("logs"), "first")
    assert rundir.folder_of("first") == rundir.folder_of("logs/first") == run
    assert rundir.run_argument(run) == "first"
    assert rundir.run_argument(rundir.folder_of("elsewhere/second")) == "elsewhere/second"


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["first", "my runs/x y"])
def test_a_command_has_a_run_by_a_word_that_means_it(name):
    """Also a path beside a name in logs/, and one that a shell takes apart."""
    Path("logs/first").mkdir(parents=True)
    Path(name).mkdir(parents=True)
    [word] = shlex.split(Program().command("eval", Path(name)))[2:]
    assert rundir.folder_of(word) == Path(name)


def test_a_run_may_be_the_folder_that_one_is_in(place, monkeypatch):
    (place / "elsewhere/second").mkdir(parents=True)
    monkeypatch.chdir("elsewhere/second")
    assert rundir.folder_of(".") == place / "elsewhere/second"
    assert rundir.folder_of("..") == place / "elsewhere"


def test_the_last_checkpoints_come_first_and_then_the_newest(tmp_path):
    for age, name in enumerate(("step.ckpt", "best.ckpt", "previous.ckpt", "last.ckpt")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (100 - age, 100 - age))
    names = [path.name for path in rundir.checkpoints(tmp_path)]
    assert names == ["last.ckpt", "previous.ckpt", "step.ckpt", "best.ckpt"]


def test_a_run_whose_checkpoints_cannot_be_listed_does_not_begin_anew(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(NotADirectoryError):
        rundir.checkpoints(tmp_path / "checkpoints")


# Apart from images


@pytest.fixture
def photos(place, digits_root):
    """photos/ has two classes of three images to train on, and three to validate on; elsewhere/ has others."""
    for split in ("train", "val"):
        for label in "78":
            images = sorted((digits_root / split / label).iterdir())[:3]
            (folder := place / "photos" / split / label).mkdir(parents=True)
            for image in images:
                shutil.copy(image, folder)
    shutil.copytree("photos/val", "elsewhere")
    Path("link").symlink_to("photos")
    return place


def check(root, folder):
    data = ImageNetDataModule(root, batch_size=2, num_workers=0, val_fraction=0.3)
    data.setup("fit")
    check_folder(folder, data)


@pytest.mark.usefixtures("photos")
@over_table(__file__, "among_images")
def test_a_new_run_lies_apart_from_images(root, folder):
    with pytest.raises(UserError, match=f"^{folder} .*--run_name"):
        check(root, Path(folder))


def test_a_start_that_failed_may_be_repeated_where_it_has_drawn(photos):
    """Also below the images, where no class and no split would be."""
    run = photos / "elsewhere/results/train"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / ".lock").touch()
    shutil.copy(next((photos / "elsewhere/7").iterdir()), run)
    check("elsewhere", run)


# Who holds it


class Fails(Callback):
    def on_train_batch_end(self, *_):
        raise ValueError("in the middle")


def test_a_run_is_finished_until_it_is_continued(tmp_path):
    lock, finished = RunLock(tmp_path), tmp_path / ".finished"
    trainer(max_steps=1, callbacks=[lock]).fit(module(), loader())
    assert finished.exists()
    with pytest.raises(ValueError, match="in the middle"):
        trainer(max_steps=2, callbacks=[lock, Fails()]).fit(module(), loader())
    assert not finished.exists()


def test_a_link_to_an_empty_folder_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    lock = RunLock(tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir()
    lock.roll_back()
    assert (tmp_path / "run").is_symlink()
    assert not any((tmp_path / "disk").iterdir())


def test_what_was_there_before_a_failed_start_stays(tmp_path):
    (tmp_path / "notes.txt").touch()
    lock = RunLock(tmp_path)
    (tmp_path / "config.yaml").touch()
    lock.roll_back()
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / "config.yaml").exists()
