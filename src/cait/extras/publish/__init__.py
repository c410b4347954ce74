"""Share a run: its network for timm, the Hugging Face Hub, torch.export or ONNX, and its model card."""

from importlib.util import find_spec

from cait.errors import UserError, to_install
from cait.plugins import Verb
from cait.run.program import Program

VERBS = {
    "card": Verb(
        "cait.extras.publish.card:card",
        "write a run's model card for the Hugging Face Hub: cait card NAME\n[OWNER/NAME], which adds timm's files",
    ),
    "export": Verb(
        "cait.extras.publish:export",
        "write a run's network for other programs: cait export NAME\n[--format timm|torch_export|onnx] [--output PATH]",
    ),
}


def export(arguments: list[str], program: Program) -> None:
    """`cait export`; the packages for ONNX, if they are missing, are told before anything that takes long."""
    asks = {"onnx", "--format=onnx"} & {*arguments}
    if missing := [name for name in ("onnxruntime", "onnxscript") if asks and find_spec(name) is None]:
        raise UserError(f"ONNX needs the package {missing[0]}: {to_install('[export]')}")
    from cait.extras.publish.exporting import export_run

    export_run(arguments, program)
