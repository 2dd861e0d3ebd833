// Calls to the server, with the key that was typed. The key lives as long as this tab.

const KEY = "jaxpaged-key";
const listeners = [];

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** Have `listener` called when the server wants a key, or another one. */
export const onKeyWanted = (listener) => listeners.push(listener);

/** What the server refused, in its own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  let message = `the server answered ${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON of ours: a proxy's page, perhaps
  }
  if (response.status === 401) listeners.forEach((listener) => listener(message));
  return new Refusal(response.status, message);
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "the server cannot be reached");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export const get = async (path) => (await call(path)).json();

/** The data of a stream of events, as they come, without the last [DONE]. */
export async function* events(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.code ?? 0, event.error.message);
      yield event;
    }
  }
}
