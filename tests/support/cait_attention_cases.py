"""One layer of attention with talking heads: its inputs, and what a backend gives for them."""

import torch

from cait.model.attention import backend_named

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def attention_case(heads, N, dtype, k=48, batch=2):
    """qkv, W_l, b_l, W_w, b_w and the gradient of the output."""
    generator = torch.Generator().manual_seed(heads * 1000 + N)
    shapes = [(batch, N, 3, heads, k), *[(heads, heads), (heads,)] * 2, (batch, N, heads * k)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for tensor in tensors[1:5]:
        tensor *= heads**-0.5
    return [tensor.to(DEVICE, dtype) for tensor in tensors]


def attention_results(case, backend):
    """The output, and the gradients of qkv, W_l, b_l, W_w and b_w."""
    leaves = [tensor.clone().requires_grad_() for tensor in case[:5]]
    out = backend_named(backend)(*leaves, leaves[0].shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, case[5])]
