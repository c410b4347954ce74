"""What only a GPU can show; `make bench-gpu` runs it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cait import create_model
from cait.optim import param_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("mode", ["mask", "skip", "subset"])
def test_a_step_does_not_wait_for_the_gpu(mode: str) -> None:
    model = create_model("xxs24", 64, 10, 0.2, depth=3, drop_path_mode=mode).cuda()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(param_groups(model, 0.05), fused=True)
    images, labels = torch.randn(8, 3, 64, 64, device="cuda"), torch.arange(8, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
