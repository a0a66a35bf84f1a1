// The page at /docs: every route as openapi.json describes it, with a form to try it. No other site is asked.
import { getJson, RefusedError, theKey, useKey } from "./api.js";
import { byId, el } from "./dom.js";
import { inline } from "./markdown.js";

const MOST_DEPTH = 4; // schemas inside schemas that are shown opened up
let schemas = {};

async function begin() {
  try {
    const page = await getJson("openapi.json");
    byId("key-dialog").close();
    show(page);
  } catch (failed) {
    if (failed.status !== 401) {
      byId("wait").textContent = failed.message;
      return;
    }
    byId("key-error").hidden = !theKey();
    byId("key-error").textContent = "That key was not accepted.";
    useKey(null);
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  begin();
});
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

function show(page) {
  schemas = page.components?.schemas ?? {};
  byId("wait").hidden = true;
  byId("version").textContent = `version ${page.info.version}`;
  byId("about").textContent = page.info.description ?? "";
  const groups = new Map();
  for (const [path, operations] of Object.entries(page.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "more";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(route(path, method, operation));
    }
  }
  const nodes = [...groups].map(([tag, rows]) => el("section", {}, el("h2", { text: tag }), ...rows));
  byId("routes").replaceChildren(...nodes);
  filter();
}

function route(path, method, operation) {
  const root = el(
    "details",
    { class: "operation", "data-words": `${method} ${path} ${operation.summary ?? ""}`.toLowerCase() },
    el("summary", {}, el("span", { class: `method ${method}`, text: method.toUpperCase() }), el("code", { text: path }), el("span", { class: "label", text: operation.summary ?? "" })),
  );
  root.addEventListener("toggle", () => root.open && root.children.length === 1 && root.append(inside(path, method, operation)), { once: false });
  return root;
}

function inside(path, method, operation) {
  const root = el("div", { class: "inside" });
  if (operation.description) root.append(el("p", {}, ...inline(operation.description)));
  const parameters = operation.parameters ?? [];
  if (parameters.length) {
    const rows = parameters.map((one) => row(`${one.name} (${one.in})`, one.required, one.schema ?? {}, one.description, 0));
    root.append(el("h3", { text: "Parameters" }), el("table", { class: "schema" }, el("tbody", {}, ...rows)));
  }
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) root.append(el("h3", { text: "Body" }), schemaNode(body, 0));
  for (const [status, answer] of Object.entries(operation.responses ?? {})) {
    const schema = answer.content?.["application/json"]?.schema;
    const about = el("details", {}, el("summary", { text: `${status}  ${answer.description ?? ""}` }));
    if (schema) about.addEventListener("toggle", () => about.children.length === 1 && about.append(schemaNode(schema, 0)));
    root.append(status === "200" ? el("h3", { text: "Answers" }) : "", about);
  }
  root.append(form(path, method, body));
  return root;
}

const resolve = (schema) => (schema.$ref ? (schemas[schema.$ref.split("/").pop()] ?? {}) : schema);

function kindOf(schema, depth = 0) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several && depth < MOST_DEPTH) return [...new Set(several.map((one) => kindOf(one, depth + 1)))].join(" | ");
  if (schema.type === "array") return `[${kindOf(schema.items ?? {}, depth + 1)}]`;
  return Array.isArray(schema.type) ? schema.type.join(" | ") : (schema.type ?? "any");
}

function limitsOf(schema) {
  const names = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", maxLength: "length ≤", maxItems: "items ≤" };
  return Object.entries(names).filter(([name]) => schema[name] !== undefined).map(([name, sign]) => `${sign} ${schema[name]}`);
}

function row(name, must, schema, description, depth) {
  const told = el("td", {}, el("span", { class: "kind", text: [kindOf(schema), ...limitsOf(schema)].join(", ") }));
  if (schema.default !== undefined && schema.default !== null) told.append(el("span", { class: "kind", text: `  default ${JSON.stringify(schema.default)}` }));
  const words = description ?? schema.description;
  if (words) told.append(el("div", {}, ...inline(words)));
  const inner = innerObject(schema);
  if (inner && depth < MOST_DEPTH) {
    const more = el("details", {}, el("summary", { text: "fields" }));
    more.addEventListener("toggle", () => more.children.length === 1 && more.append(schemaNode(inner, depth + 1)));
    told.append(more);
  }
  return el("tr", {}, el("td", {}, el("code", { text: name }), must ? el("span", { class: "must", title: "required", text: " *" }) : null), told);
}

