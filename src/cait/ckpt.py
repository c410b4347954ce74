"""What a checkpoint holds, read without running code from it."""

from __future__ import annotations

import argparse
import codecs
import math
import pickle
import re
import socket
import sys
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait import disk
from cait.errors import UserError, told_as

if TYPE_CHECKING:
    from torch import Tensor

    Weights = dict[str, Tensor]

EMA = "EMA"
"""Key of the moving average among the states of the callbacks."""
MODULE = "module_class"
"""Key of the class of the run's module, and of those methods of its own that say what it answers."""
VAL, VAL_EMA = "val", "val_ema"
"""What the metrics of the raw weights, and of their moving average, begin with."""
FORMAT = 1
"""Number of the keys of checkpoints and of config.yaml. It goes up when an older version would misread them."""
State = dict[str, Any]
"""What a part of a run saves of itself, by name."""
Checkpoint = State
"""All that a run saves."""
FIELDS = {
    "state_dict": dict,
    "global_step": int,
    "epoch?": int,
    "position?": [int],
    "should_stop?": bool,
    "limits?": dict,
    "module_class?": [str],
    "hyper_parameters?": dict,
    "callbacks?": dict,
    "format?": int,
}
"""What every checkpoint of a run holds; see `cait.disk.check_shape`."""
NETWORK = {"name": str, "num_classes": int, "img_size": int, "fields?": dict}
"""The hyper-parameters that say what the network is."""
WEIGHTS = (".ckpt", ".pth", ".pt", ".bin", ".safetensors")
"""How the names of files with weights end."""
ZIP = b"PK\3\4"
"""How the zip archives begin that torch reads."""
CALLS = frozenset((pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ))
"""What calls something in a pickle."""
ITEM = 256
"""Bytes of an item of a dictionary, or of a call, about; it also bounds their time."""
DATA = {"class_names": [str], "depends_on?": dict, "preprocessing?": dict}
"""The data module's part."""


def check_weights(path: Path) -> None:
    """Raise UserError if there is no such file of weights."""
    if not path.is_file():
        raise UserError(f"the weights {path} do not exist")


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint without running code from it. Its tensors stay on disk until they are used.

    Raises UserError if there is no such file, or it is not a whole checkpoint of a run.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"the checkpoint {path} does not exist")
    with told_as(f"{path} is not a whole checkpoint of a run", partial(_why_no_checkpoint, path)):
        try:
            checkpoint = read(path)
        except OSError as error:  # other machines of the run may be able to read it
            raise UserError(
                f"cannot read {path} on {socket.gethostname()}: {error.strerror or error}"
            ) from error
        checkpoint["global_step"], checkpoint["state_dict"]
    disk.check_shape(checkpoint, FIELDS, path)
    if checkpoint.get("format", FORMAT) > FORMAT:
        raise UserError(f"{path} was saved by a later version, in a format of its own: update cait")
    if key := _data_key(checkpoint):
        disk.check_shape(checkpoint[key], DATA, path, key)
    return checkpoint


def _why_no_checkpoint(path: Path, error: Exception) -> str:
    if isinstance(error, KeyError) or path.suffix == ".safetensors":
        return "; if it holds weights alone, name it with --model.weights"
    return why_unread(path, error)


def read(path: Path) -> Any:
    """What torch has saved in a file, without running code from it: plain data, with tensors among them.

    Raises UserError if the file is damaged or its content cannot be used, and what torch raises.
    """
    import torch

    with disk.open_file(path) as file:  # a pipe would wait
        is_zip = file.read(len(ZIP)) == ZIP
        if is_zip and not zipfile.is_zipfile(file):
            raise zipfile.BadZipFile("it is cut off")
    if is_zip and not is_whole(path):
        raise UserError(
            f"{path} is damaged: the checksum of a part is not the one that was saved with it"
        )
    # The release keeps the command line of its training beside the weights.
    with (
        torch.serialization.safe_globals([argparse.Namespace]),
        _bounded(path),
        warnings.catch_warnings(action="ignore"),
    ):
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    content = disk.plain(loaded, path, kept=(object,))
    if isinstance(content, dict):
        # the others hold states of any type
        for key in {
            "hyper_parameters",
            _data_key(content),
        } & content.keys():
            content[key] = disk.plain(content[key], path, key, kept=(torch.Tensor,))
        if "state_dict" in content:
            content["state_dict"] = loaded["state_dict"]  # it holds the versions of its modules too
    return content


