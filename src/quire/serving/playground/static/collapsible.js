// Collapsible sections of a panel. Their state is stored.

import { el } from "./dom.js";
import { local } from "./storage.js";

/**
 * A part under a heading. Whether it is open is kept under `name` in local storage.
 * @param {{ name: string, title: string, heading: string, style: string, open: boolean }} options @param {HTMLElement[]} content
 */
export function collapsible({ name, title, heading, style, open }, ...content) {
  const summary = el("summary", {}, el(heading, { text: title }));
  const details = /** @type {HTMLDetailsElement} */ (el("details", { class: style }, summary, ...content));
  const keep = (/** @type {boolean} */ isOpen) => local.set(name, JSON.stringify({ ...local.getJson(name), [title]: isOpen }));
  details.open = local.getJson(name)?.[title] ?? open;
  // A click is stored at once, since the toggle event comes later and a reload may be faster. Find-in-page toggles too.
  summary.addEventListener("click", () => keep(!details.open));
  details.addEventListener("toggle", () => keep(details.open));
  return details;
}
