// Presets: named sets of sampling values, some built in, some the user's own.

import { el } from "./dom.js";
import { local } from "./storage.js";

const SAMPLING = ["system", "temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty"];
/** @type {Record<string, Record<string, any>>} */
const BUILT_IN = {
  "Model defaults": {},
  Precise: { temperature: 0 },
  Balanced: { temperature: 0.7, top_p: 0.95 },
  Creative: { temperature: 1, min_p: 0.05 },
};
const MOST_PRESETS = 50;

export class PresetsView {
  #select = el("select", { attributes: { id: "preset" } });
  #remove = el("button", { class: "link", text: "Delete preset", attributes: { type: "button" } });
  #name = el("input", { attributes: { id: "preset-name", maxlength: "40", placeholder: "Save these as", "aria-label": "Name of the new preset" } });
  #own = readOwn();

  /** @param {{values: () => Record<string, any>, apply: (values: Record<string, any>) => void}} form */
  constructor(form) {
    this.form = form;
    const save = el("button", { text: "Save", attributes: { type: "button", "aria-label": "Save as preset" } });
    this.element = el(
      "div",
      { class: "presets" },
      el("label", { text: "Preset", attributes: { for: "preset" } }),
      this.#select,
      el("div", { class: "preset-row" }, this.#name, save),
      this.#remove,
    );
    this.#select.addEventListener("change", () => this.#apply(this.#select.value));
    save.addEventListener("click", () => this.#save());
    this.#remove.addEventListener("click", () => this.#delete());
    this.#fill();
  }

  /** Selects the preset that equals the values of the form. */
  showCurrent() {
    const values = pick(this.form.values());
    const fits = (name, preset) => SAMPLING.every((each) => (each === "system" && name in BUILT_IN) || values[each] === (preset[each] ?? ""));
    this.#select.value = Object.entries(this.#all()).find(([name, preset]) => fits(name, preset))?.[0] ?? "";
    this.#remove.hidden = !(this.#select.value in this.#own);
  }

  #all() {
    return { ...BUILT_IN, ...this.#own };
  }

  #fill() {
    const custom = el("option", { text: "Custom", attributes: { value: "" } });
    const options = Object.keys(this.#all()).map((name) => el("option", { text: name, attributes: { value: name } }));
    this.#select.replaceChildren(custom, ...options);
  }

  /** @param {string} name */
  #apply(name) {
    const preset = this.#all()[name];
    if (!preset) return;
    const keepsSystem = name in BUILT_IN ? { system: this.form.values().system } : {};
    this.form.apply({ ...Object.fromEntries(SAMPLING.map((each) => [each, ""])), ...keepsSystem, ...preset });
  }

  #save() {
    const name = this.#name.value.trim();
    if (name === "" || name in BUILT_IN) {
      this.#name.setAttribute("aria-invalid", "true");
      this.#name.focus();
      return;
    }
    this.#name.removeAttribute("aria-invalid");
    this.#own = { ...this.#own, [name]: pick(this.form.values()) };
    this.#name.value = "";
    this.#keep();
  }

  #delete() {
    const { [this.#select.value]: _, ...rest } = this.#own;
    this.#own = rest;
    this.#keep();
    this.#select.focus();
  }

  #keep() {
    local.set("presets", JSON.stringify(this.#own));
    this.#fill();
    this.showCurrent();
  }
}

/** @param {Record<string, any>} values */
function pick(values) {
  return Object.fromEntries(SAMPLING.map((name) => [name, values[name]]));
}

/** @returns {Record<string, Record<string, any>>} */
function readOwn() {
  const found = local.getJson("presets");
  if (typeof found !== "object" || found === null || Array.isArray(found)) return {};
  const entries = Object.entries(found).filter(([name, values]) => !(name in BUILT_IN) && typeof values === "object" && values !== null);
  return Object.fromEntries(entries.slice(0, MOST_PRESETS));
}
