// The server, as the page sees it: calls that carry the key, and the events of a stream.
// Every address is relative to the page: a prefix that a proxy adds goes along.
import { keep, recall } from "./dom.js";

const KEY = "quire.key"; // in sessionStorage: it goes with the tab

export class RefusedError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const theKey = () => recall(KEY, null, sessionStorage);
export const useKey = (key) => keep(KEY, key, sessionStorage);

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = theKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, credentials: "omit", redirect: "error", cache: "no-store" });
  } catch (failed) {
    if (failed.name === "AbortError") throw failed;
    throw new RefusedError(0, "The server does not answer.");
  }
  if (!answer.ok) throw new RefusedError(answer.status, await complaint(answer), answer.headers.get("retry-after"));
  return answer;
}

async function complaint(answer) {
  try {
    const body = await answer.json();
    const error = body.error ?? body;
    return String(error.message ?? error.detail ?? `HTTP ${answer.status}`);
  } catch {
    return `HTTP ${answer.status} ${answer.statusText}`;
  }
}

export async function getJson(path, signal) {
  const answer = await ask(path, { signal });
  return answer.json();
}

/** The events of a chat, as parsed chunks, until [DONE]. */
export async function* chatChunks(body, signal) {
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((failed) => {
      if (failed.name === "AbortError") throw failed;
      return { done: true };
    });
    if (done) throw new RefusedError(0, "The answer broke off.");
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (!data) continue; // a comment that keeps the line open
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RefusedError(chunk.error.code ?? 500, String(chunk.error.message));
      yield chunk;
    }
  }
}
