"""The kernels of attention with talking heads: under Triton's interpreter here, compiled where there is a GPU.

Triton decides when it is imported whether it interprets, so the tests that run kernels do so in a
process of their own, which `test_the_kernels_under_the_interpreter` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import LIMIT, environment
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cait
from cait.errors import UserError
from cait.model.attention import talking_heads_attention

pytest.importorskip("triton", reason="Triton is not on this platform")

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
runs = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run under Triton's interpreter, in another process")
on_gpu = pytest.mark.skipif(not CUDA, reason="no GPU here")

# Few shapes, for the interpreter takes seconds for each, by blocks of 128 × 128, and on a GPU each number of heads
# takes long to compile. The interpreter has no products of bfloat16.
FEW = [
    (4, 1, torch.float32),
    (3, 33, torch.float32),
    (1, 130, torch.float32),
    (4, 50, torch.float16),
    pytest.param(6, 131, torch.float16, marks=pytest.mark.slow),
    (8, 7, torch.float16),
    pytest.param(16, 5, torch.float16, marks=pytest.mark.slow),
]
MODELS = [(heads, N) for N in (196, 197, 576, 784) for heads in (4, 6, 8, 16)]


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels are tested here, not in another process")
def test_the_kernels_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    # `make test-kernel` has the models' own shapes
    command = [sys.executable, "-m", "pytest", __file__, "-m", pytestconfig.option.markexpr]
    done = subprocess.run(
        command, env=environment() | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout[-5000:]


def case(heads: int, N: int, dtype: torch.dtype, k: int = 48, batch: int = 1) -> list[Tensor]:
    """qkv, W_l, b_l, W_w, b_w and the gradient of the output."""
    generator = torch.Generator().manual_seed(heads * 1000 + N)
    shapes = [(batch, N, 3, heads, k), *[(heads, heads), (heads,)] * 2, (batch, N, heads * k)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for tensor in tensors[1:5]:
        tensor *= heads**-0.5
    return [tensor.to(DEVICE, dtype) for tensor in tensors]


def results(given: list[Tensor], backend: str) -> list[Tensor]:
    """The output and the gradients of qkv, W_l, b_l, W_w and b_w."""
    qkv, weight_l, bias_l, weight_w, bias_w = (tensor.clone().requires_grad_() for tensor in given[:5])
    proj_l, proj_w = (torch.nn.Linear(len(bias_l), len(bias_l), device=DEVICE) for _ in range(2))
    proj_l.weight, proj_l.bias = torch.nn.Parameter(weight_l), torch.nn.Parameter(bias_l)
    proj_w.weight, proj_w.bias = torch.nn.Parameter(weight_w), torch.nn.Parameter(bias_w)
    out = talking_heads_attention(qkv, proj_l, proj_w, qkv.shape[-1] ** -0.5, backend)
    leaves = (qkv, proj_l.weight, proj_l.bias, proj_w.weight, proj_w.bias)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[5])]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm().clamp(min=1)).item() for a, b in zip(got, exact, strict=True)]


def no_less_exact(given: list[Tensor], luck: float = 1.2) -> str:
    """Hold the fused attention's errors to the reference's, both beside the reference in float64; and tell them."""
    exact = results([tensor.double() for tensor in given], "reference")
    fused, plain = results(given, "fused"), results(given, "reference")
    for tensors in (fused, plain, exact):
        bias_l = tensors.pop(3)  # it cancels in the softmax: what the reference has there is rounding
        if tensors is fused:
            assert not bias_l.any()
    # The maps are rounded at most where the reference rounds them, so it loses no more than the reference
    # does, but for luck; and in float32, for the order of its sums, some last bits.
    few_bits = 4 * torch.finfo(torch.float32).eps
    pairs = list(zip(errors(fused, exact), errors(plain, exact), strict=True))
    told = " | ".join(f"{error:.1e}, {of_plain:.1e}" for error, of_plain in pairs)
    assert all(error <= luck * of_plain + few_bits for error, of_plain in pairs), told
    return told


@runs
@pytest.mark.parametrize(("heads", "N", "dtype"), FEW)
def test_no_less_exact_than_the_reference(heads: int, N: int, dtype: torch.dtype) -> None:
    no_less_exact(case(heads, N, dtype, batch=2 if heads < 4 else 1))


@runs
@pytest.mark.kernel
@pytest.mark.parametrize(("heads", "N"), MODELS)
def test_no_less_exact_at_the_models_own_shapes(heads: int, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cait.model import fused

    monkeypatch.setattr(fused, "INTERPRETED", fused.Tile(256, 256, 4, 1))  # fewer programs, so less time
    given = case(heads, N, torch.bfloat16 if CUDA else torch.float16, batch=2 if CUDA else 1)
    print(f"| {heads} × {N} | {no_less_exact(given, luck=1.0)} |", flush=True)
    if CUDA or N < 200:  # the interpreter has but one order
        the_same_bits_twice(given)


@runs
@pytest.mark.parametrize("name", ["WIDE", "TALL", "SMALL", "NARROW", "HIGH"])
def test_every_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cait.model import fused

    tile = getattr(fused, name, fused.Tile(64, 32, 4, 1))  # HIGH: the warps share its rows out, not its columns
    monkeypatch.setattr(fused, "tiling", lambda qkv: fused.Tiling(*[tile] * 4))
    no_less_exact(case(2, 70, torch.float16, k=16))


@runs
@pytest.mark.parametrize("k", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_any_width_and_any_layout(k: int) -> None:
    given = case(4, 20, torch.float32, k, batch=2)
    no_less_exact(given)
    expected = results(given, "fused")
    wide = torch.zeros(2, 25, 3, 4, k + 3, device=DEVICE)
    for view in (wide[:, 2:22, :, :, 1:-2], torch.zeros(20, 2, 3, 4, k, device=DEVICE).transpose(0, 1)):
        view.copy_(given[0])
        torch.testing.assert_close(fused_output(view, given), expected[0], rtol=0, atol=0)


def fused_output(qkv: Tensor, given: list[Tensor]) -> Tensor:
    from cait.model import fused

    return fused.talking_heads(qkv, *given[1:5], qkv.shape[-1] ** -0.5)[0]


@runs
def test_scores_far_from_zero() -> None:
    given = case(4, 40, torch.float16)
    given[0][:, :, :2] *= 12  # scores of hundreds, probabilities of 0 and 1
    no_less_exact(given)
    given[0][:, :, 0] = 30  # and all of a row far below 0, where what lies beyond the last key would win
    given[0][:, :, 1] = -30
    assert all(tensor.isfinite().all() for tensor in results(given, "fused"))


def the_same_bits_twice(given: list[Tensor]) -> None:
    for first, second in zip(results(given, "fused"), results(given, "fused"), strict=True):
        assert torch.equal(first, second)


@runs
def test_the_same_bits_twice() -> None:
    the_same_bits_twice(case(2, 140, torch.float16, k=16))


@runs
def test_no_image_at_all() -> None:
    out, d_qkv, *others = results(case(2, 5, torch.float32, k=16, batch=0), "fused")
    assert out.shape == (0, 5, 32)
    assert d_qkv.shape == (0, 5, 3, 2, 16)
    assert not any(gradient.any() for gradient in others)


@runs
def test_the_operators_keep_pytorchs_rules() -> None:
    from cait.model import fused

    qkv, *parameters, d_out = case(1, 5, torch.float32, k=16)
    inputs = [tensor.requires_grad_() for tensor in (qkv, *parameters)]
    torch.library.opcheck(fused.talking_heads, (*inputs, 0.25))
    _, lse = fused.talking_heads(*inputs, 0.25)
    weight_l, _, weight_w, bias_w = parameters
    given = [tensor.detach() for tensor in (d_out, qkv, lse, weight_l, weight_w, bias_w)]
    torch.library.opcheck(fused.talking_heads_backward, (*given, 0.25))


def network(backend: str = "fused") -> torch.nn.Module:
    torch.manual_seed(0)
    fields: dict = dict(patch_size=8, embed_dim=32, num_heads=2, depth=1, layer_scale_init=0.5)
    return cait.create_model("xxs24", 24, 10, 0.0, attention_backend=backend, **fields).to(DEVICE)


def step(model: torch.nn.Module, images: Tensor, call=None) -> list[Tensor]:
    model.zero_grad()
    logits = model(images) if call is None else call(images)
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@runs
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_network_with_it_compiled_checkpointed_and_plain(autocast: bool) -> None:
    images = torch.randn(2, 3, 24, 24, device=DEVICE)
    model = network()
    with torch.autocast(DEVICE, torch.float16, enabled=autocast):
        expected = step(model, images)
        for ours, reference in zip(expected, step(network("reference"), images), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-2, atol=2e-3 if autocast else 1e-5)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        again = torch.nn.Sequential(model)
        for call in (compiled, lambda images: checkpoint(again, images, use_reentrant=False)):
            for ours, reference in zip(step(model, images, call), expected, strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-4 if autocast else 1e-6)


@runs
def test_no_map_is_kept() -> None:
    kept = []
    qkv, *parameters, _ = case(2, 100, torch.float32, k=16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        fused_output(qkv.requires_grad_(), [qkv, *parameters])
    assert 0 < max(kept) == qkv.numel() < 100 * 100


@pytest.mark.parametrize(
    ("heads", "k", "dtype", "words"),
    [
        (4, 48, torch.float64, "bfloat16, float16 or float32, not float64"),
        (17, 8, torch.float32, "16 heads"),
        (2, 65, torch.float32, "64 channels"),
        pytest.param(
            4, 48, torch.float32, "CUDA", marks=pytest.mark.skipif(CUDA or INTERPRETED, reason="there it runs")
        ),
    ],
)
def test_where_it_cannot_run_is_told(heads: int, k: int, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        results(case(heads, 5, dtype, k), "fused")
    assert "\n" not in str(caught.value)
    results(case(heads, 5, dtype, k), "auto")


def test_without_triton_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """That all else runs without it, test_house has."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "cait.model.fused", raising=False)
    monkeypatch.delattr(cait.model, "fused", raising=False)
    with pytest.raises(UserError, match="attention_backend fused needs Triton"):
        results(case(2, 5, torch.float32, 8), "fused")


