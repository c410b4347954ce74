"""Two processes are one run: they stop at the same step, and have the same numbers. And how processes are started."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pair
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from lightning.pytorch.strategies import DDPStrategy
from modules import loader, module, trainer
from torch import Tensor, nn
from torchmetrics import Metric

from cait import errors
from cait.cli import noise
from cait.errors import UserError
from cait.guards import refusals
from cait.guards.run_lock import RunLock
from cait.run import signals
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.run.program import Processes
from cait.train.metrics import EvalMetrics
from cait.train.module import CaiTModule

EPOCH = 16
"""Batches, and so steps, of an epoch."""


def fitted(folder: Path, *callbacks: Any, net: Any = None, **settings: Any) -> signals.Trainer:
    """A Trainer of two processes that has trained, at most 3 epochs."""
    fit = signals.Trainer(
        devices=2,
        strategy="ddp",
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[LastCheckpoint(folder), *callbacks],
        plugins=[DurableCheckpointIO()],
        **settings,
    )
    fit.callbacks.append(signals.StopTogether())
    fit.fit(net or module(warmup_epochs=0), loader(4 * EPOCH), loader(8))
    return fit


class StopsByItself(CaiTModule):
    """One process's own hook stops, after those of all callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2 and self.global_rank == 1:
            self.trainer.should_stop = True


def stops(hook: str, step: int) -> Callable[[int, Path], int]:
    """One process alone asks for a stop in a hook, once so many steps are done. Returns how many are done then."""

    def situation(rank: int, folder: Path) -> int:
        def ask(fit: Any, *_: Any) -> None:
            if rank == 1 and fit.global_step >= step and not fit.sanity_checking:
                fit.should_stop = True

        return fitted(folder, LambdaCallback(**{hook: ask})).global_step

    return situation


class Shares(Metric):
    """The share of right answers, of lists that torchmetrics gathers as they are."""

    hits: list[Tensor]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.add_state("hits", [], dist_reduce_fx=None)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.hits.append((logits.argmax(dim=1) == labels).float())

    def compute(self) -> Tensor:
        return torch.cat(self.hits).mean()


class Own(Metric):
    """Each process has a number of its own."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.number = float(os.environ.get("LOCAL_RANK", 0))

    def update(self, logits: Tensor, labels: Tensor) -> None:
        pass

    def compute(self) -> float:
        return self.number


METRICS = {
    "auroc": "torchmetrics.classification:MulticlassAUROC",
    "lists": "test_together:Shares",
    "own": "test_together:Own",
}


def counted(batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """What metrics say of these batches, twice."""
    metrics = EvalMetrics(3, METRICS)
    for _ in range(2):
        for logits, labels in batches:
            metrics.update(logits, labels)
        figures = metrics.compute("val")
    return {name: repr(round(float(value), 5)) for name, value in figures.items()}


def images(labels: list[int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(labels))
    return torch.randn(len(labels), 3, generator=generator), torch.tensor(labels)


SHARES: dict[str, tuple[list[Any], list[Any]]] = {
    "each has a class": ([images([0, 0])], [images([1, 2, 1])]),
    "one has no labelled image": ([images([0, 1, 2])], [images([-1, -1])]),
    "one has more batches": ([images([0, 1, 2]), images([1])], [images([2, 2])]),
    "a class has no image": ([images([0, 0])], [images([1, 1, 1])]),
    "the first has no labelled image": ([images([-1])], [images([0, 1, 2])]),
}
"""The batches that each of two processes validates."""


class Norms(nn.Module):
    """Statistics that follow the last batch."""

    def __init__(self, img_size: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.9)
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(images).mean(dim=(2, 3)))


def norms(rank: int, folder: Path) -> list[float]:
    """The statistics of each validation, some of them amid an accumulation."""
    seen: list[float] = []
    look = LambdaCallback(
        on_validation_end=lambda fit, net: seen.append(float(net.model.norm.running_mean.sum()))
    )
    own_images = LambdaCallback(
        on_train_batch_start=lambda fit, net, batch, index: batch[0].add_(rank)
    )
    net = module(name="test_together:Norms", fields=None, drop_path_rate=None, warmup_epochs=0)
    fitted(
        folder,
        own_images,
        look,
        net=net,
        accumulate_grad_batches=4,
        val_check_interval=3,
        max_steps=2,
    )
    return seen


def logged(rank: int, folder: Path) -> list[str]:
    """What Lightning warns of where the run logs, and where a callback does."""
    mine = LambdaCallback(on_validation_epoch_end=lambda fit, net: net.log("mine", float(rank)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(folder, mine, max_steps=2)
    lines = [str(warning.message) for warning in told]
    return [line.split("'")[1] for line in lines if "recommended to use `self.log" in line]


SITUATIONS: dict[str, Callable[[int, Path], Any]] = {
    "logged": logged,  # first: Lightning warns once
    "after a batch": stops("on_train_batch_end", 2),
    "after a validation": stops("on_validation_end", EPOCH),
    "after an epoch": stops("on_train_epoch_end", EPOCH),
    "when training starts": stops("on_train_start", 0),
    "when an epoch starts": stops("on_train_epoch_start", EPOCH),
    "the module's own hook": lambda rank, folder: (
        fitted(folder, net=StopsByItself(**module().hparams | {"warmup_epochs": 0})).global_step
    ),
    "early stopping": lambda rank, folder: (
        fitted(folder, EarlyStopping("val/loss", patience=1, min_delta=99.0)).global_step
    ),
    "norms": norms,
    **{
        name: lambda rank, folder, batches=batches: counted(batches[rank])
        for name, batches in SHARES.items()
    },
}
STOPS = {
    "after a batch": range(3, 2 + signals.STEPS + 2),
    "after a validation": [EPOCH],
    "after an epoch": [EPOCH],
    "when training starts": [0],
    "when an epoch starts": range(EPOCH + 1, EPOCH + signals.STEPS + 2),
    "the module's own hook": range(3, 2 + signals.STEPS + 2),
    "early stopping": [2 * EPOCH],
}
"""The steps after which all stop if one process asks, or Lightning has all agree."""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return pair.answers(__file__, tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("way", STOPS)
def test_what_one_process_asks_for_stops_both_at_the_same_step(
    way: str, together: dict[str, list[Any]]
) -> None:
    first, second = together[way]
    assert first == second
    assert first in STOPS[way]


@pytest.mark.parametrize("shares", SHARES)
def test_both_processes_have_the_metrics_of_all_images(
    shares: str, together: dict[str, list[Any]]
) -> None:
    first, second = SHARES[shares]
    whole = counted(first + second)
    assert together[shares] == [whole, whole]
    assert (whole["val/auroc"] == "nan") == (shares == "a class has no image")


def test_a_validation_amid_an_accumulation_takes_the_statistics_that_are_saved(
    together: dict[str, list[Any]],
) -> None:
    first, second = together["norms"]
    assert first == second
    assert len({*first}) > 2


def test_lightning_warns_of_what_a_callback_logs_for_one_process_alone(
    together: dict[str, list[Any]],
) -> None:
    assert together["logged"] == [["mine"], []]  # only the first process warns
    with warnings.catch_warnings(record=True) as told:
        noise.hide()
        warnings.warn(
            "It is recommended to use `self.log('mine', ..., sync_dist=True)`", stacklevel=1
        )
    assert told


# How the processes of a run were started

TORCHRUN = {"TORCHELASTIC_RUN_ID": "7", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
SRUN = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
SRUN |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}
SRUN |= {"SLURM_NODEID": "1", "SLURM_NODELIST": "node1"}
STARTED: dict[str, tuple[dict[str, str], tuple[int, int, bool]]] = {
    "by a shell": ({}, (1, 0, False)),
    "by Lightning": ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 1, True)),
    "by Lightning, the first": ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, (1, 0, True)),
    "by torchrun": (TORCHRUN, (4, 3, True)),
    "by torchrun, alone": (TORCHRUN | dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"), (1, 0, True)),
    "by srun": (SRUN, (2, 1, True)),
    "by sbatch": (SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (1, 0, False)),
    "by torchrun in SLURM": (SRUN | TORCHRUN, (4, 3, True)),
}
"""Variables; how many processes a launcher has started, which of the run's this is, and whether there are others."""


