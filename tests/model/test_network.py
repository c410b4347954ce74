"""Networks in CaiT's place: built by name, with their optional parts used, or refused in one line."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch.callbacks import LambdaCallback
from modules import loader, module, trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric
from torchmetrics.classification import MulticlassF1Score
from torture import same

import cait
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.model import network
from cait.model.weights import classifier_keys, load_weights
from cait.train.ema import EMA
from cait.train.metrics import best_mode
from cait.train.step_seed import StepSeed

IMAGES = torch.randn(3, 3, 32, 32)


class Plain(nn.Module):
    """A network with none of the optional parts."""

    def __init__(self, img_size: int, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, width, 3)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))


class Dropping(Plain):
    pass


def plain_or_dropping(img_size: int, num_classes: int, drop_path_rate: float = 0.0, **fields: int) -> Plain:
    """Take stochastic depth, as few networks do."""
    return (Dropping if drop_path_rate == 0.1 else Plain)(img_size, num_classes, **fields)


HERE = f"{__name__}:Plain"


@pytest.mark.parametrize(
    ("name", "fields", "kind", "head"),
    [
        ("xxs24", dict(depth=1), "CaiT", "head"),
        ("xxs24", dict(depth=1, distillation_token=True), "CaiT", "head head_dist"),
        ("timm/test_vit", {}, "VisionTransformer", "head"),
        ("timm/test_convnext", {}, "ConvNeXt", "head.fc"),
        ("timm/test_resnet", {}, "ResNet", "fc"),
        ("timm/deit_tiny_distilled_patch16_224", dict(depth=1), "VisionTransformerDistilled", "head head_dist"),
        (HERE, dict(width=5), "Plain", "head"),
        (f"{__name__}:plain_or_dropping", dict(width=5), "Dropping", "head"),
    ],
)
def test_a_name_becomes_a_network_of_the_size(name: str, fields: dict, kind: str, head: str) -> None:
    built = network.build(name, 32, 7, 0.1, **fields)
    assert type(built).__name__ == kind
    assert built(IMAGES).shape == (3, 7)
    expected = [f"{layer}.{part}" for layer in head.split() for part in ("weight", "bias")]
    assert classifier_keys(built) == expected


def layouts(net: nn.Module, images: Tensor) -> set[bool]:
    """Whether the outputs of its convolutions are in channels_last; one of a single pixel is in both formats."""
    found: set[bool] = set()

    def look(_: nn.Module, __: object, output: Tensor) -> None:
        if output.shape[-1] > 1:
            found.add(output.is_contiguous(memory_format=torch.channels_last))

    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(look)
    net.eval()(images)
    return found


@pytest.mark.parametrize(
    ("name", "channels_last", "fields", "expected"),
    [
        ("timm/test_resnet", "auto", {}, {True}),
        ("timm/test_efficientnet", "auto", {}, {True}),
        ("timm/test_efficientnet", "auto", dict(in_chans=1), {True}),
        ("timm/test_efficientnet", False, {}, {False}),
        ("timm/test_vit", "auto", {}, {False}),
        ("timm/cait_xxs24_224", "auto", dict(depth=1), {False}),
        ("xxs24", "auto", dict(depth=1), {False}),
        (HERE, "auto", {}, {False}),
        (HERE, True, {}, {True}),
    ],
)
def test_networks_of_convolutions_run_in_channels_last(
    name: str, channels_last: bool | str, fields: dict, expected: set[bool]
) -> None:
    built = network.NetworkSettings(name, 32, 7, fields=fields, channels_last=channels_last).build()
    settings = dict(name=name, img_size=32, num_classes=7, drop_path_rate=None, fields=fields)
    again = network.rebuild(settings | {"channels_last": channels_last})
    other = network.build(name, 32, 7, channels_last=False, **fields).eval()
    images = torch.randn(2, fields.get("in_chans", 3), 32, 32)
    for net in (built, again):
        assert layouts(net, images) == expected
        other.load_state_dict(net.state_dict())
        torch.testing.assert_close(net(images), other(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("relaid", [False, True])
def test_a_run_in_channels_last_resumes_to_the_bit_whatever_format_was_saved(relaid: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"

    def run(epochs: int, start: Path | None = None) -> dict[str, Any]:
        torch.manual_seed(0)
        net = module(name="timm/test_efficientnet", fields=None, lr=1e-2, warmup_epochs=0, schedule="constant")
        fit = trainer(max_epochs=epochs, callbacks=[StepSeed(0), EMA(0.9)])
        fit.fit(net, loader(), ckpt_path=start)
        fit.save_checkpoint(path)
        return torch.load(path, weights_only=True)

    whole, cut = run(2), run(1)
    weight = "model.conv_stem.weight"
    assert not cut["state_dict"][weight].is_contiguous()
    if relaid:
        torch.save(tree_map_only(Tensor, Tensor.contiguous, cut), path)
    resumed = run(2, path)
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert same(resumed[part], whole[part]), part
    assert not torch.equal(cut["state_dict"][weight], whole["state_dict"][weight])


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (("xxs25", 32, 7), {}, "unknown model 'xxs25'; did you mean xxs24"),
        (("resnet50", 32, 7), {}, "unknown model 'resnet50'; choose one of .* or timm/<name>"),
        (("timm/vit_tiny_patch16_225", 32, 7), {}, "timm has no model .*; did you mean vit_tiny_patch16_224"),
        (("timm/test_vit", 32, 7), dict(dept=3), "timm/test_vit: .*dept"),
        (("timm/test_vit", 32, 7), dict(checkpoint_path="x"), "takes no field checkpoint_path"),
        (("timm/hf-hub:someone/something", 32, 7), {}, "timm has no model 'hf-hub:someone/something'"),
        ((HERE, 32, 7), dict(size=3), "called with img_size, num_classes, size: .*'size'; --model.fields null gives"),
        (("builtins:dict", 32, 7), {}, "builtins:dict must return an nn.Module, got dict"),
        (("no_such_file:Net", 32, 7), {}, "cannot import no_such_file:Net: No module named"),
    ],
)
def test_what_is_no_network_is_told_in_one_line(arguments: tuple, fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        network.build(*arguments, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(compile=True), "has no compile_blocks.., which model.compile true needs"),
        (dict(grad_checkpointing=True), "cannot checkpoint its activations"),
        (dict(channels_last="yes"), "channels_last must be one of auto, True, False, got 'yes'"),
        (dict(metrics={"acc1": "x:y"}), "cannot be called acc1"),
        (dict(metrics={"calibration": "x:y"}), "cannot be called calibration"),
        (dict(metrics={"f1": "builtins:dict"}), "must return a torchmetrics.Metric, got dict"),
    ],
)
def test_what_a_network_cannot_do_is_refused_at_once(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        module(name=HERE, fields=None, **settings)


def test_maps_are_shown_by_those_that_have_them() -> None:
    own = cait.create_model("xxs24", img_size=32, depth=2, drop_path_rate=0.5).train()
    network.require(own, "xxs24", "maps", "its picture")
    maps = own.maps(IMAGES)
    assert [len(kind) for kind in maps] == [2, 2]
    assert own.training
    for kind, shape in zip(maps, ((3, 4, 4, 4), (3, 4, 1, 5)), strict=True):
        assert all(map_.shape == shape for map_ in kind)
    # They are the weights of the values in the network itself, block by block.
    own.eval()
    with torch.no_grad():
        x = own.patch_embed(IMAGES) + own.pos_embed
        torch.testing.assert_close(maps.self_attention[0], own.blocks[0].attn.maps(own.blocks[0].norm1(x)))
        assert torch.allclose(maps.class_attention[0].sum(dim=-1), torch.ones(()))
    with pytest.raises(UserError, match=r"has no maps\(\), which .* needs"):
        network.require(Plain(32, 7), HERE, "maps", "a picture of attention")


def test_activations_are_checkpointed_where_the_network_can() -> None:
    for name, fields in (("timm/test_vit", {}), ("xxs24", dict(depth=1))):
        net = module(name=name, img_size=32, fields=fields, grad_checkpointing=True)
        assert net.model.grad_checkpointing is True


def test_a_distillation_head_of_timms_learns_from_the_teacher(tmp_path: Path) -> None:
    torch.manual_seed(1)
    torch.save(timm.create_model("test_resnet", num_classes=7).state_dict(), tmp_path / "teacher.pth")
    fields = dict(depth=1, embed_dim=48, num_heads=2, patch_size=4)
    teacher: dict = dict(
        distillation="hard", teacher="test_resnet.r160_in1k", teacher_path=str(tmp_path / "teacher.pth")
    )
    net = module(name="timm/deit_tiny_distilled_patch16_224", img_size=8, fields=fields, lr=1e-2, **teacher)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer(max_epochs=1).fit(net, loader())
    for head in ("model.head.weight", "model.head_dist.weight"):
        assert not torch.allclose(before[head], net.state_dict()[head])
    images = torch.randn(2, 3, 8, 8)
    assert net.eval()(images).shape == (2, 7)


@pytest.mark.parametrize(
    ("teacher", "settings"),
    [(HERE, {}), ("xxs24", dict(teacher_fields=dict(depth=1, embed_dim=16, num_heads=2, patch_size=4)))],
)
def test_a_teacher_is_any_network_with_a_file_of_weights(teacher: str, settings: dict, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = network.build(teacher, 8, 7, **settings.get("teacher_fields", {})).state_dict()
    torch.save(weights, tmp_path / "teacher.pth")
    net = module(distillation="soft", teacher=teacher, teacher_path=str(tmp_path / "teacher.pth"), **settings)
    trainer(max_epochs=1).fit(net, loader())
    assert all(torch.equal(value, net.teacher.network.state_dict()[key]) for key, value in weights.items())


def test_a_run_of_your_own_network_teaches_by_name_alone(tmp_path: Path) -> None:
    """The checkpoint may be a stranger's, so the code that it names is not run for its word."""
    fit = trainer(max_epochs=1)
    fit.fit(module(name=HERE, fields=None), loader())
    fit.save_checkpoint(path := str(tmp_path / "run.ckpt"))
    with pytest.raises(UserError, match=f"--model.teacher {HERE} --model.teacher_path {path}"):
        trainer(max_epochs=1).fit(module(distillation="hard", teacher=path), loader())
    named = module(distillation="hard", teacher=HERE, teacher_path=path)
    student = module(name=HERE, fields=None, distillation="hard", teacher=path)
    for net in (named, student):
        trainer(max_epochs=1).fit(net, loader())
        own = {key.removeprefix("model."): value for key, value in fit.lightning_module.state_dict().items()}
        assert all(torch.equal(value, own[key]) for key, value in net.teacher.network.state_dict().items())


