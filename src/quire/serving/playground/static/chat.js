// The chat: sends questions, shows answers as they are written, and keeps every branch of the conversation.

import { ApiError, BASE, keys } from "./api.js";
import { complete, requestId } from "./completion.js";
import { Conversation, newReply } from "./conversation.js";
import { byId, duration, el, plural, rate } from "./dom.js";
import { explainError } from "./errors.js";
import { copyText, watchCodeCopies } from "./markdown_view.js";
import { showMessage } from "./menu.js";
import { answerOf, ReplyView } from "./reply_view.js";
import { speed } from "./request_log.js";
import { curlSnippet, pythonSnippet } from "./snippets.js";
import { session } from "./storage.js";
import { TokenCard } from "./token_card.js";
import { toolTurnView } from "./tool_calls.js";
import { questionView, versionSwitch } from "./turn_actions.js";

/** @typedef {import("./conversation.js").Reply} Reply @typedef {import("./conversation.js").Turn} Turn */

const SUGGESTIONS = [
  "Explain paged attention as you would to a librarian.",
  "Write a Python function that counts the words in a file.",
  "Compare three rivers in a table: length, source, mouth.",
];
/** Parameters that have an effect only at the start of an answer, or in a chat. */
const NOT_CONTINUED = ["response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls"];

/** Sends "open" when another conversation is shown. */
export class Chat extends EventTarget {
  #thread = byId("thread");
  #prompt = /** @type {HTMLTextAreaElement} */ (byId("prompt"));
  #send = /** @type {HTMLButtonElement} */ (byId("send"));
  /** @type {Map<string, {abort: AbortController, turn: Reply, view: ReplyView}>} answers being written, by their conversation */
  #running = new Map();
  #followsEnd = true;

