// Explains errors in words, with advice.

import { ApiError } from "./api.js";

/** @typedef {{title: string, advice: string}} Problem */

/** @param {unknown} error @returns {Problem} */
export function explainError(error) {
  if (!(error instanceof ApiError)) {
    return { title: "The page failed to read the answer.", advice: `Reload it and try again. (${String(error)})` };
  }
  switch (error.status) {
    case 0:
      return {
        title: error.message,
        advice: "Check that the server still runs. Your chats are kept; try again when it is back.",
      };
    case 401:
    case 403:
      return { title: "The server did not accept the key.", advice: "Enter an API key of this server, then try again." };
    case 429:
      return {
        title: "The queue is full.",
        advice: `The server takes no more requests for now. Try again in ${wait(error.retryAfter)}.`,
      };
    case 503:
      return {
        title: "The engine is not up.",
        advice: `It is loading, restarting or shutting down. Try again in ${wait(error.retryAfter)}.`,
      };
    default:
      return {
        title: error.status >= 500 ? "The server failed on this request." : "The server refused the request.",
        advice: `It says: ${error.message.replace(/\.$/, "")}.`,
      };
  }
}

/** @param {number | null} seconds */
function wait(seconds) {
  if (seconds === null) return "a moment";
  return seconds < 1.5 ? "a second" : `${Math.ceil(seconds)} seconds`;
}
