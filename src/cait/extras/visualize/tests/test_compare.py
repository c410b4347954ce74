"""`cait compare`: the settings and the metrics in which runs differ."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from PIL import Image
from test_plot import in_the_place, place, refused  # noqa: F401  # the first two are fixtures

from cait.cli import main
from cait.extras import curves
from cait.extras.visualize import compare


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_two_runs_that_were_trained_apart(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["compare", "watched", "short"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "logs/compare-watched-short.png"
    rows = {row[0]: row[1:] for row in map(cells, lines) if len(row) == 3}
    assert rows["setting"] == rows["metric"] == ["watched", "short"]
    assert {name for name in rows if name.partition(".")[0] in ("model", "data", "trainer", "ema")} == {
        *("ema.decay", "model.label_smoothing", "model.lr"),
        *("trainer.max_epochs", "trainer.max_steps"),
    }
    assert rows["model.lr"] == ["0.002", "0.0001"]
    assert rows["ema.decay"] == ["0.9", "null"]
    assert rows["network"] == ["CaiT 2×32", "CaiT 2×32"]
    assert rows["steps"] == ["18", "4"]
    assert rows["epochs"] == ["3", "≤ 1"]
    with Path("logs/watched/metrics.csv").open() as file:
        scored = [row for row in csv.DictReader(file) if row["val/loss"]]
    best = min(scored, key=lambda row: float(row["val/loss"]))
    assert rows["val/loss, best (step)"][0] == f"{float(best['val/loss']):.4g} ({best['step']})"
    assert rows["val/acc1, last"][0] == f"{float(scored[-1]['val/acc1']):.4g}"
    assert rows["val_ema/acc1, last"][1] == "-"
    with Image.open("logs/compare-watched-short.png") as picture:
        assert min(picture.size) > 300


def test_the_best_of_a_loss_is_its_smallest() -> None:
    curve = [4, 9, 14], [0.5, 0.25, 0.75]
    assert compare.reached(curve, "val/loss") == (0.25, 0.75, 9)
    assert compare.reached(curve, "val/acc1") == (0.75, 0.75, 14)


def test_settings_differ_by_value_and_not_by_where_the_run_lies() -> None:
    one = {"model.lr": 1, "data.scale": [0.7, 1.0], "model.ema": True, "own": None}
    other = {"model.lr": True, "data.scale": [0.7, 1.0], "model.ema": True}
    assert compare.differing([one, other]) == {"model.lr": ["1", "true"], "own": ["null", "-"]}
    settings = compare.settings(Path("logs/watched"))
    assert settings["model.fields.depth"] == 2
    assert "run_name" not in settings
    assert "trainer.default_root_dir" not in settings


def test_curves_of_two_runs_have_a_colour_each() -> None:
    runs = {name: curves.read(Path("logs") / name) for name in ("watched", "short")}
    figure = curves.draw(runs)
    loss = next(axes for axes in figure.axes if axes.get_title() == "loss")
    drawn = [(line.get_color(), line.get_linestyle()) for line in loss.get_lines()]
    assert drawn[:4] == [("C0", "-"), ("C0", "--"), ("C0", ":"), ("C1", "-")]
    assert list(loss.get_lines()[3].get_ydata()) == runs["short"]["train/loss"][1]
    keys = figure.legends[0].get_lines()
    assert [key.get_label() for key in keys] == ["watched", "short", "train", "val", "val_ema"]
    assert [key.get_color() for key in keys[:2]] == ["C0", "C1"]  # the colours say which run,
    assert [key.get_linestyle() for key in keys[2:]] == ["-", "--", ":"]  # the dashes which images


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


def test_what_cannot_be_compared_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for names in ([], ["short"], ["short", "logs/short"]):
        assert "compare two runs or more" in refused(capsys, "compare", *names)
    assert "there is no run logs/shrt; did you mean short" in refused(capsys, "compare", "watched", "shrt")
    bare = Path("logs/bare")
    bare.mkdir()
    assert "logs/bare/config.yaml is missing" in refused(capsys, "compare", "short", "bare")
    for content in (b"a: [", b"- 1", b"\xff"):
        (bare / "config.yaml").write_bytes(content)
        assert "logs/bare/config.yaml is not " in refused(capsys, "compare", "short", "bare")
    shutil.copy("logs/short/config.yaml", bare / "config.yaml")
    assert "logs/bare/metrics.csv is missing" in refused(capsys, "compare", "short", "bare")
    (bare / "metrics.csv").write_text("epoch,step,train/loss\n0,")
    assert "logs/bare/metrics.csv holds no figures yet" in refused(capsys, "compare", "short", "bare")
    assert "a figure's file ends with one of" in refused(capsys, "compare", "watched", "short", "--output=a.xyz")
