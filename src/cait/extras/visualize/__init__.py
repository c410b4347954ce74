"""Look at a run: attention maps, its worst mistakes, curves, and what differs between runs."""

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
