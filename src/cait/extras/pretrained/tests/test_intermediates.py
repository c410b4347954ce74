"""The head of a timm network sees every stage."""

import copy
import pickle

import pytest
import timm
import torch

from cait.model.network import create_model
from cait.model.weights import HEAD_ANEW, load_weights

STAGES = {
    "test_efficientnet": "bn1 blocks.0 blocks.1 blocks.2 blocks.3 blocks.4",
    "test_resnet": "act1 layer1 layer2 layer3 layer4",
    "test_vit": "blocks.0 blocks.1 blocks.2 blocks.3 blocks.4 blocks.5",
}
"""The parts of timm's networks that end a stage."""


@pytest.mark.parametrize("entry", STAGES)
def test_the_head_sees_the_mean_of_each_stage_and_what_it_saw_before(entry):
    torch.manual_seed(0)
    network = create_model(f"timm/{entry}", 160, 5, intermediates=True).eval()
    of_timm = timm.create_model(entry, num_classes=0).eval()
    of_timm.load_state_dict(network.state_dict(), strict=False)
    means = []

    def note(part, _, stage):
        means.append(stage[:, 1:].mean(1) if stage.ndim == 3 else stage.mean((2, 3)))

    for part in STAGES[entry].split():
        of_timm.get_submodule(part).register_forward_hook(note)
    images = torch.randn(2, 3, 160, 160)
    with torch.inference_mode():
        last = of_timm(images)
        logits = network(images)
        expected = network.get_classifier()(torch.cat([*means, last], dim=1))
        torch.testing.assert_close(logits, expected)
        for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert type(again) is type(network)
            assert torch.equal(again(images), logits)


def test_weights_of_a_usual_head_leave_it_new_whatever_their_classes(tmp_path):
    of_timm = timm.create_model("test_vit", num_classes=5, img_size=160)
    torch.save(of_timm.state_dict(), tmp_path / "net.pth")
    network = create_model("timm/test_vit", 192, 5, intermediates=True)
    notes = load_weights(network, tmp_path / "net.pth")
    assert HEAD_ANEW in notes
    assert "pos_embed fitted by timm" in notes
    assert torch.equal(network.norm.weight, of_timm.norm.weight)
    usual = create_model("timm/test_vit", 160, 5, intermediates=False)
    assert usual.head.in_features == of_timm.head.in_features
