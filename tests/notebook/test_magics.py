"""The magics: what they hand over, and that whatever goes wrong is said in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_cluster import FakeCluster, FakeJob
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import InteractiveShell

from nbelastic.client.checkpoints import checkpoint_plan
from nbelastic.client.cluster import Cluster
from nbelastic.errors import JobError, UsageError, WaitTimeoutError
from nbelastic.notebook import load_ipython_extension, unload_ipython_extension
from nbelastic.notebook.magic_arguments import _parse, without_comment
from nbelastic.notebook.magics import ElasticMagics
from nbelastic.notebook.status_text import ClusterList
from nbelastic.protocol.local_clusters import ClusterInfo
from nbelastic.protocol.status import WorkerStack


@pytest.fixture
def ip(monkeypatch):
    monkeypatch.setattr(InteractiveShell, "initialized", lambda: True)
    shell = InteractiveShell()
    monkeypatch.setattr(InteractiveShell, "instance", lambda: shell)
    shell.displayed = []
    shell.display_pub.publish = lambda data, *_, **__: shell.displayed.append(data)
    yield shell
    shell.history_manager.end_session()


def attach(name):
    """A cluster of this name that was kept, with its job."""
    if name == "nobody":
        raise UsageError("there is no cluster 'nobody' here: you have none on this machine.")
    cluster = FakeCluster(name=name)
    cluster.start()
    cluster.job = FakeJob()
    return cluster


@pytest.fixture
def magics(ip):
    magics = ElasticMagics(ip, create=FakeCluster, attach=attach)
    magics.register()
    yield magics
    magics.unregister()


@pytest.fixture
def cluster(ip, magics):
    ip.run_line_magic("elastic_start", "--min 1 --max 4 --hosts localhost:2")
    return magics.cluster


def run(ip, capsys, source):
    """What a cell shows, stdout and stderr in one."""
    capsys.readouterr()
    ip.run_cell(source)
    captured = capsys.readouterr()
    return (captured.out + captured.err).strip()


@pytest.mark.parametrize(
    ("line", "said"),
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
def test_what_cannot_be_done_is_said_in_one_line(ip, magics, capsys, line, said):
    """Bad flags, missing values and a missing cluster: one line that says what to do, and the cell has failed."""
    shown = run(ip, capsys, line)
    assert shown.startswith(f"UsageError: {said}")
    assert len(shown.splitlines()) == 1
    assert not ip.run_cell(line).success


README = Path(__file__).parents[2] / "README.md"
MAGIC_LINES = re.findall(r"^(%%?)(\w+)(.*)$", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("percent", "name", "line"), MAGIC_LINES)
def test_every_magic_line_of_the_readme_works_as_printed(ip, magics, percent, name, line):
    """Comments and all. Magics of others, as `%load_ext`, take a comment for an argument: theirs have none."""
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
    """As in a shell: it begins with a `#` that begins a word. In quotation marks and within a word it is a character."""
    assert without_comment(line).rstrip() == kept


def test_start_hands_over_only_what_was_given(ip, magics):
    """The defaults are Cluster's own; lists come as Python has them; the dashboard is shown."""
    ip.run_cell("%elastic_start --min 2 --max 4 --cooldown 0 0 --preload numpy,torchvision --timeout 5 --cluster c")
    assert magics.cluster.options == {
        "hosts": None,
        "min": 2,
        "max": 4,
        "cooldown": (0.0, 0.0),
        "preload": ("numpy", "torchvision"),
    }
    assert ("start", True, 5.0) in magics.cluster.calls
    assert ip.user_ns["c"] is magics.cluster
    assert "application/vnd.jupyter.widget-view+json" in ip.displayed[0]


def test_times_of_waits_are_given_by_name(ip, magics):
    """Several at once, with commas between them."""
    ip.run_cell("%elastic_start --stop-timeout 9 --timeouts recover=30,form=120")
    options = magics.cluster.options
    assert (options["stop_timeout"], options["timeouts"]) == (9.0, {"recover": "30", "form": "120"})


def test_start_without_waiting_or_showing(ip, magics):
    """--no-wait and --no-dashboard do what they say."""
    ip.run_cell("%elastic_start --no-wait --no-dashboard")
    assert magics.cluster.calls[0] == ("start", False, None)
    assert ip.displayed == []


