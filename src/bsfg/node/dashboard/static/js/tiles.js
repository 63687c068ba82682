// The tiles: the six numbers that an operator looks for first.

import { byId, foreign, h, renew, s } from "./dom.js";
import { count, counted, hours, lifetime, rate, span, whole } from "./format.js";
import { toldAgo } from "./gates.js";
import { icon } from "./icons.js";
import { autonomyLevel, backlogLevel, certificateLevel } from "./judge.js";
import { known, rates, seriesOf, summed } from "./store.js";

/** Draw all tiles. */
export function tiles() {
  renew(byId("tiles"), [autonomy(), lag(), throughput(), unconfirmed(), aside(), certificate()]);
}

function tile(key, title, level, value, sub, extra = null) {
  const sign = level === "none" ? null : icon(level);
  return h("div", { class: `tile ${level}`, data: { key, tile: key } },
    h("h3", {}, title, sign && h("span", { class: `${level}-text` }, sign)),
    h("p", { class: "value" }, value),
    h("div", {}, h("p", { class: "sub" }, sub), extra));
}

function autonomy() {
  const growing = known.state.buffers.filter((each) => each.buffer === "store" && each.hours_left !== null);
  const first = growing.sort((a, b) => a.hours_left - b.hours_left)[0];
  if (!first && known.state.buffers.some((each) => each.buffer === "store" && each.facts_per_second === null)) {
    return tile("autonomy", "Autonomy left", "none", "unknown", "the node has just started");
  }
  if (!first) return tile("autonomy", "Autonomy left", "ok", "no limit", "no store buffer grew in the last minute");
  const [, value, unit] = hours(first.hours_left).match(/(.*) (.*)/);
  const sub = ["until ", foreign(first.stream), " is full at the rate of the last minute, if nobody pulls"];
  return tile("autonomy", "Autonomy left", autonomyLevel(first.hours_left, known.state.links), [value, " ", h("small", {}, unit)], sub);
}

/** The worst lag, judged by the number that is shown; a link of which nothing is known is never a good one. */
function lag() {
  const title = "Replication lag";
  const links = known.state.links.filter((each) => each.side === "receiver");
  if (!links.length) return tile("lag", title, "none", "–", "this zone pulls from nobody");
  const [unknown] = links.filter((each) => each.to_come === null);
  const worst = links.filter((each) => each.lag !== null).sort((a, b) => b.lag_seconds - a.lag_seconds)[0];
  const value = worst ? span(worst.lag_seconds) : unknown ? "unknown" : "–";
  const sub = unknown ? [foreign(unknown.link), worst ? " is unknown, " : ", ", toldAgo(unknown)]
    : worst ? ["of what came last over ", foreign(worst.link)] : "nothing new in the last minute";
  const level = worst?.lag === "alert" ? "alert" : unknown ? "warning" : (worst?.lag ?? "ok");
  const curves = worst ? seriesOf("lag").filter(({ of }) => of[0] === worst.link).map(({ values }) => values) : [];
  return tile("lag", title, level, value, sub, worst && spark(curves));
}

function throughput() {
  const sum = (buffer) => {
    const there = known.state.buffers.filter((each) => each.buffer === buffer).map((each) => each.facts_per_second);
    return there.includes(null) ? "unknown" : rate(there.reduce((total, each) => total + each, 0));
  };
  const curve = (buffer) => summed(seriesOf("end").filter(({ of }) => of[1] === buffer).map(({ values }) => rates(values)));
  const sub = `produced here in the last minute; ${sum("forward")} received`;
  return tile("throughput", "Throughput", "none", sum("store"), sub, spark([curve("store"), curve("forward")]));
}

function unconfirmed() {
  const waiting = known.state.consumers.filter((each) => each.required && each.retired_reason === null);
  const most = waiting.sort((a, b) => b.backlog - a.backlog)[0];
  const oldest = known.state.buffers.filter((each) => each.oldest_unconfirmed_seconds !== null)
    .sort((a, b) => b.oldest_unconfirmed_seconds - a.oldest_unconfirmed_seconds)[0];
  const near = known.state.buffers.some((each) => each.expiry_near);
  const level = near ? "alert" : backlogLevel(most?.backlog ?? 0);
  const sub = oldest ? whole(`the oldest waits for ${age(oldest)}`) : "everything is confirmed";
  const values = summed(seriesOf("backlog").map(({ values }) => values));
  return tile("unconfirmed", "Unconfirmed", level, count(most?.backlog ?? 0), sub, spark([values]));
}

function age(buffer) {
  const of = buffer.max_age_seconds === null ? "" : ` of ${span(buffer.max_age_seconds)}`;
  return `${span(buffer.oldest_unconfirmed_seconds)}${of}`;
}

function aside() {
  const sum = (name) => known.state.buffers.reduce((total, each) => total + each[name], 0);
  const quarantined = sum("quarantined");
  const gaps = sum("gaps");
  return tile("quarantine", "In quarantine", quarantined ? "alert" : "ok", count(quarantined), counted(gaps, "gap record"));
}

function certificate() {
  const own = known.state.certificates.filter((each) => each.use !== "caller");
  const first = own.sort((a, b) => a.days_left - b.days_left)[0];
  if (!first) return tile("certificate", "Certificate", "none", "–", "without TLS: for trials on one machine");
  const counts = first.expiry === "ok" || first.expiry === "warning";
  const sub = [counts && "left for ", foreign(first.name)];
  return tile("certificate", "Certificate", certificateLevel(first), lifetime(first, known.state.now_unix_ms), sub);
}

/** Draw the last ten minutes of a few series, without axes. */
function spark(lists) {
  const [width, height] = [200, 26];
  const points = Math.max(12, Math.min(120, known.times.length));
  const shown = lists.map((values) => values.slice(-points));
  const top = Math.max(...shown.flat().filter((value) => value !== null), 0);
  if (!top) return null;
  const curve = (values) => {
    const there = values.map((value, index) => [value, index]).filter(([value]) => value !== null);
    const x = (index) => width - (values.length - 1 - index) * (width / (points - 1));
    return there.map(([value, index], at) => `${at ? "L" : "M"}${x(index).toFixed(1)} ${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`).join("");
  };
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    shown.map((values, index) => s("path", { class: `curve s${index}`, d: curve(values), "vector-effect": "non-scaling-stroke" })));
}
