"""What a static Space of the Hugging Face Hub needs beside the page, and the commands that upload both."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import yaml

CARD = "README.md"
TEXT = """
Drop an image: the network runs in your browser, and no image is sent anywhere.
"""
IN_LFS = ("*.onnx", "*.wasm", "*.png")


def write(folder: Path, title: str) -> None:
    """Write the Space's settings, https://huggingface.co/docs/hub/spaces-config-reference, and which files are large.

    The page runs in one thread, so it needs no `custom_headers`.
    """
    shown = {"title": title, "emoji": "🔍", "colorFrom": "gray", "colorTo": "blue"}
    settings = {**shown, "sdk": "static", "app_file": "index.html", "pinned": False}
    header = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    (folder / CARD).write_text(f"---\n{header}---\n{TEXT}", encoding="utf-8")
    (folder / ".gitattributes").write_text("".join(f"{name} filter=lfs diff=lfs merge=lfs -text\n" for name in IN_LFS))


def commands(output: Path, title: str) -> list[str]:
    """The Space is made first: `hf upload` would make one for Gradio."""
    name = f"OWNER/{shlex.quote(title)}"
    return [
        f"hf repos create {name} --repo-type space --space-sdk static",
        f"hf upload {name} {shlex.quote(os.path.relpath(output))} . --repo-type space",
    ]
