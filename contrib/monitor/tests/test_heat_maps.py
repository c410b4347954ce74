"""The figures of monitor.csv show what is in it."""

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from contrib.monitor.heat_maps import MODULES, draw, draw_map, heat_maps, read

HEADER = "step,layer,part,name,value"
STEPS = (2, 5, 8, 11, 14, 17)


def write(folder, *lines):
    (folder / "monitor.csv").write_text("\n".join([HEADER, *lines, ""]))
    return folder


@pytest.fixture
def run(tmp_path):
    """A run of three epochs of six steps: two self-attention blocks, then one of class attention."""
    lines = []
    for step in STEPS:
        for layer, part in ((1, "sa"), (1, "ffn"), (2, "sa"), (2, "ffn"), (3, "ca"), (3, "ca_ffn")):
            for name in ("branch_ratio", "gamma_max", "grad_norm"):
                lines.append(f"{step},{layer},{part},{name},{layer + step / 100}")
    epochs = [f"{step // 6},{step},2.5" for step in range(1, 18, 2)]
    (tmp_path / "metrics.csv").write_text("\n".join(["epoch,step,train/loss", *epochs, ""]))
    return write(tmp_path, *lines)


def test_each_figure_with_a_map_is_drawn(run):
    heat_maps([str(run)], None)  # type: ignore[arg-type]
    drawn = {path.stem for path in (run / "heat_maps").iterdir()}
    assert drawn == {"branch_ratio", "grad_norm"}  # of γ's quantiles the median alone has a map


def test_the_heat_map_shows_the_rows_of_the_file(run):
    panels = {panel.get_title(): panel for panel in draw(run)["branch_ratio"].axes}
    titles = {"self-attention", "feed-forward", "class attention", "its feed-forward"}
    assert panels.keys() >= titles
    (mesh,) = (shown for shown in panels["feed-forward"].collections if isinstance(shown, QuadMesh))
    expected = [[layer + step / 100 for step in STEPS] for layer in (1, 2)]
    np.testing.assert_allclose(mesh.get_array().reshape(2, 6), expected)
    epochs = mesh.get_coordinates()[0, :, 0]  # of 6 steps
    np.testing.assert_allclose(epochs, [0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25])


def test_another_networks_modules_are_the_layers(tmp_path):
    write(tmp_path, "4,1,stem,grad_norm,0.5", "4,2,layer1.0,grad_norm,0", "9,1,stem,grad_norm,2")
    with (tmp_path / "monitor.csv").open("a") as file:
        file.write("9,2,layer1.0,grad_n")  # torn by a kill
    tables = read(tmp_path)
    table = tables[MODULES, "grad_norm"]
    assert (table.layers, table.steps) == (["stem", "layer1.0"], [4, 9])
    np.testing.assert_equal(table.values, [[0.5, 2], [0, np.nan]])
    figure = draw_map(tables, "grad_norm", None)
    figure.savefig(tmp_path / "map.png")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == table.layers


@pytest.mark.parametrize("number", ["0", "0.25"])
@pytest.mark.parametrize("name", ["grad_norm", "branch_ratio", "update_cosine"])
def test_a_single_step_and_equal_values_can_be_drawn(name, number, tmp_path):
    write(tmp_path, f"4,1,sa,{name},{number}", f"4,2,sa,{name},{number}")
    draw_map(read(tmp_path), name, None).savefig(tmp_path / "map.png")
