"""A network as an ONNX file, read back by ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cait.errors import UserError, to_install
from cait.extras.formats.exporting import Format, Forward, Metadata, example, quiet


def _write(model: nn.Module, path: Path, metadata: Metadata, shape: Sequence[int]) -> Forward:
    """Write a network that takes "images" [B, C, S, S] of any B.

    It gives "logits" [B, num_classes], or the outputs that its attribute `output_names` names, "logits" first. The
    metadata become the file's `metadata_props`, as JSON where they are no text.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise UserError(f"ONNX needs the package {error.name}: {to_install('[export]')}") from error
    with quiet():
        program: Any = torch.onnx.export(
            model,
            **example(shape),
            input_names=["images"],
            output_names=getattr(model, "output_names", ["logits"]),
            dynamo=True,
            verbose=False,
        )
        for name, value in metadata.items():
            program.model.metadata_props[name] = value if isinstance(value, str) else json.dumps(value)
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # where each line of the source lies on this machine
        program.save(path, external_data=False)  # one file; above 2 GB the weights still go beside it
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def read(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    return read


ONNX = Format(_write, "model.onnx", 1e-4)
