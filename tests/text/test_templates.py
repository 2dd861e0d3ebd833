"""Chat templates: the right text, one BOS, and nothing that a bad template could wedge."""

import threading
import time

import pytest

from jaxpaged.errors import ConfigError, RequestError, UnsupportedParameter
from jaxpaged.text.templates import ChatTemplate
from jaxpaged.text.tokenizer import load_tokenizer
from tests.support.models import BOS, LAST_MESSAGE, byte_ids, write_tokenizer
from tests.text.conftest import reference_items

HI = [{"role": "user", "content": "hi"}]


def test_smollm2_conversations_give_the_reference_ids(smollm2):
    template = ChatTemplate(smollm2.chat_templates, smollm2.special_tokens)
    chats = [i for i in reference_items("smollm2_greedy.json") if i["kind"] == "chat"]
    assert len(chats) == 5
    for item in chats:
        text = template.render(item["messages"])
        assert text == item["prompt"]
        assert smollm2.encode(text, add_special_tokens=False) == item["prompt_ids"]


def test_a_template_with_bos_and_a_tokenizer_that_adds_it_give_one(tmp_path):
    write_tokenizer(tmp_path, adds_bos=True, template="{{ bos_token }}" + LAST_MESSAGE)
    tokenizer = load_tokenizer(tmp_path)
    text = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens).render(HI)
    assert tokenizer.encode(text, add_special_tokens=False) == [BOS, *byte_ids("hi")]


def test_a_template_file_wins_over_the_one_in_the_config(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file: " + LAST_MESSAGE)
    tokenizer = load_tokenizer(tmp_path)
    assert ChatTemplate(tokenizer.chat_templates).render(HI) == "file: hi"


def test_tools_choose_the_template_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | tojson }}"})
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=[{"a": "é<'"}]) == '[{"a": "é<\'"}]'


def test_blocks_leave_no_blank_lines_and_loops_may_break():
    stop = "  {% if loop.index > 1 %}\n{% break %}\n{% endif %}\n"
    source = "{% for m in messages %}\n" + stop + "x\n{% endfor %}"
    assert ChatTemplate(source).render(HI * 3) == "x\n"
    assert ChatTemplate("a{% generation %}b{% endgeneration %}c").render(HI) == "abc"


def test_text_parts_are_joined_for_templates_that_want_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert ChatTemplate(LAST_MESSAGE).render([message]) == "one\ntwo"
    walks = "{% for part in messages[0]['content'] %}<{{ part['text'] }}>{% endfor %}"
    assert ChatTemplate(walks).render([message]) == "<one><two>"


def test_a_final_message_can_be_continued():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    source += "{% if add_generation_prompt %}[bot]{% endif %}"
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    template = ChatTemplate(source)
    assert template.render(messages).endswith("[end][bot]")
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "[user]hi[end][assistant]Well,"
    with pytest.raises(RequestError, match="choose one"):
        template.render(messages, continue_final_message=True)


def test_keywords_of_the_template_and_common_ones_are_allowed():
    template = ChatTemplate("{{ my_switch }}{{ enable_thinking }}")
    assert template.render(HI, my_switch="on", enable_thinking=False) == "onFalse"
    assert ChatTemplate("x").render(HI, enable_thinking=True) == "x"


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "bos_token", "raise_exception", "other"]
)
def test_keywords_that_would_change_rendering_are_refused(name):
    source = "{{ bos_token }}{{ raise_exception }}{{ chat_template }}{{ tokenize }}"
    with pytest.raises(UnsupportedParameter) as caught:
        ChatTemplate(source)._check_keywords([name])
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_may_refuse_a_conversation():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render(HI)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].a.b }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}"],
)
def test_what_a_template_cannot_do_is_the_requests_error(source):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(HI)


def test_syntax_errors_are_found_at_start():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("\n{% for %}")


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{%% set s = namespace(x='ab') %%}{%% for i in range(60) %%}%s{%% endfor %%}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize("source", [NESTED, TWICE])
def test_a_template_without_end_is_refused_in_time(source):
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"over 0\.2 s"):
        ChatTemplate(source, render_seconds=0.2).render(HI)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** (10**6) }}",
        "{{ 'x'.center(10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        DOUBLING % "{% set s.x = s.x ~ s.x %}",
        DOUBLING % "{% set s.x = s.x + s.x %}",
        DOUBLING % "{% set s.x %}{{ s.x }}{{ s.x }}{% endset %}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING % "{% set s.x = f(s.x) %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_a_template_that_makes_too_much_is_refused_at_once(source):
    start = time.monotonic()
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(HI)
    assert time.monotonic() - start < 1.5


def test_a_template_cannot_take_the_checks_away():
    source = "{% set check_time = 1 %}{% set environment = 1 %}" + NESTED
    with pytest.raises(RequestError, match=r"over 0\.1 s"):
        ChatTemplate(source, render_seconds=0.1).render(HI)


def test_one_endless_template_does_not_stop_another():
    slow = ChatTemplate(NESTED, render_seconds=1.0)
    quick = ChatTemplate(LAST_MESSAGE)

    def run_slow() -> None:
        with pytest.raises(RequestError):
            slow.render(HI)

    thread = threading.Thread(target=run_slow)
    thread.start()
    waits = []
    while thread.is_alive():
        start = time.monotonic()
        assert quick.render(HI) == "hi"
        waits.append(time.monotonic() - start)
        time.sleep(0.002)
    thread.join()
    assert sorted(waits)[int(len(waits) * 0.99)] < 0.1
