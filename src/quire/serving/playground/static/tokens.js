// Which part of an answer's text came from which token, and how likely that token was.

/**
 * @typedef {{text: string, probability: number}} Alternative
 * @typedef {{text: string, probability: number, alternatives: Alternative[]}} Token
 * @typedef {{text: string, token: Token | null}} Piece a part of the text; no token where probabilities were not asked for
 */

const MOST_PENDING = 256; // tokens whose text the server still holds back, e.g. half a stop string

/** Pairs the text of one answer with its tokens, though either may arrive before the other. */
export class Aligner {
  /** @type {Token[]} */
  #pending = [];
  #decoder = new TextDecoder();

  /**
   * @param {string} content new text; all of it is in the pieces returned
   * @param {any[]} entries new entries of `logprobs.content`
   * @returns {Piece[]}
   */
  take(content, entries) {
    for (const entry of entries) {
      const token = this.#read(entry);
      if (token.text !== "") this.#pending.push(token);
    }
    const pieces = [];
    let rest = content;
    while (rest !== "") {
      const index = this.#pending.findIndex((token) => rest.startsWith(token.text));
      if (index < 0) {
        pieces.push({ text: rest, token: null });
        break;
      }
      const token = this.#pending[index];
      this.#pending.splice(0, index + 1); // those before it gave no text: special tokens, a cut stop string
      pieces.push({ text: token.text, token });
      rest = rest.slice(token.text.length);
    }
    this.#pending = this.#pending.slice(-MOST_PENDING);
    return pieces;
  }

  /** The text of a token that ends inside a character comes with the token that completes it. @param {any} entry @returns {Token} */
  #read(entry) {
    const text = entry.bytes ? this.#decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token;
    const alternatives = (entry.top_logprobs ?? []).map((other) => ({
      text: other.token,
      probability: Math.exp(other.logprob),
    }));
    return { text, probability: Math.exp(entry.logprob), alternatives };
  }
}
