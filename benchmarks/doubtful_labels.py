"""How many labels that were flipped on purpose `cait crossval` finds, beside cleanlab on the same probabilities.

    pip install cleanlab
    python benchmarks/doubtful_labels.py DIR ... [--flip 0.05] [--seed 0] [--out FILE] -- [settings of fit]

A share of the labels of each class folder below DIR is changed to another class at random. cleanlab's rows need the
package; they are left out without it.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from report import REPO, show, stamp

from cait.data.source import open_source
from contrib.crossval import doubt

CLEANLAB = ("confident_learning", "prune_by_noise_rate")
"""Ways of cleanlab's `find_label_issues`; the second is its default."""


def flip(root: Path, share: float, seed: int, table: Path) -> set[str]:
    """Write the labels of a folder with a share of them changed; returns the paths of these images."""
    source = open_source(str(root))
    images = sorted([*source.train, *source.val])
    draw = random.Random(seed)
    flipped = set(draw.sample(range(len(images)), round(share * len(images))))
    changed, names = set(), source.class_names
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for index, (path, label) in enumerate(images):
            below = os.path.relpath(path, root)
            if index in flipped:
                label = draw.choice([other for other in range(len(names)) if other != label])
                changed.add(below)
            rows.writerow([below, names[label]])
    return changed


def cross_validate(root: Path, table: Path, scratch: Path, settings: Sequence[str]) -> Path:
    """The file of the probabilities."""
    given = [f"--data.root={root}", f"--data.labels={table}", "--baselines=false", *settings]
    command = [sys.executable, "-m", "cait", "crossval", root.name, *given]
    variables = os.environ | {"PYTHONPATH": str(REPO / "src")}
    subprocess.run(command, cwd=scratch, env=variables, check=True, stdout=sys.stderr)
    return scratch / "logs" / root.name / doubt.OUT_OF_FOLD


def rows(name: str, file: Path, changed: set[str]) -> Iterator[str]:
    """A row for each method: precision and recall of what it lists, in per cent."""
    found = np.load(file)
    paths, labels, probabilities = (found[key] for key in ("paths", "labels", "probabilities"))
    accuracy = 100 * (probabilities.argmax(axis=1) == labels).mean()
    listed = {"cait crossval": doubt.suspects(probabilities, labels)[0]}
    try:
        from cleanlab.filter import find_label_issues
    except ImportError:
        pass
    else:
        for way in CLEANLAB:
            issues = find_label_issues(labels, probabilities, filter_by=way, return_indices_ranked_by="self_confidence")
            listed[f"cleanlab, {way}"] = issues
    for method, indices in listed.items():
        right = len(changed & {paths[index] for index in indices})
        precision, recall = 100 * right / max(1, len(indices)), 100 * right / len(changed)
        counts = f"{len(paths):,} | {len(changed):,} | {len(indices):,}"
        yield f"| {name} | {accuracy:.1f} | {method} | {counts} | {precision:.1f} | {recall:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--flip", type=float, default=0.05, help="share of the labels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, settings = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    names = " ".join(folder.name for folder in given.folders)
    lines = [
        "# Labels that were flipped on purpose",
        "",
        f"`python benchmarks/doubtful_labels.py {names} --flip {given.flip:g} "
        f"--seed {given.seed} -- {' '.join(settings)}`, {stamp()}.",
        "",
        "Accuracy is that of the networks on the images that they have not trained on, against the flipped labels.",
        "",
        "| folder | accuracy | method | images | flipped | listed | precision | recall |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for folder in given.folders:
            table = Path(scratch, f"{folder.name}.csv")
            changed = flip(folder.absolute(), given.flip, given.seed, table)
            file = cross_validate(folder.absolute(), table, Path(scratch), settings)
            lines += rows(folder.name, file, changed)
    show(lines, given.out)


if __name__ == "__main__":
    main()
