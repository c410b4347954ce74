"""--print_plan says what a run would be, and does nothing."""

from pathlib import Path

import pytest
from harness import SMALL

from cait.cli import main


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The lines of the plan by their first word."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--print_plan"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.strip()}


def test_the_plan_of_a_run_names_its_parts_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    own = "--trainer.callbacks+=lightning.pytorch.callbacks.ModelSummary"
    new = plan(capsys, "fit", *SMALL, "--ema.decay=0.9", "--trainer.max_steps=2", own)
    assert sorted(here.rglob("*")) == before
    assert new["folder"] == "logs/digits"
    assert new["start"] == "a new run"
    assert new["best.ckpt"] == "by the largest val_ema/acc1"
    assert new["loggers"] == "RunCSVLogger, TensorBoardLogger, every 2 steps"
    callbacks = [name for name in new if name[0].isupper()]
    assert callbacks[0] == "LastCheckpoint"
    assert callbacks[-2:] == ["UnreadableReport", "BestCheckpoint"]
    assert (
        callbacks.index("StepSeed")
        < callbacks.index("ModelSummary")
        < callbacks.index("SaveConfig")
        < callbacks.index("NonFiniteGuard")
    )
    assert "first: " in new["LastCheckpoint"]


def test_the_plan_of_a_run_that_goes_on_names_its_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *SMALL, "--trainer.max_steps=2", "--run_name=mine"])
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    shown = plan(capsys, "resume", "mine", "--trainer.max_steps=3")
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before
    assert shown["folder"] == "logs/mine"
    assert shown["start"] == "logs/mine/checkpoints/last.ckpt at step 2"
    assert plan(capsys, "fit", *SMALL)["folder"] == "logs/digits"
    with pytest.raises(SystemExit) as refused:
        main(["fit", *SMALL, "--run_name=mine", "--print_plan"])
    assert refused.value.code == 2
    assert "logs/mine holds a run: go on with" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_goes_on_with_a_setting_that_it_has_left_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unmixed = ["--data.mixup=0", "--data.cutmix=0"]  # configs/digits.yaml has a mix_prob
    main(["fit", *SMALL, *unmixed, "--trainer.max_steps=1", "--run_name=killed"])
    for file in Path("logs/killed/checkpoints").iterdir():
        file.unlink()
    assert plan(capsys, "resume", "killed")["start"] == "a new run"
    with pytest.raises(SystemExit, match="2"):
        main(["resume", "killed", "--data.mix_prob=0.3", "--print_plan"])
    assert "--data.mix_prob 0.3 does nothing" in capsys.readouterr().err
