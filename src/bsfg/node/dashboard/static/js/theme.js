// Light, dark, or as the system: the choice is kept in this browser.

import { byId, renew } from "./dom.js";
import { icon } from "./icons.js";

const KEY = "bsfg-theme";
const CHOICES = ["system", "light", "dark"];
const SIGNS = { system: "half", light: "sun", dark: "moon" };
const SAYS = { system: "Colours: as the system", light: "Colours: light", dark: "Colours: dark" };

/** Apply the kept choice, and let the button change it. */
export function theme() {
  apply(localStorage.getItem(KEY) ?? "system");
  byId("theme").addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(localStorage.getItem(KEY) ?? "system") + 1) % CHOICES.length];
    localStorage.setItem(KEY, next);
    apply(next);
  });
}

function apply(choice) {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  const button = byId("theme");
  button.setAttribute("aria-label", SAYS[choice]);
  button.title = SAYS[choice];
  renew(button, icon(SIGNS[choice]));
}
