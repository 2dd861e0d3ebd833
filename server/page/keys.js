// The dialog that asks for an API key.

import { key, onKeyWanted, setKey } from "./api.js";
import { byId, setText } from "./dom.js";

/** Ask when the server wants a key or the button is pressed; `onChange` after another one is set. */
export function startKeys(onChange) {
  const dialog = byId("key-dialog");
  const why = byId("key-why");
  const usual = why.textContent;
  const open = (reason) => {
    setText(why, reason);
    if (dialog.open) return;
    byId("key").value = key();
    dialog.showModal();
    byId("key").select();
  };
  const use = (value) => {
    setKey(value);
    dialog.close();
    onChange();
  };
  onKeyWanted((message) => open(key() ? `The server says: ${message}` : usual));
  byId("key-button").addEventListener("click", () => open(usual));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => use(""));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(byId("key").value.trim());
  });
}
