"""Weights out: as timm keeps its models, as the release, as ONNX and as PyTorch's exported program.

Whatever is written is first read back by the library that it is for, and has to give the network's
logits; only then does it appear under its name.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cait.errors import UserError
from cait.model.attention import SelfAttention
from cait.model.cait import CaiT
from cait.model.config import VARIANTS, CaiTConfig, variant_config
from cait.model.weights import ONLY_IN_TRAINING

Format = Literal["timm", "release", "onnx", "torch_export"]
Network = Callable[[Tensor], Tensor]

FILE_NAMES: dict[Format, str] = {
    "timm": "timm",
    "release": "release.pth",
    "onnx": "model.onnx",
    "torch_export": "model.pt2",
}
"""What a format's file, or timm's directory, is called by default."""

TOLERANCE: dict[Format, float] = {"timm": 1e-5, "release": 1e-5, "onnx": 1e-4, "torch_export": 1e-4}
"""Largest difference of a logit, as a share of the largest logit, or of 1 if they are small."""

CHECKED_BATCHES = (1, 3)

TIMM_FIELDS = (
    "img_size",
    "patch_size",
    "in_chans",
    "num_classes",
    "embed_dim",
    "depth",
    "depth_token_only",
    "num_heads",
    "mlp_ratio",
    "qkv_bias",
)
"""The fields that timm's CaiT has too, under the same names; in the others it is as the paper's."""


class Exported(NamedTuple):
    files: list[Path]
    difference: float
    """Largest difference of a logit between the network and what was written."""


def export(model: CaiT, output: str | Path, format: Format, preprocessing: Mapping[str, Any] | None = None) -> Exported:
    """Write a network in float32, checked and whole, or not at all.

    Args:
        model: is left as it is.
        output: the file to write, for "timm" the directory. What is there of the same name is replaced.
        format: "timm": `model.safetensors` and `config.json`, for `timm.create_model("local-dir:DIR",
            pretrained=True)` or the Hugging Face hub; "release": a `.pth` as Facebook's, {"model":
            {"module.<key>": tensor}}; "onnx"; "torch_export": for `torch.export.load`. The last two
            take "images" [B, in_chans, img_size, img_size] of any B to "logits" [B, num_classes].
        preprocessing: for timm's configuration: mean, std, crop_pct, interpolation; timm's own by default.

    Raises:
        UserError: the format cannot hold this network, a package is missing, the place cannot be
            written to, or what was written gives other logits.
    """
    if format not in FILE_NAMES:
        raise UserError(f"unknown format {format!r}; choose one of {', '.join(FILE_NAMES)}")
    output = Path(output).resolve()
    if not output.name or (output.exists() and output.is_dir() != (format == "timm")):
        raise UserError(f"{output} is in the way: {format} is {'a directory' if format == 'timm' else 'a file'}")
    if format != "timm" and output.suffix != Path(FILE_NAMES[format]).suffix:
        raise UserError(f"{output.name} has to end in {Path(FILE_NAMES[format]).suffix}, as files of {format} do")
    if format in ("timm", "release"):
        _refuse_what_timm_has_not(model.config)
    model = copy.deepcopy(model).float().cpu().eval()
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.backend = "auto"  # "fused" needs a GPU, and here is none
    logits = [_logits(model, model.config, batch) for batch in CHECKED_BATCHES]
    if not all(expected.isfinite().all() for expected in logits):
        raise UserError("the network's logits are not finite: there is nothing to export")
    try:
        with _aside(output) as path:
            if format == "timm":
                network = _write_timm(model, path, preprocessing or {})
            elif format == "release":
                network = _write_release(model, path)
            elif format == "onnx":
                network = _write_onnx(model, path)
            else:
                network = _write_torch_export(model, path)
            difference = _largest_difference(network, model.config, logits, format)
            files = _settle(path, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from error
    return Exported(files, difference)


def _write_timm(model: CaiT, path: Path, preprocessing: Mapping[str, Any]) -> Network:
    import timm
    from timm.models import save_for_hf

    with torch.device("meta"):  # timm's initial weights are not wanted
        twin = _timm_twin(model.config)
    twin.load_state_dict(model.state_dict(), assign=True)
    save_for_hf(twin, str(path), safe_serialization=True, data_config=dict(preprocessing))
    shutil.copymode(path / "config.json", path / "model.safetensors")  # safetensors lets only the owner read it
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def _write_release(model: CaiT, path: Path) -> Network:
    torch.save({"model": {f"module.{key}": value for key, value in model.state_dict().items()}}, path)
    return _timm_twin(model.config, path).eval()


def _write_onnx(model: CaiT, path: Path) -> Network:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"ONNX needs the package {package}: pip install --editable '.[export]'") from error
    import onnxruntime

    with _quiet():
        torch.onnx.export(
            model,
            f=path,
            **_example(model.config),
            input_names=["images"],
            output_names=["logits"],
            dynamo=True,
            external_data=False,  # one file; above 2 GB the exporter puts the weights beside it all the same
            verbose=False,
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _write_torch_export(model: CaiT, path: Path) -> Network:
    with _quiet():
        program = torch.export.export(model, **_example(model.config), strict=False)
        torch.export.save(program, path)
        return torch.export.load(path).module()


def _refuse_what_timm_has_not(config: CaiTConfig) -> None:
    for field in fields(CaiTConfig):
        value = getattr(config, field.name)
        if field.name not in (*TIMM_FIELDS, *ONLY_IN_TRAINING) and value != field.default:
            raise UserError(
                f"timm and the release have no CaiT of {field.name} {value}, only of {field.default}; "
                "onnx and torch_export take any network"
            )


def _timm_entry(config: CaiTConfig) -> tuple[str, dict[str, Any]]:
    """timm's model that is nearest to this one, and the arguments in which they differ."""
    import timm

    found: list[tuple[tuple[int, int], str, dict[str, Any]]] = []
    for entry in timm.list_models("cait_*"):
        _, name, img_size = entry.split("_")
        if name in VARIANTS:
            row = variant_config(name, img_size=int(img_size))
            differ = {key: getattr(config, key) for key in TIMM_FIELDS if getattr(config, key) != getattr(row, key)}
            found.append(((len(differ), abs(config.embed_dim - row.embed_dim)), entry, differ))
    _, entry, differ = min(found, key=lambda candidate: candidate[0])
    if "mlp_ratio" in differ:
        differ["mlp_ratio_token_only"] = config.mlp_ratio  # timm has one for each stage
    return entry, differ


