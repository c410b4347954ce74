"""Weights out: as a timm model, as the release's file, as ONNX and as PyTorch's exported program.

Each file is read back by the library that it is for, and must give the network's logits before it appears.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
Forward = Callable[[Tensor], Tensor]

FILE_NAMES: dict[Format, str] = {
    "timm": "timm",
    "release": "release.pth",
    "onnx": "model.onnx",
    "torch_export": "model.pt2",
}
"""Default name of a format's file, or of timm's directory."""

TOLERANCE: dict[Format, float] = {"timm": 1e-5, "release": 1e-5, "onnx": 1e-4, "torch_export": 1e-4}
"""Largest accepted difference of a logit, as a share of the largest logit or of 1."""

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
"""The fields that timm's CaiT has too, under the same names. In all other fields timm's CaiT is the paper's."""


TIMM_PREPROCESSING = ("mean", "std", "crop_pct", "interpolation")


class Exported(NamedTuple):
    files: list[Path]
    difference: float
    """Largest difference of a logit between the network and what was written."""


def export(
    model: Any,
    output: str | Path,
    format: Format,
    preprocessing: Mapping[str, Any] | None = None,
    input_shape: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    saliency: bool = False,
) -> Exported:
    """Write a network in float32, checked and whole, or not at all.

    Args:
        model: the network; it is not changed.
        output: the file to write, for "timm" the directory. Files of the same name are replaced.
        format: "timm": `model.safetensors` and `config.json`, for `timm.create_model("local-dir:DIR",
            pretrained=True)` or the Hugging Face hub; a CaiT or a timm model. "release": a `.pth` as
            Facebook's, {"model": {"module.<key>": tensor}}; a CaiT. "onnx". "torch_export": for
            `torch.export.load`. The last two take "images" [B, C, S, S] of any B to "logits" [B, num_classes].
        preprocessing: how images are prepared: mean, std, crop_pct, interpolation, and anything else to record.
            What is missing takes timm's defaults in timm's configuration.
        input_shape: (C, S, S); a CaiT knows its own.
        class_names: in the order of the logits. They go with the weights, and so does the preprocessing: as timm's
            `label_names`, as `metadata_props` of ONNX, as "metadata.json" among the `extra_files` of torch_export,
            as "metadata" beside "model" in the release's form.
        saliency: for "onnx": add the output "saliency", see `WithSaliency`.

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
    _refuse_foreign(model, format)
    shape = input_shape or (model.config.in_chans, *[model.config.img_size] * 2)
    model = copy.deepcopy(model).float().cpu().eval()
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.backend = "auto"  # "fused" needs a GPU
    logits = [_logits(model, shape, batch) for batch in CHECKED_BATCHES]
    metadata: dict[str, Any] = {"class_names": list(class_names)} if class_names else {}
    metadata |= {"img_size": shape[-1], **(preprocessing or {})}
    if not all(expected.isfinite().all() for expected in logits):
        raise UserError("the network's logits are not finite: there is nothing to export")
    try:
        with _aside(output) as path:
            if format == "timm":
                written = _write_timm(model, path, metadata, shape)
            elif format == "release":
                written = _write_release(model, path, metadata)
            elif format == "onnx":
                written = _write_onnx(WithSaliency(model) if saliency else model, path, metadata, shape)
            else:
                written = _write_torch_export(model, path, metadata, shape)
            difference = _largest_difference(written, shape, logits, format)
            files = _settle(path, output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from error
    return Exported(files, difference)


def _refuse_foreign(model: nn.Module, format: Format) -> None:
    """Raise UserError if the format cannot hold this network."""
    if format in ("timm", "release") and isinstance(model, CaiT):
        _refuse_what_timm_has_not(model.config)
    elif format == "release" or (format == "timm" and not _is_timms(model)):
        kind = "a CaiT" if format == "release" else "a CaiT or one of timm's networks"
        raise UserError(f"{format} holds {kind}, not {type(model).__name__}; onnx and torch_export take any network")


def _is_timms(model: nn.Module) -> bool:
    return type(model).__module__.startswith("timm.")


class WithSaliency(nn.Module):
    """A CaiT that also says where it looks.

    Images [B, C, S, S] to logits [B, num_classes] and saliency [B, s, s]: the weights of the class token for the
    s × s patches in the first class-attention block, the mean over the heads.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @staticmethod
    def is_possible(model: nn.Module) -> bool:
        return isinstance(model, CaiT) and model.config.global_pool == "token" and len(model.blocks_token_only) > 0

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        maps: list[Tensor] = []
        attn = self.model.blocks_token_only[0].attn
        hook = attn.register_forward_pre_hook(lambda _, given: maps.append(attn.maps(given[0])))
        try:
            logits = self.model(images)
        finally:
            hook.remove()
        side = images.shape[-1] // self.model.config.patch_size
        return logits, maps[0][:, :, 0, -side * side :].mean(dim=1).unflatten(-1, (side, side))


