// Shows whether the server can be used: one word in the masthead, and a notice with advice if it cannot.

import { ApiError, call, json, keys } from "./api.js";
import { byId, el } from "./dom.js";
import { local } from "./storage.js";

const READY_PAUSE = 5000; // milliseconds between two checks while all is well
const DOWN_PAUSE = 1500;

const NOTICES = {
  loading: "The model is loading. Questions can be sent as soon as this notice goes.",
  draining: "The server is shutting down: it finishes what it has and takes nothing new. Your chats are kept.",
  restarting: "The engine is down and is being restarted. What it was writing is lost; your chats are kept. This page tries again every other second.",
  gone: "The server does not answer. Check that quire serve still runs. Your chats are kept; this page tries again every other second.",
};
const WORDS = {
  ready: "ready",
  loading: "loading",
  draining: "shutting down",
  restarting: "engine down",
  gone: "no connection",
  locked: "key needed",
};

/** Sends "model" when a model is picked. */
export class Status extends EventTarget {
  /** The model that is picked; undefined, and so not sent, until the server's models are known. @type {string | undefined} */
  model = undefined;
  /** @type {Map<string, {max_model_len?: number, default_sampling_params?: Record<string, number>}>} what the server says of each model */
  #models = new Map();
  #picker = /** @type {HTMLSelectElement} */ (byId("model"));
  #state = "unknown";
  #timer = 0;

  constructor() {
    super();
    this.#picker.addEventListener("change", () => this.#pick(this.#picker.value));
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible") this.check();
    });
    this.check();
  }

  /** Asks the server for its state, now and again after a while. */
  async check() {
    clearTimeout(this.#timer);
    const state = await this.#readState();
    this.#show(state);
    const pause = state === "ready" || state === "locked" ? READY_PAUSE : DOWN_PAUSE;
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible") this.#timer = setTimeout(() => this.check(), pause);
  }

  /** Called when a request has failed: checks the state of the server. @param {ApiError} error */
  reportError(error) {
    if (error.status === 401) this.#show("locked");
    else if (error.status === 0 || error.status >= 500) this.check();
  }

  /** @param {number} tokens that the conversation takes of the model's window */
  showContextUse(tokens) {
    const most = this.#models.get(this.model)?.max_model_len;
    byId("context-use").textContent = most ? `${tokens} of ${most} tokens used.` : "";
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
    this.#models = new Map(data.map((model) => [model.id, model]));
    const options = [...this.#models.keys()].map((name) => el("option", { text: name, attributes: { value: name } }));
    this.#picker.replaceChildren(...options);
    const kept = local.get("model");
    this.#pick(kept !== null && this.#models.has(kept) ? kept : data[0].id);
  }

  /** @param {string} name */
  #pick(name) {
    this.model = name;
    this.#picker.value = name;
    this.#picker.title = name;
    local.set("model", name);
    this.dispatchEvent(new Event("model"));
  }

  /** The sampling that the server uses where a request says nothing. @returns {Record<string, number>} */
  get defaults() {
    return this.#models.get(this.model)?.default_sampling_params ?? {};
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
    const words = keys.api ? "The server did not accept this key. Enter another one:" : "This server asks for an API key. It is kept until this tab is closed:";
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
