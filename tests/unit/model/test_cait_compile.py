"""torch.compile and activation checkpointing: the same network, faster or smaller."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch._dynamo
from networks import needs_a_compiler, network, saved_bytes, step
from resumes import assert_resumes
from same import same
from torch._dynamo.utils import counters

from cait import create_model
from cait.model.residual import draw_samples

SMALLEST = dict(
    patch_size=4, embed_dim=16, depth=1, num_heads=2, layer_scale_init=0.5, drop_path_mode="skip"
)
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def no_graphs_of_earlier_tests():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def only_graphs(monkeypatch):
    """Generate no code, which takes most of the time: what is compiled, and how often, is settled before."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def graphs():
    return counters["stats"]["unique_graphs"]


def evaluate(model, images):
    with torch.no_grad():
        return model.eval()(images)


@needs_a_compiler
@pytest.mark.slow
def test_compiled_is_the_eager_network_without_breaks_or_recompilations():
    eager, compiled = network(), network()
    compiled.compile_blocks()
    images = torch.randn(16, 3, 32, 32)
    step(compiled, images, 0)
    evaluate(compiled, images)
    before = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(20):  # with as many different numbers of images kept as chance has it
            close(step(compiled, images, seed), step(eager, images, seed))
        for batch in (16, 5):  # the last batch of a validation set is smaller
            close(evaluate(compiled, images[:batch]), evaluate(eager, images[:batch]))
    assert graphs() == before
    assert not counters["graph_break"]


def test_the_graphs_of_the_first_batch_serve_any_number_of_images(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = create_model("xxs24", 8, 7, **SMALLEST)
    model.compile_blocks()
    images = torch.randn(5, 3, 8, 8)
    evaluate(model, images[:4])
    before = graphs()
    assert before > 0
    for count in (2, 3, 5):
        evaluate(model, images[:count])
    assert graphs() == before


@pytest.mark.slow
def test_small_batches_need_few_graphs_whatever_is_dropped(only_graphs):
    """For each branch one of a lone image and one of more; torch gives up after 8 of a block."""
    batch = 4
    eager = create_model("xxs24", 8, 7, 0.4, **SMALLEST)
    compiled = deepcopy(eager)
    compiled.compile_blocks()
    images = torch.randn(batch, 3, 8, 8)
    kept = set()
    for seed in range(100):
        torch.manual_seed(seed)
        for sample in draw_samples([eager.blocks[0].drop_path] * 2, images):
            kept.add(len(sample[0]))
        results = step(compiled, images, seed)
        if seed < 20:
            close(results, step(eager, images, seed))
    # 1 stands for no image too: one is then computed, times 0
    assert kept == set(range(1, batch + 1))
    for size in (1, 3):
        evaluate(compiled, images[:size])
    # in training, and in evaluation of one image or more
    attention = 2 * 2 + 2
    class_attention = 1 + 2
    assert graphs() <= attention + class_attention


@needs_a_compiler
@pytest.mark.slow
def test_a_copy_of_a_compiled_network_runs_its_own_weights(only_graphs):
    """As the moving average is one."""
    model = network()
    model.compile_blocks()
    images = torch.randn(4, 3, 32, 32)
    before = evaluate(model, images)
    copied = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(evaluate(copied, images), before)
    assert not torch.allclose(evaluate(model, images), before)


@needs_a_compiler
@pytest.mark.slow
def test_a_compiled_run_is_resumed_bit_for_bit(tmp_path):
    """A network is compiled for the size of its first batch, and a resumed run starts with another."""
    settings = dict(compile=True, drop_path_rate=0.3)
    assert_resumes(tmp_path / "x.ckpt", settings, between=torch._dynamo.reset, count=18)


@pytest.mark.parametrize("mode", ["mask", "skip"])
def test_checkpointed_activations_give_the_same_gradients(mode):
    images = torch.randn(8, 3, 32, 32)
    plain, saving = network(mode), network(mode)
    saving.grad_checkpointing = True
    assert same(step(saving, images, 3), step(plain, images, 3))
    memory = []
    for model in (plain, saving):
        torch.manual_seed(0)
        memory.append(saved_bytes(partial(model.train(), images)))
    assert memory[1] < 0.6 * memory[0]
