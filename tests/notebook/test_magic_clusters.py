"""Magics that start, change, observe and stop a cluster."""

from __future__ import annotations

import json

import pytest
from fake_cluster import FakeCluster
from magic_output import output_of

from nbelastic.errors import UsageError, WaitTimeoutError
from nbelastic.notebook.magics import ElasticMagics
from nbelastic.notebook.status_text import ClusterList
from nbelastic.protocol.local_clusters import ClusterInfo
from nbelastic.protocol.status import WorkerStack


def test_start_passes_only_the_given_options(ip, magics):
    """Cluster supplies the defaults; lists become Python values; the dashboard is shown."""
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


def test_timeouts_are_given_by_name(ip, magics):
    """Several at once, with commas between them."""
    ip.run_cell("%elastic_start --stop-timeout 9 --timeouts recover=30,form=120")
    options = magics.cluster.options
    assert (options["stop_timeout"], options["timeouts"]) == (9.0, {"recover": "30", "form": "120"})


def test_start_without_waiting_and_without_a_dashboard(ip, magics):
    """--no-wait and --no-dashboard."""
    ip.run_cell("%elastic_start --no-wait --no-dashboard")
    assert magics.cluster.calls[0] == ("start", False, None)
    assert ip.displayed == []


def test_a_second_cluster_is_refused_until_the_first_has_finished(ip, magics, cluster, capsys):
    """Starting twice prints what to do; after %elastic_stop a new one starts; stopping twice is fine."""
    message = "UsageError: a cluster is running already: %elastic_dashboard shows it, %elastic_stop ends it."
    assert output_of(ip, capsys, "%elastic_start") == message
    assert output_of(ip, capsys, "%elastic_stop\n%elastic_stop") == ""
    assert output_of(ip, capsys, "%elastic_start --no-dashboard") == ""
    assert magics.cluster is not cluster


@pytest.mark.parametrize("line", ["%elastic_start", "%elastic_attach survivor"])
def test_another_cluster_closes_the_old_dashboard(ip, magics, cluster, line):
    """The old cluster has no subscriber, so the kernel can free it; the new cluster has its own."""
    assert len(cluster.subscribers) == 1
    ip.run_cell("%elastic_stop")
    ip.run_cell(line)
    assert magics.cluster is not cluster
    assert (len(cluster.subscribers), len(magics.cluster.subscribers)) == (0, 1)


def test_attaching_gives_what_starting_gives(ip, magics, capsys):
    """The cluster, its job and the dashboard. It fails with one line if there is no such cluster, or another one runs."""
    assert output_of(ip, capsys, "%elastic_attach missing").startswith("UsageError: there is no cluster 'missing'")
    assert magics.cluster is None
    ip.run_cell("%elastic_attach survivor --cluster c --job j")
    assert ip.user_ns["c"] is magics.cluster
    assert magics.cluster.options["name"] == "survivor"
    assert ip.user_ns["j"] is magics.cluster.job
    assert "application/vnd.jupyter.widget-view+json" in ip.displayed[0]
    assert "a cluster is running already" in output_of(ip, capsys, "%elastic_attach other")


def test_detaching_lets_the_kernel_start_another_cluster(ip, magics, cluster, capsys):
    """Another kernel may attach to the cluster then."""
    assert output_of(ip, capsys, "%elastic_detach") == ""
    assert cluster.calls[-1] == ("detach",)
    assert "no cluster is running" in output_of(ip, capsys, "%elastic_detach")


def test_a_lease_needs_keep(ip, magics, capsys):
    """Options without an effect are refused; with --keep both are passed."""
    assert output_of(ip, capsys, "%elastic_start --lease 5") == "UsageError: --lease has no effect without --keep."
    ip.run_cell("%elastic_start --keep --lease 60 --no-dashboard")
    assert magics.cluster.options == {"hosts": None, "min": 1, "max": None, "keep": True, "lease": 60.0}


def test_clusters_are_listed():
    """In plain text and in HTML; a cluster's problem is shown; names are not treated as markup."""
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


def test_stopping_without_a_cluster_is_allowed(ip, magics, capsys):
    """The last cell of a notebook may be run twice, or alone."""
    assert output_of(ip, capsys, "%elastic_stop") == "No cluster is running."


def test_a_wrong_option_ends_no_lost_cluster(ip, cluster, capsys):
    """`%elastic_attach` can still take it over."""
    cluster.died = True
    cluster.update(phase="finished", reason="its driver was lost")
    assert output_of(ip, capsys, "%elastic_start --lease 60") == "UsageError: --lease has no effect without --keep."
    assert ("close",) not in cluster.calls
    ip.run_line_magic("elastic_start", "--hosts localhost:2")
    assert ("close",) in cluster.calls


