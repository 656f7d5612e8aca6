// The controls below every turn: buttons, the switch between versions, and the editor.

import { el } from "./dom.js";
import { icon } from "./icons.js";

/** A button with an icon; its name is its tooltip too. @param {Parameters<typeof icon>[0]} picture @param {string} label @param {(button: HTMLElement) => void} [action] */
export function iconButton(picture, label, action) {
  const button = el("button", { class: "icon-button", attributes: { type: "button", "aria-label": label, title: label } }, icon(picture));
  if (action) button.addEventListener("click", () => action(button));
  return button;
}

/** Shows a word in a button for one second after a click. @param {HTMLElement} button @param {string} word */
export function flash(button, word) {
  const before = [...button.childNodes];
  button.replaceChildren(el("span", { class: "flash", text: word }));
  setTimeout(() => button.replaceChildren(...before), 1500);
}

/**
 * "2 / 3" with an arrow to each side; nothing where there is one version.
 * @param {number} index @param {number} count @param {(index: number) => void} choose
 */
export function versionSwitch(index, count, choose) {
  if (count < 2) return [];
  const previous = iconButton("previous", "Previous version", () => choose(index - 1));
  const next = iconButton("following", "Next version", () => choose(index + 1));
  previous.toggleAttribute("disabled", index === 0);
  next.toggleAttribute("disabled", index === count - 1);
  const label = el("span", { class: "version", text: `${index + 1} / ${count}`, attributes: { "aria-label": `Version ${index + 1} of ${count}`, role: "group" } });
  return [el("span", { class: "versions" }, previous, label, next)];
}

/**
 * Replaces an element by an editor until the text is sent or the edit is cancelled.
 * @param {HTMLElement} element @param {{text: string, label: string, action: string, done: (text: string) => void}} options
 */
export function editInPlace(element, { text, label, action, done }) {
  const input = /** @type {HTMLTextAreaElement} */ (el("textarea", { attributes: { "aria-label": label, rows: String(Math.min(12, text.split("\n").length + 1)) } }));
  input.value = text;
  const cancel = el("button", { text: "Cancel", attributes: { type: "button" } });
  const form = el("form", { class: "editor" }, input, el("div", { class: "editor-buttons" }, cancel, el("button", { class: "primary", text: action, attributes: { type: "submit" } })));
  const close = () => form.replaceWith(element);
  cancel.addEventListener("click", close);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim() === "") return;
    close();
    done(input.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
      element.querySelector("button")?.focus();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  element.replaceWith(form);
  input.focus();
  input.setSelectionRange(text.length, text.length);
}

/**
 * A question with its buttons.
 * @param {import("./conversation.js").UserTurn} turn
 * @param {{versions: HTMLElement[], edit: (text: string) => void}} options
 */
export function questionView(turn, { versions, edit }) {
  const element = el("article", { class: "turn question", attributes: { "aria-label": "You" } });
  const startEdit = () => editInPlace(element, { text: turn.text, label: "Edit the message", action: "Send", done: edit });
  element.append(
    el("div", { class: "bubble", text: turn.text }),
    el("footer", { class: "turn-foot" }, ...versions, iconButton("edit", "Edit message", startEdit)),
  );
  return element;
}
