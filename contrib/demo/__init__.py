"""A page that runs a run's network in the browser."""

from cait.plugins import Verb

VERBS = {
    "demo": Verb(
        "contrib.demo.verb:demo",
        "write a page that runs a run's network in the browser:\n"
        "cait demo NAME [--samples N] [--output DIR] [--runtime FILE.tgz|DIR]",
    )
}
