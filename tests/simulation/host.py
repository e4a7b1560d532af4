"""A machine of a simulation: the real `agent.protocol`, and the workers that its agent has forked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbelastic.agent import protocol
from nbelastic.protocol import agent_messages, messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import Interface, WorkerId
from tests.simulation.network import DRIVER, Channel
from tests.simulation.worker import LEASE, Worker

if TYPE_CHECKING:
    from tests.simulation.world import World

CHECK = 0.1  # seconds between two looks at process states
BOOT = (0.05, 0.4)  # seconds from a worker's fork to its first message
NOTICE = 30.0
PORT = 4711


class Agent:
    """Of one host. `number`: which of its agents."""

    def __init__(self, world: World, host: str, number: int) -> None:
        self.world, self.host, self.number = world, host, number
        self.protocol = protocol.Protocol(host, LEASE, NOTICE)
        self.workers: dict[WorkerId, Worker] = {}
        self._to_driver = Channel(world.network, host, DRIVER)
        self.to_here = Channel(world.network, DRIVER, host)
        self._channels: dict[WorkerId, tuple[Channel, Channel]] = {}
        self.is_alive = True
        self.term = world.drivers.term  # of the newest driver
        self._home = ""  # the address of its workers' stores
        self.heard_at: float | None = None  # when the driver received its last message
        self._checks = False

    @property
    def _interfaces(self) -> tuple[Interface, ...]:
        return (Interface("eth0", self.world.address_of(self.host)),)

    @property
    def _now(self) -> float:
        return self.world.now_on(self.host)

    def start(self) -> None:
        self._send(ev.AgentReady(self.host, self.number, self._interfaces, PORT))

    def _send(self, message: Any) -> None:
        self._to_driver.send(self.world.from_agent, self, self.term, message)

    def _send_hello(self) -> None:
        """Begin a new session: what the last driver has not received is dropped."""
        self._to_driver.close()
        self._to_driver = Channel(self.world.network, self.host, DRIVER)
        known = self.protocol
        self._send(
            agent_messages.AgentHello(
                self.host, self.number, {}, self._interfaces, PORT, self._home, known.workers, dict(known.newest)
            )
        )

    def introduce(self, driver: messages.NewDriver) -> None:
        """A new driver reaches the agent and its workers."""
        self.to_here.send(self.receive, driver)
        for w in self.workers:
            self.send_to_worker(w, driver)

    def lose_orders(self) -> None:
        """The driver has died."""
        for channel in (self.to_here, *(down for _, down in self._channels.values())):
            channel.lose_some()

    def receive(self, message: Any) -> None:
        if not self.is_alive:
            return
        if isinstance(message, messages.NewDriver):
            self.term = max(self.term, message.term)
        if isinstance(message, messages.Rehome):
            self._home = message.address
        if isinstance(message, agent_messages.Probe):
            network, target = self.world.network, self.world.host_at(message.addresses)
            reached = message.addresses if network.joined(self.host, target) else ()
            self._send(ev.Probed(self.host, message.target, reached, message.number))
        else:
            self._carry_out(self.protocol.handle(message, self._now))

    def _carry_out(self, actions: list[protocol.Action]) -> None:
        for action in actions:
            match action:
                case protocol.Send(message=message):
                    self._send(message)
                case protocol.SendHello():
                    self._send_hello()
                case protocol.Fork(order=order):
                    self._fork(order.worker)
                case protocol.Signal(worker=w, kill=kill):
                    worker = self.workers.get(w)
                    if worker is not None and worker.is_alive and (kill or not worker.is_stopped):
                        self.kill(w, -9 if kill else -15)
                    self._check_soon()
                case protocol.End():
                    self.die()

    def _fork(self, w: WorkerId) -> None:
        up, down = Channel(self.world.network, self.host, DRIVER), Channel(self.world.network, DRIVER, self.host)
        worker = Worker(self.world, w, self._send_for, self._renew)
        self.workers[w], self._channels[w] = worker, (up, down)
        self._carry_out(self.protocol.forked(w, 1000))
        self.world.clock.after(self.world.rng.uniform(*BOOT), worker.start)

    def _send_for(self, worker: Worker, message: Any) -> None:
        self._channels[worker.id][0].send(self.world.from_worker, worker.id, worker.term, message)

    def _renew(self, w: WorkerId) -> None:
        """The worker begins a new session."""
        up, down = self._channels[w]
        up.close()
        self._channels[w] = Channel(self.world.network, self.host, DRIVER), down

    def send_to_worker(self, w: WorkerId, message: Any) -> None:
        """The driver's link to a worker."""
        if w in self._channels:
            self._channels[w][1].send(self._pass_on, w, message)

    def _pass_on(self, w: WorkerId, message: Any) -> None:
        worker = self.workers.get(w)
        if worker is not None:
            worker.receive(message)

    def kill(self, w: WorkerId, code: int) -> None:
        """The worker's process ends."""
        worker = self.workers.pop(w, None)
        if worker is not None:
            worker.die()
            self._channels.pop(w)[1].close()
            self.world.clock.after(self.world.rng.uniform(0.0, 0.02), self._reap, w, code)

    def _reap(self, w: WorkerId, code: int) -> None:
        if self.is_alive:
            self._carry_out(self.protocol.exited(w, code))

    def _check_soon(self) -> None:
        """Look at the states of processes while one is stopped or must end."""
        if not self._checks:
            self._checks = True
            self.world.clock.after(CHECK, self._check)

    def _check(self) -> None:
        self._checks = False
        if self.is_alive:
            states = {w: "T" if worker.is_stopped else "S" for w, worker in self.workers.items()}
            self._carry_out(self.protocol.check_states(states, self._now))
            self._carry_out(self.protocol.check_end(self._now))
            if any(worker.is_stopped for worker in self.workers.values()):
                self._check_soon()

    def stop_worker(self, w: WorkerId) -> None:
        """SIGSTOP."""
        self.workers[w].stop()
        self._check_soon()

    def announce_end(self, within: float) -> None:
        """SIGTERM to the agent."""
        now = self._now
        self._carry_out(self.protocol.will_end(now + within, "SIGTERM to its agent", now))
        self.world.clock.after(within, self._check_soon)

    def die(self) -> None:
        """The machine's processes end."""
        if self.is_alive:
            self.is_alive = False
            self._to_driver.close()
            self.to_here.close()
            for w in list(self.workers):
                self.workers.pop(w).die()
                for channel in self._channels.pop(w):
                    channel.close()
            self.world.agent_died(self)
