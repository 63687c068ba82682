// Signs with a shape of their own, so that no meaning depends on a colour.

import { s } from "./dom.js";

const PATHS = {
  ok: ["M5 12.5l4.5 4.5L19 7.5"],
  warning: ["M12 4L2.8 20h18.4z", "M12 10v4.5", "M12 17.4v.2"],
  alert: ["M8 2.8h8l5.2 5.2v8L16 21.2H8L2.8 16V8z", "M12 7.5v5.5", "M12 16.4v.2"],
  normal: ["M5 12.5l4.5 4.5L19 7.5"],
  autonomous: ["M3 12h5.5", "M15.5 12H21", "M9 17l6-10"],
  reconciliation: ["M5 11a7.2 7.2 0 0 1 12.6-3.6L20 10", "M20 4.5V10h-5.5", "M19 13a7.2 7.2 0 0 1-12.6 3.6L4 14", "M4 19.5V14h5.5"],
  held: ["M8.5 5.5v13", "M15.5 5.5v13"],
  sun: ["M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z", "M12 2v2.5M12 19.5V22M2 12h2.5M19.5 12H22M5 5l1.7 1.7M17.3 17.3L19 19M5 19l1.7-1.7M17.3 6.7L19 5"],
  moon: ["M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z"],
  half: ["M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z", "M12 3v18", "M12 8h7.5M12 12h9M12 16h7.5"],
};

/** Give a sign as its own small picture; the words beside it say what it means. */
export function icon(name) {
  return s("svg", { class: "icon", viewBox: "0 0 24 24", width: 20, height: 20, "aria-hidden": "true" }, signs(name));
}

/** Give the lines of a sign, to be put into another picture. */
export function signs(name, attributes = {}) {
  return (PATHS[name] ?? PATHS.alert).map((d) => s("path", { d, ...attributes }));
}
