"""`cait plot`: what it draws is what the run logged."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import SMALL
from matplotlib.collections import QuadMesh
from PIL import Image

from cait.cli import main
from cait.errors import UserError
from cait.extras.monitor import measured
from cait.extras.visualize import figures
from cait.run import curves

HERE = ["--data.num_workers=0", "--trainer.devices=1"]  # the tests' own process could not start others
FULL = {
    *("curves", "depth", "branch_ratio", "activation_rms", "gamma_median", "grad_norm", "grad_cosine"),
    *("update_cosine", "update_ratio", "input_grad_norm"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """Two runs: "watched" of three epochs, and "short" within its first epoch and not watched."""
    place = tmp_path_factory.mktemp("plots")
    few = [f"--data.root={digits_root}", *HERE, "--trainer.limit_train_batches=6", "--trainer.log_every_n_steps=2"]
    watched = ["--trainer.max_epochs=3", "--monitor.every_n_steps=3", "--ema.decay=0.9", "--run_name=watched"]
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
    assert {Path(line).stem for line in named} == FULL
    for line in named:
        with Image.open(line) as picture:
            assert line == f"logs/watched/plots/{Path(line).stem}.png"
            assert min(picture.size) > 300
            assert picture.convert("L").getextrema()[0] < 100  # it is not white


def test_the_heat_map_shows_the_rows_of_the_file() -> None:
    folder = Path("logs/watched")
    with (folder / "monitor.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["part"], row["name"]) == ("ffn", "branch_ratio")]
    expected = {(int(row["layer"]), int(row["step"])): float(row["value"]) for row in rows}
    tables = measured.read(folder)
    figure = figures.draw_map(tables, "branch_ratio", curves.read(folder))
    drawn = {axes.get_title(): axes for axes in figure.axes}
    mesh = next(part for part in drawn["feed-forward"].collections if isinstance(part, QuadMesh))
    assert mesh.get_array().reshape(2, 6).tolist() == [
        [expected[layer, step] for step in (2, 5, 8, 11, 14, 17)] for layer in (1, 2)
    ]
    corners = mesh.get_coordinates()
    np.testing.assert_allclose(corners[0, :, 0], [0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25])  # of 6 steps an epoch
    assert set(drawn) >= {"self-attention", "feed-forward", "class attention", "its feed-forward"}


def test_the_curves_are_those_of_metrics_csv() -> None:
    read = curves.read(Path("logs/watched"))
    figure = figures.draw_curves({"watched": read})
    loss = next(axes for axes in figure.axes if axes.get_title() == "loss")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train", "val", "val_ema"]
    train, val, average = loss.get_lines()
    assert list(train.get_ydata()) == read["train/loss"][1]
    assert list(val.get_ydata()) == read["val/loss"][1]
    assert list(val.get_xdata()) == [1, 2, 3]  # epochs
    assert list(average.get_ydata()) == read["val_ema/loss"][1]


def test_a_run_that_was_not_watched_has_curves_and_a_hint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    capsys.readouterr()
    main(["plot", "short", f"--output={tmp_path / 'here'}"])
    hint, *named = capsys.readouterr().out.splitlines()
    assert hint == (
        "curves alone: logs/short/monitor.csv is missing: only a run with --monitor.every_n_steps N writes it"
    )
    assert len(named) == 1
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["curves.png"]
    figure = figures.draw_curves({"short": curves.read(Path("logs/short"))})
    assert {axes.get_xlabel() for axes in figure.axes if axes.get_visible()} == {"step"}  # no epoch is over


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,train/loss\n0,4,2.5\n0,9,1")  # of 1.75
    read = curves.read(tmp_path)
    assert read == {"epoch": ([4], [0]), "train/loss": ([4], [2.5])}
    (line,) = figures.draw_curves({"torn": read}).axes[0].get_lines()
    assert list(line.get_xdata()) == [4]  # steps count as in the file
    for content, words in [(b"epoch,step,train/loss\n0,4,\n", "holds no figures yet"), (b"\xff\n", "is no text")]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            curves.read(tmp_path)


def test_another_networks_modules_are_the_layers(tmp_path: Path) -> None:
    lines = ["step,layer,part,name,value", "4,1,stem,grad_norm,0.5", "4,2,layer1.0,grad_norm,0", "9,1,stem,grad_norm,2"]
    (tmp_path / "monitor.csv").write_text("\n".join(lines) + "\n9,2,layer1.0,grad_n")  # torn by a kill
    tables = measured.read(tmp_path)
    table = tables[measured.MODULES, "grad_norm"]
    assert (table.layers, table.steps) == (["stem", "layer1.0"], [4, 9])
    np.testing.assert_equal(table.values, [[0.5, 2], [0, np.nan]])
    figure = figures.draw_map(tables, "grad_norm", {})
    figure.savefig(tmp_path / "map.png")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["stem", "layer1.0"]
    figures.draw_depth(tables, {}).savefig(tmp_path / "depth.png")


@pytest.mark.parametrize("value", ["0", "0.25"])
def test_a_single_step_and_equal_values_can_be_drawn(value: str, tmp_path: Path) -> None:
    rows = [f"4,{layer},sa,{name},{value}" for layer in (1, 2) for name in ("grad_norm", "branch_ratio", "grad_cosine")]
    (tmp_path / "monitor.csv").write_text("\n".join(["step,layer,part,name,value", *rows, ""]))
    tables = measured.read(tmp_path)
    for name in ("grad_norm", "branch_ratio", "grad_cosine"):
        figures.draw_map(tables, name, {}).savefig(tmp_path / "map.png")
    figures.draw_depth(tables, {}).savefig(tmp_path / "depth.png")


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
        assert capsys.readouterr().out.startswith("curves alone: logs/empty/monitor.csv ")
    (place / "file").write_text("")
    assert "cannot write file/x/curves.png" in refused(capsys, "plot", "short", "--output=file/x")
