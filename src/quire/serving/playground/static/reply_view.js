// A reply on the page: one to several answers side by side while they are written and after, with facts and buttons.

import { el } from "./dom.js";
import { ledgerView } from "./ledger.js";
import { MarkdownView, copyText } from "./markdown_view.js";
import { menuButton } from "./menu.js";
import { TokenAligner } from "./tokens.js";
import { addCallPieces, callViews, resultForm } from "./tool_calls.js";
import { editInPlace, flash, iconButton } from "./turn_actions.js";

/** @typedef {import("./tokens.js").PlacedToken} PlacedToken */

/**
 * What can be done with a reply.
 * @typedef {object} ReplyActions
 * @property {() => void} again
 * @property {() => void} resume continues a cut answer
 * @property {(text: string) => void} edit
 * @property {() => void} changed another answer was chosen
 * @property {() => HTMLElement[]} versions
 * @property {() => boolean} isLast whether the conversation ends with this reply
 * @property {(results: {id: string, name: string, content: string}[]) => void} sendResults
 * @property {() => import("./menu.js").MenuItem[]} more
 */

const FINISH_WORDS = {
  length: "Cut at the token limit.",
  abort: "Stopped.",
  error: "Ended by an error.",
  edited: "Edited by you.",
  repetition: "Ended because it repeated itself.",
};
const CUT = new Set(["length", "abort", "error", "edited"]);
const SLOWEST_SHARE = 4; // an answer is drawn at most a quarter of the time
let radioGroups = 0;

/** @type {WeakMap<Element, {reply: import("./conversation.js").Reply, index: number}>} */
const answerOfBody = new WeakMap();

/** Which answer an element with the class "answer-body" shows. @param {Element} body */
export function answerOf(body) {
  return answerOfBody.get(body);
}

/** The language of an answer with a requested format, which is not Markdown. @param {Record<string, any> | null} request */
function languageOf(request) {
  if (request?.structured_outputs) return "text";
  return request?.response_format ? "json" : null;
}

/** Adds arriving pieces to the given reply and shows them. */
export class ReplyView {
  /** @type {{body: HTMLElement, markdown: MarkdownView, aligner: TokenAligner, tokens: PlacedToken[], note: HTMLElement, thoughts: HTMLElement, calls: HTMLElement}[]} */
  #columns = [];
  #timer = 0;
  #paintCost = 0;
  #foot = el("footer", { class: "turn-foot" });
  #after = el("div", { class: "turn-after" });

  /** @param {import("./conversation.js").Reply} reply @param {ReplyActions} actions */
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
    const answer = this.reply.answers[index];
    const body = el("div", { class: "answer-body prose" });
    answerOfBody.set(body, { reply: this.reply, index });
    const note = el("p", { class: "answer-note", attributes: { hidden: "" } });
    const thoughts = el("details", { class: "thoughts", attributes: { hidden: "" } }, el("summary", { text: "Reasoning" }), el("div", { class: "thought-text" }));
    const calls = el("div", { class: "tool-calls" });
    const aligner = new TokenAligner(answer.text.length);
    this.#columns.push({ body, markdown: new MarkdownView(body, languageOf(this.reply.request)), aligner, tokens: [], note, thoughts, calls });
    const choice = this.reply.answers.length > 1 ? [this.#choice(index)] : [];
    return el("section", { class: "answer" }, ...choice, thoughts, body, calls, note);
  }

