"""What is certainly wrong is refused before torch is imported, in the line that the verb itself would print."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from harness import REPO, python

from cait.cli import main
from cait.extras import first_look

FIT = "fit --config digits.yaml"
ROWS = [
    "resume nowhere",
    "eval nowhere",
    "predict nowhere image.png",
    "export nowhere",
    "visualize nowhere",
    "fit --config nowhere.yaml",
    "fit --config open.yaml",
    "fit --config key.yaml",
    "fit --config group.yaml",
    "fit --config linked.yaml",
    "fit digits.yaml",
    "eval --config nowhere.yaml",
    "eval run --data.batchsize 3",
    "resume run --trainer.max_epoch 3",
    f"{FIT} --model.lrr 1",
    f"{FIT} --lr 1",
    f"{FIT} --trainer.max_epoch=3",
    f"{FIT} --run_name a/b",
    f"{FIT} --ckpt_path nowhere.ckpt",
    f"{FIT} --model.weights nowhere.pth",
    f"{FIT} --data.root nowhere",
    f"{FIT} --data.root digits.yaml",
    f"{FIT} --data.root torn",
    "fit --data.root nowhere",
    "fit",
]
"""Command lines that a user mistypes."""


@pytest.fixture
def desk(tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open.yaml").write_text("trainer:\n  max_epochs: [1\nmodel: {\n")
    (tmp_path / "key.yaml").write_text("trainer:\n  max_epoch: 3\n")
    (tmp_path / "group.yaml").write_text("trainr:\n  max_epochs: 3\n")
    (tmp_path / "linked.yaml").write_text("model:\n  num_classes: 7\n")
    (tmp_path / "torn/train/a").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/digits").symlink_to(digits_root)
    digits = (REPO / "configs/digits.yaml").read_text().replace("accelerator: auto", "accelerator: cpu")
    (tmp_path / "digits.yaml").write_text(digits)
    (tmp_path / "logs/run/checkpoints").mkdir(parents=True)
    (tmp_path / "logs/run/config.yaml").write_text("{model: {name: xxs24}, data: {root: data/digits}}\n")
    for name in ("last.ckpt", "best.ckpt"):
        with (tmp_path / "logs/run/checkpoints" / name).open("wb") as file:
            np.savez(file, empty=0)  # a whole zip file, which is all that is looked at before the configuration
    return tmp_path


def early_lines(folder: Path, rows: list[str]) -> list[str]:
    """What `cait` prints for each row in a process that has no torch."""
    code = (
        "import contextlib, sys\n"
        "sys.modules['torch'] = None\n"
        "from cait.cli import main\n"
        f"for words in {rows!r}:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words.split())\n"
        "    print('end', file=sys.stderr)"
    )
    done = python(code, folder)
    assert done.returncode == 0, done.stderr
    return done.stderr.split("end\n")[:-1]


def test_they_are_refused_without_torch(desk: Path) -> None:
    for row, line in zip(ROWS, early_lines(desk, ROWS), strict=True):
        assert line.startswith("cait: error: "), (row, line)
        assert line.count("\n") == 1, (row, line)


@pytest.mark.parametrize("row", [row for row in ROWS if "nowhere image" not in row])
def test_the_line_is_that_of_the_verb(
    row: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cait"])

    def line() -> str:
        with pytest.raises(SystemExit):
            main(row.split())
        return capfd.readouterr().err

    early = line()
    monkeypatch.setattr(first_look, "check_arguments", lambda *_: None)
    assert line() == early


@pytest.mark.parametrize(
    "words",
    [
        "--trainer.callbacks.monitor val/acc1",
        "--trainer.callbacks+=EarlyStopping",
        "--model.fields.anything 3",
        "--model.optimizer_args.momentum 0.9",
        "--trainer.logger.init_args.project x",
        "--paper table1/none",
        "--from digits",
        "--monitor.every_n_steps 3",
        "--data.order windowed",
        "--data.root my_data:Own",
        "--data.root torch/cifar10",
        "--data.root s3://bucket/folder",
        "--data.img_size=32",
        "--model.mean [0,0,0]",
        "--ckpt_path null",
        "--model.weights null",
        "--model.lr -1e-3",
        "--print_config",
        "--config={model:{lr:1}}",  # YAML itself
        "--trainer.logger.help WandbLogger",
    ],
)
def test_what_may_be_right_is_left_to_the_verb(words: str, desk: Path) -> None:
    from cait.extras.first_look.look import look
    from cait.run.program import Program

    look("fit", [*FIT.split()[1:], *words.split()], Program())


def test_classes_of_ones_own_may_have_further_settings(desk: Path) -> None:
    from cait.data.datamodule import ImageNetDataModule
    from cait.extras.first_look.look import look
    from cait.run.program import Program

    class Own(ImageNetDataModule):
        pass

    look("fit", [*FIT.split()[1:], "--data.further", "3", "--data.root", "nowhere"], Program(data=Own))
