"""What is relied on in Lightning beyond its documented interface. An upgrade that changes one fails here first."""

import inspect
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities import rank_zero_only
from modules import SavesAt, loader, module, trainer
from torch.nn.parallel import DistributedDataParallel

from cait import ckpt, loops
from cait.data.datamodule import ImageNetDataModule
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.module import lay_out_buckets


def test_the_counter_of_batches_says_where_a_resumed_epoch_begins(tmp_path: Path) -> None:
    """`ready` counts this epoch's batches before the next one, when the loader asks for it and in the transfer hook."""
    seen: list[tuple[int, int]] = []

    def look(trainer: Trainer, net: object, batch: object, batch_idx: int) -> None:
        seen.append((trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1, batch_idx))

    watch = LambdaCallback(on_train_batch_start=look)
    saves = SavesAt(4, tmp_path / "x.ckpt")
    trainer(max_epochs=1, callbacks=[watch, saves], enable_checkpointing=True).fit(
        module(), loader()
    )
    assert seen == [(i, i) for i in range(6)]
    seen.clear()
    trainer(max_epochs=1, callbacks=[watch]).fit(module(), loader(), ckpt_path=saves.path)
    assert seen == [(4, 4), (5, 5)]


def test_the_loader_is_asked_for_its_place_after_the_counters_came_back(
    tmp_path: Path, digits_root: Path
) -> None:
    common: dict = dict(
        root=str(digits_root), img_size=8, batch_size=64, num_workers=0, mixup=0.0, cutmix=0.0
    )
    places: list[tuple[int, int]] = []

    class Data(ImageNetDataModule):
        def _position(self) -> tuple[int, int]:
            places.append(super()._position())
            return places[-1]

    saves = SavesAt(25, tmp_path / "x.ckpt")
    fit = trainer(max_epochs=2, callbacks=[saves], limit_val_batches=0, enable_checkpointing=True)
    fit.fit(module(num_classes=10), datamodule=Data(**common))
    assert places == [(0, 0), (1, 0)]
    places.clear()
    again = trainer(max_epochs=3, limit_val_batches=0)
    again.fit(module(num_classes=10), datamodule=Data(**common), ckpt_path=saves.path)
    assert places == [(1, 5), (2, 0)]  # 20 batches an epoch


def test_callbacks_are_set_up_then_restored_then_started_and_checkpoints_come_last(
    tmp_path: Path,
) -> None:
    events: list[str] = []

    class Log(LambdaCallback):
        def state_dict(self) -> dict:
            return {"some": 1}

        def load_state_dict(self, state_dict: dict) -> None:
            events.append("load")

    log = Log(
        setup=lambda *_, **__: events.append("setup"),
        on_train_start=lambda *_: events.append("start"),
    )
    saves = SavesAt(6, tmp_path / "x.ckpt")
    fit = trainer(max_epochs=1, callbacks=[saves, log], enable_checkpointing=True)
    assert fit.callbacks[-2:] == [log, saves]
    fit.fit(module(), loader())
    events.clear()
    trainer(max_epochs=2, callbacks=[log]).fit(module(), loader(), ckpt_path=saves.path)
    assert events == ["setup", "load", "start"]


def test_a_steps_figures_are_logged_after_its_hooks_and_through_the_connector(
    tmp_path: Path,
) -> None:
    order: list[str] = []

    class Logger(CSVLogger):
        def log_metrics(self, metrics: dict, step: int | None = None) -> None:
            order.append(f"logged {step}")

    def replace(trainer: Trainer, net: object) -> None:
        connector = trainer._logger_connector
        original = connector.update_train_step_metrics
        connector.update_train_step_metrics = lambda: order.append("update") or original()

    watch = LambdaCallback(
        on_train_start=replace, on_train_batch_end=lambda *_: order.append("hook")
    )
    fit = trainer(max_epochs=1, logger=Logger(tmp_path), callbacks=[watch], log_every_n_steps=1)
    fit.fit(module(), loader(8))
    assert order[-6:] == ["hook", "update", "logged 0", "hook", "update", "logged 1"]