def _write_timm(model: nn.Module, path: Path, metadata: Mapping[str, Any], shape: Sequence[int]) -> Forward:
    import timm
    from timm.models import save_for_hf

    twin = model
    if isinstance(model, CaiT):
        with torch.device("meta"):  # timm's initial weights are not wanted
            twin = _timm_twin(model.config)
        twin.load_state_dict(model.state_dict(), assign=True)
    config = {"label_names": metadata["class_names"]} if "class_names" in metadata else {}
    prepared = {name: metadata[name] for name in TIMM_PREPROCESSING if name in metadata}
    data_config = {"input_size": tuple(shape), **prepared}
    save_for_hf(twin, str(path), safe_serialization=True, model_config=config, data_config=data_config)
    shutil.copymode(path / "config.json", path / "model.safetensors")  # safetensors lets only the owner read it
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def _write_release(model: Any, path: Path, metadata: Mapping[str, Any]) -> Forward:
    weights = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"model": weights, "metadata": metadata}, path)
    return _timm_twin(model.config, path).eval()


def _write_onnx(model: nn.Module, path: Path, metadata: Mapping[str, Any], shape: Sequence[int]) -> Forward:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            hint = ".venv/bin/pip install --editable '.[export]'"
            raise UserError(f"ONNX needs the package {package}: {hint}") from error
    import onnxruntime

    with _quiet():
        program: Any = torch.onnx.export(
            model,
            **_example(shape),
            input_names=["images"],
            output_names=["logits", "saliency"] if isinstance(model, WithSaliency) else ["logits"],
            dynamo=True,
            verbose=False,
        )
        for name, value in metadata.items():
            program.model.metadata_props[name] = value if isinstance(value, str) else json.dumps(value)
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # where each line of the source lies on this machine
        program.save(path, external_data=False)  # one file; above 2 GB the weights still go beside it
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _write_torch_export(model: nn.Module, path: Path, metadata: Mapping[str, Any], shape: Sequence[int]) -> Forward:
    with _quiet():
        program = torch.export.export(model, **_example(shape), strict=False)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        torch.export.save(program, path, extra_files={"metadata.json": json.dumps(metadata)})
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
    """The timm model nearest to this one, and the arguments in which they differ."""
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
    """timm's model with the same fields, and `weights` read by timm. Its configuration names none of timm's weights."""
    import timm

    entry, differ = _timm_entry(config)
    overlay: dict[str, Any] = dict(url=None, hf_hub_id=None, tag=None, license=None)
    overlay.update(num_classes=config.num_classes, input_size=(config.in_chans, config.img_size, config.img_size))
    if weights is not None:
        overlay["file"] = str(weights)
    return timm.create_model(entry, pretrained=weights is not None, pretrained_cfg_overlay=overlay, **differ)


def _logits(forward: Forward, shape: Sequence[int], batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    with torch.no_grad():
        return forward(torch.randn((batch, *shape), generator=generator))


def _largest_difference(forward: Forward, shape: Sequence[int], logits: list[Tensor], format: Format) -> float:
    largest = 0.0
    for expected in logits:
        got = _logits(forward, shape, len(expected))
        difference = (got - expected).abs().max().item() if got.shape == expected.shape else float("inf")
        if not difference <= TOLERANCE[format] * max(1.0, expected.abs().max().item()):
            raise UserError(f"read back from {format}, a logit differs by {difference:.1e}; nothing was kept")
        largest = max(largest, difference)
    return largest


def _example(shape: Sequence[int]) -> dict[str, Any]:
    """The exporters trace the network with two images, which stand for any number."""
    return dict(args=(torch.zeros(2, *shape),), dynamic_shapes=({0: torch.export.Dim("batch")},))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' warnings and progress: a user can do nothing about them."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """A path of the same name in a hidden directory beside `output`: on one disk, so moving it is one step."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".export-", dir=output.parent) as scratch:
        yield Path(scratch) / output.name


def _settle(path: Path, output: Path) -> list[Path]:
    """Move what was written to its place. In a directory that exists, files of other names stay."""
    written = [file.relative_to(path.parent) for file in sorted(path.parent.rglob("*")) if file.is_file()]
    if path.is_dir() and not output.exists():
        os.replace(path, output)
    else:
        for name in written:
            os.replace(path.parent / name, output.parent / name)
    return [output.parent / name for name in written]
