// Light, dark, or what the system says.

import { byId } from "./dom.js";

const KEY = "jaxpaged-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

function show(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  document.dispatchEvent(new Event("themechange"));
}

export function startTheme() {
  const saved = localStorage.getItem(KEY);
  let theme = saved in NEXT ? saved : "system";
  byId("theme").addEventListener("click", () => {
    theme = NEXT[theme];
    localStorage.setItem(KEY, theme);
    show(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(theme));
  show(theme);
}
