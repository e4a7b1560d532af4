"""Where the main thread is, as another thread finds it."""

import threading

from nbelastic.worker.user_stack import current_line, stack_dump


def ask() -> str:
    """From another thread, while this one waits in the standard library."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(current_line()))
    thread.start()
    thread.join()
    return found[0]


def test_the_users_own_line_is_named():
    """File, line and function of the innermost frame that is no library's: this one waits in `threading`."""
    place = ask()
    file, _, rest = place.partition(":")
    line, _, function = rest.partition(" in ")
    assert (file, function) == ("test_user_stack.py", "ask")
    assert line.isdecimal()


def test_code_of_a_cell_is_called_cell():
    """IPython's file names mean nothing to people."""
    scope = {"ask": ask, "current_line": current_line, "threading": threading}
    source = "found = []\nt = threading.Thread(target=lambda: found.append(current_line()))\nt.start()\n\nt.join()\n"
    exec(compile(source, "/tmp/ipykernel_123/456.py", "exec"), scope)
    assert scope["found"][0].startswith("cell:")
    assert " in " not in scope["found"][0]


def test_packages_are_no_code_of_the_users_wherever_they_are():
    """Those of the user's own folder or of a parent environment too: their threads are not shown."""
    scope = {"stack_dump": stack_dump, "threading": threading}
    source = "found = []\nt = threading.Thread(target=lambda: found.append(stack_dump()))\nt.start()\nt.join()\n"
    other = threading.Event()
    waits = {"other": other}
    exec(compile("def run(): other.wait()", "/home/me/.local/lib/python3.11/site-packages/zmq/poll.py", "exec"), waits)
    thread = threading.Thread(target=waits["run"], name="of a package")
    thread.start()
    exec(compile(source, "/home/me/train.py", "exec"), scope)
    other.set()
    thread.join()
    assert "of a package" not in scope["found"][0]


def test_a_stack_shortens_the_files_of_packages_and_nothing_else(tmp_path):
    """`zmq/poll.py` says enough. A line of the user's that names such a folder stays as it is, and so does its number."""
    file = tmp_path / "train.py"
    file.write_text("found = []\ndef go(ask):\n    ask(lambda: found.append(stack_dump()), '/opt/site-packages/x')\n")
    scope = {"stack_dump": stack_dump}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    package = {"threading": threading}
    source = "def ask(call, _):\n    t = threading.Thread(target=call)\n    t.start()\n    t.join()\n"
    exec(compile(source, "/home/me/.local/lib/python3.11/site-packages/zmq/poll.py", "exec"), package)
    scope["go"](package["ask"])
    text = scope["found"][0]
    assert (
        f"File \"{file}\", line 3, in go\n    ask(lambda: found.append(stack_dump()), '/opt/site-packages/x')\n" in text
    )
    assert 'File "zmq/poll.py", line ' in text
    assert 'File "threading.py"' in text
