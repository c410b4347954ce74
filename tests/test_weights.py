"""Weights in, in every form they come in, against timm's models and loaders."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed

import cait
from cait.errors import UserError
from cait.model.weights import load_weights, read_state_dict

IN_TIMM = [("xxs24", "cait_xxs24_224"), ("xxs36", "cait_xxs36_224"), ("xs24", "cait_xs24_384"), ("s24", "cait_s24_224")]


def their_model(name: str = "cait_xxs24_224") -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "gamma" in key:
                parameter.uniform_(0.5, 1.0)
    return model


@pytest.mark.parametrize(("ours", "theirs"), IN_TIMM)
def test_same_weights_same_logits_in_float64_both_ways(ours: str, theirs: str, tmp_path: Path) -> None:
    source = their_model(theirs)
    model = cait.create_model(ours, img_size=int(theirs[-3:])).eval()
    torch.save(source.state_dict(), tmp_path / "timm.pth")
    assert load_weights(model, tmp_path / "timm.pth") == []
    images = torch.randn(1, 3, *[model.config.img_size] * 2, dtype=torch.float64)
    with torch.no_grad():
        expected = source.double()(images)
        assert (model.double()(images) - expected).abs().max() <= 1e-9
    back = timm.create_model(theirs)
    back.load_state_dict(model.float().state_dict(), strict=True)
    for key, value in their_model(theirs).state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


def forms(path: Path) -> dict[str, Path]:
    """The weights of one model in every file form."""
    state = their_model().state_dict()
    files = {name: path / name for name in ("bare.pth", "release.pth", "timm.pth.tar", "x.safetensors")}
    torch.save(state, files["bare.pth"])
    released = {"model": {f"module.{key}": value for key, value in state.items()}, "args": argparse.Namespace(lr=5e-4)}
    torch.save(released, files["release.pth"])
    torch.save({"state_dict": state, "epoch": 3, "state_dict_ema": state}, files["timm.pth.tar"])
    save_file(state, files["x.safetensors"])
    return files


def test_every_form_of_file_holds_the_same_weights(tmp_path: Path) -> None:
    expected = their_model().state_dict()
    for path in forms(tmp_path).values():
        got = read_state_dict(path)
        assert list(got) == list(expected) or set(got) == set(expected), path
        assert all(torch.equal(got[key], value) for key, value in expected.items()), path
    assert read_state_dict(tmp_path / "timm.pth.tar", ema=True).keys() == expected.keys()


def test_a_pretrained_timm_model_comes_through_timms_own_loader(tmp_path: Path) -> None:
    path = forms(tmp_path)["x.safetensors"]
    theirs = timm.create_model("cait_xxs24_224", pretrained=True, pretrained_cfg_overlay=dict(file=str(path))).eval()
    ours = cait.create_model("xxs24").eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert (theirs(images) - ours(images)).abs().max() <= 1e-5


def test_another_resolution_and_other_classes(tmp_path: Path) -> None:
    path = forms(tmp_path)["release.pth"]
    model = cait.create_model("xxs24", img_size=384, num_classes=7)
    head = model.head.weight.clone()
    notes = load_weights(model, path)
    assert len(notes) == 2
    assert torch.equal(model.head.weight, head)
    source = their_model().state_dict()
    assert torch.equal(model.blocks[3].attn.qkv.weight, source["blocks.3.attn.qkv.weight"])
    expected = resample_abs_pos_embed(source["pos_embed"], [24, 24], num_prefix_tokens=0, antialias=False)
    assert torch.equal(model.pos_embed, expected)
    smoothed = resample_abs_pos_embed(expected, [14, 14], num_prefix_tokens=0)
    assert not torch.allclose(load_down(path, tmp_path), smoothed)  # timm's default is another picture


def load_down(path: Path, tmp_path: Path) -> torch.Tensor:
    large = cait.create_model("xxs24", img_size=384)
    load_weights(large, path)
    torch.save(large.state_dict(), tmp_path / "large.pth")
    small = cait.create_model("xxs24")
    load_weights(small, tmp_path / "large.pth")
    return small.pos_embed


def test_unusable_files_are_told(tmp_path: Path) -> None:
    files = forms(tmp_path)
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    for path, model, ema, words in [
        (tmp_path / "none.pth", "xxs24", False, "do not exist"),
        (tmp_path / "text.pth", "xxs24", False, "cannot be read"),
        (tmp_path / "list.pth", "xxs24", False, "holds no weights"),
        (files["release.pth"], "xxs24", True, "no moving average"),
        (files["bare.pth"], "xxs36", False, "another network"),
        (files["bare.pth"], "s24", False, "another network"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            load_weights(cait.create_model(model), path, ema)
        assert "\n" not in str(caught.value)


def test_a_run_starts_from_another_runs_raw_or_averaged_weights(cait, tmp_path: Path) -> None:
    from conftest import SMALL

    done = cait("fit", *SMALL, "--trainer.max_steps=8", "--ema.decay=0.9", "--run_name=a", "--model.lr=1e-2")
    assert done.returncode == 0, done.stderr
    source = "logs/a/checkpoints/last.ckpt"
    raw, ema = (read_state_dict(tmp_path / source, ema=ema) for ema in (False, True))
    assert raw.keys() == ema.keys()
    assert not torch.equal(raw["head.weight"], ema["head.weight"])
    frozen = ["--model.lr=0", "--model.warmup_lr=0", "--model.min_lr=0", "--trainer.max_steps=1"]
    for name, more, expected in (("b", [], raw), ("c", ["--model.weights_ema=true"], ema)):
        done = cait("fit", *SMALL, *frozen, f"--model.weights={source}", *more, f"--run_name={name}")
        assert done.returncode == 0, done.stderr
        got = read_state_dict(tmp_path / f"logs/{name}/checkpoints/last.ckpt")
        assert all(torch.equal(got[key], value) for key, value in expected.items())
