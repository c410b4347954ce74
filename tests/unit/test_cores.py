"""The cores of a training process, as launchers and schedulers leave them."""

import os

import joblib
import pytest
from harness import over_table, python, works
from modules import images_in

from cait import cores


@pytest.fixture(autouse=True)
def not_in_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)


@over_table(__file__, "shares")
def test_the_share_of_a_process(here, variables, processes, share, monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: here)
    os.environ.update(variables)
    assert cores.share(processes) == share


@over_table(__file__, "workers")
def test_a_loader_of_ones_own_script_has_a_worker_for_each_core(
    here, workers, digits_root, monkeypatch
):
    monkeypatch.setattr(joblib, "cpu_count", lambda: here)
    data = images_in(digits_root, num_workers=None)
    data.setup()
    assert data.train_dataloader().num_workers == workers


@pytest.mark.slow
def test_imports_wait_for_no_collector_and_a_network_finds_the_usual_one():
    code = """
import gc
from cait import cores
usual = gc.get_threshold()
cores.before_torch()
rare = gc.get_threshold()
from cait.model.network import NetworkSettings
network = NetworkSettings("timm/test_vit", 32, 3)
assert gc.get_threshold() == rare != usual
network.build_network()
assert gc.get_threshold() == usual
cores.before_torch()
assert gc.get_threshold() == usual
"""
    works(python(code))
