// The audit trail, for operators: who did what, from where, how it ended and why.

import { get } from "./api.js";
import { byId, foreign, h, renew, table } from "./dom.js";
import { count, moment } from "./format.js";
import { icon } from "./icons.js";
import { known } from "./store.js";

const LEVELS = { refused: "warning", failed: "warning" };

let loaded = false;

/** Show the tab to those who may see it, and let them ask again. */
export function setUpTrail() {
  byId("trail-tab").hidden = !known.session.may_act;
  byId("trail-form").addEventListener("submit", (event) => {
    event.preventDefault();
    trail(true);
  });
  ["trail-action", "trail-outcome", "trail-since"].forEach((id) => byId(id).addEventListener("change", () => trail(true)));
}

/** Load the trail when it is first looked at, and when it is asked for. */
export async function trail(anew = false) {
  if ((loaded && !anew) || !known.session.may_act) return;
  loaded = true;
  try {
    const query = new URLSearchParams();
    ["identity", "action", "outcome"].forEach((name) => query.set(name, byId(`trail-${name}`).value.trim()));
    const hours = Number(byId("trail-since").value);
    if (hours) query.set("since_unix_ms", String(known.state.now_unix_ms - hours * 3_600_000));
    drawTrail(await get(`trail?${query}`));
  } catch (problem) {
    loaded = false;
    renew(byId("trail"), h("p", { class: "empty" }, foreign(`The trail could not be read: ${problem.message}`)));
  }
}

function drawTrail({ total, rows, actions }) {
  const choice = byId("trail-action");
  if (choice.options.length === 1) choice.append(...actions.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));
  if (!rows.length) return renew(byId("trail"), h("p", { class: "empty" }, total ? "No record fits." : "Nothing is recorded yet."));
  const older = rows.at(-1).number - 1;
  renew(byId("trail"), table(
    h("thead", {}, h("tr", {}, ["Record", "When", "Who", "What", "Why"].map((name) =>
      h("th", { scope: "col", class: name === "Record" && "number" }, name)))),
    h("tbody", {}, rows.map(row))),
  older > 0 && total ? h("p", { class: "empty" }, `${count(older)} older ones are in the download, as far as they are kept.`) : null);
}

function row(each) {
  const { details } = each;
  const level = LEVELS[each.outcome];
  const from = Array.isArray(details.addresses) && details.addresses.length ? details.addresses.join(", ") : each.address;
  const name = details.name && details.name !== each.identity ? details.name : null;
  return h("tr", { data: { trail: each.action, number: each.number } },
    h("td", { class: "number" }, String(each.number)),
    h("td", { class: "time" }, moment(each.at_unix_ms)),
    h("td", {}, h("strong", {}, foreign(each.identity)), name ? h("span", { class: "sub" }, foreign(name)) : null,
      from ? h("span", { class: "sub" }, foreign(from)) : null),
    h("td", {}, h("span", { class: `pill ${level ?? ""}` }, level ? icon(level) : null, foreign(each.action.replaceAll("_", " ")),
      details.count ? h("span", { class: "times" }, `×${count(details.count)}`) : null),
      each.about ? h("span", { class: "sub" }, foreign(each.about)) : null),
    h("td", {}, h("span", { class: "text" }, foreign(each.reason || "–")),
      each.rule ? h("span", { class: "sub" }, `${each.outcome}: `, foreign(each.rule)) : null));
}