@contextmanager
def _bounded(path: Path) -> Iterator[None]:
    """Bound what torch makes of a file: a few bytes of a pickle may ask for gigabytes, or for a copy of all the others.

    It counts what goes into each call that a pickle makes, before the call.
    """
    from torch import _weights_only_unpickler

    unpickler: Any = _weights_only_unpickler
    left = disk.most_bytes(path.stat().st_size)
    unbounded: Any = unpickler.Unpickler

    class Unpickler(unbounded):
        def __init__(self, file: Any, **options: Any) -> None:
            super().__init__(file, **options)
            read = file.read

            def bounded_read(size: int) -> bytes:
                nonlocal left
                data = read(size)
                if data in CALLS and len(self.stack) > 1:
                    left -= ITEM + _cost(*self.stack[-2:])
                    if left < 0:
                        raise UserError(f"{path} cannot be used: its content {disk.TOO_MUCH}")
                return data

            self.read = bounded_read

    unpickler.Unpickler = Unpickler
    try:
        yield
    finally:
        unpickler.Unpickler = unbounded


def _cost(call: Any, arguments: Any) -> int:
    """Bytes that a call in a pickle may take, or what sets the state of an object."""
    from torch.storage import TypedStorage

    match arguments:
        case (str(text), "latin1" | "latin-1") if call in (codecs.encode, bytearray):
            return len(text)
        case _ if call is codecs.encode:
            return sys.maxsize  # other encodings make far more of a text, or take hours
        case (TypedStorage() as storage, _, tuple(size), *_):  # strides may repeat what it holds
            return storage.element_size() * math.prod(size)
        case tuple():
            return sum(map(_size, arguments))
    return _size(arguments)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray | list | tuple | dict | set):
        return ITEM * len(value)
    return value if isinstance(value, int) else 0


def why_unread(path: Path, error: Exception) -> str:
    """The end of a message: what a file holds that torch refused to read; empty if that is not known."""
    if "TorchScript" in str(error):
        return "; it is a TorchScript archive, which is code: save the state_dict() of its network"
    if refused := re.search(r"GLOBAL (\S{1,80}) was not an allowed", str(error)):
        return f"; it holds {refused[1]}, which is neither a plain value nor a tensor: save those alone"
    return disk.in_its_place(path)


def is_whole(path: Path) -> bool:
    """Whether every part of a file of torch's has the checksum, a CRC-32, that was written with it.

    It takes 2.4 s for 1.6 GB on one core, and is done once for a file that stays as it is.
    """
    try:
        status = path.stat()
        return _is_whole(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    except (OSError, zipfile.BadZipFile, EOFError):
        return False


@lru_cache
def _is_whole(path: Path, version: tuple[int, ...]) -> bool:
    *_, size, _ = version
    with zipfile.ZipFile(path) as archive:
        disk.check_packed(archive, path, size)
        return archive.testzip() is None


def weights(checkpoint: Checkpoint) -> Weights:
    """The weights of the network under its own names."""
    state = checkpoint["state_dict"].items()
    return {
        name.removeprefix("model."): value
        for name, value in state
        if str(name).startswith("model.")
    }


def average(checkpoint: Checkpoint) -> Weights | None:
    """The moving average of the weights, under the network's names; None if the run kept none."""
    return checkpoint.get("callbacks", {}).get(EMA) or None


def uses_average(checkpoint: Checkpoint, asked: bool | None = None) -> bool:
    """Whether a checkpoint stands for the moving average in it: as asked, or if its metric chose best.ckpt.

    Without `BestCheckpoint`, the last callback that watches a metric, it does if it holds one.
    """
    if asked is not None:
        return asked
    if average(checkpoint) is None:
        return False
    metric = f"{VAL_EMA}/"  # unless one watches another
    for state in checkpoint["callbacks"].values():
        if isinstance(state, dict) and isinstance(state.get("monitor"), str):
            metric = state["monitor"]
    return metric.startswith(f"{VAL_EMA}/")


def chosen_weights(checkpoint: Checkpoint, path: str | Path, asked: bool | None = None) -> Weights:
    """The weights that a checkpoint stands for, see `uses_average`. Raises UserError if it lacks those asked for."""
    if not uses_average(checkpoint, asked):
        return weights(checkpoint)
    averaged = average(checkpoint)
    if averaged is None:
        raise UserError(f"{path} holds no moving average of the weights")
    return averaged


def data_state(checkpoint: Checkpoint) -> State | None:
    """The data module's part of a checkpoint, whatever its class is called; None if there is no such part."""
    return checkpoint.get(_data_key(checkpoint))


def class_names(checkpoint: Checkpoint) -> list[str] | None:
    """The names of the classes, in the order of the logits; None if the checkpoint has no data module."""
    return (data_state(checkpoint) or {}).get("class_names")


def rename_data_state(checkpoint: Checkpoint, name: str) -> None:
    """Put the data module's part under `name`: Lightning looks for the `__qualname__` of the class in use."""
    if key := _data_key(checkpoint):
        checkpoint[name] = checkpoint.pop(key)


def _data_key(checkpoint: Checkpoint) -> str:
    """The key of the data module's part: it has the "class_names", and "depends_on", which a user's settings lack."""
    for key, state in checkpoint.items():
        if (
            isinstance(state, dict)
            and isinstance(state.get("class_names"), list)
            and "depends_on" in state
        ):
            return key
    return ""
