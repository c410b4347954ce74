"""Networks for other programs: `cait export RUN --format timm`, release, torch_export or onnx."""

from cait.plugins import Verb

VERBS = {
    "export": Verb(
        "cait.extras.formats.verb:export",
        "write a run's network for other programs:\n"
        "cait export NAME [--format timm|release|...] [--raw] [--output PATH]",
    ),
}
EXPORT_FORMATS = {
    "timm": "cait.extras.formats.timm_files:TIMM",
    "release": "cait.extras.formats.timm_files:RELEASE",
    "torch_export": "cait.extras.exporting:TORCH_EXPORT",
    "onnx": "cait.extras.formats.onnx_file:ONNX",
}
"""In the order in which `cait export --help` lists them."""
