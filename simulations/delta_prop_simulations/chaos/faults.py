"""Injects the planned faults at their times, and heals all at the end. Those without a target are missed."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.testing import NetworkConditions, VirtualNetwork
from delta_prop_simulations.chaos.node import RESTART_DELAY_S, ClientHost, Host, Node, disk_failures
from delta_prop_simulations.chaos.plan import StrikePlan
from delta_prop_simulations.chaos.workload import Reader
from delta_prop_simulations.disk import SimDisk
from delta_prop_simulations.disk_faults import SimCrash
from delta_prop_simulations.machine import Machine, ThreadFaults
from delta_prop_sinks import TryAgain
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_simulations.trace import Trace

_STALL_S = 1.5
"""The longest stall of a call on a slow disk."""
_FREE_BYTES = 300
"""The free space of a full disk."""
_LAST_CALL_S_MAX = 5.0
"""The longest wait for the disk call at which the process or the machine ends."""


class Nemesis:
    """Injects the planned faults until `heal`, and counts those of each kind that had an effect, or none."""

    def __init__(
        self, strikes: Sequence[StrikePlan], hosts: Mapping[str, Host], network: VirtualNetwork, trace: Trace
    ) -> None:
        self.fault_counts: Counter[str] = Counter()
        self.missed_counts: Counter[str] = Counter()
        self._strikes = strikes
        self._hosts = hosts
        self._network = network
        self._trace = trace
        self._scope = anyio.CancelScope()
        self._cuts: set[tuple[str, str]] = set()
        self._slow_links: set[tuple[str, str]] = set()
        self._handlers: dict[str, Callable[[StrikePlan], Awaitable[bool]]] = {
            "kill": self._kill,
            "power": self._cut_power,
            "last call": self._crash_at_call,
            "write error": partial(self._fail_calls, names=("write", "allocate")),
            "sync error": self._sync_error,
            "read error": partial(self._fail_calls, names=("read",)),
            "disk full": self._disk_full,
            "slow disk": self._slow_disk,
            "cut": self._cut,
            "cut both": self._cut,
            "reset": self._reset,
            "slow link": self._slow_link,
            "stop": self._stop,
            "pause": self._pause,
            "detach": self._detach,
            "rebuild": self._rebuild,
            "kill writer": self._kill,
            "kill reader": self._kill,
            "stall reader": self._stall_reader,
        }

    async def run(self) -> None:
        with self._scope:
            async with anyio.create_task_group() as tasks:
                for strike in self._strikes:
                    await anyio.sleep_until(strike.at_s)
                    tasks.start_soon(self._strike, strike)

    async def _strike(self, strike: StrikePlan) -> None:
        self._trace.note("strike", strike.kind, strike.on, strike.for_s)
        try:
            has_struck = await self._handlers[strike.kind](strike)
        except SimCrash:  # a call of the strike was the machine's last one, which ends the process
            has_struck = True
        if has_struck:
            self.fault_counts[strike.kind] += 1
        else:
            self.missed_counts[strike.kind] += 1

    def heal(self) -> None:
        """End all faults: heal machines, network paths and sinks, and start the processes that do not run."""
        self._trace.note("heal")
        self._scope.cancel()
        for path in sorted(self._cuts):
            self._network.heal(*path)
        self._network.conditions = NetworkConditions()
        for path in sorted(self._slow_links):
            self._network.set_path(*path, NetworkConditions())
        for host in self._hosts.values():
            host.machine.remove_disk_fault()
            host.machine.thread_faults = ThreadFaults()
            host.start_now()
            if isinstance(host, Node):
                host.heal()
            if isinstance(host, ClientHost) and isinstance(host.client, Reader):
                host.client.is_stalled = False

    async def _kill(self, strike: StrikePlan) -> bool:
        return self._hosts[strike.on].kill(strike.for_s)

    async def _cut_power(self, strike: StrikePlan) -> bool:
        return self._hosts[strike.on].cut_power(strike.for_s)

    async def _stop(self, strike: StrikePlan) -> bool:
        return self._node(strike.on).stop(strike.for_s)

    async def _stall_reader(self, strike: StrikePlan) -> bool:
        host = self._hosts[strike.on]
        assert isinstance(host, ClientHost)
        assert isinstance(host.client, Reader)
        host.client.is_stalled = True
        await anyio.sleep(strike.for_s)
        host.client.is_stalled = False
        return True

    async def _crash_at_call(self, strike: StrikePlan) -> bool:
        host = self._hosts[strike.on]
        process = host.machine.process
        if process is None or process.has_ended:
            return False
        host.delay_start(strike.for_s)
        disk = host.machine.disk
        disk.crash_at(disk.calls + int(strike.amount))
        with anyio.move_on_after(_LAST_CALL_S_MAX):
            await process.ended.wait()
        return disk.is_off

    async def _fail_calls(self, strike: StrikePlan, names: Sequence[str]) -> bool:
        machine = self._hosts[strike.on].machine
        before = sum(machine.disk_fault_counts.values())
        machine.add_disk_fault(
            strike.kind, lambda disk: disk.fail(lambda call: call.name in names, errno.EIO, times=None)
        )
        await anyio.sleep(strike.for_s)
        machine.remove_disk_fault(strike.kind)
        return sum(machine.disk_fault_counts.values()) > before

    async def _sync_error(self, strike: StrikePlan) -> bool:
        machine = self._hosts[strike.on].machine
        before = sum(machine.disk_fault_counts.values())
        machine.disk.fail(lambda call: call.name in ("sync", "sync_directory"), errno.EIO)
        await anyio.sleep(1.0)
        return sum(machine.disk_fault_counts.values()) > before

    async def _disk_full(self, strike: StrikePlan) -> bool:
        machine = self._hosts[strike.on].machine
        before = _count_full_disk_faults(machine)

        def inject(disk: SimDisk) -> None:
            disk.capacity_bytes = disk.used_bytes + _FREE_BYTES

        machine.add_disk_fault(strike.kind, inject)
        await anyio.sleep(strike.for_s)
        machine.remove_disk_fault(strike.kind)
        return _count_full_disk_faults(machine) > before

    async def _slow_disk(self, strike: StrikePlan) -> bool:
        machine = self._hosts[strike.on].machine
        before, stalled = machine.thread_faults, machine.event_counts["thread stalled"]
        machine.thread_faults = replace(before, stalls=0.5, stall_s=_STALL_S * strike.amount / 60)
        await anyio.sleep(strike.for_s)
        machine.thread_faults = before
        return machine.event_counts["thread stalled"] > stalled

    async def _cut(self, strike: StrikePlan) -> bool:
        source, target = strike.on.split(">")
        paths = [(source, target)] if strike.kind == "cut" else [(source, target), (target, source)]
        for path in paths:
            self._cuts.add(path)
            self._network.cut(*path)
        await anyio.sleep(strike.for_s)
        for path in paths:
            self._network.heal(*path)
        return True

    async def _reset(self, strike: StrikePlan) -> bool:
        has_connections = any(strike.on in connection.hosts for connection in self._network.connections)
        self._network.reset(strike.on)
        return has_connections

    async def _slow_link(self, strike: StrikePlan) -> bool:
        source, target = strike.on.split(">")
        self._slow_links.add((source, target))
        self._network.set_path(source, target, replace(self._network.conditions, bytes_per_s=strike.amount))
        await anyio.sleep(strike.for_s)
        self._network.set_path(source, target, self._network.conditions)
        return True

    async def _pause(self, strike: StrikePlan) -> bool:
        node, propagator, sink = self._sink(strike)
        if propagator is None:
            return False
        propagator.pause(sink)
        await anyio.sleep(strike.for_s)
        node.resume_paused()
        return True

    async def _detach(self, strike: StrikePlan) -> bool:
        node, propagator, sink = self._sink(strike)
        process = node.machine.process
        if propagator is None or process is None:
            return False
        try:
            await propagator.detach(sink)
        except UsageError:  # an earlier strike is detaching this sink
            return False
        await anyio.sleep(strike.for_s)
        while not process.has_ended and node.propagator is propagator:
            before = disk_failures(node.machine)
            try:
                await node.reattach(sink)
            except Refused as refused:
                if refused.code is not ErrorCode.SHUTTING_DOWN:
                    raise
            except TryAgain:
                if not process.has_ended:  # else the process was killed while the sink opened
                    raise
            except OSError:
                if disk_failures(node.machine) == before:
                    raise
                await anyio.sleep(RESTART_DELAY_S)  # the quarantine's file could not be read
                continue
            break
        return True

    async def _rebuild(self, strike: StrikePlan) -> bool:
        _, propagator, sink = self._sink(strike)
        if propagator is None:
            return False
        try:
            propagator.rebuild(sink)
        except (Refused, UsageError):
            return False
        return True

    def _sink(self, strike: StrikePlan) -> tuple[Node, Propagator | None, str]:
        """Return the node and the sink to strike, and the propagator if the sink is attached."""
        name, sink = strike.on.split("/")
        node = self._node(name)
        propagator = node.propagator
        is_attached = propagator is not None and sink in propagator.statistics().sinks
        return node, propagator if is_attached else None, sink

    def _node(self, name: str) -> Node:
        host = self._hosts[name]
        assert isinstance(host, Node)
        return host


def _count_full_disk_faults(machine: Machine) -> int:
    return machine.disk_fault_counts["no room"] + machine.disk_fault_counts["short for want of room"]
