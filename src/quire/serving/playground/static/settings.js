// The settings panel: a form made from the table of fields.

import { collapsible } from "./collapsible.js";
import { el } from "./dom.js";
import { PresetsView } from "./presets.js";
import { FIELDS, FORMAT_FIELDS, GROUPS, parameters, problemWith } from "./settings_fields.js";
import { local } from "./storage.js";

/** @typedef {import("./settings_fields.js").Field} Field @typedef {HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement} Control */

/** Sends "change" when a value changes, and "invalid" when a field must be corrected before anything can be sent. */
export class Settings extends EventTarget {
  /** @type {Map<string, Control>} */
  #controls = new Map();
  #form = el("form", { class: "settings-form", attributes: { autocomplete: "off", novalidate: "" } });
  #presets = new PresetsView({ values: () => this.values(), apply: (values) => this.#fill({ ...this.values(), ...values }) });

  /** @param {HTMLElement} panel @param {HTMLElement[]} [more] elements below the form */
  constructor(panel, more = []) {
    super();
    this.#form.append(this.#presets.element, ...GROUPS.map((group) => this.#group(group)));
    const reset = el("button", { class: "link", text: "Reset all settings", attributes: { type: "button" } });
    reset.addEventListener("click", () => this.#fill({}));
    this.#form.append(reset);
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("input", (event) => this.#changed(/** @type {HTMLElement} */ (event.target).id));
    panel.append(this.#form, ...more);
    this.#fill(local.getJson("settings") ?? {});
  }

  /** The value of every field by its name. @returns {Record<string, any>} */
  values() {
    return Object.fromEntries(FIELDS.map((field) => [field.name, this.#value(field)]));
  }

  get system() {
    return this.#controls.get("system").value;
  }

  get answers() {
    return Number(this.#controls.get("n").value);
  }

  /** The fields of a request besides model, messages and n. */
  parameters() {
    return parameters(this.values());
  }

  /** Names of the enabled features, such as tools or a format. @returns {string[]} */
  active() {
    const { format, tools } = this.values();
    const label = FIELDS.find((field) => field.name === "format").options.find(([value]) => value === format)?.[1];
    const given = this.firstProblem() === null && tools.trim() !== "" ? JSON.parse(tools).length : 0;
    return [...(format === "text" ? [] : [label]), ...(given ? [`${given} ${given === 1 ? "tool" : "tools"}`] : [])];
  }

  /** @returns {Field | null} the first field whose value cannot be sent */
  firstProblem() {
    const values = this.values();
    return FIELDS.find((field) => problemWith(field, values) !== "") ?? null;
  }

  /** Whether everything can be sent; the first field that cannot is shown and focused. */
  reportInvalid() {
    const wrong = this.firstProblem();
    if (!wrong) return true;
    this.dispatchEvent(new Event("invalid"));
    const control = this.#controls.get(wrong.name);
    control.closest("details").open = true;
    control.focus();
    return false;
  }

  /** Shows the values that the server uses for empty fields. @param {Record<string, number>} defaults */
  showDefaults(defaults) {
    for (const field of FIELDS) {
      const input = /** @type {HTMLInputElement} */ (this.#controls.get(field.name));
      if (!input.placeholder || field.name === "seed") continue;
      input.placeholder = String(defaults[field.name] ?? "default");
      input.dispatchEvent(new Event("filled"));
    }
  }

  /** @param {typeof GROUPS[number]} group */
  #group({ title, open, fields }) {
    const controls = fields.map((field) => this.#field(field));
    return collapsible({ name: "groups", title, heading: "h3", style: "group", open }, ...controls);
  }

  /** @param {Field} field */
  #field(field) {
    const id = `setting-${field.name}`;
    const describedBy = `${id}-help`;
    const control = makeControl(field, id, describedBy);
    this.#controls.set(field.name, control);
    const hidden = field.name === "system" ? "visually-hidden" : ""; // the group's title says the same
    const label = el("label", { class: hidden, text: field.label, attributes: { for: id } });
    const help = el("p", { class: "help", attributes: { id: describedBy } });
    const parts = [label, control];
    if (field.kind === "slider") parts.push(this.#slider(field, /** @type {HTMLInputElement} */ (control)));
    if (field.example) parts.push(this.#example(field));
    return el("div", { class: `field ${field.kind}` }, ...parts, help);
  }

  /** Adds a slider that sets the number beside it. The number is the value. @param {Field} field @param {HTMLInputElement} input */
  #slider(field, input) {
    const attributes = { type: "range", "aria-label": `${field.label}, slider`, ...bounds(field) };
    const slider = /** @type {HTMLInputElement} */ (el("input", { attributes }));
    const show = () => {
      slider.value = input.value || (input.placeholder === "default" ? String(field.neutral) : input.placeholder);
      slider.classList.toggle("unset", input.value === "");
    };
    slider.addEventListener("input", () => {
      input.value = slider.value;
      show();
    });
    input.addEventListener("input", show);
    input.addEventListener("filled", show);
    return slider;
  }

  /** @param {Field} field */
  #example(field) {
    const button = el("button", { class: "link", text: "Insert an example", attributes: { type: "button" } });
    button.addEventListener("click", () => this.#fill({ ...this.values(), [field.name]: field.example }));
    return button;
  }

  /** @param {Record<string, any>} values */
  #fill(values) {
    for (const field of FIELDS) {
      const control = this.#controls.get(field.name);
      const value = values[field.name] ?? field.initial;
      if (field.kind === "switch") /** @type {HTMLInputElement} */ (control).checked = value === true;
      else control.value = String(value);
      if (field.kind === "select" && control.selectedIndex < 0) control.value = field.initial; // kept by a page with other options
      control.dispatchEvent(new Event("filled"));
    }
    this.#changed("");
  }

  /** @param {string} id of the control that changed; empty: several */
  #changed(id) {
    if (id === "preset" || id === "preset-name") return;
    const values = this.values();
    for (const field of FIELDS) this.#mark(field, values);
    document.body.classList.toggle("tinted", values.tint);
    this.#presets.showCurrent();
    if (this.firstProblem() === null) local.set("settings", JSON.stringify(values));
    this.dispatchEvent(new Event("change"));
  }

  /** @param {Field} field @param {Record<string, any>} values */
  #mark(field, values) {
    const control = this.#controls.get(field.name);
    const problem = problemWith(field, values);
    const container = control.closest(".field");
    control.setAttribute("aria-invalid", String(problem !== ""));
    container.querySelector(".help").textContent = problem || field.help;
    if (Object.values(FORMAT_FIELDS).includes(field.name)) container.hidden = FORMAT_FIELDS[values.format] !== field.name;
  }

  /** @param {Field} field */
  #value(field) {
    const control = this.#controls.get(field.name);
    if (field.kind === "switch") return /** @type {HTMLInputElement} */ (control).checked;
    if (field.kind !== "number" && field.kind !== "slider") return control.value;
    if (control.value === "") return control.validity.badInput ? Number.NaN : "";
    return Number(control.value);
  }
}

/** @param {Field} field */
function bounds(field) {
  return { min: String(field.min), max: String(field.max), step: String(field.step) };
}

/** @param {Field} field @param {string} id @param {string} describedBy @returns {Control} */
function makeControl(field, id, describedBy) {
  const common = { id, "aria-describedby": describedBy };
  if (field.kind === "select") {
    const options = field.options.map(([value, text]) => el("option", { text, attributes: { value } }));
    return el("select", { attributes: common }, ...options);
  }
  if (["text", "lines", "json"].includes(field.kind)) {
    const rows = { text: "3", lines: "1", json: "8" }[field.kind];
    return el("textarea", { class: field.kind === "json" ? "code-input" : "", attributes: { ...common, rows, spellcheck: "false" } });
  }
  if (field.kind === "switch") return el("input", { attributes: { ...common, type: "checkbox", role: "switch" } });
  const step = field.step === 1 ? "1" : "any"; // a typed 0.33 is as good as a slider's 0.35
  const placeholder = field.required ? {} : { placeholder: field.name === "seed" ? "random" : "default" };
  return el("input", { attributes: { ...common, ...bounds(field), ...placeholder, step, type: "number", inputmode: "decimal" } });
}