def test_a_second_cluster_is_refused_until_the_first_has_finished(ip, magics, cluster, capsys):
    """Starting twice says what to do; after %elastic_stop a new one starts; stopping twice is fine."""
    said = "UsageError: a cluster is running already: %elastic shows it, %elastic_stop ends it."
    assert run(ip, capsys, "%elastic_start") == said
    assert run(ip, capsys, "%elastic_stop\n%elastic_stop") == ""
    assert run(ip, capsys, "%elastic_start --no-dashboard") == ""
    assert magics.cluster is not cluster


@pytest.mark.parametrize("line", ["%elastic_start", "%elastic_attach survivor"])
def test_another_cluster_closes_the_old_dashboard(ip, magics, cluster, line):
    """The old cluster has no subscriber left, so that nothing of it stays in the kernel; the new one has its own."""
    assert len(cluster.subscribers) == 1
    ip.run_cell("%elastic_stop")
    ip.run_cell(line)
    assert magics.cluster is not cluster
    assert (len(cluster.subscribers), len(magics.cluster.subscribers)) == (0, 1)


def test_attaching_gives_what_starting_gives(ip, magics, capsys):
    """The cluster, its job, the dashboard; one line if there is none; and none while another one runs."""
    assert run(ip, capsys, "%elastic_attach nobody").startswith("UsageError: there is no cluster 'nobody'")
    assert magics.cluster is None
    ip.run_cell("%elastic_attach survivor --cluster c --job j")
    assert ip.user_ns["c"] is magics.cluster
    assert magics.cluster.options["name"] == "survivor"
    assert ip.user_ns["j"] is magics.cluster.job
    assert "application/vnd.jupyter.widget-view+json" in ip.displayed[0]
    assert "a cluster is running already" in run(ip, capsys, "%elastic_attach other")


def test_letting_go(ip, magics, cluster, capsys):
    """The cluster is another kernel's then, and this one may start another."""
    assert run(ip, capsys, "%elastic_detach") == ""
    assert cluster.calls[-1] == ("detach",)
    assert "no cluster is running" in run(ip, capsys, "%elastic_detach")


def test_a_lease_needs_keeping(ip, magics, capsys):
    """Options that say nothing are refused; with --keep both are handed over."""
    assert run(ip, capsys, "%elastic_start --lease 5") == "UsageError: --lease has no effect without --keep."
    ip.run_cell("%elastic_start --keep --lease 60 --no-dashboard")
    assert magics.cluster.options == {"hosts": None, "min": 1, "max": None, "keep": True, "lease": 60.0}


def test_the_list_of_clusters():
    """In plain text and in HTML; what is wrong with one is said; names are no markup."""
    shown = ClusterList(
        [
            ClusterInfo("mine", 42, True, ("a", "b"), "job-1"),
            ClusterInfo("kept", 0, True, ("a",)),
            ClusterInfo("<b>", 4711, True, problem="it is damaged"),
        ]
    )
    assert repr(shown).splitlines() == [
        "cluster  driver        hosts  job    why",
        "mine     process 42    a, b   job-1  %elastic_attach mine",
        "kept     none          a             %elastic_attach kept",
        "<b>      process 4711                it is damaged",
    ]
    assert "&lt;b&gt;" in shown._repr_html_()
    assert repr(ClusterList([])) == "No cluster is running."


def test_stopping_nothing_is_no_error(ip, magics, capsys):
    """The last cell of a notebook may be run twice, or alone."""
    assert run(ip, capsys, "%elastic_stop") == "No cluster is running."


def test_a_start_that_takes_too_long_leaves_the_cluster_to_look_at(ip, capsys):
    """The time-out names what is missing; the cluster stays, to be helped or stopped."""

    def slow(hosts, **options):
        cluster = FakeCluster(hosts, **options)
        start = cluster.start

        def wait_in_vain(wait=True, timeout=None):
            start(wait, timeout)
            if wait:
                raise WaitTimeoutError("0 of min 2 workers ready after 5 s; waiting for gpu1.")

        cluster.start = wait_in_vain
        return cluster

    magics = ElasticMagics(ip, create=slow)
    magics.register()
    shown = run(ip, capsys, "%elastic_start --min 2 --timeout 5 --no-dashboard")
    assert shown == "WaitTimeoutError: 0 of min 2 workers ready after 5 s; waiting for gpu1."
    assert magics.cluster.status().phase != "finished"
    magics.unregister()


