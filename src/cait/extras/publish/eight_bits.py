"""`cait export --int8`: a network of 8 bits, calibrated on training images, with what it loses and how fast it is."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.data import DataLoader, Subset

from cait.data.dataset import EvalImages
from cait.errors import UserError
from cait.extras.features import evenly
from cait.extras.publish.formats import Forward, quiet, read_onnx, read_openvino

CALIBRATED = 128
SCORED = 1000
"""Training images that set the ranges of the activations, and validation images of the accuracy, at most."""
BATCH = 32
Batch = tuple[Tensor, Tensor]
"""Images [B, C, S, S] and labels [B]."""


def quantize_onnx(path: Path, output: Path, images: Sequence[Tensor]) -> None:
    """Write an ONNX file whose matrix products and convolutions are in 8 bits, by ONNX Runtime."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        left = iter(images)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.left, None)
            return batch if batch is None else {"images": batch.numpy()}

    prepared = output.with_name("prepared.onnx")
    quant_pre_process(path, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        output,
        Reader(),
        per_channel=True,
        op_types_to_quantize=["Conv", "Gemm", "MatMul"],
    )
    prepared.unlink()


def quantize_openvino(path: Path, output: Path, images: Sequence[Tensor]) -> None:
    """Write OpenVINO's files in 8 bits, by NNCF."""
    import nncf
    import openvino

    network = openvino.Core().read_model(path)
    data = nncf.Dataset([batch.numpy() for batch in images])
    openvino.save_model(nncf.quantize(network, data, subset_size=len(images)), output)


FORMATS: dict[str, Any] = {
    "onnx": (quantize_onnx, read_onnx),
    "openvino": (quantize_openvino, read_openvino),
}


def images_of(loaded: Any) -> tuple[list[Batch], list[Batch]]:
    """The validation images that are scored, and the training images that calibrate.

    Raises UserError if they are not here, or may have several classes.
    """
    if loaded.task.several:
        raise UserError("--int8 compares the accuracy of one class per image")
    held_out = loaded.validation()
    held_out.unreadable.limit = None  # they do not count
    training = replace(held_out, samples=loaded.data.source.train)
    return _batches(loaded.data, held_out, SCORED), _batches(loaded.data, training, CALIBRATED)


def add(
    loaded: Any, path: Path, format: str, keep: bool, val: Sequence[Batch], train: Sequence[Batch]
) -> None:
    """Write NAME-int8 beside an exported file, and print its accuracy and speed; the images are those of `images_of`.

    Raises UserError if it loses more than a point of accuracy, unless `keep` says to keep it.
    """
    quantize, read = FORMATS[format]
    with TemporaryDirectory(prefix=".int8-", dir=path.parent) as scratch:
        output = Path(scratch) / f"{path.stem}-int8{path.suffix}"
        with quiet():
            quantize(path, output, [batch for batch, _ in train])
        network = loaded.network.float().cpu().eval()
        forwards = {
            "int8": read(output),
            format: read(path),
            "compiled": torch.compile(network),
            "eager": network,
        }
        if not shutil.which("g++"):
            del forwards["compiled"]
        before = _accuracy(forwards[format], val)
        after = _accuracy(forwards["int8"], val)
        count = sum(int((labels >= 0).sum()) for _, labels in val)
        result = (
            f"{after:.2f} % of {count:,} validation images right in 8 bits, {before:.2f} % before"
        )
        if before - after > 1 and not keep:
            raise UserError(f"{result}: --yes keeps it")
        for file in sorted(Path(scratch).iterdir()):
            print(os.path.relpath(shutil.move(file, path.parent / file.name)))
    speeds = [
        f"{name} {_images_a_second(forward, val[0][0]):,.0f}" for name, forward in forwards.items()
    ]
    print(f"{result}; images a second: {', '.join(speeds)}")


def _batches(data: Any, images: EvalImages, most: int) -> list[Batch]:
    """Up to `most` images, evenly spread, as the network sees them in evaluation."""
    batches = DataLoader(Subset(images, evenly(len(images), most)), BATCH)
    return [data.on_after_batch_transfer(batch, 0) for batch in batches]


def _accuracy(forward: Forward, batches: Sequence[Batch]) -> float:
    """The percentage of the images with a label whose class is the most probable."""
    right = torch.cat(
        [(forward(images).argmax(dim=1) == labels)[labels >= 0] for images, labels in batches]
    )
    return 100 * right.float().mean().item()


@torch.inference_mode()
def _images_a_second(forward: Forward, images: Tensor) -> float:
    names = {"forward": forward, "images": images}
    timer = Timer("forward(images)", globals=names, num_threads=torch.get_num_threads())
    return len(images) / timer.blocked_autorange(min_run_time=1).median
