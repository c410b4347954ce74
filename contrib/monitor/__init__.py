"""Measure every layer while a run trains: activations, gradients, LayerScale."""

from cait.plugins import Verb

VERBS = {
    "heat-maps": Verb(
        "contrib.monitor.heat_maps:heat_maps", "draw the layers of a run: cait heat-maps NAME"
    ),
}
FILE = "monitor.csv"
"""In the folder of a run; its columns are step, layer, part, name and value."""
