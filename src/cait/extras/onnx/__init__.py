"""Export to ONNX: `cait export RUN --format onnx`."""

EXPORT_FORMATS = {"onnx": "cait.extras.onnx.writer:ONNX"}
