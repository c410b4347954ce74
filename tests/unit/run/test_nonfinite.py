"""Steps whose gradients are not finite."""

import itertools
from copy import deepcopy

import pytest
from harness import parsed, slow
from lightning.pytorch.callbacks import LambdaCallback
from modules import Chosen, loader, module, precision_of, trainer
from same import same

from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard

BAD = (1, 2, 4)
"""Batches that have no number, of six."""


def poisoned(batches=BAD):
    data = loader(24)
    images = data.dataset.tensors[0]
    for batch in batches:
        images[4 * batch] = float("nan")
    return data


@pytest.mark.parametrize(
    ("optimizer", "clip"), [("fused AdamW", None), ("Lamb", 0.5), *slow(("SGD", 0.5))]
)
@pytest.mark.parametrize("precision", ["32", "bf16-mixed", *slow("bf16-true", "16-mixed")])
def test_a_step_without_a_finite_gradient_is_left_out_in_every_precision(
    precision, optimizer, clip, tmp_path
):
    """Weights, moments and the count of steps are as if the optimizer had not been called."""
    states = []

    def note(fit, net, *_):
        state = net.optimizers().optimizer.state_dict()
        steps = [group.get("step") for group in state["param_groups"]]  # where Lamb counts
        states.append(deepcopy([net.state_dict(), state["state"], steps]))

    net = module(Chosen, optimizer=optimizer, lr=1e-2, warmup_epochs=0)
    guard = NonFiniteGuard(tmp_path, limit=3)
    fit = trainer(
        callbacks=[guard, LambdaCallback(on_train_batch_end=note)],
        max_epochs=1,
        gradient_clip_val=clip,
        **precision_of(precision),
    )
    fit.fit(net, poisoned())
    stays = [same(before, after) for before, after in itertools.pairwise(states)]
    assert stays == [step in BAD for step in range(1, 6)]
    assert all(value.isfinite().all() for value in net.state_dict().values())
    assert int(guard.in_a_row) == 0


def test_too_many_of_them_end_the_run_with_the_batch(tmp_path):
    data = poisoned((1, 2, 3))
    guard = NonFiniteGuard(tmp_path, limit=3)
    with pytest.raises(UserError, match="3 steps in a row"):
        trainer(max_epochs=1, callbacks=[guard]).fit(module(lr=1e-2), data)
    kept = parsed(tmp_path / "nonfinite.pt")
    assert same(kept["images"], data.dataset.tensors[0][12:16])
    assert kept["step"] == 4
