"""`cait compare` and `cait plot`: what they show is what the runs logged."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import SMALL
from PIL import Image

from cait.cli import main
from cait.errors import UserError
from cait.extras import curves
from cait.extras.visualize import compare


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """Two runs: "long" of two epochs, and "short" within its first epoch."""
    place = tmp_path_factory.mktemp("plots")
    few = [f"--data.root={digits_root}", "--trainer.limit_train_batches=6", "--trainer.log_every_n_steps=2"]
    few += ["--data.num_workers=0", "--trainer.devices=1"]  # the tests' own process could not start others
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        for more in (
            ["--trainer.max_epochs=2", "--ema.decay=0.9", "--run_name=long"],
            ["--trainer.max_steps=4", "--run_name=short", "--model.lr=1e-4"],
        ):
            patch.setenv("CAIT_RUN", "")
            main(["fit", *SMALL, *few, *more])
    return place


@pytest.fixture(autouse=True)
def in_the_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_two_runs_that_were_trained_apart(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["compare", "long", "short"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "logs/compare-long-short.png"
    cells = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines)
    rows = {row[0]: row[1:] for row in cells if len(row) == 3}
    assert rows["setting"] == rows["metric"] == ["long", "short"]
    assert {name for name in rows if name.partition(".")[0] in ("model", "data", "trainer", "ema")} == {
        *("ema.decay", "model.lr", "trainer.max_epochs", "trainer.max_steps")
    }
    assert rows["model.lr"] == ["0.002", "0.0001"]
    assert rows["network"] == ["CaiT 2×32", "CaiT 2×32"]
    assert (rows["steps"], rows["epochs"]) == (["12", "4"], ["2", "≤ 1"])
    with Path("logs/long/metrics.csv").open() as file:
        scored = [row for row in csv.DictReader(file) if row["val/loss"]]
    best = min(scored, key=lambda row: float(row["val/loss"]))
    assert rows["val/loss, best (step)"][0] == f"{float(best['val/loss']):.4g} ({best['step']})"
    assert rows["val/acc1, last"][0] == f"{float(scored[-1]['val/acc1']):.4g}"
    assert rows["val_ema/acc1, last"][1] == "-"
    with Image.open("logs/compare-long-short.png") as picture:
        assert min(picture.size) > 300


def test_the_best_of_a_loss_is_its_smallest() -> None:
    curve = [4, 9, 14], [0.5, 0.25, 0.75]
    assert compare.reached(curve, "val/loss") == (0.25, 9)
    assert compare.reached(curve, "val/acc1") == (0.75, 14)


def test_settings_differ_by_value_and_not_by_where_the_run_lies() -> None:
    one = {"model.lr": 1, "data.scale": [0.7, 1.0], "model.ema": True, "own": None}
    other = {"model.lr": True, "data.scale": [0.7, 1.0], "model.ema": True}
    assert compare.differing([one, other]) == {"model.lr": ["1", "true"], "own": ["null", "-"]}
    settings = compare.settings(Path("logs/long"))
    assert settings["model.fields.depth"] == 2
    assert not settings.keys() & {"run_name", "trainer.default_root_dir"}


def test_runs_with_the_same_settings_and_brackets_in_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    twin = Path("logs/twin")
    twin.mkdir()
    for name in ("config.yaml", "metrics.csv"):
        shutil.copy(Path("logs/short", name), twin / name)
    main(["compare", "short", "twin", f"--output={tmp_path / 'a.pdf'}"])
    assert "The settings are the same." in capsys.readouterr().out
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    text = (twin / "config.yaml").read_text()
    (twin / "config.yaml").write_text(text.replace("  loss: cross_entropy", "  loss: '[red]x[/blue]'"))
    main(["compare", "short", "logs/twin", f"--output={tmp_path / 'a.pdf'}"])
    assert "[red]x[/blue]" in capsys.readouterr().out


def test_a_run_is_plotted_as_it_was_logged(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["plot", "long"])
    assert capsys.readouterr().out == "logs/long/curves.png\n"
    with Image.open("logs/long/curves.png") as picture:
        assert min(picture.size) > 300
        assert picture.convert("L").getextrema()[0] < 100  # it is not white
    logged = {name: curves.read(Path("logs", name)) for name in ("long", "short")}
    figure = curves.draw({"long": logged["long"]})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train", "val", "val_ema"]
    train, val, average = figure.axes[0].get_lines()
    assert list(train.get_ydata()) == logged["long"]["train/loss"][1]
    assert (list(val.get_xdata()), list(val.get_ydata())) == ([1, 2], logged["long"]["val/loss"][1])  # epochs
    assert list(average.get_ydata()) == logged["long"]["val_ema/loss"][1]
    short = curves.draw({"short": logged["short"]})
    assert {axes.get_xlabel() for axes in short.axes} == {"step"}  # no epoch is over

    both = curves.draw(logged)
    drawn = [(line.get_color(), line.get_linestyle()) for line in both.axes[0].get_lines()]
    assert drawn[:4] == [("C0", "-"), ("C0", "--"), ("C0", ":"), ("C1", "-")]
    keys = both.legends[0].get_lines()
    assert [key.get_label() for key in keys] == ["long", "short", "train", "val", "val_ema"]
    assert [key.get_color() for key in keys[:2]] == ["C0", "C1"]  # the colours say which run,
    assert [key.get_linestyle() for key in keys[2:]] == ["-", "--", ":"]  # the dashes which images


def test_a_curve_of_batches_is_smoothed_beside_its_points() -> None:
    values = [float(value) for value in np.random.default_rng(0).normal(size=60)]
    run = {"train/loss": ([*range(60)], values), "val/loss": ([29, 59], [1.0, 0.5]), "lr": ([*range(60)], values)}
    loss, rate = curves.draw({"a": run}).axes
    points, mean, val = loss.get_lines()
    assert list(points.get_ydata()) == values
    window = 7  # a tenth of the points, and odd
    expected = [np.mean(values[max(0, at - window // 2) : at + window // 2 + 1]) for at in range(60)]
    assert np.allclose(mean.get_ydata(), expected)
    assert list(val.get_ydata()) == [1.0, 0.5]
    assert list(rate.get_lines()[0].get_ydata()) == values  # a setting, and no measurement


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,train/loss\n0,4,2.5\n0,9,1")  # of 1.75
    assert curves.read(tmp_path) == {"epoch": ([4], [0]), "train/loss": ([4], [2.5])}
    for content, words in [
        (b"epoch,step,train/loss\n0,4,\n", "holds no figures yet"),
        (b"epoch,step,train/loss\n0,4,x\n", "line 2, is no row of numbers"),
        (b"\xff\n", "is no text"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            curves.read(tmp_path)


def test_what_cannot_be_compared_or_drawn_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for names in ([], ["short"], ["short", "logs/short"]):
        assert "compare two runs or more" in refused(capsys, "compare", *names)
    assert "there is no run logs/shrt; did you mean short" in refused(capsys, "compare", "long", "shrt")
    bare = Path("logs/bare")
    bare.mkdir()
    assert "logs/bare/config.yaml is missing" in refused(capsys, "compare", "short", "bare")
    shutil.copy("logs/short/config.yaml", bare / "config.yaml")
    assert "logs/bare/metrics.csv is missing" in refused(capsys, "compare", "short", "bare")
    assert "logs/bare/metrics.csv is missing: the run has logged nothing yet" in refused(capsys, "plot", "bare")
    assert "a figure's file ends with one of" in refused(capsys, "compare", "long", "short", "--output=a.xyz")
    assert "which run?" in refused(capsys, "plot")
