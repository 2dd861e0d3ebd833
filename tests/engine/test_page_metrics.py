import re

from jaxpaged.core.request import Pin
from jaxpaged.engine.page_metrics import watch_pages
from jaxpaged.metrics import EngineMetrics
from tests.core.fake_device import add, make_scheduler, make_sequence, prompt
from tests.core.fake_device import commit as commit_step


def told(metrics):
    """Every gauge's value, by name and `kind`."""
    lines = re.findall(r'^(\w+:\w+){.*?(?:kind="(\w+)",)?model_name.*} (\S+)$', text(metrics), re.M)
    return {" ".join(filter(None, (name, kind))): float(value) for name, kind, value in lines}


def text(metrics):
    return metrics.text().decode()


def test_pinned_swapped_and_evicted_pages_are_told():
    limits = {"preemption_mode": "swap", "num_host_pages": 128, "max_num_batched_tokens": 64}
    scheduler, metrics = make_scheduler(num_pages=1 + 20, **limits), EngineMetrics("m", 64)
    watch_pages(metrics, scheduler)
    add(scheduler, make_sequence(0, prompt(0, 9), 0, pin=Pin("warm")))
    commit_step(scheduler, scheduler.schedule())
    assert told(metrics)["jaxpaged:num_pinned_pages"] == 2
    add(scheduler, *[make_sequence(i, prompt(i, 20), 20) for i in (1, 2)])
    while not scheduler.num_preemptions:
        commit_step(scheduler, scheduler.schedule())
    found = told(metrics)
    assert found["vllm:num_requests_swapped"] == 1
    assert found["jaxpaged:num_host_pages swapped"] == 64
    assert found["jaxpaged:num_host_pages prefix"] == 128 * found["vllm:cpu_cache_usage_perc"] - 64


def test_without_host_memory_nothing_is_said_about_it():
    metrics = EngineMetrics("m", 64)
    watch_pages(metrics, make_scheduler())
    assert "num_pinned_pages" in text(metrics)
    assert "host" not in text(metrics)
    assert "swapped" not in text(metrics)
