"""The model card, and the push to the Hub by the calls that its client takes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import timm
import torch
import yaml
from harness import SMALL
from PIL import Image

from cait import ckpt
from cait.cli import main
from cait.extras.hub import card as hub_card
from cait.plugins import Results

HUB = "https://hub.example"


@pytest.fixture(scope="module")
def scored(place: Path) -> Path:
    """A folder with a run, scored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        brief = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1"]
        more = ["--data.num_workers=0", "--trainer.devices=1", "--ema.decay=0.5", "--run_name=mine"]
        main(["fit", *SMALL, *brief, *more])
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
    main(["card", "mine", "--license", "apache-2.0"])
    files = capsys.readouterr().out.split()
    assert files == [f"logs/mine/card/{name}" for name in ("README.md", "curves.png")]
    for name in files[1:]:
        Image.open(name).verify()
    found, card = json.loads(Path("logs/mine/evaluation.json").read_text()), Path(files[0]).read_text()
    about = metadata(card)
    assert (about["library_name"], about["license"]) == ("timm", "apache-2.0")
    (result,) = huggingface_hub.ModelCard(card).data.eval_results  # the Hub's own reader
    assert (result.dataset_name, result.metric_type) == ("digits", "accuracy")
    assert result.metric_value == pytest.approx(found["ema"]["acc1"] / 100, abs=1e-4)
    assert f"| validation images | 360 | {found['ema']['acc1']:.2f} % |" in card
    state = ckpt.data_state(torch.load("logs/mine/checkpoints/best.ckpt", weights_only=True))
    digest = state["depends_on"]["digest of the training pictures' names"]
    assert f"Digest of the training images' names: `{digest}`" in card
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.S)[1])
    assert settings["model"]["fields"]["embed_dim"] == 32
    assert f"`CaiT {settings['model']['fields']['depth']}×32` for images of" in card
    assert str(scored) not in card  # nothing of this machine

    main(["card", "mine", "--raw"])
    assert f"| validation images | 360 | {found['raw']['acc1']:.2f} % |" in Path(files[0]).read_text()


SCORES = {"acc1": 50.0, "images": 8, "per_class": {"a": 25.0, "b": 75.0}}


def rendered(
    *tables: Results, fields: dict | None = None, depends: dict | None = None, scores: dict | None = None, **data: Any
) -> str:
    config = {"model": {"fields": fields}, "data": {"root": "sets/mine"} | data}
    about = {"class_names": ["a", "b"], "img_size": 16, "model": "xxs24", "step": 1, "epoch": 0}
    return hub_card.text("me/own", SCORES | (scores or {}), about, config, depends or {}, False, None, tables)


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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The Hub's client, as huggingface_hub declares it; what is uploaded lands in tmp_path/arrived."""
    client = create_autospec(huggingface_hub.HfApi, instance=True, endpoint=HUB)
    arrived = tmp_path / "arrived"
    client.upload_folder.side_effect = lambda **about: shutil.copytree(about["folder_path"], arrived)
    client.model_info.return_value.private = True
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: client)
    return client


def test_a_push_is_what_timm_loads(scored: Path, hub: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["push", "mine", "me/digits", "--dry-run"])
    shown = capsys.readouterr().out
    assert not hub.method_calls
    for name in ("README.md", "config.json", "model.safetensors", "curves.png"):
        assert re.search(rf"logs/mine/hub/{name} +[\d.]+ (bytes|[kM]B)", shown)
    assert f"nothing was sent; without --dry-run these files go to {HUB}/me/digits" in shown

    main(["push", "mine", "me/digits", "--private"])
    assert capsys.readouterr().out.splitlines()[-1] == f"{HUB}/me/digits"
    hub.create_repo.assert_called_once_with("me/digits", private=True, exist_ok=True)
    assert hub.upload_folder.call_args.kwargs["repo_id"] == "me/digits"

    # The card's own example, on what arrived.
    arrived = tmp_path / "arrived"
    example = re.search(r"```python\n(.*?)```", (arrived / "README.md").read_text(), re.S)[1]
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


def test_what_cannot_be_pushed_is_told_in_one_line(scored: Path, hub: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert "where to? name the model as OWNER/NAME" in refused("push", "mine", "digits", capfd=capfd)
    hub.model_info.return_value.private = False
    told = refused("push", "mine", "me/digits", "--private", capfd=capfd)
    assert "it is there already and is public" in told
    hub.create_repo.side_effect = OSError("Invalid credentials\nin Authorization header")
    told = refused("push", "mine", "me/digits", capfd=capfd)
    assert f"{HUB} has not taken me/digits: Invalid credentials in" in told
    assert "`hf auth login`, or HF_TOKEN, gives a token" in told
    assert not hub.upload_folder.called


def test_a_run_that_was_not_scored_has_no_card(scored: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path("logs/mine/evaluation.json")
    kept = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(kept) | {"step": 3}))
        assert "is of step 3 of data/digits, the run of step 4 of" in refused("card", "mine", capfd=capfd)
        path.unlink()
        assert "evaluation.json is missing: `make eval RUN=mine` writes it" in refused("card", "mine", capfd=capfd)
    finally:
        path.write_text(kept)


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("/home/me/photos/", "photos"),
        ("mine.sets:birds", "mine.sets:birds"),
        ("s3://bucket/private/birds", "birds"),
        ("torch/cifar10", "torch/cifar10"),
    ],
)
def test_a_path_of_this_machine_is_private_and_the_name_of_a_set_is_not(root: str, name: str) -> None:
    assert hub_card._data_name({"data": {"root": root}}) == name
