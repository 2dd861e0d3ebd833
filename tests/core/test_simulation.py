"""How full the scheduler keeps the pages, and that nothing is lost; the benchmark runs longer."""

import pytest

from benchmarks.schedule_simulation import POLICIES, fill_pages, random_workload


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_are_full_and_the_pool_is_used_while_requests_wait(policy):
    fullness = fill_pages(100, 700, policy)
    assert fullness.num_steps > 300
    assert fullness.stored > 0.96
    assert fullness.held > 0.90


def test_random_workloads_end_with_every_page_free():
    assert sum(random_workload(seed) for seed in range(60)) > 5
