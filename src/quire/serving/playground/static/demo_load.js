// "Load it": a handful of questions at once, so that a newcomer sees the cache at work.

import { complete, requestId } from "./completion.js";
import { el, plural } from "./dom.js";
import { problem } from "./errors.js";

// A browser opens six connections to a server. The load takes three, so that chat and block map keep theirs.
const LIST = [
  "how a library decides where a book stands",
  "why bread rises",
  "how a lock on a canal works",
  "what a tide table is for",
  "how maps show height",
  "why violins have two holes",
  "how a printing press prints a page",
  "what makes a good index",
];
/** Several answers to one question share the blocks of its prompt. @type {[string, number][]} */
const SHARING = [
  ["Explain, step by step and with an example for each step, how paper is made from wood.", 4],
  ["Explain, as to a child who asks why at the end of every sentence, how a clock keeps time.", 3],
];
const MOST_TOKENS = 96;
const TEMPERATURE = 0.8;
const QUESTIONS = LIST.length + SHARING.length;
const ANSWERS = LIST.length + SHARING.reduce((sum, [, answers]) => sum + answers, 0);

export class DemoLoadView {
  /** @type {AbortController | null} */
  #running = null;
  #answered = 0;
  #button = el("button", { text: "Load it", attributes: { type: "button" } });
  #words = el("p", { class: "help", attributes: { "aria-live": "polite" } });

  /** @param {import("./status.js").Status} status */
  constructor(status) {
    this.status = status;
    this.element = el("div", { class: "load" }, this.#button, this.#words);
    this.#button.addEventListener("click", () => (this.#running ? this.#running.abort() : this.#start()));
    this.#words.textContent = `Sends ${plural(QUESTIONS, "question")} at once and asks for ${ANSWERS} answers.`;
  }

  async #start() {
    this.#running = new AbortController();
    this.#answered = 0;
    this.#button.textContent = "Stop load";
    this.#tell();
    const { signal } = this.#running;
    const requests = [this.#list(signal), ...SHARING.map(([question, n]) => this.#share(question, n, signal))];
    const failures = (await Promise.allSettled(requests)).filter((result) => result.status === "rejected");
    this.#running = null;
    this.#button.textContent = "Load it";
    this.#report(failures.map((result) => result.reason));
  }

  #tell() {
    this.#words.textContent = `${this.#answered} of ${ANSWERS} answers written.`;
  }

  /** @param {any} choice */
  #count(choice) {
    if (!choice.finish_reason) return;
    this.#answered += 1;
    this.#tell();
  }

  /** @param {AbortSignal} signal */
  #list(signal) {
    const prompt = LIST.map((topic) => `Here is a long and careful text about ${topic}.\n\n`);
    return this.#send("v1/completions", { prompt }, "load", `A list of ${LIST.length} texts to continue.`, signal);
  }

  /** @param {string} question @param {number} n @param {AbortSignal} signal */
  #share(question, n, signal) {
    const body = { messages: [{ role: "user", content: question }], n };
    return this.#send("v1/chat/completions", body, `load-n${n}`, question, signal);
  }

  /** @param {string} path @param {object} body @param {string} kind @param {string} label @param {AbortSignal} signal */
  #send(path, body, kind, label, signal) {
    const whole = { model: this.status.model, max_tokens: MOST_TOKENS, temperature: TEMPERATURE, ...body };
    return complete(path, whole, { id: requestId(kind), label, signal, onChoice: (choice) => this.#count(choice) });
  }

  /** @param {any[]} errors */
  #report(errors) {
    const real = errors.filter((error) => error.name !== "AbortError");
    if (real.length > 0) {
      const { title, advice } = problem(real[0]);
      this.#words.textContent = `${this.#answered} of ${ANSWERS} answers came. ${title} ${advice}`;
    } else if (errors.length > 0) {
      this.#words.textContent = "Stopped. The blocks of those requests are free again.";
    } else {
      this.#words.textContent = `All ${ANSWERS} answers came. The ledgers of their requests are below.`;
    }
  }
}
