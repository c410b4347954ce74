"""`cait compare`: what it draws is what the runs logged. What it prints is in golden.yaml."""

import pytest

from cait.extras import curves, plots

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
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(metrics)
        runs[name] = curves.read(tmp_path / name)
    return runs


def test_a_row_that_is_being_written_is_left_out(logged):
    assert logged["short"] == {"epoch": ([3], [0]), "train/loss": ([3], [2.0])}


def test_a_run_is_drawn_over_its_epochs(logged):
    figure = curves.draw({"long": logged["long"]})
    points = [line.get_xydata().tolist() for line in figure.axes[0].get_lines()]
    train = [[2 / 6, 2.5], [8 / 6, 1.25]]
    val = [[1, 0.75], [2, 0.5]]
    average = [[1, 1.5], [2, 1.0]]
    assert points == [train, val, average]
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


def test_the_picture_has_the_format_of_its_name(logged, tmp_path):
    for name, start in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")):
        plots.write(curves.draw(logged), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