def test_ctrl_c_while_waiting_says_that_the_cluster_goes_on(ip, magics, cluster, capsys):
    """An interrupted wait shows one line and the next magic works."""
    cluster.raises = KeyboardInterrupt()
    shown = run(ip, capsys, "%elastic_wait --world 4")
    assert shown == "KeyboardInterrupt: no longer waiting; the cluster goes on, and %elastic shows it."
    cluster.raises = None
    assert run(ip, capsys, "%elastic_wait --world 4 --timeout 3") == ""
    assert cluster.calls[-1] == ("wait", 4, 3.0)


def test_orders_are_handed_over_with_who_gave_them(ip, magics, cluster, capsys):
    """Add, remove, scale and stop say nothing of their own and return at once."""
    shown = run(
        ip,
        capsys,
        "%elastic_add 127.0.0.2:2 127.0.0.3:1\n%elastic_remove localhost --now\n"
        "%elastic_scale --min 1 --max 3\n%elastic_stop --job",
    )
    assert shown == ""
    orders = [call for call in cluster.calls if str(call[-1]).startswith("%")]
    assert orders == [
        ("add_host", "127.0.0.2:2", "%elastic_add"),
        ("add_host", "127.0.0.3:1", "%elastic_add"),
        ("remove_host", "localhost", True, "%elastic_remove"),
        ("scale", 1, 3, "%elastic_scale"),
        ("stop_job", "%elastic_stop"),
    ]


def test_an_unknown_host_is_said_in_one_line(ip, magics, cluster, capsys):
    """Errors of the cluster come without a traceback and keep their type for those who catch them."""
    assert run(ip, capsys, "%elastic_remove nowhere") == "UsageError: there is no host 'nowhere'."
    with pytest.raises(UsageError):
        ip.run_line_magic("elastic_remove", "nowhere")


def test_a_training_cell_returns_a_live_job_at_once(ip, magics, cluster):
    """The Job is the cell's value and, if wanted, a variable."""
    result = ip.run_cell("%%elastic_run --job job\nprint('hello')\n").result
    assert result is cluster.job is ip.user_ns["job"]
    assert result.source == "print('hello')\n"
    assert result.waited == []
    ip.run_cell("%%elastic_run --timeout 7\npass").raise_error()
    assert cluster.job.waited == [7.0]


def test_a_training_cell_says_where_its_checkpoints_go(ip, magics, cluster):
    """What is not given is left to the cluster."""
    ip.run_cell("%%elastic_run --checkpoint ~/here --checkpoint-every 50 --checkpoint-keep 2\npass").raise_error()
    assert cluster.job.options == {"checkpoint": "~/here", "checkpoint_every": 50, "checkpoint_keep": 2}
    ip.run_cell("%%elastic_run\npass").raise_error()
    assert set(cluster.job.options.values()) == {None}


def test_a_script_and_its_options(ip, magics, cluster):
    """torchrun's options before the script, the script's own after it; the Job is the value, as that of a cell."""
    line = "--max-restarts 3 --nproc 2 -t 3 --env A=b --job job train.py --generations 10 --max-restarts 9 -m"
    assert ip.run_line_magic("elastic_run", line) is cluster.job is ip.user_ns["job"]
    assert cluster.job.source == "train.py --generations 10 --max-restarts 9 -m"
    assert cluster.job.options == {"max_restarts": 3, "nproc": 2, "tee": "3", "env": {"A": "b"}}
    ip.run_line_magic("elastic_run", "-m --cold --wait my.training")
    assert (cluster.job.options, cluster.job.waited) == ({"module": True, "cold": True}, [None])


