"""A partition that its host opens, and closes later, in a task of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop.delivery.operator_requests import RequestPlace
from delta_prop.delivery.request_executor import RequestExecutor
from delta_prop.partition.partition import Partition

if TYPE_CHECKING:
    from delta_prop.api.settings import Settings
    from delta_prop.delivery.operator_worker import OperatorWorker
    from delta_prop.platform.ports import World
    from delta_prop_broker.catalogue.store import PartitionPlace
    from delta_prop_broker.log.data_directory import DataDirectory
    from delta_prop_broker.log.settings import LogSettings


class _HostedPropagator(Propagator):
    """A propagator whose log is one of several in an open data directory."""

    def __init__(
        self,
        data: DataDirectory,
        place: PartitionPlace,
        *,
        request_place: RequestPlace,
        worker: OperatorWorker,
        settings: Settings,
        log_settings: LogSettings,
        world: World,
    ) -> None:
        super().__init__(settings, world=world)
        self._data = data
        self._place = place
        self._request_place = request_place
        self._worker = worker
        self._log_settings = log_settings

    @property
    def request_executor(self) -> RequestExecutor | None:
        """The executor of operators' requests, while this is open."""
        return self._request_executor

    async def _open_partition(self, world: World) -> Partition:
        return await Partition.open_in(self._data, self._place, self._log_settings, self.settings, world)

    def _make_request_executor(self) -> RequestExecutor:
        return RequestExecutor(self._partition, self._sinks, self._request_place, self._data.disk)

    async def _start_operator_worker(self) -> None:
        """Carry out earlier requests; the host has one worker for all its partitions."""
        assert self._request_executor is not None
        await self._worker.carry_out_earlier(self._request_executor)


class HostedPartition:
    """A partition from its opening to its end. `run` is its task.

    `propagator`: None unless it is open. `failure`: why it did not open, or failed to close. `is_leaving`:
    set before it is told to close, so that nobody begins to use it. `users`: how many use it at present.
    """

    def __init__(
        self,
        data: DataDirectory,
        place: PartitionPlace,
        *,
        request_place: RequestPlace,
        worker: OperatorWorker,
        settings: Settings,
        log_settings: LogSettings,
        world: World,
    ) -> None:
        self.propagator: _HostedPropagator | None = None
        self.failure: Exception | None = None
        self.closed = anyio.Event()
        self.is_leaving = False
        self.users = 0
        self._propagator = _HostedPropagator(
            data,
            place,
            request_place=request_place,
            worker=worker,
            settings=settings,
            log_settings=log_settings,
            world=world,
        )
        self._opened, self._closing = anyio.Event(), anyio.Event()

    @property
    def is_closing(self) -> bool:
        """True once it leaves, was told to close, or has failed to open."""
        return self.is_leaving or self._closing.is_set() or self.closed.is_set()

    async def run(self) -> None:
        """Open the partition, and close it once `begin_close` was called.

        Raises only if the partition ends by itself; `failure` holds other errors.
        """
        try:
            async with self._propagator:
                self.propagator = self._propagator
                self._opened.set()
                await self._closing.wait()
                self.propagator = None
        except Exception as failure:
            self.failure = failure
            if self._opened.is_set() and not self._closing.is_set():
                raise  # a task of the partition has a defect: it must not end silently
        finally:
            self.propagator = None
            self._opened.set()
            self.closed.set()

    @property
    def request_executor(self) -> RequestExecutor | None:
        """The executor of operators' requests, while it is open and does not close."""
        propagator = self.propagator
        return None if propagator is None or self.is_closing else propagator.request_executor

    async def wait_open(self) -> Propagator | None:
        """Return the propagator once it is open; None if it closes. Raises what its opening raises."""
        await self._opened.wait()
        if self.propagator is None and self.failure is not None:
            raise self.failure
        return self.propagator

    def begin_close(self) -> None:
        """Have `run` close the partition; `closed` is set once it has."""
        self._closing.set()

    def alter_retention(self, log_settings: LogSettings) -> None:
        """Retain its log's rows by these settings from now on."""
        storage = None if self.propagator is None else self.propagator.internals().partition.storage
        if storage is not None:
            storage.log.alter_retention(log_settings)
