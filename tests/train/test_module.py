"""Metrics, the moving average and the module's settings, against torch's and timm's own."""

import csv
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import slow
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from modules import FIELDS, Chosen, loader, module, precision_of, trainer
from PIL import Image
from same import same
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard
from cait.train.callbacks import EMA
from cait.train.module import CaiTModule


@pytest.mark.parametrize(
    "network", [{}, dict(name="timm/test_resnet", fields=None)], ids=["CaiT", "BatchNorm"]
)
def test_the_moving_average_is_timms(network: dict) -> None:
    ours = EMA(decay=0.9)
    reference: list[ModelEmaV3] = []
    steps = LambdaCallback(
        on_fit_start=lambda _, pl_module: reference.append(ModelEmaV3(pl_module.model, decay=0.9)),
        on_train_batch_end=lambda *args: (
            reference[0].update(args[1].model) if args[4] % 2 else None
        ),
    )
    net = module(lr=1e-2, warmup_epochs=0, **network)
    before = deepcopy(net.model.state_dict())
    trainer(callbacks=[ours, steps], accumulate_grad_batches=2).fit(net, loader(), loader(8))
    assert ours.average is not None
    average, raw = ours.average.state_dict(), net.model.state_dict()
    assert same(dict(average), dict(reference[0].module.state_dict()))
    for name in average:
        if raw[name].is_floating_point() and not torch.allclose(raw[name], before[name]):
            assert not torch.equal(average[name], before[name]), name
            assert not torch.equal(average[name], raw[name]), name


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_true_precisions_train_and_score_the_data_modules_batches(
    precision: str, digits_root: Path
) -> None:
    data = ImageNetDataModule(
        root=str(digits_root), img_size=8, batch_size=16, num_workers=0, repeats=1
    )
    net = module(num_classes=10, lr=1e-3, warmup_epochs=0)
    limits: dict = dict(limit_train_batches=3, limit_val_batches=2, max_epochs=1)
    rates: list[float] = []
    steps = LambdaCallback(
        on_before_optimizer_step=lambda *args: rates.append(args[2].param_groups[0]["lr"])
    )
    fit = trainer(precision=precision, callbacks=[steps, ema := EMA(decay=0.5)], **limits)
    fit.fit(net, data)
    assert ema.average is not None
    kept = torch.float64 if precision == "64-true" else torch.float32
    assert {parameter.dtype for parameter in ema.average.parameters()} == {kept}
    for name in ("train/loss", "val/loss", "val_ema/loss"):
        assert 1 < fit.callback_metrics[name] < 5, name
    assert fit.callback_metrics["lr"].item() == pytest.approx(rates[-1], rel=1e-6)
    (probabilities, *_) = fit.predict(net, data)
    torch.testing.assert_close(
        probabilities.sum(dim=1), torch.ones(len(probabilities)), rtol=0, atol=1e-5
    )


