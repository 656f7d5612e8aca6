// Shows a Markdown text as elements while it grows. Text only ever becomes text nodes: no markup of a model is read as HTML.

import { el } from "./dom.js";
import { highlight } from "./highlight.js";
import { parseBlocks, splitLines } from "./markdown_blocks.js";
import { parseInline } from "./markdown_inline.js";

/** @typedef {import("./markdown_inline.js").InlineNode} InlineNode @typedef {import("./markdown_blocks.js").Block} Block */
/** @typedef {import("./tokens.js").PlacedToken} PlacedToken @typedef {import("./tokens.js").Token} Token */

const UNLIKELY = [0.05, 0.2, 0.5]; // upper bounds of the tinted classes; more likely tokens are not tinted
const TAGS = { strong: "strong", em: "em", del: "del", code: "code" };

/** @type {WeakMap<Element, PlacedToken>} */
const tokenOfSpan = new WeakMap();

/** @param {Element} span @returns {PlacedToken | undefined} */
export function tokenOf(span) {
  return tokenOfSpan.get(span);
}

/** Renders one text into an element. A block whose source has not changed keeps its elements. */
export class MarkdownView {
  /** @type {{source: string, element: HTMLElement}[]} */
  #blocks = [];

  /** @param {HTMLElement} body @param {string | null} [language] of a text that is code as a whole; null: it is Markdown */
  constructor(body, language = null) {
    this.body = body;
    this.language = language;
  }

  /** @param {string} text the whole text so far @param {PlacedToken[]} [tokens] where probabilities are known, in order */
  update(text, tokens = []) {
    const blocks = this.language === null || text === "" ? parseBlocks(text) : [codeBlock(text, this.language)];
    const renderer = new Renderer(text, tokens);
    blocks.forEach((block, i) => {
      const source = text.slice(block.from, block.to);
      const shown = this.#blocks[i];
      if (shown?.source === source) return;
      const element = renderer.block(block);
      if (shown) shown.element.replaceWith(element);
      else this.body.append(element);
      this.#blocks[i] = { source, element };
    });
    for (const { element } of this.#blocks.splice(blocks.length)) element.remove();
  }
}

/** @param {string} text @param {string} language @returns {Block} */
function codeBlock(text, language) {
  return { type: "code", language, lines: splitLines(text), from: 0, to: text.length };
}

/** Makes elements of blocks, with a span for each token that has a probability. */
class Renderer {
  /** @param {string} source @param {PlacedToken[]} tokens */
  constructor(source, tokens) {
    this.source = source;
    this.tokens = tokens;
  }

