"""`cait demo`: a page that runs the network in the browser."""

import contextlib
import json
import math
import os
import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cait import disk, plugins
from cait.cli import loading
from cait.cli.options import Options
from cait.errors import UserError
from cait.run.program import Program
from contrib.demo import web_runtime

PAGE = Path(__file__).parent / "page"
MODEL, SETTINGS, SAMPLES = "model.onnx", "model.json", "sample-images"
Samples = list[dict[str, Any]]
"""The file and the index of the class of each image that the page offers."""


def demo(arguments: list[str], program: Program) -> None:
    """Write a folder with a page that classifies images in the browser."""
    args = _options().parse_args(arguments)
    if args.samples < 0:
        raise UserError(f"--samples must be at least 0, got {args.samples}")
    checkpoint, folder = loading.checkpoint_of(args.run, "show")
    output = args.output or (folder or Path()) / "demo"
    disk.check_output(output, folder=True)
    if (
        any((output / name).exists() for name in ("index.html", SAMPLES))
        and not (output / SETTINGS).exists()
    ):
        raise UserError(f"{output} holds another page; name a folder of its own with --output")
    runtime = web_runtime.files(args.runtime)
    loaded = loading.load_run(args, checkpoint, folder, program)
    if loaded.data.has_own_eval_transform or loaded.data.settings.reader:
        raise UserError(
            "the page cannot run a reader or evaluation transform of your own; `cait export` does"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    title = folder.name if folder else checkpoint.stem
    with TemporaryDirectory(prefix=".demo-", dir=output.parent) as name:
        scratch = Path(name)
        _write_network(loaded, scratch)
        samples = _write_samples(loaded, scratch, args.samples) if args.samples else []
        _write_page(loaded, scratch, title, _facts(loaded, checkpoint, folder), runtime, samples)
        output.mkdir(exist_ok=True)
        disk.remove(output / SAMPLES)  # those of an earlier page
        for file in scratch.iterdir():  # files of other names stay in the folder
            file.replace(output / file.name)
    shown = os.path.relpath(output)
    print(
        "open http://127.0.0.1:8000 after: python -m http.server --bind 127.0.0.1 "
        f"--directory {shlex.quote(shown)}\n{shown}/index.html"
    )


def _options() -> Options:
    options = Options("demo", "Write a page that runs the best network of a run in the browser.")
    options.add_argument(
        "run", metavar="RUN", help="a run in logs/, its folder, or a checkpoint (.ckpt)"
    )
    options.add_argument(
        "--output", type=Path, metavar="DIR", help="default the folder demo/ of the run"
    )
    options.add_argument(
        "--samples",
        type=int,
        default=10,
        metavar="N",
        help="validation images that are copied into the page, one of a class; default 10, 0 copies none",
    )
    options.add_weights()
    options.add_argument(
        "--runtime",
        type=Path,
        metavar="FILE.tgz|DIR",
        help=f"the package {web_runtime.PACKAGE}; default: npm fetches it once",
    )
    return options


def _write_network(loaded: loading.Loaded, folder: Path) -> None:
    """Write the network as ONNX."""
    if "publish" not in plugins.extras():
        raise UserError("cait demo needs the extra publish, which writes ONNX")
    from cait.extras.publish.exporting import export
    from cait.model.network import input_shape
    from contrib.demo.saliency import WithSaliency

    export(
        WithSaliency.around(loaded.network),
        folder / MODEL,
        "onnx",
        loaded.data.preprocessing | loaded.task.metadata,
        input_shape(loaded.module.hparams),
        loaded.class_names,
    )


def _write_samples(loaded: loading.Loaded, folder: Path, most: int) -> Samples:
    """Copy up to `most` validation images, one of each class or of evenly spread ones, no larger than the network sees.

    The copies have names of their own, and no metadata.
    """
    import numpy as np
    from PIL import Image

    from cait.extras.features import evenly, one_of_each

    try:
        images = loaded.validation()
    except UserError as error:
        print(f"the page has no sample images: {error}")
        return []
    names = loaded.label_names
    side = math.ceil(loaded.data.img_size / loaded.data.settings.crop_pct)
    (folder / SAMPLES).mkdir()
    labels = []
    for _, label, image in one_of_each(images, evenly(len(names), most)):
        scale = min(1, side / min(image.size))
        copy = image.resize([max(1, round(scale * length)) for length in image.size])
        Image.fromarray(np.asarray(copy)).save(folder / SAMPLES / f"{label}.png")
        labels.append(label)
    print(f"{len(labels)} validation images are copied into the page; --samples 0 copies none")
    return [{"file": f"{SAMPLES}/{label}.png", "name": names[label]} for label in sorted(labels)]


def _facts(loaded: loading.Loaded, checkpoint: Path, folder: Path | None) -> dict[str, str]:
    """What is known of the model, and what `cait eval` has measured of this checkpoint."""
    from cait.extras import scores
    from cait.extras.display import network_name

    size = loaded.data.img_size
    count = sum(parameter.numel() for parameter in loaded.network.parameters())
    facts = {
        "Model": f"{network_name(loaded.name, loaded.module.hparams.get('fields'))}, "
        f"{count / 1e6:.1f} million parameters",
        "Input": f"{size} × {size} pixels",
        "Checkpoint": loaded.about.replace(f"{checkpoint.parent}/", ""),
    }
    with contextlib.suppress(UserError, KeyError):
        about = scores.read(folder, checkpoint, "") if folder else {}
        figures = about["ema" if loaded.averaged else "raw"]
        images = f"{figures['images']:,} validation images"
        if "mAP" in figures:
            facts["Mean average precision"] = f"{figures['mAP']:.4f} on {images}"
        else:
            facts["Accuracy"] = f"{figures['acc1']:.2f} % of {images}"
            if len(loaded.class_names) > 5:
                facts["Among the first 5"] = f"{figures['acc5']:.2f} %"
    return facts


def _write_page(
    loaded: loading.Loaded,
    folder: Path,
    title: str,
    facts: dict[str, str],
    runtime: dict[str, bytes],
    samples: Samples,
) -> None:
    from PIL import ImageColor

    settings = loaded.data.preprocessing
    if settings["background"] is not None:  # browsers do not know all of Pillow's colors
        settings["background"] = "#{:02x}{:02x}{:02x}".format(
            *ImageColor.getrgb(settings["background"])
        )
    for file in PAGE.iterdir():
        shutil.copyfile(file, folder / file.name)
    for name, content in runtime.items():
        (folder / name).write_bytes(content)
    size = (folder / MODEL).stat().st_size
    facts |= {
        "Weights": f"{size / 1e6:.1f} MB, 32 bits",
        "Runs with": f"onnxruntime-web {web_runtime.VERSION}",
    }
    (folder / SETTINGS).write_text(
        json.dumps(
            {
                "title": title,
                "class_names": loaded.class_names,
                **loaded.task.metadata,
                "preprocessing": settings,
                "samples": samples,
                "bytes": size,
                "facts": [*facts.items()],
            },
            ensure_ascii=False,
        ),
        encoding="utf-8",
    )
