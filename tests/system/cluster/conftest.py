"""A cluster for the tests of this folder, if this host can have one."""

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from cluster import Cluster, missing
from trial import Trial


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="draws the faults of test_random_faults")


@pytest.fixture(scope="session")
def cluster():
    if lack := missing():
        pytest.exit(f"these tests need a cluster, and that needs {lack}", returncode=1)
    with tempfile.TemporaryDirectory(prefix="cait-cluster-") as folder:
        machines = Cluster(Path(folder), machines=3)
        try:
            machines.up()
            yield machines
        finally:
            machines.down()


@pytest.fixture(scope="session")
def trial(cluster):
    return Trial(cluster)


@pytest.fixture(scope="session")
def alone(trial):
    """A run on two machines, one process each, that nobody touches."""
    trial.submit("alone", PACE=0).complete()
    return "alone"


@pytest.fixture(scope="session")
def alone_of_four(trial):
    """One on two machines, two processes each."""
    trial.submit("alone-of-four", tasks=2, PACE=0).complete()
    return "alone-of-four"
