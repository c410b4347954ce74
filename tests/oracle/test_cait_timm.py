"""CaiT is timm's CaiT, which loads the released weights: its numbers, its start, its weights in every file."""

import huggingface_hub.constants
import pytest
import timm
import torch
from harness import slow
from networks import fill, random_network
from safetensors.torch import save_file
from same import same
from timm.layers import resample_abs_pos_embed
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import cait
from cait.errors import UserError
from cait.model.weights import cached_weights
from cait.train.optim import param_groups

IN_TIMM = timm.list_models("cait_*")


def pair(img_size=224, drop_path_rate=0.0):
    """timm's XXS-24 and ours with the same weights; λ is set near 1, else the branches would hardly count."""
    torch.manual_seed(0)
    settings = dict(img_size=img_size, drop_path_rate=drop_path_rate)
    theirs = timm.create_model("cait_xxs24_224", **settings)
    for name, parameter in theirs.named_parameters():
        if "gamma" in name:
            nn.init.uniform_(parameter, 0.5, 1.0)
    ours = cait.create_model("xxs24", drop_path_mode="mask", **settings)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def without_memory(name, img_size):
    """timm's model and ours, as shapes: their initial weights take long and are not wanted."""
    with torch.device("meta"):
        theirs = timm.create_model(name, img_size=img_size)
        return theirs, cait.create_model(name.split("_")[1], img_size)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), *slow((torch.float32, 1e-5))]
)
def test_logits_and_gradients_are_timms(dtype, tolerance):
    theirs, ours = (model.to(dtype).eval() for model in pair())
    images = torch.randn(2, 3, 224, 224, dtype=dtype)
    expected, logits = theirs(images), ours(images)
    assert expected.std() > 0.1
    assert (expected - logits).abs().max() <= tolerance
    expected.square().sum().backward()
    logits.square().sum().backward()
    for name, parameter in ours.named_parameters():
        gradient = theirs.get_parameter(name).grad
        # Relative to the tensor; proj_l's bias cancels in the softmax, its gradient is rounding alone.
        scale = gradient.abs().max().clamp(min=1.0)
        assert (parameter.grad - gradient).abs().max() <= 100 * tolerance * scale, name


def test_training_with_stochastic_depth_is_timms():
    theirs, ours = pair(64, drop_path_rate=0.3)
    images = torch.randn(4, 3, 64, 64)
    logits = []
    for model, seed in ((theirs, 1), (ours, 1), (ours, 2)):
        torch.manual_seed(seed)
        logits.append(model.train()(images))
    assert (logits[0] - logits[1]).abs().max() <= 1e-4
    assert (logits[2] - logits[1]).abs().max() > 1e-2


def test_initial_weights_follow_timms_distribution():
    torch.manual_seed(0)
    theirs, ours = timm.create_model("cait_xxs36_224"), cait.create_model("xxs36")
    for name, weight in ours.named_parameters():
        expected = theirs.get_parameter(name)
        if expected.std() == 0 or expected.numel() == 1:  # constants: biases, norms, λ
            assert torch.equal(expected, weight), name
        elif expected.numel() > 2000:
            assert weight.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
            assert weight.mean().item() == pytest.approx(expected.mean().item(), abs=0.002), name


def named(groups, model):
    """The decay, scale and names of each group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows = []
    for group in groups:
        rows.append((group["weight_decay"], group.get("lr_scale", 1.0)))
        rows.append(tuple(names[parameter] for parameter in group["params"]))
    return rows


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_groups_are_timms(layer_decay):
    theirs, ours = without_memory("cait_xxs24_224", 224)
    exempt = theirs.no_weight_decay()
    if layer_decay:
        groups = param_groups_layer_decay(theirs, 0.05, exempt, layer_decay=layer_decay)
    else:
        groups = param_groups_weight_decay(theirs, 0.05, no_weight_decay_list=exempt)
    assert named(param_groups(ours, 0.05, layer_decay), ours) == named(groups, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TIMM)
def test_same_weights_same_logits_in_float64_both_ways(name):
    """At timm's own size float64 takes minutes, most of it for the M models: those of 384 and 448 are compared at 64.

    They have the whole depth and width and every weight, but fewer positions.
    """
    img_size = 224 if name.endswith("224") else 64
    theirs, ours = (model.double().eval() for model in without_memory(name, img_size))
    torch.manual_seed(0)
    images = torch.randn(1, 3, img_size, img_size, dtype=torch.float64)
    theirs.to_empty(device="cpu")
    logits = []
    for seed, (source, model) in enumerate([(theirs, ours), (ours, theirs)]):
        fill(source, seed)
        # in one memory: M-48 takes 2.9 GB
        model.load_state_dict(source.state_dict(), strict=True, assign=True)
        with torch.no_grad():
            logits.append(source(images))
            assert (model(images) - logits[-1]).abs().max() <= 1e-9
    assert (logits[0] - logits[1]).abs().max() > 1e-2  # other weights, other logits


def test_published_weights_come_through_timm(tmp_path, monkeypatch):
    """XXS-24 at 224 is in the hub's cache, as if it had been downloaded, and there is no network."""
    published = random_network("xxs24").state_dict()
    folder = tmp_path / "models--timm--cait_xxs24_224.fb_dist_in1k"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    save_file(published, snapshot / "model.safetensors")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(revision)
    # What has been read of the variables in this process.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    assert same(cait.create_model("xxs24", pretrained=True).state_dict(), published)
    # timm has its own at 384, but not in the cache
    with torch.device("meta"), pytest.raises(UserError, match="cait_xxs24_384"):
        cait.create_model("xxs24", img_size=384, pretrained=True)
    assert cached_weights("gcvit_tiny.in1k") is None  # published, but not on the hub

    fitted = dict(cait.create_model("xxs24", 256, 7, pretrained=True).state_dict())
    assert fitted.pop("head.weight").shape == (7, 192)
    assert torch.equal(fitted.pop("head.bias"), torch.zeros(7))
    expected = {name: published[name] for name in fitted}
    expected["pos_embed"] = resample_abs_pos_embed(
        published["pos_embed"], [16, 16], num_prefix_tokens=0, antialias=False
    )
    assert same(fitted, expected)
