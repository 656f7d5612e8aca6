// Tool calls of an answer, with a form for their results, and results that were sent.

import { el } from "./dom.js";

/** @typedef {import("./conversation.js").ToolCall} ToolCall */

/** Adds the pieces of streamed calls to those known. @param {ToolCall[]} calls @param {any[]} deltas */
export function addCallPieces(calls, deltas) {
  for (const { index = 0, id, function: piece } of deltas) {
    calls[index] ??= { id: "", name: "", arguments: "" };
    calls[index].id ||= id ?? "";
    calls[index].name += piece?.name ?? "";
    calls[index].arguments += piece?.arguments ?? "";
  }
}

/** @param {string} text JSON, or what there is of it */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {ToolCall} call */
function callView(call) {
  const attributes = { tabindex: "0", role: "group", "aria-label": `Arguments of ${call.name}` };
  return el("div", { class: "tool-call" }, el("p", {}, "Calls ", el("code", { text: call.name })), el("pre", { text: pretty(call.arguments), attributes }));
}

/** @param {ToolCall[]} calls @returns {HTMLElement[]} */
export function callViews(calls) {
  return calls.map(callView);
}

/**
 * A form that asks for the result of each call.
 * @param {ToolCall[]} calls @param {(results: {id: string, name: string, content: string}[]) => void} send
 */
export function resultForm(calls, send) {
  const inputs = calls.map((call) => {
    const attributes = { rows: "2", spellcheck: "false", required: "", "aria-label": `Result of ${call.name}` };
    return /** @type {HTMLTextAreaElement} */ (el("textarea", { class: "code-input", attributes: { ...attributes, placeholder: `Result of ${call.name}` } }));
  });
  const form = el("form", { class: "tool-results" }, ...inputs, el("button", { text: calls.length === 1 ? "Send result" : "Send results", attributes: { type: "submit" } }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map((call, i) => ({ id: call.id, name: call.name, content: inputs[i].value })));
  });
  return form;
}

/** @param {import("./conversation.js").ToolTurn} turn */
export function toolTurnView(turn) {
  const results = turn.results.map(({ name, content }) => {
    const attributes = { tabindex: "0", role: "group", "aria-label": `Result of ${name}` };
    return el("div", { class: "tool-call" }, el("p", {}, "Result of ", el("code", { text: name })), el("pre", { text: pretty(content), attributes }));
  });
  return el("article", { class: "turn tool-turn", attributes: { "aria-label": "Tool results" } }, ...results);
}
