// The page pool on a canvas: a square a page, or a group of pages where there are many.

import { byId, count, make, setText } from "./dom.js";

export const FIRST_OWNER = 16; // as in jaxpaged/engine/picture.py
const NUM_OWNERS = 240;
const GAP = 1;
const MOST_HEIGHT = 280;
const LEAST_CELL = 3;
const MOST_CELL = 16;
const STATES = ["null", "blank", "cached", "pinned", "shared"];
const NAMES = {
  held: "held by one request",
  shared: "shared",
  pinned: "warm prefix",
  cached: "cached, free",
  blank: "free",
};

/** A request's colour. Slots that are near each other are far apart on the wheel. */
export function colourOf(owner, isDark) {
  const hue = ((owner - FIRST_OWNER) * 137.508 + 168) % 360;
  const step = (owner - FIRST_OWNER) % 3;
  return isDark ? `hsl(${hue} 62% ${58 + 7 * step}%)` : `hsl(${hue} 58% ${36 + 6 * step}%)`;
}

export const isDark = () =>
  getComputedStyle(document.documentElement).colorScheme === "dark";

export class PageMap {
  constructor() {
    this.canvas = byId("map");
    this.cells = new Uint8Array();
    this.drawn = null; // what the canvas shows, to draw only what has changed
    this.chosen = 0; // the owner whose pages are shown while all others step back
    this.requests = [];
    new ResizeObserver(() => this.redraw()).observe(this.canvas.parentElement);
    document.addEventListener("themechange", () => this.redraw());
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#tellSize());
  }

  /** Show a state of the engine, as `GET /v1/engine/state` tells it. */
  show(state) {
    this.state = state;
    this.cells = Uint8Array.from(atob(state.cells), (c) => c.charCodeAt(0));
    this.#draw();
    this.#tell(state.pages);
    if (!this.pointed) this.#tellSize();
  }

  /** Let the pages of one owner stand out; 0 for none. */
  choose(owner) {
    if (owner === this.chosen) return;
    this.chosen = owner;
    this.redraw();
  }

  redraw() {
    this.drawn = null;
    if (this.cells.length) this.#draw();
  }

  #layout() {
    const style = getComputedStyle(this.canvas.parentElement);
    const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    const width = Math.max(this.canvas.parentElement.clientWidth - padding, MOST_CELL);
    let size = MOST_CELL;
    const height = () => Math.ceil(this.cells.length / Math.floor(width / size)) * size;
    while (size > LEAST_CELL && height() > MOST_HEIGHT) size -= 1;
    const columns = Math.max(1, Math.min(Math.floor(width / size), this.cells.length));
    return { size, columns, rows: Math.ceil(this.cells.length / columns) };
  }

  #draw() {
    const { size, columns, rows } = this.#layout();
    const context = this.canvas.getContext("2d");
    const scale = devicePixelRatio || 1;
    if (this.drawn?.length !== this.cells.length) {
      this.canvas.width = columns * size * scale;
      this.canvas.height = rows * size * scale;
      this.canvas.style.width = `${columns * size}px`;
      this.canvas.style.height = `${rows * size}px`;
      this.palette = this.#palette();
      this.layout = { size, columns };
      this.drawn = null;
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    for (let i = 0; i < this.cells.length; i += 1) {
      if (this.drawn && this.drawn[i] === this.cells[i]) continue;
      const x = (i % columns) * size;
      const y = Math.floor(i / columns) * size;
      this.#cell(context, x, y, size - GAP, this.cells[i]);
    }
    this.drawn = this.cells;
  }

  #cell(context, x, y, side, byte) {
    context.clearRect(x, y, side + GAP, side + GAP);
    const isBack = this.chosen !== 0 && byte !== this.chosen && byte > 3;
    context.globalAlpha = isBack ? 0.25 : 1;
    context.fillStyle = this.palette[byte];
    context.fillRect(x, y, side, side);
    if (byte === 4 && side > 5) {
      // shared pages have a mark that needs no colour
      context.fillStyle = this.palette.mark;
      const third = Math.floor(side / 3);
      context.fillRect(x + third, y + third, side - 2 * third, side - 2 * third);
    }
    context.globalAlpha = 1;
  }

  #palette() {
    const style = getComputedStyle(document.documentElement);
    const palette = STATES.map((state) => style.getPropertyValue(`--map-${state}`).trim());
    for (let i = 0; i < NUM_OWNERS; i += 1) {
      palette[FIRST_OWNER + i] = colourOf(FIRST_OWNER + i, isDark());
    }
    palette.mark = style.getPropertyValue("--map-mark").trim();
    return palette;
  }

  #tell(pages) {
    const legend = byId("legend");
    const names = Object.keys(NAMES);
    if (!legend.children.length) {
      for (const name of names) {
        const swatch = make("span", { className: `swatch ${name}`, "aria-hidden": "true" });
        legend.append(make("li", {}, swatch, make("span"), make("b")));
      }
    }
    names.forEach((name, i) => {
      setText(legend.children[i].children[1], NAMES[name]);
      setText(legend.children[i].children[2], count(pages[name]));
    });
    const parts = names.map((name) => `${count(pages[name])} ${NAMES[name]}`);
    this.canvas.setAttribute("aria-label", `Page pool: ${parts.join(", ")}`);
  }

  #tellSize() {
    this.pointed = false;
    const { pages, page_size, pages_per_cell } = this.state ?? {};
    if (!pages) return;
    const total = Object.values(pages).reduce((sum, number) => sum + number, 0);
    const group = pages_per_cell > 1 ? `, a square is ${pages_per_cell} pages` : "";
    setText(byId("map-note"), `${count(total)} pages of ${page_size} tokens${group}`);
  }

  #point(event) {
    const { size, columns } = this.layout ?? { size: 1, columns: 1 };
    const at = Math.floor(event.offsetX / size) + columns * Math.floor(event.offsetY / size);
    const byte = this.cells[at];
    if (byte === undefined || event.offsetX >= size * columns) return this.#tellSize();
    this.pointed = true;
    const page = at * this.state.pages_per_cell;
    let says = NAMES[STATES[byte]] ?? "the null page";
    if (byte >= FIRST_OWNER) {
      const request = this.state.requests.find((one) => one.owner === byte);
      says = `held by ${request?.id ? `…${request.id.slice(-6)}` : "another key's request"}`;
    }
    return setText(byId("map-note"), `page ${count(page)}: ${says}`);
  }
}
