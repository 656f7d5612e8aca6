// Which panels are visible. On a wide screen the list of chats and one panel beside the chat open and close; on a phone one
// view shows at a time.

import { local } from "./storage.js";

const WIDE = matchMedia("(min-width: 1200px)");
const PHONE = matchMedia("(max-width: 799px)");

export class Layout {
  #toggles = [.../** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-toggle]"))];
  #views = [.../** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".views button"))];

  /** @param {boolean} showEngine whether the engine panel opens at the start */
  constructor(showEngine) {
    const kept = local.getJson("panels") ?? {};
    const panel = kept.panel === "settings" || kept.panel === "engine" ? kept.panel : "none";
    document.body.dataset.sidebar = kept.sidebar === false || !WIDE.matches ? "closed" : "open";
    document.body.dataset.panel = showEngine && panel === "none" ? "engine" : panel;
    for (const toggle of this.#toggles) toggle.addEventListener("click", () => this.#toggle(toggle.dataset.toggle));
    for (const view of this.#views) view.addEventListener("click", () => this.showView(view.dataset.view));
    if (showEngine) this.#keep();
    else this.#mark();
  }

  /** @param {string} name */
  #toggle(name) {
    const { dataset } = document.body;
    if (name === "sidebar") dataset.sidebar = dataset.sidebar === "open" ? "closed" : "open";
    else dataset.panel = dataset.panel === name ? "none" : name;
    if (!WIDE.matches && dataset.sidebar === "open" && dataset.panel !== "none") {
      if (name === "sidebar") dataset.panel = "none"; // there is no room for both beside the chat
      else dataset.sidebar = "closed";
    }
    this.#keep();
  }

  /** Shows the settings panel, on any screen size. */
  showSettings() {
    document.body.dataset.panel = "settings";
    if (!WIDE.matches) document.body.dataset.sidebar = "closed";
    this.showView("settings");
    this.#keep();
  }

  /** @param {string} view of a phone */
  showView(view) {
    document.body.dataset.view = view;
    this.#mark();
  }

  /** Called when a conversation was opened: on a phone the chat replaces the list. */
  showChat() {
    if (PHONE.matches) this.showView("chat");
  }

  #keep() {
    const { sidebar, panel } = document.body.dataset;
    local.set("panels", JSON.stringify({ sidebar: sidebar === "open", panel }));
    this.#mark();
  }

  #mark() {
    const { sidebar, panel, view } = document.body.dataset;
    for (const toggle of this.#toggles) {
      const isOpen = toggle.dataset.toggle === "sidebar" ? sidebar === "open" : panel === toggle.dataset.toggle;
      toggle.setAttribute("aria-expanded", String(isOpen));
    }
    for (const button of this.#views) button.setAttribute("aria-pressed", String(button.dataset.view === view));
  }
}
