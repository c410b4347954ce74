"""The study of depth: its grid against the paper's rows, its tables against numpy, and a small one to its end."""

import csv
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from harness import LIMIT, REPO, environment

from cait.cli import main
from cait.errors import UserError
from cait.model.config import variant_config
from cait.run.program import Program
from contrib.study import report
from contrib.study.grid import GRID, Grid
from contrib.study.results import Result, Table
from contrib.study.verb import StudyRuns

FULL = Grid(size="full")
TINY = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=1",
]


@pytest.fixture
def grid_file(tmp_path: Path) -> Path:
    """The grid with sizes of one and of two runs of 6 blocks."""
    content = yaml.safe_load(GRID.read_text())
    methods = {"one": ["layerscale"], "two": ["plain", "layerscale"]}
    content["sizes"] = {
        size: {"depths": [6], "seeds": 1, "methods": methods[size], "places": []}
        for size in methods
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_grid_is_whole() -> None:
    assert len({run.name for run in FULL.runs}) == len(FULL.runs) == 13 * 6 * 3 + 13 * 3
    for run in FULL.runs:
        fields = {
            name.removeprefix("model.fields."): value
            for name, value in (FULL.base | run.settings).items()
            if name.startswith("model.fields.")
        }
        network = variant_config("xxs24", img_size=16, num_classes=10, patch_size=4, **fields)
        assert network.depth == run.depth


def test_what_is_the_same_is_trained_once() -> None:
    originals = FULL.originals()
    assert originals["adapted-12-seed1"].name == "plain-12-seed1"  # the rate is not adapted yet
    assert originals["insert-0-seed2"].name == "plain-12-seed2"
    assert originals["adapted-48-seed1"].name == "adapted-48-seed1"
    assert originals["skipinit-24-seed0"].name == "skipinit-24-seed0"


def test_methods_and_places_are_those_of_the_paper() -> None:
    rows = pytest.importorskip("cait.extras.paper.rows").rows()
    seen = set()
    grid = Grid(size="full", data="data/imagenet")
    for run in grid.runs:
        if run.paper not in rows:
            continue
        row = rows[run.paper]
        ours, theirs = grid.base | run.settings, row.settings
        names = [name for name in theirs if name.startswith("model.") and name != "model.name"]
        assert {name: theirs[name] for name in names} == {name: ours.get(name) for name in names}, (
            run.name
        )
        assert row.top1 is not None
        seen.add(run.paper)
    assert len(seen) == 7 * 4 + 1 + 8 + 13  # Table 1 with its run of 48 blocks, Table A.1, Table 2


def results(accuracies: dict[tuple[str, int], list[float]]) -> list[Result]:
    empty = Result("", 0, 0, {}, acc1=0.0, best=0.0, loss=0.0, train_loss=0.0, failed=False)
    return [
        replace(empty, method=method, depth=depth, seed=seed, acc1=accuracy)
        for (method, depth), values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]


def test_means_and_spreads_are_numpys(tmp_path: Path) -> None:
    runs = {
        ("plain", 12): [61.0, 63.5, 60.2],
        ("plain", 24): [55.0, 51.0, 58.0],
        ("layerscale", 12): [70.0, 71.0, 69.0],
    }
    table = Table(results(runs))
    for (method, depth), values in runs.items():
        found = table.accuracy(method, depth)
        assert found == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    gains = np.subtract(runs["plain", 24], runs["plain", 12])
    assert table.gain("plain", 12, 24) == pytest.approx((gains.mean(), gains.std(ddof=1)))
    assert table.gain("layerscale", 12, 24) is None
    report.write_report(table.results, tmp_path / "study.md", "Depth")
    text = (tmp_path / "study.md").read_text()
    assert f"| plain | 61.57 ± {np.std(runs['plain', 12], ddof=1):.2f} | 54.67 ±" in text
    assert "†" not in text.split("† a run")[0]


def test_a_place_has_the_papers_figure_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("cait.extras.paper")
    (result,) = results({("insert-8", 12): [61.0]})
    place = replace(result, paper="table2/insert-8", is_place=True)
    report.write_report([place], tmp_path / "study.md", "Depth")
    assert "| insert-8 | 61.00 ± 0.00 | 80.0 |" in (tmp_path / "study.md").read_text()


def test_a_failed_run_is_marked(tmp_path: Path) -> None:
    good, bad = results({("plain", 12): [61.0], ("plain", 24): [math.nan]})
    report.write_report([good, replace(bad, failed=True)], tmp_path / "study.md", "Depth")
    assert "| plain | 61.00 ± 0.00 |  † |  |" in (tmp_path / "study.md").read_text()


@pytest.mark.slow
def test_a_small_study_to_its_end(
    grid_file: Path,
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/digits").symlink_to(digits_root)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    command = ["study", f"--grid={grid_file}", "--size=one", *TINY]
    main(command)
    shown = capfd.readouterr().out
    assert re.search(r"1 of 1  layerscale-6-seed0: \d+\.\d\d %", shown)
    assert shown.splitlines()[-1] == "logs/study/depth.png"
    with Path("logs/study/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["layerscale"]
    for row in rows:
        with Path(f"logs/study/{row['method']}-6-seed0/metrics.csv").open() as file:
            last = [line for line in csv.DictReader(file) if line["val/acc1"]][-1]
        assert float(row["acc1"]) == float(last["val/acc1"])
    assert not list(Path("logs/study").rglob("*.ckpt"))
    assert {path.suffix for path in Path("logs/study").glob("*.*")} == {".csv", ".md", ".png"}

    before = {path: path.stat().st_mtime_ns for path in Path("logs/study").glob("*-seed0/*")}
    main(command)
    assert "1 of 1 runs are done already" in capfd.readouterr().out
    assert {
        path: path.stat().st_mtime_ns for path in Path("logs/study").glob("*-seed0/*")
    } == before


def test_a_run_of_other_settings_or_of_none_is_refused(
    grid_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["study", f"--grid={grid_file}", "--size=two", "--jobs=1"]
    path = Path("logs/study/plain-6-seed0/result.json")
    path.parent.mkdir(parents=True)
    # interrupted, so it would be resumed
    unfinished = json.dumps({"settings": ["--model.lr=1"], "result": None})
    for content, words in [
        (unfinished, "was trained with other settings; remove logs/study"),
        ("{", "result.json is no JSON"),
        ('{"settings": 1}', "result.json: settings cannot be used"),
    ]:
        path.write_text(content)
        with pytest.raises(SystemExit):
            main(command)
        assert words in capfd.readouterr().err


def test_a_run_that_fails_is_told_and_one_that_is_stopped_has_no_result(
    grid_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with pytest.raises(SystemExit):
        main(
            [
                "study",
                f"--grid={grid_file}",
                "--size=two",
                "--out=other",
                "--jobs=1",
                "--model.lrr=1",
            ]
        )
    told = capfd.readouterr().err
    assert "cait: error: the run plain-6-seed0 failed: " in told
    assert "did you mean --model.lr?" in told
    assert "see other/plain-6-seed0/output.txt" in told
    runs = StudyRuns(Grid(grid_file, "two"), Path("stopped"), 1, Program())
    runs.stopped.set()
    assert runs.train(runs.grid.runs[0]) is None
    assert not runs.is_done(runs.grid.runs[0])


@pytest.mark.slow
def test_a_study_that_is_ended_goes_on_with_its_runs(
    grid_file: Path, tmp_path: Path, digits_root: Path
) -> None:
    settings = [
        f"--data={digits_root}",
        "--data.img_size=16",
        "--model.fields.patch_size=4",
        "--data.batch_size=64",
    ]
    settings += [
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=6",
        "--save_every_n_steps=2",
    ]
    settings += [
        "--model.fields.embed_dim=48",
        "--model.fields.num_heads=2",
        "--data.num_workers=0",
    ]
    settings += ["--trainer.accelerator=cpu", "--trainer.precision=32-true"]
    command = [
        sys.executable,
        "-m",
        "cait",
        "study",
        f"--grid={grid_file}",
        "--size=two",
        *settings,
    ]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    checkpoint = tmp_path / "logs/study/plain-6-seed0/checkpoints/last.ckpt"
    end = time.monotonic() + LIMIT
    while not checkpoint.exists():
        assert time.monotonic() < end
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert (
        "The runs have saved; the same command continues them" in job.communicate(timeout=LIMIT)[1]
    )
    assert job.returncode == 130
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert "Restored all states" in (checkpoint.parents[1] / "output.txt").read_text()
    with (tmp_path / "logs/study/results.csv").open() as file:
        assert all(float(row["acc1"]) > 0 for row in csv.DictReader(file))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depths": ["6"]}, r"sizes.one.depths\[0\] cannot be used: it is '6'"),
        ({"depths": []}, "the size one has no runs"),
    ],
)
def test_a_size_without_runs_or_with_words_for_numbers_is_refused(
    changes: dict, words: str, grid_file: Path
) -> None:
    content = yaml.safe_load(grid_file.read_text())
    content["sizes"]["one"] |= changes
    grid_file.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=words):
        Grid(grid_file, "one")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size=huge"], "has no size 'huge'; it has quick, places, full"),
        (["--grid=nowhere.yaml"], "cannot read the grid nowhere.yaml"),
        (["--jobs=0"], "--jobs must be at least 1"),
        (["images/"], "the folder of images is --data DIR"),
        (
            ["--seed_everything=3"],
            "--seed_everything cannot be given: each run has its own; leave it out",
        ),
        (
            ["--model.fields.depth=3", "--run_name=x"],
            "--model.fields.depth and --run_name cannot be given",
        ),
        ([f"--grid={REPO}/configs/digits.yaml"], "is not a grid of a study: KeyError 'digits'"),
    ],
)
def test_bad_input_is_told_in_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["study", *arguments])
    told = capfd.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not Path("logs").exists()


def test_a_folder_that_has_gone_is_not_made_again(grid_file: Path, tmp_path: Path) -> None:
    runs = StudyRuns(Grid(grid_file, "two"), tmp_path / "study", 1, Program())
    runs.folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="study"):
        runs.train(runs.grid.runs[0])
    assert not runs.folder.exists()
