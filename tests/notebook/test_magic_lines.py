"""Magics as lines of text: options, errors, comments, help and completion."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_cluster import FakeJob
from IPython.core.completer import provisionalcompleter
from magic_output import output_of

from nbelastic.client.doctor import Finding
from nbelastic.notebook import load_ipython_extension, unload_ipython_extension
from nbelastic.notebook.magic_arguments import _parse, without_comment


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "%elastic_start --mni 2",
            "unrecognized arguments: --mni 2 (did you mean --min?); %elastic_start? shows the options.",
        ),
        ("%elastic_start --workers 2", "unrecognized arguments: --workers 2; %elastic_start? shows the options."),
        ("%elastic_start --min", "argument --min: expected one argument; %elastic_start? shows the options."),
        ("%elastic_start --min two", "argument --min: invalid int value: 'two'; %elastic_start? shows the options."),
        ("%elastic_start --backend mpi", "argument --backend: invalid choice: 'mpi'"),
        (
            "%elastic_start --hosts 'a",
            "a quotation mark is not closed: close it, or write \\ before it; %elastic_start? shows",
        ),
        (
            '%%elastic_run --job "a\npass',
            "a quotation mark is not closed: close it, or write \\ before it; %elastic_run? shows",
        ),
        (
            "%elastic_start --hosts a\\ ",
            "a backslash is the last character: remove it, or write two; %elastic_start? shows",
        ),
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


@pytest.mark.parametrize("blank", [" ", ",", ", ", " ,"])
def test_lists_have_blanks_or_commas(ip, magics, cluster, blank):
    """Everywhere; an option with several values may also be repeated."""
    before = len(cluster.calls)
    lines = (f"%elastic_add a:2{blank}b:3", f"%elastic_remove a{blank}b --now", f"%elastic_restart a/0#1{blank}b/0#1")
    for line in (*lines, f"%%elastic_px --at-commit --rank 0{blank}2 --rank 3\nx"):
        ip.run_cell(line).raise_error()
    assert cluster.calls[before:] == [
        ("add_host", "a:2", "%elastic_add"),
        ("add_host", "b:3", "%elastic_add"),
        ("remove_host", "a", True, "%elastic_remove"),
        ("remove_host", "b", True, "%elastic_remove"),
        ("restart", "a/0#1", "%elastic_restart"),
        ("restart", "b/0#1", "%elastic_restart"),
        ("execute at commit", "x\n", {"timeout": None, "ranks": [0, 2, 3]}),
    ]
    ip.run_cell("%elastic_stop").raise_error()
    names = f"--hosts a:2{blank}b:2 --preload x{blank}y --nics eth0{blank}eth1 --timeouts form=1{blank}recover=2"
    ip.run_cell(f"%elastic_start --no-dashboard {names}").raise_error()
    options = magics.cluster.options
    assert [options[name] for name in ("hosts", "preload", "nics")] == ["a:2,b:2", ("x", "y"), "eth0,eth1"]
    assert options["timeouts"] == {"form": "1", "recover": "2"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%%elastic_px --rank 0,x\ny", "argument --rank: invalid int value: 'x'; %elastic_px? shows the options."),
        ("%elastic_add ,", "argument NEW: expected at least one argument; %elastic_add? shows the options."),
        ("%elastic_status --out 1x", "'1x' is not a valid variable name."),
        ("%elastic_status --out in", "'in' is not a valid variable name."),
        ("%elastic_logs 0 --worker localhost/1#1", "give RANK or --worker, not both."),
        ("%%elastic_px --out 1x\ny", "'1x' is not a valid variable name."),
    ],
)
def test_a_wrong_value_in_a_list_is_named(ip, magics, cluster, capsys, line, message):
    """Nothing is sent."""
    assert output_of(ip, capsys, line) == f"UsageError: {message}"


def test_results_go_into_variables(ip, magics, cluster, capsys):
    """--out works alike with each magic that has a result. What goes into a variable is not shown too."""
    cluster.job = FakeJob()
    cluster.shown_stacks = ["stack"]
    cluster.outputs = [("a/0#1", "", "", None)]
    for line in ("%elastic_status", "%elastic_logs 1", "%elastic_stacks", "%elastic_wait", "%elastic_list"):
        assert output_of(ip, capsys, f"{line} --out {line.split()[0][9:]}") == ""
    ip.run_cell("%%elastic_px --out rows\nx").raise_error()
    ip.run_cell("%%elastic_setup --out setup\nx").raise_error()
    ip.run_cell("%%elastic_run --out job\nx").raise_error()
    found = ip.user_ns
    assert found["status"] is cluster.status()
    assert found["logs"] == "rank=1 worker=None tail=100"
    assert (found["stacks"], found["wait"], found["rows"], found["setup"]) == (
        ["stack"],
        [None, None],
        *[cluster.outputs] * 2,
    )
    assert isinstance(found["list"], list)
    assert found["job"] is cluster.job


def test_the_doctor_examines_the_hosts_of_the_cluster_or_others(ip, magics, capsys, monkeypatch):
    """It also works without a cluster: then it examines this machine."""
    asked = []

    def examine(hosts, python):
        asked.append((list(hosts), python))
        return [Finding("<a>", "wrong", "it is off: switch it on.")]

    monkeypatch.setattr("nbelastic.client.doctor.examine", examine)
    shown = ip.run_cell("%elastic_doctor").result
    assert repr(shown).splitlines()[1] == "<a>   wrong  it is off: switch it on."
    assert "&lt;a&gt;" in shown._repr_html_()
    ip.run_cell("%elastic_start --no-dashboard --hosts a:2,b:2")
    ip.run_cell("%elastic_doctor")
    ip.run_cell("%elastic_doctor c,user@d --python /opt/python --out found").raise_error()
    assert asked == [([], None), (["a", "b"], None), (["c", "user@d"], "/opt/python")]
    assert ip.user_ns["found"][0].host == "<a>"


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


def test_quotation_marks_group_words(ip, magics):
    """As in a shell: they are removed, and IPython still replaces variables between them."""
    ip.user_ns["minutes"] = 30
    line = (
        """--launcher-option options="--exclusive --mail-type=FAIL" --launcher-option 'comment=a # b' --env A="x" """
        """--launcher-option time="{minutes}:00" --env "B='$minutes'" --env C= --env D=a\\ b  # it's a comment"""
    )
    ip.run_cell(f"%elastic_start {line}").raise_error()
    assert magics.cluster.options["env"] == {"A": "x", "B": "'30'", "C": "", "D": "a b"}
    assert magics.cluster.options["launcher_options"] == {
        "options": "--exclusive --mail-type=FAIL",
        "comment": "a # b",
        "time": "30:00",
    }
    ip.run_cell("""%elastic_run --job job "my train.py" --name 'two words' '' """).raise_error()
    assert ip.user_ns["job"].source == "my train.py --name two words "


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
        ("%elastic_remove ", {"localhost", "--now", "--in"}),
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
