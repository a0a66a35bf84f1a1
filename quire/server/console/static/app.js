// The page at /: puts the chat, the engine view, the dialogs and the keyboard together.
import { getJson, theKey, useKey } from "./api.js";
import { Chat, suggestions } from "./chat.js";
import { byId, el, keep, recall } from "./dom.js";
import { EngineView } from "./engine.js";

const FIELDS = ["system", "temperature", "top_p", "max_tokens"];
const STATES = { live: "connected", lost: "no answer from the server", locked: "a key is needed" };

const input = byId("input");
const stored = recall("quire.settings", {});
let asking = false; // the key's dialog is open, or waits for the server

// ---- settings

function settings() {
  const chosen = { model: byId("model").value, system: byId("system").value.trim() };
  for (const name of FIELDS.slice(1)) {
    const field = byId(name);
    if (field.value !== "" && field.checkValidity()) chosen[name] = Number(field.value);
  }
  return chosen;
}

for (const name of FIELDS) {
  const field = byId(name);
  if (typeof stored[name] === "string") field.value = stored[name];
  field.addEventListener("input", () => keep("quire.settings", Object.fromEntries(FIELDS.map((one) => [one, byId(one).value]))));
}

// ---- models and the key

async function connect() {
  try {
    const listed = await getJson("v1/models");
    const models = listed.data ?? [];
    byId("model").replaceChildren(...models.map((one) => el("option", { value: one.id, text: one.id })));
    const kept = recall("quire.model", null);
    if (models.some((one) => one.id === kept)) byId("model").value = kept;
    byId("model").disabled = models.length < 2;
    byId("model-name").textContent = byId("model").value;
    byId("key-dialog").close();
    asking = false;
    byId("forget").hidden = !theKey();
    byId("trouble").hidden = true;
    engine.start();
    input.focus({ preventScroll: true });
  } catch (failed) {
    if (failed.status === 401) askForKey(theKey() ? "That key was not accepted." : "");
    else {
      byId("trouble-text").textContent = failed.message;
      byId("trouble").hidden = false;
    }
  }
}

function askForKey(complaint) {
  useKey(null);
  byId("key-error").textContent = complaint;
  byId("key-error").hidden = !complaint;
  asking = true;
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
  byId("key").value = "";
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!key) return;
  useKey(key);
  connect();
});
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault()); // there is nothing behind it without one
byId("forget").addEventListener("click", () => {
  useKey(null);
  byId("settings-dialog").close();
  connect();
});
byId("reconnect").addEventListener("click", connect);
byId("model").addEventListener("change", () => {
  keep("quire.model", byId("model").value);
  byId("model-name").textContent = byId("model").value;
});

// ---- chat and engine

const chat = new Chat(settings, (failed) => {
  if (failed.status === 401) askForKey("The server asks for a key.");
});

const engine = new EngineView((state) => {
  document.body.dataset.state = state;
  byId("state").title = STATES[state];
  byId("state-text").textContent = STATES[state];
  if (state === "locked" && !asking) askForKey("");
});

function send() {
  const text = input.value.trim();
  if (!text || chat.busy) return;
  input.value = "";
  grow();
  chat.send(text);
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 260)}px`;
  byId("send").disabled = !input.value.trim();
}

input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.altKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => {
  chat.stop();
  input.focus();
});
byId("suggestions").append(
  ...suggestions((text) => {
    input.value = text;
    grow();
    send();
  }),
);

function newChat() {
  chat.clear();
  input.focus();
}

// ---- panels, theme, keyboard

function toggleEngine() {
  const narrow = matchMedia("(max-width: 940px)").matches;
  const name = narrow ? "engine-open" : "engine-closed";
  document.body.classList.toggle(name);
  showPanel();
  if (!narrow) keep("quire.panel", document.body.classList.contains(name) ? "closed" : null);
}

function showPanel() {
  const narrow = matchMedia("(max-width: 940px)").matches;
  const open = narrow ? document.body.classList.contains("engine-open") : !document.body.classList.contains("engine-closed");
  for (const id of ["engine-button", "strip"]) byId(id).setAttribute("aria-expanded", String(open));
  byId("engine").inert = !open;
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("quire.theme", root.dataset.theme);
  } catch {
    // it holds for this page
  }
}

const COMMANDS = { n: newChat, e: toggleEngine, t: toggleTheme, s: () => byId("settings-dialog").showModal() };

addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea, select");
  if (event.altKey && !event.ctrlKey && !event.metaKey && COMMANDS[event.key.toLowerCase()]) {
    event.preventDefault();
    if (!asking) COMMANDS[event.key.toLowerCase()]();
  } else if (event.key === "Escape") {
    if (chat.busy) chat.stop();
    else if (document.body.classList.contains("engine-open")) toggleEngine();
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    input.focus();
  } else if (event.key === "?" && !typing) byId("help-dialog").showModal();
});

for (const [id, act] of Object.entries({
  "new-button": newChat,
  "engine-button": toggleEngine,
  strip: toggleEngine,
  "engine-close": toggleEngine,
  "theme-button": toggleTheme,
  "settings-button": COMMANDS.s,
  "help-button": () => byId("help-dialog").showModal(),
})) {
  byId(id).addEventListener("click", act);
}
for (const button of document.querySelectorAll("dialog [data-close]")) button.addEventListener("click", () => button.closest("dialog").close());

if (recall("quire.panel", null) === "closed") document.body.classList.add("engine-closed");
matchMedia("(max-width: 940px)").addEventListener("change", showPanel);
showPanel();
grow();
connect();
