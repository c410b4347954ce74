"""Begin a project of your own that depends on this package: `cait new NAME`."""

from cait.plugins import Verb

VERBS = {
    "new": Verb(
        "cait.extras.new.verb:new",
        "begin a project of your own: cait new NAME [--into DIR]",
        quick=True,
    )
}
