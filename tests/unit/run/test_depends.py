"""What a run depends on: another value of any of it alone refuses the checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest
from modules import images_in

from cait.errors import UserError

# The images of a step are compared as one, 64 of them in place of 4.
OTHERS: dict[str, Any] = {
    "images a batch, over all processes": 64,
    "batches accumulated, by epoch": {0: 16},
}


@pytest.fixture(scope="module")
def data(digits_root):
    """Of a run that is about to go on."""
    data = images_in(digits_root)
    data.setup("fit")
    data.trainer = SimpleNamespace(
        training=True, global_rank=0, world_size=1, accumulate_grad_batches=1, callbacks=[]
    )
    return data


def test_each_fact_alone_refuses_a_checkpoint(data):
    data.load_state_dict(data.state_dict())
    names = [*data.state_dict()["depends_on"]]
    assert len(names) >= 11
    for name in names:
        saved = data.state_dict()
        saved["depends_on"][name] = OTHERS.get(name, "another")
        with pytest.raises(UserError, match="is of a run with other data or settings"):
            data.load_state_dict(saved)
