// The ledger of a request: where its time went, as a bar of phases and as sentences.

import { duration, el, plural, shortName } from "./dom.js";
import { byPrompt } from "./request_log.js";

/** @typedef {import("./request_log.js").LedgerEntry} LedgerEntry */

/** The phase of a request after each kind of entry. */
const PHASE_AFTER = {
  received: "arriving",
  queued: "waiting",
  admitted: "prompt",
  cached: "prompt",
  missed: "prompt",
  chunk: "prompt",
  first_token: "writing",
  preempted: "preempted",
};

const PHASE_WORDS = {
  arriving: "before the engine",
  waiting: "waiting",
  prompt: "prefill",
  writing: "decoding",
  preempted: "preempted",
};

const ENDS = { stop: "The model ended it, or a stop text did", length: "The token limit ended it", abort: "It was stopped" };

/** @param {LedgerEntry} entry */
function sentence(entry) {
  switch (entry.kind) {
    case "received":
      return "The server read the request.";
    case "queued":
      return "It entered the engine's queue.";
    case "admitted":
      return "It was given rows and blocks.";
    case "cached":
      return `${plural(entry.amount, "token")} ${entry.amount === 1 ? "was" : "were"} found in the prefix cache.`;
    case "missed":
      return `The prefix cache ended before token ${entry.amount}${tokenOf(entry)}.`;
    case "chunk":
      return `${plural(entry.amount, "prompt token")} ${entry.amount === 1 ? "was" : "were"} planned.`;
    case "first_token":
      return "The first token came.";
    case "preempted":
      return `It was preempted and lost the blocks of ${plural(entry.amount, "computed token")}.`;
    case "finished":
      return `It finished${entry.amount ? ` with ${plural(entry.amount, "token")}` : ""}.`;
    default:
      return entry.kind;
  }
}

/**
 * @param {LedgerEntry[]} entries
 * @returns {{phase: string, milliseconds: number}[]} in order; neighbours of one phase are one
 */
function phases(entries) {
  const found = [];
  let writing = false; // after the first token, the phase after a preemption is writing again
  for (let i = 0; i + 1 < entries.length; i++) {
    writing ||= entries[i].kind === "first_token";
    const after = PHASE_AFTER[entries[i].kind] ?? "writing";
    const phase = writing && after === "prompt" ? "writing" : after;
    const milliseconds = entries[i + 1].at_ms - entries[i].at_ms;
    const last = found.at(-1);
    if (last?.phase === phase) last.milliseconds += milliseconds;
    else found.push({ phase, milliseconds });
  }
  return found;
}

/** @param {LedgerEntry[]} entries @returns {HTMLElement} */
export function ledgerView(entries) {
  const groups = byPrompt(entries);
  const longest = Math.max(...groups.map((group) => group.at(-1).at_ms));
  const bars = groups.flatMap((group) => phaseBar(group, longest));
  const view = el("div", { class: "ledger" }, ...bars);
  if (groups.length === 1) view.append(lines(entries));
  return view;
}

/** @param {LedgerEntry[]} entries @param {number} longest milliseconds that a full bar stands for */
function phaseBar(entries, longest) {
  const parts = phases(entries);
  const bar = el("div", { class: "phase-bar", attributes: { "aria-hidden": "true" } });
  for (const { phase, milliseconds } of parts) {
    const segment = el("i", { class: `phase ${phase}` });
    segment.style.flexGrow = String(Math.max(milliseconds, 0.01));
    bar.append(segment);
  }
  const rest = el("i", { class: "phase" });
  rest.style.flexGrow = String(longest - entries.at(-1).at_ms);
  bar.append(rest);
  const key = parts.map(({ phase, milliseconds }) =>
    el("li", {}, el("i", { class: `swatch phase ${phase}`, attributes: { "aria-hidden": "true" } }), `${PHASE_WORDS[phase]} ${duration(milliseconds)}`),
  );
  return [bar, el("ul", { class: "phase-key" }, ...key)];
}

/** @param {LedgerEntry[]} entries */
function lines(entries) {
  const rows = entries.map((entry) =>
    el(
      "li",
      { class: entry.kind },
      el("time", { text: entry.at_ms < 1 ? "0 ms" : duration(entry.at_ms) }),
      el("span", { text: sentence(entry) + why(entry) }),
    ),
  );
  return el("ol", { class: "ledger-lines" }, ...rows);
}

/** The text of the first token that was not found in the cache. @param {LedgerEntry} entry */
function tokenOf({ miss }) {
  return miss?.token === undefined ? "" : `, ${JSON.stringify(miss.token)}`;
}

/** Explains why the prefix cache has no more of a prompt. @param {import("./request_log.js").PrefixMiss} miss */
function whyMissed(miss) {
  switch (miss.reason) {
    case "differs":
      return ` From there on the prompt differs from ${miss.request_id ? `request ${shortName(miss.request_id)}` : "another request"}.`;
    case "evicted": {
      const them = `${plural(miss.num_tokens, "token")} from there on ${miss.num_tokens === 1 ? "was" : "were"} evicted`;
      return ` ${them} ${duration(miss.seconds_ago * 1000)} earlier, by the ${miss.policy} policy.`;
    }
    default:
      return miss.token_index ? " Nothing more of the prompt is cached." : " Nothing of the prompt is cached.";
  }
}

/** The note of an entry as a separate sentence. @param {LedgerEntry} entry */
function why(entry) {
  if (entry.miss) return whyMissed(entry.miss);
  if (!entry.note) return "";
  const note = (entry.kind === "finished" && ENDS[entry.note]) || entry.note;
  return ` ${note.charAt(0).toUpperCase()}${note.slice(1).replace(/\.$/, "")}.`;
}
