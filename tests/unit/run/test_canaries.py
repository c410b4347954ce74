"""What is relied on in Lightning and torch beyond their documented interface. An upgrade that changes it fails here."""

import inspect
import signal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities import rank_zero_only
from modules import loader, module, trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.module import lay_out_buckets

TORCHRUN = dict(
    TORCHELASTIC_RUN_ID="x", RANK="1", GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"
)


@pytest.mark.parametrize(
    ("variables", "status"),
    [({}, 143), ({"LOCAL_RANK": "1"}, 0), ({"LOCAL_RANK": "1", **TORCHRUN}, 143)],
    ids=["the first", "started by Lightning", "started by torchrun"],
)
def test_a_stopped_process_that_lightning_started_ends_as_if_all_were_well(
    variables, status, tmp_path, monkeypatch
):
    """Else Lightning would kill the first process, which may not have ended yet."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Trainer sets it by the variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        LastCheckpoint(tmp_path)._leave(trainer(strategy="ddp", devices=2), signal.SIGTERM)
    assert stop.value.code == status


def test_lightnings_own_answers_to_signals_can_be_replaced():
    loop = type(trainer().fit_loop.epoch_loop)
    # Called before each batch under DDP; replaced on the instance, because it waits for the device.
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(loop.advance)
    # before on_train_start
    assert "signal.SIGTERM" in inspect.getsource(_SignalConnector.register_signal_handlers)


def test_a_run_leaves_the_processs_signal_handlers_as_it_found_them(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    last = LastCheckpoint(tmp_path, every_n_steps=100)
    during = []

    def look(*_):
        during.extend(signal.getsignal(number) for number in numbers)

    watch = LambdaCallback(on_train_batch_start=look)
    fit = trainer(max_epochs=1, callbacks=[last, watch], plugins=[DurableCheckpointIO()])
    fit.fit(module(), loader(4))
    assert during == [last.signals._note] * 3
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lays_out_anew(network):
    """Whether DDP does so after a backward pass."""
    network(torch.randn(4, 2)).sum().backward()
    return network.reducer._rebuild_buckets()


@pytest.mark.usefixtures("group")
def test_ddp_lays_its_buckets_out_anew_once_and_gradients_without_a_pass_are_enough():
    layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert lays_out_anew(DistributedDataParallel(layers))
    layers.zero_grad()
    network = DistributedDataParallel(layers)
    state = {name: value.clone() for name, value in layers.state_dict().items()}
    random = torch.get_rng_state()
    lay_out_buckets(network)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(value, state[name]) for name, value in layers.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not lays_out_anew(network)
