"""Callbacks, loggers and strategies, Lightning's and the user's own; what is refused is in golden/own.yaml."""

import copy
import os
import re

import pytest
import timm
import torch
from harness import REPO, SMALL, beside, checkpoint, rows, works
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from runs import SLURM

from cait.cli.run_plan import SyncBatchNorms
from cait.guards import refusals

MY_PARTS = """
from pathlib import Path
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy

class MyStrategy(SingleDeviceStrategy):
    def check(self, precision, sync_batchnorm):
        Path("checked").touch()

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

class Unused(torch.nn.Module):
    def __init__(self, img_size, num_classes):
        super().__init__()
        self.head, self.unused = torch.nn.Linear(3, num_classes), torch.nn.Linear(3, 3)

    def forward(self, images):
        return self.head(images.mean(dim=(2, 3)))
"""
BRIEF = [
    *SMALL,
    "--data.num_workers=0",
    "--trainer.devices=1",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--run_name=mine",
]


@pytest.fixture
def run(cait, tmp_path):
    """The folder of the run that a test trains, beside the parts."""
    (tmp_path / "my_parts.py").write_text(MY_PARTS)
    return tmp_path / "logs/mine"


def test_own_loggers_and_callbacks_join_those_of_the_run(run, cait, tmp_path):
    logger = ["--trainer.logger=my_parts.MyLogger", "--trainer.logger.file=figures.txt"]
    works(cait("fit", *BRIEF, *logger, "--trainer.callbacks+=my_parts.MyCallback"))
    assert [row["step"] for row in rows(run)] == ["0", "1", "1"]
    assert [*run.glob("events.out.tfevents.*")]
    assert "['epoch', 'val/acc1'" in (tmp_path / "figures.txt").read_text()
    assert (tmp_path / "ended").is_file()
    assert [*run.parent.iterdir()] == [run]


def test_a_strategy_of_ones_own_trains(run, cait, tmp_path):
    works(cait("fit", *BRIEF, "--trainer.strategy.class_path=my_parts.MyStrategy"))
    assert (tmp_path / "checked").exists()
    assert checkpoint(run)["global_step"] == 2


PAGE = (REPO / "docs/extending.md").read_text()
[SECTION] = re.findall(r"\n## Use Lightning's callbacks\n(.*?)\n## ", PAGE, re.DOTALL)
CALLBACKS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", SECTION, re.MULTILINE))
"""What the page says of each."""
REFUSED = [name for name, text in CALLBACKS.items() if text.startswith("refused")]
TABLE = beside(__file__)


def test_the_page_names_all_callbacks_of_lightning_and_those_that_are_refused():
    of_pretrained = {"BackboneFinetuning"}  # a row that goes with this extra
    assert CALLBACKS.keys() | of_pretrained == {*callbacks.__all__} - {*TABLE["abstract"]}
    for name in CALLBACKS:
        bases = {base.__name__ for base in getattr(callbacks, name).__mro__}
        assert bool(bases & refusals.REPLACED.keys()) == (name in REFUSED), name


def test_the_other_callbacks_of_lightning_work_together_also_in_a_resumed_run(run, cait):
    left_out = [
        *REFUSED,
        "RichProgressBar",
        "RichModelSummary",
    ]  # there is one bar, and one summary
    words = []
    for name in CALLBACKS:
        if name not in left_out:
            words.append(f"--trainer.callbacks+={name}")
        if name in TABLE["arguments"]:
            words.append(f"--trainer.callbacks.{TABLE['arguments'][name]}")
    works(cait("fit", *BRIEF, *words, "--trainer.max_epochs=2"))
    works(cait("resume", "mine", "--trainer.max_epochs=3", "--data.check_resume=false"))
    assert {row["epoch"] for row in rows(run)} >= {"0", "1", "2"}


def best_of(run):
    """The key and the state of what keeps best.ckpt."""
    states = checkpoint(run)["callbacks"]
    [key] = [key for key, state in states.items() if "best_model_score" in state]
    return key, states[key]


def test_the_lowest_loss_is_the_best_and_a_resumed_run_may_go_by_another_metric(run, cait):
    steep = ["--model.lr=0.01", "--model.warmup_epochs=0", "--trainer.max_epochs=3"]
    works(cait("fit", *BRIEF, *steep, "--best_metric=val/loss"))
    losses = [float(row["val/loss"]) for row in rows(run) if row["val/loss"]]
    assert best_of(run)[1]["best_model_score"] == min(losses)
    other = ["--best_metric=train/acc1", "--best_mode=min"]
    works(cait("resume", "mine", *other, "--trainer.max_epochs=4"))
    assert "'mode': 'min'" in best_of(run)[0]
    works(cait("resume", "mine", "--best_metric=val/acc1", "--trainer.max_epochs=5"))
    assert "'mode': 'max'" in best_of(run)[0]


@pytest.mark.parametrize(
    ("network", "setting"),
    [
        ("my_parts:Unused", "--trainer.strategy ddp_find_unused_parameters_true"),
        ("timm/test_resnet", "--trainer.sync_batchnorm"),
    ],
)
def test_what_ddp_does_not_take_is_told(network, setting, run, cait, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    own = [f"--model.name={network}", "--model.fields=null", "--model.drop_path_rate=null"]
    ddp = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp", "--trainer.sync_batchnorm=true"]
    converted = []
    convert = SyncBatchNorms.apply
    monkeypatch.setattr(
        SyncBatchNorms, "apply", lambda self, net: converted.append(net) or convert(self, net)
    )
    try:
        done = cait("fit", *BRIEF, *own, *ddp)
    finally:
        torch.distributed.destroy_process_group()
    assert done.returncode == 2
    assert setting in done.stderr.splitlines()[-1]
    assert converted


def test_a_batch_norm_that_is_shared_keeps_the_activation_of_timms():
    network = timm.create_model("test_efficientnet", num_classes=7).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        logits = network(images)
        shared = SyncBatchNorms().apply(copy.deepcopy(network))
        assert any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in shared.modules())
        assert torch.equal(SyncBatchNorms().revert(shared)(images), logits)
        lightnings = TorchSyncBatchNorm().apply(copy.deepcopy(network))
        assert not torch.allclose(lightnings(images), logits)


def test_a_run_may_bring_slurms_plugin_and_leave_the_seed_to_lightning(run, cait, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    os.environ.update(SLURM)
    plugin = "--trainer.plugins=lightning.pytorch.plugins.environments.SLURMEnvironment"
    queue = [plugin, "--trainer.plugins.auto_requeue=false"]
    works(cait("fit", *BRIEF, "--seed_everything=true", *queue))
    works(cait("resume", "mine", "--trainer.max_epochs=2"))
    assert checkpoint(run)["epoch"] == 1