  /**
   * @param {import("./settings.js").Settings} settings
   * @param {import("./status.js").Status} status
   * @param {import("./conversations.js").Conversations} conversations
   */
  constructor(settings, status, conversations) {
    super();
    this.settings = settings;
    this.status = status;
    this.conversations = conversations;
    this.conversation = conversations.get(session.get("open")) ?? new Conversation();
    new TokenCard(this.#thread, (body, placed, instead) => this.#branchAtToken(body, placed, instead));
    watchCodeCopies(this.#thread);
    this.#listen();
    this.#render();
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running.has(this.conversation.id)) this.stop();
      else this.#ask(this.#prompt.value);
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running.has(this.conversation.id)) this.#ask(this.#prompt.value);
    });
    this.#prompt.addEventListener("input", () => this.#grow());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector(":popover-open")) this.stop();
    });
    this.#thread.addEventListener("scroll", () => {
      this.#followsEnd = this.#thread.scrollHeight - this.#thread.scrollTop - this.#thread.clientHeight < 48;
    });
    this.#thread.addEventListener("painted", () => this.#follow());
    this.settings.addEventListener("change", () => this.#showActive());
    this.#showActive();
  }

  /** Shows a conversation. @param {Conversation} conversation */
  open(conversation) {
    this.conversation = conversation;
    session.set("open", conversation.id);
    this.#render();
    this.dispatchEvent(new Event("open"));
  }

  startNew() {
    this.open(new Conversation());
    this.#prompt.focus();
  }

  /** Aborts the answer that is being written in the shown conversation, if any. The text so far is kept. */
  stop() {
    this.#running.get(this.conversation.id)?.abort.abort();
  }

  /** Aborts the answer of a conversation that is about to be deleted. @param {Conversation} conversation */
  forget(conversation) {
    this.#running.get(conversation.id)?.abort.abort();
    if (conversation === this.conversation) this.startNew();
  }

  /** The request that the next answer to the shown conversation would be, as text. @param {"curl" | "Python"} kind */
  async copyRequest(kind) {
    if (!this.settings.reportInvalid()) return;
    const last = this.conversation.path().at(-1);
    const messages = last ? this.conversation.messages(this.settings.system, last) : this.#withSystem([]);
    const draft = this.#prompt.value.trim();
    if (draft || messages.at(-1)?.role !== "user") messages.push({ role: "user", content: draft || "Hello" });
    await this.#copySnippet(kind, { ...this.#body(), messages });
  }

  /** @param {object[]} messages */
  #withSystem(messages) {
    const { system } = this.settings;
    return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
  }

  #body() {
    return { model: this.status.model, n: this.settings.answers, ...this.settings.parameters() };
  }

  /** @param {"curl" | "Python"} kind @param {Record<string, any>} body */
  async #copySnippet(kind, body) {
    const { n, ...rest } = body;
    const request = n > 1 ? body : rest;
    const text = (kind === "curl" ? curlSnippet : pythonSnippet)(BASE, request, keys.api !== null);
    showMessage((await copyText(text)) ? `Copied as ${kind}.` : "The browser did not allow copying.");
  }

  #grow() {
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${Math.min(this.#prompt.scrollHeight + 2, 200)}px`;
  }

  #showActive() {
    const chips = this.settings.active().map((text) => el("span", { class: "chip", text }));
    byId("active").replaceChildren(...chips);
  }

  #render() {
    const path = this.conversation.path();
    const running = this.#running.get(this.conversation.id);
    const views = path.map((turn) => (turn === running?.turn ? running.view.element : this.#view(turn)));
    this.#thread.replaceChildren(...(views.length > 0 ? views : [this.#welcome()]));
    this.#showBusy();
    this.#followsEnd = true;
    this.#follow();
  }

  /** @param {Turn} turn @returns {HTMLElement} */
  #view(turn) {
    if (turn.role === "tool") return toolTurnView(turn);
    if (turn.role === "user") return questionView(turn, { versions: this.#versions(turn), edit: (text) => this.#editQuestion(turn, text) });
    const view = this.#replyView(turn);
    view.end();
    return view.element;
  }

  /** @param {Reply} reply */
  #replyView(reply) {
    const { conversation } = this;
    return new ReplyView(reply, {
      again: () => this.#answer(conversation.before(reply)),
      resume: () => this.#resume(reply),
      edit: (text) => this.#editAnswer(reply, text),
      changed: () => this.conversations.save(conversation),
      versions: () => this.#versions(reply, conversation),
      isLast: () => conversation.path().at(-1) === reply,
      sendResults: (results) => this.#sendResults(reply, results),
      more: () => [
        { label: "Branch into a new chat", action: () => this.#branchChat(reply) },
        { label: "Copy as curl", action: () => this.#copyOf(reply, "curl") },
        { label: "Copy as Python", action: () => this.#copyOf(reply, "Python") },
      ],
    });
  }

  /** @param {Turn} turn @param {Conversation} [conversation] */
  #versions(turn, conversation = this.conversation) {
    const siblings = conversation.siblings(turn);
    return versionSwitch(siblings.indexOf(turn), siblings.length, (index) => {
      conversation.select(siblings[index]);
      this.conversations.save(conversation, false);
      const { scrollTop } = this.#thread;
      this.#render();
      this.#thread.scrollTop = scrollTop;
    });
  }

  #welcome() {
    const buttons = SUGGESTIONS.map((text) =>
      el("button", { class: "suggestion", text, attributes: { type: "button" }, on: { click: () => this.#ask(text) } }),
    );
    const words = "Chats stay in this browser. Edit any message to branch from it. Open Engine to watch the cache at work.";
    return el("div", { class: "welcome" }, el("h2", { text: "What would you like to ask?" }), el("p", { text: words }), el("div", { class: "suggestions" }, ...buttons));
  }

  /** @param {string} text */
  async #ask(text) {
    if (text.trim() === "" || !this.settings.reportInvalid()) return;
    const turn = this.conversation.add({ role: "user", text }, this.conversation.path().at(-1) ?? null);
    this.#prompt.value = "";
    this.#grow();
    await this.#answer(turn);
  }

  /** @param {Turn} turn @param {string} text */
  async #editQuestion(turn, text) {
    if (!this.#mayStart()) return;
    await this.#answer(this.conversation.add({ role: "user", text }, this.conversation.before(turn)));
  }

  /** @param {Reply} reply @param {string} text */
  #editAnswer(reply, text) {
    this.conversation.add(newReply([{ text, finish: "edited" }]), this.conversation.before(reply));
    this.conversations.save(this.conversation);
    this.#render();
  }

  /** @param {Reply} reply @param {{id: string, name: string, content: string}[]} results */
  async #sendResults(reply, results) {
    if (!this.#mayStart()) return;
    await this.#answer(this.conversation.add({ role: "tool", results }, reply));
  }

  /** @param {Reply} reply */
  #branchChat(reply) {
    const branch = this.conversation.branchAt(reply);
    this.conversations.save(branch);
    this.open(branch);
    showMessage("This is a new chat with the turns up to there.");
  }

  /** @param {Reply} reply @param {"curl" | "Python"} kind */
  async #copyOf(reply, kind) {
    if (!reply.request && !this.settings.reportInvalid()) return;
    const messages = this.conversation.messages(this.settings.system, this.conversation.before(reply));
    await this.#copySnippet(kind, { ...(reply.request ?? this.#body()), messages });
  }

  /** Continues the selected answer of a reply where it was cut off. @param {Reply} reply */
  async #resume(reply) {
    if (!this.#mayStart()) return;
    const answer = reply.answers[reply.chosen];
    const fork = answer.finish === "length" ? answer.source : undefined;
    await this.#continue(reply, answer.text, fork && { request_id: fork.requestId, index: fork.choice });
  }

  /** @param {Element} body @param {import("./tokens.js").PlacedToken} placed @param {string | null} instead */
  async #branchAtToken(body, placed, instead) {
    const { reply, index } = answerOf(body);
    if (!this.#mayStart()) return;
    const { source, text } = reply.answers[index];
    const kept = text.slice(0, placed.at) + (instead ?? "");
    const branch = this.conversation.add(newReply([{ text: kept, finish: null }]), this.conversation.before(reply));
    const fork = instead === null && source ? { request_id: source.requestId, index: source.choice, at_token: placed.token.index } : undefined;
    await this.#continue(/** @type {Reply} */ (branch), kept, fork);
  }

  /**
   * Lets the model go on with an answer. The engine forks the request that wrote it, where it still knows it; otherwise
   * the text goes back as the beginning of the answer.
   * @param {Reply} reply @param {string} kept @param {{request_id: string, index: number, at_token?: number}} [fork]
   */
  async #continue(reply, kept, fork) {
    const { top_logprobs, logprobs, ...given } = this.settings.parameters();
    for (const name of NOT_CONTINUED) delete given[name];
    const common = { model: this.status.model, ...given };
    const messages = this.conversation.messages(this.settings.system, this.conversation.before(reply));
    if (kept !== "") messages.push({ role: "assistant", content: kept });
    const asText = kept === "" ? {} : { continue_final_message: true, add_generation_prompt: false };
    const chat = { path: "v1/chat/completions", body: { ...common, ...(logprobs ? { logprobs, top_logprobs } : {}), messages, ...asText } };
    const forked = { path: "v1/fork", body: { ...common, ...(logprobs ? { logprobs: top_logprobs } : {}), ...fork } };
    reply.problem = null;
    reply.answers[reply.chosen].finish = null;
    await this.#write(reply, fork ? [forked, chat] : [chat], reply.chosen);
  }

  #mayStart() {
    return !this.#running.has(this.conversation.id) && this.settings.reportInvalid();
  }

  /** Writes a new reply after a turn. @param {Turn} after */
  async #answer(after) {
    if (!this.#mayStart()) return;
    const answers = Array.from({ length: this.settings.answers }, () => ({ text: "", finish: null }));
    const reply = /** @type {Reply} */ (this.conversation.add(newReply(answers), after));
    const body = this.#body();
    reply.request = body;
    const messages = this.conversation.messages(this.settings.system, after);
    await this.#write(reply, [{ path: "v1/chat/completions", body: { ...body, messages } }], 0);
  }

  /**
   * Shows the reply while it is written.
   * @param {Reply} turn @param {{path: string, body: object}[]} ways the first that the server knows is taken @param {number} first the answer that choice 0 writes
   */
  async #write(turn, ways, first) {
    const { conversation } = this;
    const view = this.#replyView(turn);
    const abort = new AbortController();
    this.#running.set(conversation.id, { abort, turn, view });
    this.conversations.save(conversation);
    session.set("open", conversation.id);
    this.#render();
    this.dispatchEvent(new Event("open"));
    view.start();
    await this.#stream(turn, ways, { signal: abort.signal, view, first });
    this.#running.delete(conversation.id);
    view.end();
    if (this.conversations.get(conversation.id)) this.conversations.save(conversation);
    this.#showBusy();
    this.#announce(turn);
  }

  /** @param {Reply} turn @param {{path: string, body: object}[]} ways @param {{signal: AbortSignal, view: ReplyView, first: number}} options */
  async #stream(turn, [{ path, body }, ...others], { signal, view, first }) {
    const id = requestId("chat");
    const written = new Set(); // choices of this request
    const onChoice = (choice) => {
      written.add(choice.index);
      view.feed(choice, first);
    };
    try {
      const record = await complete(path, body, { id, label: "chat", signal, onChoice });
      turn.ledger = record.ledger;
      turn.facts = facts(record);
      for (const choice of written) turn.answers[first + choice].source = { requestId: record.serverId ?? id, choice };
      this.status.showContextUse(record.promptTokens + record.tokens);
    } catch (error) {
      if (error.name === "AbortError") {
        for (const answer of turn.answers) answer.finish ??= "abort";
      } else if (others.length > 0 && [400, 404].includes(error.status)) {
        await this.#stream(turn, others, { signal, view, first });
      } else {
        turn.problem = explainError(error);
        if (error instanceof ApiError) this.status.reportError(error);
      }
    }
  }

  #showBusy() {
    const running = this.#running.has(this.conversation.id);
    this.#send.setAttribute("aria-label", running ? "Stop" : "Send");
    this.#send.title = running ? "Stop" : "Send";
    this.#send.classList.toggle("stop", running);
  }

  #follow() {
    if (this.#followsEnd) this.#thread.scrollTop = this.#thread.scrollHeight;
  }

  /** Announces the answer to screen readers once, when it is complete. @param {Reply} reply */
  #announce(reply) {
    const { text, toolCalls } = reply.answers[reply.chosen];
    const calls = toolCalls?.length ? ` It calls ${toolCalls.map((call) => call.name).join(", ")}.` : "";
    byId("announcer").textContent = reply.problem ? reply.problem.title : `The answer is complete. ${text}${calls}`;
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
