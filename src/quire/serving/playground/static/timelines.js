// One lane per live request: when it waited, ran, and was preempted, over the last minute.

import { colour, clearCanvas, redrawOnChange, setFont } from "./canvas.js";
import { el, shortName } from "./dom.js";

const WINDOW = 60_000; // milliseconds
const MOST_KEPT = 256;
const MOST_SHOWN = 14;
const LANE = 15;
const AXIS = 16;
const NAMES = 92; // pixels for the request's name
const STATES = ["running", "waiting", "preempted"];

/** @typedef {{id: string, spans: {state: string, from: number, to: number}[]}} Lane */

export class TimelinesView {
  /** @type {Map<string, Lane>} in order of arrival */
  #lanes = new Map();
  #now = 0;
  #canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { class: "timelines", attributes: { role: "img" } }));
  #legend = el("ul", { class: "legend" });

  constructor() {
    this.element = el("div", {}, this.#canvas, this.#legend);
    redrawOnChange(this.#canvas, () => this.#draw());
    this.#count([]);
  }

  /** @param {import("./blocks.js").BlockMap} map */
  show(map) {
    const before = this.#now;
    this.#now = performance.now();
    for (const { request_id: id, state } of map.requests) {
      if (!this.#lanes.has(id)) this.#lanes.set(id, { id, spans: [] });
      const { spans } = this.#lanes.get(id);
      const last = spans.at(-1);
      if (last && last.to === before) last.to = this.#now;
      if (last?.state !== state || last.to !== this.#now) spans.push({ state, from: this.#now, to: this.#now });
    }
    this.#forget();
    this.#count(map.requests);
    this.#draw();
  }

  #forget() {
    for (const [id, lane] of this.#lanes) {
      const last = lane.spans.at(-1);
      if (last.to < this.#now - WINDOW || this.#lanes.size > MOST_KEPT) this.#lanes.delete(id);
    }
  }

  /** @param {{state: string}[]} requests */
  #count(requests) {
    const counts = STATES.map((state) => [state, requests.filter((request) => request.state === state).length]);
    const rows = counts.map(([state, count]) =>
      el(
        "li",
        {},
        el("i", { class: `swatch lane ${state}`, attributes: { "aria-hidden": "true" } }),
        el("span", { text: String(state) }),
        el("b", { text: String(count) }),
      ),
    );
    this.#legend.replaceChildren(...rows);
    this.#canvas.setAttribute("aria-label", `Requests now: ${counts.map(([state, count]) => `${count} ${state}`).join(", ")}`);
  }

  #draw() {
    const lanes = [...this.#lanes.values()].slice(-MOST_SHOWN);
    this.#canvas.style.height = `${Math.max(lanes.length, 2) * LANE + AXIS}px`;
    const { context, width, height } = clearCanvas(this.#canvas);
    if (width === 0) return;
    const left = Math.min(NAMES, width * 0.3);
    const scale = (width - left) / WINDOW;
    const at = (time) => Math.max(left, width - (this.#now - time) * scale);
    if (lanes.length > 0) this.#axis(context, left, width, height);
    lanes.forEach((lane, i) => {
      const y = i * LANE;
      setFont(context);
      context.textBaseline = "middle";
      context.fillText(shortName(lane.id), 0, y + LANE / 2 - 1, left - 8);
      for (const span of lane.spans) {
        context.fillStyle = colour(`lane-${span.state}`);
        const thick = span.state === "waiting" ? 3 : 9;
        context.fillRect(at(span.from), y + (LANE - thick) / 2 - 1, Math.max(2, at(span.to) - at(span.from)), thick);
      }
    });
    if (lanes.length === 0) {
      setFont(context, 12);
      context.textBaseline = "middle";
      context.fillText("No request in the last minute.", 0, LANE / 2);
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {number} left @param {number} width @param {number} height */
  #axis(context, left, width, height) {
    context.strokeStyle = colour("edge");
    context.lineWidth = 1;
    setFont(context, 10);
    context.textBaseline = "bottom";
    for (let seconds = 0; seconds <= 60; seconds += 20) {
      const x = Math.round(width - (seconds * 1000 * (width - left)) / WINDOW) + (seconds === 0 ? -0.5 : 0.5);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - AXIS + 2);
      context.stroke();
      context.textAlign = seconds === 0 ? "right" : seconds === 60 ? "left" : "center";
      context.fillText(seconds === 0 ? "now" : `${seconds} s ago`, x, height);
    }
    context.textAlign = "left";
  }
}
