// One streamed completion, from sending it to its last event.

import { ApiError, call } from "./api.js";
import { requestLog } from "./request_log.js";
import { events } from "./sse.js";

/** A request name that is short enough for the block map. @param {string} kind */
export function requestId(kind) {
  return `${kind}-${Array.from(crypto.getRandomValues(new Uint8Array(3)), (b) => b.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * Sends the request, tells `onChoice` of every piece of every answer, and returns the record. Raises what ended it.
 * Pieces look like those of chat completions, whatever the path.
 * @param {string} path "v1/chat/completions", "v1/completions" or "v1/fork"
 * @param {object} body the request without its streaming fields
 * @param {{id: string, label: string, signal: AbortSignal, onChoice?: (choice: any) => void}} options
 * @returns {Promise<import("./request_log.js").RequestRecord>}
 */
export async function complete(path, body, { id, label, signal, onChoice }) {
  const record = requestLog.open(id, label);
  const request = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  try {
    const response = await call(path, { body: request, signal, headers: { "X-Quire-Explain": "1", "X-Request-Id": id } });
    await follow(response, record, onChoice);
  } catch (error) {
    requestLog.close(record, error.name === "AbortError" ? "stopped" : "failed");
    throw error;
  }
  requestLog.close(record, "finished");
  return record;
}

/** @param {Response} response @param {import("./request_log.js").RequestRecord} record @param {((choice: any) => void) | undefined} onChoice */
async function follow(response, record, onChoice) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    if (chunk.id) record.serverId = chunk.id;
    for (const choice of chunk.choices ?? []) onChoice?.(asChatChoice(choice));
    if (chunk.usage) readUsage(chunk.usage, record);
    if (chunk.quire?.ledger) record.ledger = chunk.quire.ledger;
  }
  throw new ApiError(0, "The connection broke before the answer was complete.");
}

/** @param {any} choice of any kind of completion */
function asChatChoice(choice) {
  if (choice.text === undefined) return choice;
  const { index, text, finish_reason, logprobs } = choice;
  return { index, finish_reason, delta: { content: text }, logprobs: logprobs ? { content: entries(logprobs) } : null };
}

/** @param {{tokens: string[], token_logprobs: (number | null)[], top_logprobs: (Record<string, number> | null)[]}} logprobs of a text completion */
function entries({ tokens, token_logprobs, top_logprobs }) {
  return tokens.map((token, i) => ({
    token,
    logprob: token_logprobs[i] ?? 0,
    top_logprobs: Object.entries(top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

/** @param {any} usage @param {import("./request_log.js").RequestRecord} record */
function readUsage(usage, record) {
  record.promptTokens = usage.prompt_tokens;
  record.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  requestLog.count(record, usage.completion_tokens);
}
