// The blocks of a Markdown text: headings, paragraphs, lists, tables, quotes, code and rules. Reads CommonMark as models
// write it: an indented line is never code, and a line ends where the model ended it.

/**
 * @typedef {import("./markdown_source.js").Line} Line
 * @typedef {{type: "heading", level: number, lines: Line[]}} Heading
 * @typedef {{type: "paragraph", lines: Line[]}} Paragraph
 * @typedef {{type: "code", language: string, lines: Line[]}} Code
 * @typedef {{type: "quote", blocks: Block[]}} Quote
 * @typedef {{blocks: Block[], done: boolean | null}} Item `done` of a task, null for an item that is none
 * @typedef {{type: "list", ordered: boolean, start: number, loose: boolean, items: Item[]}} List
 * @typedef {{type: "table", head: Line[], alignments: string[], rows: Line[][]}} Table
 * @typedef {{type: "rule"}} Rule
 * @typedef {(Heading | Paragraph | Code | Quote | List | Table | Rule) & {from?: number, to?: number}} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)(?:([-*+])|(\d{1,9})([.)]))(?: {1,4}(?=\S)|[ \t]|$)/;
const TABLE_RULE = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const TASK = /^\[([ xX])\] /;
const MOST_NESTED = 12;
const MOST_COLUMNS = 64;

/** @param {string} text @returns {Block[]} each with its place in the text, `from` and `to` */
export function parseBlocks(text) {
  const lines = splitLines(text).map((line) => ({ text: line.text.replace(/\t/g, " "), at: line.at }));
  return new BlockParser(text, lines, 0).parse();
}

/** @param {string} text @returns {Line[]} */
export function splitLines(text) {
  let at = 0;
  return text.split("\n").map((line) => {
    at += line.length + 1;
    return { text: line, at: at - line.length - 1 };
  });
}

class BlockParser {
  #next = 0;

  /** @param {string} source the whole text @param {Line[]} lines with spaces for tabs @param {number} depth */
  constructor(source, lines, depth) {
    this.source = source;
    this.lines = lines;
    this.depth = depth;
  }

