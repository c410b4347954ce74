"""The core stays small enough to read in one sitting: `LIMITS` of benchmarks/size.py, and the table of the extras."""

import re
from pathlib import Path

import pytest
import size
from harness import SMALL, Cait

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


def test_nothing_has_grown_beyond_its_limit() -> None:
    now = size.measured()
    assert now.keys() == size.LIMITS.keys()
    for name, limit in size.LIMITS.items():
        assert now[name] <= limit.reached, name
        assert limit.goal <= limit.reached, name


def test_a_line_that_holds_more_counts_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_walks_of_the_tour_link_to_files_that_are_there() -> None:
    walks = size.walks()
    assert list(walks) == ["a batch", "a step", "a checkpoint and its resume"]
    for files in walks.values():
        assert len(files) > 5
        for path in files:
            assert path.is_file(), path
            assert size.EXTRAS not in path.parents, path


def test_the_walks_lead_through_all_that_a_step_runs(cait: Cait, tmp_path: Path) -> None:
    """What runs besides is listed as what to pass by."""
    (tmp_path / "trace_step.py").write_text(TRACE)
    settings = "--trainer.max_steps=4 --data.num_workers=0 --ema.decay=0.9 --trainer.callbacks+=trace_step.Trace"
    done = cait("fit", *SMALL, *settings.split())
    assert done.returncode == 0, done.stderr
    ran = {path for path in map(Path, done.stdout.splitlines()) if size.SOURCE in path.parents}
    ran = {path for path in ran if size.EXTRAS not in path.parents}
    files = size.walks()
    assert len(ran & {*files["a batch"], *files["a step"]}) > 12
    linked = {
        (size.TOUR.parent / link).resolve()
        for link in re.findall(r"\]\((\.\./src/[^)#]+)", size.TOUR.read_text())
    }
    assert ran <= linked, sorted(str(path) for path in ran - linked)


def test_the_table_of_the_extras_is_true() -> None:
    text = size.PAGE.read_text().split(size.BEGIN)[1].split(size.END)[0]
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.strip().splitlines()[2:]
    ]
    rows = {re.match(r"\[(\w+)\]", row[0])[1]: row for row in cells}
    for extra in size.extras():  # a row of an extra that was removed may stay
        assert extra.name in rows, "benchmarks/size.py --write adds it"
        _, brings, lines, tests, packages = rows[extra.name]
        assert brings.replace("\\|", "|") == extra.brings
        assert packages == extra.packages, extra.name
        for said, now in ((lines, extra.lines), (tests, extra.tests)):
            assert abs(int(said.replace(",", "")) - now) <= max(50, 0.2 * now), (
                f"{extra.name}: {said}, now {now}"
            )
