"""`cait demo`: a page that runs the network in the browser."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cait import ckpt
from cait.cli import loading, saved
from cait.cli.options import Options, check_folder, run_missing
from cait.errors import UserError
from cait.extras.demo import web_runtime
from cait.run import rundir
from cait.run.program import Program

PAGE = Path(__file__).parent / "page"
MODEL, SETTINGS = "model.onnx", "model.json"
SAMPLE = 1000
"""The accuracy lost to 8 bits is measured on at most this many validation images."""
BATCH = 32


def demo(arguments: list[str], program: Program) -> None:
    """Write a folder with a page that classifies images in the browser."""
    given = _options(arguments)
    checkpoint, folder = loading.checkpoint_of(given.run, "show")
    output = given.output or (folder or Path()) / "demo"
    check_folder(output)
    if (output / "index.html").exists() and not (output / SETTINGS).exists():
        raise UserError(f"{output} holds another page; name a folder of its own with --output")
    runtime = web_runtime.files(given.runtime)
    from cait.guards import trust

    with trust.only_own(folder, given.trusted):
        ema = False if given.raw else None
        loaded = loading.from_checkpoint(checkpoint, folder, ema, None, program.module, program.data)
    _check_transform(loaded)
    try:
        with TemporaryDirectory(prefix=".demo-", dir=_create(output.parent)) as scratch:
            facts = _facts(loaded, checkpoint, folder)
            facts += _write_network(loaded, Path(scratch), given.quantize)
            _write_page(loaded, Path(scratch), folder.name if folder else checkpoint.stem, facts, runtime)
            _move_files(Path(scratch), _create(output))
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from error
    print(f"open http://localhost:8000 after: python -m http.server --directory {os.path.relpath(output)}")
    print(os.path.relpath(output / "index.html"))


def _options(arguments: list[str]) -> argparse.Namespace:
    options = Options("demo", "Write a page that runs the best network of a run in the browser.")
    options.add_argument("run", metavar="RUN", nargs="?", help="a run in logs/, its folder, or a checkpoint (.ckpt)")
    options.add_argument("--output", type=Path, metavar="DIR", help="default the folder demo/ of the run")
    options.add_argument("--quantize", action="store_true", help="weights in 8 bits: a quarter of the size")
    options.add_argument("--raw", action="store_true", help="the raw weights, also if there is a moving average")
    options.add_argument(
        "--runtime",
        type=Path,
        metavar="FILE.tgz|DIR",
        help=f"the package {web_runtime.PACKAGE}; default: npm fetches it once",
    )
    options.add_trust()
    given = options.parse_args(arguments)
    if given.run is None:
        raise run_missing("demo")
    return given


def _check_transform(loaded: loading.Loaded) -> None:
    """Refuse what the page cannot repeat."""
    from cait.model import formats

    if loaded.data.has_own_eval_transform:
        raise UserError("the page cannot run an evaluation transform of your own; `cait export --format onnx` does")
    if "onnx" not in formats.names():
        raise UserError("the page runs ONNX, and no extra that is here exports to it")


def _write_network(loaded: loading.Loaded, folder: Path, quantize: bool) -> list[tuple[str, str]]:
    """Write the network as ONNX; returns facts about it for the page."""
    from cait.extras.demo.saliency import WithSaliency
    from cait.model.formats import export

    size, settings, path = loaded.data.img_size, loaded.data.preprocessing.settings(), folder / MODEL
    export(WithSaliency.around(loaded.network), path, "onnx", settings, (3, size, size), loaded.class_names)
    if not quantize:
        return [("Weights", f"{_megabytes(path)}, 32 bits")]
    whole = path.rename(folder / "whole.onnx")
    _quantize(whole, path)
    facts = [
        ("Weights", f"{_megabytes(path)} in 8 bits, {_megabytes(whole)} before"),
        ("8 bits", _accuracy_of_both(loaded, whole, path)),
    ]
    whole.unlink()
    for name, value in facts:
        print(f"{name}: {value}")
    return facts


def _quantize(path: Path, output: Path) -> None:
    """Write the network with the weights of its linear layers in 8 bits; activations are quantised at run time."""
    import logging

    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    folding = onnxruntime.SessionOptions()  # LayerScale's factors become part of the weights
    folding.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    folding.optimized_model_filepath = str(folded := path.with_name("folded.onnx"))
    onnxruntime.InferenceSession(path, folding, providers=["CPUExecutionProvider"])
    model = onnx.load(folded)
    model.graph.ClearField("value_info")  # shapes that no longer hold once Gemm has become MatMul
    folded.unlink()
    logging.disable(logging.WARNING)  # onnxruntime recommends what was done above
    try:
        quantize_dynamic(model, output, per_channel=True, weight_type=QuantType.QUInt8)
    finally:
        logging.disable(logging.NOTSET)


def _accuracy_of_both(loaded: loading.Loaded, before: Path, after: Path) -> str:
    """What 8 bits do to the accuracy on the validation images, or on an even sample of them."""
    try:
        counted, right = _score(loaded, [before, after])
    except UserError as error:
        return f"the accuracy is not measured: {error}"
    was, now = (100 * count / counted for count in right)
    return f"{now:.2f} % of {counted:,} validation images right, {was:.2f} % before"


def _score(loaded: loading.Loaded, paths: list[Path]) -> tuple[int, list[int]]:
    """(validation images, how many of them each of the networks gets right)"""
    import onnxruntime
    import torch

    data = loaded.data
    data.setup("validate")
    if loaded.data_state is not None:
        data.load_state_dict(loaded.data_state)  # which refuses other classes
    sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in paths]
    images = data.val_images
    step = -(-len(images) // SAMPLE)
    indices = range(0, len(images), step)
    counted, right = 0, [0] * len(paths)
    for start in range(0, len(indices), BATCH):
        pixels, labels = zip(*(images[index] for index in indices[start : start + BATCH]), strict=True)
        batch, _ = data.on_after_batch_transfer((torch.stack(pixels), None), 0)
        true = torch.tensor(labels)
        counted += int((true >= 0).sum())
        for place, session in enumerate(sessions):
            logits = torch.from_numpy(session.run(["logits"], {"images": batch.numpy()})[0])
            right[place] += int((logits.argmax(dim=1) == true).sum())
    if not counted:
        raise UserError(f"no validation image of {data.root} has a label")
    return counted, right


def _facts(loaded: loading.Loaded, checkpoint: Path, folder: Path | None) -> list[tuple[str, str]]:
    """What the page says about the model."""
    count = sum(parameter.numel() for parameter in loaded.network.parameters())
    size = loaded.data.img_size
    facts = [
        ("Model", f"{loaded.name}, {count / 1e6:.1f} million parameters"),
        ("Input", f"{size} × {size} pixels"),
        ("Checkpoint", loaded.about.replace(f"{checkpoint.parent}/", "")),
    ]
    scores = _evaluation(checkpoint, folder).get("ema" if loaded.averaged else "raw")
    if isinstance(scores, dict) and {"acc1", "images"} <= scores.keys():
        facts.append(("Accuracy", f"{scores['acc1']:.2f} % of {scores['images']:,} validation images"))
        if len(loaded.class_names) > 5 and "acc5" in scores:
            facts.append(("Among the first 5", f"{scores['acc5']:.2f} %"))
    return facts


def _evaluation(checkpoint: Path, folder: Path | None) -> dict[str, Any]:
    """What `cait eval` has written about this checkpoint; empty if nothing."""
    if folder is None:
        return {}
    from cait.data.folder import root_name

    with contextlib.suppress(OSError, ValueError, TypeError):
        scores = dict(json.loads((folder / rundir.EVALUATION).read_text()))
        step = ckpt.read_checkpoint(checkpoint, without=ckpt.TENSORS)["global_step"]
        settings = saved.data_settings(folder)
        same = (scores.get("step"), scores.get("root")) == (step, root_name(str(settings["root"])))
        return scores if same and not scores.get("tta") else {}
    return {}


def _write_page(
    loaded: loading.Loaded, folder: Path, title: str, facts: list[tuple[str, str]], runtime: dict[str, bytes]
) -> None:
    from PIL import ImageColor

    settings = loaded.data.preprocessing.settings()
    if settings["background"] is not None:  # browsers do not know all of Pillow's colours
        settings["background"] = "#{:02x}{:02x}{:02x}".format(*ImageColor.getrgb(settings["background"]))
    for file in sorted(PAGE.iterdir()):
        (folder / file.name).write_bytes(file.read_bytes())
    for name, content in runtime.items():
        (folder / name).write_bytes(content)
    about = {
        "title": title,
        "class_names": loaded.class_names,
        "preprocessing": settings,
        "bytes": (folder / MODEL).stat().st_size,
        "facts": [*facts, ("Runs with", f"onnxruntime-web {web_runtime.VERSION}")],
    }
    (folder / SETTINGS).write_text(json.dumps(about, ensure_ascii=False), encoding="utf-8")


def _move_files(folder: Path, output: Path) -> None:
    """Move the files to their place; files of other names stay there."""
    for file in sorted(folder.iterdir()):
        os.replace(file, output / file.name)


def _create(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"