  /** @returns {Block[]} */
  parse() {
    const blocks = [];
    while (this.#next < this.lines.length) {
      if (isBlank(this.lines[this.#next].text)) {
        this.#next += 1;
        continue;
      }
      const from = this.lines[this.#next].at;
      const block = this.#block();
      const last = this.lines[this.#next - 1];
      blocks.push({ ...block, from, to: last.at + last.text.length });
    }
    return blocks;
  }

  /** @returns {Block} */
  #block() {
    const { text } = this.lines[this.#next];
    const fence = FENCE.exec(text);
    if (fence) return this.#code(fence);
    const heading = HEADING.exec(text);
    if (heading) return this.#heading(heading);
    if (RULE.test(text)) {
      this.#next += 1;
      return { type: "rule" };
    }
    if (this.depth < MOST_NESTED && QUOTE.test(text)) return this.#quote();
    if (this.depth < MOST_NESTED && MARKER.test(text)) return this.#list();
    if (this.#startsTable(this.#next)) return this.#table();
    return this.#paragraph();
  }

  /** @param {RegExpExecArray} fence @returns {Code} */
  #code(fence) {
    const indent = /^ */.exec(fence[0])[0].length;
    const closing = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
    const lines = [];
    this.#next += 1;
    while (this.#next < this.lines.length && !closing.test(this.lines[this.#next].text)) {
      const { text, at } = strip(this.lines[this.#next], indent);
      lines.push({ text: this.source.slice(at, at + text.length), at }); // code keeps its tabs
      this.#next += 1;
    }
    this.#next = Math.min(this.#next + 1, this.lines.length); // an unclosed fence goes to the end: it is still being written
    return { type: "code", language: fence[2].slice(0, 32), lines };
  }

  /** @param {RegExpExecArray} found @returns {Heading} */
  #heading(found) {
    const line = strip(cut(this.lines[this.#next], found[0].length), Infinity);
    this.#next += 1;
    let end = line.text.trimEnd().length;
    const whole = end;
    while (line.text[end - 1] === "#") end -= 1;
    if (end > 0 && line.text[end - 1] !== " ") end = whole; // the "#" of "C#" is part of the heading
    return { type: "heading", level: found[1].length, lines: [{ text: line.text.slice(0, end).trimEnd(), at: line.at }] };
  }

  /** @returns {Quote} */
  #quote() {
    const inside = [];
    for (; this.#next < this.lines.length; this.#next++) {
      const found = QUOTE.exec(this.lines[this.#next].text);
      if (!found) break;
      inside.push(cut(this.lines[this.#next], found[0].length));
    }
    return { type: "quote", blocks: new BlockParser(this.source, inside, this.depth + 1).parse() };
  }

  /** @returns {List} */
  #list() {
    const first = MARKER.exec(this.lines[this.#next].text);
    const kind = first[2] ?? first[4];
    const items = [];
    let loose = false;
    let afterBlank = false;
    while (this.#next < this.lines.length) {
      const marker = MARKER.exec(this.lines[this.#next].text);
      if (!marker || (marker[2] ?? marker[4]) !== kind || RULE.test(this.lines[this.#next].text)) break;
      loose ||= afterBlank;
      const { lines, blankInside, blankAfter } = this.#itemLines(marker);
      loose ||= blankInside;
      afterBlank = blankAfter;
      items.push(this.#item(lines));
    }
    return { type: "list", ordered: first[3] !== undefined, start: Number(first[3] ?? 1), loose, items };
  }

  /** The lines of one item, without marker and indent. @param {RegExpExecArray} marker */
  #itemLines(marker) {
    const outer = marker[1].length;
    const offset = marker[0].length;
    const lines = [cut(this.lines[this.#next], offset)];
    let blanks = 0;
    let blankInside = false;
    this.#next += 1;
    for (; this.#next < this.lines.length; this.#next++) {
      const line = this.lines[this.#next];
      const indent = /^ */.exec(line.text)[0].length;
      if (isBlank(line.text)) {
        blanks += 1;
        continue;
      }
      const nested = indent >= offset || (indent >= outer + 2 && MARKER.test(line.text)); // under "10." models indent by two or three
      const continues = blanks === 0 && !MARKER.test(line.text) && !startsBlock(line.text);
      if (!nested && !continues) break;
      if (blanks > 0) {
        lines.push({ text: "", at: line.at });
        blankInside = true;
        blanks = 0;
      }
      lines.push(strip(line, offset));
    }
    return { lines, blankInside, blankAfter: blanks > 0 };
  }

  /** @param {Line[]} lines @returns {Item} */
  #item(lines) {
    const task = TASK.exec(lines[0].text);
    if (task) lines[0] = cut(lines[0], task[0].length);
    return { blocks: new BlockParser(this.source, lines, this.depth + 1).parse(), done: task ? task[1] !== " " : null };
  }

  /** @param {number} index */
  #startsTable(index) {
    const head = this.lines[index].text;
    const rule = this.lines[index + 1]?.text;
    if (rule === undefined || !head.includes("|") || !rule.includes("-") || !TABLE_RULE.test(rule)) return false;
    const columns = cells({ text: rule, at: 0 }).length;
    return columns === cells({ text: head, at: 0 }).length && columns <= MOST_COLUMNS;
  }

  /** @returns {Table} */
  #table() {
    const head = cells(this.lines[this.#next]);
    const alignments = cells(this.lines[this.#next + 1]).map(({ text }) => {
      if (text.endsWith(":")) return text.startsWith(":") ? "center" : "right";
      return "left";
    });
    const rows = [];
    this.#next += 2;
    for (; this.#next < this.lines.length; this.#next++) {
      const line = this.lines[this.#next];
      if (isBlank(line.text) || !line.text.includes("|")) break;
      const row = cells(line).slice(0, head.length);
      while (row.length < head.length) row.push({ text: "", at: line.at + line.text.length });
      rows.push(row);
    }
    return { type: "table", head, alignments, rows };
  }

  /** @returns {Paragraph} */
  #paragraph() {
    const lines = [strip(this.lines[this.#next], Infinity)];
    this.#next += 1;
    for (; this.#next < this.lines.length; this.#next++) {
      const { text } = this.lines[this.#next];
      const marker = this.depth < MOST_NESTED ? MARKER.exec(text) : null;
      const startsList = marker && marker[0] !== text && (marker[3] === undefined || marker[3] === "1");
      const startsQuote = this.depth < MOST_NESTED && QUOTE.test(text);
      if (isBlank(text) || startsList || startsQuote || startsBlock(text) || this.#startsTable(this.#next)) break;
      lines.push(strip(this.lines[this.#next], Infinity));
    }
    return { type: "paragraph", lines };
  }
}

/** Whether a line begins a block that ends a paragraph, lists, quotes and tables aside. @param {string} text */
function startsBlock(text) {
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text);
}

/** @param {string} text */
function isBlank(text) {
  return text.trim() === "";
}

/** A line without its first characters. @param {Line} line @param {number} length @returns {Line} */
function cut(line, length) {
  return { text: line.text.slice(length), at: line.at + length };
}

/** A line without up to so many of its first spaces. @param {Line} line @param {number} most @returns {Line} */
function strip(line, most) {
  return cut(line, Math.min(/^ */.exec(line.text)[0].length, most));
}

/** The cells of a row, trimmed. A "|" after a backslash, or inside a code span, is text. @param {Line} line @returns {Line[]} */
function cells(line) {
  const { text } = line;
  const bounds = [];
  let inCode = false;
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "`") inCode = !inCode && text.includes("`", i + 1);
    else if (text[i] === "|" && !inCode) bounds.push(i);
  }
  const found = [...bounds, text.length].map((end, i) => cut({ text: text.slice(0, end), at: line.at }, i === 0 ? 0 : bounds[i - 1] + 1));
  if (isBlank(found[0].text)) found.shift(); // the "|" at the ends of a row belong to no cell
  if (found.length > 1 && isBlank(found.at(-1).text)) found.pop();
  return found.map((cell) => strip(cell, Infinity)).map((cell) => ({ text: cell.text.trimEnd(), at: cell.at }));
}
