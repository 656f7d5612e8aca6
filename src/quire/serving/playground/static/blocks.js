// The block map: one cell per block of the paged KV cache, coloured by the state of the block.

import { colour, clearCanvas, redrawOnChange } from "./canvas.js";
import { el, plural, shortName } from "./dom.js";

/**
 * @typedef {{request_id: string, state: string, num_tokens: number, block_ids: number[]}} RequestBlocks
 * @typedef {object} BlockMap
 * @property {number} step
 * @property {number} block_size
 * @property {number} total
 * @property {number[]} holders
 * @property {RequestBlocks[]} requests
 * @property {number[]} [cached] blocks nobody holds whose tokens are kept for reuse
 * @property {number} [swapped] blocks that lie in host memory
 * @property {Record<string, any>} [stats] the engine's counters, and the edge's
 */

const STATES = ["free", "cached", "held", "shared", "swapped"]; // by priority: a cell of several blocks shows the last of their states
const HELP = {
  free: "held by nobody",
  cached: "held by nobody, kept for reuse",
  held: "held by one sequence",
  shared: "held by several sequences",
  swapped: "in host memory",
};
const SIZES = [14, 12, 10, 8, 6, 5, 4, 3]; // pixels of a cell, including the gap
const MOST_HEIGHT = 300;

