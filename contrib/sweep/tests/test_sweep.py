"""Sweeps: the file of a space, the trials it leads to, and sweeps that are stopped, killed and shared."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import DEVICES, LIMIT, REPO, link_digits, start
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from cait.errors import UserError
from cait.run.program import Program
from contrib.sweep import trials
from contrib.sweep.search_space import SearchSpace

TINY: dict[str, Any] = {
    "config": str(REPO / "configs/digits.yaml"),
    "settings": {
        "trainer": {
            "max_epochs": 2,
            "limit_train_batches": 4,
            "limit_val_batches": 1,
            "log_every_n_steps": 1,
        },
        "model.fields": {"embed_dim": 32, "depth": 1},
        "data": {"batch_size": 64, "num_workers": 0},
        "save_every_n_steps": 2,
        **dict(argument.removeprefix("--").split("=") for argument in DEVICES),
    },
    "space": {"model.lr": {"low": 1e-4, "high": 0.03, "log": True}, "data.mixup": [0.0, 0.2, 0.8]},
    "name": "tiny",
    "trials": 2,
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "space.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in (TINY | changes).items() if value is not None})
    )
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trails": 3}, "trails cannot be used: it is 3"),
        (
            {"space": {"model.lr": {"low": 1, "hihg": 2}}},
            "space.model.lr must be a list, or {low: A, high: B}",
        ),
        ({"space": {"model.lr": {"low": 2, "high": 1}}}, "`low <= high`"),
        ({"space": None}, "space cannot be used: it is missing"),
        ({"sampler": "tpr"}, "sampler must be one of tpe, random, grid, got tpr"),
        ({"sampler": "grid"}, "space.model.lr is a range; a grid needs a list of values"),
        (
            {"pruner": {"name": "median", "warmup": 1}},
            "pruner: MedianPruner.__init__() got an unexpected keyword",
        ),
        (
            {"sampler": {"name": "random", "seed": 3}},
            "got multiple values for keyword argument 'seed'",
        ),
        ({"sampler": {"name": ["tpe"]}}, "sampler must be one of tpe, random, grid, got ['tpe']"),
        (
            {"sampler": {"name": "tpe", "n_startup_trials": "5"}},
            "no trial can be drawn: '<' not supported",
        ),
        (
            {"space": {"model.lr": {"low": 0.1, "high": float("nan")}}},
            "no trial can be drawn: Range exceeds",
        ),
        ({"settings": {"best_metric": None}}, "settings.best_metric cannot be used: it is missing"),
        ({"trials": None}, "trials must be at least 1"),
        ({"name": ".."}, "a run's name has letters, digits"),
    ],
)
def test_a_bad_space_is_told_in_a_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        SearchSpace(path)
    assert str(error.value).startswith((f"{path}: ", "a run's name "))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_values_reach_the_command_line_as_fit_takes_them(tmp_path: Path) -> None:
    shipped = SearchSpace(Path(__file__).parents[1] / "digits.yaml")
    assert (shipped.trials, shipped.name, len(shipped.axes)) == (12, "sweep-digits", 4)
    search = SearchSpace(
        write(
            tmp_path, sampler="grid", trials=None, space={"a": [None, [1, 0.5]], "b": ["x", True]}
        )
    )
    assert (search.trials, search.is_max) == (4, True)
    assert search.grid[1] == {"a": "null", "b": "true"}
    assert {"--a=[1, 0.5]", "--b=x", "--model.fields.depth=1", "--best_mode=max"} <= {
        *search.arguments(search.grid[2])
    }
    assert not SearchSpace(write(tmp_path, metric="val/loss")).is_max


def test_settings_and_space_append_to_one_list(tmp_path: Path) -> None:
    appended = {"trainer": {"callbacks+": ["own.A"]}}
    space = SearchSpace(write(tmp_path, settings=appended, space={"trainer.callbacks+": ["own.B"]}))
    words = space.arguments({"trainer.callbacks+": "own.B"})
    assert [word for word in words if "callbacks" in word] == [
        '--trainer.callbacks+=["own.A"]',
        "--trainer.callbacks+=own.B",
    ]


def test_processes_share_a_sweep_and_take_over_what_another_left(tmp_path: Path) -> None:
    space = SearchSpace(write(tmp_path, sampler="random"))
    one, other = (trials.Sweep(space, tmp_path, Program()) for _ in range(2))
    first, second = one.next_trial(), other.next_trial()
    assert (first.number, second.number) == (0, 1)
    assert first.params != second.params
    assert one.next_trial() is None  # there are two, and it still holds the first
    one._held.release()  # as when its process ends
    other.study.tell(second, 1.0)
    again = other.next_trial()
    assert (again.number, again.params) == (0, first.params)
    other.study.tell(again, 2.0)
    assert other.next_trial() is None
    assert [trial.number for trial in one.ranked()] == [0, 1]


def test_a_sweep_of_another_space_is_refused_once_it_has_begun(tmp_path: Path) -> None:
    def sweep(**changes: Any) -> trials.Sweep:
        return trials.Sweep(SearchSpace(write(tmp_path, **changes)), tmp_path, Program())

    sweep().next_trial()
    assert len(sweep(trials=5).study.trials) == 1
    assert len(sweep(seed=4).study.trials) == 0  # nothing had begun
    (tmp_path / "trial-000/config.yaml").touch()
    with pytest.raises(UserError, match=r"has trials of another space than .*space\.yaml"):
        sweep()


def test_a_folder_that_has_gone_is_not_made_again(tmp_path: Path) -> None:
    (folder := tmp_path / "sweep").mkdir()
    sweep = trials.Sweep(SearchSpace(write(tmp_path)), folder, Program())
    folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="was moved or removed"):
        sweep.next_trial()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("trainer.callbacks", "os.system"), ("data.mixup", "0.3"), ("model.lr", 1.0)],
)
def test_a_study_of_somebody_else_gives_a_trial_no_setting_beyond_the_space(
    name: str, value: Any, tmp_path: Path
) -> None:
    sweep = trials.Sweep(SearchSpace(write(tmp_path)), tmp_path, Program())
    is_number = isinstance(value, float)
    axis = FloatDistribution(value, value) if is_number else CategoricalDistribution([value])
    trial = sweep.study.ask({name: axis})
    with pytest.raises(UserError, match=f"trial 0 has {name} .* which .*space.yaml does not have"):
        sweep._train(trial)


def test_a_trial_waits_for_the_race_that_a_killed_sweep_has_left(tmp_path: Path) -> None:
    sweep = trials.Sweep(SearchSpace(write(tmp_path)), tmp_path, Program())
    trial = sweep.next_trial()
    (inner := tmp_path / "trial-000/scratch").mkdir()
    waited: list[str] = []

    @contextmanager
    def waits(path: Path) -> Iterator[None]:
        waited.append(str(path.relative_to(tmp_path)))
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "file_lock", waits)
        patch.setattr(trials, "train_run", lambda *_, **__: None)
        (inner / ".lock").touch()
        (inner.parent / ".lock").touch()
        sweep._train(trial)
    assert waited == ["trial-000/.lock", "trial-000/scratch/.lock", "trial-000/.lock"]


def test_a_trial_is_stopped_at_the_validation_at_which_optuna_stops_it(tmp_path: Path) -> None:
    space = SearchSpace(write(tmp_path, pruner={"name": "median", "n_startup_trials": 1}))
    for number, values in enumerate(([10, 20, 30], [11, 19, 40])):
        sweep = trials.Sweep(space, tmp_path, Program())
        trial = sweep.next_trial()
        assert not sweep.prunes(trial)  # its run has logged nothing
        rows = "".join(f"{epoch},{4 * epoch + 3},{value}\n" for epoch, value in enumerate(values))
        (trials.trial_folder(tmp_path, number) / "metrics.csv").write_text(
            f"epoch,step,val/acc1\n{rows}"
        )
        assert sweep.prunes(trial) == bool(number)
        assert sweep.study.trials[number].intermediate_values == dict(
            enumerate(values[: 2 if number else 3])
        )
        sweep.study.tell(trial, 30)


def until(condition: Any, job: subprocess.Popen) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def ended(*jobs: subprocess.Popen) -> list[str]:
    outputs = [job.communicate(timeout=3 * LIMIT)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), outputs
    return outputs


@pytest.mark.slow
def test_a_sweep_is_stopped_and_goes_on(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    path, folder = str(write(tmp_path, trials=1, pruner="median")), tmp_path / "logs/tiny"
    job = start(tmp_path, "sweep", path)
    until((folder / "trial-000/checkpoints/last.ckpt").exists, job)
    os.kill(job.pid, signal.SIGINT)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 130, output
    assert "The trials have saved; the same command continues them" in output
    (output,) = ended(start(tmp_path, "sweep", path))
    (trial,) = trials.Sweep(SearchSpace(Path(path)), folder, Program()).ranked()
    assert (trial.number, trial.state, trial.params.keys()) == (
        0,
        TrialState.COMPLETE,
        {"model.lr", "data.mixup"},
    )
    assert (len(trial.intermediate_values), max(trial.intermediate_values.values())) == (
        2,
        trial.value,
    )
    assert re.search(
        rf"^trial-000  complete  val/acc1 {trial.value:.5g}  data.mixup=", output, re.M
    )
    assert "cait eval logs/tiny/trial-000" in output


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_two_processes_share_it(
    tmp_path: Path, digits_root: Path
) -> None:
    """The first trial's rate is infinite in effect; the second trains on without its sweep."""
    link_digits(tmp_path, digits_root)
    settings = TINY["settings"] | {"max_nonfinite_steps": 2}
    space = {"model.lr": [1e30, 1e-3, 2e-3, 3e-3]}
    path = str(write(tmp_path, settings=settings, space=space, sampler="grid", trials=None))
    folder = tmp_path / "logs/tiny"
    job = start(tmp_path, "sweep", path)
    until((folder / "trial-001/checkpoints/last.ckpt").exists, job)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    outputs = ended(*(start(tmp_path, "sweep", path) for _ in range(2)))
    trained = sorted(
        name for output in outputs for name in re.findall(r"^(trial-\d+)  model", output, re.M)
    )
    assert trained == ["trial-001", "trial-002", "trial-003"]
    (shown,) = ended(start(tmp_path, "sweep", path))
    sweep = trials.Sweep(SearchSpace(Path(path)), folder, Program())
    states = [(trial.number, trial.state.name) for trial in sweep.study.trials]
    assert states == [(0, "FAIL"), *((number, "COMPLETE") for number in (1, 2, 3))]
    assert re.search(r"^trial-000  fail .* 2 steps in a row gave no finite gradient", shown, re.M)
