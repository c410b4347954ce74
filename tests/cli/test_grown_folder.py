"""A folder that grows while runs are trained on it, and in which they write."""

import shutil
from pathlib import Path

import pytest
from harness import SMALL, call, parsed, slow, works

from cait.data.folder import scan_flat

SETTINGS = [
    *SMALL,
    "--data.root=.",
    "--data.batch_size=16",
    "--data.num_workers=0",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
]


def add_digits(folder, digits_root, numbers):
    for label in "012":
        (folder / label).mkdir(exist_ok=True)
        for path in sorted((digits_root / "train" / label).iterdir())[numbers]:
            shutil.copy(path, folder / label)


def cait(folder, *words):
    return works(call(folder, *words)).stderr


def held_out(run):
    return [row["path"] for row in parsed(run / "validation.csv")]


@pytest.mark.parametrize("logs", ["logs", *slow("results")])
def test_a_run_validates_on_what_it_has_held_out_and_what_runs_write_is_no_data(
    logs, tmp_path, digits_root, monkeypatch
):
    add_digits(tmp_path, digits_root, slice(20))
    settings = [*SETTINGS, f"--trainer.default_root_dir={logs}"] if logs != "logs" else SETTINGS
    cait(tmp_path, "fit", *settings, "--run_name=a")
    first = held_out(tmp_path / logs / "a")
    assert all((tmp_path / path).is_file() for path in first)

    first_digit = next((digits_root / "val/0").iterdir())
    drawn = ["a/drawn.png", "drawn.png", "many/fold-0/.lock"]
    for path in [*(f"{logs}/{name}" for name in drawn), "__pycache__/my_net.pyc"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(first_digit, tmp_path / path)
    add_digits(tmp_path, digits_root, slice(20, 30))
    goes_on = ["resume", f"{logs}/a", "--trainer.max_epochs=2"]
    refused = call(tmp_path, *goes_on)
    assert refused.returncode == 2
    assert "was 54, is 84" in refused.stderr
    cait(tmp_path, *goes_on, "--data.check_resume=false")
    assert held_out(tmp_path / logs / "a") == first

    listed = f"--data.val_list={logs}/a/validation.csv"
    cait(tmp_path, "fit", *settings, "--run_name=b", listed)
    assert sorted(held_out(tmp_path / logs / "b")) == sorted(first)
    (tmp_path / logs / "b/validation.csv").unlink()
    goes_on[1] = f"{logs}/b"
    told = cait(tmp_path, *goes_on, "--data.check_resume=false")
    assert "validation.csv is gone" in told
    monkeypatch.chdir(tmp_path)
    assert not [path for path, _ in scan_flat(Path()) if path.startswith(logs)]
