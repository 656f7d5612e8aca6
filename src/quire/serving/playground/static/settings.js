// System prompt and sampling controls: one table drives the form, what is kept and what is sent.

import { el } from "./dom.js";
import { local } from "./storage.js";

/**
 * A control. `sentUnless` is the value that means "leave it to the server": it is not sent.
 * @typedef {object} Field
 * @property {string} name the parameter's name in the API
 * @property {string} label
 * @property {string} help
 * @property {"slider" | "number" | "text" | "lines" | "switch"} kind
 * @property {number} [min]
 * @property {number} [max]
 * @property {number} [step]
 * @property {any} initial
 * @property {any} [sentUnless]
 */

/** @type {[string, Field[]][]} */
const GROUPS = [
  ["System prompt", [{ name: "system", label: "System prompt", help: "", kind: "text", initial: "" }]],
  [
    "Sampling",
    [
      { name: "temperature", label: "Temperature", help: "0 always takes the likeliest token.", kind: "slider", min: 0, max: 2, step: 0.05, initial: 0.7 },
      { name: "top_p", label: "Top p", help: "Keep the likeliest tokens up to this share.", kind: "slider", min: 0.01, max: 1, step: 0.01, initial: 1, sentUnless: 1 },
      { name: "min_p", label: "Min p", help: "Drop tokens below this share of the likeliest.", kind: "slider", min: 0, max: 1, step: 0.01, initial: 0, sentUnless: 0 },
      { name: "top_k", label: "Top k", help: "Keep this many tokens; 0 keeps all.", kind: "number", min: 0, max: 100_000, step: 1, initial: 0, sentUnless: 0 },
    ],
  ],
  [
    "Answers",
    [
      { name: "max_tokens", label: "Most tokens", help: "", kind: "number", min: 1, max: 1_000_000, step: 1, initial: 256 },
      { name: "n", label: "Side by side", help: "Answers to each question, 1 to 8.", kind: "number", min: 1, max: 8, step: 1, initial: 1 },
      { name: "seed", label: "Seed", help: "Empty: a new one each time.", kind: "number", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, initial: "", sentUnless: "" },
      { name: "stop", label: "Stop at", help: "One text per line.", kind: "lines", initial: "", sentUnless: "" },
    ],
  ],
  [
    "Penalties",
    [
      { name: "presence_penalty", label: "Presence", help: "", kind: "number", min: -2, max: 2, step: 0.1, initial: 0, sentUnless: 0 },
      { name: "frequency_penalty", label: "Frequency", help: "", kind: "number", min: -2, max: 2, step: 0.1, initial: 0, sentUnless: 0 },
      { name: "repetition_penalty", label: "Repetition", help: "", kind: "number", min: 0.1, max: 2, step: 0.05, initial: 1, sentUnless: 1 },
    ],
  ],
  [
    "Probabilities",
    [
      { name: "logprobs", label: "Ask for token probabilities", help: "", kind: "switch", initial: true },
      { name: "tint", label: "Tint unlikely tokens", help: "", kind: "switch", initial: true },
    ],
  ],
];

const FIELDS = GROUPS.flatMap(([, fields]) => fields);
const NOT_SENT_AS_THEY_ARE = new Set(["system", "n", "logprobs", "tint"]);
const TOP_LOGPROBS = 5;

export class Settings {
  /** @type {Map<string, HTMLInputElement>} */
  #inputs = new Map();
  #form = el("form", { class: "settings-form", attributes: { autocomplete: "off", novalidate: "" } });

