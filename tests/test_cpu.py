"""float32 on AMD processors goes through oneDNN, and stays float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from lightning.pytorch import Callback

from cait.cli import main
from cait.cpu import fast_matmul

CPU = torch.device("cpu")
ZEN5 = dict(cpu_name="AMD EPYC", avx512_f=True, avx512_vl=True, avx512_bw=True, avx512_dq=True, amx_tile=False)


class Precision(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        print("precision", torch.get_float32_matmul_precision())


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (ZEN5, "medium"),
        (ZEN5 | dict(cpu_name="AMD EPYC 7763", avx512_f=False), "highest"),
        (ZEN5 | dict(amx_tile=True), "highest"),  # where "medium" would be bfloat16
        (ZEN5 | dict(cpu_name="Intel(R) Xeon(R) Processor"), "highest"),
        (dict(architecture="aarch64"), "highest"),
    ],
)
def test_it_is_for_amd_processors_with_avx512_alone(
    processor: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    with fast_matmul(CPU):
        assert torch.get_float32_matmul_precision() == expected
    assert torch.get_float32_matmul_precision() == "highest"
    with fast_matmul(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_precision_that_somebody_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ZEN5)
    torch.set_float32_matmul_precision("high")
    with fast_matmul(CPU):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "high"


def test_products_are_as_exact_as_before() -> None:
    """On this machine's processor, whichever it is; bfloat16 is wrong by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, generator=generator) for size in ((512, 384), (384, 96)))
    exact = left.double() @ right.double()
    with fast_matmul(CPU):
        found = left @ right
    assert (found - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize(("width", "expected"), [(32, "highest"), (64, "medium")])
def test_a_run_uses_it_where_the_network_is_wide_enough(
    width: int,
    expected: str,
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ZEN5)
    step = ["--trainer.fast_dev_run=1", "--trainer.callbacks+=test_cpu.Precision", "--data.num_workers=0"]
    main(["fit", *SMALL, f"--model.fields.embed_dim={width}", f"--data.root={digits_root}", *step])
    assert f"precision {expected}" in capfd.readouterr().out
    assert torch.get_float32_matmul_precision() == "highest"