@pytest.mark.parametrize(
    ("line", "cell", "said"),
    [
        ("", None, "name a script, or write %%elastic_run above a cell."),
        ("--checkpoint there train.py", None, "--checkpoint options need a cell: a script saves its own checkpoints."),
        ("--cold", "pass", "a script and its options cannot be combined with a cell: write %elastic_run."),
        ("train.py", "pass", "a script and its options cannot be combined with a cell: write %elastic_run."),
        ("--env A train.py", None, "--env A: write NAME=VALUE."),
    ],
)
def test_scripts_and_cells_are_not_mixed(ip, magics, cluster, line, cell, said):
    """One line says what to write instead."""
    with pytest.raises((UsageError, IPythonUsageError)) as caught:
        magics.elastic_run(line) if cell is None else magics.elastic_run(line, cell)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"checkpoint_every": 5}, "checkpoint_every has no effect without checkpoint: name a folder too."),
        ({"checkpoint_keep": 5}, "checkpoint_keep has no effect without checkpoint: name a folder too."),
        ({"checkpoint": "a", "checkpoint_every": 0}, "checkpoint_every=0: a whole number, at least 1."),
        ({"checkpoint": "a", "checkpoint_keep": 1.5}, "checkpoint_keep=1.5: a whole number, at least 1."),
        ({"checkpoint": ""}, "checkpoint='' is not a folder."),
        ({"checkpoint": __file__}, f"checkpoint={__file__!r} is not a folder."),
    ],
)
def test_checkpoints_that_cannot_be(given, said):
    """Said at once, by a function's job and a cell's, before anything is sent to a worker."""
    cluster = Cluster()
    for submit in (lambda: cluster.run(print, **given), lambda: cluster.run_cell("pass", **given)):
        with pytest.raises(UsageError) as caught:
            submit()
        assert str(caught.value) == said


def test_checkpoints_as_the_workers_are_told_of_them(monkeypatch, tmp_path):
    """An absolute path, whatever the worker's own folder is, and the defaults."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert checkpoint_plan(None, None, None) is None
    assert checkpoint_plan("here", None, None) == (str(tmp_path / "here"), 100, 3)
    assert checkpoint_plan(Path("~/here"), 7, 1) == ("/home/me/here", 7, 1)


def test_a_failed_job_shows_the_remote_traceback_and_nothing_of_ours(ip, magics, cluster, capsys):
    """One line and the failing rank's traceback: no frame of the notebook's."""
    remote = "Traceback (most recent call last):\n  File <cell>, line 1\nZeroDivisionError: division by zero\n"
    cluster.raises = JobError("rank 1 raised ZeroDivisionError.", rank=1, remote_traceback=remote)
    shown = run(ip, capsys, "%%elastic_run --wait\n1/0")
    assert shown == f"JobError: rank 1 raised ZeroDivisionError.\n\n{remote.rstrip()}"


def test_waiting_without_a_size_is_waiting_for_the_job(ip, magics, cluster, capsys):
    """%elastic_wait alone waits for the job's end, and says so if there is none."""
    assert run(ip, capsys, "%elastic_wait") == "UsageError: no job has run yet: start one with %%elastic_run."
    job = cluster.run_cell("pass")
    assert run(ip, capsys, "%elastic_wait --timeout 9") == ""
    assert job.waited == [9.0]


def test_a_cell_on_every_worker_shows_each_worker_s_lines(ip, magics, cluster, capsys):
    """%%elastic prints under the workers' names; equal output comes once, under all of its workers."""
    cluster.outputs = [("localhost/0#1", "a\nb\n", "", None), ("localhost/1#1", "", "careful\n", None)]
    shown = run(ip, capsys, "%%elastic --setup\nimport x\n")
    assert shown.splitlines() == ["[localhost/0#1] a", "[localhost/0#1] b", "[localhost/1#1] careful"]
    assert ("execute", "import x\n", True, None, None) in cluster.calls
    cluster.outputs = [(f"h/{i}#1", "a\nb\n", "", None) for i in range(3)]
    assert run(ip, capsys, "%%elastic\n1").splitlines() == ["[all 3 workers] a", "[all 3 workers] b"]
    cluster.outputs += [("h/3#1", "a\nc\n", "", None)]
    shared = "h/0#1, h/1#1, h/2#1"
    assert run(ip, capsys, "%%elastic\n1").splitlines() == [
        f"[{shared}] a",
        f"[{shared}] b",
        "[h/3#1] a",
        "[h/3#1] c",
    ]
    cluster.outputs = [(f"h/{i}#1", "x" if i else "", "", None) for i in range(8)]
    assert run(ip, capsys, "%%elastic\n1") == "[h/1#1, h/2#1, h/3#1, h/4#1 and 3 more] x"


