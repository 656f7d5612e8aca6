// "Run demo load": more requests than the KV cache can hold, with a common prefix, so that waiting, sharing, preemption
// and swapping can be seen in the block map and the timelines.

import { json } from "./api.js";
import { complete, requestId } from "./completion.js";
import { el, plural } from "./dom.js";
import { explainError } from "./errors.js";
import { summary } from "./load_summary.js";

const TOPICS = ["canal locks", "bread", "tide tables", "contour maps", "violins", "printing presses", "book indexes", "bridges", "clocks", "lighthouses"];
const COMMON = "You write long and careful texts for an encyclopedia. Every text begins with a definition and ends with an example. ";
const QUESTION = "Explain, step by step and with an example for each step, how paper is made from wood.";
const SAMPLES = 4; // answers to one question, which share the blocks of its prompt
const SHARED_PART = 0.4; // share of each prompt that is common to all
const FILLED = 0.85; // share of the cache that prompts fill; the answers exceed it
const OVERBOOKED = 1.4; // times as many requests as the cache can hold
const MOST_PROMPT_TOKENS = 600_000; // of all prompts together: larger caches are not filled
const USUAL_TOKENS = 1024; // tokens of one request

/**
 * What a load of this size consists of.
 * @typedef {{prompts: number, promptTokens: number, answerTokens: number, fills: boolean}} LoadPlan
 * @param {{num_blocks: number, block_size: number, max_num_seqs: number, max_model_len: number}} engine
 * @param {{prompts: number}} limits
 * @returns {LoadPlan}
 */
export function planLoad(engine, limits) {
  const cache = engine.num_blocks * engine.block_size;
  const fitting = Math.min(Math.max(8, Math.ceil(cache / USUAL_TOKENS)), engine.max_num_seqs, limits.prompts);
  const prompts = Math.min(Math.ceil(fitting * OVERBOOKED), limits.prompts);
  const answerTokens = Math.ceil(Math.min(Math.max(32, (0.35 * cache) / fitting), engine.max_model_len / 2, 512));
  const wanted = (FILLED * cache) / (fitting * (1 - SHARED_PART));
  const promptTokens = Math.floor(Math.min(wanted, 0.9 * (engine.max_model_len - answerTokens), MOST_PROMPT_TOKENS / prompts));
  const demand = fitting * ((1 - SHARED_PART) * promptTokens + answerTokens);
  return { prompts, promptTokens, answerTokens, fills: demand > cache };
}

/** Texts with a common prefix and different endings. @param {LoadPlan} plan @param {number} charactersPerToken @returns {string[]} */
export function loadPrompts({ prompts, promptTokens }, charactersPerToken) {
  const shared = Math.floor(promptTokens * SHARED_PART * charactersPerToken);
  const length = Math.floor(promptTokens * charactersPerToken);
  const beginning = COMMON.repeat(Math.ceil(shared / COMMON.length)).slice(0, shared);
  return Array.from({ length: prompts }, (_, i) => {
    let text = beginning;
    for (let j = 0; text.length < length; j++) text += `\nNote ${i * 97 + j * 31} of text ${i}: ${TOPICS[(i + j * 7) % TOPICS.length]}.`;
    return text.slice(0, length);
  });
}

export class DemoLoadView {
  /** @type {AbortController | null} */
  #running = null;
  #answered = 0;
  #expected = 0;
  #peak = { used: 0, shared: 0, waiting: 0, swapped: 0 };
  #button = el("button", { class: "primary", text: "Run demo load", attributes: { type: "button" } });
  #words = el("p", { class: "help", text: "Sends more requests than the cache can hold.", attributes: { role: "status" } });
  #results = el("ul", { class: "load-summary" });

  /** @param {import("./status.js").Status} status */
  constructor(status) {
    this.status = status;
    this.element = el("div", { class: "load" }, this.#button, this.#words, this.#results);
    this.#button.addEventListener("click", () => (this.#running ? this.#running.abort() : this.#run()));
  }

  /** Records the extremes of the load for the summary. @param {import("./blocks.js").BlockMap} map */
  show(map) {
    if (!this.#running) return;
    const peak = this.#peak;
    peak.used = Math.max(peak.used, map.holders.filter((count) => count > 0).length / map.total);
    peak.shared = Math.max(peak.shared, map.holders.filter((count) => count > 1).length);
    peak.waiting = Math.max(peak.waiting, (map.stats?.edge?.waiting ?? 0) + map.requests.filter((each) => each.state === "waiting").length);
    peak.swapped = Math.max(peak.swapped, map.swapped ?? 0);
  }

  async #run() {
    this.#running = new AbortController();
    this.#answered = 0;
    this.#expected = 0;
    this.#peak = { used: 0, shared: 0, waiting: 0, swapped: 0 };
    this.#button.textContent = "Stop demo load";
    this.#button.classList.remove("primary");
    this.#results.replaceChildren();
    try {
      await this.#send(this.#running.signal);
    } catch (error) {
      const { title, advice } = explainError(error);
      this.#words.textContent = error.name === "AbortError" ? "Stopped. The blocks of those requests are free again." : `${this.#answered} of ${this.#expected} answers came. ${title} ${advice}`;
    }
    this.#running = null;
    this.#button.textContent = "Run demo load";
    this.#button.classList.add("primary");
  }

  /** @param {AbortSignal} signal */
  async #send(signal) {
    const { engine, limits } = await json("v1/capabilities", { signal });
    const plan = planLoad(engine, limits);
    const { count } = await json("tokenize", { signal, body: { model: this.status.model, prompt: loadPrompts({ ...plan, prompts: 1 }, 4)[0] } });
    const prompt = loadPrompts(plan, (Math.floor(plan.promptTokens * 4) / count) * 0.97);
    this.#expected = plan.prompts + SAMPLES;
    this.#tell(plan, engine);
    const common = { model: this.status.model, max_tokens: plan.answerTokens, temperature: 0.8, ignore_eos: true };
    const options = (kind, label) => ({ id: requestId(kind), label, signal, onChoice: (choice) => this.#count(choice, plan, engine) });
    const sent = await Promise.allSettled([
      complete("v1/chat/completions", { ...common, messages: [{ role: "user", content: QUESTION }], n: SAMPLES }, options("samples", QUESTION)),
      complete("v1/completions", { ...common, prompt }, options("load", `${plan.prompts} texts that begin alike.`)),
    ]);
    const failed = sent.find((result) => result.status === "rejected");
    if (failed) throw failed.reason;
    this.#words.textContent = plan.fills ? "Done. What the requests met:" : `Done. This cache is larger than the load: start quire serve with --num-kv-blocks 512 to see it full.`;
    this.#results.replaceChildren(...summary(sent.map((result) => result.value), this.#peak).map((text) => el("li", { text })));
  }

  /** @param {LoadPlan} plan @param {{num_blocks: number, block_size: number}} engine */
  #tell(plan, engine) {
    const size = plan.promptTokens + plan.answerTokens;
    const cache = (engine.num_blocks * engine.block_size).toLocaleString("en");
    this.#words.textContent = `${this.#answered} of ${plural(this.#expected, "answer")}. Each takes ${size} tokens; the cache holds ${cache}.`;
  }

  /** @param {any} choice @param {LoadPlan} plan @param {{num_blocks: number, block_size: number}} engine */
  #count(choice, plan, engine) {
    if (!choice.finish_reason) return;
    this.#answered += 1;
    this.#tell(plan, engine);
  }
}
