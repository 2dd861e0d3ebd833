// What the sampling fields say. They are not judged here: the server says what it does not take.

import { byId, setText } from "./dom.js";

const fields = () => [...byId("settings").querySelectorAll("[name]")];

/** Fields of a request; what is no number is sent as it stands, for the server to refuse. */
export function sampling() {
  const body = {};
  for (const field of fields()) {
    const text = field.value.trim();
    if (field.name === "system" || text === "") continue;
    body[field.name] = Number.isNaN(Number(text)) ? text : Number(text);
  }
  return body;
}

export const systemPrompt = () => byId("settings").querySelector("[name=system]").value.trim();

export function startSettings() {
  const note = () => {
    const set = fields().filter((field) => field.value.trim() !== "");
    const said = set.map((field) =>
      field.name === "system" ? "system prompt" : `${field.name} ${field.value.trim()}`,
    );
    setText(byId("settings-note"), said.length ? said.join(", ") : "the model's defaults");
  };
  byId("settings").addEventListener("input", note);
  note();
}