def test_errors_of_a_cell_name_their_workers(ip, magics, cluster, capsys):
    """%%elastic fails with the remote tracebacks: equal ones once, at most three different ones."""
    traceback = "Cell, line 1\n----> 1 y\n\nNameError: name 'y'"
    cluster.outputs = [("h/0#1", "", "", None), *((f"h/{i}#1", "", "", traceback) for i in (1, 2))]
    shown = run(ip, capsys, "%%elastic\ny")
    assert shown == f"JobError: the cell raised on 2 of 3 workers; h/1#1, h/2#1 raised:\n\n{traceback}"
    cluster.outputs = [(f"h/{i}#1", "", "", f"KeyError: {i}") for i in range(5)]
    shown = run(ip, capsys, "%%elastic\ny")
    assert shown.splitlines()[0] == "JobError: the cell raised on 5 of 5 workers; h/0#1 raised:"
    assert re.findall("KeyError: .", shown) == ["KeyError: 0", "KeyError: 1", "KeyError: 2"]
    assert shown.endswith("2 more workers raised other errors.")


@pytest.mark.parametrize("magic", ["%%elastic", "%%elastic --setup", "%%elastic_run", "%%elastic_run --wait"])
def test_a_syntax_error_is_found_before_anything_is_sent(ip, magics, cluster, capsys, magic):
    """The line, the caret and the message, without frames of ours; no job is used up and no worker hears of it."""
    before = list(cluster.calls)
    shown = run(ip, capsys, f"{magic}\ngood = 1\nbad = = 2\n")
    assert shown == 'File "<cell>", line 2\n    bad = = 2\n          ^\nSyntaxError: invalid syntax'
    assert (cluster.calls, cluster.job) == (before, None)
    assert not ip.run_cell(f"{magic}\nbad = = 2").success
    assert "SyntaxError: 'return' outside function" in run(ip, capsys, f"{magic}\nreturn 5")


@pytest.mark.parametrize(
    "cell",
    ["!ls -l", "%time 1 + 1", "%%time\nx = 1", "files = !ls", "x = '\\d'", "if 1:\n    !ls\n    %time 2", "dir?"],
)
def test_the_syntax_of_ipython_is_none_to_complain_about(ip, magics, cluster, capsys, cell):
    """Shell commands, magics and help work in cells for the workers as in any other."""
    assert "Error" not in run(ip, capsys, f"%%elastic\n{cell}")
    assert "Error" not in run(ip, capsys, f"%%elastic_run\n{cell}")
    assert cluster.job.source.strip() == cell


def test_only_a_cell_between_jobs_may_await(ip, magics, cluster, capsys):
    """A program is compiled as a module: there `await` outside of a function is a SyntaxError, as on the worker."""
    assert run(ip, capsys, "%%elastic\nimport asyncio\nawait asyncio.sleep(0)") == ""
    shown = run(ip, capsys, "%%elastic_run\nimport asyncio\nawait asyncio.sleep(0)")
    assert "SyntaxError: 'await' outside function" in shown


def test_setup_cells_have_keys(ip, magics, cluster, capsys, monkeypatch):
    """The key that is given, else the notebook's id of the cell; they are listed and cleared by it."""
    run(ip, capsys, "%%elastic --setup imports\n\nimport x\nimport y\n")
    parent = {"header": {}, "metadata": {"cellId": "0b2e"}}
    monkeypatch.setattr(ip, "get_parent", lambda: parent, raising=False)
    run(ip, capsys, "%%elastic --setup\nz = 1\n")
    assert run(ip, capsys, "%elastic_setup").splitlines() == ["imports: import x", "0b2e: z = 1"]
    assert run(ip, capsys, "%elastic_setup --clear nothing") == (
        "UsageError: there is no setup cell 'nothing'; there are imports, 0b2e."
    )
    run(ip, capsys, "%elastic_setup --clear imports")
    assert list(cluster.setup_cells) == ["0b2e"]
    run(ip, capsys, "%elastic_setup --clear")
    assert run(ip, capsys, "%elastic_setup") == ""


def test_setup_needs_a_cell(ip, magics, cluster, capsys):
    """%elastic --setup is a slip for %%elastic --setup, and is told so."""
    shown = run(ip, capsys, "%elastic --setup")
    assert shown == "UsageError: --setup and --timeout need a cell: write %%elastic above it."


