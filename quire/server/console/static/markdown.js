// Markdown to nodes. What a model writes is never HTML: tags stay text, only http(s) and mail addresses become links,
// and pictures become links too, so that no answer can make the browser ask another host.
import { copyText, el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_DEPTH = 8; // of quotes and lists in each other

/** Renders growing text into `root`, touching only the blocks that changed. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  show(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && same < this.shown.length && blocks[same] === this.shown[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    for (const block of blocks.slice(same)) this.root.append(render(block, 0));
    this.shown = blocks;
  }
}

/** The source of each top-level block. */
function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOfBlock(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function endOfBlock(lines, begin) {
  const fence = FENCE.exec(lines[begin]);
  if (fence) {
    const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
    for (let at = begin + 1; at < lines.length; at += 1) if (closing.test(lines[at])) return at + 1;
    return lines.length;
  }
  if (HEADING.test(lines[begin]) || RULE.test(lines[begin])) return begin + 1;
  if (ITEM.test(lines[begin])) return endOfList(lines, begin);
  const quoted = QUOTE.test(lines[begin]);
  let at = begin + 1;
  while (at < lines.length && lines[at].trim()) {
    if (FENCE.test(lines[at]) || HEADING.test(lines[at])) break;
    if (quoted !== QUOTE.test(lines[at])) break;
    if (!quoted && !isTable(lines, begin) && ITEM.test(lines[at])) break;
    at += 1;
  }
  return at;
}

function endOfList(lines, begin) {
  let at = begin + 1;
  let fence = null;
  while (at < lines.length) {
    const line = lines[at];
    const mark = FENCE.exec(line.trimStart());
    if (mark && /^\s/.test(line)) fence = fence ? null : mark[1][0];
    const next = lines[at + 1] ?? "";
    if (!line.trim() && !fence && !ITEM.test(next) && !/^\s{2,}\S/.test(next)) return at;
    if (line.trim() && !fence && !ITEM.test(line) && !/^\s/.test(line)) {
      if (!lines[at - 1].trim() || FENCE.test(line) || HEADING.test(line)) return at;
    }
    at += 1;
  }
  return at;
}

const isTable = (lines, at) => at + 1 < lines.length && lines[at].includes("|") && lines[at + 1].length < 1000 && TABLE_RULE.test(lines[at + 1]);

function render(block, depth) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(lines[0]);
  if (heading) return el(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2].trim()));
  if (RULE.test(lines[0])) return el("hr");
  if (depth < MOST_DEPTH && ITEM.test(lines[0])) return list(lines, depth);
  if (depth < MOST_DEPTH && QUOTE.test(lines[0])) {
    const inner = lines.map((line) => (QUOTE.exec(line) ?? [line, line])[1]).join("\n");
    return el("blockquote", {}, ...split(inner).map((part) => render(part, depth + 1)));
  }
  if (isTable(lines, 0)) return table(lines);
  return el("p", {}, ...withBreaks(lines));
}

function code(lines, fence) {
  const last = lines.length > 1 && new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`).test(lines.at(-1));
  const text = lines.slice(1, last ? -1 : undefined).join("\n");
  const button = el("button", { type: "button", class: "quiet copy", text: "Copy" });
  button.addEventListener("click", () => copyText(text, button));
  const head = el("figcaption", {}, el("span", { text: fence[2].slice(0, 40) || "text" }), button);
  return el("figure", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", { text })));
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const root = el(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) root.setAttribute("start", parseInt(first[2], 10));
  const indent = first[1].length;
  let item = null;
  const close = () => {
    if (item === null) return;
    const blocks = split(item.join("\n"));
    const nodes = blocks.map((part) => render(part, depth + 1));
    const tight = nodes.length > 0 && nodes[0].tagName === "P";
    root.append(el("li", {}, ...(tight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes)));
  };
  let inside = 0;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) {
      close();
      item = [found[3]];
      inside = line.length - found[3].length;
    } else if (item !== null) {
      item.push(line.slice(Math.min(inside, line.length - line.trimStart().length)));
    }
  }
  close();
  return root;
}

function table(lines) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|")
      .map((cell) => cell.trim());
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  const row = (line, tag) =>
    el("tr", {}, ...cells(line).map((cell, at) => el(tag, { class: sides[at] ?? "start" }, ...inline(cell))));
  const head = el("thead", {}, row(lines[0], "th"));
  const body = el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, head, body));
}

function withBreaks(lines) {
  const nodes = [];
  lines.forEach((line, at) => {
    if (at) nodes.push(/( {2,}|\\)$/.test(lines[at - 1]) ? el("br") : document.createTextNode("\n"));
    nodes.push(...inline(line.trim().replace(/\\$/, "")));
  });
  return nodes;
}

// One alternative per form; each consumes at least one character and none can backtrack over another's text.
const INLINE =
  /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*([^*]+?)\*\*|__([^_]+?)__|~~([^~]+?)~~|\*([^*\s][^*]*?)\*|(?<![\w_])_([^_\s][^_]*?)_(?![\w_])|!?\[([^\]]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+"[^"]*")?\)|(https?:\/\/[^\s<>"'`)\]]+)|\\([\\`*_{}[\]()#+.!~>|-])/;
const LONGEST_INLINE = 4000; // characters of one line that are looked at: time grows with their square

/** The nodes of one line. */
export function inline(text, depth = 0) {
  const nodes = [];
  let rest = text;
  if (depth > 4 || rest.length > LONGEST_INLINE) return [document.createTextNode(rest)];
  while (rest) {
    const found = INLINE.exec(rest);
    if (!found) break;
    if (found.index) nodes.push(document.createTextNode(rest.slice(0, found.index)));
    nodes.push(inlineNode(found, depth));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) nodes.push(document.createTextNode(rest));
  return nodes;
}

function inlineNode(found, depth) {
  const [whole, , codeText, strong, strong2, struck, em, em2, label, target, bare, escaped] = found;
  if (codeText !== undefined) return el("code", { text: codeText.trim() });
  if (strong ?? strong2) return el("strong", {}, ...inline(strong ?? strong2, depth + 1));
  if (struck) return el("s", {}, ...inline(struck, depth + 1));
  if (em ?? em2) return el("em", {}, ...inline(em ?? em2, depth + 1));
  if (bare) return link(bare, [document.createTextNode(bare)]) ?? document.createTextNode(whole);
  if (escaped !== undefined) return document.createTextNode(escaped);
  return link(target, label ? inline(label, depth + 1) : [document.createTextNode(target)]) ?? document.createTextNode(whole);
}

/** A link to another page, or null where the address is not one that may be followed. */
function link(address, children) {
  let url;
  try {
    url = new URL(address); // without a base: a relative address of a model's means nothing here
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
