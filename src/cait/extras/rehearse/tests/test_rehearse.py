"""`cait rehearse`: what it says of figures, what its callback measures, and whole rehearsals that leave nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT, SMALL, call, start
from runs import torchrun

from cait import cores
from cait.extras.rehearse import keeper, measure, memory, report, verb

FIGURES: dict[str, Any] = dict(
    device="H100",
    parameters=250_000_000,
    processes=8,
    backend="nccl",
    workers=4,
    images_a_step=1024,
    steps=10_000,
    steps_an_epoch=100,
    validations_an_epoch=0.5,
    save_every_n_steps=50,
    step_seconds=[0.5, 0.49],
    waiting_shares=[0.02, 0.0],
    validation_seconds=10.0,
    save_seconds=1.0,
    save_bytes=4_300_000_000,
    add_seconds=0.01,
    memory=[3.25, 100.0],
    gpu=None,
    stop="yes",
    kill="no: a line",
)


def test_the_time_of_a_run_is_that_of_its_steps_validations_and_checkpoints() -> None:
    # a checkpoint after each of 100 epochs, maybe one after each of 50 validations, 200 by steps
    assert report.times(FIGURES) == dict(training=5000, validation=500, checkpoints=350)
    seldom = FIGURES | dict(save_every_n_steps=None, validations_an_epoch=0.0)
    assert report.times(seldom) == dict(training=5000, validation=0, checkpoints=100)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "nothing beside the network, on H100"),
        (
            dict(waiting_shares=[0.6, 0], step_seconds=[0.5, 0.2]),
            "the loader: 60% of a step; raise",
        ),
        # a GPU that computes meanwhile waits for nothing
        (dict(waiting_shares=[0.6, 0]), "nothing"),
        # processes of the loader that only take its cores from the network are not slow
        (dict(step_seconds=[0.5, 0.2]), "nothing"),
        # a run that ended before it could train without the loader
        (dict(step_seconds=[0.5]), "nothing"),
        (dict(validation_seconds=100.0), "validation: 48% of the time"),
        (dict(save_seconds=10.0), "checkpoints: 39% of the time"),
        (dict(add_seconds=0.25), "adding up gradients, as long as 50% of a step"),
    ],
)
def test_what_is_slow(changed: dict, line: str) -> None:
    assert report.bound(FIGURES | changed).startswith(line)


def test_the_table(capsys: pytest.CaptureFixture) -> None:
    rows = dict(report.rows(FIGURES))
    assert rows["will it fit?"] == (
        "yes: memory 3.2 GB for a process, 100.0 GB left; gpu not measured"
    )
    assert rows["how long will it take?"] == (
        "1 h 37 min: training 1 h 23 min, validation 8 min 20 s, checkpoints 5 min 50 s"
    )
    assert (
        rows["images a second"] == "2,048, without the loader 2,090; 2% of the time waits for them"
    )
    assert rows["a checkpoint"] == "1 s, 4,300.0 MB"
    assert rows["adding up gradients"] == "0.01 s, 175.00 GB/s by nccl"
    alone = dict(report.rows(FIGURES | dict(add_seconds=0.0)))
    assert alone["adding up gradients"] == "not measured: there is one process"
    report.show(FIGURES)
    assert "no: a line" in capsys.readouterr().out


def test_a_validation_is_as_long_as_its_first_batches_say() -> None:
    assert measure.validation_seconds([100.0, 105.0, 105.5, 106.0], 21) == 5 + 20 * 0.5
    assert measure.validation_seconds([100.0, 105.0], 1) == 5
    assert measure.validation_seconds([], 0) == 0


class Loader:
    """It gives ten batches, and keeps four of them ready."""

    num_workers, prefetch_factor = 2, 2

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter(range(10))


def test_an_epoch_keeps_its_length() -> None:
    batches = measure.Batches(Loader())
    given = []
    for batch in batches:
        given.append(batch)
        batches.drains = len(given) == 2
    assert given == [0, 1, 6, 7, 8, 9, 1, 1, 1, 1]
    assert len(batches.times) == len(batches) == 10
    iterator = iter(batches)
    next(iterator)
    batches.repeats = True
    assert [next(iterator) for _ in range(20)] == [0] * 20


def test_the_memory_left_is_that_of_the_tightest_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    assert memory.left() == float("inf")
    step = tmp_path / "groups/job/step"
    step.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/\n0::/job/step\n")
    (step / "memory.max").write_text("max\n")
    assert memory.left() == 8_192_000
    for name, text in (
        ("max", "5000\n"),
        ("current", "4500\n"),
        ("stat", "anon 1\ninactive_file 300\n"),
    ):
        (step.parent / f"memory.{name}").write_text(text)
    assert memory.left() == 800


def test_the_line_of_a_process_that_failed(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    output.write_text("a\ncait: error: out of memory: less; to continue: cait resume x\nb\n")
    assert verb.last_line(2, output) == "out of memory: less"
    assert verb.last_line(-9, output) == "killed by signal 9: memory ran out, or it hung"
    output.write_text("Fatal Python error\n")
    assert verb.last_line(-6, output) == "Fatal Python error"
    output.write_text("")
    assert verb.last_line(1, output) == ""


def test_the_keeper_ends_the_group_and_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "run").mkdir(parents=True)
    first, last = (subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2))
    command = [sys.executable, "-IS", keeper.__file__, str(folder)]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdin
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


CALLBACK = "--trainer.callbacks+=cait.extras.rehearse.measure.Rehearse"


def rehearsed(place: Path, monkeypatch: pytest.MonkeyPatch, *words: str, **task: Any) -> dict:
    """The report of `fit` in this process, with this task."""
    task = dict(folder=str(place), phase="test", seconds=0.2) | task
    monkeypatch.setenv(measure.TASK, json.dumps(task))
    done = call(place, "fit", *SMALL, "--run_name=test", CALLBACK, *words)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    return json.loads((place / "test.json").read_text())


def test_a_run_is_measured_and_then_stopped(cait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cait.args[0]
    task = dict(actions={"2": ["save", "measure"]})
    # the rate follows from what the loader says of its batches
    words = ["--trainer.num_sanity_val_steps=4", "--model.lr_base_size=512"]
    figures = rehearsed(place, monkeypatch, *words, **task)
    assert [*figures["bits"]] == ["2"]
    assert figures["steps"] == 30 * figures["steps_an_epoch"] == 30 * 22
    assert (figures["images_a_step"], figures["validations_an_epoch"]) == (64, 1)
    _, without = figures["step_seconds"]
    assert 0 < without < 10
    assert 0 <= figures["waiting_shares"][0] < 1
    assert figures["validation_seconds"] > 0
    assert figures["save_bytes"] > 100_000
    assert report.rows(figures | dict(memory=None, stop="", kill=""))


def test_a_run_that_is_too_short_is_refused(cait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measure.TASK, json.dumps(dict(actions={}, phase="", folder="", seconds=1)))
    done = cait("fit", *SMALL, CALLBACK, "--trainer.max_steps=19")
    assert done.returncode == 2
    assert "a rehearsal needs a run of 20 steps or more" in done.stderr


# ----------------------------------------------------------------------------------------------- whole rehearsals


def table(output: str) -> dict[str, str]:
    lines = [line.strip("│\n").split("│") for line in output.splitlines() if line.startswith("│")]
    return {name.strip(): text.strip() for name, text in lines}


def left_in(place: Path) -> list[str]:
    """What a rehearsal has left in logs/, beside its figures."""
    return [path.name for path in (place / "logs").iterdir() if path.suffix != ".json"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "devices", "torchrun"])
def test_a_whole_rehearsal(how: str, cait: Any) -> None:
    place = cait.args[0]
    command = torchrun("--standalone") if how == "torchrun" else ()
    words = ["--trainer.devices=2"] if how == "devices" else []
    job = start(place, "rehearse", *SMALL, *words, "--minutes=0.1", command=command)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    rows = table(output)
    assert rows["will it fit?"].startswith("yes: memory")
    assert rows["can I stop it at any time?"].startswith(
        "yes: it goes on with the same bits; it ended"
    )
    assert rows["and after kill -9?"] == "yes: it goes on with the same bits"
    [path] = (place / "logs").glob("rehearsal-*.json")
    figures = json.loads(path.read_text())
    processes = 1 if how == "alone" else 2
    assert figures["processes"] == processes
    assert ("gloo" in rows["adding up gradients"]) == (processes == 2)
    assert left_in(place) == []


@pytest.mark.slow
def test_a_slow_loader_and_other_bits(cait: Any) -> None:
    """A data set that sleeps, and a network that draws from a generator of its own, which no seed reaches."""
    place = cait.args[0]
    (place / "own.py").write_text(
        "import os, time, torch\n"
        "def sleepy(image):\n"
        "    time.sleep(0.02)\n"
        "    return image\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, img_size, num_classes):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(3 * img_size**2, num_classes)\n"
        "        self.drawn = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))\n"
        "    def forward(self, images):\n"
        "        noise = torch.rand(images.shape, generator=self.drawn)\n"
        "        return self.head((images + self.training * noise).flatten(1))\n"
    )
    own = ["--model.name=own:Net", "--model.fields=null", "--data.augment_ops=[own:sleepy]"]
    words = [word for word in SMALL if not word.startswith("--model.fields.")]
    job = start(place, "rehearse", *words, *own, "--minutes=0.1")
    output = job.communicate(timeout=LIMIT)[0]
    rows = table(output)
    assert rows["what is slow?"].startswith("the loader: "), output
    assert rows["can I stop it at any time?"].startswith("yes, but it goes on with other bits"), (
        output
    )


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_in_a_line(cait: Any) -> None:
    place = cait.args[0]
    (place / "own.py").write_text("def net(num_classes):\n    raise MemoryError\n")
    own = ["--model.name=own:net", "--model.fields=null"]
    words = [word for word in SMALL if not word.startswith("--model.fields.")]
    job = start(place, "rehearse", *words, *own)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 2
    assert output.splitlines()[-1].startswith("cait: error: the run does not fit: "), output
    assert left_in(place) == []


def group_lives(folder: Path) -> bool:
    """Whether a process works for a folder."""
    words = os.fsencode(folder.name)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_bytes():
                return True
        except OSError:
            continue
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_rehearsal_that_is_stopped_leaves_nothing(number: int, cait: Any) -> None:
    place = cait.args[0]
    job = start(place, "rehearse", *SMALL, "--minutes=3")
    end = time.monotonic() + LIMIT
    while not [*place.glob("logs/.rehearsal-*/whole/checkpoints/last.ckpt")]:
        assert time.monotonic() < end
        time.sleep(0.1)
    [folder] = place.glob("logs/.rehearsal-*")
    assert group_lives(folder)
    os.kill(job.pid, number)
    job.wait()
    while group_lives(folder) or folder.exists():
        assert time.monotonic() < end
        time.sleep(0.1)
