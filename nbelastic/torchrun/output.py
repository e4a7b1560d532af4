"""The files to which a round's workers write, and the output that the notebook receives."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import to_map

from nbelastic.protocol import messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.private_files import append_private

MOST = 1 << 16  # bytes of one stream in a message; the notebook does not receive earlier ones


class WorkerLogs(LogsSpecs):  # type: ignore[misc]  # torch carries no types here
    """Files of workers, named as those of functions: `<host>-<local rank>-<round>.out`, `.err` and `.error.json`.

    All output goes to files. The notebook receives what torchrun would print: streams that are not redirected, or teed.
    """

    def __init__(self, folder: Path, host: str, redirects: str, tee: str) -> None:
        super().__init__(str(folder), Std.from_str(redirects), Std.from_str(tee))
        self._folder, self._host = folder, host
        self.round = 0
        self.forwarded: dict[tuple[WorkerId, str], Path] = {}  # streams that the notebook receives
        self.error_files: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        paths: dict[str, dict[int, str]] = {"out": {}, "err": {}}
        self.error_files = {}
        for local_rank, environment in envs.items():
            w = WorkerId(self._host, local_rank, self.round)
            stem = self._folder / f"{self._host}-{local_rank}-{self.round}"
            for ending, std in (("out", Std.OUT), ("err", Std.ERR)):
                path = stem.with_name(f"{stem.name}.{ending}")
                os.close(append_private(path))
                paths[ending][local_rank] = str(path)
                if not redirects[local_rank] & std or tee[local_rank] & std:
                    self.forwarded[w, ending] = path
            self.error_files[local_rank] = stem.with_name(f"{stem.name}.error.json")
            environment["TORCHELASTIC_ERROR_FILE"] = str(self.error_files[local_rank])
        errors = {rank: str(path) for rank, path in self.error_files.items()}
        return LogsDest(paths["out"], paths["err"], {}, {}, errors, os.devnull, os.devnull)


class OutputReader:
    """Reads what workers have appended to the files in `WorkerLogs.forwarded`. For one thread."""

    def __init__(self, logs: WorkerLogs) -> None:
        self._logs = logs
        self._offsets: dict[Path, int] = {}
        self._counts: dict[Path, int] = {}  # characters so far, plus bytes that were left out
        self._incomplete: dict[Path, bytes] = {}  # the beginning of a character

    def read(self) -> list[messages.WorkerOutput]:
        """The new output of all streams."""
        outputs = []
        for (w, stream), path in list(self._logs.forwarded.items()):
            output = self._read(w, stream, path)
            if output is not None:
                outputs.append(output)
            elif w.incarnation < self._logs.round:  # the round has ended, and all was read
                del self._logs.forwarded[w, stream]
                for known in (self._offsets, self._counts, self._incomplete):
                    known.pop(path, None)
        return outputs

    def _read(self, w: WorkerId, stream: str, path: Path) -> messages.WorkerOutput | None:
        offset = self._offsets.get(path, 0)
        try:
            with open(path, "rb") as file:
                size = self._offsets[path] = os.fstat(file.fileno()).st_size
                if size <= offset:
                    return None
                begin = max(offset, size - MOST)
                file.seek(begin)
                data = file.read(size - begin)  # not more: what the worker writes meanwhile is for the next read
        except OSError:
            return None
        data = self._incomplete.pop(path, b"") * (begin == offset) + data
        complete = _complete_bytes(data)
        if complete < len(data):
            self._incomplete[path] = data[complete:]
        text = data[:complete].decode("utf-8", "replace")
        self._counts[path] = self._counts.get(path, 0) + begin - offset + len(text)
        return messages.WorkerOutput(w, stream, text, self._counts[path])


def _complete_bytes(data: bytes) -> int:
    """The count of bytes before a UTF-8 character that is cut off at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
        if byte < 0x80:
            break
    return len(data)
