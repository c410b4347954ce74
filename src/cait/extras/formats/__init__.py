"""timm's, the release's and ONNX files: `cait export RUN --format timm`, release or onnx."""

EXPORT_FORMATS = {
    "timm": "cait.extras.formats.timm_files:TIMM",
    "release": "cait.extras.formats.timm_files:RELEASE",
    "torch_export": "cait.model.formats:TORCH_EXPORT",
    "onnx": "cait.extras.formats.onnx_file:ONNX",
}
"""In the order in which `cait export --help` lists them."""
