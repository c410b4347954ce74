"""Sweeps: the file of a space, the trials it leads to, and sweeps that are stopped, killed and shared."""

import re
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from harness import LIMIT, REPO, parsed, start
from runs import wait_for_steps

from cait.errors import UserError
from cait.run.program import Program
from contrib.sweep import trials
from contrib.sweep.search_space import SearchSpace

TINY = parsed(Path(__file__).with_name("tiny.yaml"))


def write(folder, **changes):
    """Write the file of a space."""
    config = str(REPO / "configs/digits.yaml")
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({"config": config} | TINY | changes))
    return path


def sweep_in(folder, **changes):
    """What a process holds of a sweep."""
    return trials.Sweep(SearchSpace(write(folder, **changes)), folder, Program())


def test_processes_share_a_sweep_and_take_over_what_another_left(tmp_path):
    one = sweep_in(tmp_path, sampler="random")
    other = sweep_in(tmp_path, sampler="random")
    first = one.next_trial()
    second = other.next_trial()
    assert first.params != second.params
    assert one.next_trial() is None  # there are two, and it still holds the first
    one._held.release()  # as when its process ends
    other.study.tell(second, 1.0)
    again = other.next_trial()
    assert (again.number, again.params) == (0, first.params)
    other.study.tell(again, 2.0)
    assert other.next_trial() is None
    assert [trial.number for trial in one.ranked()] == [0, 1]


def test_a_sweep_of_another_space_is_refused_once_it_has_begun(tmp_path):
    sweep_in(tmp_path).next_trial()
    assert len(sweep_in(tmp_path, trials=5).study.trials) == 1
    assert len(sweep_in(tmp_path, seed=4).study.trials) == 0  # nothing had begun
    (tmp_path / "trial-000/config.yaml").touch()
    with pytest.raises(UserError, match="another space"):
        sweep_in(tmp_path)


def test_a_folder_that_has_gone_is_not_made_again(tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    sweep = sweep_in(folder)
    folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="moved"):
        sweep.next_trial()
    assert not folder.exists()


def test_a_trial_waits_for_the_race_that_a_killed_sweep_has_left(tmp_path, monkeypatch):
    sweep = sweep_in(tmp_path)
    trial = sweep.next_trial()
    race = tmp_path / "trial-000/race"
    race.mkdir()
    for folder in (race, race.parent):
        (folder / ".lock").touch()
    waits = []

    def lock(path):
        waits.append(path.parent.name)
        return nullcontext()

    monkeypatch.setattr(trials, "file_lock", lock)
    monkeypatch.setattr(trials, "train_run", lambda *_, **__: waits.append("trains"))
    sweep._train(trial)
    assert waits == ["trial-000", "race", "trial-000", "trains"]


def test_a_trial_is_stopped_at_the_validation_at_which_optuna_stops_it(tmp_path):
    pruner = {"name": "median", "n_startup_trials": 1}
    metrics = "epoch,step,val/acc1\n0,3,{}\n1,7,{}\n2,11,{}\n"
    stopped = []
    for number, values in enumerate(([10, 20, 30], [11, 19, 40])):
        sweep = sweep_in(tmp_path, pruner=pruner)
        trial = sweep.next_trial()
        assert not sweep.prunes(trial)  # its run has logged nothing
        path = trials.trial_folder(tmp_path, number) / "metrics.csv"
        path.write_text(metrics.format(*values))
        stopped.append(sweep.prunes(trial))
        sweep.study.tell(trial, 30)
    assert stopped == [False, True]  # the median of its second validation is 20
    first, second = (trial.intermediate_values for trial in sweep.study.trials)
    assert [*first.values(), *second.values()] == [10, 20, 30, 11, 19]


@pytest.mark.slow
def test_a_sweep_that_is_stopped_and_killed_goes_on_and_two_processes_share_it(cait, tmp_path):
    """The first trial's rate is infinite in effect; the third trains on without its sweep."""
    settings = TINY["settings"] | {"max_nonfinite_steps": 2}
    space = {"model.lr": [1e30, 1e-3, 2e-3, 3e-3]}
    path = write(tmp_path, settings=settings, space=space, sampler="grid", trials=None)
    folder = tmp_path / "logs/tiny"
    job = start(tmp_path, "sweep", "space.yaml")
    wait_for_steps(folder / "trial-001", 2, job)
    job.send_signal(signal.SIGINT)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 130, output
    assert "The trials have saved; the same command continues them" in output

    job = start(tmp_path, "sweep", "space.yaml")
    wait_for_steps(folder / "trial-002", 2, job)
    job.kill()
    job.communicate()
    pair = [start(tmp_path, "sweep", "space.yaml") for _ in range(2)]
    output = "".join(process.communicate(timeout=3 * LIMIT)[0] for process in pair)
    assert [process.returncode for process in pair] == [0, 0], output
    trained = re.findall(r"^(trial-\d+)  model", output, re.M)
    assert sorted(trained) == ["trial-002", "trial-003"]

    shown = cait("sweep", "space.yaml").stdout
    assert re.search(r"^trial-000  fail .* 2 steps in a row gave no finite gradient", shown, re.M)
    assert "cait eval logs/tiny/trial-00" in shown
    failed, *completed = trials.Sweep(SearchSpace(path), folder, Program()).study.trials
    assert failed.state.name == "FAIL"
    for trial in completed:
        first, second = trial.intermediate_values.values()
        assert trial.value == max(first, second)
        assert f"trial-{trial.number:03}  complete  val/acc1 {trial.value:.5g}  model.lr=" in shown
