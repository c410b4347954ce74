"""A network as a graph of operations: torch.export's file, and ONNX's, which ONNX Runtime reads back."""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cait.errors import UserError, to_install

Forward = Callable[[Tensor], Tensor]
"""Images [B, C, S, S] to logits [B, num_classes]."""


def write_torch_export(model: nn.Module, path: Path, metadata: Mapping[str, Any], shape: Sequence[int]) -> Forward:
    """Write a network for `torch.export.load`; the metadata are "metadata.json" among the `extra_files`."""
    with quiet():
        program = torch.export.export(model, **example(shape), strict=False)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        data = io.BytesIO()  # torch would end the process on a full disk
        torch.export.save(program, data, extra_files={"metadata.json": json.dumps(metadata)})
        path.write_bytes(data.getvalue())
        return torch.export.load(path).module()


def write_onnx(model: nn.Module, path: Path, metadata: Mapping[str, Any], shape: Sequence[int]) -> Forward:
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


def example(shape: Sequence[int]) -> dict[str, Any]:
    """The exporters trace the network with two images, which stand for any number."""
    return dict(args=(torch.zeros(2, *shape),), dynamic_shapes=({0: torch.export.Dim("batch")},))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the exporters' warnings and progress: a user can do nothing about them."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        yield
