"""The random streams of a run: their numbers never change, because runs of earlier versions must resume."""

from __future__ import annotations

import pytest

from cait import seeds


@pytest.mark.parametrize(
    ("stream", "place", "number"),
    [
        ("image", (0, 0, 0, 0), 6868215007063320292),
        ("image", (7, 3, 1234567, 2), 13346929343633059636),
        ("stand_in", (7, 3, 1234567, 2, 1), 13331085093982394979),
        ("stand_in", (0, 0, 5, 0, 2), 16430331423902560101),
        ("batch_mixing", (0, 0, 0, 0), 3640927972),
        ("batch_mixing", (7, 3, 41, 1), 3872208148),
        ("training_step", (7, 3, 41, 1), 5140309018497964387),
        ("training_step", (0, 0, 0, 0), 12659741793762702060),
        ("epoch_order", (7, 3), 10),
    ],
)
def test_the_numbers_of_a_stream_stay_as_they_are(stream: str, place: tuple[int, ...], number: int) -> None:
    assert getattr(seeds, stream)(*place) == number
