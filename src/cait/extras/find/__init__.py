"""Find a learning rate, or the largest batch that fits into memory."""

from cait.plugins import Verb

RATE, BATCH = "draw the loss over a rising learning rate", "the largest batch that fits into memory"
VERBS = {
    "find-lr": Verb("cait.extras.find.verb:find_lr", f"{RATE}: cait find-lr --config FILE"),
    "find-batch": Verb("cait.extras.find.verb:find_batch", f"{BATCH}: cait find-batch --config FILE"),
}
