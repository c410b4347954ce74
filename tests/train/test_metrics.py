"""The metrics of a validation: against torch's own, and what a user adds to them."""

from pathlib import Path

import pytest
import torch
from modules import loader, module, trainer
from sklearn.metrics import balanced_accuracy_score
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from cait import ckpt
from cait.errors import UserError
from cait.run.checkpoints import BestCheckpoint
from cait.train.metrics import EvalMetrics, best_mode, metric_of_best


def test_metrics_count_a_whole_set_of_uneven_batches() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 7), torch.randint(0, 7, (50,))
    # The first batch is right in top-1 and so in top-5: metrics that share their states would stay merged.
    logits[:10] = torch.nn.functional.one_hot(labels[:10], 7).float()
    metrics = EvalMetrics(7)
    for part in (slice(0, 10), slice(10, 43), slice(43, 50)):
        metrics.update(logits[part], labels[part])
    figures = metrics.compute("val")
    top5 = logits.topk(5).indices
    assert figures["val/acc1"].item() == pytest.approx(
        100 * (logits.argmax(1) == labels).float().mean().item()
    )
    assert figures["val/acc5"].item() == pytest.approx(
        100 * (top5 == labels[:, None]).any(1).float().mean().item()
    )
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert figures["val/loss"].item() == pytest.approx(expected, rel=1e-6)
    metrics.update(logits[:10], labels[:10])  # the count began anew
    assert metrics.compute("val")["val/acc1"].item() == 100


def test_the_mean_of_the_classes_counts_those_that_are_always_wrong_and_none_without_images() -> (
    None
):
    labels, best = torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([0, 1, 0, 3, 3, 2])
    metrics = EvalMetrics(5, per_class=True)
    metrics.update(torch.nn.functional.one_hot(best, 5).float(), labels)
    expected = 100 * balanced_accuracy_score(labels, best)
    assert metrics.compute("val")["val/acc1_macro"].item() == pytest.approx(expected)
    assert metrics.by_class([*"abcde"])["acc1_macro"] == pytest.approx(expected)


def test_a_figure_over_nothing_is_no_figure() -> None:
    """Neither over no image, nor of one class alone, nor the first five of four classes."""
    few = EvalMetrics(4, {"auroc": "torchmetrics.classification:MulticlassAUROC"}, per_class=True)
    for label, known in ((-1, set()), (1, {"val/loss", "val/acc1", "val/acc1_macro"})):
        few.update(torch.randn(3, 4), torch.full((3,), label))
        figures = few.compute("val")
        assert figures.keys() == {"val/loss", "val/acc1", "val/acc1_macro", "val/auroc"}
        assert {name for name, value in figures.items() if not value.isnan()} == known
    net = module(lr=0.0, warmup_epochs=0)
    targets = torch.zeros(6, 7)  # of images without a class, all but the last
    targets[5, 3] = 1.0
    run = trainer(max_epochs=1, log_every_n_steps=1)
    run.fit(net, DataLoader(TensorDataset(torch.randn(6, 3, 8, 8), targets), batch_size=6))
    # of one image, not 83 and more
    assert float(run.callback_metrics["train/acc1"]) in (
        0.0,
        100.0,
    )


def test_the_average_chooses_unless_a_metric_is_named() -> None:
    assert metric_of_best(None, "mAP", True) == "val_ema/mAP"
    assert (
        metric_of_best(None, "acc1", False)
        == metric_of_best("val/acc1", "loss", True)
        == "val/acc1"
    )
    with pytest.raises(UserError, match=r"give --ema\.decay, or --best_metric val/acc1"):
        metric_of_best("val_ema/acc1", "acc1", False)


