from __future__ import annotations

from decant.engine.output import StepOutput
from decant.engine.plan import DeviceMemory
from decant.engine.transfer import IncomingSequence
from decant.handoff.receiver import FetchEnd, TransferResult
from decant.protos import worker_pb2 as wire
from decant.runtime.enum_names import enum_label, enum_labels
from decant.runtime.telemetry.metrics import EngineMetrics, PromptSource, Registry
from decant.worker.engine_host import EngineHost


class WorkerMetrics:
    def __init__(self, registry: Registry, host: EngineHost) -> None:
        self._metrics = metrics = EngineMetrics(registry, enum_labels(wire.Cause))
        self._host = host
        self._preemptions = self._adapter_loads = self._adapter_evictions = 0
        self._arriving: set[str] = set()  # sequences whose KV cache is fetched, until their first step or end
        registry.before_scrape(self._count_preemptions)
        host.steps.subscribe(self._on_step)
        host.receiver.fetches.subscribe(self._on_fetch)
        host.receiver.fetch_ends.subscribe(self._on_fetch_end)
        registry.before_scrape(self._set_info)
        registry.before_scrape(self._count_adapters)
        metrics.adapters.set_function(lambda: host.adapters.num_loaded)
        metrics.adapter_bytes.set_function(lambda: host.adapters.nbytes)
        metrics.queued_tokens.set_function(lambda: host.load().queued_tokens)
        metrics.leases.set_function(lambda: len(host.sender.leases.all()))
        metrics.running.set_function(lambda: host.load().running)
        metrics.waiting.set_function(lambda: host.load().waiting)
        if host.device_memory() is not None:
            metrics.device_memory_used.set_function(lambda: _used(host.device_memory()))
            metrics.device_memory_total.set_function(lambda: _total(host.device_memory()))
        metrics.cache_usage.set_function(lambda: host.last_load.held_blocks / host.total_blocks)

    def _count_preemptions(self) -> None:
        preemptions = self._host.last_load.preemptions
        self._metrics.preemptions.inc(preemptions - self._preemptions)
        self._preemptions = preemptions

    def _count_adapters(self) -> None:
        store = self._host.adapters
        self._metrics.adapter_loads.inc(store.loads - self._adapter_loads)
        self._metrics.adapter_evictions.inc(store.evictions - self._adapter_evictions)
        self._adapter_loads, self._adapter_evictions = store.loads, store.evictions

    def _set_info(self) -> None:
        self._metrics.info.clear()  # an administrator may have changed the role
        self._metrics.info.labels(self._host.model, enum_label(wire.Role, self._host.role)).set(1)

    def _on_step(self, output: StepOutput) -> None:
        if output.tokens:
            self._metrics.generated.inc(len(output.tokens))
        for started in output.started:
            if started.id in self._arriving:
                self._arriving.remove(started.id)
            elif not started.is_fork:
                self._metrics.prompt[PromptSource.CACHED].inc(started.cached)
                self._metrics.prompt[PromptSource.COMPUTED].inc(started.tokens - started.cached)
        for ended in output.ended:
            self._arriving.discard(ended.id)

    def _on_fetch(self, arrival: IncomingSequence) -> None:
        self._arriving.add(arrival.id)

    def _on_fetch_end(self, end: FetchEnd) -> None:
        arrival, outcome = end.arrival, end.outcome
        if isinstance(outcome, TransferResult):
            cached = arrival.cached_blocks * self._host.block_size
            self._metrics.prompt[PromptSource.CACHED].inc(cached)
            self._metrics.prompt[PromptSource.HANDED_OVER].inc(len(arrival.sequence.request.token_ids) - cached)
            self._metrics.handoff_seconds.observe(outcome.owned_at - outcome.opened_at)
            self._metrics.handoff_bytes.observe(outcome.received_bytes)
            return
        self._arriving.discard(arrival.id)
        if outcome is not None:
            self._metrics.handoff_failures[enum_label(wire.Cause, outcome.cause)].inc()


def _used(memory: DeviceMemory | None) -> int:
    return memory.total - memory.free if memory else 0


def _total(memory: DeviceMemory | None) -> int:
    return memory.total if memory else 0
