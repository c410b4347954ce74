"""Times are said in words."""

from cait.extras.display import duration


def test_durations() -> None:
    shown = ["0 s", "1 min 0 s", "2 min 5 s", "3 h 4 min", "9 d 1 h"]
    assert [duration(seconds) for seconds in (0.2, 59.6, 125, 3 * 3600 + 240, 9 * 86400 + 3600)] == shown
