// The conversation: kept in this browser, shown as it grows, one answer at a time.
import { chatChunks } from "./api.js";
import { byId, copyText, el, keep, recall } from "./dom.js";
import { seconds } from "./engine.js";
import { Markdown } from "./markdown.js";

const KEPT = "quire.chat";
const SAVE_MS = 700;
const NEAR_END = 80; // pixels from the end within which the view follows the answer
const SUGGESTIONS = [
  "Explain how a prefix cache makes a chat faster.",
  "Write a haiku about paper.",
  "Show me a Python function that reverses a list.",
];

export class Chat {
  /** `settings()` gives the model and parameters; `onRefused` hears errors that concern the whole page. */
  constructor(settings, onRefused) {
    this.settings = settings;
    this.onRefused = onRefused;
    this.messages = clean(recall(KEPT, []));
    this.running = null; // the AbortController of the answer under way
    this.root = byId("messages");
    this.scroller = byId("scroller");
    this.savedAt = 0;
    this.leaving = false; // the page goes: what fails now is no fault of the server
    addEventListener("pagehide", () => {
      this.leaving = true;
      this.save(true);
    });
    addEventListener("pageshow", () => (this.leaving = false));
    this.scroller.addEventListener("scroll", () => this.showJump());
    byId("jump").addEventListener("click", () => this.toEnd());
    this.drawAll();
  }

  get busy() {
    return this.running !== null;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    keep(KEPT, null);
    this.drawAll();
  }

  send(text) {
    this.push({ role: "user", content: text });
    return this.answer();
  }

  /** The last answer once more. */
  again() {
    if (this.busy) return undefined;
    while (this.messages.length && this.messages.at(-1).role === "assistant") this.messages.pop();
    this.drawAll();
    return this.messages.length ? this.answer() : undefined;
  }

  async answer() {
    const asked = this.request();
    const message = { role: "assistant", content: "", reasoning: "" };
    this.push(message);
    const row = this.root.lastElementChild;
    const live = new LiveRow(row, message);
    this.running = new AbortController();
    this.setBusy(true);
    const clock = new Stopwatch();
    try {
      for await (const chunk of chatChunks(asked, this.running.signal)) {
        this.take(message, chunk, clock);
        const follow = this.atEnd();
        live.draw(() => follow && this.toEnd());
        this.save(false);
      }
    } catch (failed) {
      if (failed.name === "AbortError" || this.leaving) message.stopped = true;
      else {
        message.error = failed.message;
        this.onRefused(failed);
      }
    } finally {
      this.running = null;
      message.timing = clock.summary();
      live.finish();
      row.replaceWith(this.draw(message));
      this.markLast();
      this.toEnd(this.atEnd());
      this.setBusy(false);
      this.save(true);
    }
  }

  take(message, chunk, clock) {
    if (chunk.usage) clock.count(chunk.usage);
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    if (delta.content || thought) clock.token();
    message.content += delta.content ?? "";
    message.reasoning += thought;
    if (choice.finish_reason) message.finish = choice.finish_reason;
  }

  request() {
    const { model, system, ...parameters } = this.settings();
    const messages = this.messages
      .filter((one) => !one.error || one.content)
      .map((one) => ({ role: one.role, content: one.content }))
      .filter((one, at, all) => one.content || at === all.length - 1);
    if (system) messages.unshift({ role: "system", content: system });
    return { model, messages, stream: true, stream_options: { include_usage: true }, ...parameters };
  }

  push(message) {
    this.messages.push(message);
    byId("empty").hidden = true;
    this.root.append(this.draw(message));
    this.markLast();
    this.toEnd();
    this.save(true);
  }

  // ---- what is seen

  drawAll() {
    this.root.replaceChildren(...this.messages.map((message) => this.draw(message)));
    byId("empty").hidden = this.messages.length > 0;
    this.markLast();
    this.toEnd();
  }

  draw(message) {
    const body = el("div", { class: "body" });
    const row = el("article", { class: `message ${message.role}` }, body);
    if (message.role === "user") {
      body.textContent = message.content;
      row.setAttribute("aria-label", "You");
      return row;
    }
    row.setAttribute("aria-label", "Answer");
    if (message.reasoning) body.before(thoughts(message.reasoning, false));
    new Markdown(body).show(message.content);
    row.append(this.footer(message));
    return row;
  }

