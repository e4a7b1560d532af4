"""Magics as lines of text: options, errors, comments, help and completion."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from magic_output import output_of

from nbelastic.notebook import load_ipython_extension, unload_ipython_extension
from nbelastic.notebook.magic_arguments import _parse, without_comment


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%elastic_start --mni 2", "unrecognized arguments: --mni 2; %elastic_start? shows the options."),
        ("%elastic_start --min", "argument --min: expected one argument; %elastic_start? shows the options."),
        ("%elastic_start --min two", "argument --min: invalid int value: 'two'; %elastic_start? shows the options."),
        ("%elastic_start --backend mpi", "argument --backend: invalid choice: 'mpi'"),
        ("%elastic_start --hosts 'a", "No closing quotation; %elastic_start? shows the options."),
        ("%elastic_start --min 3 --max 2", "min=3 is more than max=2: lower --min."),
        ("%elastic_start --env HOME", "--env HOME: write NAME=VALUE."),
        ("%elastic_start --launcher-option =gpu", "--launcher-option =gpu: write NAME=VALUE."),
        ("%elastic_start --cluster 1x", "'1x' is not a valid variable name."),
        ("%elastic", "no cluster is running: start one with %elastic_start."),
        ("%elastic_status", "no cluster is running: start one with %elastic_start."),
        ("%elastic_add a:2", "no cluster is running: start one with %elastic_start."),
        ("%elastic_remove a", "no cluster is running: start one with %elastic_start."),
        ("%elastic_scale --min 2", "no cluster is running: start one with %elastic_start."),
        ("%elastic_wait --world 2", "no cluster is running: start one with %elastic_start."),
        ("%elastic_logs", "no cluster is running: start one with %elastic_start."),
        ("%%elastic_run\npass", "no cluster is running: start one with %elastic_start."),
        ("%%elastic\npass", "no cluster is running: start one with %elastic_start."),
        ("%elastic_add", "the following arguments are required: NEW; %elastic_add? shows the options."),
        ("%%elastic_run --checkpoint-every x\npass", "argument --checkpoint-every: invalid int value: 'x'"),
        ("%elastic_scale", "give --min N, --max N or both."),
        ("%elastic_restart a/0#1", "no cluster is running: start one with %elastic_start."),
        ("%elastic_restart", "the following arguments are required: WORKER; %elastic_restart? shows the options."),
        ("%elastic_stacks", "no cluster is running: start one with %elastic_start."),
        ("%elastic_trace", "the following arguments are required: FILE; %elastic_trace? shows the options."),
    ],
)
def test_an_impossible_request_fails_with_one_line(ip, magics, capsys, line, message):
    """Wrong options, missing values, a missing cluster: one line says what to do, and the cell has failed."""
    shown = output_of(ip, capsys, line)
    assert shown.startswith(f"UsageError: {message}")
    assert len(shown.splitlines()) == 1
    assert not ip.run_cell(line).success


README = Path(__file__).parents[2] / "README.md"
MAGIC_LINES = re.findall(r"^(%%?)(\w+)(.*)$", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("percent", "name", "line"), MAGIC_LINES)
def test_each_magic_line_of_the_readme_works_as_printed(ip, magics, percent, name, line):
    """With its comment. Other extensions' magics, as `%load_ext`, take a comment as an argument, so their lines have none."""
    parser = magics._parser(name, percent == "%%")
    if parser is None:
        assert "#" not in line
    else:
        known = vars(_parse(parser, name, line))
        assert known == vars(_parse(parser, name, line.partition(" #")[0]))
        assert not known.get("script")


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("--min 2   # two at least, don't ask", "--min 2"),
        ("# nothing else", ""),
        ("localhost/0#1 a#b #c", "localhost/0#1 a#b"),
        ("--name '# no comment' # a comment", "--name '# no comment'"),
        ('--env "A=\\" # b" # c', '--env "A=\\" # b"'),
        ("--name \\# # c", "--name \\#"),
        ("--hosts 'a # b", "--hosts 'a # b"),
        ("train.py --colour=#fff", "train.py --colour=#fff"),
    ],
)
def test_a_comment_ends_a_magic_line(line, kept):
    """As in a shell, a `#` at the beginning of a word starts it. In quotation marks and within a word `#` is a character."""
    assert without_comment(line).rstrip() == kept


@pytest.mark.parametrize("name", ["elastic_start", "elastic", "elastic_run", "elastic_remove"])
def test_each_magic_has_help(ip, magics, name):
    """`%x?` shows a sentence, the usage and each option."""
    kind = "cell" if name == "elastic_run" else "line"
    text = ip.object_inspect_text(f"%%{name}" if kind == "cell" else f"%{name}")
    for option in magics.magics[kind][name].parser._actions:
        assert all(string in text for string in option.option_strings)
        assert option.help in " ".join(text.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%elastic_start --ma", {"--max"}),
        ("%elastic_start --backend g", {"gloo"}),
        ("%elastic_remove l", {"localhost"}),
        ("%elastic_remove localhost --n", {"--now"}),
        ("%elastic_logs --worker localhost/", {"localhost/0#1", "localhost/1#1"}),
        ("%elastic_start --hosts a:2,loc", {"a:2,localhost"}),
        ("%elastic_remove ", {"localhost", "--now"}),
        ("view = %elastic_logs --ta", {"--tail"}),
        ("%%elastic --s", {"--setup"}),
        ("%%elastic_run --w", {"--wait"}),
        ("%%elastic_run --checkpoint-", {"--checkpoint-every", "--checkpoint-keep"}),
    ],
)
def test_tab_completes_options_and_known_values(ip, magics, cluster, line, offered):
    """As a notebook does: through the completer's entry point, with no other suggestions."""
    with provisionalcompleter():
        found = {line[: c.start] + c.text for c in ip.Completer.completions(line, len(line))}
    assert {text.split(" ")[-1] for text in found} == offered


def test_the_extension_can_be_loaded_twice_and_unloaded(ip, capsys):
    """It leaves nothing behind, and imports its modules at the first use."""
    load_ipython_extension(ip)
    load_ipython_extension(ip)
    assert "elastic_start" in ip.magics_manager.magics["line"]
    unload_ipython_extension(ip)
    unload_ipython_extension(ip)
    assert not [name for names in ip.magics_manager.magics.values() for name in names if "elastic" in name]
    assert ip.Completer.custom_matchers == []
