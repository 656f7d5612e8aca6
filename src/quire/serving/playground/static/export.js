// Conversations as files: Markdown to read, JSON to import again.

/** @typedef {import("./conversation.js").Conversation} Conversation */

/** The shown branch as Markdown. @param {Conversation} conversation */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  for (const turn of conversation.path()) {
    if (turn.role === "user") parts.push("## You", turn.text);
    else if (turn.role === "tool") parts.push("## Tool results", ...turn.results.map((each) => fenced(`${each.name}: ${each.content}`)));
    else parts.push("## Assistant", ...answerParts(turn.answers[turn.chosen]));
  }
  return `${parts.join("\n\n")}\n`;
}

/** @param {import("./conversation.js").Answer} answer */
function answerParts({ text, toolCalls = [] }) {
  const calls = toolCalls.map((call) => fenced(`${call.name}(${call.arguments})`));
  return text ? [text, ...calls] : calls;
}

/** Wraps a text in a code fence that is longer than any fence inside. @param {string} text */
function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

/** All branches, as `Conversations.import` reads them. @param {Conversation[]} conversations */
export function toJson(conversations) {
  return JSON.stringify({ format: "quire-conversations", version: 1, conversations }, null, 2);
}

/** Offers a text as a file download. @param {string} name @param {string} text @param {string} type */
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Converts a title to a file name. @param {string} title @param {string} ending */
export function fileName(title, ending) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  return `${name || "conversation"}.${ending}`;
}
