"""The front's benchmark runs: it stands on parts that change."""

import argparse
import re

from benchmarks.http_front import measure
from tests.support.models import write_model


async def test_every_token_of_every_stream_arrives(tmp_path, capsys):
    args = argparse.Namespace(streams=2, tokens=4, step_ms=0.0, thread=True, profile=False)
    await measure(write_model("S", tmp_path), args)
    assert re.match(r"2 streams: \d+ tok/s; front \d", capsys.readouterr().out)
