"""Sweeps: the file of a space, the trials it leads to, and sweeps that are killed and shared."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import yaml
from harness import DEVICES, LIMIT, REPO, link_digits, start
from optuna.trial import TrialState

from cait.cli import main
from cait.errors import UserError
from cait.extras.sweep import table, trials
from cait.extras.sweep.search_space import SearchSpace
from cait.extras.sweep.trials import Sampler
from cait.extras.sweep.verb import check_values
from cait.run.program import Program

CLASSES = "torchmetrics.classification"
TINY: dict[str, Any] = {
    "config": str(REPO / "configs/digits.yaml"),
    "settings": {
        "trainer": {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 1, "log_every_n_steps": 1},
        "model.fields": {"embed_dim": 32, "depth": 1},
        "data": {"batch_size": 64, "num_workers": 0},
        "save_every_n_steps": 2,
        **dict(argument.removeprefix("--").split("=") for argument in DEVICES),
    },
    "space": {"model.lr": {"low": "1e-4", "high": 0.03, "log": True}, "data.mixup": [0.0, 0.2, 0.8]},
    "name": "tiny",
    "trials": 2,
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (TINY | changes).items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trails": 3}, "unknown key trails: 3; did you mean trials?"),
        ({"space": {"model.lr": {"low": 1, "hihg": 2}}}, "unknown key space.model.lr.hihg: 2; did you mean high?"),
        ({"space": {"model.lr": {"low": "much", "high": 2}}}, "space.model.lr.low must be a number, got much"),
        ({"space": {"model.lr": {"low": 2, "high": 1}}}, "space.model.lr needs low below high"),
        ({"space": {"model.lr": {"low": 0, "high": 1.0, "log": True}}}, "with log: true needs low above 0"),
        ({"space": {"model.lr": [1, 1]}}, "space.model.lr must list values, each once, got [1, 1]"),
        ({"space": {"model.lr": 3}}, "space.model.lr must be a list or {low: A, high: B}, got 3"),
        ({"space": {"run_name": ["a", "b"]}}, "run_name is given by the sweep to each trial; leave it out"),
        ({"space": {"save_every_n_steps": [1]}}, "save_every_n_steps stands in settings and in space; keep one"),
        ({"space": None}, "space must map settings to values, got null"),
        ({"sampler": "tpr"}, "sampler cannot be tpr; did you mean tpe?"),
        ({"sampler": "grid"}, "space.model.lr is a range without steps"),
        ({"pruner": {"name": "median", "warmup": 1}}, "unknown key pruner.warmup: 1; did you mean n_warmup_steps?"),
        ({"pruner": {"name": "hyperband", "min_resource": "a"}}, "pruner.min_resource must be a whole number"),
        ({"direction": "up"}, "direction cannot be up; there are maximize, minimize"),
        ({"metric": "val/answer"}, "is the largest val/answer best? Add direction: maximize or minimize"),
        ({"trials": 0}, "trials must be a whole number, at least 1, got 0"),
        ({"trials": None}, "trials must be a whole number, at least 1, got null"),
        ({"name": "a/b"}, "name must be a name, got a/b"),
        ({"name": ".."}, "name must be a name, got .."),
    ],
)
def test_a_bad_space_is_told_in_a_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        SearchSpace.read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "direction"),
    [
        ({}, "maximize"),
        ({"metric": "val/loss"}, "minimize"),
        ({"metric": "val/loss", "direction": "maximize"}, "maximize"),
        ({"metric": "val/x", "settings": {"model.metrics": {"x": f"{CLASSES}:MulticlassF1Score"}}}, "maximize"),
        (
            {"metric": "val/x", "settings": {"model": {"metrics": {"x": f"{CLASSES}:MulticlassHammingDistance"}}}},
            "minimize",
        ),
        ({"metric": "val/x", "config": "own.yaml"}, "minimize"),
    ],
)
def test_the_best_trial_follows_from_the_metric(
    changes: dict[str, Any], direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(f"model: {{metrics: {{x: '{CLASSES}:MulticlassCalibrationError'}}}}\n")
    search = SearchSpace.read(write(tmp_path, **changes))
    assert search.direction == direction
    assert search.arguments({})[-1] == f"--best_mode={direction[:3]}"


def test_a_space_that_is_no_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("space: {model.lr: [1\n")
    with pytest.raises(UserError) as error:
        SearchSpace.read(path)
    assert str(error.value) == f"{path} is not YAML at line 2, column 1: did not find expected ',' or ']'"


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (
            {"model.lrr": [0.1]},
            "with model.lrr: 0.1: there is no option --model.lrr; did you mean --model.lr?",
        ),
        pytest.param({"data.batch_size": [32, "many"]}, "with data.batch_size: many: ", marks=pytest.mark.slow),
    ],
)
def test_a_setting_that_fit_refuses_ends_the_sweep_before_it_begins(
    axis: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"model.fields.depth": 1}
    with pytest.raises(SystemExit) as stop:
        main(["sweep", str(write(tmp_path, space=axis, settings=settings))])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not (tmp_path / "logs").exists()


def test_the_space_that_is_shipped_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    search = SearchSpace.read(Path(__file__).parents[1] / "digits.yaml")
    assert (search.trials, search.name, len(search.probes())) == (12, "sweep-digits", 9)
    check_values(search, Program())  # raises what fit refuses


def test_values_reach_the_command_line_as_fit_takes_them(tmp_path: Path) -> None:
    search = SearchSpace.read(
        write(tmp_path, sampler="grid", space={"a": [None, [1, 0.5], "x"], "b": {"low": 1, "high": 2}})
    )
    assert (search.trials, search.point(1)) == (2, {"a": "null", "b": 2})
    path = write(tmp_path, sampler="grid", trials=None, space={"a": [None, [1, 0.5], "x", {"k": True}]})
    search = SearchSpace.read(path)
    assert [value for _, value, _ in search.probes()] == ["null", "[1, 0.5]", "x", '{"k": true}']
    assert "--a=[1, 0.5]" in search.probes()[1][2]
    assert "--model.fields.depth=1" in search.probes()[0][2]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_sweep_cut_anywhere_draws_the_same_trials(sampler: str, tmp_path: Path) -> None:
    axes = {"a": {"low": 0.0, "high": 1.0}, "b": [1, 2, 3], "c": {"low": 1, "high": 8}}
    if sampler == "grid":
        axes["a"]["step"] = 0.25
    path = write(tmp_path, sampler=sampler if sampler != "tpe" else {"name": "tpe", "n_startup_trials": 3}, space=axes)
    search = SearchSpace.read(path)

    def draw(search: SearchSpace, cut: bool) -> list[dict[str, Any]]:
        study = optuna.create_study(sampler=Sampler(search), direction="maximize")
        for number in range(6):
            study.ask()
            for name in search.axes if cut else ():  # another process draws each value, and each is asked for again
                study.sampler = Sampler(SearchSpace.read(path))
                trials.trial_of(study, number)._suggest(name, search.axes[name])
            values = trials.values_of(study, search, number)
            study.tell(number, values["a"] * int(values["b"]) - values["c"] / 8)
        return [trial.params for trial in study.trials]

    drawn = draw(search, cut=True)
    assert drawn == draw(search, cut=False)
    assert len({str(values) for values in drawn}) == 6
    if sampler == "random":
        other = SearchSpace.read(write(tmp_path, sampler=sampler, space=axes, seed=1))
        assert draw(other, cut=False)[0]["a"] != drawn[0]["a"]


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_replayed_decisions_are_those_of_optuna(pruner: str, tmp_path: Path) -> None:
    options = {"median": {"n_startup_trials": 3, "n_warmup_steps": 1}, "hyperband": {"reduction_factor": 2}}[pruner]
    search = SearchSpace.read(write(tmp_path, pruner={"name": pruner} | options))
    curves = np.random.default_rng(0).random((14, 5)).cumsum(axis=1)
    live = optuna.create_study(study_name=trials.NAME, direction="maximize", pruner=trials.make_pruner(search))
    ours = optuna.create_study(direction="maximize")
    stopped = 0
    for curve in curves:
        trial, copy = live.ask(), ours.ask()
        for place, value in enumerate(curve):
            trial.report(value, place)
            copy.report(value, 10 * place + 7)  # steps of the optimizer
            answer = trial.should_prune()
            for _ in range(2):  # asked again after a kill
                assert trials.is_pruned(ours, trials.make_pruner(search), copy.number) == answer
            if answer:
                break
        state = TrialState.PRUNED if answer else TrialState.COMPLETE
        for study, each in ((live, trial), (ours, copy)):
            study.tell(each, None if answer else curve[-1], state)
        stopped += answer
    assert 2 < stopped < 14


def test_a_sweep_of_another_space_is_refused_once_it_has_begun(tmp_path: Path) -> None:
    search = SearchSpace.read(write(tmp_path))
    trials.open_study(tmp_path, search).ask()
    longer = SearchSpace.read(write(tmp_path, trials=5))
    assert len(trials.open_study(tmp_path, longer).trials) == 1
    other = SearchSpace.read(write(tmp_path, seed=4))
    assert len(trials.open_study(tmp_path, other).trials) == 0  # nothing had begun
    (tmp_path / "trial-000").mkdir()
    (tmp_path / "trial-000/config.yaml").touch()
    with pytest.raises(UserError, match=r"another space than .*space\.yaml now says"):
        trials.open_study(tmp_path, search)


def test_trials_without_their_study_are_not_taken_for_others(tmp_path: Path) -> None:
    (tmp_path / "trial-000").mkdir()
    (tmp_path / "trial-000/config.yaml").touch()
    with pytest.raises(UserError, match=r"has trials, but .*study\.db is missing"):
        trials.open_study(tmp_path, SearchSpace.read(write(tmp_path)))


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("val/acc1", 11.5, "the best trial's 11.5 % is hardly above chance, which is 10 %"),
        ("val/acc1", 30.0, ""),
        ("val/loss", 2.3, ""),
    ],
)
def test_a_best_trial_at_chance_is_doubted(metric: str, value: float, words: str, tmp_path: Path) -> None:
    place = tmp_path / "trial-000/checkpoints/best.ckpt"
    place.parent.mkdir(parents=True)
    data = {"class_names": list("abcdefghij"), "depends_on": {}}
    torch.save({"global_step": 1, "state_dict": {}, "ImageNetDataModule": data}, place)
    search = SearchSpace.read(write(tmp_path, metric=metric))
    told = table.doubt({"run": tmp_path / "trial-000", metric: value}, search)
    assert told.startswith(words)
    assert bool(told) == bool(words)


def trials_of(folder: Path) -> list[tuple[Any, ...]]:
    """All that a sweep ends with."""
    return [
        (trial.number, trial.params, trial.state.name, trial.value, trial.intermediate_values)
        for trial in trials.open_study(folder).trials
    ]


def logged(folder: Path) -> int:
    """Rows in the tables of all trials."""
    return sum(path.read_text().count("\n") for path in folder.glob("trial-*/metrics.csv"))


def until(condition: Any, job: subprocess.Popen) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def process_of(trial: Path) -> int:
    return int(re.search(r"process (\d+)", (trial / ".owner").read_text())[1])


def ended(*jobs: subprocess.Popen, trials: int = 2) -> list[str]:
    outputs = [job.communicate(timeout=trials * LIMIT)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), outputs
    return outputs


def test_a_sweep_trains_reports_and_draws(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    path, folder = str(write(tmp_path, trials=1, pruner="median")), tmp_path / "logs/tiny"
    (output,) = ended(start(tmp_path, "sweep", path))
    ((_, params, state, value, reported),) = trials_of(folder)
    assert (state, params.keys()) == ("COMPLETE", {"model.lr", "data.mixup"})
    assert (len(reported), max(reported.values())) == (2, value)
    with (folder / "trials.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["val/acc1"], row["model.lr"], row["epochs"]) == (str(value), str(params["model.lr"]), "2")
    assert {path.stem for path in folder.glob("*.png")} >= {"history", "parallel"}
    assert "make eval RUN=logs/tiny/trial-000" in output


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_two_processes_share_it(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    path, folder = str(write(tmp_path)), tmp_path / "logs/tiny"
    job = start(tmp_path, "sweep", path)
    until(lambda: logged(folder) > 3, job)
    os.killpg(job.pid, signal.SIGKILL)  # its trial trains on
    job.communicate()
    both = [start(tmp_path, "sweep", path) for _ in range(2)]
    outputs = ended(*both)
    trained = sorted(name for output in outputs for name in re.findall(r"^(trial-\d+)  val/acc1", output, re.M))
    assert trained == ["trial-000", "trial-001"]
    assert [trial[2] for trial in trials_of(folder)] == ["COMPLETE"] * 2
    for output in folder.glob("trial-*/output.txt"):
        assert re.search(rf"evaluate +make eval RUN=\S*{output.parent.name} ", output.read_text())
    with (folder / "trials.csv").open() as file:
        assert {row["trial"] for row in csv.DictReader(file)} == {"0", "1"}
    assert {path.stem for path in folder.glob("*.png")} == {"history", "importance", "parallel"}
    assert "make eval RUN=logs/tiny/trial-00" in outputs[0]
    assert max(map(len, outputs[0].splitlines())) <= 100


@pytest.mark.slow
def test_a_sweep_killed_five_times_ends_with_the_same_trials(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    settings = {"sampler": {"name": "tpe", "n_startup_trials": 4}, "trials": 12}
    pruner = {"pruner": {"name": "median", "n_startup_trials": 3, "n_warmup_steps": 1}}
    more = TINY["settings"] | {"trainer": TINY["settings"]["trainer"] | {"max_epochs": 4, "limit_train_batches": 8}}
    whole = str(write(tmp_path, name="whole", settings=more, **settings, **pruner))
    ended(start(tmp_path, "sweep", whole), trials=12)
    cut = str(write(tmp_path, name="cut", settings=more, **settings, **pruner))
    folder = tmp_path / "logs/cut"
    for kill in range(5):
        job = start(tmp_path, "sweep", cut)
        enough = logged(folder) + 30 + 9 * kill
        until(lambda enough=enough: logged(folder) > enough, job)
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        if kill != 2:  # a sweep killed alone leaves its trial training
            for trial in folder.glob("trial-*"):
                with contextlib.suppress(OSError):
                    os.kill(process_of(trial), signal.SIGKILL)
    ended(start(tmp_path, "sweep", cut), trials=12)
    expected = trials_of(tmp_path / "logs/whole")
    assert trials_of(folder) == expected
    assert len(expected) == 12
    assert {trial[2] for trial in expected} == {"COMPLETE", "PRUNED"}


@pytest.mark.slow
def test_a_trial_that_fails_is_noted_and_one_that_is_killed_goes_on(tmp_path: Path, digits_root: Path) -> None:
    """The first rate is infinite in effect, the second trial loses its process once; then Ctrl-C, and again."""
    link_digits(tmp_path, digits_root)
    settings = TINY["settings"] | {"max_nonfinite_steps": 2}
    space = {"model.lr": [1e30, 1e-3, 2e-3]}
    path, folder = (
        str(write(tmp_path, settings=settings, space=space, sampler="grid", trials=3)),
        tmp_path / "logs/tiny",
    )
    job = start(tmp_path, "sweep", path)
    second = folder / "trial-001"
    until(lambda: (second / "checkpoints/last.ckpt").exists(), job)
    os.kill(process_of(second), signal.SIGKILL)
    until(lambda: (folder / "trial-002/metrics.csv").exists(), job)
    os.kill(job.pid, signal.SIGINT)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 130, output
    assert "The trials have saved; the same command continues them" in output
    assert "trial-001  was killed" in output
    (output,) = ended(start(tmp_path, "sweep", path, "--jobs", "2"))
    assert [trial[2] for trial in trials_of(folder)] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert "trial 0 failed: 2 steps in a row gave no finite gradient" in output
    assert "trial-001  model.lr" not in output  # not run twice
    (shown,) = ended(start(tmp_path, "sweep", path, "--show"))
    assert "1e30" in shown.lower().replace("+", "")
    assert "make" not in shown
