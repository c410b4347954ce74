"""Parts of the user's own: a module and a data module, metrics, callbacks and loggers, from files beside logs/."""

import copy
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from harness import REPO, SMALL, checkpoint, rows, script, slow
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from modules import module, trainer

from cait import ckpt
from cait.cli import command, main
from cait.cli.run_plan import SyncBatchNorms
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.guards import refusals

MY_TRAIN = """
import torch
from cait import CaiTModule, ImageNetDataModule
from cait.cli import command, main

class MyModule(CaiTModule):
    def __init__(self, answer: int = 41, **settings):
        super().__init__(**settings)
        self.answer = answer
        self.save_hyperparameters("answer")

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/answer", torch.tensor(self.answer + self.current_epoch / 4))

class MyData(ImageNetDataModule):
    pass

if __name__ == "__main__":
    main(module=MyModule, data=MyData)
"""
MY_PARTS = """
from pathlib import Path
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from cait.errors import UserError

class Choosy(SingleDeviceStrategy):
    def check(self, precision, sync_batchnorm):
        if sync_batchnorm:
            raise UserError(f"no shared statistics in {precision}")

class MyLogger(Logger):
    def __init__(self, file: str = "mine.txt"):
        super().__init__()
        self.file = Path(file)
    name, version = "mine", 0
    def log_hyperparams(self, *_):
        pass
    def log_metrics(self, metrics, step=None):
        with self.file.open("a") as file:
            file.write(f"{step} {sorted(metrics)}\\n")

class MyCallback(Callback):
    def on_fit_end(self, trainer, pl_module):
        Path("ended").touch()

def hello(*_):
    print("hello")

def images(batch):
    return len(batch[1])

class Unsaved(Callback):
    def __init__(self, device: torch.device = torch.device("cpu")):
        pass

class Unused(torch.nn.Module):
    def __init__(self, img_size, num_classes):
        super().__init__()
        self.head, self.unused = torch.nn.Linear(3, num_classes), torch.nn.Linear(3, 3)

    def forward(self, images):
        return self.head(images.mean(dim=(2, 3)))

"""
BRIEF = [
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
]

Fit = Callable[..., None]


