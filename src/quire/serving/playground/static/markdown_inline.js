// Inline Markdown: emphasis, code spans, links and line breaks. Every text keeps its place in the source, so that a
// token of the answer can be found again on the page. HTML is text.

import { JoinedLines } from "./markdown_source.js";

/**
 * @typedef {import("./markdown_source.js").Line} Line
 * @typedef {import("./markdown_source.js").TextNode} TextNode
 * @typedef {{type: "break"}} BreakNode
 * @typedef {{type: "strong" | "em" | "del" | "code" | "link", children: InlineNode[], href?: string, depth: number}} SpanNode
 * @typedef {TextNode | BreakNode | SpanNode} InlineNode
 * @typedef {{slot: number, char: string, count: number, canClose: boolean}} Delimiter
 */

const ESCAPED = /\\[!-/:-@[-`{-~]/y;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/iy;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const LINE_BREAK = /<br[ \t]*\/?>/iy; // models write it inside table cells
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const BARE_LINK = /https?:\/\/[^\s<>"'`|\\]+/iy;
const TARGET = /\([ \t]*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:[ \t]+(?:"[^"\n]*"|'[^'\n]*'))?[ \t]*\)/y;
const PLAIN = /[^\\&<`*_~[\]!h\n]+|[^\n]/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPACE = /\s/;
const MOST_NESTED = 24;
const MOST_LOOKED_BACK = 1000;

/** Whether a link may open this address: web and mail addresses only, no scripts. @param {string} href */
function isSafe(href) {
  return /^(?:https?:\/\/|mailto:)[^\s\u0000-\u001f\u007f]+$/i.test(href);
}

/** @param {Line[]} lines @returns {InlineNode[]} */
export function parseInline(lines) {
  return new InlineParser(lines).parse();
}

class InlineParser {
  #position = 0;
  /** @type {InlineNode[]} */
  #out = [];
  /** @type {Delimiter[]} delimiters that may still open emphasis, oldest first */
  #openers = [];
  /** @type {number[]} places in `#out` of "[" that may still open a link */
  #brackets = [];
  /** @type {Set<number>} lengths of backtick runs that nothing closes from here on */
  #unclosedCode = new Set();
  /** @type {TextNode | null} the last plain text, which more of it may join */
  #plain = null;

  /** @param {Line[]} lines */
  constructor(lines) {
    this.source = new JoinedLines(lines);
    this.text = this.source.text;
  }

  parse() {
    while (this.#position < this.text.length) this.#next();
    return this.#out;
  }

  #next() {
    const char = this.text[this.#position];
    if (char === "\n") return this.#newline();
    if (char === "\\" && this.#escape()) return undefined;
    if (char === "&" && this.#entity()) return undefined;
    if (char === "<" && this.#angle()) return undefined;
    if (char === "`" && this.#code()) return undefined;
    if (char === "*" || char === "_" || char === "~") return this.#delimiter(char);
    if (char === "[") return this.#bracket(1);
    if (char === "!" && this.text[this.#position + 1] === "[") return this.#bracket(2); // an image is shown as a link
    if (char === "]" && this.#closeLink()) return undefined;
    if (char === "h" && this.#bareLink()) return undefined;
    const run = char === "`" ? this.#run("`") : match(PLAIN, this.text, this.#position)[0].length;
    return this.#take(run);
  }

  /** Appends so many characters as plain text. @param {number} length */
  #take(length) {
    const leaf = this.source.leaf(this.#position, this.#position + length);
    const last = this.#out.at(-1);
    this.#position += length;
    if (last && last === this.#plain && last.at + last.length === leaf.at) {
      last.text += leaf.text;
      last.length += leaf.length;
    } else {
      this.#out.push(leaf);
      this.#plain = leaf;
    }
  }

  #newline() {
    const last = this.#out.at(-1);
    if (last?.type === "text" && last.text.length === last.length) {
      last.text = last.text.trimEnd();
      last.length = last.text.length;
    }
    this.#out.push({ type: "break" });
    this.#position += 1;
    while (this.text[this.#position] === " ") this.#position += 1;
  }

  #escape() {
    const found = match(ESCAPED, this.text, this.#position);
    if (!found) return false;
    return this.#push({ type: "text", text: found[0][1], at: this.source.offset(this.#position), length: 2 }, 2);
  }

  #entity() {
    const found = match(ENTITY, this.text, this.#position);
    if (!found) return false;
    const code = found[1] ? Number(found[1]) : Number.parseInt(found[2], 16);
    const isCharacter = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
    const text = found[3] ? NAMED[found[3].toLowerCase()] : isCharacter ? String.fromCodePoint(code) : "\ufffd";
    const { length } = found[0];
    return this.#push({ type: "text", text, at: this.source.offset(this.#position), length }, length);
  }

  #angle() {
    const lineBreak = match(LINE_BREAK, this.text, this.#position);
    if (lineBreak) return this.#push({ type: "break" }, lineBreak[0].length);
    const link = match(ANGLE_LINK, this.text, this.#position);
    if (!link || !isSafe(link[1])) return false;
    return this.#link(link[1], this.#position + 1, link[0].length);
  }

  #bareLink() {
    if (/\w/.test(this.text[this.#position - 1] ?? "")) return false;
    const found = match(BARE_LINK, this.text, this.#position);
    if (!found) return false;
    let address = found[0].slice(0, 2048);
    while (/[.,;:!?*_~\])]$/.test(address)) {
      if (address.endsWith(")") && count(address, "(") >= count(address, ")")) break;
      address = address.slice(0, -1);
    }
    if (!isSafe(address)) return false;
    return this.#link(address, this.#position, address.length);
  }

  /** @param {string} href the address, which is also what is shown @param {number} from @param {number} length */
  #link(href, from, length) {
    const children = [this.source.leaf(from, from + href.length)];
    return this.#push({ type: "link", href, children, depth: 1 }, length);
  }

  /** Appends a node for so many characters. @param {InlineNode} node @param {number} length */
  #push(node, length) {
    this.#out.push(node);
    this.#position += length;
    return true;
  }

  #code() {
    const ticks = this.#run("`");
    const end = this.#unclosedCode.has(ticks) ? -1 : this.#closingTicks(this.#position + ticks, ticks);
    if (end < 0) {
      this.#unclosedCode.add(ticks);
      return false;
    }
    let from = this.#position + ticks;
    let to = end;
    const inner = this.text.slice(from, to);
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "") {
      from += 1;
      to -= 1;
    }
    const children = [];
    for (let start = from; start < to; ) {
      const stop = this.text.indexOf("\n", start);
      const end = stop < 0 || stop > to ? to : stop;
      if (end > start) children.push(this.source.leaf(start, end));
      if (end < to) children.push({ type: "text", text: " ", at: this.source.offset(end), length: 1 });
      start = end + 1;
    }
    return this.#push({ type: "code", children, depth: 1 }, end + ticks - this.#position);
  }

  /** Index of the next run of exactly so many backticks; -1: none. @param {number} from @param {number} ticks */
  #closingTicks(from, ticks) {
    for (let at = this.text.indexOf("`", from); at >= 0; at = this.text.indexOf("`", at)) {
      let end = at;
      while (this.text[end] === "`") end += 1;
      if (end - at === ticks) return at;
      at = end;
    }
    return -1;
  }

  /** The length of the run of a character that begins here. @param {string} char */
  #run(char) {
    let end = this.#position;
    while (this.text[end] === char) end += 1;
    return end - this.#position;
  }

  /** @param {string} char */
  #delimiter(char) {
    const length = this.#run(char);
    const before = this.text[this.#position - 1] ?? " ";
    const after = this.text[this.#position + length] ?? " ";
    const leftFlanking = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const rightFlanking = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const between = char === "_" && leftFlanking && rightFlanking; // an underscore inside a word is a letter
    const canOpen = leftFlanking && (!between || PUNCTUATION.test(before));
    const canClose = rightFlanking && (!between || PUNCTUATION.test(after));
    if (char === "~" && length !== 2) return this.#take(length);
    let left = length;
    if (canClose) left = this.#close(char, left, canOpen);
    if (left === 0) return undefined;
    this.#out.push(this.source.leaf(this.#position, this.#position + left));
    this.#position += left;
    if (canOpen) this.#openers.push({ slot: this.#out.length - 1, char, count: left, canClose });
    return undefined;
  }

  /** Closes emphasis with up to `left` delimiters. Returns how many are left. @param {string} char @param {number} left @param {boolean} canOpen */
  #close(char, left, canOpen) {
    while (left > 0) {
      const found = this.#findOpener(char, left, canOpen);
      if (found < 0) return left;
      const opener = this.#openers[found];
      const used = char === "~" || (left >= 2 && opener.count >= 2) ? 2 : 1;
      const depth = this.#depthAfter(opener.slot);
      if (depth > MOST_NESTED) {
        this.#openers.length = 0; // earlier openers would be nested even deeper
        return left;
      }
      const children = this.#out.splice(opener.slot + 1);
      this.#openers.length = found + 1;
      dropAfter(this.#brackets, (slot) => slot > opener.slot);
      const type = char === "~" ? "del" : used === 2 ? "strong" : "em";
      this.#shorten(opener, used);
      this.#out.push({ type, children, depth });
      this.#position += used;
      left -= used;
    }
    return left;
  }

  /** The depth of a span around everything after a slot. @param {number} slot */
  #depthAfter(slot) {
    let depth = 1;
    for (let i = slot + 1; i < this.#out.length; i++) depth = Math.max(depth, 1 + (this.#out[i].depth ?? 0));
    return depth;
  }

  /** @param {string} char @param {number} left @param {boolean} canOpen @returns {number} -1: none */
  #findOpener(char, left, canOpen) {
    const floor = Math.max(0, this.#openers.length - MOST_LOOKED_BACK);
    for (let i = this.#openers.length - 1; i >= floor; i--) {
      const opener = this.#openers[i];
      if (opener.char !== char) continue;
      const either = opener.canClose || canOpen; // the rule of three: *a**b* has no emphasis inside
      if (either && (opener.count + left) % 3 === 0 && !(opener.count % 3 === 0 && left % 3 === 0)) continue;
      return i;
    }
    return -1;
  }

  /** Removes delimiters from an opener, and the opener when none is left. @param {Delimiter} opener @param {number} used */
  #shorten(opener, used) {
    const node = /** @type {TextNode} */ (this.#out[opener.slot]);
    opener.count -= used;
    node.text = node.text.slice(used);
    node.length -= used;
    if (opener.count > 0) return;
    this.#openers.pop();
    this.#out.pop();
  }

  /** @param {number} length */
  #bracket(length) {
    this.#plain = null;
    this.#take(length);
    this.#plain = null;
    this.#brackets.push(this.#out.length - 1);
  }

  /** Whether "]" ended a link to a safe address. */
  #closeLink() {
    const slot = this.#brackets.pop();
    if (slot === undefined || slot >= this.#out.length) return false;
    const target = match(TARGET, this.text, this.#position + 1);
    const href = target?.[1] ?? target?.[2] ?? "";
    if (!target || !isSafe(href)) return false;
    const depth = this.#depthAfter(slot);
    if (depth > MOST_NESTED) return false;
    const children = this.#out.splice(slot + 1);
    dropAfter(this.#openers, (opener) => opener.slot > slot);
    this.#out[slot] = { type: "link", href, children, depth };
    this.#position += 1 + target[0].length;
    return true;
  }
}

/** @param {RegExp} pattern sticky @param {string} text @param {number} at */
function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** @template T @param {T[]} stack @param {(each: T) => boolean} condition */
function dropAfter(stack, condition) {
  while (stack.length > 0 && condition(stack[stack.length - 1])) stack.pop();
}

/** @param {string} text @param {string} char */
function count(text, char) {
  return text.split(char).length - 1;
}
