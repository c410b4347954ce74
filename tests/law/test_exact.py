"""The law of the exact run: killed amid an epoch and resumed, it ends with the bits of one left alone."""

import shlex

import pytest
from harness import ended, link_digits, table
from runs import RECIPE, kill_and_resume

# two epochs, also where gradients of two batches are one step's: the kill comes before the fifth
SHORT = """
--trainer.max_epochs=2 --trainer.limit_train_batches=14 --trainer.limit_val_batches=2 --data.num_workers=0
"""


@pytest.mark.parametrize("row", table(__file__, "runs"))
def test_a_killed_run_ends_with_the_bits_of_one_left_alone(row, tmp_path, digits_root):
    link_digits(tmp_path, digits_root)
    for name, text in row.get("files", {}).items():
        (tmp_path / name).write_text(text)
    recipe = [*RECIPE, *SHORT.split(), *shlex.split(row["words"])]
    whole = ended(tmp_path, "whole", recipe)
    kill_and_resume(tmp_path, recipe, whole)
