"""The recipe, step by step, beside the same recipe put together from timm's own parts.

    python benchmarks/recipe.py [--out benchmarks/recipe.md]

One side is `CaiTModule` and `ImageNetDataModule` under the shipped configuration, driven by
Lightning's Trainer with the moving average and the other callbacks of a run. The other is a plain
loop in the manner of DeiT's engine, of timm's parts alone and with the published figures written
out: its CaiT, transforms, RepeatAugSampler, Mixup, losses, parameter groups, CosineLRScheduler and
ModelEmaV3. Both begin with the same weights, seed each picture and each mixing alike and go their
own way from there, in float32 on the CPU. The pictures are the embedded digits, the network is a
small CaiT without stochastic depth.
"""

import argparse
import logging
import random
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from report import REPO, show, stamp
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from timm.loss import SoftTargetCrossEntropy
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.task import DistillationTeacher, TokenDistillationTask
from timm.utils import ModelEmaV3
from token_head import TokenHead
from torch import Tensor, nn
from torchvision.datasets import ImageFolder

from cait import seeds
from cait.data.datamodule import ImageNetDataModule
from cait.data.source import write_digits
from cait.guards.nonfinite import NonFiniteGuard
from cait.train.callbacks import EMA, StepSeed
from cait.train.losses import Distillation, distillation_loss
from cait.train.module import CaiTModule
from cait.train.optim import Length, ScheduleSettings, WarmupSchedule

BATCH, CLASSES, SIZE, SEED = 64, 10, 16, 0
EPOCHS = 10
NETWORK: dict[str, Any] = dict(patch_size=4, embed_dim=32, depth=2, num_heads=2)
DECAY = 0.99
"""Of the moving average; the published .99996 would hardly move in 200 steps."""
TEACHER = "test_resnet.r160_in1k"


@dataclass
class Step:
    """What one training step took in and left behind."""

    rate: float
    decays: dict[str, float]
    """Weight decay of each parameter."""
    images: Tensor
    """[B, 3, SIZE, SIZE], augmented and mixed."""
    targets: Tensor
    """[B, CLASSES], mixed and smoothed: what the logits are held against."""
    base_loss: float
    distillation_loss: float
    loss: float
    weights: Tensor
    """All weights after the step, flat."""
    average: Tensor
    """Their moving average, flat."""


Settings = dict[str, Any]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.state_dict().values()])


def decays(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    decay = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: decay[parameter] for name, parameter in model.named_parameters()}


class Record(Callback):
    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.steps: list[Step] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.loss.register_forward_hook(self._keep)

    def _keep(self, loss: nn.Module, arguments: tuple[Tensor, Tensor], value: Tensor) -> None:
        self.logits, self.base_loss = arguments[0].detach(), value.item()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        images, targets = batch
        judged = 0.0
        if pl_module.teacher is not None:
            teacher = pl_module.teacher(images)
            settings = pl_module.settings
            judged = distillation_loss(
                self.logits, teacher, settings.distillation, settings.distillation_tau
            ).item()
        smoothing = pl_module.loss.label_smoothing
        targets = (1 - smoothing) * targets + smoothing / CLASSES  # what the loss makes of them
        groups = decays(pl_module.model, trainer.optimizers[0])
        losses = (self.base_loss, judged, outputs["loss"].item())
        after = (flat(pl_module.model), flat(self.ema.average))
        self.steps.append(Step(self.rate, groups, images, targets, *losses, *after))


def ours(
    folder: Path, kind: Distillation, batches: int, model: Settings, data: Settings
) -> tuple[list[Step], dict[str, Tensor]]:
    """(the steps, the weights before them) of a run of EPOCHS epochs of `batches` steps, some settings changed."""
    recipe = yaml.safe_load((REPO / "configs/imagenet/xxs24_224.yaml").read_text())
    small = dict(
        root=str(folder / "digits"),
        img_size=SIZE,
        batch_size=BATCH,
        num_workers=0,
        seed=SEED,
        backend="timm",
    )
    datamodule = ImageNetDataModule(**recipe["data"] | small | data)
    small = dict(img_size=SIZE, num_classes=CLASSES, drop_path_rate=0.0, fields=NETWORK)
    teacher = dict(distillation=kind, teacher=TEACHER, teacher_path=str(folder / "teacher.pth"))
    torch.manual_seed(SEED)
    module = CaiTModule(**recipe["model"] | small | teacher | model)
    start = {key: value.clone() for key, value in module.model.state_dict().items()}
    record = Record(ema := EMA(DECAY))
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    Trainer(
        **dict.fromkeys(off, False),
        accelerator="cpu",
        max_epochs=EPOCHS,
        limit_train_batches=batches,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[StepSeed(SEED), NonFiniteGuard(folder, 10), ema, record],
    ).fit(module, datamodule=datamodule)
    return record.steps, start


