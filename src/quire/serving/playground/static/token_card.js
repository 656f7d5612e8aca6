// The card beside a token: its probability and the alternatives. Opens by pointer, touch or arrow keys;
// a click or Enter keeps it open, to branch from there.

import { byId, el, percent, visible } from "./dom.js";
import { tokenOf } from "./markdown_view.js";

/** @typedef {import("./tokens.js").PlacedToken} PlacedToken */

/** @typedef {(body: Element, token: PlacedToken, instead: string | null) => void} Branch `instead` is the text that replaces the token; null: sample again */

export class TokenCard {
  #card = byId("token-card");
  /** @type {Element | null} */
  #current = null;
  #isPinned = false;

  /** Opens the card for every token inside the element, by pointer or keyboard. @param {HTMLElement} thread @param {Branch} branch */
  constructor(thread, branch) {
    this.branch = branch;
    thread.addEventListener("pointerover", (event) => this.#hover(event));
    thread.addEventListener("click", (event) => this.#click(event));
    thread.addEventListener("pointerleave", () => this.#isPinned || this.#hide());
    thread.addEventListener("scroll", () => this.#hide(), { passive: true });
    thread.addEventListener("focusout", (event) => {
      if (!this.#card.contains(/** @type {Node} */ (event.relatedTarget))) this.#hide();
    });
    thread.addEventListener("keydown", (event) => this.#key(event));
    this.#card.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      const body = /** @type {HTMLElement} */ (this.#current?.closest(".answer-body"));
      this.#hide();
      body?.focus();
    });
  }

  /** @param {Event} event */
  #hover(event) {
    if (this.#isPinned) return;
    const span = spanOf(event);
    if (span) this.#show(span);
    else this.#hide();
  }

  /** @param {Event} event */
  #click(event) {
    const span = spanOf(event);
    if (!span) return this.#hide();
    this.#show(span);
    return this.#pin();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const body = /** @type {HTMLElement} */ (event.target).closest(".answer-body");
    if (event.key === "Escape") this.#hide();
    if (!body || event.target !== body) return;
    if (event.key === "Enter" && this.#current) {
      event.preventDefault();
      this.#pin();
      this.#card.querySelector("button").focus();
      return;
    }
    const span = this.#neighbour(body, event.key);
    if (!span) return;
    event.preventDefault();
    span.scrollIntoView({ block: "nearest" });
    this.#show(span);
  }

  /** @param {Element} body @param {string} key @returns {Element | null} where an arrow key leads */
  #neighbour(body, key) {
    const spans = [...body.querySelectorAll(".token")];
    const at = this.#current ? spans.indexOf(this.#current) : -1;
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[key];
    if (next === undefined) return null;
    return spans[Math.min(Math.max(next, 0), spans.length - 1)] ?? null;
  }

  /** @param {Element} span */
  #show(span) {
    const placed = tokenOf(span);
    if (!placed) return;
    this.#hide();
    this.#current = span;
    span.classList.add("current");
    const { token } = placed;
    const rows = token.alternatives.map((other) => this.#row(other, other.text === token.text));
    const hint = el("p", { class: "help token-hint", text: "Select the token to branch from it." });
    this.#card.replaceChildren(
      el("p", { class: "token-line" }, el("b", { text: visible(token.text) }), el("span", { text: percent(token.probability) })),
      el("ol", { class: "alternatives" }, ...rows),
      hint,
    );
    this.#card.hidden = false;
    this.#place();
  }

  /** Keeps the card open and offers to branch. */
  #pin() {
    const placed = tokenOf(this.#current);
    const body = this.#current.closest(".answer-body");
    this.#isPinned = true;
    this.#card.classList.add("pinned");
    const again = el("button", { text: "Branch here", attributes: { type: "button" } });
    again.addEventListener("click", () => this.#branch(body, placed, null));
    this.#card.querySelector(".token-hint").replaceWith(again);
    this.#card.querySelectorAll("li").forEach((row, i) => {
      const { text } = placed.token.alternatives[i];
      const use = el("button", { class: "text", text: visible(text), attributes: { type: "button", "aria-label": `Branch with ${visible(text)}` } });
      use.addEventListener("click", () => this.#branch(body, placed, text));
      row.querySelector(".text").replaceWith(use);
    });
    this.#place();
  }

  /** @param {Element} body @param {PlacedToken} placed @param {string | null} instead */
  #branch(body, placed, instead) {
    this.#hide();
    this.branch(body, placed, instead);
  }

  /** @param {import("./tokens.js").Alternative} other @param {boolean} chosen */
  #row(other, chosen) {
    const bar = el("i", { attributes: { "aria-hidden": "true" } });
    bar.style.width = `${Math.max(1, other.probability * 100)}%`;
    return el(
      "li",
      { class: chosen ? "chosen" : "" },
      el("span", { class: "text", text: visible(other.text) }),
      el("span", { class: "bar" }, bar),
      el("span", { class: "share", text: percent(other.probability) }),
    );
  }

  #place() {
    const around = this.#current.getClientRects()[0] ?? this.#current.getBoundingClientRect();
    const { width, height } = this.#card.getBoundingClientRect();
    const left = Math.min(Math.max(8, around.left), document.documentElement.clientWidth - width - 8);
    const below = around.bottom + 6;
    const top = below + height > innerHeight - 8 ? around.top - height - 6 : below;
    this.#card.style.left = `${left}px`;
    this.#card.style.top = `${Math.max(8, top)}px`;
  }

  #hide() {
    this.#current?.classList.remove("current");
    this.#current = null;
    this.#isPinned = false;
    this.#card.classList.remove("pinned");
    this.#card.hidden = true;
  }
}

/** @param {Event} event @returns {Element | null} */
function spanOf(event) {
  return /** @type {HTMLElement} */ (event.target).closest?.(".token") ?? null;
}
