"""The weights that a run starts from by default, with a hub of this machine: good, slow, wrong or absent."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import yaml
from harness import LIMIT
from PIL import Image
from safetensors.torch import save_file

from cait.cli import main
from cait.errors import UserError
from cait.extras.recipe import arguments, weights
from cait.extras.recipe.weights import default_weights, initial_weights, published
from cait.run.program import Program

ENTRY = "tf_efficientnet_lite0.in1k"
REVISION = "0123456789abcdef0123456789abcdef01234567"
PREPARED = {"data.mean": [0.5] * 3, "data.std": [0.5] * 3, "data.interpolation": "bicubic", "data.crop_pct": 0.875}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers each request as `manner` says."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.command)
        if server.manner == "silent":
            time.sleep(LIMIT)
        self.send_response(404 if server.manner == "404" else 200)
        for name, value in {"X-Repo-Commit": REVISION, "ETag": f'"{"e" * 40}"'}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(server.content)

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""


class Server(http.server.ThreadingHTTPServer):
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """The client went away, as it should."""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a lite0 with random weights."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(timm.create_model(ENTRY).state_dict(), path)
    return path.read_bytes()


@pytest.fixture
def hub(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub, and a cache that is empty."""
    server: Any = Server(("127.0.0.1", 0), Hub)
    server.manner, server.content, server.asked = "good", content, []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    use(f"http://127.0.0.1:{server.server_address[1]}", tmp_path, monkeypatch)
    monkeypatch.setattr(weights, "WAIT", LIMIT)  # machines are slow at times
    yield server
    server.shutdown()
    server.server_close()


def use(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub.close_session()  # it has read the proxies of the test before
    of_hub = huggingface_hub.constants
    monkeypatch.setattr(of_hub, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    settings = dict(ENDPOINT=address, HF_HUB_OFFLINE=False, HF_HUB_DISABLE_XET=True, HF_HUB_CACHE=str(tmp_path / "hub"))
    for name, value in settings.items():
        monkeypatch.setattr(of_hub, name, value)


def default(**given: Any) -> tuple[weights.Weights | None, str]:
    return default_weights({key.replace("__", "."): value for key, value in given.items()}, False)


def test_the_hub_is_asked_once_and_the_cache_afterwards(hub: Any, capfd: pytest.CaptureFixture[str]) -> None:
    found, reason = default()
    assert found is not None, reason
    assert found.settings == {"model.pretrained": True, "model.name": f"timm/{ENTRY}"} | PREPARED
    assert found.by_default
    assert f"timm's {ENTRY}, {len(hub.content) / 1e6:.1f} MB from http" in found.name
    assert found.name.endswith("licence apache-2.0")
    assert capfd.readouterr().err.startswith(f"fetching timm's {ENTRY}, {len(hub.content) / 1e6:.1f} MB")
    hub.manner, asked = "silent", len(hub.asked)
    again, _ = default()
    assert again is not None
    assert "from the Hugging Face cache, licence apache-2.0" in again.name
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("silent", "did not answer within 0.5 seconds"),
        ("404", "cannot be used"),
        ("offline", "cannot be used: Cannot reach"),
    ],
)
def test_without_a_good_hub_a_run_starts_from_scratch_soon(
    manner: str, words: str, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.manner = manner
    if manner == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif manner == "silent":
        monkeypatch.setattr(weights, "WAIT", 0.5)
    found, reason = default()
    assert found is None
    assert words in reason
    assert reason.endswith("FROM=FILE starts from a file")
    assert "\n" not in reason
    with pytest.raises(UserError, match=words):
        published({}, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model__name": "timm/no_such_network"}, "weights of timm/no_such_network are published by nobody"),
        ({"model__name": "s36", "model__fields__depth": 2}, "none, because --model.fields.depth changes the network"),
        ({"model__name": "timm/gcvit_tiny"}, "are not on the Hugging Face hub"),
        ({"model__pretrained": True}, ""),
    ],
)
def test_a_network_without_published_weights_starts_from_scratch(given: dict, expected: str, hub: Any) -> None:
    found, reason = default(**given)
    assert found is None
    assert expected in reason
    assert bool(expected) == bool(reason)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("given", "has_gpu", "entry"),
    [
        ({"model.fields.in_chans": 1}, False, ENTRY),
        ({}, True, "cait_xxs24_224.fb_dist_in1k"),
        ({"data.img_size": 100}, True, ENTRY),  # no multiple of CaiT's patches
        ({"model.name": "xxs24", "data.img_size": 320}, False, "cait_xxs24_384.fb_dist_in1k"),
        ({"model.name": "timm/resnet10t"}, True, "resnet10t.c3_in1k"),
    ],
)
def test_the_machine_chooses_the_network_unless_it_is_named(given: dict, has_gpu: bool, entry: str, hub: Any) -> None:
    found = published(given, has_gpu)
    known = timm.get_pretrained_cfg(entry)
    assert found.name.startswith(f"timm's {entry}")
    assert found.settings["data.mean"] == [*known.mean]
    assert ("model.name" in found.settings) == ("model.name" not in given)