def test_weights_are_fitted_by_name_of_class_and_by_timm(tmp_path: Path) -> None:
    theirs = network.build("timm/test_vit", 32, 7)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    ours = network.build("timm/test_vit", 64, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = load_weights(ours, tmp_path / "w.pth")
    assert notes == ["pos_embed fitted by timm", "the head's 7 classes left out; it starts anew"]
    torch.testing.assert_close(ours.blocks[0].attn.qkv.weight, theirs.blocks[0].attn.qkv.weight)
    with pytest.raises(UserError, match="is of another network"):
        load_weights(network.build("timm/test_vit2", 32, 7), tmp_path / "w.pth")


class Failing(nn.Module):
    """Ways in which a network is not one, by what `fields` ask for."""

    def __init__(self, img_size: int, num_classes: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head = nn.Linear(3, 9 if kind == "classes" else num_classes)
        self.requires_grad_(kind != "frozen")

    def forward(self, images: Tensor) -> object:
        logits = self.head(images.mean(dim=(2, 3)))
        if self.kind == "raises":
            raise ValueError("no\nsuch luck")
        return {"tuple": (logits, logits), "map": logits[..., None, None]}.get(self.kind, logits)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("classes", r"must give logits \[B, 7\], for two images it gives \[2, 9\]"),
        ("tuple", r"must give logits \[B, 7\], for two images it gives tuple"),
        ("map", r"for two images it gives \[2, 7, 1, 1\]"),
        ("raises", r"fails on images of \[3, 8, 8\]: ValueError: no such luck \(.*test_network.py:\d+\)"),
        ("frozen", "has no parameter to train"),
    ],
)
def test_a_network_is_tried_before_anything_is_trained(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        module(name=f"{__name__}:Failing", fields=dict(kind=kind))
    assert "\n" not in str(error.value)
    assert module(name=f"{__name__}:Failing", fields=dict(kind="well")).model.training


class Statistics(nn.Module):
    """Norms that count in every way, and a counter of its own, in blocks that are computed again."""

    def __init__(self, img_size: int, num_classes: int, reentrant: bool = False) -> None:
        super().__init__()
        norms = [
            nn.BatchNorm2d(3),
            nn.BatchNorm2d(3, momentum=None),
            nn.InstanceNorm2d(3, track_running_stats=True),
            timm.layers.BatchNormAct2d(3),
            timm.layers.EvoNorm2dB0(3),
            Counter(),
        ]
        self.norms = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 1), norm) for norm in norms)
        self.head, self.reentrant, self.grad_checkpointing = nn.Linear(3, num_classes), reentrant, False

    def forward(self, images: Tensor) -> Tensor:
        for norm in self.norms:
            again = self.grad_checkpointing and self.training
            images = checkpoint(norm, images, use_reentrant=self.reentrant) if again else norm(images)
        return self.head(images.mean(dim=(2, 3)))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)  # not in place
        return x.sin()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("timm/test_resnet", None),
        ("synchronized", None),
        ("timm/test_efficientnet", None),
        ("xxs24", dict(embed_dim=16, depth=2, num_heads=2, patch_size=4, stem="pooled")),
        (f"{__name__}:Statistics", None),
        (f"{__name__}:Statistics", dict(reentrant=True)),
    ],
)
def test_statistics_count_a_batch_once_if_activations_are_computed_again(name: str, fields: dict | None) -> None:
    def trained(**settings: bool) -> dict:
        torch.manual_seed(0)
        replaced = LambdaCallback(setup=lambda *args, **_: nn.SyncBatchNorm.convert_sync_batchnorm(args[1]))
        callbacks = [StepSeed(0), *([replaced] if name == "synchronized" else [])]
        network = "timm/test_resnet" if name == "synchronized" else name
        net = module(name=network, fields=fields, warmup_epochs=0, drop_path_rate=0.0, **settings)
        batches = loader()
        batches.dataset.tensors[0].requires_grad_()  # else what is reentrant would have no gradient
        trainer(max_epochs=1, callbacks=callbacks).fit(net, batches)
        assert name != "synchronized" or isinstance(net.model.bn1, nn.SyncBatchNorm)
        return net.model.state_dict()

    plain, again = trained(), trained(grad_checkpointing=True)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    counts = {int(value) for key, value in plain.items() if "num_batches" in key}
    assert counts - {0} == {6}  # InstanceNorm does not count