def test_storage_options_reach_the_checkpoint_io_and_validation_is_known_ahead(
    tmp_path: Path,
) -> None:
    given: list[object] = []
    last: list[bool] = []

    class IO(TorchCheckpointIO):
        def save_checkpoint(
            self, checkpoint: dict, path: object, storage_options: object = None
        ) -> None:
            given.append(storage_options)

    watch = LambdaCallback(on_train_batch_end=lambda fit, *_: last.append(fit.is_last_batch))
    fit = trainer(max_epochs=1, plugins=[IO()], callbacks=[watch])
    fit.fit(module(), loader(12), loader(4))
    fit.save_checkpoint(tmp_path / "x.ckpt", storage_options={"previous": "y"})
    assert given == [{"previous": "y"}]
    assert last == [False, False, True]
    assert fit.val_check_batch == 3


def test_the_loops_say_which_batch_and_which_step_is_under_way() -> None:
    """The loader's batch, and the step as Lightning counts it for its loggers."""
    seen: list[tuple[int, int, int]] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda fit, *_: seen.append(
            (loops.next_batch(fit), fit.global_step, fit.fit_loop.epoch_loop._batches_that_stepped)
        ),
    )
    common: dict = dict(
        val_check_interval=3, accumulate_grad_batches=2, num_sanity_val_steps=0, callbacks=[watch]
    )
    trainer(max_epochs=1, **common).fit(module(), loader(), loader(4))
    assert seen == [(1, 0, 0), (2, 0, 0), (3, 1, 1), (4, 1, 1), (5, 2, 2), (6, 2, 2)]


def test_a_stopped_process_that_lightning_started_ends_as_if_all_were_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Lightning would kill the first process, which may not have ended yet."""

    def status() -> int:
        with pytest.raises(SystemExit) as ended:
            LastCheckpoint(tmp_path)._leave(trainer(strategy="ddp", devices=2), signal.SIGTERM)
        return ended.value.code

    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Trainer sets it by the variables
    assert status() == 143
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert status() == 0
    of_torchrun = dict(
        TORCHELASTIC_RUN_ID="x", RANK="1", GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"
    )
    for name, value in of_torchrun.items():
        monkeypatch.setenv(name, value)
    assert status() == 143


def test_lightnings_own_answers_to_signals_can_be_replaced() -> None:
    fit = trainer()
    # Called before each batch under DDP; replaced on the instance, because it waits for the device.
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(
        type(fit.fit_loop.epoch_loop).advance
    )
    # before on_train_start
    assert "signal.SIGTERM" in inspect.getsource(_SignalConnector.register_signal_handlers)


def test_a_run_leaves_the_processs_signal_handlers_as_it_found_them(tmp_path: Path) -> None:
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(kind) for kind in kinds]
    last = LastCheckpoint(tmp_path, every_n_steps=100)
    during: list[object] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda *_: during.extend(map(signal.getsignal, kinds))
    )
    trainer(max_epochs=1, callbacks=[last, watch], plugins=[DurableCheckpointIO()]).fit(
        module(), loader(4)
    )
    assert during == [last.signals._note] * 3
    assert [signal.getsignal(kind) for kind in kinds] == before


def test_torchs_fused_adamw_leaves_a_step_out_at_found_inf() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for found, moved in ((1.0, False), (0.0, True)):
        weight.grad = torch.ones(3)
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        assert torch.equal(weight.detach(), torch.ones(3)) is not moved
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("damage", [-1, 5000])
def test_torch_saves_checksums_that_zipfile_checks(damage: int, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"weights": torch.randn(10_000)}, path)
    assert ckpt.is_whole(path)
    content = bytearray(path.read_bytes())
    content[damage] ^= 0xFF
    path.write_bytes(content if damage > 0 else content[:damage])
    assert not ckpt.is_whole(path)


def test_ddp_lays_its_buckets_out_anew_once_and_gradients_without_a_pass_are_enough() -> None:
    def rebuilds(before: bool) -> bool:
        """Whether DDP does after a first backward pass."""
        layer = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        network = DistributedDataParallel(layer)
        state, random = (
            {key: value.clone() for key, value in layer.state_dict().items()},
            torch.get_rng_state(),
        )
        if before:
            lay_out_buckets(network)
        assert all(parameter.grad is None for parameter in network.parameters())
        assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())
        assert torch.equal(torch.get_rng_state(), random)
        network(torch.randn(4, 2)).sum().backward()
        return network.reducer._rebuild_buckets()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [rebuilds(before) for before in (False, True)] == [True, False]
    finally:
        dist.destroy_process_group()
