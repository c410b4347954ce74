"""The model card and the push to the Hub, against a server that speaks the Hub's calls."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import yaml
from harness import SMALL
from PIL import Image

from cait import ckpt, plugins
from cait.cli import main
from cait.extras.hub import card_text
from cait.plugins import Results

TOKEN = "hf_test"


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a push asks for; `server` keeps what it is told and given."""

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        hub: Any = self.server
        if self.path == f"/api/models/{hub.repo}":
            return self.answer({"id": hub.repo, "private": hub.private, "siblings": []})
        return self.answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        hub: Any = self.server
        content = self.read()
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        hub.large[self.path.rpartition("/")[2]] = content
        self.answer({})

    def do_POST(self) -> None:
        hub: Any = self.server
        body = self.read()
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials in Authorization header"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            if asked.get("organization", "me") != "me":
                return self.answer({"error": "You don't have the rights to create a model under it"}, 403)
            if hub.repo is None:
                hub.repo, hub.private = (
                    f"me/{asked['name']}",
                    asked.get("visibility") == "private" or bool(asked.get("private")),
                )
            return self.answer({"url": f"{hub.address}/{hub.repo}", "id": "1"})
        if self.path == f"/api/models/{hub.repo}/preupload/main":
            modes = [
                (file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular")
                for file in json.loads(body)["files"]
            ]
            return self.answer(
                {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]}
            )
        if self.path == f"/{hub.repo}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            uploads = [each | {"actions": {"upload": {"href": f"{hub.address}/lfs/{each['oid']}"}}} for each in objects]
            return self.answer({"transfer": "basic", "objects": uploads})
        if self.path == f"/api/models/{hub.repo}/commit/main":
            hub.commit = [json.loads(line) for line in body.splitlines()]
            return self.answer(
                {
                    "commitUrl": f"{hub.address}/{hub.repo}/commit/{'a' * 40}",
                    "commitOid": "a" * 40,
                    "pullRequestUrl": None,
                }
            )
        return self.answer({"error": f"unknown call {self.path}"}, 404)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.repo, server.private, server.large, server.commit = None, False, {}, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def scored(place: Path) -> Path:
    """A folder with a run, scored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        recipe = [
            *SMALL,
            "--data.num_workers=0",
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=4",
            "--trainer.devices=1",
            "--ema.decay=0.5",
        ]
        main(["fit", *recipe, "--run_name=mine", "--trainer.limit_val_batches=1"])
        main(["eval", "mine", "--data.num_workers=0", "--trainer.devices=1"])
    return place


@pytest.fixture(autouse=True)
def here(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scored)
    monkeypatch.setattr(sys, "argv", ["cait"])


def refused(*arguments: str, capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    return line


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_tells_what_the_run_has_written(scored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["card", "mine", "--license", "apache-2.0", "--repo", "me/digits"])
    files = capsys.readouterr().out.split()
    assert files == [f"logs/mine/card/{name}" for name in ("README.md", "curves.png")]
    for name in files[1:]:
        Image.open(name).verify()
    found, card = json.loads(Path("logs/mine/evaluation.json").read_text()), Path(files[0]).read_text()
    about = metadata(card)
    assert (about["library_name"], about["pipeline_tag"], about["license"]) == (
        "timm",
        "image-classification",
        "apache-2.0",
    )
    (result,) = huggingface_hub.ModelCard(card).data.eval_results  # the Hub's own reader
    assert (result.dataset_name, result.metric_type) == ("digits", "accuracy")
    assert result.metric_value == pytest.approx(found["ema"]["acc1"] / 100, abs=1e-4)
    assert f"| validation images | 360 | {found['ema']['acc1']:.2f} % |" in card
    state = ckpt.data_state(torch.load("logs/mine/checkpoints/best.ckpt", weights_only=True))
    digest = state["depends_on"]["digest of the training pictures' names"]
    assert f"Digest of the training images' names: `{digest}`" in card
    assert re.search(r"Code when this card was written: (commit `[0-9a-f]{40}`|cait-lightning \d)", card)
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.S)[1])
    assert settings["model"]["fields"]["embed_dim"] == 32
    assert f"`CaiT {settings['model']['fields']['depth']}×32` for images of" in card
    assert str(scored) not in card  # nothing of this machine

    main(["card", "mine", "--raw", "--output", "raw"])
    assert f"| validation images | 360 | {found['raw']['acc1']:.2f} % |" in Path("raw/README.md").read_text()


def test_a_readme_that_is_there_is_kept(scored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    told = refused("card", "mine", "--output", str(tmp_path), capfd=capfd)
    assert f"{tmp_path}/README.md exists; move it away" in told


SCORES = {"acc1": 50.0, "images": 8, "per_class": {"a": 25.0, "b": 75.0}}


def rendered(
    *tables: Results, fields: dict | None = None, depends: dict | None = None, scores: dict | None = None, **data: Any
) -> str:
    config = {"model": {"fields": fields}, "data": {"root": "sets/mine"} | data}
    about = {"class_names": ["a", "b"], "img_size": 16, "model": "xxs24", "step": 1, "epoch": 0}
    return card_text.text(
        "me/own", SCORES | (scores or {}), about, config, {"depends_on": depends or {}}, [], None, tables
    )


COUNTED = {"training pictures": 1437, "stored training images": "unchanged"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "Weakest classes: a (25.0 %), b (75.0 %)."),
        ({}, "- Data: mine"),
        (
            {"depends": COUNTED | {"stored training images": "raw pixels"}},
            "- Data: mine, 1,437 training images (raw pixels)",
        ),
        ({"shrink": 128}, "Halve large images first: `while min(image.size) >= 256: image = image.reduce(2)`."),
        ({"fit": "pad"}, "The transform puts the colour `mean` around images that are not square."),
        ({"fit": "squash"}, "The transform squashes images that are not square."),
        ({"background": "white"}, "Put images with transparent parts on white first."),
        ({}, 'image = Image.open("image.jpg").convert("RGB")'),
        ({"fields": {"in_chans": 1}}, 'image = Image.open("image.jpg").convert("L")'),
        ({"exif_orientation": True}, 'image = ImageOps.exif_transpose(Image.open("image.jpg")).convert("RGB")'),
        ({"scores": {"mAP": 0.5}}, "An image has every class whose probability is above 0.5, or none of them."),
    ],
)
def test_the_card_says_what_a_reader_needs(given: dict[str, Any], line: str) -> None:
    assert line in rendered(**given).splitlines()


def test_names_do_not_leave_their_place_and_other_extras_have_tables() -> None:
    table = Results("Baselines", ("", "how", "top-1"), [("a|b", "*so*", "62.50 %")], "a\n# b\x1b[31m| is better")
    card = rendered(table)
    assert "### Baselines\n\n|  | how | top-1 |\n| --- | --- | --- |\n| a\\|b | \\*so\\* | 62.50 % |\n" in card
    assert "\na \\# b\\[31m\\| is better.\n" in card


def test_a_push_is_what_timm_loads(scored: Path, hub: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["push", "mine", "me/digits", "--dry-run"])
    shown = capsys.readouterr().out
    assert (hub.repo, hub.commit) == (None, [])
    for name in ("README.md", "config.json", "model.safetensors", "curves.png"):
        assert re.search(rf"logs/mine/hub/{name} +[\d.]+ (bytes|[kM]B)", shown)
    assert f"nothing was sent; without --dry-run these files go to {hub.address}/me/digits (public if" in shown

    main(["push", "mine", "me/digits", "--private"])
    assert f"{hub.address}/me/digits (private)" in capsys.readouterr().out
    assert (hub.repo, hub.private) == ("me/digits", True)
    main(["push", "mine", "me/digits"])
    assert f"{hub.address}/me/digits (private)" in capsys.readouterr().out  # as it was
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    for operation in hub.commit[1:]:
        value = operation["value"]
        content = hub.large[value["oid"]] if operation["key"] == "lfsFile" else base64.b64decode(value["content"])
        (arrived / value["path"]).write_bytes(content)
    assert {path.name for path in arrived.iterdir()} >= {"README.md", "config.json", "model.safetensors"}
    assert len(hub.large) == 1

    # The card's own example, on what arrived.
    card = (arrived / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", card, re.S)[1]
    assert "hf_hub:me/digits" in example
    image = next((scored / "data/digits/val/3").iterdir())
    example = example.replace("hf_hub:me/digits", f"local-dir:{arrived}").replace("image.jpg", str(image))
    exec(example, {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 5
    assert {name for _, name in lines} <= {*"0123456789"}
    average = ckpt.average(torch.load("logs/mine/checkpoints/best.ckpt", weights_only=True))
    loaded = timm.create_model(f"local-dir:{arrived}", pretrained=True).state_dict()
    assert torch.equal(loaded["head.weight"], average["head.weight"])

    hub.private = False
    with pytest.raises(SystemExit):
        main(["push", "mine", "me/digits", "--private"])
    assert "me/digits is there already and is public" in capsys.readouterr().err


def test_what_cannot_be_pushed_is_told_in_one_line(
    scored: Path, hub: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "where to? name the model as OWNER/NAME" in refused("push", "mine", "digits", capfd=capfd)
    assert "You don't have the rights to create" in refused("push", "mine", "you/digits", capfd=capfd)
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    told = refused("push", "mine", "me/digits", capfd=capfd)
    assert f"{hub.address} has not taken me/digits: Invalid credentials" in told
    assert "`hf auth login`, or HF_TOKEN, gives a token" in told


def test_a_run_that_was_not_scored_has_no_card(scored: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path("logs/mine/evaluation.json")
    kept = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(kept) | {"step": 3}))
        assert "is of step 3 of data/digits, the run of step 4 of" in refused("card", "mine", capfd=capfd)
        path.write_text("{")
        assert "logs/mine/evaluation.json" in refused("card", "mine", capfd=capfd)
        path.unlink()
        assert "evaluation.json is missing: `make eval RUN=mine` writes it" in refused("card", "mine", capfd=capfd)
        assert "`make eval RUN=mine` writes it" in refused("push", "mine", "me/digits", "--dry-run", capfd=capfd)
    finally:
        path.write_text(kept)


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("/home/me/photos/", "photos"),
        ("mine.sets:birds", "mine.sets:birds"),
        ("s3://bucket/private/birds", "birds"),
        pytest.param(
            "torch/cifar10",
            "torch/cifar10",
            marks=pytest.mark.skipif("catalog" not in plugins.extras(), reason="sets by name are an extra"),
        ),
    ],
)
def test_a_path_of_this_machine_is_private_and_the_name_of_a_set_is_not(root: str, name: str) -> None:
    assert card_text._data_name({"data": {"root": root}}) == name
