"""The command line as a user meets it: whole runs, in processes of their own."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import SMALL, Cait, checkpoint, environment, python, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cait import cores
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.train.module import CaiTModule

THREE = ["--trainer.accelerator=cpu", "--trainer.devices=3"]


def steps_and_rates(run: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["lr"])) for row in rows(run) if row["lr"]]


def test_a_run_leaves_everything_in_its_folder(cait: Cait, tmp_path: Path) -> None:
    arguments = ["--run_name=first", "--trainer.max_epochs=2", "--model.lr=1e-3", "--ema.decay=0.9"]
    done = cait("fit", *SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "logs" / "first"
    for name in ("config.yaml", "metrics.csv", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (run / name).is_file(), name
    names = {"train/loss", "train/acc1", "train/grad_norm", "lr", "epoch", "step"}
    names |= {
        f"{part}/{figure}" for part in ("val", "val_ema") for figure in ("loss", "acc1", "acc5")
    }
    assert set(rows(run)[0]) == names
    assert {"train/loss", "val/acc1", "lr"} <= set(
        EventAccumulator(str(run)).Reload().Tags()["scalars"]
    )

    assert "Warning" not in done.stderr
    # as packages in C++ say of what the garbage collector has not taken at the end
    assert "leaked" not in done.stderr

    # The rate that was asked for, at every logged step: 22 steps an epoch, 3 epochs of warm-up in a run of 2.
    for step, rate in steps_and_rates(run):
        assert rate == pytest.approx(1e-6 + (1e-3 - 1e-6) * step / 43, rel=1e-5)

    again = cait("fit", *SMALL, "--run_name=first")
    assert again.returncode == 2
    assert again.stderr.strip().endswith(
        "go on with `cait resume first` or give another --run_name"
    )

    scored = cait("eval", "first")
    assert scored.returncode == 0, scored.stderr
    best, raw = max(
        (
            (float(row["val_ema/acc1"]), float(row["val/acc1"]))
            for row in rows(run)
            if row["val_ema/acc1"]
        ),
        key=lambda scores: scores[0],
    )
    (kept,) = (
        state["other_score"]
        for state in checkpoint(run)["callbacks"].values()
        if "other_score" in state
    )
    assert kept == pytest.approx(raw, rel=1e-6)
    shown = next(line for line in scored.stdout.splitlines() if "top-1" in line).split("│")
    assert float(shown[3].removesuffix(" % ")) == pytest.approx(best, abs=0.01)
    assert len(shown) == 5  # the average too


def test_an_error_within_an_error_leaves_no_worker_behind(cait: Cait) -> None:
    done = cait("fit", *SMALL, "--trainer.callbacks+=recorder.FailsTwice")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cait: error: cannot use the disk: No space left on device (")
    assert "/recorder.py:" in last


@pytest.mark.slow
def test_two_processes_count_every_picture_once(
    cait: Cait, tmp_path: Path, mixed_root: Path
) -> None:
    folder = [f"--data.root={mixed_root}", "--data.eval_batch_size=2"]
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
    record = ["--trainer.callbacks+=recorder.Recorder", "--trainer.callbacks.folder=seen"]
    brief = ["--data.batch_size=4", "--trainer.max_epochs=3", "--run_name=ddp"]
    done = cait("fit", *SMALL, *folder, *two, *brief, *record)
    assert done.returncode == 0, done.stderr
    seen = [
        json.loads(line)
        for r in (0, 1)
        for line in (tmp_path / f"seen/val-{r}.jsonl").read_text().splitlines()
    ]
    counts = Counter(picture for batch in seen for picture in batch)
    assert len(counts) == 15
    assert set(counts.values()) == {3}  # once an epoch
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["ddp"]
    with_two = [row for row in rows(tmp_path / "logs/ddp") if row["val/acc1"]][-1]
    scored = cait(
        "eval", "ddp", "--ckpt_path=logs/ddp/checkpoints/last.ckpt", "--trainer.devices=1"
    )
    assert scored.returncode == 0, scored.stderr
    found = json.loads((tmp_path / "logs/ddp/evaluation.json").read_text())["raw"]
    for name in ("acc1", "loss"):  # 15 pictures: 8 for one process, 7 for the other
        assert found[name] == pytest.approx(float(with_two[f"val/{name}"]), rel=1e-4)


@pytest.mark.parametrize(
    ("batch_size", "accumulated", "mixup", "share"),
    [
        (32, 1, 0.8, 8),
        (64, 2, 0.8, 8),
        (16, 4, 0.0, 1),
        (16, 4, 0.8, None),
        (30, 1, 0.0, None),
        (2, 1, 0.0, None),
    ],
)
def test_a_global_batch_is_shared_out_over_four_processes(
    batch_size: int, accumulated: int, mixup: float, share: int | None, digits_root: Path
) -> None:
    data = ImageNetDataModule(
        str(digits_root), batch_size=batch_size, global_batch=True, mixup=mixup, cutmix=0
    )
    trainer: Any = SimpleNamespace(world_size=4, accumulate_grad_batches=accumulated, callbacks=[])
    if share is None:
        with pytest.raises(
            UserError, match=f"batch_size {batch_size} cannot be shared out over {4 * accumulated}"
        ):
            data.share_batch(trainer)
        return
    for _ in range(2):  # nothing is shared out twice
        data.share_batch(trainer)
        assert data.batch_size == data.eval_batch_size == share
    # to score
    assert (
        ImageNetDataModule(str(digits_root), batch_size=4096, global_batch=True).eval_batch_size
        == 128
    )


def test_another_networks_checkpoint_is_refused_and_the_run_stays_as_it_is(
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    here = [f"--data.root={digits_root}", "--data.num_workers=0", "--trainer.devices=1"]
    here += ["--trainer.limit_val_batches=1"]
    main(["fit", *SMALL, *here, "--trainer.max_steps=1", "--run_name=small"])
    before = Path("logs/small/config.yaml").read_bytes()
    other = ["--model.fields.depth=3", "--trainer.max_steps=2"]
    new = ["fit", *SMALL, *here, "--ckpt_path=logs/small/checkpoints/last.ckpt", "--run_name=other"]
    for words in (["resume", "small"], new):
        with pytest.raises(SystemExit) as stop:
            main([*words, *other])
        assert stop.value.code == 2
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert told.startswith("cait: error: the checkpoint is of another network")
    assert Path("logs/small/config.yaml").read_bytes() == before
    fork = [*new[:-1], "--run_name=fork", "--trainer.max_steps=2"]
    main(fork)
    with pytest.raises(SystemExit):
        main(fork)
    assert "logs/fork holds a run: go on with `" in capsys.readouterr().err
    main(["resume", "fork", "--trainer.max_steps=3"])
    assert checkpoint(Path("logs/fork"))["global_step"] == 3
    Path("logs/fork").rename("logs/my fork")
    with pytest.raises(SystemExit):
        main(["resume", "my fork"])
    assert "rename the folder logs/my fork: a run's name has letters" in capsys.readouterr().err


def test_a_fast_dev_run_writes_nothing(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    here = ["--data.num_workers=0", "--trainer.devices=1"]  # this process could not start others
    main(["fit", *SMALL, f"--data.root={digits_root}", *here, "--trainer.fast_dev_run=1"])
    assert not [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]


def test_help_is_quick_and_lists_the_verbs() -> None:
    # In a process that cannot import torch, so that it cannot become slow.
    done = python(
        "import sys; sys.modules['torch'] = None; from cait.cli import main; main(['--help'])"
    )
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in ("fit", "resume", "eval", "predict"))


def test_the_help_of_a_verb_has_the_text_below_a_setting(cait: Cait) -> None:
    done = cait("fit", "--help")
    assert "Halve an image as it is read" in " ".join(done.stdout.split())


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
@pytest.mark.parametrize("wrapped", [False, True])  # as Lightning and rich do
def test_interrupted_or_cut_off(
    error: type[BaseException],
    status: int,
    wrapped: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cut(*_: object, **__: object) -> None:
        try:
            raise error
        except error:
            if wrapped:
                sys.exit(1)
            raise

    monkeypatch.setattr("cait.cli.lightning.CaiTCLI", cut)
    monkeypatch.setattr(cores, "discard", lambda _: None)  # it would close pytest's own output
    with pytest.raises(SystemExit) as stop:
        main(["fit", *SMALL])
    assert stop.value.code == status
    # wrapped, the run has said what to type next
    is_told = error is KeyboardInterrupt and not wrapped
    assert ("cait: interrupted" in capsys.readouterr().err.splitlines()) == is_told


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        ("cait --help | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("cait --version > /dev/full", 2, "cannot use the disk: No space left on device"),
        ("cait --help >&-", 0, ""),
        (
            "mkdir a; cd a; rmdir ../a; cait fit",
            2,
            "the working directory has been removed; change into another",
        ),
    ],
)
def test_what_a_shell_hands_over_may_be_closed_or_full(
    command: str, status: int, told: str, tmp_path: Path
) -> None:
    script = f'cait() {{ "{sys.executable}" -m cait "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (status, f"cait: error: {told}\n" if told else "")


def test_a_run_that_lies_elsewhere(
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    steps = [f"--data.root={digits_root}", "--trainer.log_every_n_steps=1", "--data.num_workers=0"]
    steps += ["--trainer.limit_val_batches=1", "--trainer.limit_train_batches=2"]
    steps += ["--trainer.callbacks=LearningRateMonitor"]  # one alone, not a list
    steps += ["--trainer.devices=1"]  # this process could not start others
    monkeypatch.setenv("COLUMNS", "300")
    elsewhere = tmp_path / "elsewhere"
    for name in ("digits", "digits-2"):
        main(
            [
                "fit",
                *SMALL,
                *steps,
                "--trainer.max_epochs=1",
                f"--trainer.default_root_dir={elsewhere}",
            ]
        )
        assert (elsewhere / name / "config.yaml").is_file()
    # Moved and renamed, it goes on where it lies; with --ckpt_path, from that checkpoint.
    moved = (elsewhere / "digits").rename(tmp_path / "moved")
    (moved / "checkpoints/last.ckpt").rename(tmp_path / "kept.ckpt")
    (moved / "checkpoints/last.ckpt").write_text("torn")
    main(["resume", "moved", "--ckpt_path=kept.ckpt", "--trainer.max_epochs=2"])
    assert [int(row["step"]) for row in rows(moved) if not row["lr-AdamW/pg1"]] == [
        0,
        1,
        1,
        2,
        3,
        3,
    ]
    assert checkpoint(moved)["global_step"] == 4
    best = next(state for key, state in checkpoint(moved)["callbacks"].items() if "val/acc1" in key)
    assert best["best_model_path"] == str(moved / "checkpoints/best.ckpt")
    assert best["best_model_score"] == max(
        float(row["val/acc1"]) for row in rows(moved) if row["val/acc1"]
    )
    main(["eval", str(moved)])
    assert "top-1" in capsys.readouterr().out
    assert not (tmp_path / "logs").exists()
    # In Python the checkpoint is enough.
    module = CaiTModule.load_from_checkpoint(moved / "checkpoints/last.ckpt", map_location="cpu")
    for key, value in checkpoint(moved)["state_dict"].items():
        assert torch.equal(module.state_dict()[key], value), key
