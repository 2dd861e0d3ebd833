// The conversation: one answer at a time, streamed as it comes.

import { Refusal, events } from "./api.js";
import { byId, count, make, seconds, setText } from "./dom.js";
import { render } from "./markdown.js";
import { sampling, systemPrompt } from "./settings.js";

const EXAMPLES = [
  "Why is the sky blue?",
  "Write a haiku about paging.",
  "List three uses of a cache, with a short example in Python.",
];

const messages = []; // {role, content}, without the system prompt
let running = null; // the AbortController of the answer being made
let explain = () => {};

function body() {
  const system = systemPrompt();
  const before = system ? [{ role: "system", content: system }] : [];
  return {
    model: byId("model").value,
    messages: [...before, ...messages],
    stream: true,
    stream_options: { include_usage: true },
    explain: true,
    ...sampling(),
  };
}

function showError(text) {
  byId("error").hidden = !text;
  setText(byId("error"), text);
}

function article(role, who) {
  const content = make("div", { className: "content" });
  const note = make("p", { className: "note" });
  const element = make(
    "article",
    { className: `message ${role}` },
    make("h3", {}, who),
    content,
    note,
  );
  byId("empty").hidden = true;
  byId("log").append(element);
  return { element, content, note };
}

/** Keep the end in sight, unless the reader has scrolled away from it. */
function follow(change) {
  const log = byId("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

/** Draws a growing answer, at most once a frame. */
class Drawing {
  constructor(content) {
    this.content = content;
    this.text = "";
    this.thoughts = "";
    this.asked = false;
  }

  add(delta) {
    this.text += delta.content ?? "";
    this.thoughts += delta.reasoning_content ?? delta.reasoning ?? "";
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => follow(() => this.draw()));
  }

  draw() {
    this.asked = false;
    if (this.thoughts && !this.thinking) {
      this.thinking = make("p");
      const summary = make("summary", {}, "Reasoning");
      this.content.before(make("details", { className: "thoughts" }, summary, this.thinking));
    }
    if (this.thinking) setText(this.thinking, this.thoughts);
    render(this.content, this.text);
  }
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("log").setAttribute("aria-busy", String(running !== null)); // is read once it is whole
}

function tell(note, { id, usage, began, first, ended }) {
  if (!usage) return;
  const parts = [`${count(usage.completion_tokens)} tokens`];
  if (usage.completion_tokens > 1 && first) {
    const rate = (usage.completion_tokens - 1) / ((ended - first) / 1000);
    parts.push(`${rate.toFixed(1)} tokens/s`, `first after ${seconds((first - began) / 1000)}`);
  }
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
  note.prepend(parts.join(" · ") + " ");
}

async function answer() {
  const request = body();
  const { element, content, note } = article("assistant", request.model);
  const drawing = new Drawing(content);
  const times = { began: performance.now(), first: 0, id: "" };
  setRunning(new AbortController());
  element.classList.add("streaming");
  try {
    for await (const event of events("v1/chat/completions", request, running.signal)) {
      if (!times.id) addExplain(note, (times.id = event.id));
      times.usage = event.usage ?? times.usage;
      const choice = event.choices[0];
      if (choice?.delta.content) times.first ||= performance.now();
      if (choice) drawing.add(choice.delta);
      if (choice?.finish_reason === "length") note.append(make("span", {}, "cut at max tokens"));
    }
  } catch (error) {
    if (error.name === "AbortError") note.append(make("span", {}, "stopped"));
    else if (error instanceof Refusal) showError(error.message);
    else throw error;
  } finally {
    times.ended = performance.now();
    element.classList.remove("streaming");
    follow(() => {
      drawing.draw();
      tell(note, times);
    });
    setRunning(null);
  }
  if (drawing.text) messages.push({ role: "assistant", content: drawing.text });
  else if (!times.id) takeBack(element);
}

function addExplain(note, id) {
  const button = make("button", { type: "button", className: "link" }, "Explain");
  button.setAttribute("aria-label", "Explain this answer");
  button.addEventListener("click", () => explain(id));
  note.append(button);
}

/** Nothing was answered: the question goes back to where it was typed. */
function takeBack(element) {
  const question = messages.pop();
  element.previousElementSibling?.remove();
  element.remove();
  byId("empty").hidden = messages.length > 0;
  if (!byId("prompt").value) byId("prompt").value = question.content;
}

async function send(text) {
  if (!text || running) return;
  showError("");
  messages.push({ role: "user", content: text });
  follow(() => setText(article("user", "You").content, text));
  byId("log").scrollTop = byId("log").scrollHeight;
  await answer();
}

/** `onExplain` gets the id of an answer that is to be explained. */
export function startChat(onExplain) {
  explain = onExplain;
  const prompt = byId("prompt");
  const submit = () => {
    const text = prompt.value.trim();
    if (!text || running) return;
    prompt.value = "";
    send(text);
  };
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  byId("stop").addEventListener("click", () => {
    running?.abort();
    prompt.focus();
  });
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    byId("log").querySelectorAll("article").forEach((element) => element.remove());
    byId("empty").hidden = false;
    showError("");
    prompt.focus();
  });
  for (const text of EXAMPLES) {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => send(text));
    byId("examples").append(button);
  }
}
