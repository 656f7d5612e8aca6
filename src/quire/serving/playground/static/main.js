// Puts the page together.

import { takeKeyFromAddress } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Engine } from "./engine.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";

takeKeyFromAddress();
const status = new Status();
new Chat(new Settings(byId("settings")), status);
new Engine(byId("engine"), status);

/** On narrow screens one panel shows at a time. */
const buttons = [...document.querySelectorAll(".views button")];
for (const button of buttons) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
  });
}
