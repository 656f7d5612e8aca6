// The list of conversations: open, search, rename, export, import and delete.

import { el } from "./dom.js";
import { download, fileName, toJson, toMarkdown } from "./export.js";
import { icon } from "./icons.js";
import { menuButton, showMessage } from "./menu.js";
import { iconButton } from "./turn_actions.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

const DAY = 86_400_000; // milliseconds
const MOST_SHOWN = 300;
const AROUND = 30; // characters shown before the text that a search found

export class Sidebar {
  #search = /** @type {HTMLInputElement} */ (el("input", { attributes: { type: "search", id: "search", placeholder: "Search chats", "aria-label": "Search chats" } }));
  #list = el("ul", { class: "conversations", attributes: { "aria-label": "Conversations" } });
  #empty = el("p", { class: "help", attributes: { role: "status" } });
  #file = /** @type {HTMLInputElement} */ (el("input", { attributes: { type: "file", accept: ".json,application/json", hidden: "", "aria-label": "File to import" } }));

  /**
   * @param {HTMLElement} panel
   * @param {import("./chat.js").Chat} chat
   * @param {import("./conversations.js").Conversations} conversations
   * @param {() => void} opened after a conversation was opened
   */
  constructor(panel, chat, conversations, opened) {
    this.chat = chat;
    this.conversations = conversations;
    this.opened = opened;
    const start = el("button", { class: "new-chat", attributes: { type: "button" } }, icon("plus"), "New chat");
    start.addEventListener("click", () => {
      chat.startNew();
      opened();
    });
    const head = el("div", { class: "sidebar-head" }, start, this.#search);
    panel.append(head, el("div", { class: "sidebar-list" }, this.#empty, this.#list), this.#foot());
    this.#search.addEventListener("input", () => this.#show());
    conversations.addEventListener("change", () => this.#show());
    conversations.addEventListener("full", () => showMessage("The browser's storage is full: this chat is not kept. Export or delete some."));
    chat.addEventListener("open", () => this.#show());
    this.#show();
  }

  #foot() {
    const exportAll = el("button", { class: "link", text: "Export all", attributes: { type: "button" } });
    exportAll.addEventListener("click", () => download("conversations.json", toJson(this.conversations.list()), "application/json"));
    const importFile = el("button", { class: "link", text: "Import", attributes: { type: "button" } });
    importFile.addEventListener("click", () => this.#file.click());
    this.#file.addEventListener("change", () => this.#import());
    return el("div", { class: "sidebar-foot" }, exportAll, importFile, this.#file);
  }

  async #import() {
    const [file] = this.#file.files;
    if (!file) return;
    try {
      const count = this.conversations.import(await file.text());
      showMessage(count === 1 ? "One chat was imported." : `${count} chats were imported.`);
    } catch (error) {
      showMessage(`${file.name} was not imported: ${error.message}`);
    }
    this.#file.value = "";
  }

  #show() {
    if (this.#list.querySelector("form")) return; // a name is being typed
    const query = this.#search.value.trim().toLowerCase();
    const all = this.conversations.list();
    const found = all.map((each) => ({ conversation: each, text: query ? each.find(query) : each.title })).filter(({ text }) => text !== null);
    const focused = this.#list.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.key : undefined;
    this.#list.replaceChildren(...found.slice(0, MOST_SHOWN).map(({ conversation, text }) => this.#item(conversation, query ? text : "", query)));
    const more = found.length - MOST_SHOWN;
    this.#empty.textContent = found.length === 0 ? (query ? "No chat holds this text." : "Your chats will be listed here.") : more > 0 ? `${more} older ones are found by search.` : "";
    if (focused) /** @type {HTMLElement} */ (this.#list.querySelector(`[data-key="${focused}"]`))?.focus();
  }

  /** @param {Conversation} conversation @param {string} text where the search found it; empty: no search @param {string} query */
  #item(conversation, text, query) {
    const open = el("button", { class: "conversation", attributes: { type: "button" } }, el("span", { class: "title", text: conversation.title }));
    const note = text && text !== conversation.title ? excerpt(text, query) : age(conversation.updatedAt);
    open.append(el("span", { class: "note", text: note }));
    open.dataset.key = `open-${conversation.id}`;
    if (conversation.id === this.chat.conversation.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      this.chat.open(conversation);
      this.opened();
    });
    const item = el("li", {}, open);
    const options = menuButton(iconButton("more", `Options for ${conversation.title}`), () => this.#options(conversation, item));
    options.dataset.key = `options-${conversation.id}`;
    item.append(options);
    return item;
  }

  /** @param {Conversation} conversation @param {HTMLElement} item */
  #options(conversation, item) {
    return [
      { label: "Rename", action: () => this.#rename(conversation, item) },
      { label: "Export as Markdown", action: () => download(fileName(conversation.title, "md"), toMarkdown(conversation), "text/markdown") },
      { label: "Export as JSON", action: () => download(fileName(conversation.title, "json"), toJson([conversation]), "application/json") },
      { label: "Delete", action: () => this.#delete(conversation) },
    ];
  }

  /** @param {Conversation} conversation @param {HTMLElement} item */
  #rename(conversation, item) {
    const input = /** @type {HTMLInputElement} */ (el("input", { attributes: { "aria-label": "New name", maxlength: "200" } }));
    input.value = conversation.title;
    const form = el("form", { class: "rename" }, input);
    let isOver = false;
    const finish = (keep) => {
      if (isOver) return;
      isOver = true;
      form.remove();
      if (keep && input.value.trim() !== "" && input.value !== conversation.title) this.conversations.rename(conversation, input.value);
      else this.#show();
      /** @type {HTMLElement} */ (this.#list.querySelector(`[data-key="open-${conversation.id}"]`))?.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      finish(true);
    });
    input.addEventListener("blur", () => finish(true));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      finish(false);
    });
    item.replaceChildren(form);
    input.focus();
    input.select();
  }

  /** @param {Conversation} conversation */
  #delete(conversation) {
    this.conversations.remove(conversation);
    this.chat.forget(conversation);
    const undo = () => {
      this.conversations.save(conversation, false);
      this.chat.open(conversation);
    };
    showMessage(`"${conversation.title}" was deleted.`, { label: "Undo", action: undo });
  }
}

/** @param {string} text @param {string} query */
function excerpt(text, query) {
  const at = Math.max(0, text.toLowerCase().indexOf(query) - AROUND);
  return `${at > 0 ? "…" : ""}${text.slice(at, at + 120).replace(/\s+/g, " ")}`;
}

/** @param {number} time */
function age(time) {
  const days = Math.floor((new Date().setHours(23, 59, 59, 999) - time) / DAY);
  if (days <= 0) return "Today";
  return days === 1 ? "Yesterday" : new Date(time).toLocaleDateString(undefined, { day: "numeric", month: "short", year: "numeric" });
}
