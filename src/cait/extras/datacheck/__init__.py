"""Count the classes and images of a data folder, decode some of them, and name what is wrong."""

from cait.plugins import Verb

VERBS = {
    "check": Verb(
        "cait.extras.datacheck.check:check",
        "count a data folder, decode a sample: cait check DIR [--images 2000]",
    )
}
