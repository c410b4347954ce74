"""Teachers from files: frozen, with their own size and normalization, and none of the run's own code for their word.

tests/oracle/test_training_parts.py compares the loss with timm's; messages are in tests/cli/golden/train.yaml.
"""

import pytest
import timm
import torch
from modules import loader, module, train
from same import same
from torch.nn.functional import interpolate

from cait.errors import UserError
from cait.train.callbacks import EMA

TEACHER = "test_resnet.r160_in1k"  # a few thousand weights, with batch norm
DINOV3 = "vit_small_patch16_dinov3"


def student_of(path, teacher="", **settings):
    """A student of a run, or of timm's network with the weights at `path`."""
    if not teacher:
        return module(distillation="hard", teacher=str(path), **settings)
    return module(distillation="hard", teacher=teacher, teacher_path=str(path), **settings)


def test_the_teacher_stays_frozen_and_out_of_everything(tmp_path):
    weights = timm.create_model(TEACHER, num_classes=7).state_dict()
    torch.save(weights, tmp_path / "teacher.pth")
    net = student_of(tmp_path / "teacher.pth", TEACHER)
    ema = EMA(decay=0.9)
    train(net, tmp_path / "x.ckpt", callbacks=[ema])
    assert same(net.teacher.network.state_dict(), weights)
    assert not any(layer.training for layer in net.teacher.modules())
    assert not any(parameter.requires_grad for parameter in net.teacher.parameters())
    plain = module()
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == plain.state_dict().keys()
    assert ema.state_dict().keys() == plain.model.state_dict().keys()
    # Lightning moves the module between `setup` and this, and does not know the teacher
    net.to("meta").on_fit_start()
    assert all(tensor.is_meta for tensor in net.teacher.state_dict().values())


def test_a_run_of_ours_is_a_teacher(tmp_path):
    path = tmp_path / "teacher.ckpt"
    teacher = module(img_size=16, mean=(1,) * 3, std=(2,) * 3)
    train(teacher, path, loader(8, img_size=16))
    net = student_of(path)
    train(net)
    images = torch.randn(4, 3, 8, 8)
    mean, std = (torch.tensor(net.hparams[name]).view(3, 1, 1) for name in ("mean", "std"))
    pixels = (images * std + mean - 1) / 2
    larger = interpolate(pixels, size=16, mode="bicubic", antialias=True)
    expected = teacher.model.eval()(larger)
    torch.testing.assert_close(net.teacher(images), expected.detach(), rtol=0, atol=1e-5)


def test_dinov3_has_no_head_so_a_run_starts_from_it(tmp_path):
    """From timm's own files of a small one; rotary positions and register tokens among its parts."""
    fields = dict(depth=2, embed_dim=32, num_heads=2, num_reg_tokens=2, global_pool="token")
    backbone = timm.create_model(DINOV3, **fields)
    timm.models.save_for_hf(backbone, tmp_path, safe_serialization="both")
    path = tmp_path / "model.safetensors"
    settings = dict(img_size=32, weights=str(path), layer_decay=0.7, lr=1e-2)
    run = module(name=f"timm/{DINOV3}", fields=fields, **settings)
    train(run, images=loader(8, img_size=32), callbacks=[EMA(decay=0.5)])
    added = run.model.state_dict().keys() - backbone.state_dict().keys()
    assert added == {"head.weight", "head.bias"}


def test_a_run_of_your_own_network_teaches_one_of_the_same_code(tmp_path):
    """The checkpoint may be someone else's, so the code that it names is not run for its word."""
    path = tmp_path / "run.ckpt"
    own = dict(name="own_parts:Net", fields=None)
    teacher = module(**own)
    train(teacher, path)
    with pytest.raises(UserError, match="own_parts:Net"):
        train(student_of(path))
    student = student_of(path, **own)
    train(student)
    assert same(student.teacher.network.state_dict(), teacher.model.state_dict())


def test_a_teacher_of_a_fixed_size_may_be_built_for_another(tmp_path):
    fields = {"img_size": 96}
    weights = timm.create_model("test_vit", num_classes=7, **fields).state_dict()
    torch.save(weights, tmp_path / "vit.pth")
    student = student_of(tmp_path / "vit.pth", "test_vit", teacher_fields=fields)
    train(student)
    assert student.teacher.img_size == 96
