"""Any network in CaiT's place: what the template asks of it, and how a name becomes a network.

Any `nn.Module` will do: images [B, C, S, S] in float32 to logits [B, num_classes]. The template uses what else the
network has: `no_weight_decay()`, `compile_blocks()`, `grad_checkpointing` or
`set_grad_checkpointing(enable)`, `maps(images)`, `get_classifier()`, `group_matcher(coarse)` and `fit_weights(state)`,
each as `cait.model.cait.CaiT` or timm's networks have it; docs/extending.md says what for.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from cait import cores, plugins, references
from cait.errors import UserError, did_you_mean, told_as
from cait.model.config import VARIANTS
from cait.references import TIMM
from cait.settings import Group, Needs, Settings, group

SMALL = 1 << 24
PART = 1 << 10
"""Values of a network that is small, and those for which a parameter counts beside its own: each takes time too."""
LARGEST = 1 << 20
"""No size or number in a network's fields is larger."""
NOT_FIELDS = (
    "checkpoint_path",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "cache_dir",
    "features_only",
)
"""Arguments of `timm.create_model` that read files or return something other than a classifier."""


@dataclass(frozen=True)
class NetworkSettings(Group):
    """Which network is trained, and how it runs."""

    name: str = "xxs24"
    """One of the paper's models, as "xxs24"; a timm model, as "timm/vit_small_patch16_224"; or
    "package.module:factory", which is called with img_size, num_classes and `fields`."""
    img_size: int | None = None
    """Side of the images in pixels; None takes the data module's, 224 without one."""
    num_classes: int | None = None
    """Width of the head; None takes the number of the data module's classes, 1000 without one."""
    drop_path_rate: float | None = None
    """Stochastic depth; None takes the paper's rate for the model, or the network's own."""
    task: str | None = None
    """What the labels of an image are: null for one class, or a task of an extra; the data module says which."""
    fields: Settings | None = None
    """Further arguments of the network, as {"patch_size": 8}; for the paper's models the fields of
    `cait.model.config.CaiTConfig`, and those that extras add to it."""
    compile: bool = False
    """Compile the blocks with torch.compile, see `CaiT.compile_blocks`."""
    grad_checkpointing: bool = False
    """Compute activations again in the backward pass instead of saving them; for the largest models and
    resolutions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = self.fields or {}
        beside = fields.keys() & {"name", "img_size", "num_classes", "drop_path_rate", "pretrained"}
        if beside:
            raise UserError(f"{min(beside)} is a setting beside `fields`, not one of them")
        sizes = {"img_size": self.img_size, "num_classes": self.num_classes}
        if not references.is_path(self.name):  # one's own may have a seed among them
            sizes |= fields
        for name, value in sizes.items():
            numbers = value if isinstance(value, list | tuple) else [value]
            largest = max((number for number in numbers if isinstance(number, int)), default=0)
            if largest > LARGEST:
                raise UserError(
                    f"{name} {largest:,} is too large: no network has more than {LARGEST:,}"
                )

    def build_network(self) -> nn.Module:
        """Build the network with fresh weights; raise UserError if it does not exist or cannot run in this way."""
        assert self.img_size is not None
        assert self.num_classes is not None
        cores.after_imports()
        built = create_model(
            self.name, self.img_size, self.num_classes, self.drop_path_rate, **(self.fields or {})
        )
        if self.grad_checkpointing:
            checkpoint_activations(built, self.name)
        if self.compile and not hasattr(built, "compile_blocks"):
            raise UserError(f"{self.name} has no compile_blocks(), which model.compile true needs")
        return built


@dataclass(frozen=True)
class InitialWeights(Group):
    """The weights that training starts from. A run that is resumed does not read them."""

    weights: str | None = None
    """File to start from: the release's, timm's, safetensors or a checkpoint of ours; see
    `cait.model.weights.load_weights`."""
    weights_ema: Annotated[bool | None, Needs("--model.weights", "weights")] = None
    """Take the moving average out of that file. Null takes it out of a run's checkpoint if it chose the checkpoint."""
    pretrained: bool = False
    """Start from timm's published weights of the model instead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrained and self.weights is not None:
            raise UserError(
                f"start from the published weights (pretrained) or from {self.weights}, not from both"
            )

    def load_into(
        self, model: nn.Module, name: str, own_classes: Sequence[str] | None = None
    ) -> list[str]:
        """Load them into `model`, the network `name`; a line for the source and for each thing that was fitted."""
        if not self.pretrained and self.weights is None:
            return []
        from cait.model import weights

        if self.weights is None:
            return weights.load_pretrained(model, name)
        return [
            self.weights,
            *weights.load_weights(model, self.weights, self.weights_ema, own_classes),
        ]


def create_model(
    name: str,
    img_size: int = 224,
    num_classes: int = 1000,
    drop_path_rate: float | None = None,
    *,
    pretrained: bool = False,
    **fields: Any,
) -> Any:
    """Build a network with fresh weights; the arguments are those of `NetworkSettings`.

    Raises UserError if no network has this name, or it does not take these arguments, or weights cannot be loaded.

    Args:
        pretrained: load the weights that timm publishes, see `cait.model.weights.load_pretrained`.
        fields: of the paper's models those of `cait.model.config.CaiTConfig` and of extras, else the network's own.
    """
    network = _build(name, img_size, num_classes, drop_path_rate, **fields)
    InitialWeights(pretrained=pretrained).load_into(network, name)
    return network


def _build(
    name: str, img_size: int, num_classes: int, drop_path_rate: float | None, **fields: Any
) -> nn.Module:
    arguments: Settings = dict(img_size=img_size, num_classes=num_classes, **fields)
    if drop_path_rate is not None:
        arguments["drop_path_rate"] = drop_path_rate
    if name in VARIANTS:  # by its path, because a project may delete CaiT
        return references.locate("cait.model.cait:build")(name, **arguments)
    try:
        if name.startswith(TIMM):
            return _build_timm(name, arguments)
        if references.is_path(name):
            return _call(name, arguments)
    except UserError as error:
        hint = "; --model.fields null gives it none of the fields" if fields else ""
        raise UserError(f"{error}{hint}") from error
    names = ", ".join([*VARIANTS, "timm/<name>", "package.module:factory"])
    raise UserError(
        f"unknown model {name!r}{did_you_mean(name, VARIANTS, f'; choose one of {names}')}"
    )


def _build_timm(name: str, arguments: Settings) -> nn.Module:
    import timm

    entry = name.removeprefix(TIMM)
    if not timm.is_model(entry):
        raise UserError(
            f"timm has no model {entry!r}{did_you_mean(entry, timm.list_models(), most=3)}"
        )
    refused = arguments.keys() & NOT_FIELDS
    if refused:
        raise UserError(
            f"{name} takes no field {min(refused)}; weights come by --model.weights or --model.pretrained"
        )
    shape = input_shape({"img_size": arguments["img_size"], "fields": arguments})
    functions = plugins.by_name("TIMM_FIELDS")
    added = {field: arguments.pop(field) for field in functions if field in arguments}
    network = _call("timm:create_model", arguments, entry)
    for field, value in added.items():
        network = references.locate(functions[field])(network, value, shape)
    return in_channels_last(network)


def _call(path: str, arguments: Settings, *first: str) -> nn.Module:
    """Call what makes a network, without a size or stochastic depth if it does not take them. Changes `arguments`."""
    try:
        network = references.made(path, *first, **arguments)
    except UserError as error:
        # A signature would not say it: timm's functions take any argument, and pass it on to a class.
        refused = re.search("argument '(img_size|drop_path_rate)'", str(error))
        if not refused or arguments.pop(refused[1], None) is None:
            raise
        network = _call(path, arguments, *first)
        if refused[1] == "drop_path_rate":
            network.takes_no_drop_path_rate = True  # type: ignore[assignment]
    if not isinstance(network, nn.Module):
        raise UserError(f"{path} must return an nn.Module, got {type(network).__name__}")
    return network


@contextmanager
def at_most(state: Mapping[str, Any], settings: Settings) -> Iterator[None]:
    """Refuse to build networks of more values than the weights `state` have, before they take memory and hours.

    The one of `settings` is built first without values. A factory may build a part twice, as a head for other classes:
    it may use three times as many, or `SMALL` at least. The error is a UserError.
    """
    most = SMALL + 3 * sum(map(_values, state.values()))
    if not references.is_path(settings["name"]):  # one's own may need values
        with _counted(most), suppress(Exception), torch.device("meta"):
            group(NetworkSettings, settings).build_network()
    with _counted(most):
        yield


@contextmanager
def _counted(left: int) -> Iterator[None]:
    """Raise UserError at a parameter or buffer past so many values, and at the end even if the body suppressed that."""

    def count(module: nn.Module, name: str, value: Tensor | None) -> None:
        nonlocal left
        left -= PART
        if value is not None and not is_lazy(value):
            left -= value.numel()
        refuse()

    def refuse() -> None:
        if left < 0:
            raise UserError("its settings make a network that is far larger than its weights")

    with (
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    ):
        yield
    refuse()


def _values(value: Any) -> int:
    """How many values a tensor holds; sparse ones and those on the device meta hold fewer than they claim."""
    is_whole = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return value.numel() if is_whole else 0


def in_channels_last(network: nn.Module) -> nn.Module:
    """Have convolutions run in torch's format channels_last, in which they are faster, if most layers are Conv2d."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    if 2 * len(convolutions) > len(layers):
        for layer in convolutions:
            # its output then is too, whatever format the images have
            layer.to(memory_format=torch.channels_last)
    return network


