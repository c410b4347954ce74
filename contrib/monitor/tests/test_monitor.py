"""monitor.csv against plain PyTorch, from the weights and batches of the steps; and the run keeps its bits."""

from collections import defaultdict
from copy import deepcopy

import pytest
import torch
from harness import SMALL, TWO_BLOCKS, beside, ended, over_table, parsed, slow
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, Chosen, images_in, loader, module, precision_of, train, trainer
from networks import needs_a_compiler, needs_ablations, network
from networks import step as one_step
from runs import TWO, assert_same
from same import same
from step_recorder import StepRecorder
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import cross_entropy

from cait.guards.nonfinite import NonFiniteGuard
from cait.train.callbacks import StepSeed
from cait.train.module import CaiTModule
from contrib.monitor.branches import measure, watch_gradients
from contrib.monitor.callback import Monitor

TABLE = beside(__file__)


def figures(folder):
    """monitor.csv by step."""
    steps = defaultdict[int, dict](dict)
    for row in parsed(folder / "monitor.csv"):
        key = (int(row["layer"]), row["part"], row["name"])
        steps[int(row["step"])][key] = float(row["value"])
    return steps


# The figures in plain PyTorch


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
    for number, part, name, gamma, norm, layer in TABLE["branches"]:
        block = model.get_submodule(name)
        if layer == "attn":
            x = entering[number - 1]
        tokens = torch.cat((x, patches), dim=1) if part == "ca" else x
        y = getattr(block, layer)(normed(getattr(block, norm), tokens))
        factor = getattr(block, gamma)
        if factor is not None:
            y = factor * y
        stream = x.float().flatten(1)
        ratios = y.float().flatten(1).norm(dim=1) / stream.norm(dim=1)
        measured.append(torch.stack([ratios.mean(), stream.square().mean()]))
        x = y if getattr(model.config, "residual", "") == "none" else x + y
    return torch.stack(measured)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def expected(model, folder, step, accumulated=1, precision="32"):
    """The figures of a step, from what `StepRecorder` wrote of it; those that are not finite are left out."""
    is_half = precision == "16-mixed"
    scale = 2.0**16 if is_half else 1.0
    mixed = torch.autocast("cpu", torch.float16 if is_half else torch.bfloat16, precision != "32")
    model = deepcopy(model)
    paths = []
    for batch in range(step * accumulated, (step + 1) * accumulated):
        paths += folder.glob(f"*-{batch}.pt")
    measured = []
    squares = torch.zeros(4, dtype=torch.float64)
    for path in paths:
        record = torch.load(path, weights_only=True)
        model.load_state_dict(record["weights"])
        with mixed:
            measured.append(activations(model, record["images"]))
        torch.set_rng_state(record["generator"])
        with mixed:
            entering, _, logits = forward(model.train(), record["images"])
        for tokens in entering:
            tokens.retain_grad()
        loss = cross_entropy(logits.float(), record["targets"], label_smoothing=0.1)
        (loss * scale / len(paths)).backward()
        squares += torch.stack([flat([tokens.grad / scale]).norm() ** 2 for tokens in entering])
    values = {}
    for number, square in enumerate(squares, start=1):
        block = "ca_block" if number > 2 else "block"
        values[number, block, "input_grad_norm"] = square.sqrt()
    parameters = dict(model.named_parameters())
    means = torch.stack(measured).mean(dim=0)
    for branch, (ratio, square) in zip(TABLE["branches"], means, strict=True):
        number, part, block, *members = branch
        prefixes = tuple(f"{block}.{member}" for member in members)
        names = [name for name in parameters if name.startswith(prefixes)]
        gradient = flat(parameters[name].grad for name in names) / scale
        before = flat(record["weights"][name] for name in names)
        update = flat(record["after"][name] for name in names) - before
        of_branch = {
            "branch_ratio": ratio,
            "activation_rms": square.sqrt(),
            "grad_norm": gradient.norm(),
            "update_cosine": -gradient @ update / gradient.norm() / update.norm(),
            "update_ratio": update.norm() / before.norm(),
        }
        gamma = record["weights"].get(prefixes[0])
        if gamma is not None:
            for name, share in TABLE["quantiles"].items():
                of_branch[name] = gamma.abs().quantile(share)
        values |= {(number, part, name): value for name, value in of_branch.items()}
    return {key: value.item() for key, value in values.items() if value.isfinite()}


