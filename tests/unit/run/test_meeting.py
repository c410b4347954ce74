"""Processes that meet before they train: one that ends meanwhile says why to all, and one that is late is named."""

import socket
import threading
import time
from datetime import timedelta

import pytest
from harness import free_port
from together import together

from cait.errors import UserError
from cait.run import meeting

HOST = socket.gethostname()


def test_all_processes_have_the_words_of_all(monkeypatch):
    def main(processes, rank):
        return processes.agree(str(rank))

    assert together(main, monkeypatch) == [["0", "1", "2"]] * 3


def test_all_processes_have_what_the_first_makes(monkeypatch):
    def main(processes, rank):
        return processes.from_first(lambda: f"of {rank}")

    assert together(main, monkeypatch) == ["of 0"] * 3


class Slow:
    """A store that one process reads slowly."""

    def __init__(self, store, events):
        self.store = store
        self.events = events

    def multi_get(self, keys):
        time.sleep(0.3)
        words = self.store.multi_get(keys)
        self.events.append("read")
        return words

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_the_process_that_serves_the_store_waits_for_those_that_read(monkeypatch):
    events = []

    def main(processes, rank):
        if rank == 2:
            processes._store = Slow(processes._store, events)
        processes.agree()
        if rank == 0:
            events.append("end")

    together(main, monkeypatch)
    assert events == ["read", "end"]


@pytest.mark.parametrize("screens", [["", "", ""], ["0", "1", "1"]])
@pytest.mark.parametrize("failing", [[0], [1, 2], [0, 1, 2]])
def test_an_error_in_one_process_ends_all_with_a_line_on_each_screen(
    failing, screens, monkeypatch, capsys
):
    meet = meeting.meet

    def on_its_screen(store, rank, *others):
        messages = meet(store, rank, *others)
        return [sent._replace(screen=screens[other]) for other, sent in enumerate(messages)]

    def main(processes, rank):
        if rank in failing:
            raise UserError("no images")
        return processes.agree(str(rank))

    monkeypatch.setattr(meeting, "meet", on_its_screen)
    answers = together(main, monkeypatch)
    others = f"process {failing[0]} on {HOST}: no images"
    assert answers == ["no images" if rank in failing else others for rank in range(3)]
    line = "no images" if len(failing) == 3 else others
    printed = capsys.readouterr().err.splitlines()
    assert printed == [f"cait: error: {line}"] * len({*screens})


def test_who_is_late_is_named(monkeypatch, capsys):
    def main(processes, rank):
        if rank == 1:
            time.sleep(1)
        return processes.agree(str(rank))

    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.2))
    assert together(main, monkeypatch) == [["0", "1", "2"]] * 3
    line = f"{HOST} waits for process 1 of 0 to 2"
    assert capsys.readouterr().err.splitlines() == [line] * 2


def test_the_store_may_come_later_than_those_that_look_for_it(monkeypatch, capsys):
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.2))
    port = int(free_port())
    stores = []

    def look():
        stores.append(meeting.connect("127.0.0.1", port, False, meeting.WAIT))

    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(0.5)
    server = meeting.connect("127.0.0.1", port, True, meeting.WAIT)
    thread.join()
    server.set("word", "yes")
    assert stores[0].get("word") == b"yes"
    assert f"{HOST} waits for process 0 at 127.0.0.1:{port}" in capsys.readouterr().err
