"""Processes that meet before they train: one that ends meanwhile says why to all, and one that is late is named."""

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from harness import free_port
from together import together

from cait.errors import UserError
from cait.run import meeting
from cait.run.program import Processes

HOST = socket.gethostname()


def fails(*ranks: int) -> Any:
    """What each process does: those of these ranks find an error before they meet the others."""

    def main(processes: Processes, rank: int) -> list[str]:
        if rank in ranks:
            raise UserError("no images")
        return processes.agree(str(rank))

    return main


@pytest.mark.parametrize("screens", [["", "", ""], ["0", "1", "1"]])
@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([0], f"process 0 on {HOST}: no images"),
        ([1, 2], f"process 1 on {HOST}: no images"),
        ([0, 1, 2], "no images"),
    ],
)
def test_an_error_in_one_process_ends_all_with_a_line_on_each_screen(
    ranks: list[int],
    line: str,
    screens: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    meet = meeting.meet

    def on_its_screen(store: Any, rank: int, *others: Any) -> Any:
        messages = meet(store, rank, *others)
        return [sent._replace(screen=screens[other]) for other, sent in enumerate(messages)]

    monkeypatch.setattr(meeting, "meet", on_its_screen)
    answers = together(fails(*ranks), monkeypatch)
    others = f"process {ranks[0]} on {HOST}: no images"
    assert answers == ["no images" if rank in ranks else others for rank in range(3)]
    assert capsys.readouterr().err.splitlines() == [f"cait: error: {line}"] * len({*screens})


def test_who_is_late_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(processes: Processes, rank: int) -> list[str]:
        time.sleep(1 * (rank == 1))
        return processes.agree(str(rank))

    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.2))
    assert together(main, monkeypatch) == [["0", "1", "2"]] * 3
    line = f"{HOST} waits for process 1 of 0 to 2"
    assert capsys.readouterr().err.splitlines() == [line] * 2


def test_the_store_may_come_later_than_those_that_look_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.2))
    port = int(free_port())
    stores: list[Any] = []

    def look() -> None:
        stores.append(meeting.connect("127.0.0.1", port, False, meeting.WAIT))

    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(0.5)
    served = meeting.connect("127.0.0.1", port, True, meeting.WAIT)
    thread.join()
    served.set("word", "yes")
    assert stores[0].get("word") == b"yes"
    line = f"{HOST} waits for process 0 at 127.0.0.1:{port}"
    assert line in capsys.readouterr().err
