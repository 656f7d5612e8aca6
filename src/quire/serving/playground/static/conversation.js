// The conversation: turns in order, kept in local storage, bounded.

import { local } from "./storage.js";

/**
 * @typedef {{text: string, finish: string | null, thoughts?: string}} Answer
 * @typedef {{role: "user", text: string}} Question
 * @typedef {object} Reply
 * @property {"assistant"} role
 * @property {Answer[]} answers
 * @property {number} chosen the answer that the conversation goes on with
 * @property {string} facts one line: tokens, speed, first token
 * @property {import("./request_log.js").LedgerEntry[]} ledger
 * @property {import("./errors.js").Problem | null} problem
 * @typedef {Question | Reply} Turn
 */

const MOST_TURNS = 200;
const MOST_CHARACTERS = 1_000_000;

export class Conversation {
  constructor() {
    /** @type {Turn[]} */
    this.turns = kept().filter(wellFormed);
  }

  /** @param {Turn} turn */
  push(turn) {
    this.turns.push(turn);
    this.save();
  }

  /** The oldest turns are forgotten first. */
  save() {
    this.turns = this.turns.slice(-MOST_TURNS);
    let text = JSON.stringify(this.turns);
    while (text.length > MOST_CHARACTERS && this.turns.length > 1) {
      this.turns = this.turns.slice(2);
      text = JSON.stringify(this.turns);
    }
    local.set("conversation", text);
  }

  clear() {
    this.turns = [];
    local.set("conversation", null);
  }

  /** Messages for the model. A question that got no answer is not sent again, except the last. @param {string} system */
  messages(system) {
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    this.turns.forEach((turn, i) => {
      if (turn.role !== "user") return;
      const reply = this.turns[i + 1];
      const answer = reply?.role === "assistant" ? reply.answers[reply.chosen]?.text : undefined;
      if (!answer && i < this.turns.findLastIndex((each) => each.role === "user")) return;
      messages.push({ role: "user", content: turn.text });
      if (answer) messages.push({ role: "assistant", content: answer });
    });
    return messages;
  }
}

/** @returns {any[]} */
function kept() {
  const found = local.getJson("conversation");
  return Array.isArray(found) ? found : [];
}

/** What an older page or another hand left in storage may be anything. @param {any} turn */
function wellFormed(turn) {
  if (turn?.role === "user") return typeof turn.text === "string";
  return (
    turn?.role === "assistant" &&
    Array.isArray(turn.answers) &&
    turn.answers.every((answer) => typeof answer?.text === "string") &&
    Number.isInteger(turn.chosen) &&
    Array.isArray(turn.ledger)
  );
}
