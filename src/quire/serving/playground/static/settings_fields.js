// The table of settings. It defines the form, what is stored, and what is sent.

/**
 * A control. An empty number is left to the server, which uses the defaults of the model.
 * @typedef {object} Field
 * @property {string} name the parameter's name in the API
 * @property {string} label
 * @property {string} help
 * @property {"slider" | "number" | "text" | "lines" | "json" | "switch" | "select"} kind
 * @property {number} [min]
 * @property {number} [max]
 * @property {number} [step]
 * @property {number} [neutral] where the slider stands while the field is empty
 * @property {[string, string][]} [options] of a select: value and label
 * @property {any} initial
 * @property {boolean} [required]
 * @property {boolean} [own] the parameter is built from several fields, not sent as it is
 * @property {string} [example] a value to start from
 */

const SCHEMA_EXAMPLE = JSON.stringify(
  {
    type: "object",
    properties: { city: { type: "string", maxLength: 60 }, population: { type: "integer", minimum: 0, maximum: 100_000_000 } },
    required: ["city", "population"],
    additionalProperties: false,
  },
  null,
  2,
);
const TOOLS_EXAMPLE = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather in a city.",
        parameters: { type: "object", properties: { city: { type: "string", maxLength: 60 } }, required: ["city"] },
      },
    },
  ],
  null,
  2,
);

/** @type {{title: string, open: boolean, fields: Field[]}[]} */
export const GROUPS = [
  {
    title: "System prompt",
    open: true,
    fields: [{ name: "system", label: "System prompt", help: "", kind: "text", initial: "", own: true }],
  },
  {
    title: "Sampling",
    open: true,
    fields: [
      { name: "temperature", label: "Temperature", help: "0 always takes the likeliest token.", kind: "slider", min: 0, max: 2, step: 0.05, neutral: 1, initial: "" },
      { name: "top_p", label: "Top p", help: "Keep the likeliest tokens up to this share.", kind: "slider", min: 0.01, max: 1, step: 0.01, neutral: 1, initial: "" },
      { name: "min_p", label: "Min p", help: "Drop tokens below this share of the likeliest.", kind: "slider", min: 0, max: 1, step: 0.01, neutral: 0, initial: "" },
      { name: "top_k", label: "Top k", help: "Keep this many tokens; 0 keeps all.", kind: "number", min: 0, max: 100_000, step: 1, initial: "" },
    ],
  },
  {
    title: "Length",
    open: true,
    fields: [
      { name: "max_tokens", label: "Max tokens", help: "", kind: "number", min: 1, max: 1_000_000, step: 1, initial: 512, required: true },
      { name: "n", label: "Answers", help: "Answers to each question, 1 to 8.", kind: "number", min: 1, max: 8, step: 1, initial: 1, required: true, own: true },
      { name: "seed", label: "Seed", help: "Empty: a new one each time.", kind: "number", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, initial: "" },
      { name: "stop", label: "Stop at", help: "One text per line.", kind: "lines", initial: "" },
    ],
  },
  {
    title: "Penalties",
    open: false,
    fields: [
      { name: "presence_penalty", label: "Presence", help: "", kind: "number", min: -2, max: 2, step: 0.1, initial: "" },
      { name: "frequency_penalty", label: "Frequency", help: "", kind: "number", min: -2, max: 2, step: 0.1, initial: "" },
      { name: "repetition_penalty", label: "Repetition", help: "", kind: "number", min: 0.1, max: 2, step: 0.05, initial: "" },
    ],
  },
  {
    title: "Output format",
    open: false,
    fields: [
      { name: "format", label: "Answer as", help: "", kind: "select", options: [["text", "Text"], ["json_object", "JSON object"], ["json_schema", "JSON schema"], ["regex", "Regular expression"], ["choice", "One of a list"]], initial: "text", own: true },
      { name: "schema", label: "JSON schema", help: "The answer is JSON that this schema allows.", kind: "json", initial: "", own: true, example: SCHEMA_EXAMPLE },
      { name: "regex", label: "Regular expression", help: "The whole answer matches it.", kind: "lines", initial: "", own: true },
      { name: "choices", label: "List", help: "One text per line; the answer is one of them.", kind: "lines", initial: "", own: true },
    ],
  },
  {
    title: "Tools",
    open: false,
    fields: [
      { name: "tools", label: "Functions the model may call", help: "A JSON list, as in the OpenAI API. You enter the results.", kind: "json", initial: "", own: true, example: TOOLS_EXAMPLE },
      { name: "tool_choice", label: "Calls", help: "", kind: "select", options: [["auto", "The model decides"], ["required", "At least one"], ["none", "None"]], initial: "auto", own: true },
      { name: "parallel_tool_calls", label: "Several calls at once", help: "", kind: "switch", initial: false, own: true },
    ],
  },
  {
    title: "Token probabilities",
    open: false,
    fields: [
      { name: "logprobs", label: "Ask for probabilities", help: "Select a token to see what else was likely, and to branch there.", kind: "switch", initial: false, own: true },
      { name: "tint", label: "Tint unlikely tokens", help: "", kind: "switch", initial: false, own: true },
    ],
  },
];

