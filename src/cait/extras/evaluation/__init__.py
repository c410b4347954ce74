"""`cait eval` beyond loss and accuracy: calibration, confusions, thresholds, ReaL, ImageNet-V2, -A, -R and -C."""

from typing import Any, Literal

from cait.plugins import Setting

SETTINGS = [
    Setting(
        "real",
        str | None,
        None,
        "File of ReaL labels, real.json, to validate on too; null takes timm's copy if the data is ImageNet.",
        ("fit", "eval"),
    ),
    Setting(
        "v2",
        str | None,
        None,
        "Folder of ImageNet-V2, or of more images of the same classes, to validate on too.",
        ("fit", "eval"),
    ),
    Setting(
        "extra",
        dict[str, str] | None,
        None,
        "Folder of another evaluation set of the same classes, or of some, under a name of yours: --extra.sketch DIR. "
        "ImageNet-A, -R and -Sketch go by their WordNet folders, ImageNet-C by its corruptions and severities.",
        ("eval",),
    ),
    Setting(
        "tta",
        Literal["hflip"] | None,
        None,
        "Test-time augmentation: hflip scores the mean of the probabilities of an image and its mirror image.",
        ("eval",),
    ),
    Setting(
        "wanted_accuracy",
        float | None,
        None,
        "Accuracy from 0 to 1; finds the probability from which on the answers reach it, for images never to guess at.",
        ("eval",),
    ),
]


def scorers(scoring: Any) -> Any:
    """Count more in each validation."""
    from cait.extras.evaluation.scorer import Evaluation

    return Evaluation(scoring)
