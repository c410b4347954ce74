"""`cait compare`: what it shows is what the runs logged."""

import csv
import shutil
from pathlib import Path

import pytest
from harness import SMALL, call, ended
from PIL import Image

from cait.cli import main
from cait.errors import UserError
from cait.extras import curves
from cait.extras.visualize import compare


@pytest.fixture(scope="module")
def runs(place: Path) -> None:
    """Two runs: "long" of two epochs, and "short" within its first epoch."""
    few = [*SMALL, "--trainer.limit_train_batches=6", "--trainer.log_every_n_steps=2"]
    # the tests' own process could not start others
    few += [
        "--data.num_workers=0",
        "--trainer.devices=1",
    ]
    ended(place, "long", [*few, "--trainer.max_epochs=2", "--ema.decay=0.9"])
    ended(place, "short", [*few, "--trainer.max_steps=4", "--model.lr=1e-4"])


pytestmark = pytest.mark.usefixtures("runs", "here")


def test_the_picture_of_many_runs_has_a_name_that_a_disk_takes() -> None:
    assert compare.picture(["long", "short"]) == "compare-long-short.png"
    assert (
        compare.picture([f"trial-{number:03d}" for number in range(30)])
        == "compare-trial-000-and-29-more.png"
    )


def test_two_runs_that_were_trained_apart(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["compare", "long", "short"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "logs/compare-long-short.png"
    cells = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines)
    rows = {row[0]: row[1:] for row in cells if len(row) == 3}
    assert rows["setting"] == rows["metric"] == ["long", "short"]
    assert {
        name for name in rows if name.partition(".")[0] in ("model", "data", "trainer", "ema")
    } == {*("ema.decay", "model.lr", "trainer.max_epochs", "trainer.max_steps")}
    assert rows["model.lr"] == ["0.002", "0.0001"]
    assert rows["steps"] == ["12", "4"]
    with Path("logs/long/metrics.csv").open() as file:
        scored = [row for row in csv.DictReader(file) if row["val/loss"]]
    best = min(scored, key=lambda row: float(row["val/loss"]))
    assert rows["val/loss, best (step)"][0] == f"{float(best['val/loss']):.4g} ({best['step']})"
    assert rows["val/acc1, last"][0] == f"{float(scored[-1]['val/acc1']):.4g}"
    assert rows["val_ema/acc1, last"][1] == "-"
    with Image.open("logs/compare-long-short.png") as picture:
        assert min(picture.size) > 300


def test_the_best_of_a_loss_is_its_smallest_and_settings_differ_by_value() -> None:
    curve = [4, 9, 14], [0.5, 0.25, 0.75]
    assert compare.best(curve, "val/loss") == "0.25 (9)"
    assert compare.best(curve, "val/rmse") == "0.25 (9)"
    assert compare.best(curve, "val/acc1") == "0.75 (14)"
    assert compare.best(curve, "val/hamming") == "-"
    one = {"model.lr": 1, "data.scale": [0.7, 1.0], "model.ema": True, "own": None}
    other = {"model.lr": True, "data.scale": [0.7, 1.0], "model.ema": True}
    assert compare.differing([one, other]) == {"model.lr": ["1", "true"], "own": ["null", "-"]}


def test_runs_with_the_same_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    twin = Path("logs/twin")
    twin.mkdir()
    for name in ("config.yaml", "metrics.csv"):
        shutil.copy(Path("logs/short", name), twin / name)
    main(["compare", "short", "twin", f"--output={tmp_path / 'a.pdf'}"])
    assert "The settings are the same." in capsys.readouterr().out
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_a_run_is_plotted_as_it_was_logged(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["compare", "long"])
    assert capsys.readouterr().out == "logs/compare-long.png\n"
    with Image.open("logs/compare-long.png") as picture:
        assert picture.convert("L").getextrema()[0] < 100  # it is not white
    logged = {name: curves.read(Path("logs", name)) for name in ("long", "short")}
    figure = curves.draw({"long": logged["long"]})
    train, val, average = figure.axes[0].get_lines()
    assert list(train.get_ydata()) == logged["long"]["train/loss"][1]
    # epochs
    assert (list(val.get_xdata()), list(val.get_ydata())) == (
        [1, 2],
        logged["long"]["val/loss"][1],
    )
    assert list(average.get_ydata()) == logged["long"]["val_ema/loss"][1]
    both = curves.draw(logged)
    # no epoch of the short run is over
    assert {axes.get_xlabel() for axes in both.axes} == {"step"}
    names = ["long train", "long val", "long val_ema", "short train"]
    assert {*names} <= {text.get_text() for text in both.legends[0].get_texts()}
    drawn = [
        (line.get_label(), line.get_color(), line.get_linestyle())
        for line in both.axes[0].get_lines()
    ]
    assert drawn[:4] == [*zip(names, ("C0", "C0", "C0", "C1"), ("-", "--", ":", "-"), strict=True)]


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,train/loss\n0,4,2.5\n0,9,1")  # of 1.75
    assert curves.read(tmp_path) == {"epoch": ([4], [0]), "train/loss": ([4], [2.5])}
    for content, words in [
        (b"epoch,step,train/loss\n0,4,\n", "holds no figures yet"),
        (b"epoch,step,train/loss\n0,4,x\n", "line 2, is no row of numbers"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            curves.read(tmp_path)


def test_what_cannot_be_compared_or_drawn_is_told_in_one_line(here: Path) -> None:
    bare = Path("logs/bare")
    bare.mkdir()
    shutil.copy("logs/short/config.yaml", bare / "config.yaml")
    for arguments, words in [
        (["compare", "long", "shrt"], "there is no run logs/shrt; did you mean short"),
        (["compare", "bare"], "logs/bare/metrics.csv is missing: the run has logged nothing yet"),
        (
            ["compare", "long", "short", "--output=a.xyz"],
            "a figure's file ends with .png, .pdf or .svg",
        ),
    ]:
        done = call(here, *arguments)
        assert done.returncode == 2
        assert words in done.stderr.splitlines()[-1]
