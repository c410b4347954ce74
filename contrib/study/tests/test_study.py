"""The study of depth: its grid against the paper's rows, its tables against numpy, and a small one to its end."""

import math
import signal

import numpy as np
import pytest
import yaml
from harness import LIMIT, parsed, rows, start
from runs import wait_for_steps

from cait.errors import UserError
from cait.model.config import variant_config
from cait.run.program import Program
from contrib.study import report
from contrib.study.grid import GRID, Grid
from contrib.study.results import Result
from contrib.study.verb import StudyRuns

# runs of twelve steps, on a folder
SHORT = """
    --data=data/digits --data.img_size=16 --data.batch_size=64 --data.num_workers=0
    --model.fields.patch_size=4 --model.fields.embed_dim=48 --model.fields.num_heads=2
    --trainer.accelerator=cpu --trainer.precision=32-true --trainer.max_epochs=2
    --trainer.limit_train_batches=6 --trainer.limit_val_batches=1 --trainer.log_every_n_steps=1
    --save_every_n_steps=2
"""


@pytest.fixture
def grid_file(tmp_path):
    """The grid with a size of two runs of 6 blocks."""
    content = parsed(GRID)
    two = {"depths": [6], "seeds": 1, "methods": ["plain", "layerscale"], "places": []}
    content["sizes"] = {"two": two}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_grid_is_whole():
    grid = Grid(size="full")
    assert len(grid.runs) == len({run.name for run in grid.runs}) == 13 * 6 * 3 + 13 * 3
    for run in grid.runs:
        fields = {"patch_size": 4}
        for name, value in (grid.base | run.settings).items():
            if name.startswith("model.fields."):
                fields[name.removeprefix("model.fields.")] = value
        network = variant_config("xxs24", img_size=16, num_classes=10, **fields)
        assert network.depth == run.depth


def test_methods_and_places_are_those_of_the_paper():
    paper = pytest.importorskip("cait.extras.paper.rows").rows()
    grid = Grid(size="full", data="data/imagenet")
    compared = set()
    for run in grid.runs:
        if run.paper in paper:
            compared.add(run.paper)
            ours = grid.base | run.settings
            row = paper[run.paper]
            assert row.top1 is not None
            for name, value in row.settings.items():
                if name.startswith("model.") and name != "model.name":
                    assert ours[name] == value, run.name
    # Table 1 with its run of 48 blocks, Table A.1, Table 2
    assert len(compared) == 7 * 4 + 1 + 8 + 13


def result(method, depth, accuracy, seed=0):
    scores = dict(acc1=accuracy, best=0.0, loss=0.0, train_loss=0.0, failed=math.isnan(accuracy))
    return Result(method=method, depth=depth, seed=seed, settings={}, **scores)


def test_means_and_spreads_are_numpys_and_a_failed_run_is_marked(tmp_path):
    plain = np.array([[61.0, 63.5, 60.2], [55.0, 51.0, 58.0]])
    results = [result("layerscale", 12, 70.0), result("layerscale", 24, math.nan)]
    for seed in range(3):
        results += [
            result("plain", 12, plain[0, seed], seed),
            result("plain", 24, plain[1, seed], seed),
        ]
    report.write_report(results, tmp_path / "study.md", "Depth")
    lines = (tmp_path / "study.md").read_text().splitlines()
    first, last, gain = (
        f"{values.mean():+.2f} ± {values.std(ddof=1):.2f}"
        for values in (*plain, plain[1] - plain[0])
    )
    assert f"| plain | {first[1:]} | {last[1:]} | {gain} |" in lines
    assert "| layerscale | 70.00 ± 0.00 |  † |  |" in lines


def test_a_run_that_fails_is_told_and_one_that_is_stopped_has_no_result(grid_file, tmp_path):
    script = tmp_path / "other.py"  # in the place of `cait`
    script.write_text("import sys; print('cait: error: no such luck'); sys.exit(2)")
    runs = StudyRuns(Grid(grid_file, "two"), tmp_path / "study", 1, Program(script=str(script)))
    run = runs.grid.runs[0]
    with pytest.raises(UserError, match=r"plain-6-seed0 failed: no such luck; .*/output\.txt"):
        runs.train(run)
    runs.stopped.set()
    assert runs.train(run) is None
    assert not runs.is_done(run)


def test_a_folder_that_has_gone_is_not_made_again(grid_file, tmp_path):
    runs = StudyRuns(Grid(grid_file, "two"), tmp_path / "study", 1, Program())
    runs.folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="study"):
        runs.train(runs.grid.runs[0])
    assert not runs.folder.exists()


@pytest.mark.slow
def test_a_study_that_is_ended_goes_on_to_its_end(grid_file, cait, tmp_path):
    command = ["study", "--grid=grid.yaml", "--size=two", *SHORT.split()]
    folder = tmp_path / "logs/study"
    job = start(tmp_path, *command)
    wait_for_steps(folder / "plain-6-seed0", 3, job)
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 130, output
    assert "The runs have saved; the same command continues them" in output

    done = cait(*command)
    assert "Restored all states" in (folder / "plain-6-seed0/output.txt").read_text()
    assert done.stdout.splitlines()[-1] == "logs/study/depth.png", done.stderr
    results = {row["method"]: row["acc1"] for row in parsed(folder / "results.csv")}
    assert [*results] == ["plain", "layerscale"]
    for method, accuracy in results.items():
        logged = [row["val/acc1"] for row in rows(folder / f"{method}-6-seed0") if row["val/acc1"]]
        assert float(accuracy) == float(logged[-1])
    assert not list(folder.rglob("*.ckpt"))
    assert {path.suffix for path in folder.glob("*.*")} == {".csv", ".md", ".png"}

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}
    assert "2 of 2 runs are done already" in cait(*command).stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before