/** The first object with fields that a value of this schema may be. */
function innerObject(schema) {
  const choices = [schema, ...(schema.anyOf ?? schema.oneOf ?? schema.allOf ?? [])];
  for (const one of choices.flatMap((choice) => (choice.type === "array" ? [choice, choice.items ?? {}, ...(choice.items?.anyOf ?? [])] : [choice]))) {
    if (resolve(one).properties) return one;
  }
  return null;
}

function schemaNode(schema, depth) {
  const found = resolve(innerObject(schema) ?? schema);
  if (!found.properties) return el("p", { class: "kind", text: kindOf(schema) });
  const must = new Set(found.required ?? []);
  const rows = Object.entries(found.properties).map(([name, one]) => row(name, must.has(name), one, undefined, depth));
  return el("table", { class: "schema" }, el("tbody", {}, ...rows));
}

function example(schema, depth = 0) {
  const found = resolve(schema);
  if (found.example !== undefined) return found.example;
  if (found.default !== undefined && found.default !== null) return found.default;
  const several = found.anyOf ?? found.oneOf;
  if (several) return example(several.find((one) => one.type !== "null") ?? {}, depth + 1);
  if (found.enum) return found.enum[0];
  if (found.type === "object" || found.properties) {
    const fields = (found.required ?? []).filter((name) => found.properties?.[name]);
    return depth > MOST_DEPTH ? {} : Object.fromEntries(fields.map((name) => [name, example(found.properties[name], depth + 1)]));
  }
  if (found.type === "array") return depth > MOST_DEPTH ? [] : [example(found.items ?? {}, depth + 1)];
  return { integer: 1, number: 1, boolean: false, string: "text" }[found.type] ?? "text";
}

function form(path, method, body) {
  const address = el("textarea", { rows: 1, "aria-label": "Address", spellcheck: "false" });
  address.value = path.slice(1);
  const text = body ? el("textarea", { rows: 8, "aria-label": "Body", spellcheck: "false" }) : null;
  if (text) text.value = JSON.stringify(example(body), null, 2);
  const shown = el("pre", { hidden: true, tabindex: "0" });
  const button = el("button", { type: "button", class: "primary wide", text: "Send" });
  button.addEventListener("click", async () => {
    button.disabled = true;
    shown.hidden = false;
    shown.textContent = "…";
    await send(address.value.trim().replace(/^\/+/, ""), method, text?.value, shown);
    button.disabled = false;
  });
  return el("div", { class: "try" }, el("h3", { text: "Try it" }), address, text, button, shown);
}

async function send(path, method, body, shown) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (theKey()) headers.Authorization = `Bearer ${theKey()}`;
  try {
    const url = new URL(path, document.baseURI);
    if (url.origin !== location.origin) throw new RefusedError(0, "only this server's own routes can be tried here");
    const answer = await fetch(url, { method: method.toUpperCase(), headers, body, credentials: "omit" });
    shown.textContent = `HTTP ${answer.status}\n`;
    const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader?.read(); part && !part.done; part = await reader.read()) shown.append(part.value);
  } catch (failed) {
    shown.textContent = failed.message;
  }
}

function filter() {
  const words = byId("filter").value.trim().toLowerCase().split(/\s+/);
  for (const section of byId("routes").children) {
    let some = false;
    for (const one of section.querySelectorAll(".operation")) {
      one.hidden = !words.every((word) => one.dataset.words.includes(word));
      some ||= !one.hidden;
    }
    section.hidden = !some;
  }
}

byId("filter").addEventListener("input", filter);
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, textarea")) return;
  event.preventDefault();
  byId("filter").focus();
});
byId("raw").addEventListener("click", async (event) => {
  if (!theKey()) return; // a browser can fetch it by itself
  event.preventDefault();
  const page = await getJson("openapi.json");
  const url = URL.createObjectURL(new Blob([JSON.stringify(page, null, 2)], { type: "application/json" }));
  el("a", { href: url, download: "openapi.json" }).click();
});
begin();
