// What happened since the node started: alarms raised and cleared, gates that moved; to search, the newest first.

import { get } from "./api.js";
import { byId, foreign, h, renew, said, table } from "./dom.js";
import { count, moment } from "./format.js";
import { icon } from "./icons.js";
import { runbook } from "./gates.js";

const SHOWN_MAX = 300;

let rows = null;

/** Search as somebody types, and let him ask again. */
export function setUpHistory() {
  ["history-text", "history-what"].forEach((id) => byId(id).addEventListener("input", draw));
  byId("history-renew").addEventListener("click", () => happened(true));
}

/** Load the history when it is first looked at, and when it is asked for. */
export async function happened(anew = false) {
  if (rows && !anew) return;
  rows ??= [];
  try {
    rows = (await get("history")).rows;
    draw();
  } catch (problem) {
    rows = null;
    renew(byId("history"), h("p", { class: "empty" }, foreign(`The history could not be read: ${problem.message}`)));
  }
}

function draw() {
  const [text, what] = [byId("history-text").value.trim().toLowerCase(), byId("history-what").value];
  const wanted = rows.filter((each) => (!what || each.what === what) &&
    `${each.alert} ${each.alert.replaceAll("_", " ")} ${each.about} ${each.text}`.toLowerCase().includes(text));
  if (!wanted.length) return renew(byId("history"), h("p", { class: "empty" }, rows.length ? "Nothing fits." : "Nothing happened since the node started."));
  renew(byId("history"), table(
    h("thead", {}, h("tr", {}, ["When", "What", "About", "Says"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, wanted.slice(0, SHOWN_MAX).map(row))),
  wanted.length > SHOWN_MAX ? h("p", { class: "empty" }, `${count(wanted.length - SHOWN_MAX)} older ones fit, too: search for what you need.`) : null);
}

function row(each) {
  const level = each.what === "cleared" ? "ok" : each.severity || "";
  const name = each.alert.replaceAll("_", " ");
  return h("tr", { data: { happened: each.what } },
    h("td", { class: "time" }, moment(each.at_unix_ms)),
    h("td", {}, h("span", { class: `pill ${level}` }, level ? icon(level) : null, ["moved", "happened"].includes(each.what) ? name : `${name} ${each.what}`),
      each.what === "moved" ? null : runbook(each.alert)),
    h("td", {}, foreign(each.about)),
    h("td", {}, h("span", { class: "text" }, said(each.text))));
}