def test_a_start_that_times_out_leaves_the_cluster(ip, capsys):
    """The error names what is missing; the user can add hosts to the cluster, or stop it."""

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
    shown = output_of(ip, capsys, "%elastic_start --min 2 --timeout 5 --no-dashboard")
    assert shown == "WaitTimeoutError: 0 of min 2 workers ready after 5 s; waiting for gpu1."
    assert magics.cluster.status().phase != "finished"
    assert "px" in ip.magics_manager.magics["cell"]
    magics.unregister()


def test_ctrl_c_ends_the_wait_and_not_the_cluster(ip, magics, cluster, capsys):
    """An interrupted wait shows one line, and the next magic works."""
    cluster.raises = KeyboardInterrupt()
    shown = output_of(ip, capsys, "%elastic_wait --world 4")
    assert (
        shown
        == "KeyboardInterrupt: no longer waiting; the cluster and its job go on, and %elastic_dashboard shows them."
    )
    cluster.raises = None
    assert output_of(ip, capsys, "%elastic_wait --world 4 --timeout 3") == ""
    assert cluster.calls[-1] == ("wait", 4, 3.0)


def test_requests_are_passed_with_the_magic_they_came_from(ip, magics, cluster, capsys):
    """Add, remove, scale and stop print nothing and return at once."""
    lines = (
        "%elastic_add 127.0.0.2:2 127.0.0.3:1",
        "%elastic_remove localhost --now",
        "%elastic_remove 127.0.0.2 --in 30",
    )
    shown = output_of(ip, capsys, "\n".join((*lines, "%elastic_scale --min 1 --max 3", "%elastic_stop --job")))
    assert shown == ""
    orders = [call for call in cluster.calls if any(str(part).startswith("%") for part in call)]
    assert orders == [
        ("add_host", "127.0.0.2:2", "%elastic_add"),
        ("add_host", "127.0.0.3:1", "%elastic_add"),
        ("remove_host", "localhost", True, "%elastic_remove"),
        ("remove_host", "127.0.0.2", False, "%elastic_remove", 30.0),
        ("scale", 1, 3, "%elastic_scale"),
        ("stop_job", "%elastic_stop"),
    ]


def test_an_unknown_host_is_reported_in_one_line(ip, magics, cluster, capsys):
    """Errors of the cluster have no traceback, and keep their type for code that catches them."""
    assert output_of(ip, capsys, "%elastic_remove nowhere") == "UsageError: there is no host 'nowhere'."
    with pytest.raises(UsageError):
        ip.run_line_magic("elastic_remove", "nowhere")


def test_status_and_logs_are_plain_text(ip, magics, cluster, capsys):
    """Both are readable without a widget; between jobs the status has nothing that changes from run to run."""
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
    cluster.update(outcome="succeeded")
    assert "steps/s" not in repr(ip.run_cell("%elastic_status").result)
    cluster.run_cell("pass")
    assert output_of(ip, capsys, "%elastic_logs 1 --tail 5") == "rank=1 worker=None tail=5"


def test_equal_stacks_are_printed_once(ip, cluster, capsys):
    """With their ranks and place; ranks that are behind and workers that do not answer are marked."""
    cluster.shown_stacks = [
        WorkerStack("a/0#1", 0, "train.py:9", "  all_reduce\n"),
        WorkerStack("a/1#1", 1, "train.py:4 in load", "  sleep\n", "3 s behind at commit 2"),
        WorkerStack("b/0#1", 2, "train.py:9", "  all_reduce\n"),
        WorkerStack("b/1#1", None, "", ""),
    ]
    assert output_of(ip, capsys, "%elastic_stacks").split("\n") == [
        "ranks 0, 2 · a/0#1, b/0#1 · train.py:9",
        "  all_reduce",
        "",
        "rank 1 · a/1#1 · train.py:4 in load · 3 s behind at commit 2",
        "  sleep",
        "",
        "b/1#1 · no answer: its process is suspended, or C code holds the GIL",
    ]
    assert output_of(ip, capsys, "%elastic_stacks 1").startswith("rank 1 · a/1#1")
    assert output_of(ip, capsys, "%elastic_stacks 7") == "UsageError: there is no rank 7 now."


def test_a_restart_is_logged_with_the_magic_it_came_from(ip, cluster):
    """The requests carry the magic's name."""
    ip.run_cell("%elastic_restart localhost/0#1 localhost/1#1")
    assert [call for call in cluster.calls if call[0] == "restart"] == [
        ("restart", "localhost/0#1", "%elastic_restart"),
        ("restart", "localhost/1#1", "%elastic_restart"),
    ]


def test_a_trace_is_written_and_a_missing_folder_is_reported(ip, cluster, capsys, tmp_path):
    """As JSON, for Perfetto."""
    file = tmp_path / "trace.json"
    assert output_of(ip, capsys, f"%elastic_trace {file}").startswith(f"{file} has been written")
    assert json.loads(file.read_text()) == {"traceEvents": []}
    missing = tmp_path / "no" / "trace.json"
    message = output_of(ip, capsys, f"%elastic_trace {missing}")
    assert message == f"UsageError: {missing} cannot be written: No such file or directory."
