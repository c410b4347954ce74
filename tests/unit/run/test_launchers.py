"""How the processes of a run were started, and which ways are refused."""

import os
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from harness import table
from modules import trainer

from cait import errors
from cait.cli import command, main
from cait.errors import UserError
from cait.guards import refusals
from cait.run import signals
from cait.run.program import Processes


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("row", table(__file__, "started"))
def test_the_environment_says_how_a_process_was_started(row, capsys):
    os.environ.update(row["variables"])
    processes = Processes()
    for name in ("started", "rank", "is_launched"):
        assert getattr(processes, name)() == row[name]
    errors.tell_once("said by the first")
    assert bool(capsys.readouterr().err) == (row["rank"] == 0)
    if row["started"] == 1:  # nobody else can be reached
        assert processes.from_first(lambda: "mine") == "mine"


def followed(row, devices):
    """A Trainer on so many devices as a launcher's first process makes it, and how many processes were started."""
    os.environ.update(row["variables"])
    settings = dict(devices=devices, num_nodes=1)
    processes = Processes()
    processes.follow_launcher(settings)
    return trainer(strategy="auto", **settings), processes.started()


@pytest.mark.parametrize("devices", ["1", 1, "auto"])
@pytest.mark.parametrize("row", table(__file__, "followed"))
def test_a_launchers_processes_train_one_run(row, devices):
    """Never as many runs as there are processes."""
    fit, started = followed(row, devices)
    refusals.check_processes(fit, started)
    assert (fit.num_devices, fit.num_nodes) == (row["devices"], row["nodes"])
    assert fit.world_size == row["devices"] * row["nodes"]


@pytest.mark.parametrize("row", table(__file__, "followed"))
def test_another_number_than_the_launchers_is_refused(row):
    with pytest.raises(UserError, match="and num_nodes make"):
        refusals.check_processes(*followed(row, 5))


@pytest.mark.parametrize("row", table(__file__, "interactive"))
def test_lightning_does_not_ask_for_srun_in_a_shell_of_salloc(row, tmp_path, monkeypatch):
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    os.environ.update(row["variables"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Processes().cluster()


@pytest.mark.parametrize(
    ("started", "says", "status"),
    [
        (1, "Connection reset by peer", 2),
        (64, "Connection reset by peer", 1),
        (64, "CUDA out of memory", 2),
    ],
)
def test_the_process_that_is_the_cause_exits_with_2(started, says, status, monkeypatch):
    monkeypatch.setattr(command, "_run", Mock(side_effect=RuntimeError(says)))
    monkeypatch.setattr(Processes, "started", lambda _: started)
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == status


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 10), (0.6, 8), (12.0, 1)])
def test_processes_agree_after_fewer_steps_if_steps_are_slow(seconds, steps, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(signals, "time", clock)
    strategy = SimpleNamespace(root_device="cpu", reduce=lambda wishes, reduce_op: wishes)
    fit = Mock(global_step=0, world_size=2, strategy=strategy, asks_to_stop=False)
    watched = signals.StopSignals()
    watched.watch(fit)
    agreed = []
    for step in range(1, 41):
        clock.now += seconds
        fit.global_step = step
        if watched.is_due(fit):
            watched.agreed(fit, save=False)
            agreed.append(step)
    watched.restore()
    assert agreed == [*range(1, 41, steps)]
