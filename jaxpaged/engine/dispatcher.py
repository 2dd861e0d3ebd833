"""Where the requests of several replicas are: sent, moved when a replica is lost, and released."""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from jaxpaged.config.settings import CacheSettings
from jaxpaged.core.request import Pin, Request, TokenEvent
from jaxpaged.core.router import Prefix, Router, prefixes_of, weight_of
from jaxpaged.engine.inbox import EventSink, Inbox
from jaxpaged.engine.remote import Order, RemoteLLM
from jaxpaged.engine.replica import Replica
from jaxpaged.engine.replica_metrics import ReplicaMetrics
from jaxpaged.errors import CapacityError, EngineStopped, JaxPagedError


class Dispatcher:
    """Owned by the event loop. A request with a pin is at all replicas, any other at one."""

    def __init__(self, replicas: Sequence[Replica], cache: CacheSettings, metrics: ReplicaMetrics):
        self._replicas, self._cache, self._metrics = replicas, cache, metrics
        self._router = Router(len(replicas))
        self._places: dict[str, list[_Place]] = {}
        self._pinned: dict[str, Order] = {}  # by prefix id: a replica that comes back warms them
        self._tasks: set[asyncio.Task[Any]] = set()

    def running(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.is_running]

    async def place(self, order: Order, sink: EventSink) -> Request:
        """Send a request to the replica that suits it best.

        Raises what the engine raises.
        """
        if order.pin is not None:
            return await self._warm(order, order.pin, sink)
        return await self._place(order, sink)

    def release(self, request_id: str, *, is_finished: bool) -> None:
        """Forget a request; one that has not finished is aborted wherever it is."""
        for place in self._places.pop(request_id, ()):
            self._router.ended(place.replica.index, place.weight)
            place.llm.release(request_id, is_finished=is_finished)

    async def abort(self, request_id: str) -> None:
        """Stop a request wherever it is; its answers end where they are."""
        for place in tuple(self._places.get(request_id, ())):
            with contextlib.suppress(EngineStopped):  # it is moved or failed then
                await place.llm.abort(request_id)

    def move(self, place: "_Place", error: EngineStopped) -> None:
        """Give a request that nothing has come of to another replica; `error` if there is none."""
        self._spawn(self._move(place, error))

    def unpin(self, prefix_id: str) -> None:
        """Drop a prefix that could not be pinned everywhere."""
        self._pinned.pop(prefix_id, None)
        for replica in self.running():
            self._spawn(replica.llm.control("drop_prefix", prefix_id))

    def caches_are_empty(self) -> None:
        """Nothing is pinned or cached anywhere."""
        self._pinned.clear()
        for replica in self._replicas:
            self._router.forget(replica.index)

    def forget_pin(self, prefix_id: str) -> None:
        self._pinned.pop(prefix_id, None)

    async def refill(self, replica: Replica) -> None:
        """Bring a replica that was started again to the prefixes that the others hold."""
        self._router.forget(replica.index)
        for order in tuple(self._pinned.values()):
            request_id, inbox = f"again-{uuid.uuid4().hex}", Inbox(0)
            try:
                await replica.llm.submit_order(order._replace(request_id=request_id), inbox)
                await inbox.take()
            finally:
                replica.llm.release(request_id, is_finished=False)

    async def _move(self, lost: "_Place", error: EngineStopped) -> None:
        places = self._places.get(lost.order.request_id, [])
        if lost not in places:
            return  # its caller has left
        places.remove(lost)
        self._router.ended(lost.replica.index, lost.weight)
        try:
            await self._place(lost.order, lost.sink, lost.replica)
        except JaxPagedError:
            lost.sink.fail(error)

    async def _place(
        self, order: Order, sink: EventSink, without: Replica | None = None
    ) -> Request:
        """Send a request to the replica that suits it best, and to the next where that refuses."""
        prefixes, lost = self._prefixes(order), [] if without is None else [without]
        refusal: JaxPagedError = EngineStopped("no replica is running")
        left = [replica for replica in self.running() if replica is not without]
        while left:
            among = [replica.index for replica in left if not replica.is_stuck]
            among = among or [replica.index for replica in left]
            replica = self._replicas[self._router.choose(prefixes, among)]
            left.remove(replica)
            place = self._new_place(replica, order, sink, may_move=without is None)
            try:
                request = await self._send(place, prefixes)
            except CapacityError as error:
                refusal = error
            except EngineStopped as error:
                refusal = error
                lost.append(replica)
            else:
                for replica in lost:
                    self._metrics.moved[replica.index].inc()
                return request
        raise refusal

    async def _warm(self, order: Order, pin: Pin, sink: EventSink) -> Request:
        """Have every replica compute a prefix; the caller hears once, when all are done."""
        running, prefixes = self.running(), self._prefixes(order)
        everyone = _Everyone(self, pin.prefix_id, sink, len(running))
        places = [self._new_place(r, order, everyone, may_move=False) for r in running]
        sent = [self._send(place, prefixes) for place in places]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        given = [answer for answer in answers if isinstance(answer, Request)]
        refusals = [answer for answer in answers if isinstance(answer, BaseException)]
        real = [error for error in refusals if not isinstance(error, EngineStopped)]
        if real or not given:
            raise next(iter(real or refusals), EngineStopped("no replica is running"))
        self._pinned[pin.prefix_id] = order
        for error in refusals:
            everyone.fail(EngineStopped(str(error)))
        return given[0]

    def _new_place(
        self, replica: Replica, order: Order, sink: EventSink, *, may_move: bool
    ) -> "_Place":
        weight = weight_of(len(order.token_ids), order.params.n)
        return _Place(self, replica, replica.llm, order, weight, sink, may_move)

    async def _send(self, place: "_Place", prefixes: list[Prefix]) -> Request:
        request_id, index = place.order.request_id, place.replica.index
        places = self._places.setdefault(request_id, [])
        places.append(place)
        self._router.sent(index, prefixes, place.weight)
        try:
            request = await place.llm.submit_order(place.order, place)
            place.accepted()
        except BaseException:
            if place in places and self._places.get(request_id) is places:
                places.remove(place)
                self._router.ended(index, place.weight)
            raise
        return request

    def _prefixes(self, order: Order) -> list[Prefix]:
        cache = self._cache
        if not cache.enable_prefix_caching:
            return []
        return prefixes_of(order.token_ids, cache.page_size, order.cache_salt)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclasses.dataclass(eq=False)
