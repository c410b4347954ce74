"""Networks in other programs' formats, by the formats' names.

Each file is read back by the library that it is for, and must give the network's logits before it appears.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cait import disk, plugins
from cait.errors import UserError

FORMATS = {
    "timm": "cait.extras.formats.timm_files:TIMM",
    "torch_export": "cait.extras.formats.exporting:TORCH_EXPORT",
    "onnx": "cait.extras.formats.onnx_file:ONNX",
}
ANY = "timm takes CaiT as published and its own networks, onnx and torch_export take any"
Forward = Callable[[Tensor], Tensor]
"""Images [B, C, S, S] to logits [B, num_classes]."""
Metadata = Mapping[str, Any]
"""What travels with the weights: class_names, img_size and how images are prepared."""


class Format(NamedTuple):
    """A format to write networks in."""

    write: Callable[[Any, Path, Metadata, Sequence[int]], Forward]
    """Called with (network, path, metadata, input shape); returns what the reading library reads. A UserError says why
    the format cannot hold the network."""
    file: str
    """Default name of the file, or of the directory if it has no suffix."""
    tolerance: float
    """Largest accepted difference of a logit, as a share of the largest logit or of 1."""


class Exported(NamedTuple):
    files: list[Path]
    difference: float
    """Largest difference of a logit between the network and what was written."""


def export(
    model: Any,
    output: str | Path,
    format: str,
    preprocessing: Metadata | None = None,
    input_shape: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
) -> Exported:
    """Write a network in float32, checked and whole, or not at all.

    Args:
        model: the network; it is not changed. If it has several outputs, the first are the logits.
        output: the file to write, or the directory. Files of the same name are replaced.
        format: one of FORMATS. "torch_export" is for `torch.export.load`: images [B, C, S, S] of any B to logits
            [B, num_classes].
        preprocessing: how images are prepared: mean, std, crop_pct, interpolation, and anything else to record.
        input_shape: (C, S, S); a CaiT knows its own.
        class_names: in the order of the logits. They and the preprocessing go with the weights: in torch_export as
            "metadata.json" among the `extra_files`.

    Raises:
        UserError: the format cannot hold this network, the place cannot be written to, or the logits are others.
    """
    chosen: Format = plugins.load(FORMATS[format])
    output = Path(output).resolve()
    disk.check_output(output, folder=not Path(chosen.file).suffix)
    shape = input_shape or model.input_shape
    model = copy.deepcopy(model).float().cpu().eval().to(memory_format=torch.contiguous_format)
    metadata: dict[str, Any] = {"class_names": list(class_names)} if class_names else {}
    metadata |= {"img_size": shape[-1], **(preprocessing or {})}
    expected = _logits(model, shape)
    if not expected.isfinite().all():
        raise UserError("the network's logits are not finite: there is nothing to export")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside the place, hidden: on one disk, so moving is one step.
        with TemporaryDirectory(prefix=".export-", dir=output.parent) as scratch:
            path = Path(scratch) / output.name
            difference = (_logits(chosen.write(model, path, metadata, shape), shape) - expected).abs().max().item()
            if not difference <= chosen.tolerance * max(1.0, expected.abs().max().item()):
                raise UserError(f"read back from {format}, a logit differs by {difference:.1e}; {ANY}")
            return Exported(_moved(Path(scratch), output.parent), difference)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from error


def _write_torch_export(model: nn.Module, path: Path, metadata: Metadata, shape: Sequence[int]) -> Forward:
    with quiet():
        program = torch.export.export(model, **example(shape), strict=False)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        data = io.BytesIO()  # torch would end the process on a full disk
        torch.export.save(program, data, extra_files={"metadata.json": json.dumps(metadata)})
        path.write_bytes(data.getvalue())
        return torch.export.load(path).module()


@torch.no_grad()
def _logits(forward: Forward, shape: Sequence[int]) -> Tensor:
    """The logits of two batches of random images, the same in every call."""
    found = []
    for batch in (1, 3):
        outputs: Any = forward(torch.randn((batch, *shape), generator=torch.Generator().manual_seed(batch)))
        found.append(outputs[0] if isinstance(outputs, tuple) else outputs)
    return torch.cat(found)


def example(shape: Sequence[int]) -> dict[str, Any]:
    """The exporters trace the network with two images, which stand for any number."""
    return dict(args=(torch.zeros(2, *shape),), dynamic_shapes=({0: torch.export.Dim("batch")},))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the exporters' warnings and progress: a user can do nothing about them."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        yield


def _moved(scratch: Path, folder: Path) -> list[Path]:
    """Move each file to its place below a folder, where files of other names stay; returns the places."""
    places = []
    for file in sorted(path for path in scratch.rglob("*") if path.is_file()):
        place = folder / file.relative_to(scratch)
        place.parent.mkdir(exist_ok=True)
        file.replace(place)
        places.append(place)
    return places


TORCH_EXPORT = Format(_write_torch_export, "model.pt2", 1e-4)
