// Maps the text of an answer to its tokens and their probabilities.

/**
 * @typedef {{text: string, probability: number}} Alternative
 * @typedef {{text: string, probability: number, alternatives: Alternative[], index: number}} Token `index` counts all tokens of the answer from 0
 * @typedef {{at: number, end: number, token: Token}} PlacedToken a token and its place in the answer's text
 */

const MOST_PENDING = 256; // tokens whose text the server still holds back, e.g. half a stop string

/** Pairs the text of one answer with its tokens, though either may arrive before the other. */
export class TokenAligner {
  /** @type {Token[]} */
  #pending = [];
  #decoder = new TextDecoder();
  #count = 0;

  /** @param {number} [length] characters of the answer that are there already and have no tokens */
  constructor(length = 0) {
    this.length = length;
  }

  /** @param {any[]} entries new entries of `logprobs.content` */
  addTokens(entries) {
    for (const entry of entries) {
      const token = this.#read(entry);
      if (token.text !== "") this.#pending.push(token);
    }
    this.#pending = this.#pending.slice(-MOST_PENDING);
  }

  /** Drops the tokens of reasoning, which is not part of the answer's text. @param {string} text */
  skip(text) {
    this.#match(text);
  }

  /** Places the tokens of new text. Text without tokens is only counted. @param {string} text @returns {PlacedToken[]} */
  addText(text) {
    const from = this.length;
    this.length += text.length;
    return this.#match(text).map(({ at, token }) => ({ at: from + at, end: from + at + token.text.length, token }));
  }

  /** @param {string} text @returns {{at: number, token: Token}[]} */
  #match(text) {
    const found = [];
    let at = 0;
    while (at < text.length) {
      const index = this.#pending.findIndex((token) => text.startsWith(token.text, at));
      if (index < 0) break;
      const token = this.#pending[index];
      this.#pending.splice(0, index + 1); // earlier tokens have no text: special tokens, a removed stop string
      found.push({ at, token });
      at += token.text.length;
    }
    return found;
  }

  /** The text of a token that ends inside a character comes with the token that completes it. @param {any} entry @returns {Token} */
  #read(entry) {
    const text = entry.bytes ? this.#decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token;
    const alternatives = (entry.top_logprobs ?? []).map((other) => ({
      text: other.token,
      probability: Math.exp(other.logprob),
    }));
    return { text, probability: Math.exp(entry.logprob), alternatives, index: this.#count++ };
  }
}
