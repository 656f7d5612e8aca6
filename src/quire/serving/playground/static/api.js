// All calls to the server: same origin, API keys as bearer tokens, errors as ApiError.

import { session } from "./storage.js";

/** The server's root: this file lies one folder below it. */
export const BASE = new URL("..", import.meta.url);

/** An error response of the server, or no response at all (`status` 0). */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {{code?: string | null, retryAfter?: number | null}} [details] retryAfter in seconds
   */
  constructor(status, message, details = {}) {
    super(message);
    this.status = status;
    this.code = details.code ?? null;
    this.retryAfter = details.retryAfter ?? null;
  }
}

export const keys = {
  get api() {
    return session.get("key");
  },
  set api(value) {
    session.set("key", value);
  },
  get admin() {
    return session.get("admin");
  },
  set admin(value) {
    session.set("admin", value);
  },
};

/** Stores the key of `#admin=KEY` for this tab and removes it from the address. Returns whether there was one. */
export function takeKeyFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("admin");
  if (given === null) return false;
  keys.admin = given;
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

/** @param {Response} response @returns {Promise<ApiError>} */
async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    error = {}; // for example a proxy's HTML page: only the status is known
  }
  const seconds = Number.parseFloat(response.headers.get("retry-after") ?? "");
  return new ApiError(response.status, error.message ?? `The server answered ${response.status}.`, {
    code: error.code ?? null,
    retryAfter: Number.isFinite(seconds) ? seconds : null,
  });
}

/**
 * Sends one request; the answer is returned with its body unread. Raises ApiError; an abort passes through.
 * @param {string} path without a leading slash
 * @param {{body?: object, admin?: boolean, signal?: AbortSignal, headers?: Record<string, string>}} [options]
 */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = options.admin ? keys.admin : keys.api;
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (options.body) headers.set("Content-Type", "application/json");
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: options.body ? "POST" : "GET",
      headers,
      body: options.body ? JSON.stringify(options.body) : undefined,
      signal: options.signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "No answer came from the server.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** @param {string} path @param {Parameters<typeof call>[1]} [options] */
export async function json(path, options) {
  return (await call(path, options)).json();
}