class _Place:
    """Where a request is. The sink of its first event, and of a failure before that."""

    owner: Dispatcher
    replica: Replica
    llm: RemoteLLM
    order: Order
    weight: float
    sink: EventSink
    may_move: bool
    _is_accepted: bool = False
    _lost: EngineStopped | None = None

    def accepted(self) -> None:
        """The replica has taken the request; raises what ended it meanwhile."""
        if self._lost is not None:
            raise self._lost
        self._is_accepted = True

    def put(self, event: TokenEvent) -> None:
        self.llm.redirect(self.order.request_id, self.sink)  # further events take no detour
        self.sink.put(event)

    def fail(self, error: Exception) -> None:
        if isinstance(error, EngineStopped):
            self.replica.has_failed(self.llm)
            if not self._is_accepted:
                self._lost = error
                return
            if self.may_move:
                self.owner.move(self, error)
                return
        self.sink.fail(error)


@dataclasses.dataclass(eq=False)
class _Everyone:
    """The sink of a prefix that all replicas compute: its caller hears once all are done."""

    owner: Dispatcher
    prefix_id: str
    sink: EventSink
    num_left: int
    _last: TokenEvent | None = None

    def put(self, event: TokenEvent) -> None:
        self._last = event
        self._one_is_done(EngineStopped("no replica is running"))

    def fail(self, error: Exception) -> None:
        if isinstance(error, EngineStopped):
            self._one_is_done(error)  # the others' pages are as good
            return
        self.owner.unpin(self.prefix_id)
        self.sink.fail(error)

    def _one_is_done(self, error: EngineStopped) -> None:
        self.num_left -= 1
        if self.num_left == 0 and self._last is not None:
            self.sink.put(self._last)
        elif self.num_left == 0:
            self.sink.fail(error)
