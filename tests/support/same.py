"""Whether two results are the same to the last bit."""

import torch


def same(a, b):
    """Equality to the last bit, a NaN equal to itself."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(
            a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)
