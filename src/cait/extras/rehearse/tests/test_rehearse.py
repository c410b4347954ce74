"""`cait rehearse`: what it says of figures, what its callback measures, and whole rehearsals that leave nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest
from harness import LIMIT, SMALL, parsed, start
from runs import torchrun
from torch.utils.data import DataLoader

from cait import cores
from cait.extras.rehearse import keeper, measure, report

TABLE = parsed(Path(__file__).with_name("figures.yaml"))


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: str(row["changed"]))
def test_the_report_of_figures(row):
    expected = dict(row)
    rows = dict(report.rows(TABLE["figures"] | expected.pop("changed")))
    assert {name: rows[name] for name in expected} == expected


def test_the_table(capsys):
    report.show(TABLE["figures"])
    assert "no: a line" in capsys.readouterr().out


def batches_of_ten():
    """Of which the loader keeps four ready."""
    return measure.Batches(DataLoader(range(10), batch_size=None, num_workers=2))


def test_an_epoch_keeps_its_length_when_what_is_ready_is_left_out():
    batches = batches_of_ten()
    seen = []
    for batch in batches:
        seen.append(batch)
        batches.drains = len(seen) == 2
    assert seen == [0, 1, 6, 7, 8, 9, 1, 1, 1, 1]
    assert len(batches.times) == len(batches) == 10


def test_a_batch_is_given_again_and_again():
    batches = batches_of_ten()
    seen = []
    for batch in islice(batches, 20):
        seen.append(batch)
        batches.repeats = True
    assert seen == [0] * 20


def test_the_keeper_ends_the_group_and_removes_the_folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "run").mkdir(parents=True)
    first, last = (subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2))
    command = [sys.executable, "-IS", keeper.__file__, str(folder)]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    job.stdin.write(f"{first.pid}\n{last.pid}\n")
    job.stdin.flush()
    time.sleep(0.5)  # it starts
    for number in cores.STOPPING:  # which a scheduler sends to all
        job.send_signal(number)
    assert job.communicate(timeout=LIMIT)[1] == ""
    assert job.returncode == 0
    assert last.wait() == -signal.SIGKILL
    assert not folder.exists()
    assert first.poll() is None
    first.kill()
    first.wait()


REHEARSED = "--trainer.callbacks+=cait.extras.rehearse.measure.Rehearse"
COUNTED = dict(steps=660, steps_an_epoch=22, images_a_step=64, validations_an_epoch=1)


def test_a_run_is_measured_and_then_stopped(cait, tmp_path, monkeypatch):
    task = dict(folder=str(tmp_path), phase="test", seconds=0.2, actions={"2": ["save", "measure"]})
    monkeypatch.setenv(measure.TASK, json.dumps(task))
    # the rate follows from what the loader says of its batches
    words = ["--trainer.num_sanity_val_steps=4", "--model.lr_base_size=512"]
    done = cait("fit", *SMALL, REHEARSED, *words)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    figures = parsed(tmp_path / "test.json")
    assert [*figures["bits"]] == ["2"]
    counted = {name: figures[name] for name in COUNTED}
    assert counted == COUNTED
    assert 0 < figures["step_seconds"][1] < 10
    assert 0 <= figures["waiting_shares"][0] < 1
    assert figures["validation_seconds"] > 0
    assert figures["save_bytes"] > 100_000
    assert report.rows(figures | dict(memory=None, stop="", kill=""))


def test_a_run_that_is_too_short_is_refused(cait, monkeypatch):
    task = dict(actions={}, phase="", folder="", seconds=1)
    monkeypatch.setenv(measure.TASK, json.dumps(task))
    done = cait("fit", *SMALL, REHEARSED, "--trainer.max_steps=19")
    assert done.returncode == 2
    assert "a rehearsal needs a run of 20 steps or more" in done.stderr


# Whole rehearsals


def rehearse(place, *words, command=()):
    """The status, what is printed, and the table in it."""
    job = start(place, "rehearse", *words, command=command)
    output = job.communicate(timeout=LIMIT)[0]
    return job.returncode, output, dict(re.findall("^│ (.+?) +│ (.+?) +│$", output, re.M))


def left_in(place):
    """What a rehearsal has left in logs/, beside its figures."""
    return [path.name for path in (place / "logs").iterdir() if path.suffix != ".json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "command", "processes"),
    [([], (), 1), (["--trainer.devices=2"], (), 2), ([], torchrun("--standalone"), 2)],
    ids=["alone", "devices", "torchrun"],
)
@pytest.mark.usefixtures("cait")
def test_a_whole_rehearsal(words, command, processes, tmp_path):
    words = [*SMALL, *words, "--minutes=0.1"]
    status, output, rows = rehearse(tmp_path, *words, command=command)
    assert status == 0, output
    assert rows["will it fit?"].startswith("yes: memory")
    goes_on = "yes: it goes on with the same bits"
    assert rows["can I stop it at any time?"].startswith(f"{goes_on}; it ended")
    assert rows["and after kill -9?"] == goes_on
    assert ("gloo" in rows["adding up gradients"]) == (processes == 2)
    [path] = (tmp_path / "logs").glob("rehearsal-*.json")
    assert json.loads(path.read_text())["processes"] == processes
    assert left_in(tmp_path) == []


OWN = """
import os, time, torch

def sleepy(image):
    time.sleep(0.02)
    return image

class Draws(torch.nn.Module):
    # from a generator of its own, which no seed reaches
    def __init__(self, img_size, num_classes):
        super().__init__()
        self.head = torch.nn.Linear(3 * img_size**2, num_classes)
        self.drawn = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))

    def forward(self, images):
        noise = torch.rand(images.shape, generator=self.drawn)
        return self.head((images + self.training * noise).flatten(1))

def too_large(num_classes):
    raise MemoryError
"""
WORDS = [word for word in SMALL if not word.startswith("--model.fields.")]


@pytest.mark.slow
@pytest.mark.usefixtures("cait")
def test_a_slow_loader_and_other_bits_are_told(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = ["--model.name=own:Draws", "--model.fields=null", "--data.augment_ops=[own:sleepy]"]
    _, output, rows = rehearse(tmp_path, *WORDS, *own, "--minutes=0.1")
    assert rows["what is slow?"].startswith("the loader: "), output
    assert rows["can I stop it at any time?"].startswith("yes, but it goes on with other bits")


@pytest.mark.slow
@pytest.mark.usefixtures("cait")
def test_a_run_that_does_not_fit_ends_in_a_line(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = ["--model.name=own:too_large", "--model.fields=null"]
    status, output, _ = rehearse(tmp_path, *WORDS, *own)
    assert status == 2
    assert output.splitlines()[-1].startswith("cait: error: the run does not fit: "), output
    assert left_in(tmp_path) == []


def group_lives(folder):
    """Whether a process works for a folder."""
    processes = psutil.process_iter(["cmdline"])
    return any(folder.name in str(process.info["cmdline"]) for process in processes)


@pytest.mark.slow
@pytest.mark.usefixtures("cait")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_rehearsal_that_is_stopped_leaves_nothing(number, tmp_path):
    job = start(tmp_path, "rehearse", *SMALL, "--minutes=3")
    end = time.monotonic() + LIMIT
    while not [*tmp_path.glob("logs/.rehearsal-*/whole/checkpoints/last.ckpt")]:
        assert time.monotonic() < end
        time.sleep(0.1)
    [folder] = tmp_path.glob("logs/.rehearsal-*")
    assert group_lives(folder)
    os.kill(job.pid, number)
    job.wait()
    while group_lives(folder) or folder.exists():
        assert time.monotonic() < end
        time.sleep(0.1)
