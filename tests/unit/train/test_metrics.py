"""The metrics of a validation, and which of them chooses best.ckpt; messages are in tests/cli/golden/train.yaml."""

import pytest
import torch
from harness import over_table
from modules import module
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score
from torch.nn.functional import cross_entropy, one_hot
from torchmetrics import Metric

from cait import ckpt
from cait.train.metrics import EvalMetrics, best_mode
from cait.train.module import top1

OF_TORCH = "torchmetrics.classification:Multiclass"


def figures_of(metrics, logits, labels):
    metrics.update(logits, labels)
    figures = metrics.compute("val")
    return {name.removeprefix("val/"): value.item() for name, value in figures.items()}


def test_metrics_count_a_whole_set_of_uneven_batches():
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 7), torch.randint(0, 7, (50,))
    # The first batch is right in top-1 and so in top-5: metrics that share their states would stay merged.
    logits[:10] = one_hot(labels[:10], 7)
    metrics = EvalMetrics(7)
    metrics.update(logits[:10], labels[:10])
    metrics.update(logits[10:43], labels[10:43])
    figures = figures_of(metrics, logits[43:], labels[43:])
    for k in (1, 5):
        share = top_k_accuracy_score(labels, logits, k=k, labels=range(7))
        assert figures[f"acc{k}"] == pytest.approx(100 * share)
    assert figures["loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-6)
    assert figures_of(metrics, logits[:10], labels[:10])["acc1"] == 100  # the count began anew


def test_the_mean_of_the_classes_counts_those_always_wrong_and_none_without_images():
    labels, best = torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([0, 1, 0, 3, 3, 2])
    metrics = EvalMetrics(5, per_class=True)
    expected = pytest.approx(100 * balanced_accuracy_score(labels, best))
    assert figures_of(metrics, one_hot(best, 5), labels)["acc1_macro"] == expected
    assert metrics.by_class([*"abcde"])["acc1_macro"] == expected


def test_a_figure_over_nothing_is_no_figure():
    """Neither over no image, nor of one class alone, nor the first five of four classes."""
    few = EvalMetrics(4, {"auroc": f"{OF_TORCH}AUROC"}, per_class=True)
    for label, known in ((-1, set()), (1, {"loss", "acc1", "acc1_macro"})):
        figures = figures_of(few, torch.randn(3, 4), torch.full((3,), label))
        assert figures.keys() == {"loss", "acc1", "acc1_macro", "auroc"}
        assert {name for name, value in figures.items() if value == value} == known


def test_the_accuracy_of_a_step_counts_the_images_that_have_a_class():
    targets = torch.zeros(7, 7)  # of images without a class, all but the last
    targets[6, 3] = 1.0
    assert top1(torch.eye(7)[[0, 1, 2, 4, 5, 6, 3]], targets) == 100
    assert top1(torch.eye(7), targets) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_loss_is_the_mean_of_all_images_whatever_the_network_computes_in(dtype):
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(300, 128, 7), torch.randint(0, 7, (300, 128))
    metrics = EvalMetrics(7).to(dtype=dtype)
    for batch in zip(logits[1:], labels[1:], strict=True):
        metrics.update(*batch)
    expected = cross_entropy(logits.flatten(0, 1).double(), labels.flatten())
    loss = figures_of(metrics, logits[0], labels[0])["loss"]
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_answers_that_are_not_finite_have_no_figures():
    """Neither a single one among others: the largest of NaN is the first class, which may be right."""
    metrics = EvalMetrics(5, {"f1": f"{OF_TORCH}F1Score"}, per_class=True)
    logits = torch.eye(5)
    logits[0] = torch.nan
    figures = figures_of(metrics, logits, torch.arange(5))
    assert len(figures) == 5
    assert all(value != value for value in figures.values())
    scores = metrics.by_class([*"abcde"])
    assert scores == {"images": 5, "per_class": dict.fromkeys("abcde"), "acc1_macro": None}


class Own(Metric):
    """Computes `Own.value`, and cannot do without an image."""

    value = 0.5

    def __init__(self, num_classes):
        super().__init__()

    def update(self, logits, labels):
        assert len(labels)

    def compute(self):
        return self.value


OWN = f"{__name__}:Own"


def test_a_batch_in_which_no_image_counts_changes_nothing():
    metrics = EvalMetrics(7, {"f1": OWN})
    nothing = torch.randn(4, 7), torch.full((4,), -1)
    metrics.update(*nothing)
    metrics.update(torch.eye(7), torch.arange(7))
    figures = figures_of(metrics, *nothing)
    assert (figures["acc1"], figures["acc5"], figures["f1"]) == (100, 100, 0.5)


@pytest.mark.parametrize("value", [0.5, torch.tensor([2])])
def test_a_metric_may_have_any_plain_name_and_give_any_number(value, monkeypatch):
    monkeypatch.setattr(Own, "value", value)
    names = ("keys", "training", "f1-macro", "größe")
    metrics = module(metrics=dict.fromkeys(names, OWN)).new_metrics()
    metrics.update(torch.zeros(2, 7), torch.zeros(2))
    figures = metrics.compute("val")
    for name in names:
        torch.testing.assert_close(figures[f"val/{name}"], torch.tensor(float(value)))


@over_table(__file__, "modes", path="")
def test_the_best_value_of_a_metric_follows_from_its_name_or_from_ones_own_metric(
    names, path, mode
):
    for metric in names:
        paths = {metric.split("/")[1]: path} if path else {}
        assert best_mode(metric, paths) == mode, metric
        assert best_mode(metric, EvalMetrics(7, paths).own) == mode, metric


@over_table(__file__, "chosen")
def test_a_checkpoint_says_which_weights_it_stands_for(callbacks, uses):
    content = {"callbacks": callbacks, "state_dict": {"model.w": 0}}
    assert ckpt.uses_average(content) is uses
    assert ckpt.chosen_weights(content, "x") == {"w": int(uses)}
