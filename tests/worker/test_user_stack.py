"""The user's line and stack of the main thread, found from another thread."""

import threading

from nbelastic.worker.user_stack import current_line, stack_dump


def ask() -> str:
    """The user's line, found by another thread while this one waits in the standard library."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(current_line()))
    thread.start()
    thread.join()
    return found[0]


def test_the_users_own_line_is_named():
    """File, line and function of the innermost frame outside of libraries: this thread waits in `threading`."""
    place = ask()
    file, _, rest = place.partition(":")
    line, _, function = rest.partition(" in ")
    assert (file, function) == ("test_user_stack.py", "ask")
    assert line.isdecimal()


def test_code_of_a_cell_is_called_cell():
    """IPython's file names have no meaning for users."""
    scope = {"ask": ask, "current_line": current_line, "threading": threading}
    source = "found = []\nt = threading.Thread(target=lambda: found.append(current_line()))\nt.start()\n\nt.join()\n"
    exec(compile(source, "/tmp/ipykernel_123/456.py", "exec"), scope)
    assert scope["found"][0].startswith("cell:")
    assert " in " not in scope["found"][0]


def test_packages_are_never_the_users_code():
    """Also in the user's own folder or in a parent environment: threads of packages are not shown."""
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
    """The file is `zmq/poll.py`. A line of the user's code that names such a folder is unchanged, and so is its number."""
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
