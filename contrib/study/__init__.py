"""Does depth pay? Train LayerScale and its rivals at several depths."""

from cait.plugins import Verb

VERBS = {
    "study": Verb(
        "contrib.study.verb:study",
        "train LayerScale and its rivals at several depths: cait study [--size full]",
    )
}
