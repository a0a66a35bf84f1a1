// Making nodes. Text is always set as text: nothing in the console parses HTML.

/** An element with properties ("class", "text", "on…", data and aria attributes) and children. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The same in SVG's name space. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** What was kept under a name, or `otherwise`. Storage may be off, full, or hold what an older page wrote. */
export function recall(name, otherwise, store = localStorage) {
  try {
    const text = store.getItem(name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/** False if it could not be kept. */
export function keep(name, value, store = localStorage) {
  try {
    if (value === null) store.removeItem(name);
    else store.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Could not copy"; // no permission, or a page without TLS
  }
  setTimeout(() => (button.textContent = before), 1500);
}
