// Whether the server can be used now, in one word in the masthead and, when it cannot, in a notice that says what to do.

import { ApiError, call, json, keys } from "./api.js";
import { byId, el } from "./dom.js";

const CALM = 5000; // milliseconds between looks while all is well
const WORRIED = 1500;

const NOTICES = {
  loading: "The model is loading. Questions can be sent as soon as this notice goes.",
  draining: "The server is shutting down: it finishes what it has and takes nothing new. Your conversation is kept.",
  restarting: "The engine is down and is being restarted. What it was writing is lost; your conversation is kept. This page looks again every other second.",
  gone: "The server does not answer. Check that quire serve still runs. Your conversation is kept; this page looks again every other second.",
};
const WORDS = {
  ready: "ready",
  loading: "loading",
  draining: "shutting down",
  restarting: "engine down",
  gone: "no connection",
  locked: "key needed",
};

export class Status {
  /** The first model the server serves; undefined, and so not sent, until it is known. @type {string | undefined} */
  model = undefined;
  #window = 0; // tokens the model can hold
  #state = "unknown";
  #timer = 0;

  constructor() {
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible") this.check();
    });
    this.check();
  }

  /** Looks at the server now and again after a while. */
  async check() {
    clearTimeout(this.#timer);
    const state = await this.#readState();
    this.#show(state);
    const pause = state === "ready" || state === "locked" ? CALM : WORRIED;
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible") this.#timer = setTimeout(() => this.check(), pause);
  }

  /** A request failed: look whether that was more than bad luck. @param {ApiError} error */
  reportError(error) {
    if (error.status === 401) this.#show("locked");
    else if (error.status === 0 || error.status >= 500) this.check();
  }

  /** @param {number} tokens that the conversation takes of the model's window */
  used(tokens) {
    byId("context-use").textContent = this.#window ? `${tokens} of ${this.#window} tokens used.` : "";
  }

  /** @returns {Promise<string>} */
  async #readState() {
    try {
      await call("ready");
      if (!this.model || this.#state === "locked") await this.#loadModels();
      return "ready";
    } catch (error) {
      if (!(error instanceof ApiError) || error.status === 0) return "gone";
      if (error.status === 401 || error.status === 403) return "locked";
      return error.code in NOTICES ? error.code : "restarting";
    }
  }

  async #loadModels() {
    const { data } = await json("v1/models");
    this.model = data[0].id;
    this.#window = data[0].max_model_len ?? 0;
    const name = byId("model-name");
    name.textContent = this.model;
    name.title = this.model;
  }

  /** @param {string} state */
  #show(state) {
    if (state === this.#state) return;
    this.#state = state;
    const status = byId("status");
    status.dataset.state = state;
    status.textContent = WORDS[state];
    const notice = byId("notice");
    notice.hidden = state === "ready";
    notice.replaceChildren(state === "locked" ? this.#keyForm() : NOTICES[state] ?? "");
  }

  #keyForm() {
    const input = /** @type {HTMLInputElement} */ (
      el("input", { attributes: { type: "password", id: "api-key", autocomplete: "off", required: "", spellcheck: "false" } })
    );
    const words = keys.api ? "The server did not accept this key. Another one:" : "This server asks for an API key. It is kept until this tab is closed:";
    const form = el(
      "form",
      { class: "key-form" },
      el("label", { text: words, attributes: { for: "api-key" } }),
      el("span", { class: "key-row" }, input, el("button", { class: "primary", text: "Use key", attributes: { type: "submit" } })),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      keys.api = input.value;
      this.#state = "unknown";
      this.model = undefined;
      this.check();
    });
    return form;
  }
}
