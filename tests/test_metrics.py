from dataclasses import replace

from jaxpaged.metrics import EngineMetrics, FinishedSequence

DONE = FinishedSequence(
    reason="stop",
    num_prompt_tokens=100,
    num_cached_tokens=64,
    num_preemptions=3,
    num_output_tokens=7,
    max_tokens=9,
    e2e_s=1.0,
    queue_s=0.1,
    prefill_s=0.2,
    decode_s=0.7,
)


def value(metrics, name, **labels):
    labels |= {"engine": "0", "model_name": "m"}
    return metrics.registry.get_sample_value(f"vllm:{name}", labels)


def test_a_finished_sequence_is_told_under_the_names_that_dashboards_know():
    metrics = EngineMetrics("m", 1000)
    metrics.finished(DONE)
    metrics.finished(replace(DONE, num_cached_tokens=0, num_preemptions=0))
    assert value(metrics, "prompt_tokens_by_source_total", source="local_cache_hit") == 64
    assert value(metrics, "prompt_tokens_by_source_total", source="local_compute") == 136
    assert value(metrics, "prompt_tokens_cached_total") == 64
    assert value(metrics, "request_prefill_kv_computed_tokens_sum") == 136
    assert value(metrics, "request_num_preemptions_bucket", le="0.0") == 1
    assert value(metrics, "request_num_preemptions_sum") == 3


def test_tokens_from_host_memory_are_told_apart():
    metrics = EngineMetrics("m", 1000)
    metrics.finished(replace(DONE, num_host_cached_tokens=16))
    for name, sources in {
        "prompt_tokens_by_source_total": {"local_cache_hit": 48, "external_kv_transfer": 16},
        "prompt_tokens_cached_by_source_total": {"device": 48, "host": 16},
    }.items():
        assert {source: value(metrics, name, source=source) for source in sources} == sources


def test_requests_and_refusals_are_counted():
    metrics = EngineMetrics("m", 1000)
    metrics.request_ended([3, 8, 5])
    metrics.rejected("max_num_queued_reqs")
    assert value(metrics, "request_max_num_generation_tokens_sum") == 8
    assert value(metrics, "request_params_n_sum") == 3
    assert value(metrics, "admission_rejections_total", reason="max_num_queued_reqs") == 1
    assert value(metrics, "admission_rejections_total", reason="max_num_queued_tokens") == 0


def test_the_memory_of_devices_is_asked_for_at_every_scrape():
    metrics, in_use = EngineMetrics("m", 64, 3), [5.0, 7.0]
    metrics.watch_memory(4, lambda: in_use.pop(0), 100)
    name = 'jaxpaged:device_memory_in_use_bytes{device="4",engine="3",model_name="m"}'
    assert f"{name} 5.0" in metrics.text().decode()
    assert f"{name} 7.0" in metrics.text().decode()
