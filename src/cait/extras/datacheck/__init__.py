"""Count the classes and images of a data folder, decode some of them, and name what is wrong.

Where a run holds out images, copies of these do not train. A line names classes that are nearly one.
"""

from typing import Any

from cait.plugins import Run, Verb

VERBS = {
    "check": Verb(
        "cait.extras.datacheck.check:check",
        "count a data folder, decode a sample: cait check DIR [--images 2000]",
    )
}


def leave_out(source: Any, images: Any) -> Any:
    from cait.extras.datacheck.same_bytes import without_copies

    return without_copies(source, images)


def callbacks(run: Run) -> list[Any]:
    from cait.extras.datacheck.class_names import tell_of_names

    tell_of_names(run.data)
    return []
