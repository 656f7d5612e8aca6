// Tokens per second as a line, time to first token as points: the last minute of each.

import { colour, clearCanvas, redrawOnChange, setFont } from "./canvas.js";
import { duration, el, rate } from "./dom.js";
import { requestLog } from "./request_log.js";

const WINDOW = 60_000; // milliseconds
const TICK = 500;
const STALE = 6000; // milliseconds without server counts after which the page's own count is shown
const TOP = 14; // pixels above the plot, for its scale

export class PlotsView {
  /** @type {{at: number, value: number}[]} */
  #rates = [];
  #previous = { at: performance.now(), tokens: 0, server: false };
  /** @type {{at: number, tokens: number} | null} the last count of the server, from the block stream */
  #server = null;
  #rate = figure("Tokens per second");
  #first = figure("Time to first token");

  constructor() {
    this.element = el("div", { class: "plots" }, this.#rate.element, this.#first.element);
    redrawOnChange(this.#rate.canvas, () => this.#drawRate());
    redrawOnChange(this.#first.canvas, () => this.#drawFirst());
    setInterval(() => this.#tick(), TICK);
  }

  /** @param {import("./blocks.js").BlockMap} map */
  show(map) {
    const tokens = map.stats?.output_tokens;
    if (tokens !== undefined) this.#server = { at: performance.now(), tokens };
  }

  #tick() {
    const now = performance.now();
    const server = this.#server !== null && now - this.#server.at < STALE;
    const tokens = server ? this.#server.tokens : requestLog.totalTokens;
    const at = server ? this.#server.at : now;
    const seconds = (at - this.#previous.at) / 1000;
    if (server === this.#previous.server && seconds > 0 && tokens >= this.#previous.tokens) {
      this.#rates.push({ at: now, value: (tokens - this.#previous.tokens) / seconds });
    }
    if (seconds > 0) this.#previous = { at, tokens, server };
    this.#rates = this.#rates.filter((sample) => sample.at > now - WINDOW);
    this.#rate.scope.textContent = server ? "whole server" : "this page";
    if (document.visibilityState !== "visible") return;
    this.#drawRate();
    this.#drawFirst();
  }

  #drawRate() {
    const samples = smooth(this.#rates);
    const { context, width, height } = clearCanvas(this.#rate.canvas);
    const latest = samples.at(-1)?.value ?? 0;
    this.#rate.now.textContent = rate(latest);
    const most = niceCeiling(Math.max(...samples.map((sample) => sample.value), 10));
    frame(context, width, height, `${most}`);
    if (samples.length < 2) return;
    const now = performance.now();
    const x = (sample) => width - ((now - sample.at) / WINDOW) * width;
    const y = (sample) => height - 1 - (sample.value / most) * (height - TOP - 1);
    context.beginPath();
    samples.forEach((sample, i) => context[i ? "lineTo" : "moveTo"](x(sample), y(sample)));
    context.strokeStyle = colour("lapis");
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(samples.at(-1)), height);
    context.lineTo(x(samples[0]), height);
    context.globalAlpha = 0.12;
    context.fillStyle = colour("lapis");
    context.fill();
    context.globalAlpha = 1;
  }

  #drawFirst() {
    const now = performance.now();
    const points = requestLog.records
      .filter((record) => record.firstTokenAt !== null && record.firstTokenAt > now - WINDOW)
      .map((record) => ({ at: record.firstTokenAt, value: record.firstTokenAt - record.startedAt }));
    const { context, width, height } = clearCanvas(this.#first.canvas);
    this.#first.now.textContent = points.length ? duration(points[0].value) : "–";
    const most = niceCeiling(Math.max(...points.map((point) => point.value), 100));
    frame(context, width, height, duration(most));
    context.fillStyle = colour("lapis");
    for (const point of points) {
      const x = Math.max(4, width - 4 - ((now - point.at) / WINDOW) * (width - 8));
      const y = height - 4 - (point.value / most) * (height - TOP - 6);
      context.beginPath();
      context.arc(x, y, 3.5, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

/** @param {string} title */
function figure(title) {
  const canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { class: "plot", attributes: { "aria-hidden": "true" } }));
  const now = el("b", { text: "–" });
  const scope = el("span", { class: "scope", text: "this page" });
  const caption = el("figcaption", {}, el("span", { class: "plot-title", text: title }), now, scope);
  return { element: el("figure", {}, caption, canvas), canvas, now, scope };
}

/** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height @param {string} most */
function frame(context, width, height, most) {
  context.strokeStyle = colour("edge");
  context.lineWidth = 1;
  context.beginPath();
  for (const y of [TOP + 0.5, (height + TOP) / 2 + 0.5, height - 0.5]) {
    context.moveTo(0, Math.round(y) - 0.5);
    context.lineTo(width, Math.round(y) - 0.5);
  }
  context.stroke();
  setFont(context, 10);
  context.textBaseline = "bottom";
  context.textAlign = "right";
  context.fillText(most, width, TOP - 1);
  context.textAlign = "left";
}

/** Smooths samples by the mean of three neighbours, since tokens arrive in batches. @param {{at: number, value: number}[]} samples */
function smooth(samples) {
  return samples.map((sample, i) => {
    const near = samples.slice(Math.max(0, i - 2), i + 1);
    return { at: sample.at, value: near.reduce((sum, each) => sum + each.value, 0) / near.length };
  });
}

/** The next of 1, 2, 5 times a power of ten. @param {number} value */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((ceiling) => ceiling >= value) ?? 10 * power;
}
