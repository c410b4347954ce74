"""What a run's folder, its metrics.csv and its checkpoint hold; a start that fails leaves nothing."""

import csv
import os
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import DEVICES, REPO, SMALL, Cait
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision, TransformerEnginePrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from modules import loader, module, trainer

from cait import ckpt
from cait.cli import main
from cait.errors import UserError
from cait.guards.refusals import check_strategy
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint, DurableCheckpointIO, LastCheckpoint
from cait.run.loggers import RunCSVLogger, run_loggers
from cait.run.program import Program

WEIGHT = torch.ones(2)
CHECKPOINT: dict[str, Any] = {
    "pytorch-lightning_version": "2.6.6",
    "global_step": 3,
    "state_dict": {"model.head.bias": WEIGHT, "loss.weight": torch.zeros(1)},
    "callbacks": {"EMA": {"head.bias": 2 * WEIGHT}, "StepSeed": {}},
    "hyper_parameters": {"class_names": ["of the module"]},
}
STATE = {"class_names": ["cat", "dog"], "depends_on": {"seed": 0}}


def test_the_data_modules_part_is_found_by_what_it_holds() -> None:
    name = "test_run.<locals>.MyData"
    saved = CHECKPOINT | {name: STATE}
    assert ckpt.data_state(saved) is STATE
    assert ckpt.class_names(saved) == ["cat", "dog"]
    ckpt.rename_data_state(saved, "OtherData")
    assert saved == CHECKPOINT | {"OtherData": STATE}


def test_a_run_is_a_name_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere/second").mkdir(parents=True)
    (rundir.new_folder(Path("logs"), "first") / "config.yaml").touch()
    assert rundir.folder_of("first") == rundir.folder_of("logs/first") == Path("logs/first")
    assert rundir.run_argument(Path("logs/first")) == "first"
    assert rundir.run_argument(rundir.folder_of("elsewhere/second")) == "elsewhere/second"
    with pytest.raises(UserError, match="there is no run logs/third; runs: first"):
        rundir.folder_of("third")
    # a path beside a name in logs/, and one that a shell takes apart
    for name in (
        "first",
        "my runs/x y",
    ):
        Path(name).mkdir(parents=True)
        [word] = shlex.split(Program().command("eval", Path(name)))[2:]
        assert rundir.folder_of(word) == Path(name)
    assert rundir.folder_of("first") == Path("logs/first")
    monkeypatch.chdir("elsewhere/second")
    where = f"there are none in {tmp_path}/elsewhere/second/logs: change to the folder that has logs/, or give"
    with pytest.raises(UserError, match=where):  # as from notebooks/
        rundir.folder_of("first")
    assert rundir.folder_of(".") == tmp_path / "elsewhere/second"
    assert rundir.folder_of("..") == tmp_path / "elsewhere"


def test_the_last_checkpoints_come_first_and_then_the_newest(tmp_path: Path) -> None:
    for age, name in enumerate(("step.ckpt", "best.ckpt", "previous.ckpt", "last.ckpt")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (100 - age, 100 - age))
    names = [path.name for path in rundir.checkpoints(tmp_path)]
    assert names == ["last.ckpt", "previous.ckpt", "step.ckpt", "best.ckpt"]
    # a run whose checkpoints cannot be listed does not begin anew
    with pytest.raises(NotADirectoryError):
        rundir.checkpoints(tmp_path / "last.ckpt")


def test_the_best_of_a_script_follows_from_the_metric(tmp_path: Path) -> None:
    assert [BestCheckpoint(tmp_path, name).mode for name in ("val/acc1", "val/loss")] == [
        "max",
        "min",
    ]
    with pytest.raises(UserError, match="is the largest value best, or the smallest"):
        BestCheckpoint(tmp_path, "val/answer")


