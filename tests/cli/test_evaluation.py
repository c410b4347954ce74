"""`cait eval`: what it counts, held against the network alone; what it prints, writes and refuses."""

import json
import re
import shutil
import sys
from pathlib import Path

import processes
import pytest
import scored
import torch
from scored import NAMES, TWO, logits_of

from cait import plugins
from cait.cli import main
from cait.run import rundir


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has seen the digits."""
    place = tmp_path_factory.mktemp("evaluation")
    scored.write_sets(place)
    scored.train(place)
    assert not (place / "logs/mine/evaluation.json").exists()  # training does not count this
    return place


@pytest.fixture(scope="module")
def evaluated(place: Path) -> dict:
    """What two processes find."""
    done = processes.run(place, "eval", "mine", *TWO, processes=2)
    assert done.returncode == 0, done.stderr
    return {"shown": done.stdout, **json.loads((place / "logs/mine/evaluation.json").read_text())}


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_the_scores_are_the_networks_over_two_processes(
    place: Path, evaluated: dict, weights: str
) -> None:
    figures = evaluated[weights]
    paths, labels = scored.validation(place)
    logits = logits_of(place, weights, paths)
    right = logits.argmax(dim=1) == labels
    assert figures["images"] == len(paths) == 300
    shares = {
        name: 100 * right[labels == index].float().mean().item() for index, name in enumerate(NAMES)
    }
    assert figures["per_class"] == pytest.approx(shares)
    assert figures["acc1_macro"] == pytest.approx(sum(shares.values()) / 12)
    assert figures["acc1"] == pytest.approx(100 * right.float().mean().item(), rel=1e-5)
    among_five = (logits.topk(5).indices == labels[:, None]).any(dim=1)
    assert figures["acc5"] == pytest.approx(100 * among_five.float().mean().item(), rel=1e-5)
    assert figures["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4
    )


def test_what_is_printed_and_written(evaluated: dict) -> None:
    shown = evaluated["shown"]
    assert len(re.findall(r"by class: logs/mine/evaluation.json", shown)) == 1  # one process speaks
    for title, key in (("top-1", "acc1"), ("top-5", "acc5"), ("mean of the classes", "acc1_macro")):
        raw, ema = evaluated["raw"][key], evaluated["ema"][key]
        assert re.search(rf" {title} +│ +{raw:.2f} % │ +{ema:.2f} % ", shown)
    about = {
        "weights": "logs/mine/checkpoints/best.ckpt",
        "model": "xxs24",
        "img_size": 16,
        "crop_pct": 1.0,
    }
    about |= {"root": "data", "class_names": NAMES}
    about |= {
        "fit": "crop",
        "interpolation": "bicubic",
        "exif_orientation": True,
        "background": "white",
    }
    assert "best.ckpt at 16 pixels, crop 1.0\n" in shown
    assert about.items() <= evaluated.items()
    assert "val/acc1" not in shown  # Lightning's table has the same figures
    assert evaluated["step"] == (evaluated["epoch"] + 1) * ((1797 + 360 - 500) // 64)


@pytest.fixture
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the run, with `cait` in it called from this process."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    return place


FIGURES = ("loss", "acc1", "acc5", "images", "per_class")


def test_a_checkpoint_and_weights_are_scored_without_a_run(inside: Path, evaluated: dict) -> None:
    best = "logs/mine/checkpoints/best.ckpt"
    given = [
        "--config=logs/mine/config.yaml",
        "--trainer.limit_val_batches=null",
        "--data.num_workers=0",
    ]
    main(["eval", *given, "--ckpt_path", best])
    found = json.loads(Path("evaluation.json").read_text())
    assert found["step"] == evaluated["step"]
    assert [found["ema"][key] for key in FIGURES[1:]] == [
        evaluated["ema"][key] for key in FIGURES[1:]
    ]
    # those that chose it alone
    main(["eval", *given, "--model.weights", best, "--output=found/weights.json"])
    found = json.loads(Path("found/weights.json").read_text())
    assert [found["raw"][key] for key in FIGURES[1:]] == [
        evaluated["ema"][key] for key in FIGURES[1:]
    ]
    assert (found["weights"], found["step"], "ema" in found) == (best, None, False)


def test_all_images_of_another_folder_are_scored(inside: Path, evaluated: dict) -> None:
    """Also where a run would hold out a tenth."""
    for root, count in (
        ("named", len(list(Path("v2").glob("*/*.jpeg")))),
        (str(Path("data").absolute()), 300),
    ):
        main(["eval", "mine", f"--data.root={root}", "--data.num_workers=0", "--output=other.json"])
        assert json.loads(Path("other.json").read_text())["raw"]["images"] == count
    for weights in ("--ckpt_path", "--model.weights"):
        given = [
            "--config=logs/mine/config.yaml",
            f"{weights}=logs/mine/checkpoints/best.ckpt",
            "--output=bare.json",
        ]
        main(["eval", *given, "--data.root=named", "--data.num_workers=0"])
        assert json.loads(Path("bare.json").read_text())["raw"]["images"] == len(
            list(Path("named").glob("*/*.jpeg"))
        )


@pytest.mark.parametrize("own", [None, "the same", "another"])
def test_a_copy_of_a_runs_folder_is_scored_on_what_is_held_out(
    own: str | None, inside: Path, evaluated: dict
) -> None:
    """However it has grown and its names are composed; but not another folder with the same names."""
    copy, run = Path(f"copy {own}"), Path(f"logs/{own}")
    shutil.copytree("named", copy)
    shutil.copytree("logs/mine", run)
    first, second, *others = sorted(copy.glob("*/*.jpeg"))
    first = first.rename(first.with_name("e\u0301.jpeg"))
    held = [first.parent / "\u00e9.jpeg", second]
    (run / rundir.VALIDATION).write_text(
        "\n".join(["path", *(str(path.relative_to(copy)) for path in held)])
    )
    for path in (first, second) if own else ():  # in the run's own folder
        kept = Path("data", path.relative_to(copy))
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(path.read_bytes() if own == "the same" else b"another")
    main(["eval", str(run), f"--data.root={copy}", "--data.num_workers=0", "--output=held.json"])
    assert json.loads(Path("held.json").read_text())["raw"]["images"] == (
        2 + len(others) if own == "another" else 2
    )


def test_without_extras_loss_and_accuracy_are_scored(
    inside: Path,
    evaluated: dict,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plugins, "extras", dict)
    main(["eval", "mine", "--data.num_workers=0", "--output=core.json"])
    found = json.loads(Path("core.json").read_text())
    assert found["raw"].keys() == {*FIGURES, "acc1_macro"}
    for weights in ("raw", "ema"):
        for key in FIGURES[1:]:
            assert found[weights][key] == evaluated[weights][key]
    shown = capsys.readouterr().out
    assert re.search(rf" top-1 +│ +{found['raw']['acc1']:.2f} % ", shown)
    assert "by class: core.json" in shown
    main(["eval", "--help"])
    assert "--trust-config" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mine", "--model.fields.in_chans=1"], "the checkpoint is of another network"),
        (
            ["mine", "--data.img_size=8"],
            "img_size was 16, is 8; at a new size give its weights to --model.weights",
        ),
        (["mine", "--output=data"], "data is no regular file; name one"),
        (["ghost"], "there is no run logs/ghost"),
        (
            ["mine", "--nonsense=1"],
            "no setting nonsense; `cait eval --help=all` lists what there is",
        ),
        (
            ["--config=logs/mine/config.yaml"],
            "nothing to score: give --ckpt_path or --model.weights FILE",
        ),
    ],
)
def test_what_cannot_be_scored_is_told_in_one_line(
    arguments: list[str], words: str, inside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", *arguments])
    assert stop.value.code == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert len(told) == 1
    assert words in told[0]
