"""Cross-validation, and the labels that it doubts: `cait crossval`."""

from cait.plugins import Verb

VERBS = {
    "crossval": Verb(
        "contrib.crossval.verb:crossval",
        "train on every fold, give the mean and its interval: cait crossval NAME --data.root DIR",
    )
}