def assert_close(ours, theirs, rel=1e-6):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        # The rounding of a cosine is that of 1, however near to 0 it is: processors differ by so much.
        rounding = 2 * torch.finfo(torch.float32).eps if "cosine" in key[-1] else 1e-12
        assert ours[key] == pytest.approx(value, rel=rel, abs=rounding), key


def net_of(fields=FIELDS, **settings):
    return module(lr=1e-2, warmup_epochs=0, fields=FIELDS | fields, **settings)


@over_table(__file__, "watched", settings={}, fields={}, accumulated=1, precision="32")
def test_figures_are_those_of_plain_pytorch(settings, fields, accumulated, precision, tmp_path):
    net = net_of(fields, **settings)
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
    train(net, callbacks=callbacks, default_root_dir=tmp_path)
    measured = figures(tmp_path)[2]
    assert {name for _, _, name in measured} == {"grad_norm", "update_cosine", "update_ratio"}
    parts = [part for _, part, name in measured if name == "grad_norm"]
    assert parts == ["patch_embed", "blocks.0", "blocks.1", "norm", "head"]
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
        callbacks = [StepSeed(0), *watch]
        fit = train(net, callbacks=callbacks, default_root_dir=tmp_path, precision=precision)
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
    if guarded:
        callbacks.reverse()
    net = module(Chosen, optimizer=optimizer)
    train(net, callbacks=callbacks, default_root_dir=tmp_path)
    measured = figures(tmp_path)
    gradient = (1, "ffn", "grad_norm")
    assert [step for step in measured if gradient in measured[step]] == [0, 1, 3, 4, 5]
    assert all((1, "ffn", "branch_ratio") in measured[step] for step in range(6))
    update = (2, "ffn", "update_ratio")
    assert measured[2].get(update, 0) == 0 < measured[3][update]


WATCH = "--trainer.callbacks+=contrib.monitor.callback.Monitor"


@pytest.mark.usefixtures("cait")
def test_the_command_line_watches(trained, tmp_path):
    words = f"--config={trained}/config.yaml --trainer.default_root_dir=logs {WATCH}"
    run = ended(tmp_path, "on", [*words.split(), "--trainer.callbacks.every_n_steps=5"])
    assert_same(run, trained)
    measured = figures(run)
    assert [*measured] == [4]
    (scalar,) = EventAccumulator(str(run)).Reload().Scalars("branch_ratio/sa.02")
    assert scalar.step == 4
    assert scalar.value == pytest.approx(measured[4][2, "sa", "branch_ratio"], rel=1e-6)
    assert not (trained / "monitor.csv").exists()


ON_TWO = f"""
    --trainer.max_epochs=2 --trainer.limit_train_batches=5 --data.batch_size=32
    --model.drop_path_rate=0.2 --ema.decay=0.9
    {WATCH} --trainer.callbacks.every_n_steps=3
    --trainer.callbacks+=contrib.monitor.tests.step_recorder.StepRecorder --trainer.callbacks.folder=steps
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cait")
def test_on_two_processes_the_figures_are_those_of_the_whole_step(tmp_path):
    run = ended(tmp_path, "two", [*SMALL, TWO_BLOCKS, *TWO, *ON_TWO.split()])
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
    gradients = {}
    eager = {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        measure(model, images)
        hooks = watch_gradients(model, gradients.__setitem__)
        assert same(one_step(model, images, 0), before)
        for hook in hooks:
            hook.remove()
        one_step(model, images, 0)
    assert len(gradients) == 6
    plain = network()
    watch_gradients(plain, eager.__setitem__)
    one_step(plain, images, 0)
    torch.testing.assert_close(gradients, eager, rtol=1e-4, atol=1e-7)