def test_all_processes_score_the_statistics_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has counted its own images; the checkpoint has the average of process 0."""
    ema = EMA(decay=0.9)
    ema.average = nn.BatchNorm1d(2)
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda tensor, source: tensor.fill_(7 + source)
    )
    ema.on_validation_start(SimpleNamespace(world_size=2), None)
    assert all((buffer == 7).all() for buffer in ema.average.buffers())


def test_the_average_is_scored_with_a_checkpoint_and_given_up_aloud(tmp_path, caplog) -> None:
    fit = trainer(callbacks=[EMA(decay=0.5)])
    fit.fit(net := module(lr=1e-2, warmup_epochs=0), loader(), loader(8))
    fit.save_checkpoint(tmp_path / "x.ckpt")
    other = trainer(max_epochs=1, callbacks=[EMA(decay=0.5)])
    other.fit(module(), loader(), loader(8))
    other.save_checkpoint(tmp_path / "other.ckpt")
    for name in ("other", "x"):  # one callback scores both, each with its own average
        (figures,) = other.validate(module(), loader(8), tmp_path / f"{name}.ckpt", verbose=False)
    expected = fit.callback_metrics
    for name in ("val/loss", "val_ema/loss", "val_ema/acc1"):
        assert figures[name] == pytest.approx(expected[name].item(), rel=1e-6)
    assert figures["val/loss"] != pytest.approx(figures["val_ema/loss"], rel=1e-4)
    caplog.set_level("INFO")
    trainer(max_epochs=3, callbacks=[EMA(decay=None)]).fit(
        net, loader(), loader(8), ckpt_path=tmp_path / "x.ckpt"
    )
    assert "the moving average in the checkpoint is given up" in caplog.text


@pytest.mark.parametrize(
    ("base", "accumulate", "peak"),
    [(None, 1, 0.01), (512, 1, 0.01 * 4 / 512), (8, 3, 0.015), (8, 99, 0.03)],
)
@pytest.mark.parametrize("by_epoch", [False, True])
def test_the_peak_rate_follows_the_global_batch(
    base: int | None, accumulate: int, peak: float, by_epoch: bool
) -> None:
    net = module(lr=0.01, lr_base_size=base, warmup_epochs=0)
    how = dict(accumulate_grad_batches=accumulate)
    fit = trainer(
        **dict(callbacks=[GradientAccumulationScheduler({0: accumulate})]) if by_epoch else how,
        max_epochs=1,
    )
    fit.fit(net, loader())
    assert fit.lr_scheduler_configs[0].scheduler.base_lrs == pytest.approx([peak, peak])


def test_a_rate_that_a_tuner_sets_holds_for_the_run(tmp_path: Path) -> None:
    net = module(lr=0.01, warmup_epochs=0, schedule="constant")
    fit = trainer()
    Tuner(fit).lr_find(net, loader(240), num_training=40)
    fit.fit(net, loader())
    assert net.hparams.lr != 0.01
    assert {group["lr"] for group in fit.optimizers[0].param_groups} == {net.hparams.lr}
    fit.save_checkpoint(tmp_path / "x.ckpt")
    assert (
        torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]["lr"]
        == net.hparams.lr
    )


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", ""])
def test_a_rate_that_is_set_later_is_refused(hook: str) -> None:
    sets = (
        LambdaCallback(**{hook: lambda trainer, net, *_: net.hparams.update(lr=0.5)})
        if hook
        else None
    )
    fit = trainer(callbacks=[sets or LearningRateFinder(num_training_steps=40)])
    with pytest.raises(UserError, match=r"hparams\.lr became .* and give it as --model\.lr"):
        fit.fit(module(lr=0.013), loader(240), loader(4))  # a rate that the finder does not try


def test_every_nth_step_is_logged_with_its_own_figures(tmp_path: Path) -> None:
    figures, logger = [], CSVLogger(tmp_path)
    steps = LambdaCallback(
        on_train_batch_end=lambda *args: figures.append(args[1].figures.tolist())
    )
    trainer(max_epochs=1, logger=logger, log_every_n_steps=5, callbacks=[steps]).fit(
        module(), loader(48)
    )
    with open(logger.experiment.metrics_file_path) as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [4, 9]
    assert [[float(row["train/loss"]), float(row["train/acc1"])] for row in rows] == [
        figures[4],
        figures[9],
    ]


def test_each_step_has_the_mean_gradient_of_its_batches() -> None:
    """Also the last of an epoch, which has two batches where the others have four."""
    net, batches = module(drop_path_rate=0.0, lr=0.0, min_lr=0.0, warmup_lr=0.0), loader()
    steps, alone = [], []

    def look(found: list[list[torch.Tensor]]) -> None:
        found.append(
            [weight.grad.clone() for weight in net.model.parameters() if weight.grad is not None]
        )

    watch = LambdaCallback(on_before_optimizer_step=lambda *_: look(steps))
    trainer(max_epochs=1, callbacks=[watch], accumulate_grad_batches=4).fit(net, batches)
    for images, labels in batches:
        net.zero_grad()
        torch.nn.functional.cross_entropy(net.model(images), labels, label_smoothing=0.1).backward()
        look(alone)
    for got, of_step in zip(steps, (alone[:4], alone[4:]), strict=True):
        for grad, *parts in zip(got, *of_step, strict=True):
            torch.testing.assert_close(grad, torch.stack(parts).mean(dim=0), rtol=1e-4, atol=1e-6)


def test_settings_of_now_win_over_a_checkpoints(tmp_path) -> None:
    first = trainer()
    first.fit(module(weight_decay=0.05, optimizer_args=dict(maximize=True)), loader())
    first.save_checkpoint(tmp_path / "x.ckpt")
    again = trainer(max_epochs=4)
    again.fit(
        module(weight_decay=0.3, optimizer_args=dict(betas=(0.8, 0.99)), lr=7e-3),
        loader(),
        ckpt_path=tmp_path / "x.ckpt",
    )
    groups = again.optimizers[0].param_groups
    assert [(group["weight_decay"], group["maximize"]) for group in groups] == [
        (0.0, False),
        (0.3, False),
    ]
    assert groups[0]["betas"] == (0.8, 0.99)
    assert groups[0]["initial_lr"] == 7e-3
    assert again.global_step == 24
    last = trainer(max_epochs=5)
    again.save_checkpoint(tmp_path / "y.ckpt")
    last.fit(module(optimizer_args=dict(maximize=True)), loader(), ckpt_path=tmp_path / "y.ckpt")
    assert last.optimizers[0].param_groups[0]["maximize"]


def test_another_optimizers_checkpoint_is_refused(tmp_path) -> None:
    first = trainer(max_epochs=1)
    first.fit(module(), loader())
    first.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    plain, decayed = checkpoint["optimizer_states"][0]["param_groups"]
    one = plain | {"params": plain["params"] + decayed["params"]}
    checkpoint["optimizer_states"][0]["param_groups"] = [one]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="the checkpoint's optimizer has groups of"):
        trainer().fit(module(), loader(), ckpt_path=tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="another network"):
        trainer().fit(module(fields=FIELDS | {"depth": 3}), loader(), ckpt_path=tmp_path / "x.ckpt")
    with pytest.raises(
        UserError, match="the checkpoint's optimizer is adamw, this one sgd; start a new run"
    ):
        trainer().fit(module(optimizer="sgd"), loader(), ckpt_path=tmp_path / "x.ckpt")


class Costs(MulticlassAccuracy):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("costs", torch.ones(num_classes))


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(torch.ones(7))


def test_a_checkpoint_is_read_with_other_metrics_and_another_loss(tmp_path) -> None:
    parts = dict(metrics={"costs": f"{__name__}:Costs"}, loss=f"{__name__}:weighted")
    for before, now in ((parts, {}), ({}, parts)):
        trained, scored = module(**before), module(**now)
        (fit := trainer(max_epochs=1)).fit(trained, loader())
        fit.save_checkpoint(tmp_path / "x.ckpt")
        trainer().validate(scored, loader(4), tmp_path / "x.ckpt", verbose=False)
        assert same(dict(scored.model.state_dict()), dict(trained.model.state_dict()))
        scored.on_load_checkpoint(read := torch.load(tmp_path / "x.ckpt", weights_only=True))
        assert read["state_dict"]._metadata  # the versions of its modules


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.randn(3, 8, 8), torch.tensor(3)


def test_a_loader_without_a_length_needs_no_warmup_in_epochs(tmp_path) -> None:
    guard = NonFiniteGuard(tmp_path, limit=3)
    # and logs nothing
    settings: dict = dict(max_epochs=-1, max_steps=3, log_every_n_steps=0, callbacks=[guard])
    with pytest.raises(UserError, match="the warm-up counts epochs, and the loader has no length"):
        trainer(**settings).fit(module(), DataLoader(Endless(), 4))
    with pytest.raises(UserError, match="max_epochs"):
        trainer(max_epochs=-1).fit(module(), loader())
    (fit := trainer(**settings)).fit(module(warmup_epochs=0), DataLoader(Endless(), 4))
    assert fit.global_step == 3


CLIPS: dict[str, Any] = {
    "norm": (0.1, torch.nn.utils.clip_grad_norm_),
    "value": (1e-4, torch.nn.utils.clip_grad_value_),
}


@pytest.mark.parametrize("algorithm", CLIPS)
@pytest.mark.parametrize("optimizer", ["fused AdamW", *slow("AdamW", "SGD")])
@pytest.mark.parametrize("precision", ["32", "16-mixed", "bf16-mixed", *slow("bf16-true")])
def test_gradients_are_clipped_in_every_precision(
    precision: str, optimizer: str, algorithm: str, tmp_path: Path
) -> None:
    """As the optimizer gets them, they are those that torch's own function clips."""
    got: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    limit, clip = CLIPS[algorithm]

    class Module(Chosen):
        def configure_gradient_clipping(
            self, optimizer: torch.optim.Optimizer, **settings: object
        ) -> None:
            scale = self.gradient_scale(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
            for copied, p in zip(copies, parameters, strict=True):
                copied.grad = p.grad / scale
            clip(copies, limit)
            super().configure_gradient_clipping(optimizer, **settings)
            got.extend((p.grad / scale).clone() for p in parameters)
            expected.extend(p.grad for p in copies)

    net = Module(optimizer, img_size=8, num_classes=7, fields=FIELDS, lr_base_size=None)
    settings: dict = dict(
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
        max_epochs=1,
        callbacks=[NonFiniteGuard(tmp_path, 10)],
    )
    trainer(**settings, **precision_of(precision)).fit(net, loader(8))
    assert got
    for ours, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(
            ours,
            reference,
            rtol=1e-2 if precision == "bf16-true" else 1e-5,
            atol=1e-8,
            equal_nan=True,
        )


def test_a_subclass_keeps_the_loss_of_its_own_when_the_network_is_built_for_the_data() -> None:
    class Own(CaiTModule):
        def __init__(self) -> None:
            super().__init__(
                num_classes=10,
                fields={"embed_dim": 24, "depth": 1, "num_heads": 2, "patch_size": 112},
            )
            self.loss = torch.nn.CrossEntropyLoss(label_smoothing=0.5)

    own = Own()
    chosen = own.loss
    images = torch.utils.data.TensorDataset(torch.randn(4, 3, 224, 224), torch.arange(4))
    trainer(max_steps=1).fit(own, DataLoader(images, 2))
    assert own.loss is chosen


def test_a_module_reads_images_as_its_checkpoint_says() -> None:
    net = module()
    net.preprocessing = {"img_size": 8, "background": "black"}
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    behind = Image.alpha_composite(Image.new("RGBA", (8, 8), "black"), clear).convert("RGB")
    assert torch.equal(net.transform(clear), net.transform(behind))
    assert not torch.equal(net.transform(clear), net.transform(Image.new("RGB", (8, 8), "white")))
