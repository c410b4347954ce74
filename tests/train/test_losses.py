"""The losses of labels and of a teacher's judgment against timm's and torch's, with a real teacher from a file."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from modules import loader, module, trainer
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy
from timm.loss import SoftTargetCrossEntropy
from timm.task import DistillationTeacher, TokenDistillationTask
from token_head import TokenHead

from cait.errors import UserError
from cait.train.callbacks import EMA
from cait.train.losses import LossSettings
from cait.train.teacher import Teacher

B, C = 8, 7


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(B, C, requires_grad=True)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, logits: torch.Tensor) -> None:
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*gradients)


def test_bce_of_mixed_images_counts_both_classes_in_full(logits: torch.Tensor) -> None:
    mixing = Mixup(mixup_alpha=0.8, label_smoothing=0.0, num_classes=C)
    _, targets = mixing(torch.zeros(B, 3, 8, 8), torch.arange(B) % C)
    assert ((targets > 0) & (targets < 1)).any()
    theirs = TimmBinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)
    assert_same(
        LossSettings("bce", label_smoothing=0.0).build_loss()(logits, targets),
        theirs(logits, targets),
        logits,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_of_labels_is_timms(smoothing: float, logits: torch.Tensor) -> None:
    labels = torch.arange(B) % C
    ours = LossSettings("bce", smoothing).build_loss()(logits, labels)
    assert_same(ours, TimmBinaryCrossEntropy(smoothing=smoothing)(logits, labels), logits)


def test_one_of_your_own(logits: torch.Tensor) -> None:
    labels = torch.arange(B) % C
    ours = LossSettings("torch.nn:MultiMarginLoss").build_loss()(logits, labels)
    assert_same(ours, torch.nn.functional.multi_margin_loss(logits, labels), logits)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("focal", "unknown loss 'focal'; choose cross_entropy, bce or package.module:factory"),
        ("torch.nn:FocalLoss", "cannot import torch.nn:FocalLoss: torch.nn has no 'FocalLoss'"),
    ],
)
def test_what_is_no_loss_is_told_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LossSettings(name).build_loss()


def test_a_loss_that_does_not_take_the_targets_is_told() -> None:
    with pytest.raises(
        UserError, match=r"the loss torch.nn:BCEWithLogitsLoss fails: ValueError: Target size"
    ):
        trainer(max_epochs=1).fit(module(loss="torch.nn:BCEWithLogitsLoss"), loader())


def made() -> object:
    return lambda logits, targets: MADE[0]


MADE = [1.0, np.float32(1), torch.ones(2)]


def test_a_loss_that_is_no_number_is_told() -> None:
    for kind in ("float", "float32", r"\[2\]"):
        with pytest.raises(
            UserError,
            match=f"the loss .*:made fails: TypeError: it must return a tensor of one number, not {kind}",
        ):
            trainer(max_epochs=1).fit(module(loss=f"{__name__}:made"), loader())
        MADE.pop(0)


TEACHER = "test_resnet.r160_in1k"  # a few thousand weights, with batch norm and a normalization of its own
STUDENT_MEAN, STUDENT_STD = (0.1, 0.2, 0.3), (0.3, 0.2, 0.1)


@pytest.fixture(scope="module")
def teacher_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    network = timm.create_model(TEACHER, num_classes=7)
    for buffer in network.buffers():  # a batch norm that has seen data
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    path = tmp_path_factory.mktemp("teacher") / "teacher.pth"
    torch.save(network.state_dict(), path)
    return path


def distilled(path: Path, **settings: object):
    common: dict = dict(
        distillation="hard", teacher=TEACHER, teacher_path=str(path), drop_path_rate=0.0
    )
    return module(**(common | dict(mean=STUDENT_MEAN, std=STUDENT_STD) | settings))


@pytest.mark.parametrize(("kind", "alpha", "tau"), [("hard", 0.5, 1.0), ("soft", 0.3, 3.0)])
def test_loss_and_gradients_are_those_of_timms_task(
    kind: str, alpha: float, tau: float, teacher_file: Path
) -> None:
    settings: dict = dict(distillation=kind, distillation_alpha=alpha, distillation_tau=tau)
    net = distilled(teacher_file, **settings, lr=1e-2)
    fit = trainer(max_epochs=1)
    fit.fit(net, loader())
    task = TokenDistillationTask(
        TokenHead(net.model, 7, STUDENT_MEAN, STUDENT_STD),
        DistillationTeacher(TEACHER, num_classes=7, pretrained_path=str(teacher_file)),
        criterion=SoftTargetCrossEntropy(),
        distill_type=kind,
        task_loss_weight=1 - alpha,
        temperature=tau,
    )
    assert not torch.equal(task.teacher.mean_kd.flatten(), torch.tensor(STUDENT_MEAN))
    net.log_dict = lambda *args, **kwargs: None  # it needs a running loop
    torch.manual_seed(0)
    images, targets = torch.randn(6, 3, 8, 8), torch.rand(6, 7).softmax(dim=1)
    smoothed = 0.9 * targets + 0.1 / 7
    gradients = []
    losses = (net.training_step((images, targets), 0), task(images, smoothed)["loss"])
    for loss in losses:
        net.model.zero_grad()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in net.model.parameters()])
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_teacher_stays_frozen_and_out_of_everything(teacher_file: Path, tmp_path: Path) -> None:
    net = distilled(teacher_file)
    ema = EMA(decay=0.9)
    fit = trainer(callbacks=[ema])
    fit.fit(net, loader(), loader(8))
    assert isinstance(net.teacher, Teacher)
    before = torch.load(teacher_file)
    after = net.teacher.network.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not any(part.training for part in net.teacher.modules())
    assert not any(parameter.requires_grad for parameter in net.teacher.parameters())
    fit.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    plain = module(drop_path_rate=0.0)
    assert checkpoint["state_dict"].keys() == plain.state_dict().keys()
    assert ema.state_dict().keys() == plain.model.state_dict().keys()
    assert sum(len(group["params"]) for group in fit.optimizers[0].param_groups) == len(
        list(plain.parameters())
    )
    # Lightning moves the module between `setup` and this, and does not know the teacher
    net.to("meta").on_fit_start()
    assert {tensor.device.type for tensor in net.teacher.state_dict().values()} == {"meta"}


def test_a_run_of_ours_is_a_teacher(tmp_path: Path) -> None:
    first = trainer(max_epochs=1)
    first.fit(teacher := module(img_size=16, mean=(0.2,) * 3), loader(8, img_size=16))
    first.save_checkpoint(tmp_path / "teacher.ckpt")
    net = module(distillation="soft", teacher=str(tmp_path / "teacher.ckpt"))
    trainer(max_epochs=1).fit(net, loader())
    assert isinstance(net.teacher, Teacher)
    images = torch.randn(4, 3, 8, 8)
    mean, std = (torch.tensor(net.hparams[name]).view(3, 1, 1) for name in ("mean", "std"))
    larger = torch.nn.functional.interpolate(
        (images * std + mean - 0.2) / std, size=16, mode="bicubic", antialias=True
    )
    with torch.no_grad():
        assert torch.allclose(net.teacher(images), teacher.model.eval()(larger), atol=1e-5)


DINOV3 = "vit_small_patch16_dinov3"


def test_dinov3_has_no_head_so_a_run_starts_from_it(tmp_path: Path) -> None:
    """From timm's own files of a small one; rotary positions and register tokens among its parts."""
    fields: dict = dict(depth=2, embed_dim=32, num_heads=2, num_reg_tokens=2, global_pool="token")
    torch.manual_seed(0)
    backbone = timm.create_model(DINOV3, **fields)
    timm.models.save_for_hf(backbone, tmp_path / "hub", safe_serialization="both")
    file = str(tmp_path / "hub/model.safetensors")
    run = module(
        name=f"timm/{DINOV3}", img_size=32, fields=fields, weights=file, layer_decay=0.7, lr=1e-2
    )
    trainer(max_epochs=1, callbacks=[EMA(decay=0.5)]).fit(
        run, loader(8, img_size=32), loader(8, img_size=32)
    )
    assert run.model.state_dict().keys() - backbone.state_dict().keys() == {
        "head.weight",
        "head.bias",
    }
    headless = module(
        distillation="hard",
        teacher=DINOV3,
        teacher_path=file,
        teacher_fields=fields | dict(num_classes=0),
    )
    with pytest.raises(UserError, match="knows 0 classes, the data has"):
        trainer(max_epochs=1).fit(headless, loader())


