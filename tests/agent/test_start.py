"""What an agent sets for itself, its template and all workers before they import anything."""

import json
import subprocess
import sys

SETTINGS = {"defaults": {}, "preload": [], "threads": "1", "cwd": "", "path": [], "run_folder": ""}
SET_UP = """
import json, sys
from nbelastic.agent.start import _set_up_process

_set_up_process(json.loads(sys.argv[1]))
import one, two

print(one.HERE, two.HERE)
"""


def test_modules_in_pythonpath_of_the_cluster_are_found(tmp_path):
    """`env={"PYTHONPATH": …}`: functions find them as scripts in new interpreters do."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / f"{folder.name}.py").write_text(f"HERE = {folder.name!r}")
    settings = {**SETTINGS, "environment": {"PYTHONPATH": ":".join(map(str, folders))}}
    done = subprocess.run(
        [sys.executable, "-c", SET_UP, json.dumps(settings)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "one two\n", done.stderr
