// Builds the page.

import { takeKeyFromAddress } from "./api.js";
import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { byId, el } from "./dom.js";
import { Engine } from "./engine.js";
import { icon } from "./icons.js";
import { Layout } from "./layout.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Status } from "./status.js";

const layout = new Layout(takeKeyFromAddress());
const status = new Status();
const conversations = new Conversations();
const settings = new Settings(byId("settings"), [copyButtons()]);
const chat = new Chat(settings, status, conversations);
new Sidebar(byId("sidebar"), chat, conversations, () => layout.showChat());
new Engine(byId("engine"), status);
status.addEventListener("model", () => settings.showDefaults(status.defaults));
settings.addEventListener("invalid", () => layout.showSettings());

for (const place of document.querySelectorAll("[data-icon]")) {
  place.prepend(icon(/** @type {any} */ (place).dataset.icon));
}

function copyButtons() {
  const buttons = /** @type {const} */ (["curl", "Python"]).map((kind) => {
    const button = el("button", { text: `Copy as ${kind}`, attributes: { type: "button" } });
    button.addEventListener("click", () => chat.copyRequest(kind));
    return button;
  });
  return el("div", { class: "copy-request" }, el("h3", { text: "This request in code" }), el("div", { class: "copy-buttons" }, ...buttons));
}