@pytest.mark.parametrize(
    ("monitors", "uses"),
    [
        ([], True),  # nothing says what chose it
        ([None, "val/acc1"], False),  # as 0.1.0 has saved runs
        (["val/loss", "val_ema/acc1"], True),  # the last is BestCheckpoint's
        (["val_ema/acc1", "train/acc1"], False),
    ],
)
def test_a_checkpoint_says_which_weights_it_stands_for(
    monitors: list[str | None], uses: bool
) -> None:
    states: dict = {f"Own{number}": {"monitor": name} for number, name in enumerate(monitors)}
    content = {
        "callbacks": {"EMA": {"w": torch.ones(1)}, "StepSeed": {}, **states},
        "state_dict": {"model.w": 0},
    }
    assert ckpt.uses_average(content) is uses
    assert ckpt.chosen_weights(content, "x") == (content["callbacks"]["EMA"] if uses else {"w": 0})
    assert (ckpt.uses_average(content, True), ckpt.uses_average(content, False)) == (True, False)
    del content["callbacks"]["EMA"]
    assert not ckpt.uses_average(content)
    with pytest.raises(UserError, match="x holds no moving average"):
        ckpt.chosen_weights(content, "x", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_loss_is_the_mean_of_all_images_whatever_the_network_computes_in(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(300, 128, 7), torch.randint(0, 7, (300, 128))
    metrics = EvalMetrics(7).to(dtype=dtype)
    for batch in zip(logits, labels, strict=True):
        metrics.update(*batch)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten())
    assert metrics.compute("val")["val/loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_answers_that_are_not_finite_have_no_figures(tmp_path: Path) -> None:
    """Neither a single one among others: the largest of NaN is the first class, which may be right."""
    metrics = EvalMetrics(
        5, {"f1": "torchmetrics.classification:MulticlassF1Score"}, per_class=True
    )
    logits = torch.eye(5)
    logits[0] = torch.nan
    metrics.update(logits, torch.arange(5))
    figures = metrics.compute("val")
    assert len(figures) == 5
    assert all(value.isnan() for value in figures.values())
    shares = metrics.by_class([*"abcde"])
    assert (shares["acc1_macro"], {*shares["per_class"].values()}, shares["images"]) == (
        None,
        {None},
        5,
    )
    net = module(lr=0.0, warmup_epochs=0)
    torch.nn.init.constant_(net.model.head.bias, torch.nan)
    best = BestCheckpoint(tmp_path)
    trainer(max_epochs=1, enable_checkpointing=True, callbacks=[best]).fit(net, loader(), loader(4))
    assert best.best_model_score is None


class Own(Metric):
    """Computes `Own.value`, or fails in the method that it names."""

    value: object = None

    def __init__(self, num_classes: int) -> None:
        super().__init__()

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        if self.value == "update":
            raise ValueError("no such luck\nat all")

    def compute(self) -> object:
        return self.value


OWN = f"{__name__}:Own"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(7, 7),
            "the metric f1.macro fails: ValueError: it must compute one number, .*average='macro'",
        ),
        ("update", "the metric f1.macro fails: ValueError: no such luck at all"),
    ],
)
def test_a_metric_without_a_number_is_refused_before_training(
    value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "value", value)
    fit = trainer(max_epochs=1, num_sanity_val_steps=1)
    with pytest.raises(UserError, match=message):
        fit.fit(module(metrics={"f1.macro": OWN}), loader(), loader(4))
    assert fit.global_step == 0


def test_a_batch_in_which_no_image_counts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "value", "update")  # as a metric that cannot do without an image
    metrics = module(metrics={"f1": OWN}).new_metrics()
    metrics.update(torch.randn(4, 7), torch.full((4,), -1))
    monkeypatch.setattr(Own, "value", 0.5)
    metrics.update(torch.eye(7), torch.arange(7))
    metrics.update(torch.randn(4, 7), torch.full((4,), -1))
    found = metrics.compute("val")
    assert (found["val/acc1"], found["val/acc5"], found["val/f1"]) == (100, 100, 0.5)


@pytest.mark.parametrize("value", [0.5, torch.tensor([2])])
def test_a_metric_may_have_any_plain_name_and_give_any_number(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "value", value)
    names = ("keys", "training", "f1-macro", "größe")
    metrics = module(metrics=dict.fromkeys(names, OWN)).new_metrics()
    metrics.update(torch.zeros(2, 7), torch.zeros(2, dtype=torch.long))
    found = metrics.compute("val")
    for name in names:
        number = found[f"val/{name}"]
        assert (number.item(), number.shape, number.is_floating_point()) == (
            torch.as_tensor(value).item(),
            (),
            True,
        )


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"acc1": OWN}, "cannot be called acc1, which is there already"),
        ({"f1": "builtins:dict"}, "must return a torchmetrics.Metric, got dict"),
    ],
)
def test_what_is_no_metric_is_refused_at_once(metrics: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        module(metrics=metrics)


@pytest.mark.parametrize(
    ("metric", "own", "mode"),
    [
        *(
            (name, None, "min")
            for name in ("val/loss", "val_ema/loss", "val/focal_loss", "val/error_rate", "val/RMSE")
        ),
        *(
            (name, None, "max")
            for name in ("val/acc1", "val_ema/acc5", "val/acc1_macro", "val/f1", "val/mAP")
        ),
        *((name, None, None) for name in ("val/answer", "lr", "train/grad_norm", "val/f1_loss")),
        ("val/x", "torchmetrics.classification:MulticlassF1Score", "max"),
        ("val/error", "torchmetrics.classification:MulticlassAccuracy", "max"),
        ("val_ema/x", "torchmetrics.classification:MulticlassCalibrationError", "min"),
        ("val/x", OWN, None),
    ],
)
def test_the_best_value_of_a_metric_follows_from_the_metric(
    metric: str, own: str | None, mode: str | None
) -> None:
    paths = {metric.rpartition("/")[2]: own} if own else {}
    assert best_mode(metric, paths) == mode
    assert best_mode(metric, EvalMetrics(7, paths).own) == mode