def pretended(monkeypatch: pytest.MonkeyPatch, heads: int, dtype: torch.dtype, kibibytes: int) -> SimpleNamespace:
    """A tensor qkv on a GPU that is not here, with so much shared memory a block."""
    device = SimpleNamespace(major=8, minor=6, name="a small GPU", shared_memory_per_block_optin=kibibytes * 2**10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: device)
    return SimpleNamespace(shape=(2, 196, 3, heads, 48), dtype=dtype, is_cuda=True, device=torch.device("cuda"))


def test_on_a_small_gpu_tiles_are_narrow_or_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from cait.model import fused

    small = pretended(monkeypatch, 8, torch.bfloat16, 99)
    assert fused.refusal(small) is None
    assert set(fused.tiling(small)) == {fused.NARROW}
    assert fused.tiling(pretended(monkeypatch, 8, torch.bfloat16, 227)) == fused.default(8)
    words = fused.refusal(pretended(monkeypatch, 16, torch.float32, 227))  # so that "auto" passes it by
    assert words == "more shared memory than a small GPU has for 16 heads of float32"


class Refusing:
    """A kernel that does not fit, and keeps the grid it was asked for."""

    arg_names = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        from triton.runtime.errors import OutOfResources

        def launch(*_: Any, **__: Any) -> None:
            self.grid = grid
            raise OutOfResources(240000, 232448, "shared memory")

        return launch