  /** @param {Block} block @returns {HTMLElement} */
  block(block) {
    switch (block.type) {
      case "heading":
        return el(`h${Math.min(block.level + 2, 6)}`, {}, this.#inline(block.lines)); // h1 and h2 are the page's own
      case "code":
        return this.#code(block);
      case "quote":
        return el("blockquote", {}, block.blocks.map((each) => this.block(each)));
      case "list":
        return this.#list(block);
      case "table":
        return this.#table(block);
      case "rule":
        return el("hr");
      default:
        return el("p", {}, this.#inline(block.lines));
    }
  }

  /** @param {import("./markdown_blocks.js").Code} block */
  #code({ language, lines }) {
    const text = lines.map((line) => line.text).join("\n");
    const withTokens = () => lines.flatMap((line, i) => [...this.#leaf(line.text, line.at, line.text.length), i + 1 < lines.length ? "\n" : ""]);
    const code = el("code", {}, this.tokens.length === 0 ? highlight(text, language) : withTokens());
    const copy = el("button", { class: "link copy-code", text: "Copy", attributes: { type: "button", "aria-label": "Copy code" } });
    const attributes = { tabindex: "0", role: "group", "aria-label": language ? `${language} code` : "Code" };
    const head = el("div", { class: "code-head" }, el("span", { text: language || "code" }), copy);
    return el("div", { class: "code-block" }, head, el("pre", { attributes }, code));
  }

  /** @param {import("./markdown_blocks.js").List} list */
  #list(list) {
    const items = list.items.map(({ blocks, done }) => {
      const item = el("li", { class: done === null ? "" : "task" });
      if (done !== null) item.append(checkbox(done));
      for (const block of blocks) {
        if (block.type === "paragraph" && !list.loose) item.append(el("span", { class: "item-text" }, this.#inline(block.lines)));
        else item.append(this.block(block));
      }
      return item;
    });
    const attributes = list.ordered && list.start !== 1 ? { start: String(list.start) } : {};
    return el(list.ordered ? "ol" : "ul", { class: list.loose ? "loose" : "", attributes }, items);
  }

  /** @param {import("./markdown_blocks.js").Table} table */
  #table({ head, alignments, rows }) {
    const cell = (tag) => (line, i) => {
      const scope = tag === "th" ? { scope: "col" } : {};
      return el(tag, { class: alignments[i], attributes: scope }, this.#inline([line]));
    };
    const body = rows.map((row) => el("tr", {}, ...row.map(cell("td"))));
    const parts = [el("thead", {}, el("tr", {}, ...head.map(cell("th")))), el("tbody", {}, body)];
    const attributes = { tabindex: "0", role: "group", "aria-label": "Table" };
    return el("div", { class: "table-scroll", attributes }, el("table", {}, ...parts));
  }

  /** @param {import("./markdown_source.js").Line[]} lines */
  #inline(lines) {
    return parseInline(lines).flatMap((node) => this.#node(node));
  }

  /** @param {InlineNode} node @returns {(Node | string)[]} */
  #node(node) {
    if (node.type === "text") return this.#leaf(node.text, node.at, node.length);
    if (node.type === "break") return [el("br")];
    const children = node.children.flatMap((child) => this.#node(child));
    if (node.type !== "link") return [el(TAGS[node.type], {}, children)];
    return [el("a", { attributes: { href: node.href, target: "_blank", rel: "noopener noreferrer" } }, children)];
  }

  /**
   * A text, cut where its tokens meet.
   * @param {string} text @param {number} at its offset in the source @param {number} length of it in the source
   */
  #leaf(text, at, length) {
    const first = firstEndingAfter(this.tokens, at);
    if (first === this.tokens.length || this.tokens[first].at >= at + length) return text === "" ? [] : [text];
    if (text.length !== length) return [span(text, this.tokens[first])]; // one character, written as several
    const parts = [];
    let position = at;
    for (let i = first; position < at + length; i++) {
      const token = this.tokens[i];
      const until = token ? Math.min(token.at, at + length) : at + length;
      if (until > position) parts.push(text.slice(position - at, until - at));
      if (!token || token.at >= at + length) break;
      const end = Math.min(token.end, at + length);
      parts.push(span(text.slice(Math.max(token.at, at) - at, end - at), token));
      position = end;
    }
    return parts;
  }
}

/** @param {PlacedToken[]} tokens in order @param {number} offset @returns {number} the index of the first that ends after the offset */
function firstEndingAfter(tokens, offset) {
  let low = 0;
  let high = tokens.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle].end > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** @param {string} text @param {PlacedToken} placed */
function span(text, placed) {
  const level = UNLIKELY.findIndex((bound) => placed.token.probability < bound);
  const element = el("span", { class: level < 0 ? "token" : `token unlikely-${level}`, text });
  tokenOfSpan.set(element, placed);
  return element;
}

/** @param {boolean} done */
function checkbox(done) {
  const input = /** @type {HTMLInputElement} */ (
    el("input", { attributes: { type: "checkbox", disabled: "", "aria-label": done ? "Done" : "Not done" } })
  );
  input.checked = done;
  return input;
}

/** Makes the copy buttons of code blocks inside an element work. @param {HTMLElement} root */
export function watchCodeCopies(root) {
  root.addEventListener("click", async (event) => {
    const button = /** @type {HTMLElement} */ (event.target).closest?.(".copy-code");
    if (!button) return;
    const copied = await copyText(button.closest(".code-block").querySelector("code").textContent);
    button.textContent = copied ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

/** Whether the text is on the clipboard now. @param {string} text */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
