"""The head of a timm network sees every stage."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from cait.errors import UserError
from cait.model.network import create_model
from cait.model.weights import HEAD_ANEW, load_weights

STAGES = {
    "test_efficientnet": ["bn1", *(f"blocks.{place}" for place in range(5))],
    "test_resnet": ["act1", *(f"layer{place}" for place in range(1, 5))],
    "test_vit": [f"blocks.{place}" for place in range(6)],
}
"""The parts of timm's networks that end a stage."""


@pytest.mark.parametrize("entry", STAGES)
def test_the_head_sees_the_mean_of_each_stage_and_what_it_saw_before(entry: str) -> None:
    torch.manual_seed(0)
    network = create_model(f"timm/{entry}", 160, 5, intermediates=True).eval()
    of_timm, seen = timm.create_model(entry, num_classes=5).eval(), list[torch.Tensor]()
    state, own = network.state_dict(), of_timm.state_dict()
    of_timm.load_state_dict(
        {key: own[key] if own[key].shape != state[key].shape else state[key] for key in own}
    )
    for part in STAGES[entry]:
        of_timm.get_submodule(part).register_forward_hook(lambda *given: seen.append(given[-1]))
    with torch.inference_mode():
        before = of_timm.forward_head(
            of_timm.forward_features(images := torch.randn(2, 3, 160, 160)), pre_logits=True
        )
        means = [part[:, 1:].mean(1) if part.ndim == 3 else part.mean((2, 3)) for part in seen]
        expected = torch.cat([*means, before], dim=1)
        head, logits = network.get_classifier(), network(images)
        torch.testing.assert_close(logits, head(expected))
        for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert type(again) is type(network)
            assert torch.equal(again(images), logits)


def test_weights_of_a_usual_head_leave_it_new_whatever_their_classes(tmp_path: Path) -> None:
    of_timm = timm.create_model("test_vit", num_classes=5, img_size=160)
    torch.save(of_timm.state_dict(), tmp_path / "net.pth")
    network = create_model("timm/test_vit", 192, 5, intermediates=True)
    assert HEAD_ANEW in (notes := load_weights(network, tmp_path / "net.pth"))
    assert "pos_embed fitted by timm" in notes
    assert torch.equal(network.state_dict()["norm.weight"], of_timm.state_dict()["norm.weight"])
    assert (
        create_model("timm/test_vit", 160, 5, intermediates=False).head.in_features
        == of_timm.head.in_features
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "timm/deit_tiny_distilled_patch16_224",
            True,
            "VisionTransformerDistilled does not end in one linear layer",
        ),
        ("timm/test_vit", "yes", "intermediates must be true or false, got 'yes'"),
        ("networks:ConvHead", True, "unexpected keyword argument 'intermediates'"),
    ],
)
def test_networks_without_them_are_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        create_model(name, 224, 5, intermediates=value)


def test_patches_that_are_dropped_leave_no_map() -> None:
    with pytest.raises(UserError, match="no intermediates with patch_drop_rate"):
        create_model("timm/test_vit", 160, 5, intermediates=True, patch_drop_rate=0.25)
