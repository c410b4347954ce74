"""A head that sees every stage of a timm network: `--model.fields.intermediates true`.

Of images unlike those that the weights were trained on, earlier stages tell what the last no longer holds ("Head2Toe:
Utilizing Intermediate Representations for Better Transfer Learning", Evci et al., ICML 2022).
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cait.errors import UserError, told_as
from cait.model.network import in_evaluation


class SeesIntermediates:
    """Comes before the class of a timm network, whose weights keep their names; its head is wider."""

    asked: ClassVar[dict[str, bool]]
    """Arguments of timm's `forward_intermediates`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1], bool(self.asked)), self.__dict__

    def intermediates(self: Any, images: Tensor) -> Tensor:
        """[B, D] of images [B, C, S, S]: the means of what the stages give, then what the head saw before."""
        last, stages = self.forward_intermediates(images, **self.asked)
        return torch.cat(
            [*(stage.mean((2, 3)) for stage in stages), self.forward_head(last, pre_logits=True)],
            dim=1,
        )

    def forward(self: Any, images: Tensor) -> Tensor:
        return self.get_classifier()(self.intermediates(images))


@cache
def seeing(kind: type, has_more: bool) -> type:
    """The class of a timm network of this kind whose head sees its intermediates, maybe more than a stage per size."""
    attributes = {"__module__": __name__, "asked": {"extra_blocks": True} if has_more else {}}
    return type(f"{kind.__name__}WithIntermediates", (SeesIntermediates, kind), attributes)


def _blank(kind: type, has_more: bool) -> Any:
    """An object without anything, as pickle and copy begin with."""
    return object.__new__(seeing(kind, has_more))


def see_intermediates(network: Any, is_asked: Any, shape: Sequence[int]) -> nn.Module:
    """Have the head of a timm network for images of `shape` [C, S, S] see its intermediates, if that `is_asked`.

    The head is a new one. Raises UserError if the network does not give them, or its head is not one linear layer.
    """
    if not isinstance(is_asked, bool):
        raise UserError(f"intermediates must be true or false, got {is_asked!r}")
    if not is_asked:
        return network
    kind: Any = type(network)
    head = network.get_classifier()
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{kind.__name__} does not end in one linear layer, which is to see its intermediates"
        )
    if not hasattr(kind, "forward_intermediates"):
        raise UserError(
            f"{kind.__name__} gives no intermediates: timm has no forward_intermediates() for it"
        )
    if any(type(layer).__name__.startswith("PatchDropout") for layer in network.modules()):
        raise UserError(
            f"{kind.__name__} gives no intermediates with patch_drop_rate, which leaves no map; leave one out"
        )
    network.__class__ = seeing(
        kind, "extra_blocks" in inspect.signature(network.forward_intermediates).parameters
    )
    refusal = told_as(f"{kind.__name__} gives no intermediates for images of {list(shape)}")
    with refusal, in_evaluation(network), torch.no_grad():
        width = network.intermediates(torch.zeros(1, *shape)).shape[1]
    path = next(name for name, layer in network.named_modules() if layer is head)
    network.set_submodule(path, nn.Linear(width, head.out_features))
    return network
