// The requests that this page has made, newest first. Read by the plots and the list of recent requests.

/**
 * Why the prefix cache ended at a token. `request_id` comes with "differs", null for a request of another key; the
 * last three come with "evicted".
 * @typedef {object} PrefixMiss
 * @property {"differs" | "evicted" | "not_cached"} reason
 * @property {number} token_index
 * @property {string} [token]
 * @property {string | null} [request_id]
 * @property {number} [num_tokens]
 * @property {number} [seconds_ago]
 * @property {string} [policy]
 */

/**
 * @typedef {object} LedgerEntry
 * @property {string} kind
 * @property {number} at_ms since the server received the request
 * @property {number} amount
 * @property {string} note
 * @property {PrefixMiss} [miss] of an entry of kind "missed"
 * @property {number} [prompt] its place, where a list of prompts was sent
 */

/**
 * One request of this page, from its start to its end. Times are of performance.now().
 * @typedef {object} RequestRecord
 * @property {string} id
 * @property {string | null} serverId the name the server gave it; known from its first event on
 * @property {string} label
 * @property {number} startedAt
 * @property {number | null} firstTokenAt
 * @property {number | null} endedAt
 * @property {number} tokens
 * @property {number} promptTokens
 * @property {number} cachedTokens
 * @property {LedgerEntry[]} ledger
 * @property {"running" | "finished" | "stopped" | "failed"} outcome
 */

const MOST_KEPT = 40;

class RequestLog extends EventTarget {
  /** @type {RequestRecord[]} */
  records = [];
  /** Tokens received since the page was opened. */
  totalTokens = 0;

  /** @param {string} id @param {string} label @returns {RequestRecord} */
  open(id, label) {
    /** @type {RequestRecord} */
    const record = {
      id,
      serverId: null,
      label,
      startedAt: performance.now(),
      firstTokenAt: null,
      endedAt: null,
      tokens: 0,
      promptTokens: 0,
      cachedTokens: 0,
      ledger: [],
      outcome: "running",
    };
    this.records = [record, ...this.records].slice(0, MOST_KEPT);
    this.#changed();
    return record;
  }

  /** @param {RequestRecord} record @param {number} tokens so far, all answers */
  count(record, tokens) {
    if (tokens > 0 && record.firstTokenAt === null) {
      record.firstTokenAt = performance.now();
      this.#changed();
    }
    this.totalTokens += Math.max(0, tokens - record.tokens);
    record.tokens = Math.max(tokens, record.tokens);
  }

  /** @param {RequestRecord} record @param {RequestRecord["outcome"]} outcome */
  close(record, outcome) {
    record.outcome = outcome;
    record.endedAt = performance.now();
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

export const requestLog = new RequestLog();

/** Tokens per second after the first token. @param {RequestRecord} record */
export function speed(record) {
  if (record.firstTokenAt === null || record.endedAt === null || record.tokens < 2) return null;
  return (record.tokens - 1) / Math.max((record.endedAt - record.firstTokenAt) / 1000, 1e-3);
}

/** Splits entries by prompt: a request with a list of prompts is several engine requests. @param {LedgerEntry[]} entries @returns {LedgerEntry[][]} */
export function byPrompt(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const key = entry.prompt ?? 0;
    if (groups.has(key)) groups.get(key).push(entry);
    else groups.set(key, [entry]);
  }
  return [...groups.values()];
}