def _timm_twin(config: CaiTConfig, weights: Path | None = None) -> nn.Module:
    """timm's model of the same fields, with `weights` read by timm; nothing in its configuration is of timm's own."""
    import timm

    entry, differ = _timm_entry(config)
    overlay: dict[str, Any] = dict(url=None, hf_hub_id=None, tag=None, license=None)
    overlay.update(num_classes=config.num_classes, input_size=(config.in_chans, config.img_size, config.img_size))
    if weights is not None:
        overlay["file"] = str(weights)
    return timm.create_model(entry, pretrained=weights is not None, pretrained_cfg_overlay=overlay, **differ)


def _logits(network: Network, config: CaiTConfig, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, config.in_chans, config.img_size, config.img_size)
    with torch.no_grad():
        return network(torch.randn(shape, generator=generator))


def _largest_difference(network: Network, config: CaiTConfig, logits: list[Tensor], format: Format) -> float:
    largest = 0.0
    for expected in logits:
        got = _logits(network, config, len(expected))
        difference = (got - expected).abs().max().item() if got.shape == expected.shape else float("inf")
        if not difference <= TOLERANCE[format] * max(1.0, expected.abs().max().item()):
            raise UserError(f"read back from {format}, a logit differs by {difference:.1e}; nothing was kept")
        largest = max(largest, difference)
    return largest


def _example(config: CaiTConfig) -> dict[str, Any]:
    """What both exporters trace the network with: two images, which stand for any number."""
    images = torch.zeros(2, config.in_chans, config.img_size, config.img_size)
    return dict(args=(images,), dynamic_shapes=({0: torch.export.Dim("batch")},))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings and progress, about which a user can do nothing."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """`output`'s name in a hidden directory beside it: on the same disk, so that moving it is one step."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".export-", dir=output.parent) as scratch:
        yield Path(scratch) / output.name


def _settle(path: Path, output: Path) -> list[Path]:
    """Move what was written to its place; in a directory that is there, files of other names stay."""
    written = [file.relative_to(path.parent) for file in sorted(path.parent.rglob("*")) if file.is_file()]
    if path.is_dir() and not output.exists():
        os.replace(path, output)
    else:
        for name in written:
            os.replace(path.parent / name, output.parent / name)
    return [output.parent / name for name in written]
