"""The figures of monitor.csv show what is in it."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from cait.errors import UserError
from contrib.monitor.heat_maps import MAPS, MODULES, draw, draw_map, heat_maps, read

PARTS = ("sa", "ffn", "ca", "ca_ffn")
STEPS = (2, 5, 8, 11, 14, 17)


def value(part: str, layer: int, step: int) -> float:
    return PARTS.index(part) + layer + step / 100


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three epochs of six steps: two self-attention blocks, then one of class attention."""
    layers = {"sa": (1, 2), "ffn": (1, 2), "ca": (3,), "ca_ffn": (3,)}
    lines = [
        f"{step},{layer},{part},{name},{value(part, layer, step)}"
        for step in STEPS
        for part in PARTS
        for layer in layers[part]
        for name in ("branch_ratio", "gamma_max", "grad_norm")
    ]
    (tmp_path / "monitor.csv").write_text("\n".join(["step,layer,part,name,value", *lines, ""]))
    epochs = [f"{step // 6},{step},2.5" for step in range(1, 18, 2)]
    (tmp_path / "metrics.csv").write_text("\n".join(["epoch,step,train/loss", *epochs, ""]))
    return tmp_path


def test_each_figure_with_a_map_is_drawn(run: Path) -> None:
    drawn = draw(run)
    # of γ's quantiles the median alone has a map
    assert list(drawn) == [
        "branch_ratio",
        "grad_norm",
    ]
    assert drawn.keys() <= MAPS.keys()
    heat_maps([str(run)], None)  # type: ignore[arg-type]
    assert {path.stem for path in (run / "heat_maps").iterdir()} == drawn.keys()


def test_the_heat_map_shows_the_rows_of_the_file(run: Path) -> None:
    figure = draw(run)["branch_ratio"]
    axes = {axes.get_title(): axes for axes in figure.axes}
    mesh = next(part for part in axes["feed-forward"].collections if isinstance(part, QuadMesh))
    expected = [[value("ffn", layer, step) for step in STEPS] for layer in (1, 2)]
    np.testing.assert_allclose(mesh.get_array().reshape(2, 6), expected)
    corners = mesh.get_coordinates()
    # of 6 steps an epoch
    np.testing.assert_allclose(corners[0, :, 0], [0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25])
    assert set(axes) >= {"self-attention", "feed-forward", "class attention", "its feed-forward"}


def test_another_networks_modules_are_the_layers(tmp_path: Path) -> None:
    lines = [
        "step,layer,part,name,value",
        "4,1,stem,grad_norm,0.5",
        "4,2,layer1.0,grad_norm,0",
        "9,1,stem,grad_norm,2",
    ]
    # torn by a kill
    (tmp_path / "monitor.csv").write_text("\n".join(lines) + "\n9,2,layer1.0,grad_n")
    tables = read(tmp_path)
    table = tables[MODULES, "grad_norm"]
    assert (table.layers, table.steps) == (["stem", "layer1.0"], [4, 9])
    np.testing.assert_equal(table.values, [[0.5, 2], [0, np.nan]])
    figure = draw_map(tables, "grad_norm", None)
    figure.savefig(tmp_path / "map.png")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["stem", "layer1.0"]


@pytest.mark.parametrize("number", ["0", "0.25"])
def test_a_single_step_and_equal_values_can_be_drawn(number: str, tmp_path: Path) -> None:
    names = ("grad_norm", "branch_ratio", "update_cosine")
    rows = [f"4,{layer},sa,{name},{number}" for layer in (1, 2) for name in names]
    (tmp_path / "monitor.csv").write_text("\n".join(["step,layer,part,name,value", *rows, ""]))
    tables = read(tmp_path)
    for name in names:
        draw_map(tables, name, None).savefig(tmp_path / "map.png")


def test_a_run_without_figures_is_told_why(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"monitor.csv is missing: only a run with the callback Monitor writes it"
    ):
        draw(tmp_path)
    # it may not have come so far
    for content in (
        b"",
        b"step,layer,part,name,value\n1,2,sa",
        b"\x00\xff\n",
    ):
        (tmp_path / "monitor.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"monitor.csv (holds no figures yet|is no text)"):
            draw(tmp_path)
