// Text onto the page while it arrives: prose and fenced code, one span per token. Nothing is ever read as markup.

import { el } from "./dom.js";

/** @typedef {import("./tokens.js").Piece} Piece @typedef {import("./tokens.js").Token} Token */

const FENCE = /^ {0,3}```([\w+#.-]*)[ \t]*\n?$/;
const MAY_BECOME_FENCE = /^ {0,3}(`{0,3}|```[\w+#.-]*[ \t]*)$/;
const SURPRISE = [0.05, 0.2, 0.5]; // upper bounds of the tinted classes; likelier tokens stay plain

/** @type {WeakMap<Element, Token>} */
const tokenOfSpan = new WeakMap();

/** @param {Element} span @returns {Token | undefined} */
export function tokenOf(span) {
  return tokenOfSpan.get(span);
}

/** Appends pieces to one answer's body. A line that may yet become a code fence is held until it is decided. */
export class Painter {
  /** @param {HTMLElement} body */
  constructor(body) {
    this.body = body;
    /** @type {HTMLElement | null} */
    this.target = null;
    this.inCode = false;
    this.atLineStart = true;
    /** @type {Piece[]} */
    this.held = [];
  }

  /** @param {Piece[]} pieces */
  add(pieces) {
    for (const { text, token } of pieces) {
      for (const part of text.match(/[^\n]*\n|[^\n]+/g) ?? []) this.#part({ text: part, token });
    }
  }

  /** The answer is over: what was held is shown. */
  finish() {
    const line = this.held.map((piece) => piece.text).join("");
    if (FENCE.test(line) && this.inCode) this.#fence(line);
    else this.#release();
  }

  /** @param {Piece} piece */
  #part(piece) {
    if (!this.atLineStart) {
      this.#put(piece);
      return;
    }
    this.held.push(piece);
    const line = this.held.map((each) => each.text).join("");
    if (FENCE.test(line) && line.endsWith("\n")) this.#fence(line);
    else if (!MAY_BECOME_FENCE.test(line)) this.#release();
  }

  /** @param {string} line */
  #fence(line) {
    this.held = [];
    this.atLineStart = true;
    this.target = null;
    this.inCode = !this.inCode;
    if (!this.inCode) return;
    const language = FENCE.exec(line)?.[1];
    const code = el("code");
    const block = el("pre", { attributes: { tabindex: "0", "aria-label": language ? `${language} code` : "code" } }, code);
    if (language) block.dataset.language = language;
    this.body.append(block);
    this.target = code;
  }

  #release() {
    const pieces = this.held;
    this.held = [];
    for (const piece of pieces) this.#put(piece);
  }

  /** @param {Piece} piece */
  #put(piece) {
    this.atLineStart = piece.text.endsWith("\n");
    if (this.target === null) {
      if (piece.text === "\n") return; // the empty lines around code are its margins
      this.target = el("div", { class: "prose" });
      this.body.append(this.target);
    }
    this.target.append(piece.token ? span(piece.text, piece.token) : piece.text);
  }
}

/** @param {string} text @param {Token} token */
function span(text, token) {
  const level = SURPRISE.findIndex((bound) => token.probability < bound);
  const element = el("span", { class: level < 0 ? "token" : `token surprise-${level}`, text });
  tokenOfSpan.set(element, token);
  return element;
}
