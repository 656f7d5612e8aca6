// What outlives a reload. Storage may be off or full: then the page works on and forgets.

const PREFIX = "quire.";

/** @param {Storage} storage @param {string} name */
function read(storage, name) {
  try {
    return storage.getItem(PREFIX + name);
  } catch {
    return null;
  }
}

/** @param {() => Storage} pick */
function wrapStorage(pick) {
  return {
    /** @param {string} name @returns {string | null} */
    get: (name) => read(pick(), name),
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
        return JSON.parse(read(pick(), name) ?? "null");
      } catch {
        return null;
      }
    },
  };
}

/** Kept on this machine: settings and the conversation. */
export const local = wrapStorage(() => localStorage);
/** Kept until the tab is closed: keys. */
export const session = wrapStorage(() => sessionStorage);
