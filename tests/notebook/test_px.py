"""`%px` in a notebook: refused during a job, and always run with the present client."""

from __future__ import annotations

from types import SimpleNamespace

from ipyparallel.client.magics import ParallelMagics
from magic_output import output_of

from nbelastic.errors import ClusterStoppedError
from nbelastic.notebook.px_guard import register_px


def test_px_is_refused_while_a_job_runs(ip, magics, cluster, capsys):
    """It would wait for the end of the job. Between jobs it runs as ipyparallel has made it. The first use connects.

    No use replaces `{names}` or `$names` in the code.
    """
    ran = []
    client = FakeClient(ip, ran)
    job = ["job-1"]
    register_px(ip, lambda: client, lambda: job[0] if job else "")
    for line in ("%px 0", "%%px\n0"):
        assert "job-1 is running, and %px would wait for its end" in output_of(ip, capsys, line)
    assert client.activated == 0
    job.clear()
    ip.user_ns["n"] = 1
    output_of(ip, capsys, "%px '{n} $n'")
    output_of(ip, capsys, "%px 2")
    job.append("job-2")
    for line in ("%px 3", "%%px\n3"):
        assert "job-2 is running, and %px would wait for its end" in output_of(ip, capsys, line)
    assert ran == [(client, "'{n} $n'"), (client, "2")]
    assert client.activated == 1


class FakeClient:
    """Records the code that its views run."""

    def __init__(self, ip, ran):
        self._ip, self.ran, self.activated = ip, ran, 0

    def direct_view(self, targets):
        return SimpleNamespace(client=self, targets=targets, block=True)

    def activate(self):
        self.activated += 1
        self._ip.register_magics(ParallelMagics(self._ip, self.direct_view("all")))
        owner = self._ip.magics_manager.magics["line"]["px"].__self__
        owner.parallel_execute = lambda *args, **_: self.ran.append((owner.view.client, args[0]))


def test_px_uses_the_present_client(ip, magics, cluster, capsys):
    """With the targets that were chosen before; after the end of the cluster it says that in one line."""
    ran, stopped = [], ClusterStoppedError("the cluster 'x' is not running: start it.")
    clients = [FakeClient(ip, ran), FakeClient(ip, ran)]

    def connect():
        if not clients:
            raise stopped
        return clients[0]

    register_px(ip, connect, lambda: "")
    output_of(ip, capsys, "%px 1")
    ip.magics_manager.magics["line"]["px"].__self__.view.targets = [0]
    del clients[0]
    output_of(ip, capsys, "%px 2")
    view = ip.magics_manager.magics["line"]["px"].__self__.view
    assert (view.client, view.targets, view.block, ran[1]) == (clients[0], [0], True, (clients[0], "2"))
    clients.clear()
    assert output_of(ip, capsys, "%px 3").strip() == f"ClusterStoppedError: {stopped}"
    assert len(ran) == 2
