"""Show the images, loss and gradients of past steps, to the bit."""

from cait.plugins import Verb

VERBS = {
    "replay": Verb(
        "contrib.replay.verb:replay",
        "show the images, loss and gradients of past steps, to the bit:\n"
        "cait replay NAME --step N [--count K] [--data-only] [--output DIR]",
    )
}
