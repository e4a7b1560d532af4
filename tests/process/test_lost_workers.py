"""Workers are lost in many ways, and the training goes on without a lost step, with the same numbers on all ranks."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import nbelastic as nbe
from nbelastic.protocol.exit_codes import HUNG
from tests.process import programs
from tests.process.training import by_rank
from tests.support.processes import agent_of_worker, alive
from tests.support.waiting import until

pytestmark = pytest.mark.on_both


def deaths(training):
    """The events of lost workers, without survivors that gloo did not wake: about one in a hundred is replaced."""
    return [event for event in training.events("worker-lost") if f"exit code {HUNG}" not in event.text]


@pytest.mark.on_both(always=True)
@pytest.mark.parametrize(
    ("which", "sig"),
    [(0, signal.SIGKILL), (-1, signal.SIGKILL), (1, signal.SIGSEGV)],
    ids=["rank 0 killed", "last rank killed", "segfault"],
)
def test_a_worker_dies(trains_on, which, sig):
    """When any rank ends by a signal, the others go on at once, and the world grows back to its size."""
    training = trains_on()
    victim = training.wait_for_world(3)[which]
    training.signal_worker(victim, sig)
    training.wait_for_world(3)
    results = training.finish()
    assert len(results) == 3
    assert victim.pid not in {result["pid"] for result in results}
    (lost,) = deaths(training)
    assert (lost.worker, lost.host) == (victim.id, "localhost")
    assert sig.name in lost.text
    assert len(training.events("world-broken")) == 1


@pytest.mark.on_both(never=True)
def test_a_wait_right_after_a_kill_ends_with_the_next_world(trains_on):
    """A wait for a world of three, right after one of three was killed, ends when its replacement trains."""
    training = trains_on()
    victim = training.wait_for_world(3)[1]
    os.kill(victim.pid, signal.SIGKILL)
    world = {worker.pid for worker in training.cluster.wait(3, timeout=30).workers if worker.rank is not None}
    assert len(world) == 3
    assert victim.pid not in world


@pytest.mark.soak(share=0.2)
def test_a_rank_that_holds_the_interpreter_lock_is_not_replaced(trains):
    """An unresponsive worker whose process runs is not killed, even after three times `silence`: its world trains on."""
    training = trains("localhost:2", program=programs.train_and_hold_lock, min=1, silence=1.0)
    members = training.wait_for_world(2)
    (training.folder / "hold").touch()
    (event,) = until(lambda: training.events("worker-silent"), what="the unresponsive rank to be reported")
    assert event.worker in {member.id for member in members}
    assert "though its host answers; its process" in event.text
    time.sleep(2.0)  # it was reported after 1 s of silence; more silence must change nothing
    programs.release_lock(training.folder)
    steps = training.lines()[-1]["step"]
    until(lambda: training.lines()[-1]["step"] > steps + 20, what="steps after it")
    assert [member.pid for member in training.wait_for_world(2)] == [member.pid for member in members]
    assert not training.events("worker-lost")
    assert not training.events("world-broken")
    training.finish()


def test_a_worker_ends_itself(make, tmp_path):
    """`os._exit(3)` in the user's code is a failure: the event names the exit code, and the others train on."""
    cluster = make("localhost:2", min=1)
    cluster.wait(2)

    def program(folder):
        state = nbe.ObjectState(step=0)

        @nbe.elastic
        def loop(state):
            flag = Path(folder) / "once"
            while not programs.any_rank_finds(folder, "finish"):
                state.step += 1
                state.commit()
                if state.step >= 20 and nbe.rank() == 1 and not flag.exists():  # the reconfiguration may come late
                    flag.touch()
                    os._exit(3)
                if state.step >= 60 and nbe.rank() == 0 and flag.exists():  # a reconfiguration may come at any commit
                    (Path(folder) / "finish").touch()
                time.sleep(0.01)
            return nbe.size()

        return loop(state)

    sizes = cluster.run(program, str(tmp_path)).result(timeout=30)
    assert sizes == [len(sizes)] * len(sizes)  # every rank of the last generation knows its size
    assert sizes
    assert any("exit code 3" in event.text for event in cluster.events if event.kind == "worker-lost")