class Pooled(nn.Module):
    """BatchNorm after the pooling, whose statistics are of images alone."""

    def __init__(self, img_size: int, num_classes: int, frozen: bool = False, synchronized: bool = False) -> None:
        super().__init__()
        norm = nn.SyncBatchNorm if synchronized else nn.BatchNorm1d
        self.norm, self.head = norm(3).requires_grad_(not frozen), nn.Linear(3, num_classes)
        if frozen:
            self.norm.forward = nn.Identity().forward  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(images.mean(dim=(2, 3))))


@pytest.mark.parametrize(
    ("name", "fields", "batch", "refused"),
    [
        (f"{__name__}:Pooled", {}, 1, True),
        (f"{__name__}:Pooled", dict(synchronized=True), 1, True),
        (f"{__name__}:Pooled", dict(frozen=True), 1, False),
        (f"{__name__}:Pooled", {}, 2, False),
        ("timm/test_efficientnet", {}, 1, True),
        ("xxs24", dict(embed_dim=16, depth=1, num_heads=2, patch_size=8, stem="conv"), 1, True),
        ("xxs24", dict(embed_dim=16, depth=1, num_heads=2, patch_size=4, stem="conv"), 1, False),
        ("xxs24", dict(embed_dim=16, depth=1, num_heads=2, patch_size=8), 1, False),
    ],
)
def test_batch_norm_of_one_value_is_refused_before_training(name: str, fields: dict, batch: int, refused: bool) -> None:
    fit = trainer(max_epochs=1)
    with (
        pytest.raises(UserError, match=f"{name} has BatchNorm, which needs 2 images or more a process")
        if refused
        else contextlib.nullcontext()
    ):
        fit.fit(module(name=name, fields=fields, warmup_epochs=0), loader(4, batch), loader(4))
    assert fit.global_step == (0 if refused else 4 // batch)


def test_synchronized_statistics_join_the_images_of_processes() -> None:
    network.check_single(Pooled(8, 7, synchronized=True), "pooled", torch.zeros(1, 3, 8, 8), processes=2)


def test_a_loss_gives_one_number() -> None:
    net = module(name=HERE, fields=None, loss=f"{__name__}:ones")
    with pytest.raises(UserError, match=r"the loss must be one number, got a tensor of .4.: take the mean"):
        trainer(max_epochs=1).fit(net, loader())


class Value(Metric):
    """Computes `Value.is_now`."""

    is_now: object = None

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        if self.is_now == "not made":
            raise RuntimeError("no such luck\nat all")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        if self.is_now == "not updated":
            raise ValueError("no such luck\nat all")

    def compute(self) -> object:
        if self.is_now == "not computed":
            raise KeyError("no such luck\nat all")
        return self.is_now


@pytest.mark.parametrize("sanity", [0, 1])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(7, 7), r"the metric m must compute one number, as with average='macro', got a tensor of \[7, 7\]"),
        (torch.zeros(0), r"one number.* got a tensor of \[0\]"),
        (torch.tensor(1j), r"one number.* got a tensor of \[\]"),
        ({"a": torch.tensor(1.0)}, "one number.* got a dict"),
        ("high", "one number.* got a str"),
        (None, "one number.* got a NoneType"),
        ([0.1, 0.2], "one number.* got a list"),
        ("not made", r"cannot make .*:Value: RuntimeError: no such luck at all \(.*test_network.py:\d+\)"),
        ("not updated", "the metric m fails: ValueError: .*at all"),
        ("not computed", "the metric m fails: KeyError: .*at all"),
    ],
)
def test_a_metric_without_a_number_is_refused_before_training(
    value: object, message: str, sanity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Value, "is_now", value)
    fit = trainer(max_epochs=1, num_sanity_val_steps=sanity)
    with pytest.raises(UserError, match=message):
        fit.fit(module(name=HERE, fields=None, metrics={"m": f"{__name__}:Value"}), loader(), loader(4))
    assert fit.global_step == 0


