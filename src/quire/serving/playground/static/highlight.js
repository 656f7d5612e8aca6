// Colours for code: comments, strings, numbers and the words that most languages share. A guess by shape, not a parser.

import { el } from "./dom.js";

const WORDS =
  "abstract and as assert async await begin bool boolean break byte case catch char class const constexpr continue def default defer del delete do double elif else elsif end enum except export extends false False final finally float fn for foreach from func function global go goto if impl implements import in instanceof int interface is lambda let local long loop match mod module mut namespace new nil None nonlocal not null nullptr of or package pass private protected pub public raise ref return self short signed sizeof static str string struct super switch template then this throw throws trait true True try type typeof undefined union unless unsigned until use using val var virtual void volatile when where while with yield";
const SQL = "select from where insert into values update set delete create table drop alter join left right inner outer on group by order having limit as and or not null primary key distinct union";
const KEYWORDS = new Set(WORDS.split(" "));
const SQL_KEYWORDS = new Set(SQL.split(" "));
const HASH_COMMENTS = new Set(["python", "py", "bash", "sh", "shell", "zsh", "console", "ruby", "rb", "yaml", "yml", "toml", "r", "perl", "makefile", "dockerfile", "ini", "conf"]);
const DASH_COMMENTS = new Set(["sql", "lua", "haskell", "hs", "elm", "ada"]);
const MARKUP = new Set(["html", "xml", "svg", "markdown", "md", "text", "txt", "diff", "csv"]);
const MOST_HIGHLIGHTED = 50_000; // characters; longer code is not highlighted

const STRING = /"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\[\s\S]|[^`\\])*`?/.source;
const NUMBER = /\b0[xX][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b/.source;
const WORD = /[A-Za-z_$][\w$]*/.source;

/** @param {string} language */
function comments(language) {
  if (HASH_COMMENTS.has(language)) return "#[^\\n]*";
  if (DASH_COMMENTS.has(language)) return "--[^\\n]*";
  return "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
}

/** Splits code into texts and coloured spans. Their concatenation is the code. @param {string} code @param {string} language @returns {(Node | string)[]} */
export function highlight(code, language) {
  const name = language.toLowerCase();
  if (name === "" || MARKUP.has(name) || code.length > MOST_HIGHLIGHTED) return [code];
  const pattern = new RegExp(`(${comments(name)})|(${STRING})|(${NUMBER})|(${WORD})`, "g");
  const parts = [];
  let plainFrom = 0;
  for (const found of code.matchAll(pattern)) {
    const kind = kindOf(found, name, code);
    if (kind === null) continue;
    if (found.index > plainFrom) parts.push(code.slice(plainFrom, found.index));
    parts.push(el("span", { class: `code-${kind}`, text: found[0] }));
    plainFrom = found.index + found[0].length;
  }
  if (plainFrom < code.length) parts.push(code.slice(plainFrom));
  return parts;
}

/** @param {RegExpMatchArray} found @param {string} language @param {string} code @returns {string | null} null: plain */
function kindOf(found, language, code) {
  const [word, comment, string, number] = found;
  if (comment !== undefined) return "comment";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  const isKeyword = language === "sql" ? SQL_KEYWORDS.has(word.toLowerCase()) : KEYWORDS.has(word);
  if (isKeyword && language !== "json") return "keyword";
  return code[found.index + word.length] === "(" ? "call" : null;
}
