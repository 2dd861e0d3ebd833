"""The page in a headless Chromium, before the real engine and a device that follows a script."""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from server.app import create_app
from server.listener import Listener
from tests.support.browser import Browser, find_browser
from tests.support.scripted_engine import scripted_llm

BROWSER = find_browser()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
]
CONTENT = ".assistant .content"
HELD = "Number(document.querySelector('#legend b')?.textContent ?? 0)"
HOSTILE = """<img src=x onerror="window.pwned=1"> <script>window.pwned=1</script>

# A <b>heading</b>

1. **bold <i>x</i>** and `code <u>`
2. [link](javascript:window.pwned=1) ![image](https://example.com/x.png)

```html
<script>window.pwned=1</script>
"""
# the name that a screen reader says of a control, and where it stands in the document
CONTROLS = """[...document.querySelectorAll(
    'a[href],button,input,select,textarea,summary,[tabindex]')]
  .filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0)
  .map((e) => [e.tabIndex, (e.getAttribute('aria-label')
     || (e.getAttribute('aria-labelledby')
         && document.getElementById(e.getAttribute('aria-labelledby')).textContent)
     || [...(e.labels ?? [])].map((l) => l.textContent).join(' ')
     || e.textContent).trim(), e.outerHTML.slice(0, 80)])"""
