"""`cait plot`: what it draws is what the run logged."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from harness import SMALL
from PIL import Image

from cait import plugins
from cait.cli import main
from cait.errors import UserError
from cait.extras import curves

HERE = ["--data.num_workers=0", "--trainer.devices=1"]  # the tests' own process could not start others
MEASURES = "monitor" in plugins.extras()
MAPS = {
    *("branch_ratio", "activation_rms", "gamma_median", "grad_norm", "update_cosine", "update_ratio"),
    "input_grad_norm",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """Two runs: "watched" of three epochs, and "short" within its first epoch and not watched."""
    place = tmp_path_factory.mktemp("plots")
    few = [f"--data.root={digits_root}", *HERE, "--trainer.limit_train_batches=6", "--trainer.log_every_n_steps=2"]
    watched = ["--trainer.max_epochs=3", "--ema.decay=0.9", "--run_name=watched"]
    if MEASURES:
        watched += ["--trainer.callbacks+=contrib.monitor.callback.Monitor", "--trainer.callbacks.every_n_steps=3"]
    short = ["--trainer.max_steps=4", "--run_name=short", "--model.lr=1e-4", "--model.label_smoothing=0.2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        for more in (watched, short):
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


def test_a_watched_run_has_its_curves_and_heat_maps(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["plot", "watched"])
    named = capsys.readouterr().out.splitlines()
    assert {Path(line).stem for line in named} == {"curves", *(MAPS if MEASURES else ())}
    for line in named:
        with Image.open(line) as picture:
            assert line == f"logs/watched/plots/{Path(line).stem}.png"
            assert min(picture.size) > 300
            assert picture.convert("L").getextrema()[0] < 100  # it is not white


def test_the_curves_are_those_of_metrics_csv() -> None:
    read = curves.read(Path("logs/watched"))
    figure = curves.draw({"watched": read})
    loss = next(axes for axes in figure.axes if axes.get_title() == "loss")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train", "val", "val_ema"]
    train, val, average = loss.get_lines()
    assert list(train.get_ydata()) == read["train/loss"][1]
    assert list(val.get_ydata()) == read["val/loss"][1]
    assert list(val.get_xdata()) == [1, 2, 3]  # epochs
    assert list(average.get_ydata()) == read["val_ema/loss"][1]


def test_a_curve_of_batches_is_smoothed_beside_its_points() -> None:
    values = [float(value) for value in np.random.default_rng(0).normal(size=60)]
    run = {"train/loss": ([*range(60)], values), "val/loss": ([29, 59], [1.0, 0.5]), "lr": ([*range(60)], values)}
    figure = curves.draw({"a": run})
    loss, rate = figure.axes
    points, mean, val = loss.get_lines()
    assert list(points.get_ydata()) == values
    assert points.get_linestyle() == "None"
    window = 7  # a tenth of the points, and odd
    expected = [np.mean(values[max(0, at - window // 2) : at + window // 2 + 1]) for at in range(60)]
    assert np.allclose(mean.get_ydata(), expected)
    assert list(val.get_ydata()) == [1.0, 0.5]
    assert list(rate.get_lines()[0].get_ydata()) == values  # a setting, and no measurement
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train, smoothed", "val"]
    (panel,) = curves.draw({"a": run}, ["lr"]).axes
    assert panel.get_title() == "learning rate"


def test_a_run_that_was_not_watched_has_curves_and_a_hint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    capsys.readouterr()
    main(["plot", "short", f"--output={tmp_path / 'here'}"])
    *hints, _ = capsys.readouterr().out.splitlines()
    hint = "curves alone: logs/short/monitor.csv is missing: only a run with the callback Monitor writes it"
    assert hints == [hint] * MEASURES
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["curves.png"]
    figure = curves.draw({"short": curves.read(Path("logs/short"))})
    assert {axes.get_xlabel() for axes in figure.axes if axes.get_visible()} == {"step"}  # no epoch is over


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,train/loss\n0,4,2.5\n0,9,1")  # of 1.75
    read = curves.read(tmp_path)
    assert read == {"epoch": ([4], [0]), "train/loss": ([4], [2.5])}
    (line,) = curves.draw({"torn": read}).axes[0].get_lines()
    assert list(line.get_xdata()) == [4]  # steps count as in the file
    for content, words in [(b"epoch,step,train/loss\n0,4,\n", "holds no figures yet"), (b"\xff\n", "is no text")]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            curves.read(tmp_path)


def test_what_cannot_be_drawn_is_told_in_one_line(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert "there is no run logs/watch; did you mean watched" in refused(capsys, "plot", "watch")
    assert "which run?" in refused(capsys, "plot")
    empty = place / "logs/empty"
    empty.mkdir()
    assert "logs/empty/metrics.csv is missing: the run has logged nothing yet" in refused(capsys, "plot", "empty")
    (empty / "metrics.csv").write_bytes((place / "logs/short/metrics.csv").read_bytes())
    for content in (b"", b"step,layer,part,name,value\n1,2,sa", b"\x00\xff\n"):  # it may not have come so far
        (empty / "monitor.csv").write_bytes(content)
        capsys.readouterr()
        main(["plot", "empty"])
        assert capsys.readouterr().out.startswith("curves alone: logs/empty/monitor.csv " if MEASURES else "logs/empty")
    (place / "file").write_text("")
    assert "cannot use file/x: Not a directory" in refused(capsys, "plot", "short", "--output=file/x")
