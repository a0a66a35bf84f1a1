// Sparklines: the last minutes of one number as a line over a filled area, drawn as SVG.
import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 40;

export class Spark {
  /** `root` is an empty element; `ceiling` the least top of the scale, which otherwise grows with the values. */
  constructor(root, { points = 90, ceiling = 0, label }) {
    this.points = points;
    this.ceiling = ceiling;
    this.values = [];
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    const attributes = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
    root.append(svg("svg", attributes, this.area, this.line));
  }

  push(value) {
    this.values.push(Number.isFinite(value) ? value : 0);
    if (this.values.length > this.points) this.values.shift();
    this.draw();
  }

  draw() {
    const top = Math.max(this.ceiling, ...this.values) || 1;
    const step = WIDTH / (this.points - 1);
    const first = this.points - this.values.length; // new values come in from the right
    const places = this.values.map((value, at) => {
      const x = (first + at) * step;
      const y = HEIGHT - 1 - (value / top) * (HEIGHT - 3);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    if (places.length < 2) return;
    const path = `M${places.join("L")}`;
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}L${WIDTH},${HEIGHT}L${(first * step).toFixed(1)},${HEIGHT}Z`);
  }
}