export class BlockMapView {
  /** @type {BlockMap | null} */
  #map = null;
  /** @type {Uint8Array} states of device blocks, then of swapped ones */
  #states = new Uint8Array(0);
  /** @type {Map<number, RequestBlocks[]>} */
  #holders = new Map();
  #cursor = -1; // index of the cell under the pointer; -1: none
  #grid = { size: 0, columns: 1, perCell: 1, cells: 0 };
  #canvas = /** @type {HTMLCanvasElement} */ (
    el("canvas", {
      class: "block-map",
      attributes: { tabindex: "0", role: "application", "aria-label": "Block map. The arrow keys move from block to block.", "aria-describedby": "block-readout" },
    })
  );
  #legend = el("ul", { class: "legend" });
  #readout = el("p", { class: "readout", attributes: { id: "block-readout", "aria-live": "polite" } });

  constructor() {
    this.element = el("div", { class: "block-map-view" }, this.#canvas, this.#legend, this.#readout);
    redrawOnChange(this.#canvas, () => this.#layOut());
    this.#canvas.addEventListener("pointermove", (event) => this.#point(this.#cellAt(event.offsetX, event.offsetY)));
    this.#canvas.addEventListener("pointerdown", (event) => this.#point(this.#cellAt(event.offsetX, event.offsetY)));
    this.#canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.#point(-1); // keep showing the cell that a finger has touched
    });
    this.#canvas.addEventListener("blur", () => this.#point(-1));
    this.#canvas.addEventListener("focus", () => {
      if (this.#cursor < 0 && this.#canvas.matches(":focus-visible")) this.#point(0);
    });
    this.#canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {BlockMap} map */
  show(map) {
    const sameSize = this.#map?.total === map.total && (this.#map?.swapped ?? 0) === (map.swapped ?? 0);
    this.#map = map;
    this.#read(map);
    if (sameSize) this.#draw();
    else this.#layOut();
    this.#tell();
  }

  /** @param {BlockMap} map */
  #read(map) {
    const swapped = map.swapped ?? 0;
    this.#states = new Uint8Array(map.total + swapped);
    for (const block of map.cached ?? []) this.#states[block] = 1;
    map.holders.forEach((count, block) => {
      if (count > 0) this.#states[block] = count > 1 ? 3 : 2;
    });
    this.#states.fill(4, map.total);
    this.#holders.clear();
    for (const request of map.requests) {
      for (const block of request.block_ids) {
        const holders = this.#holders.get(block);
        if (holders) holders.push(request);
        else this.#holders.set(block, [request]);
      }
    }
    this.#count();
  }

  #count() {
    const counts = [0, 0, 0, 0, 0];
    for (const state of this.#states) counts[state] += 1;
    const rows = STATES.map((name, i) =>
      el(
        "li",
        { attributes: { title: HELP[name] } },
        el("i", { class: `swatch block ${name}`, attributes: { "aria-hidden": "true" } }),
        el("span", { text: name }),
        el("b", { text: String(counts[i]) }),
      ),
    );
    this.#legend.replaceChildren(...rows);
  }

  /** Chooses the largest cells that fit. If there are more blocks than cells, a cell shows several blocks. */
  #layOut() {
    const width = this.#canvas.clientWidth;
    const blocks = this.#states.length;
    if (width === 0 || blocks === 0) return;
    const rowsAt = (size) => Math.ceil(blocks / Math.floor(width / size));
    const size = SIZES.find((each) => rowsAt(each) * each <= MOST_HEIGHT) ?? SIZES.at(-1);
    const columns = Math.floor(width / size);
    const perCell = Math.ceil(blocks / (columns * Math.floor(MOST_HEIGHT / size)));
    const cells = Math.ceil(blocks / perCell);
    this.#grid = { size, columns, perCell, cells };
    this.#canvas.style.height = `${Math.ceil(cells / columns) * size}px`;
    this.#draw();
  }

  #draw() {
    const { context } = clearCanvas(this.#canvas);
    const { cells } = this.#grid;
    const lit = this.#litBlocks();
    for (let cell = 0; cell < cells; cell++) this.#drawCell(context, cell, lit);
    if (this.#cursor >= 0) this.#outline(context, this.#cursor, "ink", 2);
  }

  /** The blocks of the requests that hold the block under the pointer. @returns {Set<number>} */
  #litBlocks() {
    const lit = new Set();
    for (const request of this.#requestsAt(this.#cursor)) for (const block of request.block_ids) lit.add(block);
    return lit;
  }

  /** @param {CanvasRenderingContext2D} context @param {number} cell @param {Set<number>} lit */
  #drawCell(context, cell, lit) {
    const { size, columns, perCell } = this.#grid;
    const gap = size > 5 ? 2 : 1;
    const x = (cell % columns) * size;
    const y = Math.floor(cell / columns) * size;
    const side = size - gap;
    const first = cell * perCell;
    let state = 0;
    let isLit = lit.size === 0;
    for (let block = first; block < Math.min(first + perCell, this.#states.length); block++) {
      state = Math.max(state, this.#states[block]);
      isLit ||= lit.has(block);
    }
    context.globalAlpha = isLit || state === 0 ? 1 : 0.35;
    context.fillStyle = colour(`block-${STATES[state]}`);
    context.fillRect(x, y, side, side);
    if (state === 3 && side >= 4) {
      context.fillStyle = colour("block-notch"); // a folded corner, visible without colours too
      context.beginPath();
      context.moveTo(x + side, y);
      context.lineTo(x + side, y + side * 0.6);
      context.lineTo(x + side * 0.4, y);
      context.fill();
    }
    if (state === 1 && side >= 4) {
      context.fillStyle = colour("leaf");
      context.fillRect(x + 1.5, y + 1.5, side - 3, side - 3);
    }
    context.globalAlpha = 1;
  }

  /** @param {CanvasRenderingContext2D} context @param {number} cell @param {string} name @param {number} width */
  #outline(context, cell, name, width) {
    const { size, columns } = this.#grid;
    context.strokeStyle = colour(name);
    context.lineWidth = width;
    context.strokeRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1.5, size - 1.5);
  }

  /** @param {number} x @param {number} y */
  #cellAt(x, y) {
    const { size, columns, cells } = this.#grid;
    if (size === 0 || x < 0 || y < 0 || x >= columns * size) return -1;
    const cell = Math.floor(y / size) * columns + Math.floor(x / size);
    return cell < cells ? cell : -1;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const { columns, cells } = this.#grid;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -cells, End: cells };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    this.#point(Math.min(Math.max(Math.max(this.#cursor, 0) + move, 0), cells - 1));
  }

  /** @param {number} cell */
  #point(cell) {
    if (cell === this.#cursor) return;
    this.#cursor = cell;
    if (this.#map) this.#draw();
    this.#tell();
  }

  /** @param {number} cell @returns {Set<RequestBlocks>} */
  #requestsAt(cell) {
    const { perCell } = this.#grid;
    const found = new Set();
    for (let block = cell * perCell; cell >= 0 && block < (cell + 1) * perCell; block++) {
      for (const request of this.#holders.get(block) ?? []) found.add(request);
    }
    return found;
  }

  #tell() {
    const text = this.#cursor < 0 ? this.#summary() : this.#description(this.#cursor);
    if (this.#readout.textContent !== text) this.#readout.textContent = text;
  }

  #summary() {
    if (!this.#map) return "";
    const { perCell } = this.#grid;
    const each = perCell > 1 ? ` One cell stands for ${perCell} blocks.` : "";
    return `${this.#map.total} blocks of ${plural(this.#map.block_size, "token")}. Point at one to see who holds it.${each}`;
  }

  /** @param {number} cell */
  #description(cell) {
    const { perCell } = this.#grid;
    const first = cell * perCell;
    const names = [...this.#requestsAt(cell)].map((request) => `${shortName(request.request_id)} (${plural(request.num_tokens, "token")})`);
    const who = names.length ? `: ${names.join(", ")}` : "";
    if (perCell > 1) return `Blocks ${first} to ${Math.min(first + perCell, this.#states.length) - 1}${who || ": free"}`;
    const count = this.#map.holders[first] ?? 0;
    const state = STATES[this.#states[first]];
    const words = state === "shared" ? `shared by ${count} sequences` : state;
    return `Block ${first}, ${words}${who}`;
  }
}
