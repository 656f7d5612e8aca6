// Summarizes a demo load in sentences, from the ledgers of its requests and the block maps.

import { duration, plural } from "./dom.js";
import { byPrompt } from "./request_log.js";

/** @typedef {import("./request_log.js").LedgerEntry} LedgerEntry */

const WORTH_TELLING = 50; // milliseconds of waiting; shorter waits are not reported

/**
 * @param {import("./request_log.js").RequestRecord[]} records
 * @param {{used: number, shared: number, waiting: number, swapped: number}} peak all 0 without an admin key
 * @returns {string[]}
 */
export function summary(records, peak) {
  const groups = records.flatMap((record) => byPrompt(record.ledger));
  const entries = groups.flat();
  const waits = groups.map(waited).filter((milliseconds) => milliseconds > WORTH_TELLING);
  const preempted = entries.filter((entry) => entry.kind === "preempted");
  const swaps = preempted.filter((entry) => /\bswapped\b/.test(entry.note)).length;
  const cached = entries.filter((entry) => entry.kind === "cached").reduce((sum, entry) => sum + entry.amount, 0);
  const full = peak.used > 0 ? `Cache: up to ${Math.round(peak.used * 100)} % of the blocks were held.` : "";
  const waiting = waits.length > 0 ? `Waiting: ${plural(waits.length, "request")} waited for blocks or rows, the longest ${duration(Math.max(...waits))}.` : "Waiting: none; everything fitted at once.";
  const blocks = peak.shared > 0 ? ` At most ${plural(peak.shared, "block")} had several holders.` : "";
  const sharing = `Sharing: ${cached.toLocaleString("en")} prompt tokens came from the prefix cache.${blocks}`;
  const preemption = `Preemption: ${preempted.length === 0 ? "none; no running request lost its blocks" : plural(preempted.length, "time")}.`;
  return [full, waiting, sharing, preemption, swapping(preempted.length, swaps)].filter((text) => text !== "");
}

/** @param {number} preemptions @param {number} swaps */
function swapping(preemptions, swaps) {
  if (swaps > 0) return `Swap: ${plural(swaps, "preempted request")} moved to host memory and back.`;
  if (preemptions > 0) return "Swap: none; recomputing was cheaper, or the server has no host memory for blocks (--host-cache-memory).";
  return "";
}

/** Milliseconds from the first entry to admission. @param {LedgerEntry[]} entries */
function waited(entries) {
  const admitted = entries.find((entry) => entry.kind === "admitted");
  return admitted ? admitted.at_ms - entries[0].at_ms : 0;
}
