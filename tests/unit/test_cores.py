"""The cores of a training process, as launchers and schedulers leave them."""

import os

import joblib
import pytest
from harness import python, table, works
from modules import images_in

from cait import cores


@pytest.fixture(autouse=True)
def not_in_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)


@pytest.mark.parametrize("row", table(__file__, "shares"))
def test_the_share_of_a_process(row, monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: row["cores"])
    os.environ.update(row["variables"])
    assert cores.share(row["processes"]) == row["share"]


@pytest.mark.parametrize(("cores_here", "workers"), [(6, 6), (96, 16)])
def test_a_loader_of_ones_own_script_has_a_worker_for_each_core(
    cores_here, workers, digits_root, monkeypatch
):
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores_here)
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
