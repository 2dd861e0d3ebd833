"""Gauges of pages that outlive their sequences, asked for at every scrape: a step pays nothing."""

from jaxpaged.core.scheduler import Scheduler
from jaxpaged.metrics import EngineMetrics


def watch_pages(metrics: EngineMetrics, scheduler: Scheduler) -> None:
    """Publish the pinned pages, and where there is host memory for pages, what it holds."""
    pinned, tier = scheduler.pinned, scheduler.tier
    metrics.ask("num_pinned_pages", "pages of warm prefixes", lambda: pinned.num_pages, "jaxpaged")
    num_pages = scheduler.limits.num_host_pages
    if not num_pages:
        return
    metrics.ask(
        "cpu_cache_usage_perc",
        "share of the pages in host memory that are in use, 0 to 1",
        lambda: tier.num_used_pages / num_pages,
    )
    metrics.ask("num_requests_swapped", "sequences in host memory", lambda: tier.num_swapped)
    for kind, count in {
        "swapped": lambda: tier.num_used_pages - tier.num_prefix_pages,
        "prefix": lambda: tier.num_prefix_pages,
    }.items():
        metrics.ask("num_host_pages", "pages in host memory", count, "jaxpaged", kind=kind)
