"""Try a run for three minutes before it trains for days: memory, hours, what is slow, stop and resume."""

from cait.plugins import Verb

VERBS = {
    "rehearse": Verb(
        "cait.extras.rehearse.verb:rehearse",
        "try a long run here: memory, hours, stop and resume: cait rehearse [settings of fit]",
        quick=True,
    )
}
