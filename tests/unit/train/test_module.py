"""The module in a plain Trainer: the moving average, rates, logging, accumulation, other checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from harness import over_table, parsed, rows
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from modules import FIELDS, loader, module, train, trainer
from PIL import Image
from same import same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from cait.guards.nonfinite import NonFiniteGuard
from cait.train.callbacks import EMA
from cait.train.module import CaiTModule


def test_all_processes_score_the_statistics_of_the_first(monkeypatch):
    """Each process has counted its own images; the checkpoint has the average of process 0."""
    ema = EMA(decay=0.9)
    ema.average = nn.BatchNorm1d(2)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda buffer, _: buffer.fill_(7))
    ema.on_validation_start(SimpleNamespace(world_size=2), None)
    assert all((buffer == 7).all() for buffer in ema.average.buffers())


def test_the_average_is_scored_with_a_checkpoint_and_given_up_aloud(tmp_path, caplog):
    path = tmp_path / "x.ckpt"
    expected = train(module(lr=1e-2, warmup_epochs=0), path, callbacks=[EMA(0.5)]).callback_metrics
    other = train(module(), tmp_path / "other.ckpt", callbacks=[EMA(0.5)])
    for name in ("other.ckpt", "x.ckpt"):  # one callback scores both, each with its own average
        (figures,) = other.validate(module(), loader(), tmp_path / name, verbose=False)
    for name in ("val/loss", "val_ema/loss", "val_ema/acc1"):
        assert figures[name] == pytest.approx(expected[name].item(), rel=1e-6)
    assert figures["val/loss"] != pytest.approx(figures["val_ema/loss"], rel=1e-4)
    caplog.set_level("INFO")
    trainer(callbacks=[EMA(decay=None)]).fit(module(), loader(), ckpt_path=path)
    assert "moving average" in caplog.text


@over_table(__file__, "peaks")
def test_the_peak_rate_follows_the_global_batch(base, accumulate, peak):
    plain = {"accumulate_grad_batches": accumulate}
    by_epoch = {"callbacks": [GradientAccumulationScheduler({0: accumulate})]}
    for settings in (plain, by_epoch):
        fit = train(module(lr=0.01, lr_base_size=base, warmup_epochs=0), **settings)
        assert fit.lr_scheduler_configs[0].scheduler.base_lrs == pytest.approx([peak, peak])


def test_a_rate_that_a_tuner_sets_holds_for_the_run(tmp_path):
    net = module(lr=0.01, warmup_epochs=0, schedule="constant")
    Tuner(trainer()).lr_find(net, loader(240), num_training=40)
    rate = net.hparams.lr
    assert rate != 0.01
    fit = train(net, tmp_path / "x.ckpt")
    assert {group["lr"] for group in fit.optimizers[0].param_groups} == {rate}
    saved = parsed(tmp_path / "x.ckpt")["hyper_parameters"]
    assert saved["lr"] == rate


def test_every_nth_step_is_logged_with_its_own_figures(tmp_path):
    figures = []
    look = LambdaCallback(
        on_train_batch_end=lambda trainer, net, *_: figures.append(net.figures.tolist())
    )
    logger = CSVLogger(tmp_path, name="", version="")
    train(module(), logger=logger, log_every_n_steps=3, callbacks=[look])
    steps = [row for row in rows(tmp_path) if row["train/loss"]]
    assert [row["step"] for row in steps] == ["2", "5"]
    for row, expected in zip(steps, (figures[2], figures[5]), strict=True):
        assert [float(row["train/loss"]), float(row["train/acc1"])] == expected


def test_each_step_has_the_mean_gradient_of_its_batches():
    """Also the last of an epoch, which has two batches where the other has four."""
    net = module(drop_path_rate=0.0, lr=0.0, min_lr=0.0, warmup_lr=0.0)
    weights = [*net.model.parameters()]
    steps = []

    def look(*_):
        steps.append([weight.grad.clone() for weight in weights])

    train(net, callbacks=[LambdaCallback(on_before_optimizer_step=look)], accumulate_grad_batches=4)
    images, labels = next(iter(loader(batch=24)))
    for gradients, batch in zip(steps, (slice(16), slice(16, 24)), strict=True):
        loss = cross_entropy(net.model(images[batch]), labels[batch], label_smoothing=0.1)
        expected = [*torch.autograd.grad(loss, weights)]
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_settings_of_now_win_over_a_checkpoints(tmp_path):
    path = tmp_path / "x.ckpt"
    train(module(weight_decay=0.05, optimizer_args={"maximize": True}), path)
    now = module(weight_decay=0.3, optimizer_args={"betas": (0.8, 0.99)}, lr=7e-3)
    again = trainer(max_epochs=3)
    again.fit(now, loader(), ckpt_path=path)
    names = ("weight_decay", "maximize", "betas", "initial_lr")
    groups = [[group[name] for name in names] for group in again.optimizers[0].param_groups]
    assert groups == [[0.0, False, (0.8, 0.99), 7e-3], [0.3, False, (0.8, 0.99), 7e-3]]
    assert again.global_step == 18
    again.save_checkpoint(path)
    last = trainer(max_epochs=4)
    last.fit(module(optimizer_args={"maximize": True}), loader(), ckpt_path=path)
    assert last.optimizers[0].param_groups[0]["maximize"]


class Costs(MulticlassAccuracy):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.register_buffer("costs", torch.ones(num_classes))


def weighted():
    return nn.CrossEntropyLoss(torch.ones(7))


def test_a_checkpoint_is_read_with_other_metrics_and_another_loss(tmp_path):
    path = tmp_path / "x.ckpt"
    own = dict(metrics={"costs": f"{__name__}:Costs"}, loss=f"{__name__}:weighted")
    for before, now in ((own, {}), ({}, own)):
        trained, scored = module(**before), module(**now)
        train(trained, path)
        trainer().validate(scored, loader(4), path, verbose=False)
        assert same(scored.model.state_dict(), trained.model.state_dict())
        checkpoint = torch.load(path, weights_only=True)
        scored.on_load_checkpoint(checkpoint)
        assert checkpoint["state_dict"]._metadata  # the versions of its modules


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(3, 8, 8), torch.tensor(3)


def test_a_loader_without_a_length_needs_no_warmup_in_epochs(tmp_path):
    images = DataLoader(Endless(), 4)
    guard = NonFiniteGuard(tmp_path, limit=3)
    # and logs nothing
    fit = trainer(max_epochs=-1, max_steps=3, log_every_n_steps=0, callbacks=[guard])
    fit.fit(module(warmup_epochs=0), images)
    assert fit.global_step == 3


def test_a_network_that_no_data_describe_is_built_for_imagenet_with_the_loss_that_is_set():
    net = CaiTModule(fields=FIELDS | {"patch_size": 112})
    chosen = nn.CrossEntropyLoss(label_smoothing=0.5)
    net.loss = chosen
    images = TensorDataset(torch.randn(4, 3, 224, 224), torch.arange(4))
    trainer(max_steps=1).fit(net, DataLoader(images, 2))
    assert (net.hparams.img_size, net.model.head.out_features) == (224, 1000)
    assert net.loss is chosen


def test_a_module_reads_images_as_its_checkpoint_says():
    net = module()
    net.preprocessing = dict(img_size=8, background="black")
    transparent = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    black, white = (Image.new("RGB", (8, 8), color) for color in ("black", "white"))
    assert torch.equal(net.transform(transparent), net.transform(black))
    assert not torch.equal(net.transform(transparent), net.transform(white))