def test_a_run_of_your_own_network_teaches_one_of_the_same_code(tmp_path: Path) -> None:
    """The checkpoint may be someone else's, so the code that it names is not run for its word."""
    name, fit = "own_parts:Net", trainer(max_epochs=1)
    fit.fit(module(name=name, fields=None), loader())
    fit.save_checkpoint(path := str(tmp_path / "run.ckpt"))
    with pytest.raises(UserError, match=f"is code, {name}, and of no run of yours"):
        trainer(max_epochs=1).fit(module(distillation="hard", teacher=path), loader())
    student = module(name=name, fields=None, distillation="hard", teacher=path)
    trainer(max_epochs=1).fit(student, loader())
    own = {
        key.removeprefix("model."): value
        for key, value in fit.lightning_module.state_dict().items()
    }
    assert all(
        torch.equal(value, own[key]) for key, value in student.teacher.network.state_dict().items()
    )


def test_a_teacher_of_a_fixed_size_may_be_built_for_another(tmp_path: Path) -> None:
    torch.save(
        timm.create_model("test_vit", num_classes=7, img_size=96).state_dict(),
        path := tmp_path / "vit.pth",
    )
    student = distilled(path, teacher="test_vit", teacher_fields={"img_size": 96})
    trainer(max_epochs=1).fit(student, loader())
    assert student.teacher.img_size == 96


def test_unusable_teachers_are_told(teacher_file: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.ckpt").write_bytes(b"PK\x03\x04")
    torch.save({"state_dict": {}, "global_step": 1}, tmp_path / "other.ckpt")
    first = trainer(max_epochs=1)
    first.fit(module(), loader())
    first.save_checkpoint(tmp_path / "seven.ckpt")
    for settings, words in [
        (dict(teacher="resnet_of_nobody"), "resnet_of_nobody cannot be loaded"),
        (dict(teacher_path=str(tmp_path / "none.pth")), "none.pth: FileNotFoundError"),
        (dict(teacher=str(tmp_path / "torn.ckpt")), "not a whole checkpoint"),
        (
            dict(teacher=str(tmp_path / "other.ckpt")),
            r"other.ckpt: hyper_parameters.\w+ cannot be used: it is missing",
        ),
        (
            dict(teacher=str(tmp_path / "seven.ckpt"), num_classes=9),
            "knows 7 classes, the data has 9",
        ),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            trainer(max_epochs=1).fit(distilled(teacher_file, **settings), loader())
        assert "\n" not in str(caught.value)
