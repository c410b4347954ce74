"""The command line as a user meets it: whole runs, in processes of their own."""

import contextlib
import errno
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import REPO, SMALL, Cait, Forked, checkpoint, environment, python, rows, slow, start
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from runs import wait_for_steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.train.module import CaiTModule

THREE = ["--trainer.accelerator=cpu", "--trainer.devices=3"]


def steps_and_rates(run: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["lr"])) for row in rows(run) if row["lr"]]


@pytest.mark.parametrize("command", [(), *slow(((sys.executable,),))], ids=["forked", "started"])
def test_a_run_leaves_everything_in_its_folder(command: tuple[str, ...], cait: Cait, tmp_path: Path) -> None:
    arguments = ["--run_name=first", "--trainer.max_epochs=2", "--model.lr=1e-3", "--ema.decay=0.9"]
    done = cait("fit", *SMALL, *arguments, command=command)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "logs" / "first"
    for name in ("config.yaml", "metrics.csv", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (run / name).is_file(), name
    names = {"train/loss", "train/acc1", "train/grad_norm", "lr", "epoch", "step"}
    names |= {f"{part}/{figure}" for part in ("val", "val_ema") for figure in ("loss", "acc1", "acc5")}
    assert set(rows(run)[0]) == names
    events = EventAccumulator(str(run)).Reload()
    assert {"train/loss", "val/acc1", "lr"} <= set(events.Tags()["scalars"])

    # What is said: a line an epoch with loss, accuracy and rate, then the checkpoints and what to type next.
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2
    assert all(word in lines[1] for word in ("epoch 2/2", "loss", "lr", "val/acc1"))
    for words in ("logs/first/checkpoints/best.ckpt", "make eval RUN=first", "make resume RUN=first"):
        assert words in done.stdout
    assert "Warning" not in done.stderr
    assert "leaked" not in done.stderr  # as packages in C++ say of what the garbage collector has not taken at the end

    # The rate that was asked for, at every logged step: 22 steps an epoch, 3 epochs of warm-up in a run of 2.
    for step, rate in steps_and_rates(run):
        assert rate == pytest.approx(1e-6 + (1e-3 - 1e-6) * step / 43, rel=1e-5)

    again = cait("fit", *SMALL, "--run_name=first")
    assert again.returncode == 2
    assert again.stderr.strip().endswith("go on with `make resume RUN=first` or give another --run_name")

    scored = cait("eval", "first")
    assert scored.returncode == 0, scored.stderr
    best = max(float(row["val/acc1"]) for row in rows(run) if row["val/acc1"])
    shown = next(line for line in scored.stdout.splitlines() if "top-1" in line).split("│")
    assert float(shown[2].removesuffix(" % ")) == pytest.approx(best, abs=0.01)
    assert len(shown) == 5  # the average too


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_never_killed(cait: Cait, tmp_path: Path) -> None:
    recipe = [*SMALL, "--trainer.max_epochs=3", "--model.drop_path_rate=0.2", "--ema.decay=0.9", "--data.repeats=2"]
    whole = cait("fit", *recipe, "--run_name=whole")
    assert whole.returncode == 0, whole.stderr

    cut = start(tmp_path, "fit", *recipe, "--run_name=cut")
    wait_for_steps(tmp_path / "logs/cut", 6, cut)  # of 4 logged an epoch, and a row of validation
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    resumed = cait("resume", "cut")
    assert resumed.returncode == 0, resumed.stderr
    assert "epoch 1/3" not in resumed.stdout
    assert "last.ckpt" not in (tmp_path / "logs/cut/config.yaml").read_text()

    expected, got = checkpoint(tmp_path / "logs/whole"), checkpoint(tmp_path / "logs/cut")
    for key, value in expected["state_dict"].items():
        assert torch.equal(value, got["state_dict"][key]), key
    for key, value in expected["callbacks"]["EMA"].items():
        assert torch.equal(value, got["callbacks"]["EMA"][key]), key
    assert rows(tmp_path / "logs/cut") == rows(tmp_path / "logs/whole")
    events = EventAccumulator(str(tmp_path / "logs/cut")).Reload().Scalars("train/loss")
    steps = [event.step for event in events]
    assert steps == sorted(set(steps)) == [int(row["step"]) for row in rows(tmp_path / "logs/whole") if row["lr"]]

    # A finished run says so; with more epochs it goes on, the cosine over the new length.
    assert "nothing to do" in cait("resume", "cut").stdout
    longer = cait("resume", "cut", "--trainer.max_epochs=4")
    assert longer.returncode == 0, longer.stderr
    assert checkpoint(tmp_path / "logs/cut")["global_step"] == 4 * 20
    assert "max_epochs: 4" in (tmp_path / "logs/cut/config.yaml").read_text()
    warmup, total = 3 * 20, 4 * 20  # repeats cut an epoch of 1,437 pictures to 1,280, 20 batches
    for step, rate in steps_and_rates(tmp_path / "logs/cut"):
        if step >= 3 * 20:
            cosine = (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
            assert rate == pytest.approx(1e-5 + (2e-3 - 1e-5) * cosine, rel=1e-5)


def test_the_bar_shows_loss_and_accuracy_on_a_terminal(tmp_path: Path, digits_root: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = [*SMALL, f"--data.root={digits_root}", "--trainer.max_epochs=2", "--data.num_workers=0"]
    brief = ["--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1"]
    run = Forked(
        [sys.executable, "-m", "cait", "fit", *arguments, *brief],
        cwd=tmp_path,
        env=environment() | {"TERM": "xterm", "COLUMNS": "80"},
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end, for a terminal
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert run.wait() == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = re.split(r"[\r\n]+", text)
    assert max(len(line) for line in lines if line.startswith(("epoch", "Validation"))) <= 80
    figures = r"loss: \d\.\d{3}  acc1: \d+\.\d%  (lr: \d\.\de[+-]\d\d  )?val/acc1: \d+\.\d\d%"
    bars = [line for line in lines if line.startswith("epoch 2/2") and "4/4" in line]
    assert re.search(rf"\d:\d\d:\d\d left {figures}", bars[-1])
    ended = [line for line in lines if re.match(rf"epoch ./2  {figures}  \d+\.\d s", line)]
    assert [line[:9] for line in ended] == ["epoch 1/2", "epoch 2/2"]  # each stays above the bar


def test_interrupted_amid_an_epoch(cait: Cait, tmp_path: Path) -> None:
    run = start(tmp_path, "fit", *SMALL, "--run_name=stopped", "--trainer.max_epochs=50")
    wait_for_steps(tmp_path / "logs/stopped", 6, run)
    run.send_signal(signal.SIGINT)
    rest = run.stdout.read()
    assert run.wait() == 130
    assert "make resume RUN=stopped" in rest
    assert "cait: interrupted" not in rest  # it has been told already
    assert "Traceback" not in rest


def test_an_error_within_an_error_leaves_no_worker_behind(cait: Cait) -> None:
    done = cait("fit", *SMALL, "--trainer.callbacks+=recorder.FailsTwice")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "cait: error: cannot use the disk: No space left on device",
    )


@pytest.mark.slow
def test_steps_amid_an_epoch_are_resumed_at_the_next_batch(cait: Cait, tmp_path: Path) -> None:
    # A flat rate, so that the length of the run does not matter: warm-up from lr, cosine down to lr.
    flat = [*SMALL, "--model.warmup_lr=2e-3", "--model.min_lr=2e-3", "--trainer.log_every_n_steps=1"]
    assert cait("fit", *flat, "--trainer.max_steps=30", "--run_name=whole").returncode == 0
    assert cait("fit", *flat, "--trainer.max_steps=7", "--run_name=parts").returncode == 0
    resumed = cait("resume", "parts", "--trainer.max_steps=30")
    assert resumed.returncode == 0, resumed.stderr
    assert rows(tmp_path / "logs/parts") == rows(tmp_path / "logs/whole")
    expected, got = (checkpoint(tmp_path / "logs" / run)["state_dict"] for run in ("whole", "parts"))
    assert all(torch.equal(value, got[key]) for key, value in expected.items())


def test_two_processes_count_every_picture_once(cait: Cait, tmp_path: Path, mixed_root: Path) -> None:
    folder = [f"--data.root={mixed_root}", "--data.eval_batch_size=2"]
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
    record = ["--trainer.callbacks+=recorder.Recorder", "--trainer.callbacks.folder=seen"]
    brief = ["--data.batch_size=4", "--trainer.max_epochs=3", "--run_name=ddp"]
    done = cait("fit", *SMALL, *folder, *two, *brief, *record)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for r in (0, 1) for line in (tmp_path / f"seen/val-{r}.jsonl").read_text().splitlines()]
    counts = Counter(picture for batch in seen for picture in batch)
    assert len(counts) == 15
    assert set(counts.values()) == {3}  # once an epoch
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["ddp"]
    with_two = [row for row in rows(tmp_path / "logs/ddp") if row["val/acc1"]][-1]
    scored = cait("eval", "ddp", "--ckpt_path=logs/ddp/checkpoints/last.ckpt", "--trainer.devices=1")
    assert scored.returncode == 0, scored.stderr
    found = json.loads((tmp_path / "logs/ddp/evaluation.json").read_text())["raw"]
    for name in ("acc1", "loss"):  # 15 pictures: 8 for one process, 7 for the other
        assert found[name] == pytest.approx(float(with_two[f"val/{name}"]), rel=1e-4)


@pytest.mark.slow
def test_the_digits_batch_is_the_same_on_two_processes(cait: Cait, tmp_path: Path) -> None:
    digits = ["fit", f"--config={REPO / 'configs/digits.yaml'}", "--data.num_workers=0"]
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2"]
    done = cait(*digits, *two, "--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--run_name=two")
    assert done.returncode == 0, done.stderr
    saved = checkpoint(tmp_path / "logs/two")
    assert saved["ImageNetDataModule"]["depends_on"]["images a batch, over all processes"] == 32


@pytest.mark.parametrize(
    ("batch_size", "accumulated", "mixup", "share"),
    [(32, 1, 0.8, 8), (64, 2, 0.8, 8), (16, 4, 0.0, 1), (16, 4, 0.8, None), (30, 1, 0.0, None), (2, 1, 0.0, None)],
)
def test_a_global_batch_is_shared_out_over_four_processes(
    batch_size: int, accumulated: int, mixup: float, share: int | None, digits_root: Path
) -> None:
    place = dict(root=str(digits_root), img_size=16, num_workers=0, repeats=1)
    data = ImageNetDataModule(**place, batch_size=batch_size, global_batch=True, mixup=mixup, cutmix=0)
    data.trainer = Trainer(
        accelerator="cpu", devices=4, strategy="ddp", accumulate_grad_batches=accumulated, logger=False
    )
    if share is None:
        with pytest.raises(UserError, match=f"batch_size {batch_size} cannot be shared out over {4 * accumulated}"):
            data.setup("fit")
        return
    for stage in ("fit", "fit", "validate"):  # nothing is shared out twice
        data.setup(stage)
        assert data.batch_size == data.eval_batch_size == share
        assert data.train_dataloader().batch_sampler.batch_size == share


def test_devices_that_are_left_alone_are_told(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr(CPUAccelerator, "auto_device_count", staticmethod(lambda: 4))
    digits = [f"--config={REPO / 'configs/digits.yaml'}", "--trainer.accelerator=cpu", f"--data.root={digits_root}"]
    main(["fit", *digits, "--data.num_workers=0", "--trainer.fast_dev_run=1"])
    assert "training on 1 of 4 devices; --trainer.devices 4 takes all" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--config", "{digits}", "--model.lrr", "1"], "did you mean --model.lr?"),
        (["fit", "--config", "{digits}", "--trainer.max_epoch", "3"], "did you mean --trainer.max_epochs?"),
        (["fit", "--config", "{digits}", "--model.lr", "fast"], "fast"),
        (["fit", "--config", "{digits}", "--data.num_workers", "some"], "--data.num_workers cannot be 'some'"),
        (["fit", "--config", "{digits}", "--model.fields.dept", "3"], "did you mean depth?"),
        (["fit", "--config", "{digits}", "--data.root=nowhere"], "nowhere does not exist"),
        (["fit", "--config", "{digits}", "--ckpt_path", "no.ckpt"], "no.ckpt does not exist"),
        (["fit", "--config", "{digits}", "--ckpt_path", "{digits}"], "not a whole checkpoint"),
        (["fit", "--config", "{digits}", "--run_name", "a/b"], "not a path"),
        (["fit", "--config", "{digits}", "--run_name", ".."], "not a path"),
        (["fit", "--config", sys.executable], "bytes that are no text"),
        (["fit", "--config", "{digits}", "--trainer.max_epochs", "-3"], "max_epochs"),
        (["fit", "--config", "no.yaml"], "no.yaml"),
        (["fit", "--config", "{digits}", "--run_name", "taken"], "cannot use logs/taken"),
        (["fit", "--config", "{digits}", "--trainer.default_root_dir=/dev/null"], "cannot use /dev/null"),
        (
            ["fit", "--config", "{digits}", *THREE],
            "batch_size 32 cannot be shared out over 3 batches (processes × accum",
        ),
        (["fit", "--config", "{digits}", "--trainer.max_epochs=0"], "max_epochs 0 trains nothing"),
        (["fit", "--config", "{digits}", "--trainer.max_steps=0"], "max_steps 0 trains nothing"),
        (["fit", "--config", "{digits}", "--trainer.limit_train_batches=0"], "limit_train_batches 0 trains nothing"),
        (["fit", "--config", "{digits}", "--seed_everything=true"], "whole number from 0 to 4294967295, got True"),
        (["fit", "--config", "{digits}", "--seed_everything=false"], "whole number from 0 to 4294967295, got False"),
        (["fit", "--config", "{digits}", "--seed_everything=-1"], "whole number from 0 to 4294967295, got -1"),
        (["fit", "--config", "{digits}", "--seed_everything=null"], "--seed_everything cannot be 'None'"),
        (["fit", "--config", "{bad}"], "did you mean --model.lr?"),
        (["fit", "--config", "{garbled}"], "is not YAML at line"),
        (["fit", "--config", "{digits}", "--trainer.barebones=true"], "barebones true leaves out the checkpoints"),
        (["fit", "--config", "{digits}", "--trainer.strategy=fsdp"], "not FSDPStrategy"),
        (["fit", "--config", "{digits}", "--trainer.strategy=deepspeed_stage_2"], "not DeepSpeedStrategy"),
        (
            ["fit", "--config", "{digits}", "--trainer.strategy=ModelParallelStrategy"],
            "ModelParallelStrategy is unknown",
        ),
        (
            ["fit", "--config", "{digits}", "--trainer.strategy.class_path=lightning.pytorch.strategies.FSDPStrategy"],
            "not FSDPStrategy",
        ),
        (
            ["fit", "--config", "{digits}", "--trainer.strategy.class_path=ModelParallelStrategy"],
            "not ModelParallelStrategy",
        ),
        (["fit", "--config", "{digits}", "--save_every_n_minutes=0"], "save_every_n_minutes must be above 0"),
        (["fit", "--config", "{digits}", "--save_every_n_steps=0"], "save_every_n_steps must be at least 1"),
        (["eval", "--config", "{digits}"], "nothing to score: give --ckpt_path"),
        (["eval", "--config", "{digits}", "--ckpt_path", "{digits}"], "not a whole checkpoint"),
        (["predict", "--config", "{digits}", "--ckpt_path", "{digits}"], "unrecognized arguments: --config"),
        (["resume"], "which run?"),
        (["resume", "ghost"], "there is no run logs/ghost"),
        (["resume", "hollow"], "nothing to resume"),
        (["resume", "../logs/hollow"], "nothing to resume"),
        (["resume", "{elsewhere}"], "config.yaml is missing"),
        (["eval", "hollow"], "nothing to score"),
        (["train"], "unknown verb"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.yaml").write_text("model:\n  lrr: 1\n")
    two = (REPO / "configs/digits.yaml").read_text().replace("accelerator: auto", "accelerator: cpu")
    two = two.replace("devices: 1", "devices: 2")
    (tmp_path / "two.yaml").write_text(two)
    (tmp_path / "garbled.yaml").write_text("model: [1\n")
    (tmp_path / "logs" / "hollow").mkdir(parents=True)
    (tmp_path / "logs" / "taken").touch()
    (tmp_path / "elsewhere" / "checkpoints").mkdir(parents=True)
    torch.save({}, tmp_path / "elsewhere" / "checkpoints" / "last.ckpt")
    places = {
        "elsewhere": tmp_path / "elsewhere",
        "digits": REPO / "configs/digits.yaml",
        "bad": tmp_path / "bad.yaml",
        "two": tmp_path / "two.yaml",
        "garbled": tmp_path / "garbled.yaml",
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    with pytest.raises(SystemExit) as stop:
        main([argument.format(**places) for argument in arguments])
    assert stop.value.code == 2
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cait: error:")]
    assert len(told) == 1
    assert words in told[0]
    assert len(told[0]) < 300
    assert not list((tmp_path / "logs" / "hollow").iterdir())  # nothing was written
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["hollow", "taken"]


def test_a_picture_that_breaks_amid_training_is_told_in_one_line(
    cait: Cait, mixed_root: Path, photographs: list
) -> None:
    path = mixed_root / "train" / "cat" / "cut.jpg"
    photographs[0].save(path)
    path.write_bytes(path.read_bytes()[:2000])  # its header is whole
    folder = [f"--data.root={mixed_root}", "--data.batch_size=4"]
    # Of several processes the others would add what the network says when one is gone.
    done = cait("fit", *SMALL, *folder, "--trainer.max_epochs=4", "--trainer.devices=1", "--data.max_bad_share=0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("cait: error:")]
    assert len(told) == 1
    assert "cannot read" in told[0]
    assert "cut.jpg" in told[0]


def test_steps_without_epochs(cait: Cait, tmp_path: Path) -> None:
    steps = ["--trainer.max_epochs=-1", "--trainer.max_steps=30", "--model.warmup_epochs=1"]
    done = cait("fit", *SMALL, *steps, "--trainer.log_every_n_steps=1", "--run_name=a")
    assert done.returncode == 0, done.stderr
    rates = dict(steps_and_rates(tmp_path / "logs/a"))
    assert len(rates) == 30
    assert rates[21] == pytest.approx(2e-3)  # an epoch of 22 steps, then the cosine to step 30
    assert rates[29] == pytest.approx(1e-5 + (2e-3 - 1e-5) * (1 + math.cos(math.pi * 7 / 8)) / 2, rel=1e-5)


def test_another_models_checkpoint_is_told(cait: Cait, tmp_path: Path) -> None:
    assert cait("fit", *SMALL, "--trainer.max_steps=1", "--run_name=small").returncode == 0
    config = tmp_path / "logs/small/config.yaml"
    before = config.read_bytes()
    refused = cait("resume", "small", "--model.fields.depth=3", "--trainer.max_steps=2")
    assert refused.returncode == 2
    assert "another network" in refused.stderr
    assert config.read_bytes() == before  # the run can still be resumed as it is
    assert cait("resume", "small", "--trainer.max_steps=2").returncode == 0
    done = cait(
        "fit", *SMALL, "--model.fields.depth=3", "--ckpt_path=logs/small/checkpoints/last.ckpt", "--run_name=other"
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("cait: error: the checkpoint is of another network")


def test_a_fast_dev_run_writes_nothing(digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    here = ["--data.num_workers=0", "--trainer.devices=1"]  # this process could not start others
    main(["fit", *SMALL, f"--data.root={digits_root}", *here, "--trainer.fast_dev_run=1"])
    assert not [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]


def test_help_is_quick_and_lists_the_verbs() -> None:
    # In a process that cannot import torch, so that it cannot become slow.
    code = "import sys; sys.modules['torch'] = None; from cait.cli import main; main(['--help'])"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in ("fit", "resume", "eval", "predict", "export"))


@pytest.mark.parametrize("verb", ["resume", "eval", "zoo"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_our_verbs_have_a_usage_too(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # argparse ends the process
        main([verb, option])
    assert capsys.readouterr().out.startswith(f"usage: cait {verb} ")


@pytest.mark.parametrize(
    ("error", "status", "told"), [(KeyboardInterrupt, 130, "cait: interrupted\n"), (BrokenPipeError, 141, "")]
)
@pytest.mark.parametrize("wrapped", [False, True])  # as Lightning and rich do
def test_interrupted_or_cut_off(
    error: type[BaseException],
    status: int,
    told: str,
    wrapped: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def cut(*_: object, **__: object) -> None:
        try:
            raise error
        except error:
            if wrapped:
                sys.exit(1)
            raise

    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr("cait.cli.lightning.CaiTCLI", cut)
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup2", lambda *_: None)  # it would close pytest's own output
        with pytest.raises(SystemExit) as stop:
            main(["fit", *SMALL])
    assert stop.value.code == status
    assert capfd.readouterr().err == ("" if wrapped else told)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m cait --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("cait nothing <&-", "unknown verb 'nothing'; `cait --help` lists them"),
        ("cait runs > /dev/full", "cannot use the disk: No space left on device"),
        (
            "PYTHONIOENCODING=ascii cait paper > paper.txt && cait nothing",
            "unknown verb 'nothing'; `cait --help` lists them",
        ),
        ("mkdir gone; cd gone; rmdir ../gone; cait runs", "the working folder has been removed; change to another one"),
    ],
)
def test_what_a_shell_hands_over_may_be_closed_full_or_gone(command: str, told: str, tmp_path: Path) -> None:
    script = f'cait() {{ "{sys.executable}" -m cait "$@"; }}; {command}'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"cait: error: {told}\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "too many open files: raise the limit"),
        (
            RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
            "unable to allocate shared memory: enlarge /dev/shm",
        ),
    ],
)
def test_a_limit_of_the_system_is_no_error_of_the_program(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opens(*_: object) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["cait"])
    monkeypatch.setattr("cait.cli.fit.resume", opens)
    with pytest.raises(SystemExit) as stop:
        main(["resume"])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_a_run_that_lies_elsewhere(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        main(["fit", *SMALL, *steps, "--trainer.max_epochs=1", f"--trainer.default_root_dir={elsewhere}"])
        assert f"make resume RUN={elsewhere / name}" in capsys.readouterr().out
    # Moved and renamed, it goes on where it lies; with --ckpt_path, from that checkpoint.
    moved = (elsewhere / "digits").rename(tmp_path / "moved")
    (moved / "checkpoints/last.ckpt").rename(tmp_path / "kept.ckpt")
    (moved / "checkpoints/last.ckpt").write_text("torn")
    main(["resume", "moved", "--ckpt_path=kept.ckpt", "--trainer.max_epochs=2"])
    assert [int(row["step"]) for row in rows(moved) if not row["lr-AdamW/pg1"]] == [0, 1, 1, 2, 3, 3]
    assert checkpoint(moved)["global_step"] == 4
    best = next(state for key, state in checkpoint(moved)["callbacks"].items() if "val/acc1" in key)
    assert best["best_model_path"] == str(moved / "checkpoints/best.ckpt")
    assert best["best_model_score"] == max(float(row["val/acc1"]) for row in rows(moved) if row["val/acc1"])
    main(["eval", str(moved)])
    assert "top-1" in capsys.readouterr().out
    assert not (tmp_path / "logs").exists()
    # In Python the checkpoint is enough.
    module = CaiTModule.load_from_checkpoint(moved / "checkpoints/last.ckpt", map_location="cpu")
    for key, value in checkpoint(moved)["state_dict"].items():
        assert torch.equal(module.state_dict()[key], value), key
