// The live picture of the engine: asked for twice a second, and only while somebody can see it.

import { get } from "./api.js";
import { byId, count, make, seconds, setText } from "./dom.js";
import { PageMap, colourOf, isDark } from "./map.js";
import { Sparkline } from "./sparkline.js";

const EVERY_MS = 500;
const AFTER_TROUBLE_MS = 3000;
const RATE_S = 3; // over which tokens a second are counted
const WAITS = {
  line: "for its place in the line",
  slots: "for a slot (max_num_seqs)",
  tokens: "for room in a step (max_num_batched_tokens)",
  pages: "for pages",
  preemption: "until pages are free again",
};

const isSeen = () =>
  !document.hidden && byId("engine").checkVisibility() && !byId("key-dialog").open;

class Tiles {
  constructor() {
    this.values = {};
    this.past = []; // states of the last seconds
    for (const [name, label] of [
      ["rate", "Tokens/s"], ["running", "Running"], ["waiting", "Waiting"],
      ["usage", "KV pages in use"], ["hits", "Prefix hits"], ["preemptions", "Preemptions"],
    ]) {
      this.values[name] = make("dd", {}, "–");
      const tile = make("div", { className: `tile ${name}` }, make("dt", {}, label), this.values[name]);
      byId("tiles").append(tile);
      if (name === "rate") this.sparkline = new Sparkline(tile);
    }
  }

  show(state) {
    const { load } = state;
    this.past.push(state);
    while (this.past[0].time_s < state.time_s - RATE_S && this.past.length > 2) this.past.shift();
    const first = this.past[0];
    const time = state.time_s - first.time_s;
    const rate = time > 0 ? Math.max(0, state.generation_tokens - first.generation_tokens) / time : 0;
    const hits = load.prefix_queries ? load.prefix_hits / load.prefix_queries : null;
    setText(this.values.rate, rate < 100 ? rate.toFixed(1) : count(rate));
    setText(this.values.running, count(load.num_running));
    setText(this.values.waiting, count(load.num_waiting));
    setText(this.values.usage, `${(100 * load.kv_cache_usage).toFixed(1)} %`);
    setText(this.values.hits, hits === null ? "–" : `${(100 * hits).toFixed(0)} %`);
    setText(this.values.preemptions, count(load.num_preemptions));
    this.sparkline.add(rate);
  }
}

/** The table of running and waiting requests; rows stay the same elements while a request lives. */
class Requests {
  constructor(map, onExplain) {
    this.map = map;
    this.onExplain = onExplain;
    this.rows = new Map();
  }

  show(state) {
    const body = byId("requests");
    const rows = new Map();
    state.requests.forEach((request, i) => {
      const name = request.id ? `${request.id} ${request.index}` : `? ${request.owner} ${i}`;
      const row = this.rows.get(name) ?? this.#row(request);
      this.#fill(row, request);
      rows.set(name, row);
      if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
    });
    while (body.children.length > state.requests.length) body.lastChild.remove();
    this.rows = rows;
    const { num_waiting: waiting } = state.load;
    const why = waiting ? `the next one waits ${WAITS[state.waits_for]}` : "";
    setText(byId("requests-note"), state.requests.length ? why : "none now");
    if (![...rows.values()].some((row) => row.owner === this.map.chosen)) this.map.choose(0);
  }

  #row(request) {
    const swatch = make("span", { className: "swatch", "aria-hidden": "true" });
    const name = make("span", { className: "anonymous" }, "another key's");
    if (request.id) {
      const label = `…${request.id.slice(-6)}${request.index ? `/${request.index}` : ""}`;
      const button = make("button", { type: "button", className: "link", title: request.id }, label);
      button.setAttribute("aria-label", `Explain request ${label}`);
      button.addEventListener("click", () => this.onExplain(request.id));
      name.replaceChildren(button);
      name.className = "";
    }
    const cells = Array.from({ length: 5 }, (_, i) => make("td", { className: i ? "number" : "" }));
    const row = make("tr", {}, make("th", { scope: "row" }, swatch, name), ...cells);
    const choose = () => this.map.choose(row.owner);
    const leave = () => this.map.choose(0);
    for (const kind of ["pointerenter", "focusin"]) row.addEventListener(kind, choose);
    for (const kind of ["pointerleave", "focusout"]) row.addEventListener(kind, leave);
    return row;
  }

  #fill(row, request) {
    row.owner = request.owner;
    const swatch = row.querySelector(".swatch");
    swatch.style.backgroundColor = request.owner ? colourOf(request.owner, isDark()) : "";
    const [state, prompt, answer, pages, age] = row.querySelectorAll("td");
    setText(state, request.state);
    setText(pages, count(request.num_pages));
    if (!request.id) return;
    const cached = request.cached_tokens ? ` (${count(request.cached_tokens)} cached)` : "";
    setText(prompt, count(request.prompt_tokens) + cached);
    setText(answer, `${count(request.completion_tokens)} of ${count(request.max_tokens)}`);
    setText(age, seconds(request.age_s));
  }
}

/** Look at the engine until the page is left. */
export async function watchEngine(onExplain) {
  const map = new PageMap();
  const tiles = new Tiles();
  const requests = new Requests(map, onExplain);
  const trouble = byId("engine-trouble");
  for (;;) {
    let wait = EVERY_MS;
    if (isSeen()) {
      try {
        const state = await get("v1/engine/state");
        trouble.hidden = true;
        tiles.show(state);
        map.show(state);
        requests.show(state);
      } catch (error) {
        trouble.hidden = false;
        setText(trouble, error.message);
        wait = AFTER_TROUBLE_MS;
      }
    }
    await new Promise((resume) => setTimeout(resume, wait));
  }
}
