"""The batch job: every line answered once, in order, bad ones reported, nothing lost on resume."""

import asyncio
import io
import json
import os
from pathlib import Path

import pytest

from jaxpaged.generate.command import CANNOT_START, main
from jaxpaged.generate.job import answered, run_lines
from jaxpaged.generate.lines import BadLine, Line, read_lines
from jaxpaged.generate.output import SYNC_EVERY, OutputFailed, OutputFile
from tests.support.fake_engine import fake_llm


def batch_line(name: str, **body) -> bytes:
    body = {"prompt": "ABC", "max_tokens": 3, "temperature": 0} | body
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode()


GOOD = [batch_line(f"good-{i}", prompt=text) for i, text in enumerate(["ABC", "MNO", "123"])]
BAD = [b"[1,2]", b'"x"', b"null", b'{"body":"x"}', b"{broken", b'{"custom_id":"\xff\xfe"}']


@pytest.fixture
def engine(tmp_path):
    llm, _ = fake_llm(tmp_path / "model")
    yield llm
    llm.close()


async def run(engine, lines, path, *, resume=False, max_inflight=3):
    output = OutputFile(path, io.BytesIO(), resume=resume)
    summary = await run_lines(
        engine, lines, output, max_inflight=max_inflight, keep_order=True, show_progress=False
    )
    output.close()
    return summary, [json.loads(line) for line in path.read_bytes().splitlines()]


def text_of(record):
    return record["response"]["body"]["choices"][0]["text"]


async def test_answers_stand_in_the_order_of_the_lines(engine, tmp_path):
    lines = [batch_line("long", max_tokens=20), *GOOD]
    _, records = await run(engine, lines, tmp_path / "out")
    assert [r["custom_id"] for r in records] == ["long", "good-0", "good-1", "good-2"]
    assert [text_of(r) for r in records[1:]] == ["DEF", "PQR", "456"]


async def test_bad_lines_become_error_records_with_their_number(engine, tmp_path):
    lines = [GOOD[0], *BAD, b"", GOOD[0], GOOD[1]]
    summary, records = await run(engine, lines, tmp_path / "out")
    errors = [r["error"]["line"] for r in records if r["error"]]
    assert errors == [2, 3, 4, 5, 6, 7, 9]
    assert all(
        f"line {n}" in r["error"]["message"]
        for n, r in zip(errors, [r for r in records if r["error"]], strict=True)
    )
    assert (summary.num_answered, summary.num_failed) == (2, 7)


async def test_a_request_that_can_never_be_served_fails_alone(engine, tmp_path):
    lines = [
        GOOD[0],
        batch_line("too long", max_tokens=10**6),
        batch_line("stream", stream=True),
        GOOD[1],
    ]
    _, records = await run(engine, lines, tmp_path / "out")
    assert [bool(r["error"]) for r in records] == [False, True, True, False]
    assert "max_tokens" in records[1]["error"]["message"]


WRONG_FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}


async def test_a_chat_line_that_fails_names_its_own_fields(engine, tmp_path):
    fields = [
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("messages", {"max_tokens": 10**6}),
        ("response_format", {"response_format": WRONG_FORMAT}),
    ]
    body = {"messages": [{"role": "user", "content": "ABC"}]}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        json.dumps(line | {"custom_id": name, "body": body | more}).encode()
        for name, more in fields
    ]
    _, records = await run(engine, lines, tmp_path / "out")
    assert [record["error"]["param"] for record in records] == [name for name, _ in fields]


async def test_plain_prompts_and_chat_lines_are_answered(engine, tmp_path):
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    chat["body"] = {
        "messages": [{"role": "user", "content": "ABC"}],
        "max_tokens": 3,
        "temperature": 0,
    }
    plain = b'{"prompt": "ABC", "max_tokens": 3, "temperature": 0}'
    _, records = await run(engine, [plain, json.dumps(chat).encode()], tmp_path / "out")
    assert text_of(records[0]) == "DEF"
    assert records[0]["custom_id"] == "line-1"
    assert records[1]["response"]["body"]["choices"][0]["message"]["content"] == "DEF"


@pytest.mark.parametrize("cut", [0, 1, 60, 200, -1, -30])
async def test_a_job_cut_anywhere_and_resumed_gives_the_same_records(engine, tmp_path, cut):
    lines = [GOOD[0], BAD[0], GOOD[1], BAD[4], GOOD[2]]
    _, whole = await run(engine, lines, tmp_path / "whole")
    path = tmp_path / "cut"
    data = (tmp_path / "whole").read_bytes()
    path.write_bytes(data[:cut])
    _, records = await run(engine, lines, path, resume=True)
    keys = [(r["custom_id"], (r["error"] or {}).get("line")) for r in whole]
    assert [(r["custom_id"], (r["error"] or {}).get("line")) for r in records] == keys


FOREIGN = [
    b"[1]", b"5", b"null", b'"x"', b"{}", GOOD[0], b"{broken", b'{"custom_id":"\xff"}',
    b'{"custom_id":"good-0","response":{},"error":"x"}',
    b'{"custom_id":"good-0","response":null,"error":{"line":[1]}}',
    b'{"custom_id":["good-0"],"response":{},"error":null}',
]  # fmt: skip