@pytest.fixture
def fit(tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """`cait fit` of two steps an epoch in this process, in a folder that has the two files."""
    (tmp_path / "my_train.py").write_text(MY_TRAIN)
    (tmp_path / "my_parts.py").write_text(MY_PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("CAIT_RUN", "")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("my_train", "my_parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def fit(*arguments: str, **classes: type) -> None:
        place = [
            f"--data.root={digits_root}",
            "--data.num_workers=0",
            "--trainer.devices=1",
            "--run_name=mine",
        ]
        main(["fit", *SMALL, *place, *BRIEF, *arguments], **classes)  # type: ignore[arg-type]

    return fit


def refused(capfd: pytest.CaptureFixture[str], act: Callable[[], None]) -> str:
    with pytest.raises(SystemExit) as stop:
        act()
    assert stop.value.code == 2
    [line] = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")
    ]
    return line


@pytest.mark.parametrize("processes", [1, *slow(2)])
def test_a_file_of_ones_own_has_every_verb(
    processes: int, fit: Fit, tmp_path: Path, digits_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Lightning starts a second process as `python my_train.py fit ...` too.
    (tmp_path / "images").symlink_to(digits_root / "val/0")
    arguments = [
        *SMALL,
        f"--data.root={digits_root}",
        "--data.num_workers=0",
        *BRIEF,
        f"--trainer.devices={processes}",
    ]
    arguments += [
        "--trainer.max_epochs=1",
        "--model.answer=42",
        "--ema.decay=0.9",
        "--run_name=mine",
    ]
    arguments += ["--best_metric=val/answer", "--best_mode=min"]
    sys.path.insert(0, str(tmp_path))  # which `fit` puts back
    my_train = importlib.import_module("my_train")
    classes = {"module": my_train.MyModule, "data": my_train.MyData}
    if processes == 1:
        main(["fit", *arguments], **classes)
    else:
        done = script("my_train.py", tmp_path, "fit", *arguments)
        assert done.returncode == 0, done.stderr
    mine = tmp_path / "logs/mine"
    assert checkpoint(mine)["hyper_parameters"]["answer"] == 42
    assert ckpt.class_names(checkpoint(mine)) == [str(digit) for digit in range(10)]
    assert "MyData" in checkpoint(mine)

    main(
        [
            "resume",
            "mine",
            "--trainer.max_epochs=2",
            "--trainer.devices=1",
            "--data.check_resume=false",
        ],
        **classes,
    )
    assert checkpoint(mine)["global_step"] == 4
    assert [row["val/answer"] for row in rows(mine) if row["val/answer"]] == ["42.0", "42.25"]
    # the smaller one
    assert torch.load(mine / "checkpoints/best.ckpt", weights_only=True)["epoch"] == 0
    capfd.readouterr()

    main(["eval", "mine", "--trainer.devices=1"], **classes)
    assert re.search(r"answer +│ +42\.0000 +│", capfd.readouterr().out)
    scores = json.loads((mine / "evaluation.json").read_text())
    assert scores["raw"]["answer"] == 42
    assert scores["ema"].keys() >= {"acc1", "acc5", "loss"}
    main(["predict", "mine", "images", "--output=predictions.csv"], **classes)
    assert Path("predictions.csv").is_file()
    if "export" in command.verbs():
        main(["export", "mine"], **classes)
        assert (mine / "export/timm/model.safetensors").is_file()
    # The run names its classes, so the command finds them without the script.
    capfd.readouterr()
    main(["eval", "mine"])
    assert re.search(r"answer +│ +42\.0000 +│", capfd.readouterr().out)


def test_own_loggers_and_callbacks_join_those_of_the_run(fit: Fit, tmp_path: Path) -> None:
    logger = ["--trainer.logger=my_parts.MyLogger", "--trainer.logger.file=figures.txt"]
    fit("--trainer.max_epochs=1", *logger, "--trainer.callbacks+=my_parts.MyCallback")
    mine = tmp_path / "logs/mine"
    assert [row["step"] for row in rows(mine)] == ["0", "1", "1"]
    assert (mine / "config.yaml").is_file()
    assert list(mine.glob("events.out.tfevents.*"))
    assert "['epoch', 'val/acc1'" in (tmp_path / "figures.txt").read_text()
    assert (tmp_path / "ended").is_file()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["mine"]


UNVALIDATED = ["--trainer.limit_val_batches=0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer.callbacks+=my_parts.NoSuch"], "my_parts.NoSuch"),
        (["--trainer.logger=nowhere.Logger"], "nowhere"),
        (["--trainer.logger=CometLogger"], "comet"),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/acc1"],
            "--trainer.callbacks EarlyStopping: the largest val/acc1 is the best, give it mode max",
        ),
        (
            [
                "--trainer.callbacks+=EarlyStopping",
                "--trainer.callbacks.monitor=val/acc1",
                *UNVALIDATED,
            ],
            "--trainer.callbacks EarlyStopping: --trainer.limit_val_batches 0 leaves no val/acc1",
        ),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"],
            "EarlyStopping watches val_loss: there is no such metric, only val/acc1, val/acc5, val/loss",
        ),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=best"],
            "--trainer.callbacks ModelCheckpoint: the run itself writes best.ckpt, give another filename",
        ),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_last=true"],
            "--trainer.callbacks ModelCheckpoint: the run itself writes last.ckpt, give another filename",
        ),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=s3://bucket/x"],
            "--trainer.callbacks ModelCheckpoint: checkpoints are written to a disk, not to s3://bucket/x",
        ),
        (
            ["--trainer.barebones=true"],
            "--trainer.barebones true: a run would not log and save; leave it out",
        ),
        (
            ["--trainer.default_root_dir=s3://bucket/runs"],
            "--trainer.default_root_dir s3://bucket/runs: a run is on a disk; copy it from there",
        ),
        (
            [*UNVALIDATED, "--best_metric=val/loss"],
            "--best_metric val/loss does nothing without validation",
        ),
        (
            ["--best_metric=val/answer"],
            "--best_metric val/answer: is the largest value best, or the smallest?",
        ),
        (
            ["--trainer.callbacks+=my_parts.Unsaved"],
            "config.yaml cannot hold device: Unable to serialize instance cpu",
        ),
        (
            ["--best_metric=val/f1"],
            "--best_metric val/f1: there is no such metric, only val/acc1, val/acc5, val/loss",
        ),
        (
            ["--best_metric=acc5"],
            "--best_metric acc5: there is no such metric, only val/acc1, val/acc5, val/loss",
        ),
    ],
)
def test_a_part_that_cannot_be_made_is_told(
    arguments: list[str], words: str, fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = refused(capfd, lambda: fit("--trainer.max_epochs=1", *arguments))
    assert words in told
    assert len(told) < 400
    assert not list(tmp_path.glob("logs/*"))
    assert not list(tmp_path.glob("s3*"))


TABLE = re.search(
    r"\n## Use Lightning's callbacks\n(.*?)\n## ",
    (REPO / "docs/extending.md").read_text(),
    re.DOTALL,
)[1]
ARGUMENTS = {
    "EarlyStopping": ["monitor=val/loss"],
    "GradientAccumulationScheduler": ["scheduling={0: 1, 1: 2}"],
    "LambdaCallback": ["on_train_end=my_parts.hello"],
    "ModelCheckpoint": ["monitor=val/loss"],
    "OnExceptionCheckpoint": ["dirpath=exception"],
    "ThroughputMonitor": ["batch_size_fn=my_parts.images"],
}
ABSTRACT = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"}
PAGE = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", TABLE, re.MULTILINE))
REFUSED = [name for name, here in PAGE.items() if here.startswith("refused")]


def test_lightnings_callbacks_are_refused_as_the_page_says(
    fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    of_pretrained = {"BackboneFinetuning"}  # a row that goes with this extra
    assert PAGE.keys() | of_pretrained == {*callbacks.__all__} - ABSTRACT
    for name in PAGE:
        bases = {base.__name__ for base in getattr(callbacks, name).__mro__}
        assert bool(bases & refusals.REPLACED.keys()) == (name in REFUSED), name
    told = refused(
        capfd,
        lambda: fit(
            "--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=1"
        ),
    )
    assert (
        "--trainer.callbacks StochasticWeightAveraging: no checkpoint would hold its average; take --ema.decay"
        in told
    )
    assert not (tmp_path / "logs").exists()


def test_the_other_callbacks_of_lightning_work_together_also_in_a_resumed_run(
    fit: Fit, tmp_path: Path
) -> None:
    given: list[str] = []
    others = [*REFUSED, "RichProgressBar", "RichModelSummary"]  # there is one bar, and one summary
    for name in (name for name in PAGE if name not in others):
        given += [f"--trainer.callbacks+={name}"]
        given += [f"--trainer.callbacks.{argument}" for argument in ARGUMENTS.get(name, [])]
    fit("--trainer.max_epochs=2", *given)
    main(["resume", "mine", "--trainer.max_epochs=3", "--data.check_resume=false"])
    assert {row["epoch"] for row in rows(tmp_path / "logs/mine")} >= {"0", "1", "2"}


def test_the_lowest_loss_is_the_best_and_a_resumed_run_may_go_by_another_metric(
    fit: Fit, tmp_path: Path
) -> None:
    def best() -> tuple[str, dict]:
        [(key, state)] = [
            item
            for item in checkpoint(mine)["callbacks"].items()
            if "best_model_score" in str(item)
        ]
        return key, state

    mine = tmp_path / "logs/mine"
    fit(
        "--trainer.max_epochs=3",
        "--best_metric=val/loss",
        "--model.lr=0.01",
        "--model.warmup_epochs=0",
    )
    assert best()[1]["best_model_score"] == min(
        float(row["val/loss"]) for row in rows(mine) if row["val/loss"]
    )
    main(
        ["resume", "mine", "--best_metric=train/acc1", "--best_mode=min", "--trainer.max_epochs=4"]
    )
    assert "'mode': 'min'" in best()[0]
    main(["resume", "mine", "--best_metric=val/acc1", "--trainer.max_epochs=5"])
    assert "'mode': 'max'" in best()[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_parts:Unused", "add --trainer.strategy ddp_find_unused_parameters_true"),
        ("timm/test_resnet", "leave out --trainer.sync_batchnorm on CPUs"),
    ],
)
def test_what_ddp_does_not_take_is_told(
    name: str,
    words: str,
    fit: Fit,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    net = [
        f"--model.name={name}",
        "--model.fields=null",
        "--model.drop_path_rate=null",
        "--trainer.max_epochs=1",
    ]
    ddp = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp", "--trainer.sync_batchnorm=true"]
    converted: list[Any] = []
    real = SyncBatchNorms.apply
    monkeypatch.setattr(
        SyncBatchNorms, "apply", lambda self, model: converted.append(model) or real(self, model)
    )
    try:
        assert words in refused(capfd, lambda: fit(*net, *ddp))
    finally:
        torch.distributed.destroy_process_group()
    assert converted


def test_a_strategy_of_ones_own_trains_what_its_check_takes(
    fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    choosy = ["--trainer.strategy.class_path=my_parts.Choosy", "--trainer.max_epochs=1"]
    shared = ["--trainer.sync_batchnorm=true", "--trainer.precision=bf16-mixed"]
    line = refused(capfd, lambda: fit(*choosy, *shared))
    assert "no shared statistics in bf16-mixed" in line
    assert not (tmp_path / "logs/mine").exists()
    fit(*choosy)
    assert checkpoint(tmp_path / "logs/mine")["global_step"] == 2


def test_a_batch_norm_that_is_shared_keeps_the_activation_of_timms() -> None:
    network = timm.create_model("test_efficientnet", num_classes=7).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = network(images)
        shared = SyncBatchNorms().apply(copy.deepcopy(network))
        assert any(isinstance(part, torch.nn.SyncBatchNorm) for part in shared.modules())
        assert torch.equal(SyncBatchNorms().revert(shared)(images), expected)
        # Lightning's
        assert not torch.allclose(
            TorchSyncBatchNorm().apply(copy.deepcopy(network))(images), expected
        )


def test_a_run_may_bring_slurms_plugin_and_leave_the_seed_to_lightning(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    for name, value in dict(
        JOB_ID="7", JOB_NAME="x", NTASKS="1", PROCID="0", LOCALID="0", NODEID="0"
    ).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    plugin = "--trainer.plugins=lightning.pytorch.plugins.environments.SLURMEnvironment"
    fit(
        "--trainer.max_epochs=1",
        "--seed_everything=true",
        plugin,
        "--trainer.plugins.auto_requeue=false",
    )
    main(["resume", "mine", "--trainer.max_epochs=2"])
    assert checkpoint(tmp_path / "logs/mine")["epoch"] == 1


class MyData(ImageNetDataModule):
    pass


@pytest.mark.parametrize(
    ("before", "after"), [(MyData, ImageNetDataModule), (ImageNetDataModule, MyData)]
)
def test_a_subclass_of_the_data_module_takes_up_the_others_part(
    before: type[ImageNetDataModule],
    after: type[ImageNetDataModule],
    tmp_path: Path,
    digits_root: Path,
) -> None:
    """Lightning looks for the class's own name, and would pass over another's part in silence."""
    common: dict = dict(root=str(digits_root), img_size=8, batch_size=64, num_workers=0)
    short: dict = dict(limit_train_batches=2, limit_val_batches=0)
    first = trainer(max_epochs=1, **short)
    first.fit(module(num_classes=10), datamodule=before(seed=1, **common))
    first.save_checkpoint(tmp_path / "x.ckpt")
    resumed: dict = dict(ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    same: dict = dict(datamodule=after(seed=1, **common), **resumed)
    with pytest.raises(
        UserError, match=f"class of the data module was {before.__name__}, is {after.__name__}"
    ):
        trainer(max_epochs=2, **short).fit(module(num_classes=10), **same)
    same["datamodule"].check_resume = False
    trainer(max_epochs=2, **short).fit(module(num_classes=10), **same)