def check(network: nn.Module, name: str, shape: Sequence[int], num_classes: int) -> None:
    """Try the network on two images; raise UserError if it fails, gives no logits, or has nothing to train."""
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"{name} has no parameter to train")
    images = two_images(shape)
    seen = images.clone()
    with (
        told_as(f"{name} fails on images of {list(shape)}"),
        in_evaluation(network),
        torch.no_grad(),
    ):
        logits = network(seen)
    if kind_of(logits) != [2, num_classes]:
        raise UserError(
            f"{name} must give logits [B, {num_classes}], for two images it gives {kind_of(logits)}"
        )
    if not torch.equal(seen, images):
        raise UserError(
            f"{name} changes its images in place, which others see after it: compute with a copy of them"
        )


def two_images(shape: Sequence[int]) -> Tensor:
    """Images [2, C, H, W] to try a network on, the same each time."""
    return torch.linspace(-1, 1, 2 * math.prod(shape)).reshape(2, *shape)


def kind_of(result: Any) -> list[int] | str:
    """The shape of a tensor, the type of anything else."""
    return list(result.shape) if isinstance(result, Tensor) else type(result).__name__


def logits_of(network: nn.Module, images: Tensor) -> Tensor:
    """Logits [B, num_classes] in float32, in which every verb scores, whatever precision the network trains in.

    One that is sharded computes as it trains, because its parts are gathered in that precision.
    """
    tensors = dict([*network.named_parameters(), *network.named_buffers()])
    if any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        return network(images)
    others = {
        name: tensor.float()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dtype != torch.float32
    }
    with torch.autocast(images.device.type, enabled=False):
        if others:
            return functional_call(network, others, images.float())
        return network(images.float())


