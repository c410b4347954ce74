"""`cait compare`: what it draws is what the runs logged. What it prints is in golden.yaml."""

import pytest
from harness import call
from PIL import Image

from cait.extras import curves
from cait.extras.visualize import compare

LONG = """\
epoch,step,train/loss,val/loss,val_ema/loss
0,1,2.5,,
0,5,,0.75,1.5
1,7,1.25,,
1,11,,0.5,1.0
"""
SHORT = "epoch,step,train/loss\n0,3,2.0\n0,4,1"
"""Its last row is being written: it may be of 1.75."""


@pytest.fixture
def logged(tmp_path):
    """The curves of two runs: "long" of two epochs, and "short" within its first epoch."""
    runs = {}
    for name, metrics in (("long", LONG), ("short", SHORT)):
        folder = tmp_path / "logs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(metrics)
        (folder / "config.yaml").write_text("model: {name: xxs24}\ndata: {root: x}\n")
        runs[name] = curves.read(folder)
    return runs


def test_the_picture_of_many_runs_has_a_name_that_a_disk_takes():
    names = [f"trial-{number:03d}" for number in range(30)]
    assert compare.picture(names) == "compare-trial-000-and-29-more.png"


def test_a_row_that_is_being_written_is_left_out(logged):
    assert logged["short"] == {"epoch": ([3], [0]), "train/loss": ([3], [2.0])}


def test_a_run_is_drawn_over_its_epochs(logged):
    figure = curves.draw({"long": logged["long"]})
    train, val, average = figure.axes[0].get_lines()
    assert [list(line.get_xdata()) for line in (train, val)] == [[2 / 6, 8 / 6], [1, 2]]
    assert [list(line.get_ydata()) for line in (train, val)] == [[2.5, 1.25], [0.75, 0.5]]
    assert list(average.get_ydata()) == [1.5, 1.0]
    assert {axes.get_xlabel() for axes in figure.axes} == {"epoch"}


def test_two_runs_are_told_apart_by_colors_and_their_splits_by_dashes(logged):
    figure = curves.draw(logged)
    # no epoch of the short run is over
    assert {axes.get_xlabel() for axes in figure.axes} == {"step"}
    styles = {
        line.get_label(): (line.get_color(), line.get_linestyle())
        for line in figure.axes[0].get_lines()
    }
    assert styles == {
        "long train": ("C0", "-"),
        "long val": ("C0", "--"),
        "long val_ema": ("C0", ":"),
        "short train": ("C1", "-"),
    }
    assert {*styles} == {text.get_text() for text in figure.legends[0].get_texts()}


@pytest.mark.usefixtures("logged")
def test_the_picture_has_the_format_of_its_name(tmp_path):
    assert call(tmp_path, "compare", "long").stdout == "logs/compare-long.png\n"
    with Image.open(tmp_path / "logs/compare-long.png") as picture:
        assert min(picture.size) > 300
        assert picture.convert("L").getextrema()[0] < 100  # it is not white
    call(tmp_path, "compare", "long", "short", "--output=a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
