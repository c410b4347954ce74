"""monitor.csv against plain PyTorch, from the weights and batches of the steps; and the run keeps its bits."""

import csv
from copy import deepcopy
from typing import Any

import pytest
import torch
from harness import SMALL, rows, slow
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, Chosen, images_in, loader, module, precision_of, trainer
from networks import needs_a_compiler, needs_ablations, network
from networks import step as one_step
from runs import TWO, assert_same
from same import same
from step_recorder import StepRecorder
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cait.guards.nonfinite import NonFiniteGuard
from cait.train.callbacks import StepSeed
from cait.train.module import CaiTModule
from contrib.monitor.branches import measure, watch_gradients
from contrib.monitor.callback import Monitor

Figures = dict[tuple[int, str, str], float]
QUANTILES = ("gamma_min", "gamma_q25", "gamma_median", "gamma_q75", "gamma_max")


def figures(folder):
    """monitor.csv by step."""
    steps: dict[int, Figures] = {}
    with (folder / "monitor.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            step = steps.setdefault(int(row["step"]), {})
            key = int(row["layer"]), row["part"], row["name"]
            assert key not in step
            step[key] = float(row["value"])
    return steps


# The figures in plain PyTorch


BRANCHES = [
    (1, "sa", "blocks.0", 1, "attn"),
    (1, "ffn", "blocks.0", 2, "mlp"),
    (2, "sa", "blocks.1", 1, "attn"),
    (2, "ffn", "blocks.1", 2, "mlp"),
    (3, "ca", "blocks_token_only.0", 1, "attn"),
    (3, "ca_ffn", "blocks_token_only.0", 2, "mlp"),
    (4, "ca", "blocks_token_only.1", 1, "attn"),
    (4, "ca_ffn", "blocks_token_only.1", 2, "mlp"),
]
"""Of a network of two blocks and two of class attention: layer, part, block, number in the block and module."""


def normed(norm, x):
    """Over the channels of tokens [B, N, d]; a batch norm takes [B, d, N]."""
    if isinstance(norm, nn.BatchNorm1d):
        return norm(x.transpose(1, 2)).transpose(1, 2)
    return norm(x)


def forward(model, images):
    """The tokens that enter each block, the patches that class attention reads, and the logits."""
    x = model.patch_embed(images) + model.pos_embed
    entering = []
    for block in model.blocks:
        entering.append(x)
        x = block(x)
    cls = model.cls_token.repeat(len(x), 1, 1)
    for block in model.blocks_token_only:
        entering.append(cls)
        cls = block(x, cls)
    tokens = normed(model.norm, torch.cat((cls, x), dim=1))
    return entering, x, model.head(tokens[:, 0])


@torch.no_grad()
def activations(model, images):
    """‖γ·f(x)‖ / ‖x‖ and the mean square of x for each branch, [branches, 2], without stochastic depth."""
    for layer in model.eval().modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.train()  # on the statistics of the batch
    entering, patches, _ = forward(model, images)
    measured = []
    for number, part, name, nth, layer in BRANCHES:
        block = model.get_submodule(name)
        if nth == 1:
            x = entering[number - 1]
        tokens = torch.cat((x, patches), dim=1) if part == "ca" else x
        gamma = getattr(block, f"gamma_{nth}")
        y = getattr(block, layer)(normed(getattr(block, f"norm{nth}"), tokens))
        y = y if gamma is None else gamma * y
        ratios = y.float().flatten(1).norm(dim=1) / x.float().flatten(1).norm(dim=1)
        measured.append(torch.stack([ratios.mean(), x.float().square().mean()]))
        x = y if getattr(model.config, "residual", "") == "none" else x + y
    return torch.stack(measured)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def expected(model, folder, step, accumulated=1, precision="32"):
    """The figures of a step, from what `StepRecorder` wrote of it; those that are not finite are left out."""
    scale = 2.0**16 if precision == "16-mixed" else 1.0
    half = torch.float16 if precision == "16-mixed" else torch.bfloat16
    model = deepcopy(model)
    model.zero_grad()
    batches = range(step * accumulated, (step + 1) * accumulated)
    paths = [path for batch in batches for path in sorted(folder.glob(f"*-{batch}.pt"))]
    measured = []
    squares = torch.zeros(4)
    for path in paths:
        record = torch.load(path, weights_only=True)
        model.load_state_dict(record["weights"])
        with torch.autocast("cpu", half, precision != "32"):
            measured.append(activations(model, record["images"]))
        torch.set_rng_state(record["generator"])
        with torch.autocast("cpu", half, precision != "32"):
            entering, _, logits = forward(model.train(), record["images"])
        for tokens in entering:
            tokens.retain_grad()
        loss = cross_entropy(logits.float(), record["targets"], label_smoothing=0.1)
        (loss * scale / len(paths)).backward()
        squares += torch.tensor([(x.grad / scale).double().square().sum() for x in entering])
    values = {
        (number + 1, "ca_block" if number > 1 else "block", "input_grad_norm"): square.sqrt()
        for number, square in enumerate(squares)
    }
    parameters = dict(model.named_parameters())
    means = torch.stack(measured).mean(dim=0)
    for (number, part, block, nth, layer), (ratio, square) in zip(BRANCHES, means, strict=True):
        prefixes = tuple(f"{block}.{name}" for name in (f"gamma_{nth}", f"norm{nth}.", f"{layer}."))
        names = [name for name in parameters if name.startswith(prefixes)]
        gradient = flat(parameters[name].grad for name in names) / scale
        before = flat(record["weights"][name] for name in names)
        update = flat(record["after"][name] for name in names) - before
        named = dict(
            branch_ratio=ratio,
            activation_rms=square.sqrt(),
            grad_norm=gradient.norm(),
            update_cosine=-gradient @ update / gradient.norm() / update.norm(),
            update_ratio=update.norm() / before.norm(),
        )
        gamma = record["weights"].get(prefixes[0])
        if gamma is not None:
            quantiles = gamma.abs().quantile(torch.tensor([0, 0.25, 0.5, 0.75, 1]))
            named |= zip(QUANTILES, quantiles, strict=True)
        values |= {(number, part, name): value for name, value in named.items()}
    return {key: value.item() for key, value in values.items() if value.isfinite()}


def assert_close(ours, theirs, rel=1e-6):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        # The rounding of a cosine is that of 1, however near to 0 it is: processors differ by so much.
        rounding = 2 * torch.finfo(torch.float32).eps if "cosine" in key[-1] else 1e-12
        assert ours[key] == pytest.approx(value, rel=rel, abs=rounding), key


CASES: dict[str, dict[str, Any]] = {
    "mask": dict(drop_path_rate=0.4, fields=dict(drop_path_mode="mask")),
    "skip": dict(drop_path_rate=0.4, fields=dict(drop_path_mode="skip")),
    "checkpointed": dict(drop_path_rate=0.4, grad_checkpointing=True),
    "accumulated": dict(drop_path_rate=0.4),
    "scalar": dict(fields=dict(residual="scalar")),
    "fixup": dict(fields=dict(residual="fixup")),
    "plain": dict(fields=dict(residual="plain")),
    "none": dict(fields=dict(residual="none")),
    "batchnorm": dict(fields=dict(norm="batchnorm")),
    "sgd": dict(optimizer="sgd", optimizer_args=dict(momentum=0.9)),
    "16-mixed": dict(drop_path_rate=0.4),
    "bf16-mixed": dict(drop_path_rate=0.4),
}
ABLATED = ("scalar", "fixup", "plain", "none", "batchnorm")
# The others have the network's own code in common with one of these.
QUICK = ("skip", "checkpointed", "accumulated", "fixup", "batchnorm", "bf16-mixed")


def net_of(**settings):
    fields = FIELDS | settings.pop("fields", {})
    return module(lr=1e-2, warmup_epochs=0, fields=fields, **settings)


@pytest.mark.parametrize("case", [*QUICK, *slow(*(CASES.keys() - {*QUICK}))])
def test_figures_are_those_of_plain_pytorch(case, tmp_path):
    if case in ABLATED:
        pytest.importorskip("cait.extras.paper")
    accumulated = 2 if case == "accumulated" else 1
    precision = case if "mixed" in case else "32"
    net = net_of(**CASES[case])
    steps = tmp_path / "steps"
    fit = trainer(
        callbacks=[Monitor(3), StepRecorder(str(steps))],
        default_root_dir=tmp_path,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.05,
        **precision_of(precision),
    )
    torch.manual_seed(1)
    fit.fit(net, loader(24 * accumulated))
    measured = figures(tmp_path)
    assert sorted(measured) == [2, 5]
    rel = 1e-6 if precision == "32" else 1e-2  # the branch by hand rounds γ · f(x) elsewhere
    for step, ours in measured.items():
        assert_close(ours, expected(net.model, steps, step, accumulated, precision), rel)


def test_another_network_is_watched_by_its_modules(tmp_path):
    norms = []

    def note(fit, net, optimizer):
        norms.append(flat(weight.grad for weight in net.model.blocks[1].parameters()).norm())

    fields = dict(patch_size=4, depth=2, embed_dim=24, num_heads=2)
    net = module(name="timm/vit_tiny_patch16_224", fields=fields)
    callbacks = [Monitor(3), LambdaCallback(on_before_optimizer_step=note)]
    trainer(callbacks=callbacks, default_root_dir=tmp_path, max_epochs=1).fit(net, loader())
    measured = figures(tmp_path)[2]
    layers = [(number, part) for number, part, name in measured if name == "grad_norm"]
    parts = ["patch_embed", "blocks.0", "blocks.1", "norm", "head"]
    assert layers == [*enumerate(parts, start=1)]
    assert {name for _, _, name in measured} == {"grad_norm", "update_cosine", "update_ratio"}
    assert measured[3, "blocks.1", "grad_norm"] == pytest.approx(norms[2].item(), rel=1e-6)


# The run


@needs_ablations
@pytest.mark.parametrize("mode", ["mask", "skip"])
@pytest.mark.parametrize("precision", ["32", *slow("bf16-mixed")])
def test_a_watched_run_keeps_its_bits(mode, precision, tmp_path):
    ends = []
    for watch in ([], [Monitor(2)]):
        torch.manual_seed(0)
        net = net_of(drop_path_rate=0.4, fields=dict(drop_path_mode=mode, norm="batchnorm"))
        settings: dict[str, Any] = dict(precision=precision, max_epochs=1)
        fit = trainer(callbacks=[StepSeed(0), *watch], default_root_dir=tmp_path, **settings)
        fit.fit(net, loader())
        ends.append([net.model.state_dict(), fit.optimizers[0].state_dict()["state"]])
        assert not any(block._forward_pre_hooks for block in net.model.blocks)
    assert same(*ends)
    assert sorted(figures(tmp_path)) == [1, 3, 5]


def test_a_run_resumed_after_any_step_writes_the_same_file(tmp_path, digits_root):
    def fit(folder, resumed=None):
        def save(fitted, *_):
            fitted.save_checkpoint(folder / f"{fitted.global_step}.ckpt")

        callbacks = [StepSeed(0), Monitor(3), LambdaCallback(on_train_batch_end=save)]
        limits = dict(limit_train_batches=4, limit_val_batches=0)
        data = images_in(digits_root, img_size=8, batch_size=16, repeats=1)
        net = net_of(num_classes=10, drop_path_rate=0.4)
        fitted = trainer(callbacks=callbacks, default_root_dir=folder, **limits)
        fitted.fit(net, data, ckpt_path=resumed)
        return (folder / "monitor.csv").read_text()

    torch.manual_seed(0)
    whole = fit(tmp_path)
    assert sorted(figures(tmp_path)) == [2, 5]
    for step in range(1, 8):
        cut = tmp_path / f"cut-{step}"
        cut.mkdir()
        # The run went on a little after the checkpoint, and the kill tore a row.
        (cut / "monitor.csv").write_text(whole + "\0\0,1,sa\n8,1,sa,grad_no")
        assert fit(cut, tmp_path / f"{step}.ckpt") == whole, step


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("optimizer", ["fused AdamW", "SGD"])
def test_a_step_that_is_skipped_has_no_gradient_to_show(optimizer, guarded, tmp_path):
    def spoil(fit, net):
        if fit.global_step == 2:
            net.model.blocks[0].mlp.fc1.weight.grad[0, 0] = float("nan")

    callbacks = [Monitor(1), LambdaCallback(on_after_backward=spoil), NonFiniteGuard(tmp_path, 10)]
    order = callbacks[::-1] if guarded else callbacks
    net = Chosen(optimizer, img_size=8, num_classes=7, fields=FIELDS, lr_base_size=None)
    trainer(callbacks=order, default_root_dir=tmp_path, max_epochs=1).fit(net, loader())
    measured = figures(tmp_path)
    for step in range(6):
        names = [name for *branch, name in measured[step] if branch == [1, "ffn"]]
        assert "branch_ratio" in names
        assert ("grad_norm" in names) == (step != 2)
    update = (2, "ffn", "update_ratio")
    assert measured[2].get(update, 0) == 0 < measured[3][update]


WATCH = "--trainer.callbacks+=contrib.monitor.callback.Monitor"


def test_the_command_line_watches(trained, cait, tmp_path):
    again = [f"--config={trained}/config.yaml", "--trainer.default_root_dir=logs", "--run_name=on"]
    done = cait("fit", *again, WATCH, "--trainer.callbacks.every_n_steps=5")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "logs/on"
    assert_same(run, trained)
    measured = figures(run)
    assert [*measured] == [int(row["step"]) for row in rows(run) if row["train/loss"]] == [4]
    (scalar,) = EventAccumulator(str(run)).Reload().Scalars("branch_ratio/sa.02")
    assert scalar.step == 4
    assert scalar.value == pytest.approx(measured[4][2, "sa", "branch_ratio"], rel=1e-6)
    assert not (trained / "monitor.csv").exists()


@pytest.mark.slow
def test_on_two_processes_the_figures_are_those_of_the_whole_step(cait, tmp_path):
    recipe = [
        *SMALL,
        *TWO,
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=5",
        "--data.batch_size=32",
        "--model.drop_path_rate=0.2",
        "--ema.decay=0.9",
        WATCH,
        "--trainer.callbacks.every_n_steps=3",
        "--trainer.callbacks+=contrib.monitor.tests.step_recorder.StepRecorder",
        f"--trainer.callbacks.folder={tmp_path / 'steps'}",
    ]
    done = cait("fit", *recipe, "--run_name=two")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "logs/two"
    net = CaiTModule.load_from_checkpoint(run / "checkpoints/last.ckpt", map_location="cpu")
    measured = figures(run)
    assert sorted(measured) == [2, 5, 8]
    for step, ours in measured.items():
        assert_close(ours, expected(net.model, tmp_path / "steps", step))


@needs_a_compiler
@pytest.mark.slow
def test_watching_compiled_blocks_compiles_nothing_again():
    torch._dynamo.reset()
    images = torch.randn(16, 3, 32, 32)
    model = network()
    model.compile_blocks()
    before = one_step(model, images, 0)
    gradients: dict[int, Tensor] = {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert len(measure(model, images)) == 12
        hooks = watch_gradients(model, gradients.__setitem__)
        assert same(one_step(model, images, 0), before)
        for hook in hooks:
            hook.remove()
        one_step(model, images, 0)
    assert sorted(gradients) == list(range(6))
    eager: dict[int, Tensor] = {}
    plain = network()
    watch_gradients(plain, eager.__setitem__)
    one_step(plain, images, 0)
    torch.testing.assert_close(gradients, eager, rtol=1e-4, atol=1e-7)
