"""`cait eval` beyond loss and accuracy: calibration, confusions, ReaL, ImageNet-V2, -A, -R and -Sketch."""

from typing import Any

from cait.plugins import Setting

SETTINGS = [
    Setting(
        "extra",
        dict[str, str] | None,
        None,
        "Folder of another evaluation set of the same classes, or of some, under a name of yours: --extra.sketch DIR. "
        "ImageNet-V2 goes by the indices of the classes, -A, -R and -Sketch go by their WordNet folders.",
        ("eval",),
    ),
]


def scorers(scoring: Any) -> Any:
    from cait.extras.evaluation.scorer import Evaluation

    return Evaluation(scoring)