  /** @param {number} index */
  #choice(index) {
    if (index === 0) radioGroups += 1;
    const attributes = { type: "radio", name: `choice-${radioGroups}` };
    const radio = /** @type {HTMLInputElement} */ (el("input", { attributes, on: { change: () => this.#choose(index) } }));
    radio.checked = index === this.reply.chosen;
    return el("label", { class: "choice" }, radio, el("span", { text: `Answer ${index + 1}` }));
  }

  /** @param {number} index */
  #choose(index) {
    this.reply.chosen = index;
    this.actions.changed();
    this.#showFoot();
  }

  /** The reply is being written. */
  start() {
    this.#paint();
    this.element.classList.add("writing");
    this.element.setAttribute("aria-busy", "true");
    this.#foot.replaceChildren();
    this.#after.replaceChildren();
  }

  /** @param {any} choice a piece of the stream @param {number} [first] the answer that choice 0 writes */
  feed(choice, first = 0) {
    const answer = this.reply.answers[first + choice.index];
    const column = this.#columns[first + choice.index];
    if (!answer) throw new Error(`answer ${choice.index} was not asked for`);
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
    column.aligner.addTokens(choice.logprobs?.content ?? []);
    if (thought) {
      answer.thoughts = (answer.thoughts ?? "") + thought;
      column.aligner.skip(thought);
    }
    if (content) {
      answer.text += content;
      column.tokens.push(...column.aligner.addText(content));
    }
    if (calls) addCallPieces((answer.toolCalls ??= []), calls);
    if (choice.finish_reason) answer.finish = choice.finish_reason;
    this.#timer ||= setTimeout(() => requestAnimationFrame(() => this.#paint()), this.#paintCost * (SLOWEST_SHARE - 1));
  }

  #paint() {
    const started = performance.now();
    clearTimeout(this.#timer);
    this.#timer = 0;
    for (const [i, column] of this.#columns.entries()) {
      const answer = this.reply.answers[i];
      this.#showThoughts(column, answer);
      column.markdown.update(answer.text, column.tokens);
      column.calls.replaceChildren(...callViews(answer.toolCalls ?? []));
    }
    this.#paintCost = performance.now() - started;
    this.element.dispatchEvent(new Event("painted", { bubbles: true }));
  }

  /** Open while there is nothing else to read. */
  #showThoughts(column, answer) {
    const shown = column.thoughts.lastElementChild;
    if (!answer.thoughts || shown.textContent.length === answer.thoughts.length) return;
    column.thoughts.hidden = false;
    column.thoughts.open = answer.text === "";
    shown.textContent = answer.thoughts;
  }

  /** The reply is over: facts, buttons and, where there is one, the problem are shown. */
  end() {
    this.#paint();
    this.element.classList.remove("writing");
    this.element.removeAttribute("aria-busy");
    this.#columns.forEach((column, i) => this.#finish(column, this.reply.answers[i]));
    this.#showFoot();
    this.#after.replaceChildren();
    if (this.reply.problem) this.#showProblem(this.reply.problem);
    const calls = this.reply.answers[this.reply.chosen].toolCalls ?? [];
    if (calls.length > 0 && this.actions.isLast()) this.#after.append(resultForm(calls, (results) => this.actions.sendResults(results)));
    this.element.dispatchEvent(new Event("painted", { bubbles: true }));
  }

  #finish(column, answer) {
    if (column.tokens.length > 0) {
      column.body.tabIndex = 0;
      column.body.setAttribute("role", "group");
      column.body.setAttribute("aria-label", "Answer; the arrow keys walk through its tokens");
    }
    const isEmpty = answer.text === "" && !answer.toolCalls?.length && !this.reply.problem;
    const words = FINISH_WORDS[answer.finish ?? ""] ?? (isEmpty ? "An empty answer." : "");
    column.note.textContent = words;
    column.note.hidden = words === "";
  }

  #showFoot() {
    const answer = this.reply.answers[this.reply.chosen];
    const isCut = (CUT.has(answer.finish ?? "") || this.reply.problem !== null) && answer.text !== "";
    const buttons = [...this.actions.versions()];
    if (isCut && this.actions.isLast()) {
      const resume = el("button", { class: "resume", text: "Continue", attributes: { type: "button" } });
      resume.addEventListener("click", () => this.actions.resume());
      buttons.push(resume);
    }
    if (answer.text) buttons.push(iconButton("copy", "Copy answer", (button) => this.#copy(button)));
    buttons.push(iconButton("again", "Try again", () => this.actions.again()));
    if (answer.text) buttons.push(iconButton("edit", "Edit answer", () => this.#edit()));
    if (this.reply.ledger.length > 0) buttons.push(this.#timing());
    buttons.push(menuButton(iconButton("more", "More"), () => this.actions.more()));
    const facts = this.reply.facts ? [el("span", { class: "facts", text: this.reply.facts })] : [];
    this.#foot.replaceChildren(el("span", { class: "buttons" }, ...buttons), ...facts);
  }

  #edit() {
    const { text } = this.reply.answers[this.reply.chosen];
    editInPlace(this.element, { text, label: "Edit the answer", action: "Save as new version", done: (edited) => this.actions.edit(edited) });
  }

  #timing() {
    const button = iconButton("clock", "Timing", () => this.#toggleTiming(button));
    button.setAttribute("aria-expanded", "false");
    return button;
  }

  /** @param {HTMLElement} button */
  async #copy(button) {
    const copied = await copyText(this.reply.answers[this.reply.chosen].text);
    flash(button, copied ? "Copied" : "Not allowed");
  }

  /** @param {HTMLElement} button */
  #toggleTiming(button) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) this.#after.querySelector(".ledger")?.remove();
    else this.#after.prepend(ledgerView(this.reply.ledger));
    this.#after.scrollIntoView({ block: "nearest" });
  }

  /** @param {import("./errors.js").Problem} problem */
  #showProblem(problem) {
    const attributes = { role: "alert" };
    this.#after.append(el("div", { class: "problem", attributes }, el("b", { text: problem.title }), " ", problem.advice));
  }
}
