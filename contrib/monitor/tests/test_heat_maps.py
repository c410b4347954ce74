"""The figures of monitor.csv show what is in it."""

import numpy as np
from matplotlib.collections import QuadMesh

from contrib.monitor.heat_maps import draw, draw_map, read

OF_ANOTHER_NETWORK = """\
step,layer,part,name,value
4,1,stem,grad_norm,0.5
4,2,layer1.0,grad_norm,0.25
"""
OF_THREE_EPOCHS = """\
step,layer,part,name,value
2,1,ffn,branch_ratio,1.02
2,2,ffn,branch_ratio,2.02
2,2,ffn,grad_norm,1
2,2,ffn,gamma_max,1
5,1,ffn,branch_ratio,1.05
5,2,ffn,branch_ratio,2.05
8,1,ffn,branch_ratio,1.08
8,2,ffn,branch_ratio,2.08
17,1,ffn,branch_ratio,1.17
17,2,ffn,branch_ratio,2.17
17,1,sa,branch_ratio,1
17,3,ca,branch_ratio,1
17,3,ca_ffn,branch_ratio,1
"""
METRICS = "epoch,step,train/loss\n0,1,2.5\n0,5,2.5\n1,7,2.5\n1,11,2.5\n2,13,2.5\n2,17,2.5\n"
"""Six steps an epoch."""


def test_a_heat_map_shows_the_rows_of_the_file_by_epochs(tmp_path):
    (tmp_path / "monitor.csv").write_text(OF_THREE_EPOCHS)
    (tmp_path / "metrics.csv").write_text(METRICS)
    figures = draw(tmp_path)
    # of γ's quantiles the median alone has a map
    assert figures.keys() == {"branch_ratio", "grad_norm"}
    panels = {panel.get_title(): panel for panel in figures["branch_ratio"].axes}
    titles = {"self-attention", "feed-forward", "class attention", "its feed-forward"}
    assert panels.keys() >= titles
    (mesh,) = (shown for shown in panels["feed-forward"].collections if isinstance(shown, QuadMesh))
    shown = [[1.02, 1.05, 1.08, 1.17], [2.02, 2.05, 2.08, 2.17]]
    np.testing.assert_allclose(mesh.get_array(), shown)
    np.testing.assert_allclose(mesh.get_coordinates()[0, :, 0], [0.25, 0.75, 1.25, 2.25, 3.75])


def test_another_networks_modules_have_their_names(tmp_path):
    (tmp_path / "monitor.csv").write_text(OF_ANOTHER_NETWORK)
    figure = draw_map(read(tmp_path), "grad_norm", None)
    first, second = figure.axes[0].get_yticklabels()
    assert (first.get_text(), second.get_text()) == ("stem", "layer1.0")
