// Data that survives a reload. If storage is off or full, the page works without it.

const PREFIX = "quire.";

/** @param {() => Storage} pick */
function wrapStorage(pick) {
  return {
    /** @param {string} name @returns {string | null} */
    get(name) {
      try {
        return pick().getItem(PREFIX + name);
      } catch {
        return null;
      }
    },
    /** Returns whether it was kept. @param {string} name @param {string | null} value */
    set(name, value) {
      try {
        if (value === null) pick().removeItem(PREFIX + name);
        else pick().setItem(PREFIX + name, value);
        return true;
      } catch {
        return false;
      }
    },
    /** The JSON value under a name; null when there is none or it cannot be read. @param {string} name */
    getJson(name) {
      try {
        return JSON.parse(this.get(name) ?? "null");
      } catch {
        return null;
      }
    },
    /** The names of everything kept. @returns {string[]} */
    names() {
      try {
        return Object.keys(pick()).flatMap((key) => this.nameOf(key) ?? []);
      } catch {
        return [];
      }
    },
    /** The name behind a key of the browser's storage; null for a key of another page. @param {string} key */
    nameOf: (key) => (key.startsWith(PREFIX) ? key.slice(PREFIX.length) : null),
  };
}

/** Local storage: settings and conversations. */
export const local = wrapStorage(() => localStorage);
/** Session storage, until the tab is closed: keys, and which conversation is open. */
export const session = wrapStorage(() => sessionStorage);
