// Menus and toasts, which open over the page.

import { byId, el } from "./dom.js";

/** @typedef {{label: string, action: () => void}} MenuItem */

/** Opens a menu at its button. Arrow keys move in it, Escape closes it, and focus returns to the button. @param {HTMLElement} button @param {MenuItem[]} items */
export function openMenu(button, items) {
  const menu = el("div", { class: "menu", attributes: { popover: "", role: "menu", "aria-label": button.getAttribute("aria-label") ?? "Menu" } });
  const close = () => menu.hidePopover();
  const buttons = items.map(({ label, action }) => {
    const item = el("button", { text: label, attributes: { type: "button", role: "menuitem", tabindex: "-1" } });
    item.addEventListener("click", () => {
      close();
      action();
    });
    return item;
  });
  menu.append(...buttons);
  menu.addEventListener("keydown", (event) => moveIn(buttons, event, close));
  menu.addEventListener("toggle", (event) => {
    if (/** @type {ToggleEvent} */ (event).newState !== "closed") return;
    button.setAttribute("aria-expanded", "false");
    if (menu.contains(document.activeElement) || document.activeElement === document.body) button.focus();
    menu.remove();
  });
  document.querySelector("main").append(menu);
  menu.showPopover();
  button.setAttribute("aria-expanded", "true");
  place(menu, button.getBoundingClientRect());
  buttons[0].focus();
}

/** A button that opens a menu. @param {HTMLElement} button @param {() => MenuItem[]} items made when it opens */
export function menuButton(button, items) {
  button.setAttribute("aria-haspopup", "menu");
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => openMenu(button, items()));
  return button;
}

/** @param {HTMLElement[]} buttons @param {KeyboardEvent} event @param {() => void} close */
function moveIn(buttons, event, close) {
  const at = buttons.indexOf(/** @type {HTMLElement} */ (document.activeElement));
  const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (event.key === "Tab") close();
  if (next === undefined) return;
  event.preventDefault();
  buttons[(next + buttons.length) % buttons.length].focus();
}

/** @param {HTMLElement} menu @param {DOMRect} around */
function place(menu, around) {
  const { width, height } = menu.getBoundingClientRect();
  const below = around.bottom + 4;
  const top = below + height > innerHeight - 8 ? around.top - height - 4 : below;
  menu.style.left = `${Math.max(8, Math.min(around.right - width, document.documentElement.clientWidth - width - 8))}px`;
  menu.style.top = `${Math.max(8, top)}px`;
}

let hideMessage = 0;

/** Shows a message for a few seconds, with an optional button. @param {string} text @param {{label: string, action: () => void}} [button] */
export function showMessage(text, button) {
  const message = byId("message");
  const hide = () => message.replaceChildren();
  message.replaceChildren(el("span", { text }));
  if (button) {
    const element = el("button", { class: "link", text: button.label, attributes: { type: "button" } });
    element.addEventListener("click", () => {
      hide();
      button.action();
    });
    message.append(element);
  }
  clearTimeout(hideMessage);
  hideMessage = setTimeout(hide, button ? 10_000 : 4000);
}