def test_a_file_takes_timms_preparation_of_the_network_that_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, path := tmp_path / "x.safetensors")
    found = initial_weights(str(path), f"timm/{ENTRY}")
    assert found.settings == {"model.weights": str(path)} | PREPARED
    assert initial_weights(str(path), "xxs24").settings["data.mean"] == [0.485, 0.456, 0.406]
    assert initial_weights(str(path), "my.code:network").settings == {"model.weights": str(path)}


Fit = Callable[..., dict[str, Any]]


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """`cait fit` on a small folder; gives the configuration of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    for label in range(2):
        (folder := tmp_path / "photos" / "ab"[label]).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (40, 40), (label * 200, 30 * number, 90)).save(folder / f"{number}.png")

    def run(*more: str) -> dict[str, Any]:
        brief = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--data.num_workers=0", "--data.img_size=32"]
        main(["fit", "--data.root=photos", "--baselines=false", *brief, *more])
        return yaml.safe_load((tmp_path / "logs/photos/config.yaml").read_text())

    return run


def test_a_run_starts_from_the_cache_without_a_network(hub: Any, fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--timm--{ENTRY}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    (folder / "snapshots" / REVISION).mkdir(parents=True)
    (folder / "snapshots" / REVISION / "model.safetensors").write_bytes(hub.content)
    hub.manner = "silent"
    config = fit()
    assert (config["model"]["name"], config["model"]["pretrained"]) == (f"timm/{ENTRY}", True)
    assert (config["data"]["mean"], config["data"]["crop_pct"]) == ([0.5] * 3, 0.875)
    assert f"weights from timm's {ENTRY}; the head starts anew" in caplog.text
    assert hub.asked == []


@pytest.mark.parametrize(("more", "line"), [((), "weights   none, because"), (("--from=none",), None)])
def test_a_run_without_them_starts_from_scratch(
    more: tuple, line: str | None, hub: Any, fit: Fit, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.manner = "404"
    config = fit(*more)
    assert (config["model"]["name"], config["model"]["pretrained"]) == ("xxs24", False)
    assert (line or "chosen for photos") in (shown := capfd.readouterr().out)
    assert ("weights   " in shown) == bool(line)
    assert bool(hub.asked) == bool(line)


def test_a_process_that_lightning_starts_asks_nobody(hub: Any, fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arguments.CHOSEN, "{}")
    given = ["--data.root=photos", "--trainer.max_steps=2", "--trainer.accelerator=cpu"]
    first = arguments.add_recipe(given, Program())
    assert "--model.pretrained=true" in first
    asked = len(hub.asked)
    monkeypatch.setattr(arguments, "survey", None)  # nothing is looked at again
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert arguments.add_recipe(given, Program()) == first
    assert len(hub.asked) == asked
