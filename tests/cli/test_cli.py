"""The command line as a user meets it: what whole runs leave, and how the command ends."""

import re
import shutil
import subprocess
import sys

import pytest
from harness import SMALL, TWO_BLOCKS, checkpoint, environment, over_table, python, rows, works
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cait as package
from cait import cores

BRIEF = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--data.num_workers=0"]


def test_a_run_leaves_everything_in_its_folder(trained):
    for name in ("config.yaml", "metrics.csv", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (trained / name).is_file(), name
    names = {"train/loss", "train/acc1", "train/grad_norm", "lr", "epoch", "step"}
    for figure in ("loss", "acc1", "acc5"):
        names |= {f"val/{figure}", f"val_ema/{figure}"}
    assert set(rows(trained)[0]) == names
    version = package.__version__
    assert (trained / "config.yaml").read_text().startswith(f"# cait=={version}, format 1\n")
    saved = checkpoint(trained)
    assert (saved["cait"], saved["format"]) == (version, 1)
    events = EventAccumulator(str(trained)).Reload()
    assert {"train/loss", "val/acc1", "lr"} <= set(events.Tags()["scalars"])


def test_the_best_checkpoint_says_what_the_weights_scored_that_did_not_choose_it(trained):
    [raw] = [float(row["val/acc1"]) for row in rows(trained) if row["val/acc1"]]
    states = checkpoint(trained)["callbacks"].values()
    [score] = [state["other_score"] for state in states if "other_score" in state]
    assert score == pytest.approx(raw, rel=1e-6)


def test_the_learning_rate_is_the_one_that_was_asked_for(trained):
    """Warm-up takes 3 epochs, so here the whole run of 6 steps."""
    [row] = [row for row in rows(trained) if row["lr"]]
    rate = 1e-6 + (2e-3 - 1e-6) * int(row["step"]) / 5
    assert float(row["lr"]) == pytest.approx(rate, rel=1e-5)


def test_an_error_within_an_error_leaves_no_worker_behind(cait):
    done = cait("fit", *SMALL, "--trainer.callbacks+=recorder.FailsTwice")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cait: error: cannot use the disk: No space left on device (")
    assert "/recorder.py:" in last


def test_a_run_that_starts_from_a_checkpoint_goes_on_as_any_other(cait, trained, tmp_path):
    start = [f"--ckpt_path={trained}/checkpoints/last.ckpt", "--ema.decay=0.9", "--run_name=fork"]
    works(cait("fit", *SMALL, TWO_BLOCKS, *start, *BRIEF[1:], "--trainer.max_steps=7"))
    works(cait("resume", "fork", "--trainer.max_steps=8"))
    assert checkpoint(tmp_path / "logs/fork")["global_step"] == 8


def test_a_run_lies_where_it_is_told_and_a_second_one_beside_it(cait, tmp_path):
    elsewhere = f"--trainer.default_root_dir={tmp_path}/elsewhere"
    for name in ("digits", "digits-2"):
        # one callback alone, not a list
        works(cait("fit", *SMALL, *BRIEF, elsewhere, "--trainer.callbacks=LearningRateMonitor"))
        assert "lr-AdamW/pg1" in rows(tmp_path / "elsewhere" / name)[0]
    assert not (tmp_path / "logs").exists()


def test_a_run_that_was_moved_goes_on_where_it_lies(cait, trained, tmp_path):
    """With --ckpt_path, from that checkpoint."""
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    (moved / "checkpoints/last.ckpt").rename(tmp_path / "kept.ckpt")
    (moved / "checkpoints/last.ckpt").write_text("torn")
    works(cait("resume", "moved", "--ckpt_path=kept.ckpt", "--trainer.max_epochs=2"))
    assert checkpoint(moved)["global_step"] == 12
    states = checkpoint(moved)["callbacks"]
    [best] = [state for name, state in states.items() if "val_ema/acc1" in name]
    assert best["best_model_path"] == str(moved / "checkpoints/best.ckpt")
    averages = [float(row["val_ema/acc1"]) for row in rows(moved) if row["val_ema/acc1"]]
    assert best["best_model_score"] == max(averages)
    scored = cait("eval", str(moved))
    assert "top-1" in scored.stdout
    assert not (tmp_path / "logs").exists()


def test_a_fast_dev_run_writes_nothing(cait, tmp_path):
    works(cait("fit", *SMALL, "--data.num_workers=0", "--trainer.fast_dev_run=1"))
    assert not [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]


def test_a_run_killed_before_its_first_checkpoint_begins_again(cait, tmp_path):
    """Its config.yaml lacks a setting that did nothing, and nobody can give it now."""
    unmixed = ["--data.mixup=0", "--data.cutmix=0"]  # configs/digits.yaml has a mix_prob
    works(cait("fit", *SMALL, *BRIEF, *unmixed, "--run_name=killed"))
    shutil.rmtree(tmp_path / "logs/killed/checkpoints")
    plan = cait("resume", "killed", "--print_plan")
    assert "start      a new run" in plan.stdout
    refused = cait("resume", "killed", "--data.mix_prob=0.3", "--print_plan")
    assert refused.returncode == 2
    assert "--data.mix_prob" in refused.stderr


def test_help_is_quick_and_lists_the_verbs():
    # In a process that cannot import torch, so that it cannot become slow.
    code = "import sys; sys.modules['torch'] = None; from cait.cli import main; main(['--help'])"
    done = works(python(code))
    assert re.search(r"(?s)fit .*resume .*eval .*predict ", done.stdout)


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
@pytest.mark.parametrize("wrapped", [False, True])  # as Lightning and rich do
def test_interrupted_or_cut_off(error, status, wrapped, cait, monkeypatch):
    def end(*_, **__):
        try:
            raise error
        except error:
            if wrapped:
                sys.exit(1)
            raise

    monkeypatch.setattr("cait.cli.lightning.CaiTCLI", end)
    monkeypatch.setattr(cores, "discard", lambda _: None)  # it would close pytest's own output
    done = cait("fit", *SMALL)
    assert done.returncode == status
    # wrapped, the run has said what to type next
    says_so = error is KeyboardInterrupt and not wrapped
    assert ("cait: interrupted" in done.stderr) == says_so


@over_table(__file__, "shell")
def test_what_a_shell_hands_over_may_be_closed_or_full(command, status, says, tmp_path):
    script = f'cait() {{ "{sys.executable}" -m cait "$@"; }}; {command}'
    shell = ["bash", "-c", script]
    done = subprocess.run(shell, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr == says
