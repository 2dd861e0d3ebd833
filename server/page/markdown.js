// The little Markdown that models write, as elements: paragraphs, headings, lists, code, bold.
// Every piece of text becomes a text node. There are no links and no images, whatever is written.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d{1,9})[.)]\s+(.*)$/;
const INLINE = /(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)|\*\*(?=\S)(.+?)\*\*/g;

/** Text cut into blocks: `{kind, lines, ...}`. A fence that is still open runs to the end. */
export function blocks(text) {
  const found = [];
  let open = null;
  const add = (kind, line, more = {}) => {
    const last = found.at(-1);
    if (last && last.kind === kind && !last.closed) last.lines.push(line);
    else found.push({ kind, lines: [line], ...more });
  };
  const close = () => {
    if (found.length) found.at(-1).closed = true;
  };
  for (const line of text.split("\n")) {
    if (open) {
      if (line.trim() === open.fence) open = null;
      else open.lines.push(line);
      continue;
    }
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const bullet = BULLET.exec(line);
    const number = NUMBER.exec(line);
    if (fence) {
      open = { kind: "code", fence: fence[1], language: fence[2], lines: [], closed: true };
      found.push(open);
    } else if (heading) {
      found.push({ kind: "heading", level: heading[1].length, lines: [heading[2]], closed: true });
    } else if (bullet) {
      add("bullets", bullet[1]);
    } else if (number) {
      add("numbers", number[2], { start: Number(number[1]) });
    } else if (line.trim() === "") {
      if (!["bullets", "numbers"].includes(found.at(-1)?.kind)) close();
    } else if (/^\s+/.test(line) && ["bullets", "numbers"].includes(found.at(-1)?.kind)) {
      found.at(-1).lines[found.at(-1).lines.length - 1] += `\n${line.trim()}`;
    } else {
      add("paragraph", line);
    }
  }
  return found;
}

function inline(parent, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(end, match.index));
    const [whole, ticks, code, strong] = match;
    parent.append(ticks ? make("code", {}, code) : make("strong", {}, strong));
    end = match.index + whole.length;
  }
  parent.append(text.slice(end));
  return parent;
}

function element(block) {
  const text = block.lines.join("\n");
  if (block.kind === "code") {
    // it may be wider than the page: whoever has no mouse scrolls it with the keyboard
    const fields = { tabindex: "0", role: "region", "aria-label": `code ${block.language}`.trim() };
    return make("pre", fields, make("code", {}, text));
  }
  if (block.kind === "heading") return inline(make("p", { className: "heading" }), text);
  if (block.kind === "paragraph") return inline(make("p"), text);
  const list = make(block.kind === "bullets" ? "ul" : "ol");
  if (block.start !== undefined) list.start = block.start;
  list.append(...block.lines.map((line) => inline(make("li"), line)));
  return list;
}

/** Draw text into `parent`; blocks that stand there already and are the same are left alone. */
export function render(parent, text) {
  const wanted = blocks(text);
  wanted.forEach((block, i) => {
    const mark = JSON.stringify(block);
    const old = parent.children[i];
    if (old?.mark === mark) return;
    const drawn = element(block);
    drawn.mark = mark;
    if (old) old.replaceWith(drawn);
    else parent.append(drawn);
  });
  while (parent.children.length > wanted.length) parent.lastChild.remove();
}
