// One conversation: a tree of turns. Editing a question or asking again adds a branch; the selected branches are what is
// shown and what is sent to the model.

/**
 * @typedef {{id: string, name: string, arguments: string}} ToolCall
 * @typedef {{requestId: string, choice: number}} AnswerSource the choice of a request that wrote an answer: the engine can fork it
 * @typedef {{text: string, finish: string | null, thoughts?: string, toolCalls?: ToolCall[], source?: AnswerSource}} Answer
 * @typedef {{id: string, parent: string | null}} Place
 * @typedef {Place & {role: "user", text: string}} UserTurn
 * @typedef {Place & {role: "tool", results: {id: string, name: string, content: string}[]}} ToolTurn
 * @typedef {object} ReplyFields
 * @property {"assistant"} role
 * @property {Answer[]} answers
 * @property {number} chosen the answer that the conversation continues with
 * @property {string} facts one line: tokens, speed, first token
 * @property {import("./request_log.js").LedgerEntry[]} ledger
 * @property {import("./errors.js").Problem | null} problem
 * @property {object | null} request its body without the messages
 * @typedef {Place & ReplyFields} Reply
 * @typedef {UserTurn | ToolTurn | Reply} Turn
 */

const ROOT = "root";
const MOST_TITLE = 60;

/** @param {Answer[]} answers @returns {ReplyFields} */
export function newReply(answers) {
  return { role: "assistant", answers, chosen: 0, facts: "", ledger: [], problem: null, request: null };
}

/** @returns {string} */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  /** @param {{id?: string, title?: string, updatedAt?: number, turns?: Turn[], selected?: Record<string, string>}} [data] */
  constructor(data = {}) {
    this.id = data.id ?? newId();
    /** The name that the user gave; empty: the first question is the name. */
    this.givenTitle = data.title ?? "";
    this.updatedAt = data.updatedAt ?? Date.now();
    /** @type {Turn[]} in the order they were made */
    this.turns = data.turns ?? [];
    /** @type {Record<string, string>} the selected child of each turn, by the turn's id */
    this.selected = data.selected ?? {};
  }

  get title() {
    if (this.givenTitle) return this.givenTitle;
    const first = this.path().find((turn) => turn.role === "user");
    const line = first?.text.trim().split("\n")[0] ?? "";
    return line.length > MOST_TITLE ? `${line.slice(0, MOST_TITLE - 1).trimEnd()}…` : line || "New chat";
  }

  /** The selected branch, from its first turn to its last. @returns {Turn[]} */
  path() {
    const path = [];
    for (let turn = this.#selectedChild(ROOT); turn; turn = this.#selectedChild(turn.id)) path.push(turn);
    return path;
  }

  /** The turns up to this one, in any branch. @param {Turn} last @returns {Turn[]} */
  pathTo(last) {
    const path = [];
    for (let turn = last; turn; turn = this.before(turn)) path.unshift(turn);
    return path;
  }

  /** @param {string} parent */
  #selectedChild(parent) {
    const children = this.turns.filter((turn) => (turn.parent ?? ROOT) === parent);
    return children.find((turn) => turn.id === this.selected[parent]) ?? children.at(-1) ?? null;
  }

  /** The alternative turns in the same place, in the order they were made. @param {Turn} turn */
  siblings(turn) {
    return this.turns.filter((each) => each.parent === turn.parent);
  }

  /** Adds a turn after another (null: as the first) and selects it. @template {object} T @param {T} fields @param {Turn | null} after */
  add(fields, after) {
    const turn = { ...fields, id: newId(), parent: after?.id ?? null };
    this.turns.push(/** @type {any} */ (turn));
    this.select(/** @type {any} */ (turn));
    return turn;
  }

  /** @param {Turn} turn */
  select(turn) {
    this.selected[turn.parent ?? ROOT] = turn.id;
  }

  /** @param {Turn} turn @returns {Turn | null} */
  before(turn) {
    return this.turns.find((each) => each.id === turn.parent) ?? null;
  }

  /** A new conversation with the turns up to this one. @param {Turn} last */
  branchAt(last) {
    const turns = this.pathTo(last).map((turn) => structuredClone(turn));
    return new Conversation({ title: `${this.title} (branch)`, turns });
  }

  /** The messages up to a turn, without questions that got no answer, except the last one. @param {string} system @param {Turn} last */
  messages(system, last) {
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    const path = this.pathTo(last);
    const lastQuestion = path.findLastIndex((turn) => turn.role === "user");
    path.forEach((turn, i) => {
      if (turn.role === "user") {
        const next = path[i + 1];
        if (i < lastQuestion && next?.role === "assistant" && isEmpty(next)) return;
        messages.push({ role: "user", content: turn.text });
      } else if (turn.role === "tool") {
        for (const { id, content } of turn.results) messages.push({ role: "tool", tool_call_id: id, content });
      } else if (!isEmpty(turn)) messages.push(assistantMessage(turn.answers[turn.chosen]));
    });
    return messages;
  }

  /** The first text that contains the query, in the title or a turn; null: none. @param {string} query in lower case */
  find(query) {
    if (this.title.toLowerCase().includes(query)) return this.title;
    return this.turns.flatMap(textsOf).find((text) => text.toLowerCase().includes(query)) ?? null;
  }

  toJSON() {
    const { id, givenTitle: title, updatedAt, turns, selected } = this;
    return { id, title, updatedAt, turns, selected };
  }
}

/** @param {Turn} turn @returns {string[]} */
export function textsOf(turn) {
  if (turn.role === "user") return [turn.text];
  if (turn.role === "tool") return turn.results.map((result) => result.content);
  return turn.answers.map((answer) => answer.text);
}

/** @param {Reply} reply */
function isEmpty(reply) {
  const answer = reply.answers[reply.chosen];
  return answer.text === "" && !answer.toolCalls?.length;
}

/** @param {Answer} answer */
function assistantMessage({ text, toolCalls }) {
  const message = { role: "assistant", content: text === "" && toolCalls?.length ? null : text };
  if (!toolCalls?.length) return message;
  const calls = toolCalls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { ...message, tool_calls: calls };
}

/** Validates data from a file or from storage, which may be anything. @param {any} data @returns {Conversation | null} null: not a conversation */
export function readConversation(data) {
  const { id, title, updatedAt, turns, selected } = data ?? {};
  if (typeof id !== "string" || !/^\w{1,32}$/.test(id) || typeof title !== "string" || !Number.isFinite(updatedAt)) return null;
  if (!Array.isArray(turns) || !turns.every(isTurn) || new Set(turns.map((turn) => turn.id)).size < turns.length || typeof selected !== "object" || selected === null) return null;
  return new Conversation({ id, title, updatedAt, turns, selected });
}

/** @param {any} turn */
function isTurn(turn) {
  if (typeof turn?.id !== "string" || (turn.parent !== null && typeof turn.parent !== "string") || turn.id === turn.parent) return false;
  if (turn.role === "user") return typeof turn.text === "string";
  if (turn.role === "tool") return Array.isArray(turn.results) && turn.results.every((each) => typeof each?.content === "string");
  return (
    turn.role === "assistant" &&
    Array.isArray(turn.answers) &&
    turn.answers.every((answer) => typeof answer?.text === "string") &&
    turn.chosen >= 0 &&
    turn.chosen < turn.answers.length &&
    Array.isArray(turn.ledger)
  );
}
