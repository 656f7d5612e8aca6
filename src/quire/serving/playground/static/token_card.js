// The card beside a token: how likely it was, and what else might have stood there. By pointer, touch or arrow keys.

import { byId, el, percent, visible } from "./dom.js";
import { tokenOf } from "./painter.js";

const card = byId("token-card");
/** @type {Element | null} */
let current = null;

/** @param {Element} span */
function show(span) {
  const token = tokenOf(span);
  if (!token) return;
  hide();
  current = span;
  span.classList.add("current");
  const rows = token.alternatives.map((other) => row(other, other.text === token.text));
  card.replaceChildren(
    el("p", { class: "token-line" }, el("b", { text: visible(token.text) }), el("span", { text: percent(token.probability) })),
    el("ol", { class: "alternatives" }, ...rows),
  );
  card.hidden = false;
  place(span.getClientRects()[0] ?? span.getBoundingClientRect());
}

/** @param {import("./tokens.js").Alternative} other @param {boolean} chosen */
function row(other, chosen) {
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

/** @param {DOMRect} around */
function place(around) {
  const { width, height } = card.getBoundingClientRect();
  const left = Math.min(Math.max(8, around.left), document.documentElement.clientWidth - width - 8);
  const below = around.bottom + 6;
  const top = below + height > innerHeight - 8 ? around.top - height - 6 : below;
  card.style.left = `${left}px`;
  card.style.top = `${Math.max(8, top)}px`;
}

function hide() {
  current?.classList.remove("current");
  current = null;
  card.hidden = true;
}

/** @param {HTMLElement} body @param {string} key @returns {Element | null} where an arrow key leads */
function neighbour(body, key) {
  const spans = [...body.querySelectorAll(".token")];
  const at = current ? spans.indexOf(current) : -1;
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[key];
  if (next === undefined) return null;
  return spans[Math.min(Math.max(next, 0), spans.length - 1)] ?? null;
}

/** Makes every token inside the element answer to pointer and keyboard. @param {HTMLElement} thread */
export function watchTokens(thread) {
  const spanOf = (event) => event.target.closest?.(".token") ?? null;
  for (const kind of ["pointerover", "click"]) {
    thread.addEventListener(kind, (event) => {
      const span = spanOf(event);
      if (span) show(span);
      else if (!card.contains(event.target)) hide();
    });
  }
  thread.addEventListener("pointerleave", hide);
  thread.addEventListener("scroll", hide, { passive: true });
  thread.addEventListener("focusout", hide);
  thread.addEventListener("keydown", (event) => {
    const body = event.target.closest(".answer-body");
    if (event.key === "Escape") hide();
    if (!body || event.target !== body) return;
    const span = neighbour(body, event.key);
    if (!span) return;
    event.preventDefault();
    span.scrollIntoView({ block: "nearest" });
    show(span);
  });
}