@pytest.mark.parametrize("value", [0.5, 1, True, np.float32(0.5), torch.tensor([0.5]), torch.tensor(2), [0.5]])
@pytest.mark.parametrize("name", ["keys", "items", "training", "forward", "f1-macro", "f1.macro", "größe"])
def test_a_metric_may_have_any_plain_name_and_give_any_number(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Value, "is_now", value)
    metrics = module(name=HERE, fields=None, metrics={name: f"{__name__}:Value"}).new_metrics()
    metrics.update(torch.zeros(2, 7), torch.zeros(2, dtype=torch.long))
    number = metrics.compute("val")[f"val/{name}"]
    assert (number.item(), number.shape, number.is_floating_point()) == (torch.as_tensor(value).item(), (), True)


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a/b", "a,b", "f1@5", "f1:macro", "a\nb", ".f1", "-f1", "f1%", '"f1"']
)
def test_a_metric_has_no_name_that_a_tracker_refuses(name: str) -> None:
    with pytest.raises(UserError, match=r"a metric of your own cannot be called .*: take letters, digits and \. _ -"):
        module(name=HERE, fields=None, metrics={name: f"{__name__}:Value"})


@pytest.mark.parametrize(
    ("metric", "own", "mode"),
    [
        *(
            (name, None, "min")
            for name in ("val/loss", "train/loss", "val_ema/loss", "val/focal_loss", "val/error_rate")
        ),
        *((name, None, "min") for name in ("val/top1-error", "val/RMSE", "val/nll", "val/f1_loss", "val/ece")),
        *((name, None, "max") for name in ("val/acc1", "val/acc5", "val/acc1_macro", "val_ema/acc1", "train/acc1")),
        *((name, None, "max") for name in ("val/mAP", "val/mAP50", "val/f1", "val/balanced_accuracy", "val/top5")),
        *((name, None, None) for name in ("val/answer", "lr", "train/grad_norm", "val/score", "val/dataloss", "")),
        ("val/x", "torchmetrics.classification:MulticlassF1Score", "max"),
        ("val_ema/x", "torchmetrics.classification:MulticlassCalibrationError", "min"),
        ("val/x", "torchmetrics.classification:MulticlassHammingDistance", "min"),
        ("val/error", "torchmetrics.classification:MulticlassAccuracy", "max"),
        ("val/x", f"{__name__}:f1_of_each_class", "max"),
        ("val/x", f"{__name__}:Value", None),
        ("val/loss_x", f"{__name__}:Value", "min"),
    ],
)
def test_the_best_value_of_a_metric_follows_from_the_metric(metric: str, own: str | None, mode: str | None) -> None:
    paths = {metric.rpartition("/")[2]: own} if own else {}
    assert best_mode(metric, paths) == mode
    assert best_mode(metric, module(name=HERE, fields=None, metrics=paths).val_metrics.own) == mode


def ones():
    return nn.CrossEntropyLoss(reduction="none")


def f1_of_each_class(num_classes: int) -> MulticlassF1Score:
    return MulticlassF1Score(num_classes, average=None)


def test_a_teacher_without_a_file_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trainer(max_epochs=1).fit(module(distillation="soft", teacher=HERE), loader())
    assert f"the teacher {HERE} has the weights that it is made with" in caplog.text


def test_a_checkpoint_of_other_classes_is_told_by_their_number(tmp_path: Path, digits_root: Path) -> None:
    common: dict = dict(img_size=8, batch_size=64, num_workers=0)
    short: dict = dict(max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    fit = trainer(**short)
    fit.fit(module(num_classes=10), datamodule=ImageNetDataModule(root=str(digits_root), **common))
    fit.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(UserError, match="the checkpoint knows 10 classes, the data has 7; to train on these"):
        trainer().fit(module(), loader(), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