# every piece of visible text whose contrast to what is behind it is under 4.5
FAINT = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  for (const e of document.body.querySelectorAll('*')) {
    const says = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!says || !e.checkVisibility() || e.closest('.unseen')) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(e.outerHTML.slice(0, 90));
  }
  return found;
})()"""


@dataclass
class Page:
    """A tab on a server, one with a key beside it, and what answers behind both."""

    browser: Browser
    device: Any
    llm: Any
    url: str
    keyed_url: str

    async def open(self, script: str, *, step_s: float = 0.0, repeats: bool = False) -> Browser:
        self.device.script, self.device.step_s, self.device.repeats = script, step_s, repeats
        await self.browser.resize(1280, 800)
        await self.browser.open(self.url)
        await self.browser.until("document.querySelector('#legend').children.length")
        return self.browser

    async def ask(self, text: str) -> None:
        await self.browser.type("#prompt", text)
        await self.browser.press("Enter")

    async def ended(self) -> None:
        await self.browser.until("document.querySelector('#log').ariaBusy === 'false'")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    llm, device = scripted_llm(folder / "model", ("scripted", "second"))
    listeners, urls = [], []
    for keys in ((), ("sk-right",)):
        listening = socket.create_server(("127.0.0.1", 0))
        listeners.append(await Listener.start(create_app(llm, keys), listening))
        urls.append(f"http://127.0.0.1:{listening.getsockname()[1]}/")
    browser = await Browser.start(BROWSER, folder / "profile")
    yield Page(browser, device, llm, *urls)
    await browser.close()
    for listener in listeners:
        await listener.close()
    llm.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(tab):
    """The tab; a page must not complain of anything, its own policy included."""
    tab.browser.complaints.clear()
    yield tab
    tab.device.step_s = 0.0
    for request_id in list(tab.llm.parts.engine._requests):
        await tab.llm.abort(request_id)
    assert not tab.browser.complaints


async def test_a_chat_streams_token_by_token(page):
    text = "Pages come and go."
    browser = await page.open(text, step_s=0.05)
    await page.ask("Hello?")
    seen = []
    while (now := await browser.text(CONTENT)) != text:
        seen.append(now)
        await asyncio.sleep(0.02)
    assert len(set(seen)) > 5
    assert all(text.startswith(part) for part in seen)
    await page.ended()
    note = await browser.text(".assistant .note")
    assert f"{len(text) + 1} tokens" in note
    assert await browser.text(".user .content") == "Hello?"


async def test_what_was_said_before_is_sent_again(page):
    browser = await page.open("Yes.")
    for text in ("First", "Second"):
        await page.ask(text)
        await browser.until(f"document.querySelector('#log').textContent.includes('{text}')")
        await page.ended()
    await browser.until("document.querySelectorAll('.assistant .note button').length === 2")
    said = await browser.run("[...document.querySelectorAll('.content')].map(e => e.textContent)")
    assert said == ["First", "Yes.", "Second", "Yes."]
    usage = await browser.text(".assistant:last-child .note")
    assert "5 tokens" in usage


async def test_the_map_changes_while_a_long_request_runs(page):
    browser = await page.open("ab", step_s=0.003, repeats=True)
    await page.ask("Go on for long")
    await browser.until(f"{HELD} >= 3")
    drawn = "document.querySelector('#map').toDataURL()"
    before, num_held = await browser.run(drawn), await browser.run(HELD)
    await browser.until(f"{HELD} >= {num_held + 3}")
    assert await browser.run(drawn) != before
    assert "held by one request" in await browser.run("document.querySelector('#map').ariaLabel")
    row = await browser.text("#requests tr")
    assert "running" in row
    assert await browser.text(".tile.running dd") == "1"
    await browser.click("#stop")
    await browser.until(f"{HELD} === 0 && !document.querySelector('#requests tr')")
    cached = "Number(document.querySelectorAll('#legend b')[3].textContent)"
    assert await browser.run(cached) >= num_held, "what it computed can be found again"


async def test_stop_ends_the_request_and_keeps_what_was_said(page):
    browser = await page.open("abc ", step_s=0.01, repeats=True)
    await page.ask("Go")
    await browser.until(f"document.querySelector('{CONTENT}')?.textContent.length > 8")
    await browser.click("#stop")
    await page.ended()
    assert "stopped" in await browser.text(".assistant .note")
    assert len(await browser.text(CONTENT)) > 8
    for _ in range(100):
        if not page.llm.parts.engine.scheduler.num_running:
            break
        await asyncio.sleep(0.02)
    assert page.llm.parts.engine.scheduler.num_running == 0
    assert await browser.run("document.activeElement.id") == "prompt"


async def test_an_error_is_told_in_the_servers_words_and_the_question_kept(page):
    browser = await page.open("x")
    await browser.run("document.querySelector('#settings').open = true")
    await browser.type("[name=temperature]", "-3")
    await page.ask("Why?")
    await browser.until("!document.querySelector('#error').hidden")
    assert "temperature" in await browser.text("#error")
    assert "-3" in await browser.text("#error")
    assert await browser.run("document.querySelector('#prompt').value") == "Why?"
    await browser.type("[name=temperature]", "warm")
    await browser.run("document.querySelector('#prompt').focus()")
    await browser.press("Enter")
    await browser.until("document.querySelector('#error').textContent.includes('got `str`')")
    page.browser.complaints[:] = [c for c in page.browser.complaints if "400" not in c]


async def test_sampling_fields_and_the_model_go_into_the_request(page):
    browser = await page.open("Hello there.")
    await browser.run("document.querySelector('#settings').open = true")
    for name, value in (("max_tokens", "5"), ("seed", "7"), ("top_k", "3"), ("system", "Be brief")):
        await browser.type(f"[name={name}]", value)
    await browser.run("document.querySelector('#model').value = 'second'")
    await page.ask("Say it")
    await browser.until(f"document.querySelector('{CONTENT}')?.textContent === 'Hello'")
    await page.ended()
    assert "cut at max tokens" in await browser.text(".assistant .note")
    assert await browser.text(".assistant h3") == "second"
    assert "seed 7" in await browser.text("#settings-note")


async def test_nothing_that_a_model_writes_becomes_a_link_an_image_or_a_script(page):
    browser = await page.open(HOSTILE)
    await page.ask(HOSTILE)
    await browser.until("document.querySelector('.assistant pre')")
    await page.ended()
    tags = "[...new Set([...document.querySelectorAll('#log *')].map(e => e.tagName))].sort()"
    allowed = {"ARTICLE", "BUTTON", "CODE", "DIV", "H3", "LI", "OL", "P", "PRE", "SPAN", "STRONG"}
    assert set(await browser.run(tags)) <= allowed
    assert not await browser.run("window.pwned")
    assert await browser.text(".assistant pre") == "<script>window.pwned=1</script>\n"
    assert await browser.text(".assistant li strong") == "bold <i>x</i>"
    assert await browser.text(".assistant .heading") == "A <b>heading</b>"
    assert await browser.text(".user .content") == HOSTILE.strip()


async def test_a_request_is_explained(page):
    browser = await page.open("One two three.", step_s=0.005)
    await page.ask("Explain yourself, at the length of more than one page of tokens")
    await browser.until("document.querySelector('.assistant .note button')")
    await browser.run("document.querySelector('.assistant .note button').focus()")
    await browser.press("Enter")
    await browser.until("document.querySelector('#explained-body').textContent.includes('stop')")
    said = await browser.text("#explained-body")
    for part in ("waiting", "prompt", "answer", "together", "0 of", "never", "steps"):
        assert part in said
    assert await browser.run("document.activeElement.id") == "explained"
    await browser.click("#explained-close")
    assert await browser.run("document.activeElement.textContent") == "Explain"


async def test_a_server_with_keys_asks_for_one_and_keeps_it_in_the_tab(page):
    browser = page.browser
    page.device.script = "Let in."
    await browser.open(page.keyed_url)
    await browser.until("document.querySelector('#key-dialog').open")
    assert await browser.run("document.activeElement.id") == "key"
    await browser.type("#key", "sk-wrong")
    await browser.press("Enter")
    await browser.until("document.querySelector('#key-why').textContent.includes('wrong')")
    await browser.type("#key", "sk-right")
    await browser.press("Enter")
    await browser.until("document.querySelector('#model').options.length === 2")
    await browser.until("document.querySelector('#legend').children.length")
    await page.ask("Hello")
    await browser.until(f"document.querySelector('{CONTENT}')?.textContent === 'Let in.'")
    assert await browser.run("Object.values(sessionStorage)") == ["sk-right"]
    assert "sk-right" not in await browser.run("JSON.stringify(localStorage) + document.cookie")
    await browser.click("#key-button")
    await browser.click("#key-forget")
    await browser.until("document.querySelector('#key-dialog').open")
    assert await browser.run("sessionStorage.length") == 0
    browser.complaints[:] = [c for c in browser.complaints if "401" not in c]


async def test_every_control_has_a_name_and_the_tab_key_meets_them_in_order(page):
    browser = await page.open("```\nsome code\n```\nand text")
    await browser.run("document.querySelector('#settings').open = true")
    await page.ask("Hello")
    await page.ended()
    await browser.until("document.querySelector('.assistant .note button')")
    controls = await browser.run(CONTROLS)
    assert not [where for _, name, where in controls if not name]
    assert {order for order, _, _ in controls} == {0}, "the order is that of the document"
    await browser.run("document.querySelector('.skip').focus()")
    met = []
    for _ in controls:
        met.append(await browser.run("document.activeElement.outerHTML.slice(0, 80)"))
        await browser.press("Tab")
    assert met == [where for _, _, where in controls]
    assert await browser.run(
        "[...document.querySelectorAll('img')].every(e => 'alt' in e.attributes)"
    )


@pytest.mark.parametrize("dark", [False, True])
async def test_all_text_stands_out(page, dark):
    browser = await page.open("Text, `code` and **more**.\n\n```\nx = 1\n```")
    await browser.resize(1280, 1400, dark=dark)
    await browser.run("document.querySelector('#settings').open = true")
    await browser.type("[name=min_p]", "7")
    await page.ask("Hello")
    await browser.until("!document.querySelector('#error').hidden")
    await browser.type("[name=min_p]", "0.1")
    await browser.run("document.querySelector('#prompt').focus()")
    await browser.press("Enter")
    await browser.until("document.querySelector('.assistant .note button')")
    await page.ended()
    await browser.click(".assistant .note button")
    await browser.until("document.querySelector('.facts')")
    assert await browser.run(FAINT) == []
    scheme = await browser.run("getComputedStyle(document.documentElement).colorScheme")
    assert scheme == ("dark" if dark else "light")
    browser.complaints[:] = [c for c in browser.complaints if "400" not in c]


async def test_the_theme_button_goes_round_and_is_remembered(page):
    browser = await page.open("x")
    seen = []
    for _ in range(3):
        await browser.click("#theme")
        ground = "getComputedStyle(document.body).backgroundColor"
        seen.append((await browser.text("#theme"), await browser.run(ground)))
    assert [name for name, _ in seen] == ["Theme: light", "Theme: dark", "Theme: system"]
    assert seen[0][1] == seen[2][1] != seen[1][1]
    await browser.click("#theme")
    await browser.open(page.url)
    assert await browser.text("#theme") == "Theme: light"
    await browser.run("localStorage.clear()")


async def test_a_phone_shows_one_half_at_a_time_and_never_scrolls_sideways(page):
    browser = await page.open("Narrow.")
    await browser.resize(360, 700)
    visible = "['chat', 'engine'].filter((id) => document.getElementById(id).checkVisibility())"
    for pane in ("engine", "chat"):
        await browser.click(f"#show-{pane}")
        assert await browser.run(visible) == [pane]
        assert await browser.run("document.documentElement.scrollWidth <= innerWidth")


async def test_nothing_is_asked_of_the_engine_while_its_half_is_hidden(page):
    browser = await page.open("x")
    await browser.resize(360, 700)
    await browser.click("#show-chat")
    await asyncio.sleep(0.6)
    asked = "performance.getEntriesByName(new URL('v1/engine/state', document.baseURI)).length"
    before = await browser.run(asked)
    await asyncio.sleep(1.2)
    assert await browser.run(asked) == before
    await browser.click("#show-engine")
    await browser.until(f"{asked} > {before}")