def test_status_and_logs_in_plain_text(ip, magics, cluster, capsys):
    """Both are readable without any widget; between jobs the status holds nothing that changes from run to run."""
    text = repr(ip.run_cell("%elastic_status").result)
    assert text.splitlines() == [
        "running: world of 2 · ready 0 / 1–4 · generation 1",
        "",
        "host       slots  state  why",
        "localhost  2      up",
        "",
        "rank  worker         state    step  restarts  why",
        "0     localhost/0#1  running  0     0",
        "1     localhost/1#1  running  0     0",
    ]
    cluster.run_for_show()
    assert repr(ip.run_cell("%elastic_status").result).splitlines()[:2] == [
        "running: world of 2 · world 2 / 1–4 · generation 2",
        "job-1 running · step 1203 · 55.1 steps/s · loss 0.2317 · accuracy 0.957",
    ]
    cluster.tell(outcome="succeeded")
    assert "steps/s" not in repr(ip.run_cell("%elastic_status").result)
    cluster.run_cell("pass")
    assert run(ip, capsys, "%elastic_logs 1 --tail 5") == "rank=1 worker=None tail=5"


@pytest.mark.parametrize("name", ["elastic_start", "elastic", "elastic_run", "elastic_remove"])
def test_every_magic_explains_itself(ip, magics, name):
    """%x? has a sentence, the usage and every option."""
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
    """As a notebook asks for it: through the completer's own entry point, with nothing else among the offers."""
    with provisionalcompleter():
        found = {line[: c.start] + c.text for c in ip.Completer.completions(line, len(line))}
    assert {text.split(" ")[-1] for text in found} == offered


def test_loading_twice_and_unloading(ip, capsys):
    """The extension comes and goes without a trace, and its modules wait for the first use."""
    load_ipython_extension(ip)
    load_ipython_extension(ip)
    assert "elastic_start" in ip.magics_manager.magics["line"]
    unload_ipython_extension(ip)
    unload_ipython_extension(ip)
    assert not [name for names in ip.magics_manager.magics.values() for name in names if "elastic" in name]
    assert ip.Completer.custom_matchers == []


def test_stacks_are_printed_by_where_people_are(ip, cluster, capsys):
    """Ranks with the same stack once, with their place; who is behind, and who does not answer."""
    cluster.shown_stacks = [
        WorkerStack("a/0#1", 0, "train.py:9", "  all_reduce\n"),
        WorkerStack("a/1#1", 1, "train.py:4 in load", "  sleep\n", "3 s behind at commit 2"),
        WorkerStack("b/0#1", 2, "train.py:9", "  all_reduce\n"),
        WorkerStack("b/1#1", None, "", ""),
    ]
    assert run(ip, capsys, "%elastic_stacks") == (
        "ranks 0, 2 · a/0#1, b/0#1 · train.py:9\n  all_reduce\n\n"
        "rank 1 · a/1#1 · train.py:4 in load · 3 s behind at commit 2\n  sleep\n\n"
        "b/1#1 · no answer: its process is suspended, or C code holds the GIL"
    )
    assert run(ip, capsys, "%elastic_stacks 1").startswith("rank 1 · a/1#1")
    assert run(ip, capsys, "%elastic_stacks 7") == "UsageError: there is no rank 7 now."


def test_a_worker_is_restarted_and_the_log_says_by_what(ip, cluster):
    """The magic's name is who asked."""
    ip.run_cell("%elastic_restart localhost/0#1 localhost/1#1")
    assert [call for call in cluster.calls if call[0] == "restart"] == [
        ("restart", "localhost/0#1", "%elastic_restart"),
        ("restart", "localhost/1#1", "%elastic_restart"),
    ]


def test_a_trace_is_written_and_a_folder_that_is_not_there_is_said(ip, cluster, capsys, tmp_path):
    """As JSON, for Perfetto."""
    file = tmp_path / "trace.json"
    assert run(ip, capsys, f"%elastic_trace {file}").startswith(f"{file} has been written")
    assert json.loads(file.read_text()) == {"traceEvents": []}
    missing = tmp_path / "no" / "trace.json"
    said = run(ip, capsys, f"%elastic_trace {missing}")
    assert said == f"UsageError: {missing} cannot be written: No such file or directory."
