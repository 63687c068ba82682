// The gates as a table, with what an operator may do about each, and what needs attention as a list.

import { byId, foreign, h, renew, said } from "./dom.js";
import { count, moment, span } from "./format.js";
import { icon } from "./icons.js";
import { WORDS } from "./judge.js";
import { known } from "./store.js";

const GATES_MAX = 12;
const SAYS = {
  normal: "facts move as they come",
  autonomous: "the other side is away; both go on alone",
  reconciliation: "catching up",
  held: "waits for an operator",
};

/** Draw the table of gates. */
export function gates() {
  const mayAct = known.session.may_act;
  byId("gates-note").textContent = mayAct ? "" : "You may look. Holding and releasing is for operators.";
  if (!known.state.links.length) {
    renew(byId("gates"), h("p", { class: "empty" }, "No link is configured."));
    return;
  }
  const most = known.state.links.length > GATES_MAX;
  const shown = most ? known.state.links.filter((link) => link.mode !== "normal").slice(0, GATES_MAX) : known.state.links;
  if (most) renew(byId("gates-note"), `${count(shown.length)} of ${count(known.state.links.length)} that need somebody; `, h("a", { href: "#links" }, "all links"));
  const head = ["Link", "Mode", "Since", "Why", "Lag", "To come", ...(mayAct ? [""] : [])];
  renew(byId("gates"), h("table", { class: mayAct ? "gates" : "gates looked-at" },
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: ["Lag", "To come"].includes(name) && "number" }, name)))),
    h("tbody", {}, shown.map((link) => row(link, mayAct)))));
}

function row(link, mayAct) {
  const inbound = link.side === "receiver";
  const direction = inbound ? ["pulls from ", foreign(link.zone)] : ["serves ", foreign(link.zone)];
  return h("tr", { data: { key: `${link.link}/${link.side}`, link: link.link, side: link.side } },
    h("td", { class: "what" }, h("strong", {}, foreign(link.link)), h("span", { class: "sub" }, direction)),
    h("td", { class: "mode" }, modePill(link.mode)),
    h("td", { class: "since", data: { label: "since" } }, moment(link.since_unix_ms)),
    h("td", { class: "why" }, why(link)),
    h("td", { class: "number lag", data: { label: "lag" } }, inbound ? lag(link) : "–"),
    h("td", { class: "number left", data: { label: "to come" } }, inbound ? left(link) : "–"),
    mayAct && h("td", { class: "actions" }, gateAction(link)));
}

export function modePill(mode) {
  return h("span", { class: `pill ${mode}`, title: SAYS[mode] }, icon(mode), mode);
}

function why(link) {
  if (link.trouble) return h("span", { class: "text" }, foreign(link.trouble));
  if (link.mode === "normal") return SAYS.normal;
  if (link.mode !== "held") return h("span", { class: "text" }, SAYS[link.mode], h("span", { class: "sub" }, foreign(link.reason)));
  const until = link.held_until_unix_ms ? `, until ${moment(link.held_until_unix_ms)}` : "";
  return h("span", { class: "text" }, foreign(link.reason), h("span", { class: "sub" }, "held by ", foreign(link.held_by), until));
}

/** What a link says of the present; the node gives nothing where nobody can know. */
function lag(link) {
  if (link.to_come === null) return ["unknown", h("span", { class: "sub" }, toldAgo(link))];
  return link.lag === null ? "nothing new" : h("span", { class: `${link.lag}-text` }, span(link.lag_seconds));
}

const left = (link) => (link.to_come === null ? "unknown" : count(link.to_come));

/** Say how old the last word about a link is. */
export function toldAgo(link) {
  if (link.told_unix_ms === null) return "not told since the start";
  return `last told ${span(Math.max(0, known.state.now_unix_ms - link.told_unix_ms) / 1000)} ago`;
}

/** The button that holds or releases a gate. */
export function gateAction(link) {
  const act = link.mode === "held" ? "release" : "hold";
  const word = act === "hold" ? "Hold…" : "Release…";
  const label = `${act} ${link.link} on the ${link.side}'s side`;
  return h("button", { type: "button", "aria-label": label, data: { act, link: link.link, side: link.side, zone: link.zone } }, word);
}

/** Lead from an alarm to what the runbook says of it. */
export function runbook(alert) {
  return h("a", { class: "runbook", href: `/dashboard/docs/runbook#${encodeURIComponent(alert)}` }, "What to do");
}

/** Draw what needs attention, the worst first, and the verdict in the bar. */
export function findings() {
  const { health, findings: found, alerts } = known.state;
  const since = new Map(alerts.map((each) => [`${each.alert}/${each.about}`, each.since_unix_ms]));
  const pill = byId("health");
  pill.className = `pill ${health}`;
  const worst = found.filter((each) => each.level === health).length;
  const words = health === "ok" ? WORDS.ok : `${worst} ${health}${worst > 1 ? "s" : ""}`;
  renew(pill, icon(health), words);
  document.title = `${health === "ok" ? "" : `(${found.length}) `}${known.state.zone} · BSFG`;
  byId("findings-count").textContent = found.length ? String(found.length) : "";
  if (!found.length) {
    renew(byId("findings"), h("p", { class: "empty" }, icon("ok"), "Nothing. Buffers, links and certificates are as they should be."));
    return;
  }
  renew(byId("findings"), found.map((each) => {
    const from = since.get(`${each.alert}/${each.about}`);
    return h("div", { class: "finding", data: { key: `${each.alert}/${each.about}`, finding: each.alert } },
      h("span", { class: `${each.level}-text` }, icon(each.level)),
      h("strong", {}, `${WORDS[each.level]}: ${each.alert.replaceAll("_", " ")}`),
      h("p", {}, said(each.says), from ? ` (since ${moment(from)})` : "", " ", runbook(each.alert)));
  }));
}
