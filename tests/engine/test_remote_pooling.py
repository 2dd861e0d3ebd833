"""An embedding engine in a process of its own gives what one in a thread does."""

import asyncio
import os
import signal

import numpy as np
import pytest

from jaxpaged.config.flags import config_from_keywords
from jaxpaged.engine.pooling.remote import RemotePooling
from jaxpaged.engine.pooling.threaded import AsyncPooling
from jaxpaged.errors import EngineStopped, WeightsError
from tests.support.embedding import write_tiny


def config_of(folder):
    return config_from_keywords(
        model=str(folder), max_model_len=32, max_num_batched_tokens=32, compile_cache_dir=""
    )


async def test_its_vectors_are_those_of_a_thread_and_its_end_is_told(tmp_path):
    folder = write_tiny("bert", tmp_path, pooling="mean_tokens")
    remote = await RemotePooling.start(config_of(folder), log_level="warning")
    try:
        texts = [remote.inputs.encode(text) for text in ("a b c", "d e", "f")]
        found = await remote.run(texts)
        thread = AsyncPooling.from_config(config_of(folder))
        np.testing.assert_allclose(found, await thread.run(texts), atol=1e-6)
        thread.close()
        leaving = asyncio.create_task(remote.run(texts * 2000))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        np.testing.assert_array_equal(await remote.run(texts), found)
        assert b"vllm:" in await remote.metrics_text()
        os.kill(remote._process.pid, signal.SIGKILL)
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(remote.run(texts), 10)
        assert not remote.is_running
    finally:
        remote.close()


async def test_a_model_that_cannot_be_read_is_refused_as_by_the_loading_itself(tmp_path):
    folder = write_tiny("bert", tmp_path, pooling="mean_tokens")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(WeightsError):
        await RemotePooling.start(config_of(folder), log_level="warning")
