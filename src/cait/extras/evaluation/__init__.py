"""What `cait eval` counts beyond loss and accuracy, on further sets too."""

from cait.plugins import Setting

SETTINGS = [
    Setting(
        "real",
        str | None,
        None,
        "File of ReaL labels, real.json, to validate on too; null takes timm's copy if the data is ImageNet.",
    ),
    Setting(
        "v2", str | None, None, "Folder of ImageNet-V2, or of more images of the same classes, to validate on too."
    ),
]
