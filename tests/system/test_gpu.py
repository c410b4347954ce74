"""What only a GPU can show; `make bench-gpu` runs it. It needs no package of the command line."""

import pytest
import torch
from class_folders import fill
from lightning.pytorch import Callback
from modules import images_in, module, trainer
from same import same

from cait.guards.nonfinite import NonFiniteGuard
from cait.train.callbacks import EMA, StepSeed
from cait.train.module import CaiTModule


class Flat(CaiTModule):
    """The module at one learning rate, without the schedule of lightning-bolts."""

    def configure_optimizers(self):  # type: ignore[override]
        return self.settings.build_optimizer(self.model, lr=1e-3)


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("noise"), {"one": 64, "other": 64}, size=80)


def train(root, folder, mode, *callbacks, **settings):
    """12 steps of a small network with everything on that a step passes."""
    torch.manual_seed(0)
    fields = {"depth": 3, "drop_path_mode": mode}
    net = module(Flat, img_size=64, num_classes=2, drop_path_rate=0.2, fields=fields)
    fit = trainer(
        accelerator="gpu",
        devices=1,
        callbacks=[*callbacks, StepSeed(0), NonFiniteGuard(folder, 10), EMA(0.9)],
        max_epochs=1,
        limit_train_batches=12,
        limit_val_batches=0,
        log_every_n_steps=100,
        use_distributed_sampler=False,
        **settings,
    )
    fit.fit(net, images_in(root, img_size=64, batch_size=8, num_workers=2, repeats=1))
    return net


class Strict(Callback):
    """From the third step on, whatever makes the host wait for the GPU raises."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_last_batch:
            torch.cuda.set_sync_debug_mode("default")

    def teardown(self, *_):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["mask", "skip"])
def test_a_step_does_not_wait_for_the_gpu(mode, root, tmp_path):
    train(root, tmp_path, mode, Strict(), precision="bf16-mixed", gradient_clip_val=1.0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32"])
def test_deterministic_runs_end_with_the_same_bits(precision, root, tmp_path):
    settings = dict(precision=precision, deterministic=True)
    one, other = (train(root, tmp_path, "skip", **settings).state_dict() for _ in range(2))
    assert same(one, other)