def timms_batches(folder: Path, batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mixed images and smoothed targets, the seeds set where ours are: for a picture and for a batch."""
    pictures = ImageFolder(str(folder / "digits" / "train"))
    transform = create_transform(
        SIZE,
        is_training=True,
        color_jitter=0.3,  # DeiT's default, without effect beside RandAugment
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
    )
    mixup = Mixup(
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
        cutmix_minmax=None,
        prob=1.0,
        switch_prob=0.5,
        mode="batch",
        label_smoothing=0.1,
        num_classes=CLASSES,
    )
    sampler = RepeatAugSampler(pictures, num_replicas=1, rank=0, num_repeats=3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        for batch in range(batches):
            images, labels = [], []
            for place in range(batch * BATCH, (batch + 1) * BATCH):
                picture, label = pictures[indices[place]]
                seed = seeds.image(SEED, epoch, indices[place], place % 3)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
                images.append(transform(picture))
                labels.append(label)
            np.random.seed(seeds.batch_mixing(SEED, epoch, batch, 0))
            yield mixup(torch.stack(images), torch.tensor(labels))


def timms(
    folder: Path, kind: Distillation, batches: int, start: dict[str, Tensor]
) -> Iterator[Step]:
    """The same steps by timm's parts, from the weights `start`."""
    model = timm.create_model(
        "cait_xxs24_224", img_size=SIZE, num_classes=CLASSES, **NETWORK
    ).train()
    model.load_state_dict(start)
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    optimizer = torch.optim.AdamW(groups, lr=5e-4 * BATCH / 512, eps=1e-8, fused=True)
    warmup, total = 5 * batches, EPOCHS * batches
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=total - warmup,
        lr_min=1e-5,
        warmup_t=warmup - 1,
        warmup_lr_init=1e-6,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    average = ModelEmaV3(model, decay=DECAY)
    criterion = SoftTargetCrossEntropy()
    task = None
    if kind != "none":
        teacher = DistillationTeacher(
            TEACHER, num_classes=CLASSES, pretrained_path=str(folder / "teacher.pth")
        )
        task = TokenDistillationTask(
            TokenHead(model, CLASSES, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
            teacher,
            criterion=criterion,
            distill_type=kind,
            task_loss_weight=0.5,
        ).train()
    for step, (images, targets) in enumerate(timms_batches(folder, batches)):
        # lightning-bolts' warm-up of W steps is timm's of W - 1, its peak held for one step more.
        schedule.step_update(step if step < warmup else step - 1)
        rate = optimizer.param_groups[0]["lr"]
        if task is None:
            base = loss = criterion(model(images), targets)
            judged = 0.0
        else:
            losses = task(images, targets)
            base, loss, judged = losses["task_loss"], losses["loss"], losses["distill_loss"].item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        groups = decays(model, optimizer)
        after = (flat(model), flat(average.module))
        yield Step(rate, groups, images, targets, base.item(), judged, loss.item(), *after)


def prepare(folder: Path) -> None:
    """Write the pictures and a teacher of random weights."""
    write_digits(folder / "digits")
    torch.manual_seed(SEED)
    torch.save(timm.create_model(TEACHER, num_classes=CLASSES).state_dict(), folder / "teacher.pth")


ALLOWED = {
    "learning rate, relative": 1e-6,
    "parameters under another weight decay": 0,
    "images after Mixup and CutMix": 1e-6,
    "soft targets, mixed and smoothed": 1e-6,
    "soft-target loss": 1e-6,
    "distillation loss": 1e-6,
    "training loss": 1e-6,
    "weights after the step": 1e-6,
    "moving average of the weights": 1e-6,
}
"""What is compared, and how large a difference may be at any step."""


def differences(one: Step, other: Step) -> list[float]:
    """In the order of ALLOWED."""
    return [
        abs(one.rate / other.rate - 1),
        sum(one.decays.get(name) != decay for name, decay in other.decays.items()),
        *(
            (torch.as_tensor(getattr(one, name)) - torch.as_tensor(getattr(other, name)))
            .abs()
            .max()
            .item()
            for name in (
                "images",
                "targets",
                "base_loss",
                "distillation_loss",
                "loss",
                "weights",
                "average",
            )
        ),
    ]


def compare(
    folder: Path,
    kind: Distillation,
    batches: int,
    model: Settings | None = None,
    data: Settings | None = None,
) -> tuple[dict[str, float], int, float]:
    """(largest difference of each quantity in ALLOWED, number of steps, how far a weight moved at most)."""
    steps, start = ours(folder, kind, batches, model or {}, data or {})
    pairs = zip(steps, timms(folder, kind, batches, start), strict=True)
    worst = [max(column) for column in zip(*(differences(*pair) for pair in pairs), strict=True)]
    before = torch.cat([value.flatten() for value in start.values()])
    return (
        dict(zip(ALLOWED, worst, strict=True)),
        len(steps),
        (steps[-1].weights - before).abs().max().item(),
    )


def schedule_gap(
    epochs: int = 400, warmup: int = 5, batches: int = 50, peak: float = 1e-3
) -> float:
    """Largest difference between our rate and timm's scheduler as DeiT calls it, as a share of the peak.

    DeiT sets the rate once an epoch and counts the cosine from the first epoch of the warm-up on.
    Compared is the mean of each epoch.
    """
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak) for _ in range(2)]
    length = Length(warmup * batches, epochs * batches)
    ours = WarmupSchedule(optimizers[0], ScheduleSettings(), lambda: length)
    theirs = CosineLRScheduler(
        optimizers[1], t_initial=epochs, lr_min=1e-5, warmup_t=warmup, warmup_lr_init=1e-6
    )
    gap = 0.0
    for epoch in range(epochs):
        theirs.step(epoch)
        mean = 0.0
        for _ in range(batches):
            mean += optimizers[0].param_groups[0]["lr"] / batches
            optimizers[0].step()
            ours.step()
        if epoch >= warmup:
            gap = max(gap, abs(mean - optimizers[1].param_groups[0]["lr"]))
    return gap / peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batches", type=int, default=20, help=f"steps in each of the {EPOCHS} epochs"
    )
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    kinds: tuple[Distillation, ...] = ("none", "hard", "soft")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        runs = [compare(Path(folder), kind, options.batches) for kind in kinds]
    steps, moved = runs[0][1], min(run[2] for run in runs)
    lines = [
        f"# The recipe beside timm's parts, over {steps} steps",
        "",
        f"`python benchmarks/recipe.py`, {stamp()}, timm {timm.__version__}, float32.",
        "",
        "Largest difference at any step between the run under Lightning and the plain loop of timm's parts, without",
        "and with a teacher. Each side went its own way from the same weights; the weight that moved furthest moved by",
        f"at least {moved:.3f}.",
        "",
        "| | no teacher | hard | soft | allowed | |",
        "|---|---|---|---|---|---|",
    ]
    failed = []
    for name, allowed in ALLOWED.items():
        figures = [run[0][name] for run in runs]
        fine = max(figures) <= allowed
        failed += [] if fine else [name]
        shown = [f"{figure:.1e}" if figure else "0" for figure in figures]
        if name == "distillation loss":
            shown[0] = ""
        lines.append(
            f"| {name} | {' | '.join(shown)} | {allowed:g} | {'ok' if fine else 'NOT ok'} |"
        )
    lines += [
        "",
        "Handed to timm's `CosineLRScheduler`, by updates and with `warmup_prefix`, our warm-up of W steps is a",
        "`warmup_t` of W - 1 whose peak is held for one step more: lightning-bolts reaches the peak at the warm-up's",
        "last step and again at the cosine's first. DeiT calls the scheduler by epochs and without the prefix, so that",
        "its cosine counts from the start of the warm-up: over 400 epochs with 5 of warm-up the mean rate of an epoch",
        f"past the warm-up differs from that by at most {schedule_gap():.1%} of the peak.",
    ]
    show(lines, options.out)
    if failed:
        raise SystemExit("differs: " + ", ".join(failed))


if __name__ == "__main__":
    main()
