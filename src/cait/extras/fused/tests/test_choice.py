"""What "auto" takes: measured on a clock of the test's own, kept by the run, and agreed on by all processes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import needs_a_compiler
from torch import nn

import cait
from cait.extras.fused import block
from cait.extras.fused.block import BlockCase
from cait.extras.fused.choice import AttentionChoice, CompileChoice
from cait.extras.fused.measure import Case, Measured, measure, remembered, shapes
from cait.extras.fused.recompute import Recompute
from cait.model.config import attention_backends
from cait.model.network import NetworkSettings
from cait.model.talking_heads import Backends, Shape

CASE = Case(Shape("cpu", torch.float32, 9, 2, 8), images=2)
FIELDS: dict[str, Any] = dict(patch_size=8, embed_dim=16, num_heads=2, depth=2)
right = Recompute.__call__
NAME = "4 tokens, 2 heads of 8, float32"


def clock(times: dict[str, float], order: list[str]) -> Any:
    """A clock that reads these times, for backends in the order in which they are timed."""
    remaining = iter(order)

    def read(step: Any, device: torch.device) -> float:
        step()
        return times[next(remaining)]

    return read


@pytest.mark.parametrize("fastest", ["recompute", "reference"])
def test_the_fastest_of_those_that_are_right_is_taken(fastest: str) -> None:
    order = [name for name in attention_backends() if name in ("recompute", "reference")]
    found = measure(CASE, clock({name: 0.5 if name == fastest else 2.0 for name in order}, order))
    assert found.fastest == fastest
    assert str(found).startswith(
        f"{fastest} 0.5 ms a layer, {({*order} - {fastest}).pop()} 2: {fastest}; without fused: "
    )
    assert "it needs a CUDA device" in found.left_out["fused"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda *given: 1.001 * right(*given), "it differs by 1.0e-03 from float64, 1.0e-04 is allowed"),
        (lambda *given: float("nan") * right(*given), "it differs by nan"),
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_backend_that_is_wrong_or_fails_is_left_out_with_its_reason(
    call: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recompute, "__call__", call)
    found = measure(CASE, lambda step, device: 1.0)
    assert found.ms == {"reference": 1.0}
    assert found.fastest == "reference"
    assert found.left_out["recompute"].startswith(words)


@pytest.mark.slow
def test_it_is_measured_as_it_will_run_compiled() -> None:
    found = measure(Case(CASE.shape, 2, compiled=True))
    assert found.ms.keys() == {"recompute", "reference"}
    assert all(ms > 0 for ms in found.ms.values())


def test_the_next_start_measures_nothing(tmp_path: Path) -> None:
    counted = []

    def make(case: Case) -> Measured:
        counted.append(case)
        return Measured({"recompute": 1.0}, {"fused": "it needs a GPU"})

    for case in (CASE, CASE, Case(CASE.shape, images=4), CASE):
        assert remembered(case, make, tmp_path) == make(case)
        counted.pop()
    assert counted == [CASE, Case(CASE.shape, images=4)]
    (tmp_path / "cait_attention.json").write_text("{")
    remembered(CASE, make, tmp_path)
    assert len(counted) == 3


def test_what_is_kept_while_another_case_is_measured_stays(tmp_path: Path) -> None:
    whole, layer = Case(CASE.shape, images=8), Case(CASE.shape, images=4)
    found = Measured({"recompute": 1.0})
    remembered(whole, lambda case: remembered(layer, lambda case: found, tmp_path), tmp_path)
    for case in (whole, layer):
        assert remembered(case, lambda case: pytest.fail("it is measured again"), tmp_path) == found


def test_the_shapes_are_those_that_the_network_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    attend = Backends.attend

    def record(self: Backends, qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.add(Shape("cpu", qkv.dtype, qkv.shape[1], *qkv.shape[3:]))
        return attend(self, qkv, *rest)

    monkeypatch.setattr(Backends, "attend", record)
    for more in ({}, {"class_token_at": 1, "depth_token_only": 0}, {"class_token_at": 0, "depth_token_only": 0}):
        seen.clear()
        network = cait.create_model("xxs24", 16, 10, **FIELDS, **more)
        network(torch.zeros(1, 3, 16, 16))
        assert seen <= shapes(network, "cpu", torch.float32).keys()
    assert not shapes(cait.create_model("xxs24", 16, 10, **FIELDS, attention_backend="reference"), "cpu", torch.float32)
    assert not shapes(cait.create_model("xxs24", 16, 10, **FIELDS, talking_heads=False), "cpu", torch.float32)
    assert not shapes(nn.Linear(2, 2), "cpu", torch.float32)


def run(network: nn.Module, choice: AttentionChoice, told: Any = None, rank: int = 0) -> None:
    """`on_fit_start` of a process that trains `network`; `told` is what process 0 broadcasts."""
    strategy = SimpleNamespace(root_device=torch.device("meta"), broadcast=lambda found: found if rank == 0 else told)
    trainer: Any = SimpleNamespace(
        strategy=strategy,
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
        is_global_zero=rank == 0,
    )
    module: Any = SimpleNamespace(
        model=network, parameters=network.parameters, architecture=SimpleNamespace(compile=False)
    )
    choice.on_fit_start(trainer, module)


def taken(network: Any) -> str:
    return network.blocks[0].attn.backends.choose(*Shape("meta", torch.float32, 4, 2, 8))


def test_a_resumed_run_keeps_what_it_took_although_another_is_faster_now(capsys: pytest.CaptureFixture[str]) -> None:
    data = SimpleNamespace(batch_size=4)
    network = cait.create_model("xxs24", 16, 10, **FIELDS)
    first = AttentionChoice(data, lambda case: Measured({"reference": 1.0, "recompute": 2.0}))
    assert first.state_dict() == {}  # nothing in checkpoints of a CPU
    run(network, first)
    assert taken(network) == "reference"
    assert first.state_dict() == {NAME: "reference"}
    assert capsys.readouterr().out == "attention reference 1 ms a layer, recompute 2: reference\n"

    again = cait.create_model("xxs24", 16, 10, **FIELDS)
    second = AttentionChoice(data, lambda case: pytest.fail("it is measured again"))
    second.load_state_dict(first.state_dict())
    run(again, second)
    assert taken(again) == "reference"
    assert second.state_dict() == first.state_dict()


def test_a_strategy_may_read_the_checkpoint_after_the_start() -> None:
    network = cait.create_model("xxs24", 16, 10, **FIELDS)
    choice = AttentionChoice(SimpleNamespace(batch_size=4), lambda case: Measured({"recompute": 1.0}))
    run(network, choice)
    assert taken(network) == "recompute"
    choice.load_state_dict({NAME: "reference"})
    assert taken(network) == "reference"


@pytest.mark.parametrize("gone", ["fused", "of an extra that is gone"])
def test_what_cannot_run_any_more_is_measured_anew(gone: str) -> None:
    network = cait.create_model("xxs24", 16, 10, **FIELDS)
    choice = AttentionChoice(SimpleNamespace(batch_size=4), lambda case: Measured({"reference": 1.0}))
    choice.load_state_dict({NAME: gone})
    run(network, choice)
    assert taken(network) == "reference"


def test_the_first_process_decides_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    network = cait.create_model("xxs24", 16, 10, **FIELDS)
    choice = AttentionChoice(SimpleNamespace(batch_size=4), lambda case: pytest.fail("process 1 measures"))
    run(network, choice, told=Measured({"reference": 1.0, "recompute": 3.0}), rank=1)
    assert taken(network) == "reference"
    assert capsys.readouterr().out == ""


def test_on_the_cpu_nothing_is_measured() -> None:
    network = cait.create_model("xxs24", 16, 10, **FIELDS)
    choice = AttentionChoice(SimpleNamespace(batch_size=4), lambda case: pytest.fail("it measures"))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    choice.on_fit_start(trainer, SimpleNamespace(model=network))
    assert taken(network) == "recompute"


def compile_run(choice: CompileChoice, compile: Any = "auto", rank: int = 0, told: Any = None) -> Any:
    """`on_fit_start` for a network in float32 on the CPU."""
    network = cait.create_model("xxs24", 16, 10, **FIELDS)
    strategy = SimpleNamespace(root_device=torch.device("cpu"), broadcast=lambda found: found if rank == 0 else told)
    trainer: Any = SimpleNamespace(
        strategy=strategy, precision_plugin=SimpleNamespace(forward_context=nullcontext), is_global_zero=rank == 0
    )
    module = SimpleNamespace(
        model=network, parameters=network.parameters, architecture=NetworkSettings(compile=compile)
    )
    choice.on_fit_start(trainer, module)
    return module


def is_compiled(module: Any) -> bool:
    runs = {block.run is not type(block).body for block in (*module.model.blocks, *module.model.blocks_token_only)}
    assert runs == {module.architecture.compile}  # all blocks, and what comes later is told
    return runs.pop()


def timed(**ms: float) -> Any:
    return lambda case: Measured(ms, part="block", otherwise="plain")


DATA = SimpleNamespace(batch_size=4)


@needs_a_compiler
@pytest.mark.parametrize("fastest", ["plain", "compiled"])
def test_a_network_is_compiled_where_that_is_faster(fastest: str, capsys: pytest.CaptureFixture[str]) -> None:
    ms = {name: 1.0 if name == fastest else 2.0 for name in ("plain", "compiled")}
    choice = CompileChoice(DATA, timed(**ms))
    assert is_compiled(compile_run(choice)) == (fastest == "compiled")
    other = ({*ms} - {fastest}).pop()
    assert capsys.readouterr().out == f"compile   {fastest} 1 ms a block, {other} 2: {fastest}\n"

    again = CompileChoice(DATA, lambda case: pytest.fail("a resumed run measures"))
    again.load_state_dict(choice.state_dict())
    assert is_compiled(compile_run(again)) == (fastest == "compiled")
    assert again.state_dict() == choice.state_dict()

    late = CompileChoice(DATA, timed(**{other: 1.0, fastest: 2.0}))  # a strategy that reads checkpoints later
    module = compile_run(late)
    late.load_state_dict(choice.state_dict())
    assert is_compiled(module) == (fastest == "compiled")


def test_the_first_process_decides_whether_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    choice = CompileChoice(DATA, lambda case: pytest.fail("process 1 measures"))
    assert not is_compiled(compile_run(choice, rank=1, told=Measured({"compiled": 2.0, "plain": 1.0})))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("compile", [True, False])
def test_who_says_whether_to_compile_needs_no_clock(compile: bool) -> None:
    choice = CompileChoice(DATA, lambda case: pytest.fail("it measures"))
    assert compile_run(choice, compile).architecture.compile is compile
    assert choice.state_dict() == {}


@needs_a_compiler
@pytest.mark.slow
def test_a_block_is_timed_as_it_trains_and_the_run_draws_the_same() -> None:
    config = cait.create_model("xxs24", 16, 10, 0.4, **FIELDS).config
    case = BlockCase(config, torch.device("cpu"), 4, torch.float32, torch.float32, nullcontext)
    state = torch.get_rng_state()
    found = block.measure(case)
    assert found.ms.keys() == {"plain", "compiled"}
    assert not found.left_out
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_compiler_a_network_runs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def refuse() -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refuse)
    config = cait.create_model("xxs24", 16, 10, **FIELDS).config
    found = block.measure(BlockCase(config, torch.device("cpu"), 2, torch.float32, torch.float32, nullcontext))
    assert found.fastest == "plain"
    assert "install g++" in found.left_out["compiled"]
