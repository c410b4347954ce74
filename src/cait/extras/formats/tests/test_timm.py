"""CaiT in timm's format, read back by timm."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import timm
import torch
from harness import slow
from networks import DIGITS, TINY, random_network
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config

import cait
from cait.data.reading import load_rgb
from cait.errors import UserError
from cait.extras.formats.exporting import export
from cait.settings import values


@pytest.mark.parametrize(
    ("name", "fields", "entry", "differing"),
    [
        ("xs36", dict(img_size=64), "cait_xs24_384", dict(depth=36)),
        *slow(
            ("xxs36", dict(img_size=64), "cait_xxs36_224", {}),
            ("s48", dict(img_size=32, num_classes=5), "cait_s24_224", dict(depth=48)),
        ),
        ("xxs24", DIGITS, "cait_xxs24_224", dict(embed_dim=96, depth=6, num_heads=2, patch_size=4)),
        (
            "xxs24",
            dict(TINY, qkv_bias=False, mlp_ratio=2.5, depth_token_only=3, in_chans=1),
            "cait_xxs24_224",
            dict(embed_dim=16, depth=1, num_heads=2, patch_size=4, qkv_bias=False, depth_token_only=3)
            | dict(mlp_ratio=2.5, mlp_ratio_token_only=2.5),
        ),
    ],
)
def test_timm_builds_every_variant_from_its_config(
    name: str, fields: dict, entry: str, differing: dict, tmp_path: Path
) -> None:
    model = random_network(name, **fields)
    export(model, tmp_path / "out", "timm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    size, channels = model.config.img_size, model.config.in_chans
    always = dict(img_size=[size, size], in_chans=channels, num_classes=model.config.num_classes, global_pool="token")
    assert config["architecture"] == entry
    assert config["model_args"] == always | differing
    told = config["pretrained_cfg"]
    assert told["input_size"] == [channels, size, size]
    assert (told["fixed_input_size"], told["first_conv"], told["classifier"]) == (True, "patch_embed.proj", "head")
    assert told.keys().isdisjoint({"tag", "license", "url", "hf_hub_id"})  # the weights are not those that timm has
    with torch.device("meta"):
        theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}").eval()
    theirs.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True, assign=True)
    images = torch.randn(2, channels, size, size)
    with torch.no_grad():
        expected = model.eval()(images)
        assert (theirs(images) - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
    assert expected.shape == (2, config["num_classes"])


def test_padding_travels_and_the_files_are_for_the_same_readers(tmp_path: Path) -> None:
    export(random_network(**TINY), tmp_path / "out", "timm", dict(fit="pad"))
    assert resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))["crop_mode"] == "border"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


def test_timm_prepares_grey_images_as_the_run_did(tmp_path: Path, photographs: list[Image.Image]) -> None:
    data = cait.ImageNetDataModule(img_size=8, crop_pct=0.9, in_chans=1)
    export(random_network(**TINY, in_chans=1), tmp_path / "out", "timm", values(data.preprocessing), (1, 8, 8))
    told = resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path / 'out'}"))
    assert told["input_size"] == (1, 8, 8)
    theirs = create_transform(**told)(photographs[0].convert("L"))
    ours = data.eval_transform(load_rgb(photographs[0], reading=data.preprocessing.reading))
    assert torch.equal(data.normalize_and_erase(ours.permute(1, 2, 0)[None])[0], theirs)


PARTS, LOGITS = "this network has other parts than timm's CaiT", "read back from timm, a logit differs by"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(residual="rezero"), PARTS),
        (dict(norm="batchnorm"), PARTS),
        (dict(class_token_at=0), PARTS),
        (dict(global_pool="avg", depth_token_only=0), PARTS),
        (dict(cls_in_keys=False), LOGITS),
        (dict(act="leaky_relu"), LOGITS),
    ],
    ids=str,
)
def test_what_timm_cannot_be_is_refused(fields: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{words}.*timm takes CaiT as published"):
        export(random_network(**TINY, **fields), tmp_path / "out", "timm")
    assert not list(tmp_path.iterdir())
