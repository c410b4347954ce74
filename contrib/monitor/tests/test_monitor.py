"""monitor.csv against plain PyTorch, from the weights and batches of the steps; and the run keeps its bits."""

import csv
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from harness import SMALL, Cait, slow
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, Chosen, loader, module, precision_of, trainer
from networks import needs_a_compiler, needs_ablations, network
from networks import step as one_step
from recorder import StepRecorder
from runs import TWO, assert_same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard
from cait.model.cait import CaiT
from cait.train.callbacks import StepSeed
from cait.train.module import CaiTModule
from contrib.monitor import branches as branches_module
from contrib.monitor.callback import Monitor

Figures = dict[tuple[int, str, str], float]

WATCH = "--trainer.callbacks+=contrib.monitor.callback.Monitor"


def figures(folder: Path) -> dict[int, Figures]:
    """monitor.csv by step."""
    with (folder / "monitor.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[int, Figures] = {}
    for row in rows:
        key = int(row["layer"]), row["part"], row["name"]
        assert key not in found.setdefault(int(row["step"]), {})
        found[int(row["step"])][key] = float(row["value"])
    return found


def norm(x: Tensor) -> float:
    return x.double().square().sum().sqrt().item()


def cosine(a: Tensor, b: Tensor) -> float:
    """NaN where a vector is 0."""
    return (a @ b / a.norm() / b.norm()).item()


def flat(model: CaiT, prefixes: tuple[str, ...], gradient: bool = False) -> Tensor:
    chosen = [weight for name, weight in model.named_parameters() if name.startswith(prefixes)]
    assert chosen
    return torch.cat(
        [(weight.grad if gradient else weight).detach().flatten() for weight in chosen]
    ).double()


def prefixes(model: CaiT) -> dict[tuple[int, str], tuple[str, ...]]:
    """The names of each branch's weights."""
    found = {}
    for kind, parts, first in (
        ("blocks", ("sa", "ffn"), 1),
        ("blocks_token_only", ("ca", "ca_ffn"), 3),
    ):
        for i in range(2):
            for number, (part, layer) in enumerate(
                zip(parts, ("attn", "mlp"), strict=True), start=1
            ):
                names = (f"gamma_{number}", f"norm{number}.", f"{layer}.")
                found[first + i, part] = tuple(f"{kind}.{i}.{name}" for name in names)
    return found


def gradients(
    model: CaiT, images: Tensor, targets: Tensor, smoothing: float, factor: float
) -> list[Tensor]:
    """Add those of a batch to the weights'; return those of the tokens that enter each block, [B, ...] each."""
    x = model.patch_embed(images) + model.pos_embed
    entering = []
    for block in model.blocks:
        x.retain_grad()
        entering.append(x)
        x = block(x)
    cls = model.cls_token.repeat(len(x), 1, 1)
    for block in model.blocks_token_only:
        cls.retain_grad()
        entering.append(cls)
        cls = block(x, cls)
    tokens = torch.cat((cls, x), dim=1)
    batch_norm = isinstance(model.norm, torch.nn.BatchNorm1d)
    tokens = (
        model.norm(tokens.transpose(1, 2)).transpose(1, 2) if batch_norm else model.norm(tokens)
    )
    logits = model.head(tokens[:, 0]).float()
    (factor * cross_entropy(logits, targets, label_smoothing=smoothing)).backward()
    return [tokens.grad.detach() for tokens in entering]


@torch.no_grad()
def branches(model: CaiT, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """γ·f(x) and x of each branch, every one computed by hand in evaluation mode."""
    found = []

    def branch(
        x: Tensor, f: torch.nn.Module, norm: torch.nn.Module, gamma: Tensor | None, tokens: Tensor
    ) -> Tensor:
        if isinstance(norm, torch.nn.BatchNorm1d):  # on the statistics of the batch
            mean, variance = tokens.mean(dim=(0, 1)), tokens.var(dim=(0, 1), unbiased=False)
            normed = (tokens - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
        else:
            normed = norm(tokens)
        y = f(normed) if gamma is None else gamma * f(normed)
        found.append((y.float(), x.float()))
        return y if getattr(model.config, "residual", "") == "none" else x + y

    x = model.patch_embed(images) + model.pos_embed
    for block in model.eval().blocks:
        x = branch(x, block.attn, block.norm1, block.gamma_1, x)
        x = branch(x, block.mlp, block.norm2, block.gamma_2, x)
    cls = model.cls_token.repeat(len(x), 1, 1)
    for block in model.blocks_token_only:
        cls = branch(cls, block.attn, block.norm1, block.gamma_1, torch.cat((cls, x), dim=1))
        cls = branch(cls, block.mlp, block.norm2, block.gamma_2, cls)
    return found


def expected(
    model: CaiT,
    folder: Path,
    step: int,
    accumulated: int = 1,
    smoothing: float = 0.1,
    precision: str = "32",
) -> Figures:
    """The figures of a step, from what `StepRecorder` wrote of it."""
    scale = 2.0**16 if precision == "16-mixed" else 1.0
    autocast = torch.autocast(
        "cpu", torch.float16 if "16-m" in precision[:4] else torch.bfloat16, precision != "32"
    )
    processes = len(list(folder.glob("*-0.pt")))
    found: Figures = {}
    model = deepcopy(model).train()
    squares, ratios, mean_squares = torch.zeros(4), [], []
    model.zero_grad()
    for rank in range(processes):
        for batch in range(step * accumulated, (step + 1) * accumulated):
            record = torch.load(folder / f"{rank}-{batch}.pt", weights_only=True)
            model.load_state_dict(record["weights"])
            with autocast:
                for y, x in branches(model, record["images"]):
                    ratios.append((y.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).mean())
                    mean_squares.append(x.square().mean())
            torch.set_rng_state(record["generator"])
            with autocast:  # anew: it keeps what it has cast, and above that was without gradients
                factor = scale / accumulated / processes
                entering = gradients(
                    model.train(), record["images"], record["targets"], smoothing, factor
                )
            squares += torch.tensor([(x.double() / scale).square().sum() for x in entering])
    before = deepcopy(model)
    for weight in model.parameters():
        weight.grad /= scale
    of_step = {key: flat(model, names, gradient=True) for key, names in prefixes(model).items()}
    model.load_state_dict(record["after"])
    count = processes * accumulated
    ratios, mean_squares = (
        torch.stack(each).view(count, 8).mean(dim=0) for each in (ratios, mean_squares)
    )
    for i, (key, names) in enumerate(prefixes(model).items()):
        gradient, weights = of_step[key], flat(before, names)
        update = flat(model, names) - weights
        found[*key, "branch_ratio"] = ratios[i].item()
        found[*key, "activation_rms"] = mean_squares[i].sqrt().item()
        found[*key, "grad_norm"] = norm(gradient)
        found[*key, "update_cosine"] = cosine(-gradient, update)
        found[*key, "update_ratio"] = norm(update) / norm(weights)
        gammas = [weight for name, weight in before.named_parameters() if name == names[0]]
        for gamma in gammas:
            quantiles = torch.tensor([0, 0.25, 0.5, 0.75, 1.0])
            for name, value in zip(
                ("min", "q25", "median", "q75", "max"), gamma.abs().quantile(quantiles), strict=True
            ):
                found[*key, f"gamma_{name}"] = value.item()
    for layer, part in enumerate(("block", "block", "ca_block", "ca_block"), start=1):
        found[layer, part, "input_grad_norm"] = squares[layer - 1].sqrt().item()
    return found


def close(value: float, rel: float = 1e-6, name: str = "") -> object:
    # The rounding of a cosine is that of 1, however near to 0 it is: processors differ by so much.
    return pytest.approx(
        value, rel=rel, abs=2 * torch.finfo(torch.float32).eps if "cosine" in name else 1e-12
    )


CASES = {
    "mask": dict(drop_path_rate=0.4, fields=dict(drop_path_mode="mask")),
    "skip": dict(drop_path_rate=0.4, fields=dict(drop_path_mode="skip")),
    "checkpointed": dict(drop_path_rate=0.4, grad_checkpointing=True),
    "accumulated": dict(drop_path_rate=0.4, accumulated=2),
    "scalar": dict(fields=dict(residual="scalar")),
    "fixup": dict(fields=dict(residual="fixup")),
    "plain": dict(fields=dict(residual="plain")),
    "none": dict(fields=dict(residual="none")),
    "batchnorm": dict(fields=dict(norm="batchnorm")),
    "sgd": dict(optimizer="sgd", optimizer_args=dict(momentum=0.9)),
    "16-mixed": dict(drop_path_rate=0.4, precision="16-mixed"),
    "bf16-mixed": dict(drop_path_rate=0.4, precision="bf16-mixed"),
}


# The others have the network's own code in common with one of these.
ABLATED = ("scalar", "fixup", "plain", "none", "batchnorm")
QUICK = ("skip", "checkpointed", "accumulated", "fixup", "batchnorm", "bf16-mixed")


@pytest.mark.parametrize("case", [*QUICK, *slow(*(case for case in CASES if case not in QUICK))])
def test_figures_are_those_of_plain_pytorch(case: str, tmp_path: Path) -> None:
    if case in ABLATED:
        pytest.importorskip("cait.extras.paper")
    settings = dict(CASES[case])
    accumulated, precision = settings.pop("accumulated", 1), settings.pop("precision", "32")
    net = module(
        **settings | dict(lr=1e-2, warmup_epochs=0, fields=FIELDS | settings.get("fields", {}))
    )
    fit = trainer(
        callbacks=[Monitor(3), StepRecorder(str(tmp_path / "steps"))],
        default_root_dir=tmp_path,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.05,
        **precision_of(precision),
    )
    torch.manual_seed(1)
    fit.fit(net, loader(24 * accumulated))
    got = figures(tmp_path)
    assert sorted(got) == [2, 5]
    rel = 1e-6 if precision == "32" else 1e-2  # the branch by hand rounds γ · f(x) elsewhere
    for step in got:
        wanted = expected(net.model, tmp_path / "steps", step, accumulated, precision=precision)
        wanted = {key: value for key, value in wanted.items() if value == value}
        assert got[step].keys() == wanted.keys()
        for key, value in wanted.items():
            assert got[step][key] == close(value, rel, key[-1]), (step, key)


@needs_ablations
@pytest.mark.parametrize("mode", ["mask", "skip"])
@pytest.mark.parametrize("precision", ["32", *slow("bf16-mixed")])
def test_a_watched_run_keeps_its_bits(mode: str, precision: str, tmp_path: Path) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        net = module(
            lr=1e-2,
            warmup_epochs=0,
            drop_path_rate=0.4,
            fields=FIELDS | dict(drop_path_mode=mode, norm="batchnorm"),
        )
        callbacks = [StepSeed(0), *([Monitor(2)] if watched else [])]
        fit = trainer(
            callbacks=callbacks, default_root_dir=tmp_path, precision=precision, max_epochs=1
        )
        fit.fit(net, loader())
        ends.append((net.model.state_dict(), fit.optimizers[0].state_dict()["state"]))
        assert not any(block._forward_pre_hooks for block in net.model.blocks)
    for plain, watched in zip(tree_leaves(ends[0]), tree_leaves(ends[1]), strict=True):
        assert torch.equal(plain, watched)
    assert sorted(figures(tmp_path)) == [1, 3, 5]


def test_a_run_resumed_after_any_step_writes_the_same_file(
    tmp_path: Path, digits_root: Path
) -> None:
    def fit(folder: Path, resumed: Path | None = None) -> None:
        save = LambdaCallback(
            on_train_batch_end=lambda *args: args[0].save_checkpoint(
                folder / f"{args[0].global_step}.ckpt"
            )
        )
        data = ImageNetDataModule(
            root=str(digits_root), img_size=8, batch_size=16, num_workers=0, repeats=1
        )
        settings = dict(
            default_root_dir=folder, max_epochs=2, limit_train_batches=4, limit_val_batches=0
        )
        net = module(num_classes=10, lr=1e-2, warmup_epochs=0, drop_path_rate=0.4)
        trainer(callbacks=[StepSeed(0), Monitor(3), save], **settings).fit(
            net, data, ckpt_path=resumed
        )

    whole = tmp_path / "whole"
    whole.mkdir()
    torch.manual_seed(0)
    fit(whole)
    assert sorted(figures(whole)) == [2, 5]
    for step in range(1, 8):
        cut = tmp_path / f"cut-{step}"
        cut.mkdir()
        # The run went on a little after the checkpoint, and the kill tore a row.
        (cut / "monitor.csv").write_text(
            (whole / "monitor.csv").read_text() + "\0\0,1,sa\n8,1,sa,grad_no"
        )
        fit(cut, whole / f"{step}.ckpt")
        assert (cut / "monitor.csv").read_text() == (whole / "monitor.csv").read_text(), step


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("optimizer", ["fused AdamW", "SGD"])
def test_a_step_that_is_skipped_has_no_gradient_to_show(
    optimizer: str, guarded: bool, tmp_path: Path
) -> None:
    def spoil(fit: object, net: CaiTModule) -> None:
        if fit.global_step == 2:
            net.model.blocks[0].mlp.fc1.weight.grad[0, 0] = float("nan")

    callbacks = [Monitor(1), LambdaCallback(on_after_backward=spoil), NonFiniteGuard(tmp_path, 10)]
    net = Chosen(optimizer, img_size=8, num_classes=7, fields=FIELDS, lr_base_size=None)
    order = callbacks[::-1] if guarded else callbacks
    trainer(callbacks=order, default_root_dir=tmp_path, max_epochs=1).fit(net, loader())
    got = figures(tmp_path)
    assert sorted(got) == [0, 1, 2, 3, 4, 5]
    assert all((1, "ffn", "branch_ratio") in got[step] for step in got)
    with_norm = [step for step in got if (1, "ffn", "grad_norm") in got[step]]
    assert with_norm == [0, 1, 3, 4, 5]
    assert got[2].get((2, "ffn", "update_ratio"), 0) == 0 < got[3][2, "ffn", "update_ratio"]


def test_another_network_is_watched_by_its_modules(tmp_path: Path) -> None:
    net = module(
        name="timm/vit_tiny_patch16_224",
        fields=dict(patch_size=4, depth=2, embed_dim=24, num_heads=2),
    )
    callbacks = [Monitor(3), StepRecorder(str(tmp_path / "steps"))]
    trainer(callbacks=callbacks, default_root_dir=tmp_path, max_epochs=1).fit(net, loader())
    got = figures(tmp_path)[2]
    assert [key[:2] for key in got if key[2] == "grad_norm"] == [
        (1, "patch_embed"), (2, "blocks.0"), (3, "blocks.1"), (4, "norm"), (5, "head")
    ]  # fmt: skip
    assert {name for _, _, name in got} == {"grad_norm", "update_cosine", "update_ratio"}
    record = torch.load(tmp_path / "steps/0-2.pt", weights_only=True)
    model = net.model.train()
    model.load_state_dict(record["weights"])
    model.zero_grad()
    cross_entropy(model(record["images"]), record["targets"], label_smoothing=0.1).backward()
    gradient = torch.cat(
        [weight.grad.flatten() for weight in model.blocks[1].parameters()]
    ).double()
    assert got[3, "blocks.1", "grad_norm"] == close(gradient.norm().item())


def test_no_or_negative_steps_are_refused() -> None:
    with pytest.raises(UserError, match="every_n_steps must be at least 1, got 0"):
        Monitor(0)


def test_the_command_line_watches(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    here = [
        f"--data.root={digits_root}",
        "--data.num_workers=0",
        "--trainer.devices=1",
        "--ema.decay=0.9",
    ]
    here += [
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=6",
        "--model.drop_path_rate=0.2",
    ]
    for name, more in (("off", []), ("on", [WATCH, "--trainer.callbacks.every_n_steps=5"])):
        monkeypatch.setenv("CAIT_RUN", "")
        main(["fit", *SMALL, *here, *more, f"--run_name={name}"])
    on, off = tmp_path / "logs/on", tmp_path / "logs/off"
    assert not (off / "monitor.csv").exists()
    got = figures(on)
    with (on / "metrics.csv").open() as file:
        logged = {int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]}
    assert set(got) == logged == {4, 9}
    assert_same(on, off)
    events = EventAccumulator(str(on)).Reload()
    for step, scalar in zip(got, events.Scalars("branch_ratio/sa.02"), strict=True):
        assert (scalar.step, scalar.value) == (step, close(got[step][2, "sa", "branch_ratio"]))
    assert not any(
        tag.startswith("branch_ratio")
        for tag in EventAccumulator(str(off)).Reload().Tags()["scalars"]
    )


RECIPE = [
    "fit",
    *SMALL,
    WATCH,
    "--trainer.callbacks.every_n_steps=3",
    "--trainer.max_epochs=2",
    "--data.batch_size=32",
]
RECIPE += [
    "--trainer.limit_train_batches=5",
    "--trainer.log_every_n_steps=1",
    "--save_every_n_steps=1",
]
RECIPE += ["--ema.decay=0.9", "--model.drop_path_rate=0.2"]


@pytest.mark.slow
def test_on_two_processes_the_figures_are_those_of_the_whole_step(
    cait: Cait, tmp_path: Path
) -> None:
    recorder = [
        "--trainer.callbacks+=recorder.StepRecorder",
        f"--trainer.callbacks.folder={tmp_path / 'steps'}",
    ]
    done = cait(*RECIPE, *TWO, *recorder, "--run_name=two")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "logs/two"
    model = CaiTModule.load_from_checkpoint(run / "checkpoints/last.ckpt", map_location="cpu").model
    got = figures(run)
    assert sorted(got) == [2, 5, 8]
    for step in got:
        wanted = expected(model, tmp_path / "steps", step)
        assert got[step].keys() == wanted.keys()
        for key, value in wanted.items():
            assert got[step][key] == close(value, name=key[-1]), (step, key)


@needs_a_compiler
@pytest.mark.slow
def test_watching_compiled_blocks_compiles_nothing_again() -> None:
    torch._dynamo.reset()
    model = network()
    model.compile_blocks()
    images = torch.randn(16, 3, 32, 32)
    before = one_step(model, images, 0)
    seen: dict[int, Tensor] = {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        measured = branches_module.measure(model, images)
        hooks = branches_module.watch_gradients(
            model, lambda block, gradient: seen.update({block: gradient})
        )
        after = one_step(model, images, 0)
        for hook in hooks:
            hook.remove()
        one_step(model, images, 0)
    assert sorted(seen) == list(range(6))
    eager: dict[int, Tensor] = {}
    plain = network()
    branches_module.watch_gradients(plain, lambda block, gradient: eager.update({block: gradient}))
    one_step(plain, images, 0)
    for block, gradient in seen.items():
        torch.testing.assert_close(gradient, eager[block], rtol=1e-4, atol=1e-7)
    assert len(measured) == 12
    assert all(torch.equal(ours, others) for ours, others in zip(before, after, strict=True))
