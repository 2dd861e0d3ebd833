// Puts the parts of the page together.

import { get } from "./api.js";
import { startChat } from "./chat.js";
import { byId, make, setText } from "./dom.js";
import { watchEngine } from "./engine.js";
import { explain, startExplain } from "./explain.js";
import { startKeys } from "./keys.js";
import { startSettings } from "./settings.js";
import { startTheme } from "./theme.js";

/** On a narrow screen one of the two halves is shown. */
function show(pane) {
  document.body.dataset.pane = pane;
  byId("show-chat").setAttribute("aria-pressed", String(pane === "chat"));
  byId("show-engine").setAttribute("aria-pressed", String(pane === "engine"));
}

async function listModels() {
  const select = byId("model");
  try {
    const { data } = await get("v1/models");
    select.replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
    select.disabled = data.length < 2;
    byId("error").hidden = true;
  } catch (error) {
    byId("error").hidden = false;
    setText(byId("error"), error.message);
  }
}

function explainInSight(id) {
  show("engine");
  explain(id);
}

startTheme();
startKeys(listModels);
startSettings();
startExplain();
startChat(explainInSight);
byId("show-chat").addEventListener("click", () => show("chat"));
byId("show-engine").addEventListener("click", () => show("engine"));
await listModels();
watchEngine(explainInSight);
if (!byId("key-dialog").open) byId("prompt").focus();
