"""Times in words."""

from __future__ import annotations

from cait.extras.clock import duration


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.2, 59.6, 125, 3 * 3600 + 240, 9 * 86400 + 3600)] == [
        *("0 s", "1 min 0 s", "2 min 5 s", "3 h 4 min", "9 d 1 h")
    ]
