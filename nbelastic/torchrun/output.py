"""Where the workers of a round write, and what of it goes to the notebook."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import to_map

from nbelastic.protocol import messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.private_files import append_private

MOST = 1 << 16  # bytes of one stream at once; what is older is in the file only


class JobLogs(LogsSpecs):  # type: ignore[misc]  # torch carries no types here
    """The job's own files, named as those of functions: `<host>-<local rank>-<round>.out`, `.err` and `.error.json`.

    All goes to files. What torchrun would show at its terminal goes to the notebook as well: nothing of the streams that
    are redirected, unless they are teed.
    """

    def __init__(self, folder: Path, host: str, redirects: str, tee: str) -> None:
        super().__init__(str(folder), Std.from_str(redirects), Std.from_str(tee))
        self._folder, self._host = folder, host
        self.round = 0
        self.shown: dict[tuple[WorkerId, str], Path] = {}
        self.error_files: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        found: dict[str, dict[int, str]] = {"out": {}, "err": {}}
        self.error_files = {}
        for local_rank, environment in envs.items():
            w = WorkerId(self._host, local_rank, self.round)
            stem = self._folder / f"{self._host}-{local_rank}-{self.round}"
            for ending, std in (("out", Std.OUT), ("err", Std.ERR)):
                path = stem.with_name(f"{stem.name}.{ending}")
                os.close(append_private(path))
                found[ending][local_rank] = str(path)
                if not redirects[local_rank] & std or tee[local_rank] & std:
                    self.shown[w, ending] = path
            self.error_files[local_rank] = stem.with_name(f"{stem.name}.error.json")
            environment["TORCHELASTIC_ERROR_FILE"] = str(self.error_files[local_rank])
        errors = {rank: str(path) for rank, path in self.error_files.items()}
        return LogsDest(found["out"], found["err"], {}, {}, errors, os.devnull, os.devnull)


class Tail:
    """What has been written to the files in `JobLogs.shown` since the last look. For one thread."""

    def __init__(self, logs: JobLogs) -> None:
        self._logs = logs
        self._at: dict[Path, int] = {}
        self._said: dict[Path, int] = {}  # characters, or bytes of what is too long to be shown
        self._broken: dict[Path, bytes] = {}  # a character whose rest has not come yet

    def read(self) -> list[messages.WorkerOutput]:
        found = []
        for (w, stream), path in list(self._logs.shown.items()):
            output = self._read(w, stream, path)
            if output is not None:
                found.append(output)
            elif w.incarnation < self._logs.round:  # of an earlier round: all has been read
                del self._logs.shown[w, stream]
        return found

    def _read(self, w: WorkerId, stream: str, path: Path) -> messages.WorkerOutput | None:
        at = self._at.get(path, 0)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = max(at, size - MOST)
                file.seek(begin)
                data = self._broken.pop(path, b"") * (begin == at) + file.read(MOST)
        except OSError:
            return None
        self._at[path] = min(size, begin + MOST)
        if size <= at:
            return None
        whole = _whole(data)
        if whole < len(data):
            self._broken[path] = data[whole:]
        text = data[:whole].decode("utf-8", "replace")
        self._said[path] = self._said.get(path, 0) + begin - at + len(text)
        return messages.WorkerOutput(w, stream, text, self._said[path])


def _whole(data: bytes) -> int:
    """How many bytes there are up to a character of UTF-8 that is cut off at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
        if byte < 0x80:
            break
    return len(data)