  footer(message) {
    const foot = el("footer");
    if (message.error) foot.append(el("p", { class: "error", role: "alert", text: message.error }));
    const parts = [];
    if (message.stopped) parts.push("stopped");
    if (message.finish === "length") parts.push("cut at the length limit");
    const timing = message.timing;
    if (timing?.tokens) parts.push(`${timing.tokens} tokens`);
    if (timing?.rate) parts.push(`${timing.rate.toFixed(1)} tok/s`);
    if (timing?.first) parts.push(`first after ${seconds(timing.first)}`);
    foot.append(el("span", { class: "timing", text: parts.join(" · ") }));
    const copy = el("button", { type: "button", class: "quiet", text: "Copy" });
    copy.addEventListener("click", () => copyText(message.content, copy));
    const again = el("button", { type: "button", class: "quiet again", text: message.error ? "Try again" : "Retry", onclick: () => this.again() });
    foot.append(el("span", { class: "actions" }, message.content ? copy : null, again));
    return foot;
  }

  /** Only the last answer can be asked for again. */
  markLast() {
    for (const row of this.root.children) row.classList.toggle("last", row === this.root.lastElementChild);
  }

  setBusy(busy) {
    document.body.classList.toggle("busy", busy);
    byId("messages").setAttribute("aria-busy", String(busy));
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    if (!busy) byId("status").textContent = this.messages.at(-1)?.error ? "The answer failed." : "The answer is complete.";
    else byId("status").textContent = "Answering.";
  }

  atEnd() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < NEAR_END;
  }

  toEnd(wanted = true) {
    if (wanted) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.showJump();
  }

  showJump() {
    byId("jump").hidden = this.atEnd() || this.messages.length === 0;
  }

  save(now) {
    if (!now && performance.now() - this.savedAt < SAVE_MS) return;
    this.savedAt = performance.now();
    let from = 0; // where storage is full the oldest go
    while (from < this.messages.length && !keep(KEPT, this.messages.slice(from))) from += 2;
  }
}

/** What was stored may be anything. */
function clean(stored) {
  if (!Array.isArray(stored)) return [];
  const known = stored.filter((one) => one && typeof one.content === "string" && ["user", "assistant"].includes(one.role));
  const last = known.at(-1);
  if (last?.role === "assistant" && !last.timing && !last.error) last.stopped = true; // the page went while it was written
  return known;
}

function thoughts(text, open) {
  return el("details", { class: "thought", open }, el("summary", { text: open ? "Thinking…" : "Thought" }), el("div", { text }));
}

/** The answer under way: drawn at most once a frame. */
class LiveRow {
  constructor(row, message) {
    this.message = message;
    this.body = row.querySelector(".body");
    this.markdown = new Markdown(this.body);
    this.details = null;
    this.frame = 0;
    row.classList.add("live");
    this.waiting = el("span", { class: "dots", "aria-label": "waiting for the first token" }, el("i"), el("i"), el("i"));
    this.body.before(this.waiting);
  }

  draw(after) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.message.content || this.message.reasoning) this.waiting.remove();
      if (this.message.reasoning) this.drawThought();
      this.markdown.show(this.message.content);
      after();
    });
  }

  drawThought() {
    if (!this.details) {
      this.details = thoughts("", true);
      this.body.before(this.details);
    }
    this.details.lastElementChild.textContent = this.message.reasoning;
  }

  finish() {
    cancelAnimationFrame(this.frame);
  }
}

class Stopwatch {
  constructor() {
    this.began = performance.now();
    this.first = 0;
    this.last = 0;
    this.pieces = 0;
    this.usage = null;
  }

  token() {
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces += 1;
  }

  count(usage) {
    this.usage = usage;
  }

  summary() {
    const tokens = this.usage?.completion_tokens ?? this.pieces; // a stopped stream has no usage: a piece is a token, mostly
    const spent = (this.last - this.first) / 1000;
    return { tokens, first: this.first ? (this.first - this.began) / 1000 : 0, rate: spent > 0 && tokens > 1 ? (tokens - 1) / spent : 0 };
  }
}

export function suggestions(pick) {
  return SUGGESTIONS.map((text) => el("button", { type: "button", class: "suggestion", text, onclick: () => pick(text) }));
}
