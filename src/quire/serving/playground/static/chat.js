// The chat: sends questions, shows answers as they are written, stops them, and keeps the conversation.

import { ApiError } from "./api.js";
import { complete, requestId } from "./completion.js";
import { Conversation } from "./conversation.js";
import { byId, duration, el, plural, rate } from "./dom.js";
import { speed } from "./request_log.js";
import { watchTokens } from "./token_card.js";
import { questionView, ReplyView } from "./turn.js";
import { problem } from "./errors.js";

const SUGGESTIONS = [
  "Explain paged attention as you would to a librarian.",
  "Write a Python function that counts the words in a file.",
  "Name three cities on rivers, one line each.",
];

export class Chat {
  #conversation = new Conversation();
  #thread = byId("thread");
  #prompt = /** @type {HTMLTextAreaElement} */ (byId("prompt"));
  #send = byId("send");
  /** @type {AbortController | null} the answer being written */
  #running = null;
  #followsEnd = true;

  /**
   * @param {import("./settings.js").Settings} settings
   * @param {import("./status.js").Status} status
   */
  constructor(settings, status) {
    this.settings = settings;
    this.status = status;
    watchTokens(this.#thread);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.stop();
      else this.#ask(this.#prompt.value);
    });
    this.#prompt.addEventListener("keydown", (event) => this.#key(event));
    this.#prompt.addEventListener("input", () => this.#grow());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("clear").addEventListener("click", () => this.#clear());
    this.#thread.addEventListener("scroll", () => {
      this.#followsEnd = this.#thread.scrollHeight - this.#thread.scrollTop - this.#thread.clientHeight < 48;
    });
    this.#thread.addEventListener("painted", () => this.#follow());
    this.#restore();
  }

  /** Ends the answer being written, if there is one; what has come so far stays. */
  stop() {
    this.#running?.abort();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.#running) this.#ask(this.#prompt.value);
  }

  #grow() {
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${Math.min(this.#prompt.scrollHeight + 2, 200)}px`;
  }

  #restore() {
    this.#thread.replaceChildren();
    for (const turn of this.#conversation.turns) {
      if (turn.role === "user") {
        this.#thread.append(questionView(turn.text));
      } else {
        const view = this.#reply(turn);
        this.#thread.append(view.element);
        view.restore();
      }
    }
    if (this.#conversation.turns.length === 0) this.#thread.append(this.#welcome());
    this.#followsEnd = true;
    this.#follow();
  }

  #welcome() {
    const buttons = SUGGESTIONS.map((text) =>
      el("button", { class: "suggestion", text, attributes: { type: "button" }, on: { click: () => this.#ask(text) } }),
    );
    return el(
      "div",
      { class: "welcome" },
      el("h2", { text: "Ask the model something." }),
      el("p", { text: "Every answer keeps the probability of each token and a ledger of where its time went." }),
      ...buttons,
    );
  }

  /** @param {string} text */
  async #ask(text) {
    if (text.trim() === "" || !this.settings.reportInvalid()) return;
    this.#thread.querySelector(".welcome")?.remove();
    this.#conversation.push({ role: "user", text });
    this.#thread.append(questionView(text));
    this.#prompt.value = "";
    this.#grow();
    await this.#answer();
  }

  /** @param {import("./conversation.js").Reply} reply */
  #reply(reply) {
    return new ReplyView(reply, { again: () => this.#again(reply), changed: () => this.#conversation.save() });
  }

  /** Asks the question of a reply anew; it and what followed are dropped. @param {import("./conversation.js").Reply} reply */
  async #again(reply) {
    if (this.#running || !this.settings.reportInvalid()) return;
    const at = this.#conversation.turns.indexOf(reply);
    this.#conversation.turns = this.#conversation.turns.slice(0, at);
    this.#restore();
    await this.#answer();
  }

  async #answer() {
    const messages = this.#conversation.messages(this.settings.system);
    const count = this.settings.answers;
    /** @type {import("./conversation.js").Reply} */
    const reply = {
      role: "assistant",
      answers: Array.from({ length: count }, () => ({ text: "", finish: null })),
      chosen: 0,
      facts: "",
      ledger: [],
      problem: null,
    };
    const view = this.#reply(reply);
    this.#conversation.push(reply);
    this.#thread.append(view.element);
    this.#followsEnd = true;
    this.#busy(new AbortController());
    view.start();
    this.#follow();
    const body = { model: this.status.model, messages, n: count, ...this.settings.parameters() };
    await this.#write(body, reply, view);
    view.end();
    this.#busy(null);
    this.#conversation.save();
    this.#announce(reply);
  }

  /** @param {object} body @param {import("./conversation.js").Reply} reply @param {ReplyView} view */
  async #write(body, reply, view) {
    const options = { id: requestId("chat"), label: "chat", signal: this.#running.signal, onChoice: (choice) => view.feed(choice) };
    try {
      const record = await complete("v1/chat/completions", body, options);
      reply.ledger = record.ledger;
      reply.facts = facts(record);
      this.status.used(record.promptTokens + record.tokens);
    } catch (error) {
      if (error.name === "AbortError") {
        for (const answer of reply.answers) answer.finish ??= "abort";
        return;
      }
      reply.problem = problem(error);
      if (error instanceof ApiError) this.status.reportError(error);
    }
  }

  /** @param {AbortController | null} running */
  #busy(running) {
    this.#running = running;
    this.#send.textContent = running ? "Stop" : "Send";
    this.#send.classList.toggle("stop", running !== null);
  }

  #follow() {
    if (this.#followsEnd) this.#thread.scrollTop = this.#thread.scrollHeight;
  }

  /** Screen readers hear the answer once, when it is complete. @param {import("./conversation.js").Reply} reply */
  #announce(reply) {
    const text = reply.answers[reply.chosen].text;
    byId("announcer").textContent = reply.problem ? reply.problem.title : `The answer is complete. ${text}`;
  }

  #clear() {
    this.stop();
    this.#conversation.clear();
    this.#restore();
    this.#prompt.focus();
  }
}

/** @param {import("./request_log.js").RequestRecord} record */
function facts(record) {
  const parts = [plural(record.tokens, "token")];
  const perSecond = speed(record);
  if (perSecond !== null) parts.push(`${rate(perSecond)} tokens/s`);
  if (record.firstTokenAt !== null) parts.push(`first after ${duration(record.firstTokenAt - record.startedAt)}`);
  parts.push(`prompt ${record.promptTokens}${record.cachedTokens ? `, ${record.cachedTokens} cached` : ""}`);
  return parts.join(" · ");
}
