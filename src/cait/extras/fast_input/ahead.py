"""Images read ahead: while a worker decodes one image of a batch, threads read the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from typing import Any

from PIL import Image

from cait.data.dataset import Samples
from cait.data.reading import RawImage, UnreadableImageError, open_bytes

Item = tuple[RawImage, int]


class Ahead:
    """The images of `samples`, as `cait.data.dataset.Samples`; those that `ahead` has announced are read by threads.

    Order and pixels stay the same. A worker holds at most the files of one batch.
    """

    def __init__(self, samples: Samples, threads: int) -> None:
        self.samples, self.threads = samples, threads
        self.coming: dict[int, Future[Item]] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Any:
        if name == "samples":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.samples, name)

    def name(self, index: int) -> str:
        return self.samples.name(index)

    def ahead(self, indices: Sequence[int]) -> None:
        """Begin to read the images of a batch."""
        # A pool for each batch, because a fork would not take its threads along.
        pool = ThreadPoolExecutor(self.threads)
        self.coming = {index: pool.submit(self._read, index) for index in dict.fromkeys(indices)}
        pool.shutdown(wait=False)

    def __getitem__(self, index: int) -> Item:
        coming = self.coming.pop(index, None)
        return self.samples[index] if coming is None else coming.result()

    def _read(self, index: int) -> Item:
        raw, label = self.samples[index]
        if isinstance(raw, Image.Image):
            return raw, label
        # Whoever opens the file itself meets it again, and says so.
        with suppress(OSError, UnreadableImageError), open_bytes(raw) as file:
            return BytesIO(file.read()), label
        return raw, label
