"""Find a learning rate, or the largest batch that fits into memory."""

from cait.plugins import Verb

VERBS = {
    "find-lr": Verb(
        "cait.extras.find.verb:find_lr",
        "draw the loss over a rising learning rate: cait find-lr --config FILE",
        takes="fit",
    ),
    "find-batch": Verb(
        "cait.extras.find.verb:find_batch",
        "the largest batch that fits into memory: cait find-batch --config FILE",
        takes="fit",
    ),
}
