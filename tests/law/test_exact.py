"""The law of the exact run: killed amid an epoch and resumed, it ends with the bits of one left alone."""

import shlex

from harness import ended, link_digits, over_table
from runs import RECIPE, kill_and_resume

# two epochs, also where gradients of two batches are one step's: the kill comes before the fifth
SHORT = """
--trainer.max_epochs=2 --trainer.limit_train_batches=14 --trainer.limit_val_batches=2 --data.num_workers=0
--data.batch_size=16
"""


@over_table(__file__, "runs", files={})
def test_a_killed_run_ends_with_the_bits_of_one_left_alone(words, files, tmp_path, digits_root):
    link_digits(tmp_path, digits_root)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    recipe = [*RECIPE, *SHORT.split(), *shlex.split(words)]
    kill_and_resume(tmp_path, recipe, ended(tmp_path, "whole", recipe))