  /** @param {HTMLElement} panel */
  constructor(panel) {
    const kept = local.getJson("settings") ?? {};
    for (const [title, fields] of GROUPS) {
      const group = el("fieldset", {}, el("legend", { text: title }), ...fields.map((field) => this.#control(field)));
      this.#form.append(group);
    }
    const reset = el("button", { class: "link", text: "Back to the defaults", attributes: { type: "button" } });
    reset.addEventListener("click", () => this.#fill({}));
    this.#form.append(reset);
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("input", () => this.#changed());
    panel.append(this.#form);
    this.#fill(kept);
  }

  get system() {
    return this.#inputs.get("system").value;
  }

  get answers() {
    return Number(this.#inputs.get("n").value);
  }

  /** What goes into a request beside messages and n. @returns {Record<string, any>} */
  parameters() {
    const given = {};
    for (const field of FIELDS) {
      const value = this.#value(field);
      if (NOT_SENT_AS_THEY_ARE.has(field.name) || value === field.sentUnless) continue;
      given[field.name] = field.kind === "lines" ? value.split("\n").filter((line) => line !== "") : value;
    }
    if (this.#value({ name: "logprobs", kind: "switch" })) Object.assign(given, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    return given;
  }

  /** Whether every field can be sent; the first that cannot is shown and focused. */
  reportInvalid() {
    const wrong = [...this.#inputs.values()].find((input) => !input.checkValidity());
    if (!wrong) return true;
    document.querySelector('.views [data-view="settings"]').click(); // where one panel shows at a time, this one must
    wrong.focus();
    return false;
  }

  /** @param {Field} field */
  #control(field) {
    const id = `setting-${field.name}`;
    const describedBy = `${id}-help`;
    const input = makeInput(field, id, describedBy);
    this.#inputs.set(field.name, input);
    const hidden = field.kind === "text" ? "visually-hidden" : ""; // the group's title says the same
    const label = el("label", { class: hidden, text: field.label, attributes: { for: id } });
    const help = el("p", { class: "help", text: field.help, attributes: { id: describedBy } });
    if (field.kind === "slider") return el("div", { class: "field slider" }, label, input, this.#slider(field, input), help);
    return el("div", { class: `field ${field.kind}` }, label, input, help);
  }

  /** The slider moves the number beside it; the number is what counts. @param {Field} field @param {HTMLInputElement} input */
  #slider(field, input) {
    const attributes = { type: "range", "aria-label": `${field.label}, slider`, ...bounds(field) };
    const slider = /** @type {HTMLInputElement} */ (el("input", { attributes }));
    slider.addEventListener("input", () => (input.value = slider.value));
    this.#form.addEventListener("input", (event) => {
      if (event.target === input) slider.value = input.value;
    });
    input.addEventListener("filled", () => (slider.value = input.value));
    return slider;
  }

  /** @param {Record<string, any>} values */
  #fill(values) {
    for (const field of FIELDS) {
      const input = this.#inputs.get(field.name);
      const value = values[field.name] ?? field.initial;
      if (field.kind === "switch") input.checked = value === true;
      else input.value = String(value);
      if (!input.checkValidity()) input.value = String(field.initial); // kept by an older page with other bounds
      input.dispatchEvent(new Event("filled"));
    }
    this.#changed();
  }

  #changed() {
    for (const field of FIELDS) this.#mark(field, this.#inputs.get(field.name));
    const values = Object.fromEntries(FIELDS.map((field) => [field.name, this.#value(field)]));
    document.body.classList.toggle("tinted", values.tint === true);
    if ([...this.#inputs.values()].every((input) => input.checkValidity())) local.set("settings", JSON.stringify(values));
  }

  /** @param {Field} field @param {HTMLInputElement} input */
  #mark(field, input) {
    const valid = input.checkValidity();
    input.setAttribute("aria-invalid", String(!valid));
    const help = input.closest(".field").querySelector(".help");
    help.textContent = valid ? field.help : `A number from ${field.min} to ${field.max}${field.step === 1 ? ", whole" : ""}.`;
  }

  /** @param {Pick<Field, "name" | "kind">} field */
  #value(field) {
    const input = this.#inputs.get(field.name);
    if (field.kind === "switch") return input.checked;
    if (field.kind === "text" || field.kind === "lines") return input.value;
    return input.value === "" ? "" : Number(input.value);
  }
}

/** @param {Field} field */
function bounds(field) {
  return { min: String(field.min), max: String(field.max), step: String(field.step) };
}

/** @param {Field} field @param {string} id @param {string} describedBy @returns {HTMLInputElement} */
function makeInput(field, id, describedBy) {
  const common = { id, "aria-describedby": describedBy };
  if (field.kind === "text" || field.kind === "lines") {
    return el("textarea", { attributes: { ...common, rows: field.kind === "text" ? "3" : "1", spellcheck: "false" } });
  }
  if (field.kind === "switch") return el("input", { attributes: { ...common, type: "checkbox", role: "switch" } });
  const step = field.step === 1 ? "1" : "any"; // a typed 0.33 is as good as a slider's 0.35
  const required = field.initial === "" ? {} : { required: "" };
  return el("input", { attributes: { ...common, ...bounds(field), ...required, step, type: "number", inputmode: "decimal" } });
}
