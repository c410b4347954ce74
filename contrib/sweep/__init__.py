"""Search settings for the best run, in trials that Optuna draws and stops early."""

from cait.plugins import Verb

VERBS = {
    "sweep": Verb(
        "contrib.sweep.verb:sweep",
        "search settings for the best run, in trials: cait sweep SPACE.yaml",
    )
}
