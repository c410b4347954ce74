"""The core stays small enough to read in one sitting: `LIMITS` of benchmarks/size.py, and the table of the extras."""

import re
from pathlib import Path

import size
from harness import SMALL, works

TRACE = """
import sys
from lightning.pytorch import Callback


class Trace(Callback):
    def __init__(self):
        self.files = set()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            sys.setprofile(lambda frame, event, argument: self.files.add(frame.f_code.co_filename))
        if batch_idx == 3:
            sys.setprofile(None)
            print(*sorted(self.files), sep="\\n")
"""
"""Prints the files whose code runs from the start of one step to the start of the next but one."""


def test_nothing_has_grown_beyond_its_limit():
    now = size.measured()
    assert now.keys() == size.LIMITS.keys()
    for name, limit in size.LIMITS.items():
        assert now[name] <= limit.reached, name
        assert limit.goal <= limit.reached, name


def test_a_line_that_holds_more_counts_more(tmp_path, monkeypatch):
    """As many nodes on fewer lines are denser, and what is no code is not counted."""
    monkeypatch.setattr(size, "REPO", tmp_path)
    plain = tmp_path / "plain.py"
    head = '"""Words."""\n\n# a reason\nx = 1\ny = 2\n\n\n'
    plain.write_text(
        head + 'def of_x(found):\n    """More."""\n    place = found\n    return place\n'
    )
    folded = tmp_path / "folded.py"
    folded.write_text("x = 1; y = 2\ndef of_x(found): place = found; return place\n")
    first, second = size.measure(plain), size.measure(folded)
    assert (first.nodes, first.lines) == (12, 5)  # 2 x 3, the function, 3 and 2
    assert (second.nodes, second.lines) == (12, 2)
    assert first.vague_names == second.vague_names == 2
    assert first.functions[0].density == 6 / 3


def test_the_walks_of_the_tour_link_to_files_that_are_there():
    walks = size.walks()
    assert list(walks) == ["a batch", "a step", "a checkpoint and its resume"]
    for files in walks.values():
        assert len(files) > 5
        assert {*files} <= {*size.core_sources()}


def test_the_walks_lead_through_all_that_a_step_runs(cait, tmp_path):
    """What runs besides is listed as what to pass by."""
    (tmp_path / "trace_step.py").write_text(TRACE)
    settings = "--trainer.max_steps=4 --data.num_workers=0 --ema.decay=0.9 --trainer.callbacks+=trace_step.Trace"
    done = works(cait("fit", *SMALL, *settings.split()))
    ran = {*map(Path, done.stdout.splitlines())} & {*size.core_sources()}
    walks = size.walks()
    assert len(ran & {*walks["a batch"], *walks["a step"]}) > 12
    links = re.findall(r"\]\((\.\./src/[^)#]+)", size.TOUR.read_text())
    linked = {(size.TOUR.parent / link).resolve() for link in links}
    assert ran - linked == set()


def test_the_table_of_the_extras_is_true():
    text = size.PAGE.read_text().split(size.BEGIN)[1].split(size.END)[0]
    rows = {}
    for line in text.strip().splitlines()[2:]:
        name, *cells = re.split(r"\s*(?<!\\)\|\s*", line)[1:-1]
        rows[re.match(r"\[(\w+)\]", name)[1]] = cells
    for extra in size.extras():  # a row of an extra that was removed may stay
        assert extra.name in rows, "benchmarks/size.py --write adds it"
        brings, *counts, packages = rows[extra.name]
        assert brings.replace("\\|", "|") == extra.brings
        assert packages == extra.packages, extra.name
        for count, now in zip(counts, (extra.lines, extra.tests), strict=True):
            written = int(count.replace(",", ""))
            assert abs(written - now) <= max(50, 0.2 * now), extra.name
