// A line of the last values, for the eye only: the number stands beside it as text.

import { make } from "./dom.js";

const MOST = 80;
const HEIGHT = 26;

export class Sparkline {
  constructor(parent) {
    this.values = [];
    this.canvas = make("canvas", { className: "sparkline", "aria-hidden": "true" });
    parent.append(this.canvas);
    document.addEventListener("themechange", () => this.#draw());
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > MOST) this.values.shift();
    this.#draw();
  }

  #draw() {
    const width = this.canvas.clientWidth;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = HEIGHT * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const most = Math.max(...this.values, 1);
    const x = (i) => width - (this.values.length - 1 - i) * (width / (MOST - 1));
    const y = (value) => HEIGHT - 2 - (value / most) * (HEIGHT - 4);
    context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    context.lineWidth = 1.5;
    context.beginPath();
    this.values.forEach((value, i) => context.lineTo(x(i), y(value)));
    context.stroke();
  }
}
