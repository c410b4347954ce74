"""Parts of training against those of others: timm's losses, teacher, optimizers and average, torch's clipping."""

from copy import deepcopy

import pytest
import timm
import torch
from harness import over_table, slow
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, Chosen, loader, module, precision_of, train
from same import same
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.task import DistillationTeacher, TokenDistillationTask
from timm.utils import ModelEmaV3
from token_head import TokenHead
from torch import nn
from torch.nn.functional import one_hot

import cait
from cait.guards.nonfinite import NonFiniteGuard
from cait.train.callbacks import EMA
from cait.train.losses import LossSettings
from cait.train.optim import OptimizerSettings

B, C = 8, 7
LABELS = torch.arange(B) % C
MIXED = 0.3 * one_hot(LABELS, C) + 0.7 * one_hot(LABELS.flip(0), C)


@pytest.mark.parametrize(
    ("ours", "theirs", "targets"),
    [
        (LossSettings("bce", 0.0), BinaryCrossEntropy(smoothing=0.0), LABELS),
        (LossSettings("bce", 0.1), BinaryCrossEntropy(smoothing=0.1), LABELS),
        (LossSettings("bce", 0.0), BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0), MIXED),
        (LossSettings("torch.nn:MultiMarginLoss"), nn.MultiMarginLoss(), LABELS),
    ],
)
def test_losses_and_their_gradients_are_theirs(ours, theirs, targets):
    """For an image that is mixed from two, both classes count in full."""
    torch.manual_seed(0)
    logits = torch.randn(B, C, requires_grad=True)
    losses = [loss(logits, targets) for loss in (ours.build_loss(), theirs)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in losses))


TEACHER = "test_resnet.r160_in1k"  # a few thousand weights, with batch norm and a normalization of its own
MEAN, STD = (0.1, 0.2, 0.3), (0.3, 0.2, 0.1)


@over_table(__file__, "distillations")
def test_loss_and_gradients_of_distillation_are_those_of_timms_task(kind, alpha, tau, tmp_path):
    torch.manual_seed(3)
    path = str(tmp_path / "teacher.pth")
    torch.save(timm.create_model(TEACHER, num_classes=C).state_dict(), path)
    net = module(
        distillation=kind,
        distillation_alpha=alpha,
        distillation_tau=tau,
        teacher=TEACHER,
        teacher_path=path,
        drop_path_rate=0.0,
        mean=MEAN,
        std=STD,
        lr=1e-2,
    )
    train(net)
    task = TokenDistillationTask(
        TokenHead(net.model, C, MEAN, STD),
        DistillationTeacher(TEACHER, num_classes=C, pretrained_path=path),
        criterion=SoftTargetCrossEntropy(),
        distill_type=kind,
        task_loss_weight=1 - alpha,
        temperature=tau,
    )
    assert not torch.equal(task.teacher.mean_kd.flatten(), torch.tensor(MEAN))
    net.log_dict = lambda *args, **kwargs: None  # it needs a running loop
    images, targets = torch.randn(6, 3, 8, 8), torch.rand(6, C).softmax(dim=1)
    losses = net.training_step((images, targets), 0), task(images, 0.9 * targets + 0.1 / C)["loss"]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    weights = [*net.model.parameters()]
    gradients = [torch.autograd.grad(loss, weights) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["xxs24", "timm/test_resnet"])
def test_the_moving_average_is_timms(name):
    fields = FIELDS if name == "xxs24" else None
    net = module(name=name, fields=fields, lr=1e-2, warmup_epochs=0)
    before = deepcopy(net.model.state_dict())
    theirs = ModelEmaV3(net.model, decay=0.9)

    def update(trainer, net, outputs, batch, batch_idx):
        if batch_idx % 2:  # a step has two batches
            theirs.update(net.model)

    ours = EMA(decay=0.9)
    callbacks = [ours, LambdaCallback(on_train_batch_end=update)]
    train(net, callbacks=callbacks, accumulate_grad_batches=2)
    average = ours.average.state_dict()
    assert same(average, theirs.module.state_dict())
    assert not same(average, before)
    assert not same(average, net.model.state_dict())


def small_net():
    torch.manual_seed(0)
    return cait.create_model("xxs24", 32, 5, depth=2, embed_dim=32, num_heads=2).double()


def weights_after_steps(net, optimizer):
    for _ in range(8):  # lookahead synchronizes at the sixth
        optimizer.zero_grad()
        net(torch.randn(4, 3, 32, 32).double()).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters())


@pytest.mark.parametrize("layer_decay", [None, 0.8])
@over_table(__file__, "optimizers")
def test_a_step_is_that_of_timms_optimizer(name, arguments, layer_decay):
    net = small_net()
    settings = OptimizerSettings(name, arguments, layer_decay, weight_decay=0.1)
    weights = weights_after_steps(net, settings.build_optimizer(net, lr=1e-3))
    net = small_net()
    start = nn.utils.parameters_to_vector(net.parameters()).clone()
    decay = dict(weight_decay=0.1, layer_decay=layer_decay)
    optimizer = create_optimizer_v2(net, name, lr=1e-3, **decay, **arguments)
    torch.testing.assert_close(weights, weights_after_steps(net, optimizer), rtol=1e-6, atol=1e-9)
    assert not torch.allclose(weights, start, atol=1e-5)


CLIPS = dict(norm=(0.1, nn.utils.clip_grad_norm_), value=(1e-4, nn.utils.clip_grad_value_))


class Clipped(Chosen):
    """Keeps the gradients as the optimizer gets them, and as torch's own function clips them."""

    def configure_gradient_clipping(self, optimizer, *clipping, **names):
        limit, clip = CLIPS[self.trainer.gradient_clip_algorithm]
        scale = self.gradient_scale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        copies = [nn.Parameter(torch.empty_like(p)) for p in parameters]
        for copied, parameter in zip(copies, parameters, strict=True):
            copied.grad = parameter.grad / scale
        clip(copies, limit)
        super().configure_gradient_clipping(optimizer, *clipping, **names)
        self.gradients = [parameter.grad / scale for parameter in parameters]
        self.expected = [copied.grad for copied in copies]


@pytest.mark.parametrize("algorithm", CLIPS)
@pytest.mark.parametrize("optimizer", ["fused AdamW", *slow("AdamW", "SGD")])
@pytest.mark.parametrize("precision", ["32", "16-mixed", "bf16-mixed", *slow("bf16-true")])
def test_gradients_are_clipped_as_torch_does_in_every_precision(
    precision, optimizer, algorithm, tmp_path
):
    net = module(Clipped, optimizer=optimizer)
    train(
        net,
        images=loader(8),
        callbacks=[NonFiniteGuard(tmp_path, 10)],
        gradient_clip_val=CLIPS[algorithm][0],
        gradient_clip_algorithm=algorithm,
        **precision_of(precision),
    )
    rtol = 1e-2 if precision == "bf16-true" else 1e-5
    torch.testing.assert_close(net.gradients, net.expected, rtol=rtol, atol=1e-8, equal_nan=True)