@pytest.mark.parametrize("file", ["whole", "damaged", "gone"])
def test_a_best_checkpoint_is_kept_as_long_as_its_file_is_whole(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = BestCheckpoint(tmp_path, "val/acc1")
    fit = trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    fit.fit(module(), loader(), loader(8))
    assert callback.best_model_score is not None
    state = callback.state_dict()
    path = tmp_path / "best.ckpt"
    if file == "damaged":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif file == "gone":
        path.unlink()
    again = BestCheckpoint(tmp_path, "val/acc1")
    again.load_state_dict(state)
    assert again.best_model_score == (callback.best_model_score if file == "whole" else None)
    assert ("best.ckpt is damaged" in caplog.text) == (file == "damaged")
    assert again.best_k_models.keys() == ({str(path)} if file == "whole" else set())


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ("nan 1 2", "max", 2.0),
        ("2 nan 1", "min", 1.0),
        ("1 inf 2", "max", 2.0),
        ("-inf 2 3", "min", 2.0),
        ("nan inf nan", "max", None),
    ],
)
def test_what_is_not_finite_is_never_the_best(
    values: str, mode: str, best: float | None, tmp_path: Path
) -> None:
    numbers = list(map(float, values.split()))
    logs = LambdaCallback(
        on_validation_epoch_end=lambda fit, net: net.log("val/x", numbers[fit.current_epoch])
    )
    fit = trainer(
        max_epochs=3,
        num_sanity_val_steps=0,
        limit_train_batches=1,
        callbacks=[logs, checkpoint := BestCheckpoint(tmp_path, "val/x", mode)],
        enable_checkpointing=True,
    )
    fit.fit(module(), loader(), loader(4))
    assert checkpoint.best_model_score == best
    assert (tmp_path / "best.ckpt").exists() is (best is not None)


def test_a_callback_knows_its_checkpoints_in_a_folder_that_was_moved(tmp_path: Path) -> None:
    def run(folder: Path, epochs: int, start: Path | None = None) -> list[ModelCheckpoint]:
        kept = ModelCheckpoint(folder, monitor="val/loss", save_top_k=2)
        best = BestCheckpoint(folder)
        fit = trainer(
            max_epochs=epochs,
            callbacks=[LastCheckpoint(folder), best, kept],
            plugins=[DurableCheckpointIO()],
            enable_checkpointing=True,
        )
        fit.fit(module(warmup_epochs=0), loader(), loader(8), ckpt_path=start)
        return [best, kept]

    moved = tmp_path / "moved"
    run(tmp_path / "run", 3)
    (tmp_path / "run").rename(moved)
    for callback in run(moved, 5, moved / "last.ckpt"):
        assert {Path(path).parent for path in callback.best_k_models} == {moved}
    assert len([*moved.glob("epoch=*")]) == 2  # the others are deleted
    assert not (tmp_path / "run").exists()
    # a new run, elsewhere, from that checkpoint has none of its files
    other = run(tmp_path / "other", 6, moved / "last.ckpt")
    assert {Path(path).parent for path in other[1].best_k_models} == {tmp_path / "other"}


WHOLE = "epoch,step,train/loss,val/acc1\r\n0,0,2.5,\r\n0,1,2.25,\r\n0,1,,12.5\r\n1,2,2.0,\r\n"


