"""List the runs in logs/: how far they are, their best accuracy."""

from cait.plugins import Verb

VERBS = {
    "runs": Verb(
        "cait.extras.runs.verb:runs",
        "list the runs in logs/, how far they are and their best accuracy: cait runs [--json]",
        quick=True,
    )
}
