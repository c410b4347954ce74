"""`cait export`: networks in other programs' formats.

Each file is read back by the library that it is for, and must give the network's logits before it appears.
"""

import argparse
import copy
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from cait import disk
from cait.cli.loading import Loaded, checkpoint_of, load_run
from cait.cli.options import Options
from cait.errors import UserError, tell, to_install
from cait.extras.publish.formats import (
    ANY,
    Forward,
    Metadata,
    Shape,
    write_onnx,
    write_openvino,
    write_timm,
    write_torch_export,
)
from cait.model import network
from cait.run.program import Program
from cait.settings import Settings

TOLERANCE = 1e-4
"""Largest accepted difference of a logit, as a share of the largest logit or of 1."""

WRITE: dict[str, Callable[[Any, Path, Metadata, Shape], Forward]] = {
    "timm": write_timm,
    "torch_export": write_torch_export,
    "onnx": write_onnx,
    "openvino": write_openvino,
}
"""Called with (network, path, metadata, input shape); each returns what the reading library reads."""
FILES = {"timm": "timm", "torch_export": "model.pt2", "onnx": "model.onnx", "openvino": "model.xml"}
"""Default name of the file, by format; timm's is a directory."""
NEEDS = {"onnx": ["onnxruntime", "onnxscript"], "openvino": ["openvino", "nncf"]}


def export_run(arguments: list[str], program: Program) -> None:
    """Write the network of a run's best checkpoint in another program's format."""
    options = Options("export", "Write the best network of a run for other programs.")
    options.add_argument(
        "run", metavar="RUN", help="a run in logs/, its folder, or a checkpoint (.ckpt)"
    )
    options.add_argument("--format", choices=WRITE, default="timm", help="default timm")
    options.add_weights()
    options.add_argument(
        "--output", type=Path, metavar="PATH", help="file to write; for timm a directory"
    )
    options.add_argument(
        "--int8", action="store_true", help="beside it a network of 8 bits: onnx, openvino"
    )
    options.add_argument(
        "--yes", action="store_true", help="keep it if it loses more than a point of accuracy"
    )
    args = options.parse_args(arguments)
    if not all(map(find_spec, NEEDS.get(args.format, ()))):
        group = "export" if args.format == "onnx" else args.format
        raise UserError(f"{args.format} needs more packages: {to_install(f'[{group}]')}")
    if args.int8 and args.format not in NEEDS:
        raise UserError(f"--int8 is for --format {' and '.join(NEEDS)}")
    if args.int8 and not checkpoint_of(args.run, "export")[1]:
        raise UserError(
            "--int8 takes the images of a run: name a run, or a checkpoint in its folder"
        )
    from cait.extras.publish import eight_bits

    loaded, folder = opened(args.run, args, program)
    images = eight_bits.images_of(loaded) if args.int8 else ()
    output = args.output or folder / FILES[args.format]
    files, difference = write(loaded, args.format, output)
    for file in files:
        print(os.path.relpath(file))
    print(f"read back, the logits differ by {difference:.1e} at most")
    if images:
        eight_bits.add(loaded, output, args.format, args.yes, *images)


def opened(run: str, given: argparse.Namespace, program: Program) -> tuple[Loaded, Path]:
    """What a verb's options `given` choose of a run or a checkpoint, and the usual folder for what is written of it."""
    checkpoint, folder = checkpoint_of(run, "export")
    loaded = load_run(given, checkpoint, folder, program)
    return loaded, Path(
        folder or checkpoint.parent, "export", {None: "", True: "ema", False: "raw"}[given.ema]
    )


def write(loaded: Loaded, format: str, output: Path) -> tuple[list[Path], float]:
    """`export` the network of a run with all that is known of its classes and images."""
    if is_own := loaded.data.has_own_eval_transform:
        tell(
            f"the file does not say how images are prepared: {type(loaded.data).__name__} has a transform of its own"
        )
    metadata = ({} if is_own else loaded.data.preprocessing) | loaded.task.metadata
    shape = network.input_shape(loaded.module.hparams)
    return export(loaded.network, output, format, metadata, shape, loaded.module.class_names)


def export(
    model: Any,
    output: str | Path,
    format: str,
    preprocessing: Metadata | None = None,
    input_shape: Shape | None = None,
    class_names: Sequence[str] | None = None,
) -> tuple[list[Path], float]:
    """Write a network in float32, checked and whole, or not at all.

    Raises UserError if the format cannot hold this network, the place cannot be written to, or the logits are others.

    Args:
        model: the network; it is not changed. If it has several outputs, the first are the logits.
        output: the file to write, or for timm the directory. Files of the same name are replaced.
        format: one of WRITE.
        preprocessing: what goes with the weights: mean, std, crop_pct, interpolation, and anything else to record.
        input_shape: (C, S, S); a CaiT knows its own.
        class_names: go with the weights too.

    Returns:
        the files, and the largest difference of a logit between the network and what was written.
    """
    output = Path(output).resolve()
    disk.check_output(output, folder=format == "timm")
    if format == "openvino" and output.suffix != ".xml":
        raise UserError(
            f"{output.name}: OpenVINO reads files that end with .xml; name one with --output"
        )
    shape = input_shape or model.input_shape
    model = copy.deepcopy(model).float().cpu().eval().to(memory_format=torch.contiguous_format)
    metadata: Settings = {"class_names": list(class_names)} if class_names else {}
    metadata |= {"img_size": shape[-1], **(preprocessing or {})}
    expected = _logits(model, shape)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the place, hidden: on one disk, so moving is one step.
    with TemporaryDirectory(prefix=".export-", dir=output.parent) as scratch:
        forward = WRITE[format](model, Path(scratch) / output.name, metadata, shape)
        difference = (_logits(forward, shape) - expected).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):  # it may be NaN
            raise UserError(f"read back from {format}, a logit differs by {difference:.1e}; {ANY}")
        return _moved(Path(scratch), output.parent), difference


@torch.no_grad()
def _logits(forward: Forward, shape: Shape) -> Tensor:
    """The logits of two batches of random images, the same in every call."""
    logits = []
    for batch in (1, 3):
        output: Any = forward(
            torch.randn((batch, *shape), generator=torch.Generator().manual_seed(batch))
        )
        logits.append(output[0] if isinstance(output, tuple) else output)
    return torch.cat(logits)


def _moved(scratch: Path, folder: Path) -> list[Path]:
    """Move each file to the same path below a folder, where files of other names stay; returns the new paths."""
    paths = []
    for file in sorted(filter(Path.is_file, scratch.rglob("*"))):
        path = folder / file.relative_to(scratch)
        path.parent.mkdir(exist_ok=True)
        paths.append(file.replace(path))
    return paths
