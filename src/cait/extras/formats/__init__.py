"""Networks for other programs: `cait export RUN --format timm`, torch_export or onnx."""

from cait.plugins import Verb

VERBS = {
    "export": Verb(
        "cait.extras.formats.verb:export",
        "write a run's network for other programs: cait export NAME\n[--format timm|torch_export|onnx] [--output PATH]",
    ),
}
