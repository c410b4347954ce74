"""The weights that a run starts from: by default, from the hub or its cache, from a file; and without any."""

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import timm
import torch
from class_folders import fill
from harness import LIMIT, over_table, parsed
from safetensors.torch import save_file

from cait.cli import main
from cait.cli.options import Line
from cait.errors import UserError
from cait.extras.recipe import arguments, weights
from cait.extras.recipe.weights import weights_of
from cait.run.program import Program
from cait.train.module import CaiTModule

ENTRY = "tf_efficientnet_lite0.in1k"
REVISION = "0123456789abcdef0123456789abcdef01234567"
PREPARED = {
    "data.mean": (0.5, 0.5, 0.5),
    "data.std": (0.5, 0.5, 0.5),
    "data.interpolation": "bicubic",
    "data.crop_pct": 0.875,
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a hub that takes connections and never answers."""
    hub = huggingface_hub.constants
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        huggingface_hub.close_session()  # it has read the proxies of the test before
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub, "ENDPOINT", address)
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(weights, "WAIT", LIMIT)
        yield tmp_path / "hub"


@pytest.fixture
def download(cache, monkeypatch):
    """What a hub that has everything is asked for."""
    metadata = Mock(return_value=Mock(size=18.8e6))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    download = Mock()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return download


def test_the_hub_is_asked_for_the_usual_weights(download, capfd):
    usual, _ = weights_of("", {}, False)
    named = {"model.pretrained": True, "model.name": f"timm/{ENTRY}"}
    assert usual.settings == named | PREPARED
    about = f"timm's {ENTRY}, 18.8 MB from http"
    assert usual.name.startswith(about)
    assert usual.name.endswith("license apache-2.0")
    assert capfd.readouterr().err.startswith(f"fetching {about}")
    download.assert_called_with(f"timm/{ENTRY}", "model.safetensors")
    assert weights_of("", named, False)[0].settings == usual.settings


@pytest.mark.parametrize(
    ("is_offline", "wait", "words"),
    [
        (False, 0.5, "http://127.0.0.1:[0-9]+ did not answer within 0.5 seconds"),
        (True, LIMIT, "the Hugging Face hub cannot be used: "),
    ],
)
def test_without_a_good_hub_a_run_starts_from_scratch_soon(
    is_offline, wait, words, cache, monkeypatch
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(weights, "WAIT", wait)
    from_hub, reason = weights_of("", {}, False)
    assert from_hub is None
    assert re.fullmatch(f"none, because {words}.*--from FILE starts from a file", reason)
    with pytest.raises(UserError, match=words):
        weights_of("timm", {}, False)
    assert weights_of("none", {}, False) == (None, "")


@over_table(__file__, "published", has_gpu=False, starts_from="", none=None)
def test_the_machine_chooses_published_weights_unless_they_are_named(
    given, has_gpu, starts_from, none, download
):
    from_hub, reason = weights_of("", given, has_gpu)
    if starts_from:
        assert from_hub.name.startswith(f"timm's {starts_from}")
        assert from_hub.settings["data.mean"] == timm.get_pretrained_cfg(starts_from).mean
    else:
        assert (from_hub, reason) == (None, none)
        download.assert_not_called()


@pytest.mark.parametrize(
    ("name", "prepared"), [(f"timm/{ENTRY}", PREPARED), ("my.code:network", {})]
)
def test_a_file_takes_timms_preparation_of_the_network_that_is_named(name, prepared, tmp_path):
    path = str(tmp_path / "x.safetensors")
    save_file({"x": torch.zeros(1)}, path)
    from_file, _ = weights_of(path, {"model.name": name}, False)
    assert from_file.settings == {"model.weights": path} | prepared


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """The settings of a short run on a small folder."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "photos", {"a": 6, "b": 6}, size=40)
    return {
        "data.root": "photos",
        "data.num_workers": 0,
        "data.img_size": 32,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 1,
    }


def test_a_run_starts_from_the_cache_without_a_network(cache, photos, monkeypatch, caplog):
    folder = cache / f"models--timm--{ENTRY}"
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    save_file(timm.create_model(ENTRY).state_dict(), snapshot / "model.safetensors")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(REVISION)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", None)  # nobody is asked
    cached, _ = weights_of("", {}, False)
    assert "from the Hugging Face cache" in cached.name
    main(["fit", "--baselines=false", *(f"--{name}={value}" for name, value in photos.items())])
    config = parsed(Path("logs/photos/config.yaml"))
    assert config["model"]["name"] == f"timm/{ENTRY}"
    assert config["model"]["pretrained"] is True
    assert config["data"]["mean"] == [0.5, 0.5, 0.5]
    assert f"weights from timm's {ENTRY}; the head starts anew" in caplog.text


def test_a_process_that_lightning_starts_asks_nobody(download, photos, monkeypatch):
    monkeypatch.setenv(arguments.CHOSEN, "{}")
    monkeypatch.setattr(arguments.Trial, "takes_head", lambda *_: False)  # there are no weights
    line = Line("fit", [])
    arguments.add_recipe(line, Program())
    photos["model.name"] = "timm/test_efficientnet"
    first = line.steps[0](photos)
    assert first["model.pretrained"] is True
    monkeypatch.setattr(arguments, "survey", None)  # nothing is looked at again
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert line.steps[0](photos) == first
    download.assert_called_once()


class Scaled(CaiTModule):
    def forward(self, images):
        return 2 * super().forward(images)


def test_a_run_of_a_module_of_ones_own_gives_its_network_alone(trained, monkeypatch, capfd):
    module = Scaled(img_size=8, num_classes=7, fields={"depth": 1, "patch_size": 4})
    loaded = SimpleNamespace(name="xxs24", module=module)
    monkeypatch.setattr(weights, "from_checkpoint", lambda *_: loaded)
    assert weights.from_run(Path("x.ckpt"), trained).name == "x.ckpt"
    assert "the network alone, without forward of Scaled" in capfd.readouterr().err
