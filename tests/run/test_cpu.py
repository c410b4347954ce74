"""On AMD processors oneDNN multiplies matrices, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import SMALL, Cait
from lightning.pytorch import Callback
from torch import nn

from cait.cli import main
from cait.model.cait import CaiT
from cait.run.cpu import fast_matmul

CPU = torch.device("cpu")
AVX512 = dict(avx512_f=True, avx512_vl=True, avx512_bw=True, avx512_dq=True)
ZEN5 = dict(cpu_name="AMD EPYC", amx_tile=False, **AVX512)
WIDE, NARROW = (SimpleNamespace(pos_embed=torch.zeros(1, 16, width)) for width in (64, 63))
matmul = torch.backends.mkldnn.matmul


class Precision(Callback):
    """Print what a step runs with, and fail if asked to."""

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail

    def on_train_batch_start(self, *_: Any) -> None:
        print("runs with", matmul.fp32_precision, torch.get_num_threads())
        if self.fail:
            raise ZeroDivisionError


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = matmul.fp32_precision
    matmul.fp32_precision = "none"
    yield
    matmul.fp32_precision = before


@pytest.fixture
def zen5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ZEN5)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (ZEN5, "bf16"),
        *((ZEN5 | {part: False}, "none") for part in AVX512),
        (ZEN5 | dict(amx_tile=True), "none"),  # where it would be bfloat16
        (ZEN5 | dict(cpu_name="Intel(R) Xeon(R) Processor"), "none"),
        (dict(architecture="aarch64"), "none"),
    ],
)
def test_it_is_for_amd_processors_with_avx512_alone(
    processor: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    with fast_matmul(WIDE, CPU):
        assert matmul.fp32_precision == expected
    assert matmul.fp32_precision == "none"


@pytest.mark.usefixtures("zen5")
def test_it_is_for_wide_networks_on_the_cpu() -> None:
    other = nn.Module()
    other.pos_embed = nn.Linear(64, 64)  # as timm's XCiT has
    for network, device in [(NARROW, CPU), (WIDE, torch.device("cuda")), (other, CPU), (None, CPU)]:
        with fast_matmul(network, device):
            assert matmul.fp32_precision == "none"


@pytest.mark.usefixtures("zen5")
def test_a_precision_that_somebody_has_set_stays() -> None:
    matmul.fp32_precision = "ieee"
    with fast_matmul(WIDE, CPU):
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("zen5")
def test_all_is_as_before_after_an_error_and_inside_another() -> None:
    with suppress(ZeroDivisionError), fast_matmul(WIDE, CPU):
        with fast_matmul(WIDE, CPU):
            pass
        assert matmul.fp32_precision == "bf16"
        raise ZeroDivisionError
    assert matmul.fp32_precision == "none"
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_stay_in_float32() -> None:
    """bfloat16 is wrong by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, generator=generator) for size in ((512, 384), (384, 96)))
    exact = left.double() @ right.double()
    with fast_matmul(WIDE, CPU):
        if matmul.fp32_precision == "none":
            pytest.skip("this processor keeps to MKL")
        found = left @ right
    assert (found - exact).norm() < 5e-7 * exact.norm()


@pytest.mark.usefixtures("zen5")
@pytest.mark.parametrize(("width", "expected"), [(32, "none"), (64, "bf16")])
def test_a_run_uses_it_and_leaves_all_as_it_was(
    width: int,
    expected: str,
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    step = ["--trainer.fast_dev_run=1", f"--model.fields.embed_dim={width}", "--data.num_workers=0"]
    fit = ["fit", *SMALL, *step, f"--data.root={digits_root}", "--trainer.callbacks+=test_cpu.Precision"]
    main(fit)
    assert f"runs with {expected} 1\n" in capfd.readouterr().out
    assert (matmul.fp32_precision, torch.get_num_threads()) == ("none", before)
    with pytest.raises(ZeroDivisionError):
        main([*fit, "--trainer.callbacks.fail=true"])
    assert (matmul.fp32_precision, torch.get_num_threads()) == ("none", before)


@pytest.mark.usefixtures("zen5")
def test_predict_and_visualize_use_it(
    cait: Cait, digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    few = ["--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--model.fields.embed_dim=64", "--run_name=a"]
    done = cait("fit", *SMALL, *few)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def look(module: nn.Module, _: Any) -> None:
        if isinstance(module, CaiT):
            seen.append(matmul.fp32_precision)

    hook = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        main(["predict", "a", str(digits_root / "val/3/0045.png")])
        assert set(seen) == {"bf16"}
        seen.clear()
        main(["visualize", "a", "--images", str(digits_root / "val/3/0045.png"), "--no_validation"])
        assert set(seen) == {"bf16"}
    finally:
        hook.remove()
    assert "0045.png" in capfd.readouterr().out
    assert matmul.fp32_precision == "none"
