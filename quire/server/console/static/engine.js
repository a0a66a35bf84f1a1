// The engine view: asks /console/stats once a second while the page is seen, and draws what it says.
import { getJson } from "./api.js";
import { byId, el } from "./dom.js";
import { Spark } from "./spark.js";

const EVERY_MS = 1000;
const AFTER_FAILURE_MS = 5000;
const RATE_WINDOW = 3; // samples a rate is taken over: single seconds jump

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
};

const uptime = (value) => {
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.floor(value)} s`;
  if (minutes < 60) return `${minutes} min`;
  return minutes < 60 * 48 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
};

const rate = (value) => (value < 9.95 ? value.toFixed(1) : whole.format(value));

export class EngineView {
  /** `onState` hears "live", "lost" or "locked", with the newest numbers. */
  constructor(onState) {
    this.onState = onState;
    this.samples = [];
    this.timer = 0;
    this.sparks = {
      generated: new Spark(byId("spark-generated"), { label: "Tokens generated a second, over the last 90 seconds" }),
      prompt: new Spark(byId("spark-prompt"), { label: "Prompt tokens computed a second, over the last 90 seconds" }),
      kv: new Spark(byId("spark-kv"), { ceiling: 1, label: "Share of the KV cache in use, over the last 90 seconds" }),
    };
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** From now on; also after a key was given. */
  start() {
    clearTimeout(this.timer);
    if (!document.hidden) this.poll();
  }

  async poll() {
    let wait = EVERY_MS;
    try {
      const stats = await getJson("console/stats", AbortSignal.timeout(10000));
      this.show(stats);
      this.onState("live", stats);
    } catch (failed) {
      wait = AFTER_FAILURE_MS;
      this.samples = [];
      this.onState(failed.status === 401 ? "locked" : "lost", null);
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), wait);
  }

  show(stats) {
    const sample = { at: performance.now() / 1000, ...stats };
    const newest = this.samples.at(-1);
    if (newest && stats.generated_tokens < newest.generated_tokens) this.samples = []; // another server, from zero
    this.samples.push(sample);
    if (this.samples.length > 90) this.samples.shift();
    byId("engine").dataset.measured = String(stats.measured);
    const generated = this.rateOf("generated_tokens");
    const prompt = this.rateOf("prompt_tokens");
    this.sparks.generated.push(generated);
    this.sparks.prompt.push(prompt);
    this.sparks.kv.push(stats.kv_usage);
    text("running", whole.format(stats.running));
    text("waiting", whole.format(stats.waiting));
    byId("tile-waiting").classList.toggle("busy", stats.waiting > 0);
    byId("tile-running").classList.toggle("live", stats.running > 0);
    text("rate-generated", rate(generated));
    text("rate-prompt", rate(prompt));
    this.showCache(stats);
    this.showEnded(stats.ended);
    text("seats", `of ${whole.format(stats.max_num_seqs)}`);
    const facts = [`context ${whole.format(stats.max_model_len)}`, `up ${uptime(stats.uptime)}`, `Quire ${stats.version}`];
    text("facts", facts.join(" · "));
    text("strip-text", `${stats.running} running · ${stats.waiting} waiting · ${rate(generated)} tok/s · KV ${percent(stats.kv_usage)}`);
  }

  showCache(stats) {
    text("kv", percent(stats.kv_usage));
    text("kv-tokens", `${short.format(Math.round(stats.kv_usage * stats.kv_tokens))} of ${short.format(stats.kv_tokens)} tokens`);
    const meter = byId("kv-meter");
    meter.value = stats.kv_usage;
    meter.textContent = percent(stats.kv_usage);
    const share = stats.prefix_queries ? stats.prefix_hits / stats.prefix_queries : null;
    text("prefix", share === null ? "–" : percent(share));
    byId("prefix-meter").value = share ?? 0;
    text("prefix-tokens", stats.prefix_queries ? `${short.format(stats.prefix_hits)} of ${short.format(stats.prefix_queries)} prompt tokens` : "nothing looked up yet");
    text("preempted", stats.preempted ? `${whole.format(stats.preempted)} preempted` : "");
  }

  rateOf(name) {
    const last = this.samples.at(-1);
    const before = this.samples.at(-1 - Math.min(RATE_WINDOW, this.samples.length - 1));
    const passed = last.at - before.at;
    return passed > 0 ? (last[name] - before[name]) / passed : 0;
  }

  showEnded(ended) {
    const mark = ended.map((one) => `${one.total}:${one.generated_tokens}`).join(" ");
    const root = byId("ended");
    byId("ended-empty").hidden = ended.length > 0;
    if (mark !== this.mark) {
      this.mark = mark;
      const longest = Math.max(...ended.slice(0, 12).map((one) => one.total), 1e-6);
      root.replaceChildren(...ended.slice(0, 12).map((one) => endedRow(one, longest)));
    }
  }
}

/** One request: how long it waited, read its prompt and wrote, as parts of a bar, and the numbers below. */
function endedRow(one, longest) {
  const bar = el("div", { class: "phases", "aria-hidden": "true" });
  for (const phase of ["queue", "prefill", "decode"]) {
    const part = el("span", { class: phase });
    part.style.width = `${((100 * (one[phase] ?? 0)) / longest).toFixed(2)}%`;
    bar.append(part);
  }
  const speed = one.decode > 0 && one.generated_tokens > 1 ? `${rate((one.generated_tokens - 1) / one.decode)} tok/s` : "–";
  const words = `waited ${seconds(one.queue)}, prompt ${seconds(one.prefill)}, answer ${seconds(one.decode)}, ${one.finish_reason}`;
  const cached = one.cached_tokens ? ` (${one.cached_tokens} cached)` : "";
  return el(
    "li",
    { title: words, "aria-label": words },
    bar,
    el(
      "div",
      { class: "numbers" },
      el("span", { text: `${one.prompt_tokens}${cached} → ${one.generated_tokens}` }),
      el("span", { text: one.finish_reason === "abort" ? "stopped" : speed }),
      el("span", { class: "total", text: seconds(one.total) }),
    ),
  );
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
const text = (id, words) => {
  const node = byId(id);
  if (node.textContent !== words) node.textContent = words;
};