def test_a_tile_that_does_not_fit_is_one_line_and_images_are_not_65535_at_most() -> None:
    from cait.model import fused

    kernel = Refusing()
    with pytest.raises(UserError, match="240000 of shared memory, of which there is 232448; take auto") as caught:
        fused._launch(kernel, fused.WIDE, torch.empty(70000, 40, 3, 2, 8, device="meta"), parts=4)
    assert "\n" not in str(caught.value)
    assert kernel.grid == (2 * 70000, 4)  # the first axis alone may pass 65535


def test_tokens_too_far_apart_for_32_bits_are_brought_together() -> None:
    from cait.model import fused

    for stride, kept in ((2**31 // 197, True), (2**31 // 197 + 1, False)):
        qkv = torch.empty_strided((2, 197, 3, 2, 8), (48, stride, 16, 8, 1), device="meta")
        assert (fused._prepared(qkv) is qkv) == kept


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", ["forward", "weights", "queries", "keys"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(name: str) -> None:
    from kernel import compiled

    from cait.model import fused

    tile = getattr(fused.default(4), name)
    found = compiled(name, tile, 4)
    assert found["shared"] <= fused.shared_memory(tile, 4, 48, torch.bfloat16) < 227 * 2**10
    assert found["stack"] <= 256  # bytes of a thread: a few addresses, no tile


def test_the_default_tiles_fit_an_h100() -> None:
    from cait.model import fused

    for heads in range(1, 17):
        for tile in fused.default(heads):
            assert fused.shared_memory(tile, heads, 48, torch.bfloat16) <= 227 * 2**10
