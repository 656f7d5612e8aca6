// Runs before the first paint, so that a dark page never flashes white. Announces changes as a "themechange" event.
(() => {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  const chosen = () => {
    try {
      return localStorage.getItem("quire.theme");
    } catch {
      return null;
    }
  };

  const apply = () => {
    root.dataset.theme = chosen() ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-toggle]")) return;
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("quire.theme", next);
    } catch {
      root.dataset.theme = next; // storage is off: the choice holds until the page is left
      dispatchEvent(new Event("themechange"));
      return;
    }
    apply();
  });
})();
