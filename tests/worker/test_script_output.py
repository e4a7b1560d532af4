"""What a script's node reads of its workers' output files."""

from __future__ import annotations

import os

import pytest

from nbelastic.torchrun.output import OutputReader, WorkerLogs


@pytest.fixture
def worker(tmp_path):
    """The file to which the only worker of a round prints, and its reader."""
    logs = WorkerLogs(tmp_path, "a", "0", "0")
    logs.reify({0: {}})
    return tmp_path / "a-0-0.out", OutputReader(logs)


def append(file, data: bytes) -> None:
    with open(file, "ab") as stream:
        stream.write(data)


def test_a_worker_that_prints_during_a_read(worker, monkeypatch):
    """What a worker prints while its file is being read is read once: with the next read."""
    file, reader = worker
    append(file, b"one")

    def find_size(fd, fstat=os.fstat):
        found = fstat(fd)
        if found.st_size == 3:
            append(file, b" more\n")
        return found

    with monkeypatch.context() as grows:
        grows.setattr(os, "fstat", find_size)
        assert [(output.text, output.end) for output in reader.read()] == [("one", 3)]
    assert [(output.text, output.end) for output in reader.read()] == [(" more\n", 9)]
    assert reader.read() == []


def test_a_character_that_is_written_in_two_parts(worker):
    """A character whose bytes are written one after the other arrives whole, also if a read in between finds nothing."""
    file, reader = worker
    append(file, "1 €".encode()[:-1])
    assert [output.text for output in reader.read()] == ["1 "]
    assert reader.read() == []
    append(file, "€".encode()[-1:])
    assert [output.text for output in reader.read()] == ["€"]


def test_a_reader_forgets_earlier_rounds(tmp_path):
    """A script that lives through many rounds costs a node no more memory."""
    logs = WorkerLogs(tmp_path, "a", "0", "0")
    reader = OutputReader(logs)
    for logs.round in range(1, 4):
        logs.reify({0: {}})
        append(tmp_path / f"a-0-{logs.round}.err", "€".encode()[:-1])
        reader.read()
        reader.read()
    assert len(logs.forwarded) == len(reader._offsets) == 2
    assert len(reader._counts) == len(reader._incomplete) == 1
