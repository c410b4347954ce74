"""torch.compile and activation checkpointing: the same network, faster or smaller."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from modules import assert_resumes
from networks import needs_a_compiler, network, saved_bytes, step
from torch import Tensor
from torch._dynamo.utils import counters

from cait import create_model
from cait.model.cait import CaiT
from cait.model.residual import draw_samples
from cait.train.callbacks import EMA
from cait.train.metrics import EvalMetrics

SMALLEST: dict = dict(
    patch_size=4, embed_dim=16, depth=1, num_heads=2, layer_scale_init=0.5, drop_path_mode="skip"
)


@pytest.fixture(autouse=True)
def no_graphs_of_earlier_tests() -> None:
    torch._dynamo.reset()


@pytest.fixture
def only_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate no code, which takes most of the time: what is compiled, and how often, is settled before."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def evaluate(model: CaiT, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(images)


@needs_a_compiler
@pytest.mark.slow
def test_compiled_is_the_eager_network_without_breaks_or_recompilations() -> None:
    eager, compiled = network(), network()
    compiled.compile_blocks()
    images = torch.randn(16, 3, 32, 32)
    step(compiled, images, 0), evaluate(compiled, images)
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(20):  # with as many different numbers of images kept as chance has it
            for ours, reference in zip(
                step(compiled, images, seed), step(eager, images, seed), strict=True
            ):
                torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
        for batch in (16, 5):  # the last batch of a validation set is smaller
            torch.testing.assert_close(
                evaluate(compiled, images[:batch]), evaluate(eager, images[:batch])
            )
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


def test_the_graphs_of_the_first_batch_serve_any_number_of_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = create_model("xxs24", 8, 7, **SMALLEST)
    model.compile_blocks()
    images = torch.randn(5, 3, 8, 8)
    before = counters["stats"]["unique_graphs"]
    evaluate(model, images[:4])
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > before
    for count in (2, 3, 5):
        evaluate(model, images[:count])
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_small_batches_need_few_graphs_whatever_is_dropped(only_graphs: None) -> None:
    """For each branch one of a lone image and one of more; torch gives up after 8 of a block."""
    batch = 4
    eager, compiled = (create_model("xxs24", 8, 7, 0.4, **SMALLEST) for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    compiled.compile_blocks()
    images = torch.randn(batch, 3, 8, 8)
    kept, before = set(), counters["stats"]["unique_graphs"]
    for seed in range(100):
        torch.manual_seed(seed)
        kept |= {
            len(sample[0])
            for sample in draw_samples([eager.blocks[0].drop_path] * 2, images)
            if sample
        }
        ours = step(compiled, images, seed)
        if seed < 20:
            for got, reference in zip(ours, step(eager, images, seed), strict=True):
                torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-5)
    # 1 stands for no image too: one is then computed, times 0
    assert kept == set(range(1, batch + 1))
    for size in (1, 3):
        evaluate(compiled, images[:size])
    # in training, and in evaluation of one image or more
    of_attention, of_class_attention = (
        2 * 2 + 2,
        1 + 2,
    )
    assert counters["stats"]["unique_graphs"] - before <= of_attention + of_class_attention


@needs_a_compiler
@pytest.mark.slow
def test_a_copy_of_a_compiled_network_runs_its_own_weights(only_graphs: None) -> None:
    model = network()
    model.compile_blocks()
    images = torch.randn(4, 3, 32, 32)

    class Module:
        device, dtype, new_metrics = torch.device("cpu"), torch.float32, partial(EvalMetrics, 10)

    Module.model = model
    ema = EMA(0.5)
    ema._start(Module)
    before = evaluate(model, images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(evaluate(ema.average, images), before)
    assert not torch.allclose(evaluate(model, images), before)


@needs_a_compiler
@pytest.mark.slow
def test_a_compiled_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """A network is compiled for the size of its first batch, and a resumed run starts with another."""
    net = dict(compile=True, drop_path_rate=0.3)
    assert_resumes(tmp_path / "x.ckpt", net, count=18, between=torch._dynamo.reset)


@pytest.mark.parametrize("mode", ["mask", "skip"])
def test_checkpointed_activations_give_the_same_gradients(mode: str) -> None:
    plain, saving = network(mode), network(mode)
    saving.grad_checkpointing = True
    images, of_pass = torch.randn(8, 3, 32, 32), []
    for model in (plain, saving):
        torch.manual_seed(0)
        of_pass.append(saved_bytes(partial(model.train(), images)))
    assert of_pass[1] < 0.6 * of_pass[0]
    for ours, reference in zip(step(saving, images, 3), step(plain, images, 3), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)
