"""Networks in CaiT's place: built by name, with their optional parts used, or refused in one line."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import assert_resumes, loader, module, trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cait.errors import UserError, system_error
from cait.model import network
from cait.model.weights import classifier_keys, load_weights

IMAGES = torch.randn(3, 3, 32, 32)


class Plain(nn.Module):
    """A network with none of the optional parts."""

    def __init__(self, img_size: int, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, width, 3)
        self.neck = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.neck(self.body(images).mean(dim=(2, 3))))


class Dropping(Plain):
    pass


def plain_or_dropping(
    img_size: int, num_classes: int, drop_path_rate: float = 0.0, **fields: int
) -> Plain:
    """Take stochastic depth, as few networks do."""
    return (Dropping if drop_path_rate == 0.1 else Plain)(img_size, num_classes, **fields)


def refusing(**given: Any) -> Plain:
    raise TypeError("its own part got an unexpected keyword argument 'drop_path_rate'")


def any_arguments(**given: Any) -> Plain:
    return plain_or_dropping(**given)


HERE = f"{__name__}:Plain"


@pytest.mark.parametrize(
    ("name", "fields", "kind", "head"),
    [
        ("timm/test_convnext", {}, "ConvNeXt", "head.fc"),
        ("timm/test_resnet", {}, "ResNet", "fc"),
        (
            "timm/deit_tiny_distilled_patch16_224",
            dict(depth=1),
            "VisionTransformerDistilled",
            "head head_dist",
        ),
        (HERE, dict(width=5), "Plain", "head"),
        (f"{__name__}:plain_or_dropping", dict(width=5), "Dropping", "head"),
        (f"{__name__}:any_arguments", dict(width=5), "Dropping", "head"),
    ],
)
def test_a_name_becomes_a_network_of_the_size(
    name: str, fields: dict, kind: str, head: str
) -> None:
    built = network.create_model(name, 32, 7, 0.1, **fields)
    assert type(built).__name__ == kind
    assert built(IMAGES).shape == (3, 7)
    assert classifier_keys(built) == [
        f"{layer}.{part}" for layer in head.split() for part in ("weight", "bias")
    ]


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("timm/test_efficientnet", dict(in_chans=1), {True}),
        ("timm/test_vit", {}, {False}),
        (HERE, {}, {False}),
    ],
)
def test_timms_networks_of_convolutions_run_in_channels_last(
    name: str, fields: dict, expected: set[bool]
) -> None:
    built, formats = network.create_model(name, 32, 7, **fields).eval(), set()

    def look(_: nn.Module, __: object, output: Tensor) -> None:
        if output.shape[-1] > 1:  # one of a single pixel is in both formats
            formats.add(output.is_contiguous(memory_format=torch.channels_last))

    for part in built.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(look)
    images = torch.randn(2, fields.get("in_chans", 3), 32, 32)
    logits = built(images)
    assert formats == expected
    torch.testing.assert_close(
        built.to(memory_format=torch.contiguous_format)(images), logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("relaid", [False, True])
def test_a_run_in_channels_last_resumes_to_the_bit_whatever_format_was_saved(
    relaid: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"

    def lay_out() -> None:
        cut = torch.load(path, weights_only=True)
        assert not cut["state_dict"]["model.conv_stem.weight"].is_contiguous()
        if relaid:
            torch.save(tree_map_only(Tensor, Tensor.contiguous, cut), path)

    assert_resumes(path, dict(name="timm/test_efficientnet", fields=None, lr=1e-2), between=lay_out)


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (
            ("timm/vit_tiny_patch16_225", 32, 7),
            {},
            "timm has no model .*; did you mean vit_tiny_patch16_224",
        ),
        (
            ("timm/test_vit", 32, 7),
            dict(dept=3),
            "cannot make timm:create_model: .*dept.*; --model.fields null",
        ),
        (("timm/test_vit", 32, 7), dict(checkpoint_path="x"), "takes no field checkpoint_path"),
        # code
        (
            ("timm/hf-hub:someone/something", 32, 7),
            {},
            "timm has no model 'hf-hub:someone/something'",
        ),
        (
            (HERE, 32, 7),
            dict(size=3),
            f"cannot make {HERE}: .*'size'; --model.fields null gives it none of the fields",
        ),
        (
            (f"{__name__}:refusing", 32, 7),
            {},
            f"cannot make {__name__}:refusing: .*'drop_path_rate'",
        ),
        (("builtins:dict", 32, 7), {}, "builtins:dict must return an nn.Module, got dict"),
    ],
)
def test_what_is_no_network_is_told_in_one_line(
    arguments: tuple, fields: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        network.create_model(*arguments, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(compile=True), "has no compile_blocks.., which model.compile true needs"),
        (dict(grad_checkpointing=True), "cannot checkpoint its activations"),
    ],
)
def test_what_a_network_cannot_do_is_refused_at_once(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        module(**(dict(name=HERE, fields=None) | settings))
    for name, fields in (("timm/test_vit", {}), ("xxs24", dict(depth=1))):
        assert (
            module(
                name=name, img_size=32, fields=fields, grad_checkpointing=True
            ).model.grad_checkpointing
            is True
        )
    normed = module(
        name="timm/test_resnet", fields=None, drop_path_rate=None, grad_checkpointing=True
    )
    with pytest.raises(
        UserError, match=r"BatchNorm would count each batch twice: set model.grad_checkpointing to"
    ):
        trainer(max_epochs=1).fit(normed, loader())
    normed.model.eval()  # as one whose statistics are frozen
    trainer(max_epochs=1).fit(normed, loader())
    assert not network.counts_twice(network.create_model("timm/test_convnext", 32, 7))
    assert network.counts_twice(network.create_model("timm/test_efficientnet", 32, 7))


def test_weights_are_fitted_by_timm(tmp_path: Path) -> None:
    theirs = network.create_model("timm/test_vit", 32, 7)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    ours = network.create_model("timm/test_vit", 64, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = load_weights(ours, tmp_path / "w.pth")
    assert notes == ["pos_embed fitted by timm", "the head starts anew"]
    torch.testing.assert_close(ours.blocks[0].attn.qkv.weight, theirs.blocks[0].attn.qkv.weight)
    with pytest.raises(UserError, match="is of another network"):
        load_weights(network.create_model("timm/test_vit2", 32, 7), tmp_path / "w.pth")


class Failing(nn.Module):
    """Ways in which a network is not one, by what `fields` ask for."""

    def __init__(self, img_size: int, num_classes: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head = nn.Linear(3, 9 if kind == "classes" else num_classes)
        self.requires_grad_(kind != "frozen")

    def forward(self, images: Tensor) -> object:
        if self.kind == "in place":
            images.sub_(0.5)
        logits = self.head(images.mean(dim=(2, 3)))
        if self.kind == "detached":
            return logits.detach()
        if self.kind == "raises":
            raise ValueError("no\nsuch luck")
        if self.kind == "auxiliary" and self.training:
            return logits, logits
        return (logits, logits) if self.kind == "tuple" else logits


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("classes", r"must give logits \[B, 7\], for two images it gives \[2, 9\]"),
        ("tuple", r"must give logits \[B, 7\], for two images it gives tuple"),
        ("raises", r"fails on images of \[3, 8, 8\]: ValueError: no such luck"),
        ("frozen", "has no parameter to train"),
        ("in place", "changes its images in place"),
    ],
)
def test_a_network_is_tried_before_anything_is_trained(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        module(name=f"{__name__}:Failing", fields=dict(kind=kind))
    assert "\n" not in str(error.value)
    assert module(name=f"{__name__}:Failing", fields=dict(kind="well")).model.training
    auxiliary = module(
        name=f"{__name__}:Failing", fields=dict(kind="auxiliary"), drop_path_rate=None
    )
    with pytest.raises(UserError, match=r"gives no logits in training: try.* not tuple"):
        trainer(max_epochs=1).fit(auxiliary, loader())


def test_a_classifier_is_a_layer() -> None:
    own = module(name=f"{__name__}:Failing", fields=dict(kind="well")).model
    own.get_classifier = lambda: "head"
    with pytest.raises(
        UserError, match=r"get_classifier\(\) of Failing must return a layer, not str"
    ):
        classifier_keys(own)


def test_a_network_that_no_gradient_reaches_ends_in_a_line() -> None:
    own = module(name=f"{__name__}:Failing", fields=dict(kind="detached"))
    with pytest.raises(RuntimeError) as error:
        trainer(max_epochs=1).fit(own, loader())
    assert "no gradient reaches the network" in str(system_error(error.value))


def test_logits_are_in_float32_and_those_of_a_sharded_network_as_it_trains() -> None:
    layer, features = nn.Linear(4, 3), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = network.logits_of(layer, features)
        layer.weight.full_tensor = layer.weight.detach  # as a DTensor has it
        sharded = network.logits_of(layer, features)
        assert torch.equal(sharded, layer(features))
    assert (whole.dtype, sharded.dtype) == (torch.float32, torch.bfloat16)
