// Building elements and writing numbers. Text always goes in as text, never as markup.

/**
 * @typedef {object} ElementOptions
 * @property {string} [class]
 * @property {string} [text]
 * @property {Record<string, string>} [attributes]
 * @property {Record<string, (event: Event) => void>} [on]
 */

/**
 * @param {string} tag
 * @param {ElementOptions} [options]
 * @param {...(Node | string | (Node | string)[])} children a long list goes in as one array: arguments are limited
 * @returns {HTMLElement}
 */
export function el(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  if (options.class) element.className = options.class;
  if (options.text !== undefined) element.textContent = options.text;
  for (const [name, value] of Object.entries(options.attributes ?? {})) element.setAttribute(name, value);
  for (const [name, handler] of Object.entries(options.on ?? {})) element.addEventListener(name, handler);
  for (const child of children.flat()) element.append(child);
  return element;
}

/** @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element #${id}`);
  return element;
}

/** A duration as short text. @param {number} milliseconds */
export function duration(milliseconds) {
  if (milliseconds < 1) return "< 1 ms";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  if (milliseconds < 10_000) return `${(milliseconds / 1000).toFixed(2)} s`;
  return `${(milliseconds / 1000).toFixed(1)} s`;
}

/** @param {number} value */
export function rate(value) {
  return value < 10 ? value.toFixed(1) : String(Math.round(value));
}

/** @param {number} probability */
export function percent(probability) {
  const value = probability * 100;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value < 10 || (value > 99 && value < 100) ? value.toFixed(1) : Math.round(value)} %`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function plural(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/** A request's name as the client gave it, without the suffix that the server adds to make it unique. @param {string} id */
export function shortName(id) {
  const given = id.replace(/^(chatcmpl|cmpl)-/, "").replace(/~[0-9a-f]+/, "");
  return given.length > 20 ? `${given.slice(0, 10)}…${given.slice(-4)}` : given;
}

/** Makes spaces and line ends visible, so that every token can be seen. @param {string} text */
export function visible(text) {
  if (text === "") return "(nothing)";
  return text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "→");
}
