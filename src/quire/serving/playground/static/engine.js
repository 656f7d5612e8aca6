// The engine panel. Reads the stream of block maps while the page is visible and there is an admin key.

import { ApiError, call, keys } from "./api.js";
import { BlockMapView } from "./blocks.js";
import { collapsible } from "./collapsible.js";
import { el } from "./dom.js";
import { DemoLoadView } from "./demo_load.js";
import { PlotsView } from "./plots.js";
import { LiveRequestsView, RecentRequestsView } from "./requests.js";
import { events } from "./sse.js";
import { TimelinesView } from "./timelines.js";

const PAUSE = 1500; // milliseconds before a broken stream is opened again

export class Engine {
  #blocks = new BlockMapView();
  #timelines = new TimelinesView();
  #plots = new PlotsView();
  #live = new LiveRequestsView();
  #load;
  #gate = el("div", { class: "gate" });
  #watched = [
    section("Block map", this.#blocks.element),
    section("Requests over time", this.#timelines.element),
    section("Live requests", this.#live.element),
  ];
  /** @type {AbortController | null} */
  #watching = null;

  /** @param {HTMLElement} panel @param {import("./status.js").Status} status */
  constructor(panel, status) {
    const [blocks, timelines, live] = this.#watched;
    this.#load = new DemoLoadView(status);
    panel.append(
      this.#load.element,
      this.#gate,
      blocks,
      timelines,
      section("Speed", this.#plots.element),
      live,
      section("Requests of this page", new RecentRequestsView().element),
    );
    document.addEventListener("visibilitychange", () => this.#decide());
    this.#decide();
  }

  /** Reads the block maps while the page is visible and there is a key. */
  #decide() {
    const wanted = document.visibilityState === "visible" && keys.admin !== null;
    for (const each of this.#watched) each.hidden = keys.admin === null;
    if (keys.admin === null) this.#ask("The block map and the timelines need the admin key. Start the server with quire serve --admin and open the link it prints, or enter the key:");
    if (wanted && !this.#watching) {
      this.#watching = new AbortController();
      this.#watch(this.#watching.signal);
    } else if (!wanted) {
      this.#watching?.abort();
      this.#watching = null;
    }
  }

  /** @param {AbortSignal} signal */
  async #watch(signal) {
    while (!signal.aborted) {
      try {
        await this.#follow(signal);
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!(error instanceof ApiError)) throw error;
        if (this.#refused(error)) return;
        this.#say("No news from the engine. Trying again.");
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }

  /** @param {AbortSignal} signal */
  async #follow(signal) {
    const response = await call("admin/blocks", { admin: true, signal });
    for await (const data of events(response)) {
      const map = JSON.parse(data);
      if (map.engine === "down") {
        this.#say("The engine is down. The map comes back with it.");
        continue;
      }
      this.#gate.replaceChildren();
      for (const view of [this.#blocks, this.#timelines, this.#plots, this.#live, this.#load]) view.show(map);
    }
  }

  /** Asks for a key if the key was refused or the endpoint does not exist. Returns whether it did: then a retry is useless. @param {ApiError} error */
  #refused(error) {
    if (![401, 403, 404].includes(error.status)) return false;
    keys.admin = null;
    this.#watching = null;
    for (const each of this.#watched) each.hidden = true;
    this.#ask(
      error.status === 404
        ? "This server has no admin routes. Start it with quire serve --admin to see the block map."
        : "The server did not accept this admin key. Enter another one:",
    );
    return true;
  }

  /** @param {string} words */
  #say(words) {
    this.#gate.replaceChildren(el("p", { class: "help", text: words, attributes: { role: "status" } }));
  }

  /** @param {string} words */
  #ask(words) {
    const input = /** @type {HTMLInputElement} */ (
      el("input", { attributes: { type: "password", id: "admin-key", autocomplete: "off", required: "", spellcheck: "false" } })
    );
    const form = el(
      "form",
      { class: "key-form" },
      el("label", { text: words, attributes: { for: "admin-key" } }),
      el("span", { class: "key-row" }, input, el("button", { text: "Use key", attributes: { type: "submit" } })),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      keys.admin = input.value;
      this.#gate.replaceChildren();
      this.#decide();
    });
    this.#gate.replaceChildren(form);
  }
}

/** A part of the panel. @param {string} title @param {HTMLElement} content */
const section = (title, content) => collapsible({ name: "sections", title, heading: "h2", style: "section", open: true }, content);
