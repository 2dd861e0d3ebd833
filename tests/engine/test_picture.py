"""A picture of the engine says of every page what the pool's bookkeeping says."""

import msgspec
import pytest

from benchmarks.host_loop import make_llm
from jaxpaged.core.params import SamplingParams
from jaxpaged.core.request import Pin
from jaxpaged.engine.picture import (
    BLANK,
    CACHED,
    FIRST_OWNER,
    MAX_WAITING,
    NULL,
    NUM_OWNERS,
    PINNED,
    SHARED,
    EnginePicture,
    join_pictures,
)
from jaxpaged.text.tokenizer import ids_only_tokenizer

PREFIX = list(range(100, 164))  # four pages


@pytest.fixture
def llm():
    return make_llm(4, ids_only_tokenizer(), 512)


def add(llm, prompt: list[int], max_tokens: int = 8, *, n: int = 1, pin: Pin | None = None):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=n)
    number = len(llm.parts.engine._requests)
    inputs = llm.parts.inputs
    request = inputs.request(prompt, params, request_id=f"cmpl-{number}-0", key_name="k", pin=pin)
    llm.parts.engine.add(request)


def page_byte(engine, page_id: int) -> int:
    """What a page's byte must be, found the slow way."""
    pool, scheduler = engine.scheduler.pool, engine.scheduler
    owners = [seq.slot for seq in scheduler.running for other in seq.page_ids if other == page_id]
    num_holders = len(owners) + sum([page_id in prefix.page_ids for prefix in scheduler.pinned])
    assert num_holders == pool._num_holders[page_id]
    if page_id == 0:
        return NULL
    if not num_holders:
        return CACHED if pool.is_kept(page_id) else BLANK
    if num_holders > 1:
        return SHARED
    return FIRST_OWNER + owners[0] % NUM_OWNERS if owners else PINNED


def test_every_page_has_its_byte_after_every_step(llm):
    engine, seen = llm.parts.engine, set()
    add(llm, PREFIX, 1, pin=Pin("warm"))
    while engine.has_work:
        engine.step()
    add(llm, [*PREFIX, 7, 8], 40, n=2)
    add(llm, list(range(50)), 30)
    add(llm, list(range(60, 99)), 12)
    add(llm, list(range(20, 70)), 25)  # waits for a slot
    while engine.has_work:
        engine.step()
        cells = engine.picture().cells
        held_at_most = [*range(30), *(i for i, byte in enumerate(cells) if byte != BLANK)]
        assert [cells[i] for i in held_at_most] == [page_byte(engine, i) for i in held_at_most]
        seen |= {min(byte, FIRST_OWNER) for byte in cells}
    assert seen == {NULL, BLANK, CACHED, PINNED, SHARED, FIRST_OWNER}


def test_sequences_are_told_with_the_byte_of_their_pages(llm):
    engine = llm.parts.engine
    add(llm, list(range(40)), 50)
    for _ in range(6):
        engine.step()
    picture = engine.picture()
    (seq,) = picture.sequences
    assert (seq.request_id, seq.key_name, seq.state) == ("cmpl-0-0", "k", "running")
    assert picture.cells.count(seq.owner) == seq.num_pages == 3
    assert (seq.prompt_tokens, seq.output_tokens, seq.max_tokens) == (40, 5, 50)
    assert (picture.prompt_tokens, picture.output_tokens, picture.num_steps) == (40, 5, 6)


def test_of_a_long_line_only_its_head_is_told(llm):
    for _ in range(MAX_WAITING + 20):
        add(llm, [1, 2, 3], 100)
    llm.parts.engine.step()
    picture = llm.parts.engine.picture()
    states = [seq.state for seq in picture.sequences]
    assert (states.count("running"), states.count("waiting")) == (4, MAX_WAITING)
    assert picture.load.num_waiting == MAX_WAITING + 16
    assert {seq.owner for seq in picture.sequences if seq.state == "waiting"} == {0}


def test_a_picture_survives_the_way_to_another_process(llm):
    add(llm, [1, 2, 3])
    llm.parts.engine.step()
    picture = llm.parts.engine.picture()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(picture))
    assert msgspec.convert(sent, EnginePicture) == picture


def test_pictures_of_several_engines_are_joined_with_colours_of_their_own():
    llms = [make_llm(2, ids_only_tokenizer(), 512) for _ in range(2)]
    for llm in llms:
        add(llm, list(range(40)), 50)
        llm.parts.engine.step()
    pictures = [llm.parts.engine.picture() for llm in llms]
    joined = join_pictures(pictures, pictures[0].load)
    half = len(pictures[0].cells)
    assert len(joined.cells) == 2 * half
    assert joined.prompt_tokens == 80
    first, second = (seq.owner for seq in joined.sequences)
    assert first != second
    for owner, cells in ((first, joined.cells[:half]), (second, joined.cells[half:])):
        assert (cells.count(owner), cells.count(NULL)) == (3, 1)
