// One request explained: where its time went, what the cache held, what each step gave it.

import { get } from "./api.js";
import { byId, count, make, seconds, setText } from "./dom.js";

const EVERY_MS = 1000;
const PARTS = { queue: "waiting", prefill: "prompt", decode: "answer" };
const CAUSES = {
  line: "behind others in the line",
  slots: "for a slot",
  tokens: "for room in a step",
  pages: "for pages",
  preemption: "while others were preempted",
};
const STATES = { waiting: "is waiting", running: "is running", swapped: "is swapped out" };

let shown = ""; // id of the answer that is explained now

function timeSplit(times) {
  const bar = make("div", { className: "split", "aria-hidden": "true" });
  const text = make("ul", { className: "split-legend" });
  for (const [name, label] of Object.entries(PARTS)) {
    const value = times[name];
    const swatch = make("span", { className: `swatch part-${name}`, "aria-hidden": "true" });
    text.append(make("li", {}, swatch, make("span", {}, label), make("b", {}, seconds(value))));
    const part = make("span", { className: `part-${name}` });
    part.style.flexGrow = value ?? 0;
    bar.append(part);
  }
  text.append(make("li", {}, make("span", {}, "together"), make("b", {}, seconds(times.total))));
  return [bar, text];
}

function steps(runs) {
  const all = runs.reduce((sum, [, number]) => sum + number, 0);
  const said = runs.slice(0, 12).map(([tokens, number]) => `${count(number)} × ${count(tokens)}`);
  const more = runs.length > said.length ? `, and ${count(runs.length - said.length)} more runs` : "";
  return `${count(all)} steps (steps × tokens): ${said.join(", ")}${more}`;
}

function waited(answer) {
  const plans = Object.entries(answer.plans_waited ?? {}).filter(([, number]) => number);
  const now = answer.waits_for ? `now ${CAUSES[answer.waits_for]}; ` : "";
  if (!plans.length) return `${now}${now ? "" : "not at all: it was admitted with the next step"}`;
  const said = plans.map(([cause, number]) => `${count(number)} ${CAUSES[cause]}`);
  return `${now}plans passed: ${said.join(", ")}`;
}

function prefix(answer, promptTokens) {
  const found = `${count(answer.cached_tokens)} of ${count(promptTokens)} prompt tokens found`;
  const { first_missed_page: missed, why_missed: why } = answer;
  if (missed === undefined || missed === null) return found;
  return `${found}; ${why.startsWith("none") ? why : `page ${count(missed)} and on: ${why}`}`;
}

function explained(answer, promptTokens, isOnly) {
  const state = answer.finish_reason
    ? `has finished: ${answer.finish_reason}`
    : (STATES[answer.state] ?? answer.state);
  const facts = [
    ["State", `${isOnly ? "it" : `answer ${answer.index}`} ${state}`],
    ["Answered", `${count(answer.completion_tokens)} tokens`],
    ["Waited", waited(answer)],
    ["Prefix cache", prefix(answer, promptTokens)],
    ["Preempted", answer.preemptions ? `${count(answer.preemptions)} times` : "never"],
  ];
  if (answer.tokens_per_step) facts.push(["Steps", steps(answer.tokens_per_step)]);
  const list = make("dl", { className: "facts" });
  for (const [name, value] of facts) list.append(make("dt", {}, name), make("dd", {}, value));
  return [...timeSplit(answer.seconds), list];
}

async function show(id) {
  const body = byId("explained-body");
  try {
    const found = await get(`v1/requests/${encodeURIComponent(id)}`);
    if (shown !== id) return false;
    const answers = found.prompts.flatMap((prompt) =>
      prompt.answers.map((answer) => [answer, prompt.prompt_tokens]),
    );
    body.replaceChildren(
      ...answers.flatMap(([answer, tokens]) => explained(answer, tokens, answers.length === 1)),
    );
    return answers.some(([answer]) => !answer.finish_reason);
  } catch (error) {
    setText(body, error.message);
    return false;
  }
}

/** Explain the answer of this id, for as long as it runs. */
export async function explain(id) {
  const panel = byId("explained");
  const before = document.activeElement;
  shown = id;
  panel.hidden = false;
  panel.opener = before;
  setText(byId("explained-title"), `Request …${id.slice(-6)} explained`);
  panel.focus({ preventScroll: true });
  panel.scrollIntoView({ block: "nearest" });
  while (shown === id && (await show(id))) {
    await new Promise((resume) => setTimeout(resume, EVERY_MS));
  }
}

export function startExplain() {
  byId("explained-close").addEventListener("click", () => {
    shown = "";
    byId("explained").hidden = true;
    byId("explained").opener?.focus();
  });
}
