// The request that the page sends, as a command or a program to paste elsewhere. A key is replaced by a variable name.

/** Parameters that the openai package knows by name; all others go into `extra_body`. */
const OPENAI = new Set(
  "model messages n max_tokens temperature top_p seed stop presence_penalty frequency_penalty logprobs top_logprobs response_format tools tool_choice parallel_tool_calls stream".split(" "),
);

/** For a POSIX shell. @param {URL} base of the API @param {object} body @param {boolean} withKey whether the server asks for a key */
export function curlSnippet(base, body, withKey) {
  const lines = [
    `curl ${quoted(new URL("v1/chat/completions", base).href)}`,
    `-H 'Content-Type: application/json'`,
    ...(withKey ? ['-H "Authorization: Bearer $QUIRE_API_KEY"'] : []),
    `-d ${quoted(JSON.stringify(body, null, 2))}`,
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

/** @param {string} text */
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** For the openai package. @param {URL} base @param {Record<string, any>} body @param {boolean} withKey */
export function pythonSnippet(base, body, withKey) {
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const given = known.map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  if (Object.keys(extra).length > 0) given.push(`    extra_body=${literal(extra, 1)},\n`);
  const key = withKey ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  return [
    ...(withKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(new URL("v1", base).href)}, api_key=${key})`,
    `completion = client.chat.completions.create(\n${given.join("")})`,
    "print(completion.choices[0].message.content)",
    "",
  ].join("\n");
}

/** A JSON value as a Python literal. @param {any} value @param {number} depth @returns {string} */
function literal(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const items = Array.isArray(value)
    ? value.map((each) => literal(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, depth + 1)}`);
  if (items.length === 0) return open + close;
  const indent = "    ".repeat(depth);
  return `${open}\n${items.map((item) => `${indent}    ${item},\n`).join("")}${indent}${close}`;
}
