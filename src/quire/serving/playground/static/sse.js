// Server-sent events over fetch: EventSource can send neither a body nor a key.

import { ApiError } from "./api.js";

const MOST_BUFFERED = 16 * 1024 * 1024; // characters of one event: a map of a very large cache fits

/**
 * The data of each event, in order. Ends with the stream; raises ApiError when the connection breaks.
 * @param {Response} response
 * @returns {AsyncGenerator<string>}
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value.replaceAll("\r", "");
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const data = dataOf(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (data !== null) yield data;
      }
      if (buffer.length > MOST_BUFFERED) throw new ApiError(0, "One event of the stream was too large.");
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(0, "The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => undefined); // already closed or broken: nothing to release
  }
}

/** @param {string} event @returns {string | null} null for comments and other fields */
function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n") : null;
}