def steps(run: Path) -> list[int]:
    with (run / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("torn", ["", "1", "1,3,1.", "1,3,1.5"])
def test_rows_before_the_checkpoint_are_kept_even_of_a_torn_file(torn: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(WHOLE + torn, newline="")
    logger = RunCSVLogger(tmp_path, first_step=3)
    _ = logger.experiment
    # before anything new is logged
    assert (tmp_path / "metrics.csv").read_bytes().decode() == WHOLE
    logger.log_metrics({"epoch": 1, "train/loss": 1.5}, step=3)
    assert steps(tmp_path) == [0, 1, 1, 2, 3]
    logger.log_metrics({"epoch": 1, "val_ema/acc1": 50.0}, step=3)  # a new column
    assert steps(tmp_path) == [0, 1, 1, 2, 3, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    # by a spreadsheet
    (tmp_path / "metrics.csv").write_text("\ufeff" + WHOLE.replace(",", ";") + torn, newline="")
    _ = RunCSVLogger(tmp_path, first_step=3).experiment
    assert (tmp_path / "metrics.csv").read_bytes().decode() == WHOLE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no metrics of the steps before 3 are kept: "),
        (b"\xff\xfe\n", "no metrics of the steps before 3 are kept: "),
        (f"{WHOLE}a line,of something,else,and more\n".encode(), "1 lines are no rows"),
    ],
)
def test_a_resume_says_which_rows_are_lost(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.csv").write_bytes(content)
    _ = RunCSVLogger(tmp_path, first_step=3).experiment
    assert said in capsys.readouterr().err


def test_a_crash_in_rewriting_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_text(WHOLE, newline="")
    monkeypatch.delattr(csv, "writer")  # so that it fails where it writes
    with pytest.raises(AttributeError, match="writer"):
        _ = RunCSVLogger(tmp_path, first_step=3).experiment
    assert (tmp_path / "metrics.csv").read_bytes().decode() == WHOLE


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(WHOLE, newline="")
    RunCSVLogger(tmp_path).log_metrics({"epoch": 0, "train/loss": 2.0}, step=0)
    assert steps(tmp_path) == [0]


@pytest.mark.parametrize("version", ["v1", 0, ""])
@pytest.mark.parametrize("kind", [CSVLogger, type("Own", (CSVLogger,), {})])
def test_a_csv_logger_of_ones_own_goes_on_with_its_file(
    kind: type[CSVLogger], version: str | int, tmp_path: Path
) -> None:
    run_loggers(tmp_path / "run", first_step=2)
    for name in ("train/loss", "train/loss", "a, new one"):
        logger = kind(tmp_path, "mine", version)
        logger.log_metrics({name: 2.0}, step=7)
        logger.save()
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        columns = csv.DictReader(file)
        assert [row["train/loss"] for row in columns] == ["2.0", "2.0", ""]
        assert columns.fieldnames == ["a, new one", "step", "train/loss"]


def test_a_failed_start_leaves_nothing(
    tmp_path: Path,
    digits_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    small = [
        "--model.fields.embed_dim=32",
        "--model.fields.depth=1",
        "--trainer.max_steps=2",
        "--data.num_workers=0",
    ]
    fit = [
        "fit",
        f"--config={REPO / 'configs/digits.yaml'}",
        *DEVICES[:1],
        *small,
        f"--data.root={digits_root}",
    ]

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        assert stop.value.code == 2
        return capfd.readouterr().err.strip().splitlines()[-1]

    def files() -> list[Path]:
        return sorted(tmp_path.rglob("*"))

    assert "do not fill one batch of 100000" in refused(*fit, "--data.batch_size=100000")
    assert "nowhere.pth do not exist" in refused(
        *fit, "--run_name=b", "--model.weights=nowhere.pth"
    )
    assert "`val_check_interval` (99999) must be less" in refused(
        *fit, "--trainer.val_check_interval=99999"
    )
    assert files() == [tmp_path / "logs"]
    (tmp_path / "logs/a").mkdir()
    (tmp_path / "logs/a/notes.txt").touch()
    assert "class_names has 2 names" in refused(*fit, "--run_name=a", "--data.class_names=[a,b]")
    assert [path.name for path in (tmp_path / "logs/a").iterdir() if path.suffix] == ["notes.txt"]

    main([*fit, "--run_name=done"])
    assert (tmp_path / "logs/done" / rundir.FINISHED).exists()
    before = files()
    assert "seed was 0, is 5" in refused(
        "resume", "done", "--trainer.max_steps=3", "--seed_everything=5"
    )
    assert files() == before


OF_SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NAME": "train",
}


@pytest.mark.parametrize("left", ["exc/on_exception.ckpt", "logs/hpc_ckpt_1.ckpt"])
def test_a_new_run_starts_anew_whatever_files_lie_there(
    left: str, cait: Cait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error or a job of SLURM has left a checkpoint: Lightning alone would go on with it."""
    (tmp_path / left).parent.mkdir()
    (tmp_path / left).write_bytes(b"of another run")
    callback = "lightning.pytorch.callbacks.OnExceptionCheckpoint"
    words = [f"--trainer.callbacks={{class_path: {callback}, init_args: {{dirpath: exc}}}}"]
    if "hpc" in left:
        words = []
        for name, value in OF_SLURM.items():
            monkeypatch.setenv(name, value)
    done = cait("fit", *SMALL, "--trainer.fast_dev_run=true", *words)
    assert done.returncode == 0, done.stderr
    assert "estor" not in done.stdout + done.stderr


def test_a_precision_that_no_checkpoint_holds_is_refused() -> None:
    plugin = object.__new__(TransformerEnginePrecision)
    fit: Any = SimpleNamespace(
        strategy=SingleDeviceStrategy("cpu"),
        precision_plugin=plugin,
        precision="transformer-engine",
    )
    with pytest.raises(UserError, match=r"^--trainer.precision transformer-engine: a run cannot"):
        check_strategy(fit, SimpleNamespace(strategy="auto"))
    fit.precision_plugin = Precision()
    check_strategy(fit, SimpleNamespace(strategy="auto"))


def test_accumulation_is_set_once_or_refused_before_a_run_begins(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
    added = f"--trainer.callbacks={{class_path: {callback}, init_args: {{scheduling: {{1: 2}}}}}}"
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, added, "--trainer.accumulate_grad_batches=2", "--run_name=refused"])
    line = capfd.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert "GradientAccumulationScheduler: it takes" in line
    assert "cait resume" not in line
    assert not (here / "logs/refused").exists()


@pytest.mark.parametrize("how", ["moved", "replaced"])
@pytest.mark.parametrize(
    "hook",
    [
        "setup",
        "on_train_start",
        "on_train_batch_end",
        "on_validation_end",
        "on_train_end",
        "teardown",
    ],
)
def test_a_folder_that_has_gone_ends_the_run_and_is_not_made_again(
    hook: str, how: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["--model.fields.depth=1", "--trainer.limit_train_batches=2", "--data.num_workers=0"]
    small += ["--trainer.max_epochs=2", "--trainer.limit_val_batches=1"]
    small += [f"--run_name={hook}-{how}"]
    lost = ["--trainer.callbacks+=recorder.LosesFolder", f"--trainer.callbacks.hook={hook}"]
    run = here / "logs" / f"{hook}-{how}"
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, *small, *lost, f"--trainer.callbacks.how={how}"])
    said = capfd.readouterr()
    assert stop.value.code == 2, said.err
    assert f"the folder logs/{run.name} was moved or removed" in said.err.splitlines()[-1]
    assert "cait resume" not in said.out + said.err
    assert "cait eval" not in said.out
    assert "Traceback" not in said.err
    left = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    if how == "moved":
        assert not run.exists()
    else:
        assert left.keys() == {"checkpoints/last.ckpt", "metrics.csv", ".finished"}
        assert left["metrics.csv"].read_text() == "of another run"
        assert left["checkpoints/last.ckpt"].read_text() == "of another run"


@pytest.mark.parametrize(
    ("root", "folder"),
    [
        ("photos", "photos"),
        ("photos", "photos/train"),
        ("photos", "photos/train/7"),
        ("photos", "photos/val/7/inner"),
        ("photos/train", "photos"),
        ("photos/train", "."),
        ("photos/train", "photos/train/val"),
        ("photos/train", "photos/train/Train/deep"),
        ("link", "photos"),
        ("photos/train", "elsewhere"),
    ],
)
def test_a_new_run_lies_apart_from_images(
    root: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    digits_root: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its folder would hide a class, or be read as one."""
    place = tmp_path / "place"
    for split in ("train", "val"):
        for label in "78":
            (inner := place / "photos" / split / label).mkdir(parents=True)
            for path in sorted((digits_root / split / label).iterdir())[:3]:
                shutil.copy(path, inner)
    shutil.copytree(place / "photos/val", place / "elsewhere")
    (place / "link").symlink_to("photos")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["cait"])
    before = sorted(place.rglob("*"))
    run = (place / folder).resolve()
    data = [f"--data.root={root}", "--data.batch_size=2", "--data.val_fraction=0.3"]
    where = [f"--trainer.default_root_dir={os.path.relpath(run.parent)}", f"--run_name={run.name}"]
    for step in ("--print_plan", "--trainer.max_epochs=1"):
        with pytest.raises(SystemExit) as stop:
            main(["fit", *SMALL, *data, *where, step])
        assert stop.value.code == 2
        line = capfd.readouterr().err.splitlines()[-1]
        assert "is where images are, or would be read with them" in line
    assert sorted(place.rglob("*")) == before


def test_a_start_that_failed_may_be_repeated_where_it_has_drawn(
    here: Path, digits_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also below the images, where no class and no split would be."""
    for label in "78":
        shutil.copytree(digits_root / "val" / label, here / "set" / label)
    (run := here / "set/results/train").mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / ".lock").touch()
    shutil.copy(next((digits_root / "val/7").iterdir()), run)
    where = ["--trainer.default_root_dir=set/results", "--run_name=train", "--print_plan"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL, "--data.root=set", "--data.batch_size=2", *where])
    assert stop.value.code == 0
    assert "set/results/train" in capfd.readouterr().out
