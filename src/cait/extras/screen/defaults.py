"""What is on in a run although neither a file nor an option of its command line says it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cait import yaml_reader
from cait.guards import configurations
from cait.guards.configurations import config_files, join_values, options
from cait.settings import flatten

PLAIN = "configs/base.yaml"
"""The configuration that has none of it."""


def on_by_default(config: Any, arguments: Sequence[str], peak_lr: float, images: int) -> str:
    """The parts of the recipe that defaults turn on, in a line; empty if there are none.

    Args:
        config: the settings of `cait fit`, as `cait.plugins.Run` has them.
        arguments: the words of the command line.
        peak_lr: the highest learning rate.
        images: of an optimizer step.
    """
    given = set(_given(join_values(arguments)))
    parts = {
        "data.repeats": lambda count: f"{count} repeats" if count > 1 else "",
        "data.auto_augment": lambda policy: "RandAugment" if policy.startswith("rand") else policy,
        "data.erase_prob": lambda share: f"erasing {share:g}",
        "data.mixup": lambda alpha: "Mixup",
        "data.cutmix": lambda alpha: "CutMix",
        "model.label_smoothing": lambda share: f"label smoothing {share:g}",
        "model.lr_base_size": lambda size: f"lr {peak_lr:.3g} for {images:,} images a step",
    }
    values = {name: config.get(name) for name in parts if name not in given}
    found = [text for name, value in values.items() if value and (text := parts[name](value))]
    return f"{', '.join(found)} (defaults; {PLAIN} has none of it)" if found else ""


def _given(words: Iterable[str]) -> Iterable[str]:
    """The names of the settings in files, in YAML and in options, as "data.repeats"."""
    for name, text in options(words):
        if name == "config":
            files = config_files([f"--config={text}"])
            yield from flatten(configurations.settings(files[0])) if files else _names(text or "")
        elif name in ("data", "model"):
            yield from (f"{name}.{inner}" for inner in _names(text or ""))
        else:
            yield name


def _names(text: str) -> Iterable[str]:
    content = yaml_reader.load(text, "the configuration")
    return flatten(content) if isinstance(content, dict) else ()
