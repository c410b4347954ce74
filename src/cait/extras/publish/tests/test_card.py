"""The model card, and timm's files for the Hub beside it."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import yaml
from harness import SMALL, call, ended
from PIL import ExifTags, Image

from cait import ckpt
from cait.cli import main
from cait.data.reading import Reading, load_image
from cait.errors import UserError
from cait.extras.channels.preprocessing import Planes
from cait.extras.display import LANGUAGES, network_name, written
from cait.extras.publish import card as hub_card
from cait.plugins import Results
from cait.settings import group, values


@pytest.fixture(scope="module")
def scored(place: Path) -> None:
    """A run, scored."""
    brief = [
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=4",
        "--trainer.limit_val_batches=1",
    ]
    ended(
        place,
        "mine",
        [*SMALL, *brief, "--data.num_workers=0", "--trainer.devices=1", "--ema.decay=0.5"],
    )
    assert (
        call(place, "eval", "mine", "--data.num_workers=0", "--trainer.devices=1").returncode == 0
    )


pytestmark = pytest.mark.usefixtures("scored", "here")


def refused(folder: Path) -> str:
    done = call(folder, "card", "mine")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    return done.stderr


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_tells_what_the_run_has_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["card", "mine", "--license", "apache-2.0"])
    files = capsys.readouterr().out.split()
    assert files == [f"logs/mine/card/{name}" for name in ("README.md", "curves.png")]
    for name in files[1:]:
        Image.open(name).verify()
    found, card = (
        json.loads(Path("logs/mine/evaluation.json").read_text()),
        Path(files[0]).read_text(),
    )
    about = metadata(card)
    assert (about["library_name"], about["license"]) == ("timm", "apache-2.0")
    (result,) = huggingface_hub.ModelCard(card).data.eval_results  # the Hub's own reader
    assert (result.dataset_name, result.metric_type) == ("digits", "accuracy")
    assert result.metric_value == pytest.approx(found["ema"]["acc1"] / 100, abs=1e-4)
    assert f"| validation images | 360 | {found['ema']['acc1']:.2f} % |" in card
    assert "- Data: digits, 1,437 training images\n- Checkpoint: step 4, epoch 1\n" in card
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.S)[1])
    assert settings["model"]["fields"]["embed_dim"] == 32
    assert (
        f"classes: {network_name(settings['model']['name'], settings['model']['fields'])} for images of"
        in card.replace("\\", "")
    )
    assert str(here) not in card  # nothing of this machine

    main(["card", "mine", "--raw"])
    assert (
        f"| validation images | 360 | {found['raw']['acc1']:.2f} % |" in Path(files[0]).read_text()
    )


SCORES = {"acc1": 50.0, "images": 8, "per_class": {"a": 25.0, "b": 75.0}}


def rendered(
    *tables: Results,
    fields: dict | None = None,
    scores: dict | None = None,
    is_own: bool = False,
    is_timms: bool = True,
    **data: Any,
) -> str:
    config = {"model": {"fields": fields}, "data": {"root": "sets/mine"} | data}
    about = {"class_names": ["a", "b"], "img_size": 16, "model": "a`\n<b>", "step": 1, "epoch": 0}
    about |= {"is_own": is_own, "is_timms": is_timms}
    return hub_card.text("me/own", SCORES | (scores or {}), about, config, "many", None, tables)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "Weakest classes: a (25.0 %), b (75.0 %)."),
        ({}, "- Data: mine"),
        ({"root": "s3://bucket/private/birds/"}, "- Data: birds"),
        ({"root": "torch/cifar10"}, "- Data: torch/cifar10"),
        ({"fit": "pad"}, "The transform puts the color `mean` around images that are not square."),
        (
            {"is_own": True},
            "In place of `transform` take that of the data module that trained it: no file here holds it.",
        ),
        ({"is_timms": False}, 'model = cait.load("own")  # the folder of the run'),
        (
            {"scores": {"mAP": 0.5}},
            "An image has every class whose probability is above 0.5, or none of them.",
        ),
    ],
)
def test_the_card_says_what_a_reader_needs(given: dict[str, Any], line: str) -> None:
    assert line in rendered(**given).splitlines()


@pytest.mark.parametrize(
    ("reading", "fields"),
    [
        (Reading(), None),
        (Reading(exif_orientation=False, background=None), None),
        (Reading(background="#20a0ff", shrink=20, in_chans=1), {"in_chans": 1}),
    ],
)
def test_the_code_of_the_card_reads_images_as_the_run_does(
    reading: Reading, fields: Any, tmp_path: Path
) -> None:
    code = re.search(r"```python\n(.*?)```", rendered(fields=fields, **values(reading)), re.S)[1]
    imports, reads = re.search(
        r"(import.*?)\n\n.*?(image = Image.open.*?)with torch", code, re.S
    ).groups()
    rng = np.random.default_rng(0)
    gray, colors = (rng.integers(0, 256, (50, 90, *more), dtype=np.uint8) for more in ([], [4]))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    images = [
        Image.fromarray(colors, "RGBA"),
        Image.fromarray(colors[..., :2], "LA"),
        Image.fromarray(gray),
    ]
    images += [Image.fromarray(gray.astype(np.uint16) * 257), Image.fromarray(gray).convert("P")]
    for number, image in enumerate(images):
        options = {"transparency": 7} if image.mode == "P" else {}
        image.save(tmp_path / f"{number}.png", exif=exif, **options)
    Image.fromarray(colors, "CMYK").save(tmp_path / "cmyk.jpg", exif=exif)
    for file in tmp_path.iterdir():
        exec(
            imports + "\n" + reads.replace('"image.jpg"', repr(str(file))), seen := dict[str, Any]()
        )
        assert np.array_equal(seen["image"].convert("RGB"), load_image(file, reading=reading)), (
            file.name
        )


def test_the_code_of_the_card_reads_planes_as_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = np.random.default_rng(0).random((5, 30, 24), np.float32)
    planes[1, 3:6, 4:9] = np.nan
    np.save(tmp_path / "x.npy", planes)
    read = "import numpy, torch\n\ndef read(path, reading):\n    return torch.from_numpy(numpy.load(path))"
    (tmp_path / "own_reader.py").write_text(f"{read}[reading.reader_args['bands']]")
    monkeypatch.syspath_prepend(tmp_path)
    reading = dict(in_chans=5, reader="own_reader:read", reader_args={"bands": [0, 1, 2, 4, 3]})
    how = dict(
        img_size=16, mean=[0.1, 0.2, 0.3, 0.4, 0.5], std=[0.5, 0.4, 0.3, 0.2, 0.1], crop_pct=0.9
    )
    prepared = group(Planes, reading | how)
    card = rendered(fields={"in_chans": 5}, **values(prepared))
    code = re.search(r"```python\n(.*?)with torch", card, re.S)[1]
    assert "import numpy" not in code
    model: Any = SimpleNamespace(eval=lambda: model)
    model.pretrained_cfg = how | dict(input_size=(5, 16, 16), interpolation="bicubic")
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", lambda *_, **__: model)
        exec(code.replace('"image.jpg"', repr(str(tmp_path / "x.npy"))), seen := dict[str, Any]())
    expected = prepared.transform()(prepared.open(tmp_path / "x.npy", "", False))
    assert (seen["transform"](seen["image"]) - expected).abs().max() < 1e-4


def test_settings_have_their_types_for_any_number_of_channels() -> None:
    planes = {"mean": [0.1] * 4, "std": [0.2] * 4, "reader": "cait.extras.channels.planes:read"}
    config: dict[str, Any] = {"model": {"fields": {"in_chans": 4}}, "data": planes}
    hub_card.check_settings(config)
    for wrong in ({"shrink": "1\nimport os"}, {"mean": [0.1] * 3}):
        with pytest.raises(UserError):
            hub_card.check_settings(config | {"data": planes | wrong})


def test_names_do_not_leave_their_place_and_other_extras_have_tables() -> None:
    told = "a\n# b\x1b[31m| http://c www.d is better"
    table = Results("Baselines", ("", "how", "top-1"), [("a|b", "*so*", "62.50 %")], told)
    card = rendered(table)
    assert (
        "### Baselines\n\n|  | how | top-1 |\n| --- | --- | --- |\n| a\\|b | \\*so\\* | 62.50 % |\n"
        in card
    )
    assert "\na \\# b\\[31m\\| http\\://c www\\.d is better.\n" in card
    assert "2 classes: a\\` \\<b\\> for images" in card


ODD = "1\\n2\nimport os; os.system(1)\n```\n---\n<script>$x$</script>\u2028`{{ 7 * 7 }}\"'\\"
"""A text that would be code, markup, or the end of a block where it is not escaped."""
SETTINGS = dict.fromkeys(values(Planes()), ODD) | {"root": f"sets/{ODD}", "val_split": ODD}


@pytest.mark.parametrize("name", [*SETTINGS, "model", "fields", "a class", "the repository"])
def test_no_value_leaves_its_place_in_the_card(name: str) -> None:
    config: dict[str, Any] = {"model": {"name": "xxs24", "fields": {"in_chans": 5}}, "data": {}}
    config["data"] = {"root": "sets/mine", "reader": "cait.extras.channels.planes:read"}
    about: dict[str, Any] = dict(class_names=["a", "b"], img_size=16, model="x", step=1, epoch=0)
    about |= {"is_own": False, "is_timms": True}
    repo, scores = "me/own", SCORES
    if name in SETTINGS:
        config["data"][name] = SETTINGS[name]
    elif name == "a class":
        about["class_names"] = ["a", ODD]
        scores = SCORES | {"per_class": {"a": 25.0, ODD: 75.0}}
    elif name == "the repository":
        repo = f"me/{ODD}".replace("/script", "")
    else:
        config["model"][name] = {"in_chans": 5, ODD: ODD} if name == "fields" else ODD
        about["model"] = ODD
    card = hub_card.text(repo, scores, about, config, 8, None, ())
    assert not re.search(r"^\s*(import os;|<script|---$)", card.partition("\n# ")[2], re.M)
    assert "{{" not in card or "49" not in card
    code, settings = (
        re.search(rf"```{kind}\n(.*?)\n```$", card, re.S | re.M) for kind in ("python", "yaml")
    )
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(code[1]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert "system" not in called
    shown = yaml.safe_load(settings[1])
    if name in SETTINGS and name not in ("root", "val_split"):
        assert shown["data"][name] == ODD
    assert huggingface_hub.ModelCard(card).data.eval_results[0].metric_value == 0.5


LANGUAGE_READERS: dict[str, Any] = {"python": ast.literal_eval, "json": json.loads}


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_a_value_on_one_line(language: str) -> None:
    text = written(ODD, language)
    assert len(text.splitlines()) == 1
    assert "```" not in text or language in ("html", "terminal")
    if language in LANGUAGE_READERS:
        assert LANGUAGE_READERS[language](text) == ODD
    if language == "html":
        assert not {"<", ">", '"', "'"} & {*text}


def test_what_goes_to_the_hub_is_what_timm_loads(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["card", "mine", "me/digits"])
    files = [
        f"logs/mine/card/{name}"
        for name in ("README.md", "config.json", "curves.png", "model.safetensors")
    ]
    assert capsys.readouterr().out.splitlines() == [
        *files,
        "next: hf upload me/digits logs/mine/card",
    ]

    # The card's own example, on these files.
    example = re.search(r"```python\n(.*?)```", Path(files[0]).read_text(), re.S)[1]
    assert "hf_hub:me/digits" in example
    image = next((here / "data/digits/val/3").iterdir())
    example = example.replace("hf_hub:me/digits", "local-dir:logs/mine/card").replace(
        "image.jpg", str(image)
    )
    exec(example, {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 5
    assert {name for _, name in lines} <= {*"0123456789"}
    average = ckpt.average(torch.load("logs/mine/checkpoints/best.ckpt", weights_only=True))
    loaded = timm.create_model("local-dir:logs/mine/card", pretrained=True).state_dict()
    assert torch.equal(loaded["head.weight"], average["head.weight"])

    Path("logs/mine/card/samples.md").touch()
    # no weights stay beside a card that may be of others; a user's own files do
    main(["card", "mine"])
    assert capsys.readouterr().out.split() == [files[0], files[2], "logs/mine/card/samples.md"]


def test_a_run_without_scores_has_no_card(here: Path) -> None:
    path = Path("logs/mine/evaluation.json")
    kept = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(kept) | {"step": 3}))
        assert "is of step 3 of data/digits, the run of step 4 of" in refused(here)
        path.write_text(json.dumps(json.loads(kept) | {"val_split": "test"}))
        assert "is of test, the run's is val: score it again" in refused(here)
        path.write_text(json.dumps(json.loads(kept) | {"crop_pct": 0.5}))
        assert "is of images prepared otherwise than the run's: score it again" in refused(here)
        content = json.loads(kept)
        path.write_text(json.dumps(content | {"ema": content["ema"] | {"acc1": None}}))
        assert "has no accuracy to show: the network's answers are not finite" in refused(here)
        path.unlink()
        assert "evaluation.json is missing: `cait eval mine` writes it" in refused(here)
    finally:
        path.write_text(kept)
