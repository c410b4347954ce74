"""The weights that a run starts from: by default, from the hub or its cache, from a file; and without any."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import yaml
from networks import needs_cait
from PIL import Image
from safetensors.torch import save_file

from cait.cli import main
from cait.cli.options import Line
from cait.errors import UserError
from cait.extras.recipe import arguments, weights
from cait.extras.recipe.weights import published, weights_of
from cait.model.config import VARIANTS
from cait.run.program import Program
from cait.train.module import CaiTModule

ENTRY = "tf_efficientnet_lite0.in1k"
REVISION = "0123456789abcdef0123456789abcdef01234567"
PREPARED = {
    "data.mean": (0.5,) * 3,
    "data.std": (0.5,) * 3,
    "data.interpolation": "bicubic",
    "data.crop_pct": 0.875,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a hub that takes connections and never answers."""
    silent = socket.create_server(("127.0.0.1", 0))
    address, of_hub = f"http://127.0.0.1:{silent.getsockname()[1]}", huggingface_hub.constants
    huggingface_hub.close_session()  # it has read the proxies of the test before
    monkeypatch.setattr(
        of_hub, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    for name, value in dict(
        ENDPOINT=address, HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(tmp_path / "hub")
    ).items():
        monkeypatch.setattr(of_hub, name, value)
    monkeypatch.setattr(weights, "WAIT", 0.5)
    yield tmp_path / "hub"
    silent.close()


@pytest.fixture
def asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a hub that has everything is asked for."""
    found: list[str] = []
    monkeypatch.setattr(
        huggingface_hub,
        "get_hf_file_metadata",
        lambda url, timeout: found.append(url) or SimpleNamespace(size=18.8e6),
    )
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *what: found.append("/".join(what))
    )
    return found


def test_the_hub_is_asked_for_the_usual_weights(
    asked: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    found, reason = weights_of("", {}, False)
    assert found is not None, reason
    assert found.settings == {"model.pretrained": True, "model.name": f"timm/{ENTRY}"} | PREPARED
    assert found.name.startswith(f"timm's {ENTRY}, 18.8 MB from http")
    assert found.name.endswith("license apache-2.0")
    assert capfd.readouterr().err.startswith(f"fetching timm's {ENTRY}, 18.8 MB from http")
    assert asked[-1] == f"timm/{ENTRY}/model.safetensors"
    named = weights_of("", {"model.pretrained": True, "model.name": f"timm/{ENTRY}"}, False)[0]
    assert named.settings == found.settings


@pytest.mark.parametrize(
    ("is_offline", "words"),
    [
        (False, "http://127.0.0.1:[0-9]+ did not answer within 0.5 seconds"),
        (True, "the Hugging Face hub cannot be used: "),
    ],
)
def test_without_a_good_hub_a_run_starts_from_scratch_soon(
    is_offline: bool, words: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    found, reason = weights_of("", {}, False)
    assert found is None
    assert re.fullmatch(f"none, because {words}.*--from FILE starts from a file", reason)
    with pytest.raises(UserError, match=words):
        weights_of("timm", {}, False)
    assert weights_of("none", {}, False) == (None, "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"model.name": "timm/no_such_network"},
            "the Hugging Face hub has no weights of timm/no_such_network",
        ),
        (
            {"model.name": "s36", "model.fields.depth": 2},
            "none, because --model.fields.depth changes the network",
        ),
        (
            {"model.name": "timm/gcvit_tiny"},
            "the Hugging Face hub has no weights of timm/gcvit_tiny",
        ),
        ({"model.pretrained": False}, ""),
    ],
)
def test_a_network_without_published_weights_starts_from_scratch(
    given: dict, expected: str, asked: list[str]
) -> None:
    found, reason = weights_of("", given, False)
    assert found is None
    assert expected in reason
    assert bool(expected) == bool(reason)
    assert asked == []


@pytest.mark.parametrize(
    ("given", "has_gpu", "entry"),
    [
        ({"model.fields.in_chans": 1}, False, ENTRY),
        pytest.param({}, True, "cait_xxs24_224.fb_dist_in1k", marks=needs_cait),
        ({"data.img_size": 100}, True, ENTRY),  # no multiple of CaiT's patches
        pytest.param(
            {"model.name": "xxs24", "data.img_size": 320},
            False,
            "cait_xxs24_384.fb_dist_in1k",
            marks=needs_cait,
        ),
        ({"model.name": "timm/resnet10t"}, True, "resnet10t.c3_in1k"),
    ],
)
def test_the_machine_chooses_the_network_unless_it_is_named(
    given: dict, has_gpu: bool, entry: str, asked: list[str]
) -> None:
    found = published(given, has_gpu)
    assert found.name.startswith(f"timm's {entry}")
    assert found.settings["data.mean"] == timm.get_pretrained_cfg(entry).mean


def test_a_file_takes_timms_preparation_of_the_network_that_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, path := tmp_path / "x.safetensors")

    def settings(name: str) -> dict[str, Any]:
        return weights_of(str(path), {"model.name": name}, False)[0].settings

    assert settings(f"timm/{ENTRY}") == {"model.weights": str(path)} | PREPARED
    if VARIANTS:
        assert settings("xxs24")["data.mean"] == (0.485, 0.456, 0.406)
    assert settings("my.code:network") == {"model.weights": str(path)}


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a short run on a small folder."""
    monkeypatch.chdir(tmp_path)
    for label in "ab":
        (folder := tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (40, 40), (ord(label), 30 * number, 90)).save(folder / f"{number}.png")
    brief = [
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=1",
        "--data.num_workers=0",
        "--data.img_size=32",
    ]
    return ["--data.root=photos", "--baselines=false", *brief]


def test_a_run_starts_from_the_cache_without_a_network(
    cache: Path, given: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cache / f"models--timm--{ENTRY}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    (folder / "snapshots" / REVISION).mkdir(parents=True)
    save_file(
        timm.create_model(ENTRY).state_dict(), folder / "snapshots" / REVISION / "model.safetensors"
    )
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", None)  # nobody is asked
    main(["fit", *given])
    config = yaml.safe_load(Path("logs/photos/config.yaml").read_text())
    assert (config["model"]["name"], config["model"]["pretrained"]) == (f"timm/{ENTRY}", True)
    assert (config["data"]["mean"], config["data"]["crop_pct"]) == ([0.5] * 3, 0.875)
    assert f"weights from timm's {ENTRY}; the head starts anew" in caplog.text


def test_a_process_that_lightning_starts_asks_nobody(
    asked: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(arguments.CHOSEN, "{}")
    measures = {
        "takes_head": no,
        "step": no,
        "has_depthwise": no,
        "built": no,
        "begun": lambda: 0.0,
    }
    monkeypatch.setattr(arguments, "Trial", lambda _: SimpleNamespace(**measures))
    line = Line("fit", [])
    arguments.add_recipe(line, Program())
    settings = {
        "data.root": "photos",
        "trainer.accelerator": "cpu",
        "data.num_workers": 0,
        "data.img_size": 32,
    }
    first = line.steps[0](settings)
    assert first["model.pretrained"] is True
    asked.clear()
    monkeypatch.setattr(arguments, "survey", None)  # nothing is looked at again
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert line.steps[0](settings) == first
    assert asked == []


def no(*_: object) -> None:
    """A measurement that fails."""


class Scaled(CaiTModule):
    def forward(self, images: Any) -> Any:
        return 2 * super().forward(images)


@pytest.mark.parametrize("kind", [CaiTModule, Scaled])
def test_a_run_of_a_module_of_ones_own_gives_its_network_alone(
    kind: type[CaiTModule],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    module = kind(img_size=8, num_classes=7, fields={"depth": 1, "patch_size": 4})
    run = {"model": {"name": "xxs24"}}
    loaded = SimpleNamespace(name="xxs24", module=module)
    monkeypatch.setattr("cait.cli.saved.run_settings", lambda _: run)
    monkeypatch.setattr("cait.cli.saved.data_settings", lambda _: {})
    monkeypatch.setattr(weights, "from_checkpoint", lambda *_: loaded)
    assert weights.from_run(Path("x.ckpt"), tmp_path).name == "x.ckpt"
    line = "this is the network alone, without forward of Scaled\n"
    assert capfd.readouterr().err == (line if kind is Scaled else "")
