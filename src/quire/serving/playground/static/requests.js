// Two lists: the requests live in the engine, each with a way to end it, and those this page made, with their ledgers.

import { ApiError, call } from "./api.js";
import { duration, el, plural, rate, shortName } from "./dom.js";
import { requestLog, speed } from "./request_log.js";
import { ledgerView } from "./ledger.js";
import { explainError } from "./errors.js";

const MOST_SHOWN = 12;
const OUTCOMES = { running: "running", finished: "finished", stopped: "stopped", failed: "no answer" };

/** Live requests, by the block stream; needs the admin key. */
export class LiveRequestsView {
  #list = el("ul", { class: "live-requests" });
  #rest = el("p", { class: "help", text: "None." });
  #words = el("p", { class: "help", attributes: { role: "status" } });
  /** @type {Map<string, {row: HTMLElement, state: HTMLElement, size: HTMLElement}>} */
  #rows = new Map();

  constructor() {
    this.element = el("div", {}, this.#list, this.#rest, this.#words);
  }

  /** @param {import("./blocks.js").BlockMap} map */
  show(map) {
    const shown = map.requests.slice(0, MOST_SHOWN);
    const ids = new Set(shown.map((request) => request.request_id));
    for (const [id, { row }] of this.#rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.#rows.delete(id);
    }
    for (const request of shown) {
      const parts = this.#rows.get(request.request_id) ?? this.#row(request.request_id);
      parts.state.textContent = request.state;
      parts.size.textContent = `${plural(request.num_tokens, "token")}, ${plural(request.block_ids.length, "block")}`;
    }
    const more = map.requests.length - shown.length + (map.stats?.edge?.waiting ?? 0);
    this.#rest.textContent = more > 0 ? `${more} more, not shown or still before the engine.` : shown.length === 0 ? "None." : "";
  }

  /** @param {string} id */
  #row(id) {
    const state = el("span", { class: "state" });
    const size = el("span", { class: "size" });
    const abort = el("button", { class: "link", text: "End", attributes: { type: "button", "aria-label": `End request ${shortName(id)}` } });
    abort.addEventListener("click", () => this.#abort(id));
    const row = el("li", {}, el("code", { text: shortName(id), attributes: { title: id } }), state, size, abort);
    this.#list.append(row);
    const parts = { row, state, size };
    this.#rows.set(id, parts);
    return parts;
  }

  /** @param {string} id */
  async #abort(id) {
    try {
      await call("admin/abort", { admin: true, body: { request_id: id } });
      this.#words.textContent = `${shortName(id)} was ended.`;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#words.textContent = `${shortName(id)} was not ended. ${explainError(error).advice}`;
    }
  }
}

/** The requests of this page, newest first; each opens to its ledger. */
export class RecentRequestsView {
  #empty = el("p", { class: "help", text: "None yet. Ask something, or run the demo load." });
  #list = el("div", { class: "recent-requests" });
  /** @type {Map<import("./request_log.js").RequestRecord, {details: HTMLElement, facts: HTMLElement, filled: boolean}>} */
  #items = new Map();

  constructor() {
    this.element = el("div", {}, this.#empty, this.#list);
    requestLog.addEventListener("change", () => this.#update());
  }

  #update() {
    const shown = requestLog.records.slice(0, MOST_SHOWN);
    this.#empty.hidden = shown.length > 0;
    for (const [record, { details }] of this.#items) {
      if (shown.includes(record)) continue;
      details.remove();
      this.#items.delete(record);
    }
    for (const record of [...shown].reverse()) this.#show(record);
  }

  /** @param {import("./request_log.js").RequestRecord} record */
  #show(record) {
    let item = this.#items.get(record);
    if (!item) {
      const facts = el("span", { class: "facts" });
      const summary = el("summary", {}, el("code", { text: record.id }), facts);
      const details = el("details", {}, summary);
      details.append(el("p", { class: "help", text: record.label }));
      item = { details, facts, filled: false };
      this.#items.set(record, item);
      this.#list.prepend(details);
    }
    item.facts.textContent = facts(record);
    if (!item.filled && record.ledger.length > 0) {
      item.details.append(ledgerView(record.ledger));
      item.filled = true;
    }
  }
}

/** @param {import("./request_log.js").RequestRecord} record */
function facts(record) {
  const perSecond = speed(record);
  const first = record.firstTokenAt === null ? [] : [`first ${duration(record.firstTokenAt - record.startedAt)}`];
  const pace = perSecond === null ? [] : [`${rate(perSecond)} tokens/s`];
  return [OUTCOMES[record.outcome], ...first, ...pace].join(" · ");
}