@pytest.mark.on_both(always=True)
def test_two_die_at_once(trains):
    """When two of four workers are killed at once, one recovery is enough, and four train again."""
    training = trains("localhost:4", min=1, max=4)
    ranks = training.wait_for_world(4)
    for victim in (ranks[0], ranks[2]):
        os.kill(victim.pid, signal.SIGKILL)
    until(lambda: not {ranks[0].id, ranks[2].id} & {w.id for w in training.cluster.workers})
    training.wait_for_world(4)
    assert len(training.finish()) == 4


@pytest.mark.on_both(always=True)
def test_one_dies_during_the_recovery_from_another(trains):
    """A second loss may come at any moment of a recovery: while ranks wait, form or receive the state."""
    training = trains("localhost:4", min=1, max=4)
    for pause in (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
        ranks = training.wait_for_world(4)
        os.kill(ranks[1].pid, signal.SIGKILL)
        time.sleep(pause)  # the test tries different moments
        os.kill(ranks[2].pid, signal.SIGKILL)
        until(lambda victims={ranks[1].id, ranks[2].id}: not victims & {w.id for w in training.cluster.workers})
    training.wait_for_world(4)
    assert len(training.finish()) == 4


@pytest.mark.soak
def test_many_deaths_in_a_row(trains_on):
    """Six kills of different ranks: only the killed workers are lost, and every step is made once."""
    training = trains_on()
    victims = []
    for number in range(6):
        victims.append(training.wait_for_world(3)[number % 3])
        training.signal_worker(victims[-1])
    training.wait_for_world(3)
    training.finish()
    lost = [event.text for event in deaths(training)]
    assert lost == [f"{victim.id} died (SIGKILL)" for victim in victims]


@pytest.mark.parametrize("which", [0, 1])
def test_a_stopped_process_is_replaced_and_does_not_come_back(trains_on, which):
    """The others go on without a worker that got SIGSTOP. When it is continued later, it has already been ended."""
    training = trains_on()
    victim = training.wait_for_world(3)[which]
    training.signal_worker(victim, signal.SIGSTOP)
    training.wait_for_world(3)
    until(lambda: not alive(victim.pid), 5)
    assert victim.id not in {w.id for w in training.cluster.workers}
    assert "stopped" in training.events("worker-lost")[0].text
    assert len(training.finish()) == 3


def test_a_process_continued_at_once_trains_on_or_is_replaced(trains):
    """After SIGSTOP and an immediate SIGCONT a worker either trains on or is replaced, never both."""
    # with min=3 the others wait for its successor, even if they miss the worker only at the end
    training = trains("localhost:3", min=3, max=3)
    for pause in (0.05, 0.15, 0.25, 0.35):
        victim = training.wait_for_world(3)[1]
        try:
            os.kill(victim.pid, signal.SIGSTOP)  # the last worker may only end now
            time.sleep(pause)  # around the moment of the agent's second check
            os.kill(victim.pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
    training.wait_for_world(3)
    assert len(training.finish()) == 3


def test_below_min_and_back(trains):
    """Below `min` the survivors wait with their state and the reason; when a host joins, they resume at the same step."""
    training = trains("localhost:2", min=2, cooldown=(60, 60))
    training.signal_worker(training.wait_for_world(2)[1])  # the first failure restarts at once
    survivor, victim = training.wait_for_world(2)
    training.signal_worker(victim)  # now its slot is in back-off
    status = until(lambda: "1 of min 2 workers ready" in (s := training.cluster.status()).reason and s)
    assert status.phase == "waiting"
    assert "in back-off" in status.reason
    # only the survivor's lines: the victim may have made a step that did not reach it
    before = max(line["step"] for line in training.lines() if line["pid"] == survivor.pid)
    training.cluster.add_host("127.0.0.2:1")
    training.wait_for_world(2)
    pids = {result["pid"] for result in training.finish()}
    # gloo does not wake one survivor in a hundred: then its successor resumes from the state that it kept
    kept = [event.worker for event in training.events("state-kept")]
    assert survivor.pid in pids or kept == [survivor.id], training.cluster.events
    begun = [line for line in training.lines("begin") if line["generation"] == training.lines()[-1]["generation"]]
    assert min(line["begin"] for line in begun) >= before


def test_all_die(trains):
    """When all ranks are lost, no state is left: the job fails with that reason, and the cluster takes the next job."""
    training = trains("localhost:2", min=2, max=2)
    ranks = training.wait_for_world(2)
    for victim in ranks:
        os.kill(victim.pid, signal.SIGKILL)
    error = training.job.exception(timeout=20)
    assert isinstance(error, nbe.JobError)
    assert "no worker is left that holds the training state" in str(error)
    assert "SIGKILL" in str(error)
    training.cluster.wait(2, timeout=20)
    assert len(training.events("job-failed")) == 1
    assert [row["rank"] for row in training.cluster.run(programs.describe_ranks).result(timeout=20)] == [0, 1]


def test_the_reset_limit_ends_the_job_with_that_reason(trains):
    """When there are more breaks than `reset_limit`, the job fails with that reason. Reconfigurations do not count."""
    explained = {"grace": 20}  # seconds: the loss is the reason, even if the agent reports it late
    training = trains("localhost:2", min=1, reset_limit=1, timeouts=explained)
    training.wait_for_world(2)
    training.cluster.add_host("127.0.0.2:1")
    training.wait_for_world(3)
    training.cluster.remove_host("127.0.0.2")
    training.signal_worker(training.wait_for_world(2)[1])
    training.signal_worker(training.wait_for_world(2)[0])
    error = training.job.exception(timeout=20)
    assert "2 resets exceed reset_limit=1" in str(error)
    assert "SIGKILL" in str(error)


@pytest.mark.on_both(seconds=12)
@pytest.mark.soak(share=0.2)
def test_elastic_timeout_names_what_it_waited_for(trains):
    """When workers are too few for `elastic_timeout`, the job fails, and the error says what was missing."""
    training = trains("localhost:2", min=2, elastic_timeout=10, cooldown=(60, 60))
    training.signal_worker(training.wait_for_world(2)[1])  # its successor must come within this time too
    training.signal_worker(training.wait_for_world(2)[1])
    error = training.job.exception(timeout=20)
    assert "1 of min 2 workers ready for 10 s" in str(error)
    assert "in back-off" in str(error)


@pytest.mark.on_both(seconds=20)
def test_a_killed_agent_is_started_again_with_its_workers(trains):
    """When an agent is killed, its host and workers are lost; the others go on, and the host is started again."""
    training = trains("localhost:2,127.0.0.2:1", min=1)
    training.wait_for_world(3)
    remote = next(w for w in training.cluster.workers if w.host == "127.0.0.2")
    agent = agent_of_worker(remote)
    os.kill(agent.pid, signal.SIGKILL)
    until(lambda: training.events("host-lost"))
    until(lambda: not alive(remote.pid), 5)
    training.wait_for_world(2)
    training.wait_for_world(3)
    assert len(training.finish()) == 3


def test_the_template_dies(trains):
    """When the template is killed, the workers of its host end with it, and all of them are replaced."""
    training = trains("localhost:2,127.0.0.2:1", min=1)
    training.wait_for_world(3)
    remote = next(w for w in training.cluster.workers if w.host == "127.0.0.2")
    os.kill(psutil.Process(remote.pid).ppid(), signal.SIGKILL)
    until(lambda: not alive(remote.pid), 5)
    until(lambda: all(w.id != remote.id for w in training.cluster.workers))
    training.wait_for_world(3)
    assert len(training.finish()) == 3


def test_a_rank_that_sleeps_between_collectives_is_not_replaced(trains_on):
    """A rank that sleeps 3 s between collectives while another is lost is not replaced: it joins the next world itself."""
    training = trains_on(slow={"sleep": 3.0})
    training.wait_for_world(3)
    (training.folder / "sleep").touch()
    sleeper = int(until(lambda: (f := training.folder / "sleep.begun").exists() and f.read_text()))
    victim = next(w for w in by_rank(training.cluster) if w.pid != sleeper)
    training.signal_worker(victim)
    training.wait_for_world(3)
    assert sleeper in {result["pid"] for result in training.finish()}
    assert len(deaths(training)) == 1


@pytest.mark.soak(share=0.2)
def test_a_survivor_that_never_wakes_is_replaced(trains):
    """When a rank sleeps ten minutes after a loss, the others wait at most `recover` for it, and lose no step."""
    kwargs = {"slow": {"sleep": 600.0}}
    training = trains("localhost:3", min=1, max=3, timeouts={"recover": 3}, kwargs=kwargs)
    training.wait_for_world(3)
    left = training.cluster.status().generation
    (training.folder / "sleep").touch()
    sleeper = int(until(lambda: (f := training.folder / "sleep.begun").exists() and f.read_text()))
    asleep = next(w.id for w in by_rank(training.cluster) if w.pid == sleeper)
    training.signal_worker(next(w for w in by_rank(training.cluster) if w.pid != sleeper))
    training.wait_for_world(3)
    assert sleeper not in {result["pid"] for result in training.finish()}
    replaced = [event.text for event in training.events("worker-lost") if event.worker == asleep]
    assert replaced == [f"{asleep} did not leave generation {left} while others waited"]


@pytest.mark.on_both(never=True)  # NCCL's abort leaves no rank asleep
def test_the_last_holder_of_the_state_hangs(trains):
    """One of two ranks is lost, the other hangs: the successor of the hung one resumes from its state and commit."""
    training = trains("localhost:2", program=programs.train_and_hang, min=1, max=2)
    members = training.wait_for_world(2)
    (training.folder / "stick").touch()
    until(lambda: training.events("state-kept"), what="the state to be kept")
    training.wait_for_world(2)
    assert not {result["pid"] for result in training.finish()} & {member.pid for member in members}
    (kept,) = training.events("state-kept")
    assert kept.worker == members[1].id


def test_children_of_a_killed_worker_end_with_it(make):
    """Data loaders and other children of a killed worker end with it."""
    cluster = make("localhost:2", min=2)
    rows = cluster.execute("import subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)", timeout=20)
    child = int(rows[0][1])
    os.kill(cluster.workers[0].pid, signal.SIGKILL)
    until(lambda: not alive(child), 5)
    cluster.wait(2, timeout=20)
    assert alive(int(rows[1][1]))


def test_a_state_without_a_model(trains_on):
    """A state of counters and lists, without a model, is recovered too."""
    training = trains_on(programs.count)
    training.signal_worker(training.wait_for_world(3)[0])
    training.wait_for_world(3)
    assert len(set(training.finish())) == 1


def test_an_agent_that_dies_while_its_template_starts(make):
    """A template whose agent dies while the template starts ends too, and forks no worker."""
    cluster = make("127.0.0.2:1", min=1)
    agent = agent_of_worker(cluster.workers[0])

    def templates(but: int = 0) -> list[psutil.Process]:
        others = [child for child in agent.children() if child.pid != but]
        return [child for child in others if "forkserver" in " ".join(child.cmdline())]

    (old,) = templates()
    old.kill()
    (new,) = until(lambda: templates(but=old.pid))
    agent.kill()
    until(lambda: not alive(new.pid))
    cluster.wait(1, timeout=30)
