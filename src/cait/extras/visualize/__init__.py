"""Look at a run: attention maps, its worst mistakes, curves, and what differs between runs."""

from typing import Any

from cait.plugins import Verb

VERBS = {
    "visualize": Verb(
        "cait.extras.visualize.verb:visualize",
        "draw attention maps of images, and a page of what a run gets wrong:\n"
        "cait visualize NAME [--images FILE|DIR ...] [--raw]",
    ),
    "compare": Verb(
        "cait.extras.visualize.compare:compare",
        "what differs between runs, and their curves: cait compare NAME ... [--output FILE]",
    ),
}
GROUPS = {"network": "cait.extras.visualize:AttentionMaps"}


class AttentionMaps:
    """A base of `cait.model.cait.CaiT`."""

    def maps(self, images: Any) -> Any:
        """The attention maps of images [B, C, S, S]; see `cait.extras.visualize.attention_maps.attention_maps`."""
        from cait.extras.visualize.attention_maps import attention_maps

        return attention_maps(self, images)
