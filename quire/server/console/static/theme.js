// Runs before the first paint, so that a chosen theme does not flash. Unset follows the system.
"use strict";
(() => {
  try {
    const chosen = localStorage.getItem("quire.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // storage is switched off: the system's theme it is
  }
})();