def input_shape(hyper_parameters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of one image, from the hyper-parameters of a checkpoint."""
    size = hyper_parameters["img_size"]
    return (hyper_parameters["fields"] or {}).get("in_chans", 3), size, size


def checkpoint_activations(network: Any, name: str) -> None:
    """Have the network compute activations again in the backward pass. Raises UserError if it cannot."""
    refusal = UserError(
        f"{name} cannot checkpoint its activations: set model.grad_checkpointing to false"
    )
    if hasattr(network, "set_grad_checkpointing"):
        try:
            network.set_grad_checkpointing(True)
        except AssertionError as error:  # timm's way to say that a network cannot
            raise refusal from error
    elif hasattr(network, "grad_checkpointing"):
        network.grad_checkpointing = True
    else:
        raise refusal


def counts_twice(network: nn.Module) -> bool:
    """Whether BatchNorm would count a batch again when activations are computed again, of `blocks` if there are any."""
    blocks = getattr(network, "blocks", None)
    layers = (blocks if isinstance(blocks, nn.Module) else network).modules()
    return any(isinstance(layer, _BatchNorm) and layer.training for layer in layers)


@contextmanager
def in_evaluation(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation, and then each part back into the mode that it had: some may train, others not."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def precise(x: Tensor) -> Tensor:
    """x of any shape in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