@pytest.mark.parametrize("way", STARTED)
def test_the_environment_says_how_a_process_was_started(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, expected = STARTED[way]
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    processes = Processes()
    assert (processes.started(), processes.rank(), processes.is_launched()) == expected
    errors.tell_once.cache_clear()
    errors.tell_once("said by the first")
    assert bool(capsys.readouterr().err) == (processes.rank() == 0)
    if processes.started() == 1:  # nobody else can be reached
        assert processes.from_first(lambda: "mine") == "mine"


def test_tasks_that_slurm_divides_over_nodes_by_itself_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (SRUN | {"SLURM_STEP_NUM_TASKS": "2"}).items():
        monkeypatch.setenv(name, value)
    Processes().cluster()
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(UserError, match="SLURM has 2 tasks, and --ntasks-per-node does not say"):
        Processes().cluster()


@pytest.mark.parametrize("tasks", ["1", "2"])
def test_lightning_does_not_ask_for_srun_in_a_shell_of_salloc(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    shell = {"SLURM_JOB_NAME": "interactive", "SLURM_STEP_NUM_TASKS": tasks, "SLURM_NTASKS": tasks}
    for name, value in (SRUN | shell).items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Processes().cluster()
    assert not told


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp_fork",
        "ddp_notebook",
        "ddp_spawn",
        "ddp_fork_find_unused_parameters_true",
        *(partial(DDPStrategy, start_method=method) for method in ("fork", "spawn", "forkserver")),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_processes_that_are_forked_or_spawned_are_refused(strategy: Any, devices: int) -> None:
    """The process that starts them does not train: it would not know that training has begun."""
    if not isinstance(strategy, str):
        strategy = strategy()
    fit = trainer(strategy=strategy, devices=devices)
    with pytest.raises(UserError, match="not DDPStrategy in processes that are forked or spawned"):
        refusals.check_strategy(fit, SimpleNamespace(strategy=strategy))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(plugins=[KubeflowEnvironment()], devices=1), "KubeflowEnvironment cannot start"),
        (dict(num_nodes=2, devices=1), "num_nodes 2: start it on every machine with torchrun"),
    ],
)
def test_processes_that_nobody_here_connects_are_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", NODE_RANK="1", WORLD_SIZE="2")
    for name, value in (variables | dict(RANK="0")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        refusals.check_processes(trainer(strategy="ddp", **settings), 1)


@pytest.mark.parametrize("is_forked", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
def test_only_a_start_that_trained_nothing_is_cleaned_up(
    is_forked: bool, has_begun: bool, tmp_path: Path
) -> None:
    """Whatever process trains, and whatever it has written."""
    run = tmp_path / "run"
    lock = RunLock(run)

    def train() -> None:
        (run / "metrics.csv").write_text("step\n0\n")
        if has_begun:
            lock.on_train_start()

    if not is_forked:
        train()
    elif child := os.fork():
        os.waitpid(child, 0)
    else:
        try:
            train()
        finally:
            os._exit(0)
    lock.roll_back()
    assert (run / "metrics.csv").exists() == has_begun
    assert not (run / ".starting").exists()
