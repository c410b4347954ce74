"""What writes a network for timm, torch.export, ONNX and OpenVINO, and reads it back with the library of each."""

import contextlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from cait import references
from cait.data.transforms import CROP_MODES
from cait.errors import UserError
from cait.extras.publish import SHARED_FIELDS
from cait.settings import Settings

Metadata = Mapping[str, Any]
"""What goes with the weights: names of the classes, and how images are prepared."""
Shape = Sequence[int]
"""(C, S, S) of an image."""
Forward = Callable[[Tensor], Tensor]
"""Images [B, C, S, S] to logits [B, num_classes]."""
ANY = "timm takes CaiT as published and its own networks, the other formats take any"


def write_timm(model: nn.Module, path: Path, metadata: Metadata, shape: Shape) -> nn.Module:
    """`model.safetensors` and `config.json`, for `timm.create_model("local-dir:DIR", pretrained=True)` or the hub."""
    network = model if type(model).__module__.startswith("timm.") else _in_timm(model)
    config = {"label_names": metadata["class_names"]} if "class_names" in metadata else {}
    data_config: Settings = {"input_size": tuple(shape)}
    if shape[0] not in (1, 3):  # timm's mean and std are ImageNet's, of three channels
        data_config |= {"mean": (0.0,), "std": (1.0,)}
    data_config |= {
        name: metadata[name]
        for name in ("mean", "std", "crop_pct", "interpolation")
        if name in metadata
    }
    if (fit := metadata.get("fit", "crop")) != "crop":
        data_config["crop_mode"] = CROP_MODES[fit]
    save_for_hf(
        network, str(path), safe_serialization=True, model_config=config, data_config=data_config
    )
    # safetensors lets only the owner read it
    shutil.copymode(path / "config.json", path / "model.safetensors")
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def _in_timm(cait: Any) -> nn.Module:
    """timm's CaiT with the same fields and weights. Its configuration names none of timm's weights."""
    config: Any = getattr(cait, "config", None)
    if not hasattr(config, "depth_token_only"):
        raise UserError(f"timm does not know {type(cait).__name__}: {ANY}")
    # by the x in their names
    smallest_first = sorted(timm.list_models("cait_*"), key=len, reverse=True)
    arguments = {entry: _arguments(entry, config) for entry in smallest_first}
    entry = min(arguments, key=lambda name: len(arguments[name]))
    overlay: Settings = dict.fromkeys(("url", "hf_hub_id", "tag", "license"))
    overlay |= dict(num_classes=config.num_classes, input_size=cait.input_shape)
    network = timm.create_model(entry, pretrained_cfg_overlay=overlay, **arguments[entry])
    try:
        network.load_state_dict(cait.state_dict())
    except RuntimeError as error:
        raise UserError(f"this network has other parts than timm's CaiT: {ANY}") from error
    return network


def _arguments(entry: str, config: Any) -> Settings:
    """What makes timm's model `entry`, as "cait_xxs24_224", one with these fields."""
    _, name, img_size = entry.split("_")
    # by name: a project may delete CaiT
    variant_config = references.locate("cait.model.config:variant_config")
    row = variant_config(name, img_size=int(img_size))
    differ = {
        key: getattr(config, key)
        for key in SHARED_FIELDS
        if getattr(config, key) != getattr(row, key)
    }
    if "mlp_ratio" in differ:
        differ["mlp_ratio_token_only"] = config.mlp_ratio  # timm has one for each stage
    return differ


def write_torch_export(model: nn.Module, path: Path, metadata: Metadata, shape: Shape) -> Forward:
    """Write a network for `torch.export.load`; the metadata are "metadata.json" among the `extra_files`."""
    with quiet():
        program = torch.export.export(model, **example(shape), strict=False)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        data = io.BytesIO()  # torch would end the process on a full disk
        torch.export.save(program, data, extra_files={"metadata.json": json.dumps(metadata)})
        path.write_bytes(data.getvalue())
        return torch.export.load(path).module()


def write_onnx(model: nn.Module, path: Path, metadata: Metadata, shape: Shape) -> Forward:
    """Write a network that takes "images" [B, C, S, S] of any B.

    It gives "logits" [B, num_classes], or the outputs that its attribute `output_names` names, "logits" first. The
    metadata become the file's `metadata_props`, as JSON where they are no text.
    """
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
            program.model.metadata_props[name] = (
                value if isinstance(value, str) else json.dumps(value)
            )
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # where each line of the source lies on this machine
        # one file; above 2 GB the weights still go beside it
        program.save(path, external_data=False)
    return read_onnx(path)


def read_onnx(path: Path) -> Forward:
    """The network in a file, by ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def write_openvino(model: nn.Module, path: Path, metadata: Metadata, shape: Shape) -> Forward:
    """`model.xml` and `model.bin`, with the inputs and outputs of ONNX. Metadata are its runtime info, as in ONNX."""
    import openvino

    with quiet():
        converted = openvino.convert_model(
            torch.export.export(model, **example(shape), strict=False)
        )
    converted.reshape([-1, *shape])
    converted.inputs[0].set_names({"images"})
    for output, name in zip(
        converted.outputs, getattr(model, "output_names", ["logits"]), strict=True
    ):
        output.set_names({name})
    for name, value in metadata.items():
        converted.set_rt_info(
            value if isinstance(value, str) else json.dumps(value), ["metadata", name]
        )
    openvino.save_model(converted, path, compress_to_fp16=False)
    return read_openvino(path)


def read_openvino(path: Path) -> Forward:
    """The network in a file, by OpenVINO on the CPU, in float32 also where that has faster kinds of numbers."""
    import openvino

    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: torch.from_numpy(compiled(images.numpy())["logits"])


def example(shape: Shape) -> dict[str, Any]:
    """The exporters trace the network with two images, which stand for any number."""
    return dict(args=(torch.zeros(2, *shape),), dynamic_shapes=({0: torch.export.Dim("batch")},))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the exporters' warnings and progress: a user can do nothing about them."""
    with (
        warnings.catch_warnings(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        warnings.simplefilter("ignore")
        yield
