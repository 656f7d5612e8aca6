// Lines of a Markdown text that belong together, with the place of each character in the whole text: a paragraph of a
// quote or a list item is cut out of lines that begin with ">" or spaces.

/**
 * @typedef {{text: string, at: number}} Line a line or the rest of one; `at` is the offset of its first character
 * @typedef {{type: "text", text: string, at: number, length: number}} TextNode `length` characters of the text, from `at`
 */

export class JoinedLines {
  /** @param {Line[]} lines */
  constructor(lines) {
    this.text = lines.map((line) => line.text).join("\n");
    this.offsets = lines.map((line) => line.at);
    /** @type {number[]} where each line begins in `text` */
    this.starts = [];
    let start = 0;
    for (const line of lines) {
      this.starts.push(start);
      start += line.text.length + 1;
    }
  }

  /** The offset in the whole text of a place in the joined lines. @param {number} position */
  offset(position) {
    let low = 0;
    let high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return this.offsets[low] + position - this.starts[low];
  }

  /** @param {number} from @param {number} to both in one line @returns {TextNode} */
  leaf(from, to) {
    return { type: "text", text: this.text.slice(from, to), at: this.offset(from), length: to - from };
  }
}
