"""Draw what LayerScale does to 48 blocks, for docs/cait.md, from the runs of `make study`:

    python docs/depth.py logs/study docs/depth.png

Left the gradient that reaches each block, right what the branches add to the tokens: medians over the last fifth of the
measured steps of the study's first seed.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METHODS = {"plain": "plain", "layerscale": "LayerScale"}
PANELS = {
    "gradient at the input of a block, ‖∂loss/∂x‖": ("input_grad_norm", "block"),
    "what attention adds, ‖f(x)‖ / ‖x‖": ("branch_ratio", "sa"),
}


def by_layer(file: Path, name: str, part: str) -> list[float]:
    """The median of a figure for each layer."""
    with file.open() as rows:
        kept = [row for row in csv.DictReader(rows) if (row["name"], row["part"]) == (name, part)]
    late = 0.8 * max(int(row["step"]) for row in kept)
    values = defaultdict(list)
    for row in kept:
        if int(row["step"]) >= late:
            values[int(row["layer"])].append(float(row["value"]))
    return [median(values[layer]) for layer in sorted(values)]


def main() -> None:
    study, picture = Path(sys.argv[1]), sys.argv[2]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for panel, (title, (name, part)) in zip(panels, PANELS.items(), strict=True):
        for method, label in METHODS.items():
            values = by_layer(study / f"{method}-48-seed0" / "monitor.csv", name, part)
            panel.plot(range(1, len(values) + 1), values, label=label)
        panel.set(title=title, xlabel="block", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
