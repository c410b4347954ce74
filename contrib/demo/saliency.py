"""A network that also says where it looks, for the page."""

from typing import Any

from torch import Tensor, nn

from cait.model.cait import CaiT


class WithSaliency(nn.Module):
    """A CaiT that also says where it looks.

    Images [B, C, S, S] to logits [B, num_classes] and saliency [B, s, s]: the weights of the class token for the
    s × s patches in the first class-attention block, the mean over the heads.
    """

    output_names = ("logits", "saliency")

    def __init__(self, cait: CaiT) -> None:
        super().__init__()
        self.cait = cait

    @classmethod
    def around(cls, network: nn.Module) -> nn.Module:
        """The network with its saliency, or as it is if it has no class token to ask."""
        return (
            cls(network)
            if isinstance(network, CaiT) and len(network.blocks_token_only)
            else network
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        maps: list[Tensor] = []
        attn: Any = self.cait.blocks_token_only[0].attn

        def note(_: Any, arguments: tuple[Tensor, ...]) -> None:
            maps.append(attn.maps(arguments[0]))

        with attn.register_forward_pre_hook(note):
            logits = self.cait(images)
        side = images.shape[-1] // self.cait.config.patch_size
        patches = maps[0][:, :, 0, -side * side :]
        return logits, patches.mean(dim=1).unflatten(-1, (side, side))
