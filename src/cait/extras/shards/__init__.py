"""Pack a data set into chunks, and train from them in a folder or in S3."""

from cait.plugins import Verb

VERBS = {
    "shards": Verb(
        "cait.extras.shards.verb:shards",
        "pack a data set into chunks, to train from a folder or S3: cait shards DIR OUT",
        takes="files",
    )
}