export const FIELDS = GROUPS.flatMap((group) => group.fields);

/** Which field belongs to which format. */
export const FORMAT_FIELDS = { json_schema: "schema", regex: "regex", choice: "choices" };

const TOP_LOGPROBS = 5;

/**
 * The parameters of a request, from the values of all fields. Messages, model and `n` come from elsewhere.
 * @param {Record<string, any>} values @returns {Record<string, any>}
 */
export function parameters(values) {
  const sent = {};
  for (const field of FIELDS) {
    const value = values[field.name];
    if (field.own || value === "") continue;
    sent[field.name] = field.kind === "lines" ? linesOf(value) : value;
  }
  if (values.logprobs) Object.assign(sent, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return { ...sent, ...outputFormat(values), ...tools(values) };
}

/** @param {Record<string, any>} values */
function outputFormat({ format, schema, regex, choices }) {
  switch (format) {
    case "json_object":
      return { response_format: { type: "json_object" } };
    case "json_schema":
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } };
    case "regex":
      return { structured_outputs: { regex } };
    case "choice":
      return { structured_outputs: { choice: linesOf(choices) } };
    default:
      return {};
  }
}

/** @param {Record<string, any>} values */
function tools({ tools: given, tool_choice, parallel_tool_calls }) {
  if (given.trim() === "") return {};
  return { tools: JSON.parse(given), tool_choice, parallel_tool_calls };
}

/** @param {string} text */
function linesOf(text) {
  return text.split("\n").filter((line) => line !== "");
}

/** The error in the value of a field; empty: none. @param {Field} field @param {Record<string, any>} values */
export function problemWith(field, values) {
  const value = values[field.name];
  const wanted = FORMAT_FIELDS[values.format] === field.name;
  if (wanted && value.trim() === "") return "This format needs a value here.";
  if (field.kind === "json" && value.trim() !== "") return problemWithJson(field.name, value);
  if (field.kind !== "number" && field.kind !== "slider") return "";
  const range = `A number from ${field.min} to ${field.max}${field.step === 1 ? ", whole" : ""}.`;
  if (value === "") return field.required ? range : "";
  const whole = field.step !== 1 || Number.isInteger(value);
  return Number.isFinite(value) && value >= field.min && value <= field.max && whole ? "" : range;
}

/** @param {string} name @param {string} text */
function problemWithJson(name, text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}.`;
  }
  if (name === "tools") {
    const good = Array.isArray(value) && value.every((tool) => typeof tool?.function?.name === "string");
    return good ? "" : 'A list of objects with "type": "function" and a "function" that has a "name".';
  }
  return typeof value === "object" && value !== null && !Array.isArray(value) ? "" : "A schema is a JSON object.";
}
