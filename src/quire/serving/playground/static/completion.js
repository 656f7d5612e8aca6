// One streamed completion, from sending it to its last event.

import { ApiError, call } from "./api.js";
import { journal } from "./journal.js";
import { events } from "./stream.js";

/** A name that is short enough to read in the block map. @param {string} kind */
export function requestId(kind) {
  return `${kind}-${Array.from(crypto.getRandomValues(new Uint8Array(3)), (b) => b.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * Sends the request, tells `onChoice` of every piece of every answer, and returns the journey. Raises what ended it.
 * @param {string} path "v1/chat/completions" or "v1/completions"
 * @param {object} body the request without its streaming fields
 * @param {{id: string, label: string, signal: AbortSignal, onChoice?: (choice: object) => void}} options
 * @returns {Promise<import("./journal.js").Journey>}
 */
export async function complete(path, body, { id, label, signal, onChoice }) {
  const journey = journal.open(id, label);
  const request = {
    ...body,
    request_id: id,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  try {
    const response = await call(path, { body: request, signal, headers: { "X-Quire-Explain": "1" } });
    await follow(response, journey, onChoice);
  } catch (error) {
    journal.close(journey, error.name === "AbortError" ? "stopped" : "failed");
    throw error;
  }
  journal.close(journey, "finished");
  return journey;
}

/** @param {Response} response @param {import("./journal.js").Journey} journey @param {((choice: object) => void) | undefined} onChoice */
async function follow(response, journey, onChoice) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    for (const choice of chunk.choices ?? []) onChoice?.(choice);
    if (chunk.usage) readUsage(chunk.usage, journey);
    if (chunk.quire?.ledger) journey.ledger = chunk.quire.ledger;
  }
  throw new ApiError(0, "The connection broke before the answer was complete.");
}

/** @param {any} usage @param {import("./journal.js").Journey} journey */
function readUsage(usage, journey) {
  journey.promptTokens = usage.prompt_tokens;
  journey.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  journal.count(journey, usage.completion_tokens);
}
