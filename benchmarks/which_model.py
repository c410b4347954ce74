"""CaiT beside a ViT and a ConvNet: a training step and its memory, inference, and inference by ONNX Runtime.

    python benchmarks/which_model.py [--out benchmarks/which_model.md]

All are at 224 pixels in float32, with random weights, on one core. A step is of the loss, its gradients and a fused
AdamW, without stochastic depth. Times are the processor's, so other work on the machine hardly counts. The models take
turns in each round, which every other time runs backwards. Reported are medians, and the median over the rounds of a
model's time over that of ViT-S/16. The memory of a step is taken in a process of its own for each model.
docs/which_model.md quotes the table.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from report import in_turns, show, stamp
from step import Case, in_a_process, stepper
from torch import Tensor, nn

import cait
from cait.extras.publish.exporting import export
from contrib.inference.folded import fold

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ViT-S/16": lambda: timm.create_model("vit_small_patch16_224"),
    "DeiT III-S": lambda: timm.create_model("deit3_small_patch16_224"),
    "ConvNeXt-nano": lambda: timm.create_model("convnext_nano"),
    "CaiT XXS-24, ours": lambda: cait.create_model("xxs24", drop_path_rate=0.0),
    "CaiT XXS-24, timm's": lambda: timm.create_model("cait_xxs24_224"),
    "CaiT S-24, ours": lambda: cait.create_model("s24", drop_path_rate=0.0),
}
BASE = "ViT-S/16"
"""The others' times are over its own."""
SHAPE = (3, 224, 224)

Calls = dict[str, Callable[[], Any]]
"""By the column."""


class Side(Case):
    """A network by its name, for step.py's training step and its memory."""

    def __init__(self, name: str) -> None:
        super().__init__("s24-224-fp32")
        self.name = name

    def build(self, which: str = "ours") -> nn.Module:
        return NETWORKS[self.name]()


def runner(model: nn.Module, batch: int) -> Callable[[], Tensor]:
    """A forward pass, with ours folded, as contrib/inference does."""
    images = torch.randn(batch, *SHAPE)
    model = fold(model.eval())
    return torch.inference_mode()(lambda: model(images))


def onnx_session(model: nn.Module) -> Any:
    """ONNX Runtime over what `cait export --format onnx` writes."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export(model, file, "onnx", input_shape=SHAPE)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def onnx_runner(session: Any, batch: int) -> Callable[[], Any]:
    images = torch.randn(batch, *SHAPE).numpy()
    return lambda: session.run(["logits"], {"images": images})


def training(side: Side, batch: int) -> Calls:
    return {"a training step": stepper(side, "ours", batch)["step"]}


def inference(side: Side, batch: int) -> Calls:
    model = side.build()
    return {"1 image": runner(model, 1), f"{batch} images": runner(model, batch)}


def exported(side: Side, batch: int) -> Calls:
    session = onnx_session(side.build())
    return {
        "1 image, ONNX": onnx_runner(session, 1),
        f"{batch} images, ONNX": onnx_runner(session, batch),
    }


def race(calls: dict[str, Calls], rounds: int) -> dict[str, dict[str, str]]:
    """The cells of each model: the median in ms and the median of the rounds' ratios, by the column."""
    found: dict[str, dict[str, str]] = {name: {} for name in calls}
    for what in calls[BASE]:
        sides = {name: of_side[what] for name, of_side in calls.items()}
        times = in_turns(sides, 5 * rounds if what.startswith("1 image") else rounds)
        for name, took in times.items():
            ratio = statistics.median(a / b for a, b in zip(took, times[BASE], strict=True))
            found[name][what] = f"{statistics.median(took):,.0f} ms, {ratio:.2f}"
        print(what, {name: cells[what] for name, cells in found.items()}, flush=True)
    return found


def millions(model: nn.Module) -> float:
    """Of parameters."""
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def table(rows: dict[str, dict[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    return lines + [
        f"| {name} | {' | '.join(row.get(key, '') for key in columns)} |"
        for name, row in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sides", nargs="+", default=[*NETWORKS], choices=[*NETWORKS], help=f"{BASE} among them"
    )
    parser.add_argument("--batch", type=int, default=4, help="images of a training step")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="of all but a single image, which has five times as many",
    )
    parser.add_argument("--out", type=Path, help="Markdown file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: Side(name) for name in NETWORKS if name in {BASE, *given.sides}}
    rows = {
        name: {"parameters": f"{millions(side.build()):.1f} M"} for name, side in chosen.items()
    }
    for prepare, batch in (training, given.batch), (inference, 32), (exported, 32):
        calls = {name: prepare(side, batch) for name, side in chosen.items()}
        for name, cells in race(calls, given.rounds).items():
            rows[name] |= cells
    peaks = {name: in_a_process(side, "ours", given.batch) for name, side in chosen.items()}
    for name, peak in peaks.items():
        rows[name]["peak memory of a step"] = f"{peak:,.0f} MiB, {peak / peaks[BASE]:.2f}"
    import onnxruntime

    versions = f"timm {timm.__version__}, ONNX Runtime {onnxruntime.__version__}"
    title = [
        "# CaiT beside a ViT and a ConvNet",
        "",
        f"`python benchmarks/which_model.py`, {stamp()}, {versions}, {given.rounds} rounds.",
        "",
        f"Processor time at 224 pixels, in float32, on one core; a training step has {given.batch} images. After each",
        f"figure: over that of {BASE} in the same rounds. Less is better.",
        "",
    ]
    show([*title, *table(rows)], given.out)


if __name__ == "__main__":
    main()
