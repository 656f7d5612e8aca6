// All conversations of this browser: kept in local storage, one entry each, so that several tabs do not overwrite each other.

import { Conversation, readConversation } from "./conversation.js";
import { local } from "./storage.js";

const PREFIX = "conversation.";
const MOST_CHARACTERS = 1_000_000; // of one stored conversation; above it, ledgers are dropped first, then the oldest branches

/** Sends "change" when the list changes, and "full" when a conversation could not be stored. */
export class Conversations extends EventTarget {
  /** @type {Map<string, Conversation>} */
  #all = new Map();

  constructor() {
    super();
    for (const name of local.names()) if (name.startsWith(PREFIX)) this.#read(name);
    addEventListener("storage", (event) => {
      const name = local.nameOf(event.key ?? "");
      if (!name?.startsWith(PREFIX)) return;
      this.#all.delete(name.slice(PREFIX.length));
      this.#read(name);
      this.#changed();
    });
  }

  /** @param {string} name */
  #read(name) {
    const found = readConversation(local.getJson(name));
    if (found && PREFIX + found.id === name) this.#all.set(found.id, found);
  }

  /** Newest first. */
  list() {
    return [...this.#all.values()].sort((a, b) => b.updatedAt - a.updatedAt);
  }

  /** @param {string | null} id */
  get(id) {
    return id === null ? undefined : this.#all.get(id);
  }

  /** Stores a conversation that has turns. @param {Conversation} conversation @param {boolean} [touch] whether it counts as used now */
  save(conversation, touch = true) {
    if (conversation.turns.length === 0) return;
    if (touch) conversation.updatedAt = Date.now();
    this.#all.set(conversation.id, conversation);
    if (!local.set(PREFIX + conversation.id, fitting(conversation))) this.dispatchEvent(new Event("full"));
    this.#changed();
  }

  /** @param {Conversation} conversation */
  remove(conversation) {
    this.#all.delete(conversation.id);
    local.set(PREFIX + conversation.id, null);
    this.#changed();
  }

  /** @param {Conversation} conversation @param {string} title */
  rename(conversation, title) {
    conversation.givenTitle = title.trim().slice(0, 200);
    this.save(conversation, false);
  }

  /** Adds the conversations of an export. Returns how many; raises SyntaxError for a file that holds none. @param {string} text */
  import(text) {
    const given = JSON.parse(text);
    const found = (Array.isArray(given?.conversations) ? given.conversations : [given]).map(readConversation).filter((each) => each !== null);
    if (found.length === 0) throw new SyntaxError("The file holds no conversation of this playground.");
    for (const conversation of found) this.save(conversation, false);
    return found.length;
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** The conversation as JSON that is short enough to store. @param {Conversation} conversation */
function fitting(conversation) {
  let text = JSON.stringify(conversation);
  if (text.length <= MOST_CHARACTERS) return text;
  for (const turn of conversation.turns) if (turn.role === "assistant") turn.ledger = [];
  text = JSON.stringify(conversation);
  while (text.length > MOST_CHARACTERS) {
    const shown = new Set(conversation.path());
    const hidden = conversation.turns.findIndex((turn) => !shown.has(turn));
    if (hidden < 0) break; // a single branch is too large: try to store it anyway
    conversation.turns.splice(hidden, 1);
    text = JSON.stringify(conversation);
  }
  return text;
}