async def test_lines_that_are_no_records_are_left_and_tell_a_resumed_job_nothing(engine, tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"\n".join(FOREIGN) + b"\n")
    output = OutputFile(path, io.BytesIO(), resume=True)
    summary = await run_lines(
        engine, GOOD, output, max_inflight=3, keep_order=True, show_progress=False
    )
    output.close()
    assert (summary.num_answered, summary.num_skipped) == (3, 0)
    assert path.read_bytes().splitlines()[: len(FOREIGN)] == FOREIGN


async def test_a_resumed_job_knows_that_lines_had_failed(engine, tmp_path):
    lines, path = [GOOD[0], BAD[0], batch_line("long", max_tokens=10**6), GOOD[1]], tmp_path / "out"
    await run(engine, lines[:3], path)
    summary, records = await run(engine, lines, path, resume=True)
    assert len(records) == 4
    assert not summary.are_all_answered
    assert summary.text(1.0).startswith("answered 1, failed 0, skipped 3 (2 had failed);")
    summary, _ = await run(engine, [GOOD[0], GOOD[1]], path, resume=True)
    assert summary.are_all_answered


def test_an_output_is_not_cleared_before_there_is_a_record(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"of yesterday\n")
    output = OutputFile(path, io.BytesIO(), resume=False)
    assert path.read_bytes() == b"of yesterday\n"
    output.write({"n": 1})
    output.close()
    assert path.read_bytes() == b'{"n":1}\n'
    OutputFile(path, io.BytesIO(), resume=False).close()
    assert path.read_bytes() == b""


def test_a_pipe_or_a_device_takes_records(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, Path("/dev/null")):
        output = OutputFile(path, io.BytesIO(), resume=False)
        for _ in range(SYNC_EVERY):
            output.write({"n": 1})
        output.close()
    assert os.read(reading, 8) == b'{"n":1}\n'
    os.close(reading)


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_an_output_that_would_overwrite_what_is_read_is_refused(tmp_path, capsys, more):
    path, link = tmp_path / "in", tmp_path / "link"
    path.write_bytes(GOOD[0])
    link.symlink_to(path)
    files = ["--model", "none", "-i", str(path), "-o", str(link)]
    assert main([*files, *more]) == CANNOT_START
    assert "is what is read: its lines would be lost" in capsys.readouterr().err
    assert path.read_bytes() == GOOD[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("-i x --max-tokens 5", "--max-tokens goes with --prompt; a line of --input holds its own"),
        ("-i x --chat", "--chat goes with --prompt"),
        ("-i x --temperature 0", "--temperature goes with --prompt"),
        ("-i x --resume", "--resume needs the --output"),
        ("-i x --resume -o -", "--resume needs the --output"),
        ("-i x --max-inflight 0", "--max-inflight is 0, it must be at least 1"),
        ("--prompt A -o x", "--output goes with --input"),
        ("--prompt A --resume", "--resume goes with --input"),
        ("--prompt A --order input", "--order goes with --input"),
        ("--prompt A --system B", "--system goes with --chat"),
    ],
)
def test_flags_that_would_say_nothing_are_refused(capsys, flags, says):
    assert main(["--model", "none", *flags.split()]) == CANNOT_START
    assert says in capsys.readouterr().err


def test_an_input_may_be_a_pipe_and_no_folder(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "x", "no such file"),
        (pipe, "m does not"),
    ):
        assert main(["--model", str(tmp_path / "m"), "-i", str(path)]) == CANNOT_START
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("keep_order", [False, True])
async def test_without_order_the_first_to_finish_is_written_first(keep_order):
    may_end = asyncio.Event()

    async def two_lines():
        for name in ("long", "short"):
            yield Line(1, name, "/v1/completions", {})

    async def answer(line):
        if line.custom_id == "long":
            await may_end.wait()
        return {"custom_id": line.custom_id}

    found = answered(two_lines(), answer, max_inflight=3, keep_order=keep_order)
    waiting = asyncio.ensure_future(anext(found))
    await asyncio.sleep(0.02)
    assert waiting.done() is not keep_order
    may_end.set()
    names = [record["custom_id"] for record in await waiting]
    names += [record["custom_id"] async for ready in found for record in ready]
    assert names == (["long", "short"] if keep_order else ["short", "long"])


def test_a_full_disk_leaves_whole_lines_and_names_the_file(tmp_path):
    path = tmp_path / "out"
    output = OutputFile(path, io.BytesIO(), resume=False)
    output.write({"n": 1})

    class Full(io.FileIO):
        def write(self, data):
            super().write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

    output._file.close()
    output._file = Full(path, "ab")
    with pytest.raises(OutputFailed, match="out: No space left"):
        output.write({"n": 2})
    assert path.read_bytes() == b'{"n":1}\n'


def test_lines_say_what_is_wrong_with_them():
    lines = list(
        read_lines(
            [
                b'{"custom_id":"x","url":"/v1/nope","body":{}}',
                b'{"body":{},"url":"/v1/completions"}',
            ]
        )
    )
    assert [type(line) for line in lines] == [BadLine, BadLine]
    assert "/v1/nope" in lines[0].reason
    assert "custom_id is missing" in lines[1].reason
    assert isinstance(next(read_lines([GOOD[0]])), Line)


def test_a_byte_order_mark_before_the_first_line_is_passed_over():
    mark = b"\xef\xbb\xbf"
    first, second = read_lines([mark + GOOD[0] + b"\n", mark + GOOD[1]])
    assert isinstance(first, Line)
    assert (first.custom_id, first.number) == ("good-0", 1)
    assert isinstance(second, BadLine)
    assert not list(read_lines([mark]))
