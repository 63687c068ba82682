// All links of the zone as one table to sort and to search: with two it is short, with two hundred it is the way in.

import { byId, foreign, h, renew, table } from "./dom.js";
import { count, moment, span } from "./format.js";
import { gateAction, modePill, toldAgo } from "./gates.js";
import { known } from "./store.js";

const SHOWN_MAX = 400;
const WORST = ["held", "autonomous", "reconciliation", "normal"];
const COLUMNS = [
  ["Link", (link) => link.link],
  ["Zone", (link) => link.zone],
  ["Way", (link) => (link.side === "receiver" ? "pulls" : "serves")],
  ["Mode", (link) => WORST.indexOf(link.mode)],
  ["Since", (link) => -link.since_unix_ms],
  ["Lag", (link) => -(link.lag_seconds ?? (link.side === "receiver" && link.to_come === null ? Infinity : -1))],
  ["To come", (link) => -(left(link) ?? -1)],
  ["Moved by", (link) => link.lease ?? "\uffff"],
];

const sorted = { by: 3, turned: false };

/** Search as somebody types, and sort by the column whose name is pressed. */
export function setUpLinks() {
  ["links-text", "links-mode", "links-way"].forEach((id) => byId(id).addEventListener("input", links));
  byId("links").addEventListener("click", (event) => {
    const button = event.target.closest("[data-sort]");
    if (!button) return;
    const by = Number(button.dataset.sort);
    sorted.turned = sorted.by === by && !sorted.turned;
    sorted.by = by;
    links();
  });
}

/** What is left to move over a link: to come where we pull, unconfirmed where we serve. */
function left(link) {
  if (link.side === "receiver") return link.to_come;
  const prefix = `${link.zone.toLowerCase()}.`;
  return unconfirmed().get(prefix) ?? null;
}

let counted = { state: null, sums: new Map() };

/** Add up what each zone has not confirmed, once for every state. */
function unconfirmed() {
  if (counted.state !== known.state) {
    counted = { state: known.state, sums: new Map() };
    for (const { name, backlog } of known.state.consumers) {
      const prefix = `${name.split(".")[0]}.`;
      counted.sums.set(prefix, (counted.sums.get(prefix) ?? 0) + backlog);
    }
  }
  return counted.sums;
}

/** Draw the table, and how many links there are of each mode. */
export function links() {
  if (!known.state) return;
  const { links: all } = known.state;
  const modes = WORST.map((mode) => [mode, all.filter((each) => each.mode === mode).length]).filter(([, number]) => number);
  renew(byId("links-count"), modes.map(([mode, number]) => h("span", { class: "tally" }, modePill(mode), ` ${count(number)} `)));
  const wanted = all.filter(fits).sort(order);
  if (!wanted.length) return renew(byId("links"), h("p", { class: "empty" }, all.length ? "No link fits." : "No link is configured."));
  const mayAct = known.session.may_act;
  renew(byId("links"), table(
    h("thead", {}, h("tr", {}, COLUMNS.map(head), mayAct && h("th", { scope: "col" }))),
    h("tbody", {}, wanted.slice(0, SHOWN_MAX).map((link) => row(link, mayAct)))),
  wanted.length > SHOWN_MAX ? h("p", { class: "empty" }, `${count(wanted.length - SHOWN_MAX)} more: search for what you need.`) : null);
}

function fits(link) {
  const [text, mode, way] = ["links-text", "links-mode", "links-way"].map((id) => byId(id).value);
  const said = `${link.link} ${link.zone} ${link.reason ?? ""} ${link.trouble ?? ""} ${link.lease ?? ""}`.toLowerCase();
  return (!mode || link.mode === mode) && (!way || link.side === way) && said.includes(text.trim().toLowerCase());
}

function order(one, other) {
  const [, key] = COLUMNS[sorted.by];
  const [a, b] = [key(one), key(other)];
  const first = a < b ? -1 : a > b ? 1 : one.link.localeCompare(other.link);
  return sorted.turned ? -first : first;
}

function head([name], at) {
  const how = sorted.by !== at ? "none" : sorted.turned ? "descending" : "ascending";
  return h("th", { scope: "col", "aria-sort": how, class: ["Since", "Moved by"].includes(name) ? "spare" : ["Lag", "To come"].includes(name) && "number" },
    h("button", { type: "button", class: "sort", data: { sort: at } }, name));
}

function row(link, mayAct) {
  const inbound = link.side === "receiver";
  const why = link.trouble ?? (link.mode === "normal" ? "" : link.reason);
  const lag = !inbound ? "–" : link.to_come === null ? ["unknown", h("span", { class: "sub" }, toldAgo(link))]
    : link.lag === null ? "nothing new" : h("span", { class: `${link.lag}-text` }, span(link.lag_seconds));
  const rest = left(link);
  return h("tr", { data: { key: `${link.link}/${link.side}`, link: link.link, side: link.side } },
    h("td", {}, h("strong", {}, foreign(link.link)), why ? h("span", { class: "sub" }, foreign(why)) : null),
    h("td", {}, foreign(link.zone)),
    h("td", {}, inbound ? "pulls" : "serves"),
    h("td", {}, modePill(link.mode)),
    h("td", { class: "time spare" }, moment(link.since_unix_ms)),
    h("td", { class: "number" }, lag),
    h("td", { class: "number" }, rest === null ? (inbound ? "unknown" : "–") : count(rest)),
    h("td", { class: "spare" }, inbound ? foreign(link.lease ?? `nobody (${link.engine})`) : "–"),
    mayAct && h("td", { class: "actions" }, gateAction(link)));
}
