"""The cores of a training process, as launchers and schedulers leave them."""

import os

import joblib
import pytest
from harness import python
from modules import images_in

from cait import cores
from cait.cli import main


@pytest.fixture(autouse=True)
def not_in_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)


@pytest.mark.parametrize(
    ("cores_here", "cores_of_step", "processes", "expected"),
    [
        pytest.param(96, "", 8, 12, id="eight processes that Lightning or torchrun starts"),
        pytest.param(96, "", 1, 96, id="one process"),
        pytest.param(12, "96", 8, 12, id="SLURM, each bound to its cores"),
        pytest.param(96, "96", 8, 12, id="SLURM, none bound"),
        pytest.param(128, "64", 8, 8, id="SLURM, none bound nor confined to the step"),
        pytest.param(2, "", 8, 1, id="fewer cores than processes"),
        pytest.param(12, "12(x2)", 2, 6, id="what is no number"),
    ],
)
def test_the_share_of_a_process(cores_here, cores_of_step, processes, expected, monkeypatch):
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores_here)
    if cores_of_step:
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", cores_of_step)
    assert cores.share(processes) == expected


@pytest.mark.parametrize(("cores_here", "workers"), [(6, 6), (96, 16)])
def test_a_loader_of_ones_own_script_has_a_worker_for_each_core(
    cores_here, workers, digits_root, monkeypatch
):
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores_here)
    data = images_in(digits_root, num_workers=None)
    data.setup()
    assert data.train_dataloader().num_workers == workers


@pytest.mark.parametrize(
    "name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]
)
def test_a_gpus_memory_grows_in_segments_unless_the_user_says_how(name, monkeypatch):
    for variable in [*os.environ]:
        if variable.endswith("ALLOC_CONF"):
            monkeypatch.delenv(variable)
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if name:
        monkeypatch.setenv(name, "backend:native")
        expected = {name: "backend:native"}
    main(["--version"])
    variables = {key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")}
    assert variables == expected


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
    done = python(code)
    assert done.returncode == 0, done.stderr
