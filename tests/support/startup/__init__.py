"""`sitecustomize.py` of this folder runs at the start of every Python process of the tests, once `on_path()` was called."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = str(Path(__file__).parent)


def on_path() -> None:
    """Put this folder on PYTHONPATH, where Python looks for `sitecustomize` as it starts."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [FOLDER, *paths]))
