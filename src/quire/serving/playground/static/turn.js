// One turn of the conversation on the page: a question, or one to several answers side by side with their facts.

import { el } from "./dom.js";
import { ledgerView } from "./ledger.js";
import { Painter } from "./painter.js";
import { Aligner } from "./tokens.js";

const FINISH_WORDS = { length: "Cut at the token limit.", abort: "Stopped.", error: "Ended by an error." };
let radioGroups = 0;

/** @param {string} text */
export function questionView(text) {
  return el("article", { class: "turn question", attributes: { "aria-label": "You" } }, el("div", { class: "prose", text }));
}

/** Shows a reply while it is written and after. Writes what arrives into the given reply. */
export class ReplyView {
  /** @type {{body: HTMLElement, painter: Painter, aligner: Aligner, note: HTMLElement, thoughts: HTMLElement, waiting: import("./tokens.js").Piece[]}[]} */
  #columns = [];
  #frame = 0;
  #foot = el("footer", { class: "turn-foot" });
  #after = el("div", { class: "turn-after" });

  /**
   * @param {import("./conversation.js").Reply} reply
   * @param {{again: () => void, changed: () => void}} actions
   */
  constructor(reply, actions) {
    this.reply = reply;
    this.actions = actions;
    const columns = reply.answers.map((_, i) => this.#column(i));
    const answers = el("div", { class: "answers" }, ...columns);
    answers.dataset.count = String(columns.length);
    this.element = el("article", { class: "turn reply", attributes: { "aria-label": "Answer" } }, answers, this.#foot, this.#after);
  }

  /** @param {number} index */
  #column(index) {
    const body = el("div", { class: "answer-body" });
    const note = el("p", { class: "answer-note", attributes: { hidden: "" } });
    const prose = el("div", { class: "prose" });
    const thoughts = el("details", { class: "thoughts", attributes: { hidden: "" } }, el("summary", { text: "Reasoning" }), prose);
    this.#columns.push({ body, painter: new Painter(body), aligner: new Aligner(), note, thoughts, waiting: [] });
    const parts = this.reply.answers.length > 1 ? [this.#choice(index)] : [];
    return el("section", { class: "answer" }, ...parts, thoughts, body, note);
  }

  /** @param {number} index */
  #choice(index) {
    if (index === 0) radioGroups += 1;
    const attributes = { type: "radio", name: `choice-${radioGroups}` };
    const radio = el("input", { attributes, on: { change: () => this.#choose(index) } });
    radio.checked = index === this.reply.chosen;
    return el("label", { class: "choice" }, radio, el("span", { text: `Answer ${index + 1}` }));
  }

  /** @param {number} index */
  #choose(index) {
    this.reply.chosen = index;
    this.actions.changed();
  }

  /** The reply is being written. */
  start() {
    this.element.classList.add("writing");
    this.element.setAttribute("aria-busy", "true");
  }

  /** @param {any} choice of a stream's chunk; an index beyond the answers asked for is refused */
  feed(choice) {
    const answer = this.reply.answers[choice.index];
    const column = this.#columns[choice.index];
    if (!answer) throw new Error(`answer ${choice.index} was not asked for`);
    const content = choice.delta?.content ?? "";
    const thought = choice.delta?.reasoning_content ?? "";
    if (thought) answer.thoughts = (answer.thoughts ?? "") + thought;
    answer.text += content;
    column.aligner.take(thought, choice.logprobs?.content ?? []); // its tokens are no part of the answer
    column.waiting.push(...column.aligner.take(content, []));
    if (choice.finish_reason) answer.finish = choice.finish_reason;
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    this.#frame = 0;
    for (const [i, column] of this.#columns.entries()) {
      this.#showThoughts(column, this.reply.answers[i]);
      if (column.waiting.length === 0) continue;
      column.painter.add(column.waiting);
      column.waiting = [];
    }
    this.element.dispatchEvent(new Event("painted", { bubbles: true }));
  }

  /** Open while there is nothing else to read. */
  #showThoughts(column, answer) {
    const prose = column.thoughts.lastElementChild;
    if (!answer.thoughts || prose.textContent.length === answer.thoughts.length) return;
    column.thoughts.hidden = false;
    column.thoughts.open = answer.text === "";
    prose.textContent = answer.thoughts;
  }

  /** The reply is over: facts, buttons and, where there is one, the problem are shown. */
  end() {
    cancelAnimationFrame(this.#frame);
    this.#paint();
    this.element.classList.remove("writing");
    this.element.removeAttribute("aria-busy");
    this.#columns.forEach((column, i) => this.#seal(column, this.reply.answers[i]));
    this.#showFoot();
    this.#after.replaceChildren();
    if (this.reply.problem) this.#showProblem(this.reply.problem);
    this.element.dispatchEvent(new Event("painted", { bubbles: true }));
  }

  /** A reply read from storage: its text, without probabilities. */
  restore() {
    this.reply.answers.forEach((answer, i) => this.#columns[i].painter.add([{ text: answer.text, token: null }]));
    this.end();
  }

  #seal(column, answer) {
    column.painter.finish();
    if (column.body.querySelector(".token")) {
      column.body.tabIndex = 0;
      column.body.setAttribute("role", "group");
      column.body.setAttribute("aria-label", "Answer; the arrow keys walk through its tokens");
    }
    const words = FINISH_WORDS[answer.finish ?? ""] ?? (answer.text === "" && !this.reply.problem ? "An empty answer." : "");
    column.note.textContent = words;
    column.note.hidden = words === "";
  }

  #showFoot() {
    const facts = this.reply.facts ? [el("span", { class: "facts", text: this.reply.facts })] : [];
    const buttons = [];
    if (this.reply.answers[this.reply.chosen]?.text) buttons.push(this.#button("Copy", (button) => this.#copy(button)));
    if (this.reply.ledger.length) {
      const toggle = this.#button("Ledger", (button) => this.#toggleLedger(button));
      toggle.setAttribute("aria-expanded", "false");
      buttons.push(toggle);
    }
    buttons.push(this.#button("Again", () => this.actions.again()));
    this.#foot.replaceChildren(...facts, el("span", { class: "buttons" }, ...buttons));
  }

  /** @param {string} text @param {(button: HTMLElement) => void} action */
  #button(text, action) {
    const button = el("button", { class: "link", text, attributes: { type: "button" } });
    button.addEventListener("click", () => action(button));
    return button;
  }

  /** @param {HTMLElement} button */
  async #copy(button) {
    try {
      await navigator.clipboard.writeText(this.reply.answers[this.reply.chosen].text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  /** @param {HTMLElement} button */
  #toggleLedger(button) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    this.#after.replaceChildren(...(open ? [] : [ledgerView(this.reply.ledger)]));
    this.#after.scrollIntoView({ block: "nearest" });
  }

  /** @param {import("./errors.js").Problem} problem */
  #showProblem(problem) {
    this.#after.append(
      el("div", { class: "problem", attributes: { role: "alert" } }, el("b", { text: problem.title }), " ", problem.advice),
    );
  }
}
