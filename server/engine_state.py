"""GET /v1/engine/state: the page pool as a map, who runs and who waits. Taken when asked for."""

import asyncio
import base64
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from jaxpaged.engine.picture import (
    BLANK,
    CACHED,
    FIRST_OWNER,
    PINNED,
    SHARED,
    EnginePicture,
    SequencePicture,
)
from jaxpaged.engine.served import ServedEngine
from jaxpaged.openai.chunks import encode
from server.auth import KEY, KEY_ID
from server.state import SERVER

FRESH_S = 0.5  # a picture is given again until it is so old, however many look
MAX_CELLS = 16_384  # of a map; in larger pools a cell stands for several pages


@dataclass
class EngineWatch:
    """The last picture of an engine. Owned by the event loop."""

    engine: ServedEngine
    _picture: EnginePicture | None = None
    _common: dict[str, Any] = field(default_factory=dict[str, Any])
    _taken: float = 0.0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def latest(self) -> tuple[EnginePicture, dict[str, Any]]:
        """A picture at most FRESH_S old, and what all may see of it."""
        async with self._lock:
            now = time.monotonic()
            if self._picture is None or now - self._taken > FRESH_S:
                found = await self.engine.control("picture")
                self._picture = msgspec.convert(found, EnginePicture)
                self._common, self._taken = _common(self._picture), now
            return self._picture, self._common


WATCH = web.AppKey("engine_watch", EngineWatch)


async def engine_state(request: web.Request) -> web.Response:
    """What a key may see: the whole map and all numbers, of requests its own, an admin all."""
    picture, common = await request.app[WATCH].latest()
    sees_all = KEY not in request or request[KEY].role == "admin"
    requests = [
        _request(seq, is_seen=sees_all or seq.key_name == request[KEY_ID])
        for seq in picture.sequences
    ]
    models = request.app[SERVER].engine.served_model_names
    fields = {"object": "engine.state", "model": models[0], **common, "requests": requests}
    return web.Response(
        body=encode(fields),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def _common(picture: EnginePicture) -> dict[str, Any]:
    cells = np.frombuffer(picture.cells, np.uint8)
    counts = np.bincount(cells, minlength=256)
    per_cell = -(-len(cells) // MAX_CELLS)
    return {
        "time_s": picture.time_s,
        "num_steps": picture.num_steps,
        "prompt_tokens": picture.prompt_tokens,
        "generation_tokens": picture.output_tokens,
        "load": picture.load,
        "waits_for": picture.wait_cause,
        "page_size": picture.page_size,
        "pages": {
            "blank": int(counts[BLANK]),
            "cached": int(counts[CACHED]),
            "pinned": int(counts[PINNED]),
            "shared": int(counts[SHARED]),
            "held": int(counts[FIRST_OWNER:].sum()),
        },
        "pages_per_cell": per_cell,
        "cells": base64.b64encode(_grouped(cells, per_cell)).decode(),
    }


def _grouped(cells: np.ndarray, per_cell: int) -> bytes:
    """A byte a group of pages: what more than half of them say, if so many agree."""
    rest = -len(cells) % per_cell
    groups = np.concatenate([cells, np.repeat(cells[-1:], rest)]).reshape(-1, per_cell)
    return np.sort(groups, axis=1)[:, per_cell // 2].tobytes()


def _request(seq: SequencePicture, *, is_seen: bool) -> dict[str, Any]:
    """An answer being made. Of those of other keys only what the map shows anyway."""
    shown = {"owner": seq.owner, "state": seq.state, "num_pages": seq.num_pages}
    if not is_seen:
        return {"id": None, **shown}
    return {
        "id": seq.request_id.rpartition("-")[0] or seq.request_id,
        **shown,
        "index": seq.choice,
        "prompt_tokens": seq.prompt_tokens,
        "cached_tokens": seq.cached_tokens,
        "computed_tokens": seq.computed_tokens,
        "completion_tokens": seq.output_tokens,
        "max_tokens": seq.max_tokens,
        "preemptions": seq.preemptions,
        "age_s": seq.age_s,
    }
