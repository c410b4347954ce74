"""The law of the exact run: killed amid an epoch and resumed, it ends with the bits of one left alone."""

import shlex
from pathlib import Path

import pytest
import yaml
from golden import is_there
from harness import ended, link_digits
from runs import RECIPE, kill_and_resume

TABLE = Path(__file__).with_name("exact.yaml")
# two epochs, also where gradients of two batches are one step's: the kill comes before the fifth
SHORT = """
--trainer.max_epochs=2 --trainer.limit_train_batches=14 --trainer.limit_val_batches=2 --data.num_workers=0
"""


def rows():
    for row in yaml.safe_load(TABLE.read_text()):
        if is_there(row.get("needs", "")):
            marks = [pytest.mark.slow] if row.get("slow") else []
            yield pytest.param(row, id=row["case"], marks=marks)


@pytest.mark.parametrize("row", rows())
def test_a_killed_run_ends_with_the_bits_of_one_left_alone(row, tmp_path, digits_root):
    link_digits(tmp_path, digits_root)
    for name, text in row.get("files", {}).items():
        (tmp_path / name).write_text(text)
    recipe = [*RECIPE, *SHORT.split(), *shlex.split(row["words"])]
    whole = ended(tmp_path, "whole", recipe)
    kill_and_resume(tmp_path, recipe, whole)
