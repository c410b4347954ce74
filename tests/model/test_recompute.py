"""Attention that computes its maps again in the backward pass, against the reference."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from attention_cases import DEVICE, attention_case, attention_results

from cait.model import recompute
from cait.model.recompute import TalkingHeads, padded
from cait.model.talking_heads import attend


@pytest.mark.parametrize("heads", [4, 6, 8, 16])
@pytest.mark.parametrize("N", [1, 7, 196, 197, *(pytest.param(N, marks=pytest.mark.slow) for N in (576, 784))])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, None)]
)
def test_recomputing_attention_is_the_reference(
    heads: int, N: int, dtype: torch.dtype, tolerance: float | None
) -> None:
    case = attention_case(heads, N, dtype, batch=1 if N > 500 else 2)
    plain_case = (case[0].detach().requires_grad_(), *case[1:])
    exact = [
        tensor.double()
        for tensor in attention_results(tuple(deepcopy(part).double() for part in plain_case), "reference")
    ]

    def errors(backend: str) -> list[float]:
        got = attention_results(case, backend)
        return [((a.double() - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in zip(got, exact, strict=True)]

    for number, (error, plain) in enumerate(zip(errors("recompute"), errors("reference"), strict=True)):
        if number == 3:  # proj_l's bias cancels: what the reference has there is rounding
            continue
        # Where precision is lost, no more than the reference loses.
        assert error <= (tolerance if tolerance else 1.5 * plain + 4e-3), number


def test_float16_holds_scores_whose_products_it_does_not() -> None:
    """q·k passes 65504, scale · q·k does not: timm, which scales first, trains on."""
    qkv, proj_l, proj_w, weights = attention_case(4, 40, torch.float16)
    qkv = (qkv.detach() * torch.tensor([100.0, 100.0, 1.0], device=DEVICE).half()[:, None, None]).requires_grad_()
    assert (qkv[:, :, 0].double() * qkv[:, :, 1].double()).sum(-1).abs().max() > 1.1e5
    case = (qkv, proj_l, proj_w, weights)
    exact_case = (qkv.detach().double().requires_grad_(), *(deepcopy(part).double() for part in case[1:]))
    exact = attention_results(exact_case, "reference")
    losses = []
    for backend in ("reference", "recompute"):
        got = attention_results(case, backend)
        assert all(tensor.isfinite().all() for tensor in got), backend
        losses.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)])
    for number, (plain, ours) in enumerate(zip(*losses, strict=True)):
        assert number == 3 or ours <= 1.5 * plain + 4e-3, (number, ours, plain)  # proj_l's bias cancels


@pytest.mark.parametrize(("N", "dtype"), [(7, torch.float64), (33, torch.float64), (20, torch.bfloat16)])
def test_padded_maps_give_the_same(N: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are in a GPU's memory."""
    case = attention_case(4, N, dtype)
    expected = attention_results(case, "recompute")
    monkeypatch.setattr(recompute, "_columns", lambda qkv: padded(qkv.shape[1]))
    for ours, plain in zip(attention_results(case, "recompute"), expected, strict=True):
        tolerance = 1e-12 if dtype == torch.float64 else 1e-2
        assert (ours - plain).double().norm() <= tolerance * plain.double().norm() + 1e-12


def test_recomputing_attention_passes_gradcheck() -> None:
    qkv, proj_l, proj_w, _ = attention_case(3, 5, torch.float64, width=4)
    bias_l = proj_l.bias.detach()  # its gradient is 0, which numerical differences only come near
    inputs = (qkv, proj_l.weight, bias_l, proj_w.weight, proj_w.bias, 0.5)
    assert torch.autograd.gradcheck(TalkingHeads.apply, inputs)


def test_recomputing_keeps_one_map() -> None:
    kept: dict[str, int] = {}
    for backend in ("reference", "recompute"):
        case = attention_case(4, 196, torch.bfloat16)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if tensor.numel() >= 196 * 196:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        qkv, proj_l, proj_w, _ = case
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast(DEVICE, torch.bfloat16):
            attend(qkv * 1, proj_l.float(), proj_w.float(), 0.1, backend)
        kept[backend] = sum(size for size in sizes.values() if size >= 2 * 4 * 196 * 196 * 2)
    one = 2 * 4 * 196 * 196 * 2  # a map of bfloat16
    assert kept["recompute"] == one
    assert kept["reference"] >= 3 * one
